//! Tracing as a part of the server: a task, and the way to end it.

use crate::clock::Clock;
use crate::metrics::Metrics;
use crate::trace::{Settings, Tracer, exporter};
use anyhow::Context as _;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// The task that sends spans.
pub(super) struct Exporting {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

/// Starts tracing if there is a collector to send to.
pub(super) fn start(
    settings: &Settings,
    clock: Clock,
    metrics: &Metrics,
) -> anyhow::Result<(Option<Tracer>, Option<Exporting>)> {
    let Some(endpoint) = &settings.endpoint else { return Ok((None, None)) };
    let (tracer, recorded) = Tracer::new(settings, clock, metrics.spans());
    let exporter = exporter(settings, endpoint, recorded)
        .with_context(|| format!("cannot send spans to {endpoint} (key tracing.endpoint)"))?;
    let (stop, stopped) = oneshot::channel();
    let task = tokio::spawn(exporter.run(stopped));
    tracing::info!(endpoint, service_name = settings.service_name, "tracing");
    Ok((Some(tracer), Some(Exporting { stop, task })))
}

impl Exporting {
    /// Has what is left sent, for so long at most.
    pub(super) async fn end(self, most: Duration) {
        let Self { stop, task } = self;
        // If it has ended already there is nothing left.
        let _ = stop.send(());
        let abort = task.abort_handle();
        if tokio::time::timeout(most, task).await.is_err() {
            abort.abort();
            tracing::warn!("the collector did not take the last spans in time");
        }
    }
}
