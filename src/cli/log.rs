//! Where log lines go: standard error, for people or as JSON.

use crate::config::{Log, LogFormat};
use std::io::{self, IsTerminal};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt, registry};

/// Starts logging for the rest of the process. A second start changes nothing.
pub(super) fn start(log: &Log) {
    // The configuration has refused what is not a filter.
    let filter: Targets = log.level.parse().unwrap_or_default();
    let lines = fmt::layer().with_writer(io::stderr);
    let layer = match log.format {
        LogFormat::Human => lines.with_ansi(io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_current_span(true).with_span_list(false).boxed(),
    };
    let _ = registry().with(layer.with_filter(filter)).try_init();
}
