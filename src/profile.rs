//! What a person wants to know of a model before serving it: how fast it is, what it needs, and where larger batches end.
//!
//! [`measure`] loads and measures a model as the server does, always anew, and keeps what it found for the server's next
//! start; `Profile::new` makes numbers of it, with the scheduler's own
//! predictions; the rest shows them.

mod compare;
mod svg;
mod text;

pub use compare::{Comparison, compare};

use crate::clock::Clock;
use crate::config::Config;
use crate::memory::{ArenaKind, Device};
use crate::model::ModelSpec;
use crate::repository::devices::Devices;
use crate::repository::load::{Loader, observations};
use crate::repository::{Candidate, Layout};
use crate::runtime::{Calibration, Runtime, Session, self_test};
use crate::scheduler::Forecast;
use crate::server;
use crate::units::{ByteSize, Rows};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::mpsc;

/// The most rows that are looked at when memory alone bounds a batch.
const MOST_ROWS: Rows = 1 << 20;

/// A measured model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Profile {
    /// Its name.
    pub model: String,
    /// Its version.
    pub version: u64,
    /// The axis of every input and output that is the batch.
    pub batch_axis: Option<usize>,
    /// Why there is none.
    pub unbatched_reason: Option<String>,
    /// Sessions, each with a thread of its own.
    pub instances: usize,
    /// Threads that compute one run.
    pub threads: usize,
    /// Bytes of the model's file.
    pub file_bytes: u64,
    /// Bytes of the ledger that the weights of all instances hold. What ONNX Runtime keeps elsewhere is not in it.
    pub weights_bytes: u64,
    /// The non-batch dimensions of the rows that were measured, over all inputs.
    pub dims: Vec<usize>,
    /// Each size that was measured, ascending.
    pub rows: Vec<Line>,
    /// Why there are no larger ones, if a run ended it.
    pub cut_short: Option<String>,
    /// The smallest size whose rows per second are about the best; `None`: they still rise, or too little is known.
    pub knee: Option<Rows>,
    /// What "about" means, as a fraction.
    pub knee_tolerance: f64,
    /// The largest batch that the server would form.
    pub max_batch_size: Rows,
    /// Bytes that runs may use now.
    pub free_bytes: u64,
    /// The most rows whose predicted bytes fit them; at most 1048576.
    pub fits_rows: Rows,
    /// Sizes that a GPU plays back from a recording.
    pub recorded: Vec<Rows>,
    /// Why there are no more of them.
    pub unrecorded: Option<String>,
    /// How rows of different lengths share a batch; `None`: only equal shapes do.
    pub padding: Option<Padding>,
}

/// How rows of different lengths share a batch.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Padding {
    /// Each dimension that is padded, with the sizes that it is padded to.
    pub dims: BTreeMap<String, Vec<usize>>,
    /// How much answers differ at most, as a part of the largest value of their output, as far as runs have shown.
    pub difference: f64,
}

/// One size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    /// Rows of the batch.
    pub rows: Rows,
    /// Whether the predictions are made from this size: then there is no error to see.
    pub fitted: bool,
    /// Bytes of run memory that the scheduler predicts when it knows the fitted sizes only.
    pub predicted_bytes: u64,
    /// Bytes of run memory that were needed.
    pub observed_bytes: u64,
    /// Predicted over observed, less one, in percent.
    pub error_percent: f64,
    /// How long an instance needs while all are at work.
    pub seconds: f64,
    /// Of that, what a GPU needs, copies of outputs included, as it times that itself; absent on a CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_seconds: Option<f64>,
    /// Rows per second of all instances together.
    pub rows_per_second: f64,
}

/// Bytes at the time of the profile.
#[derive(Clone, Copy, Debug)]
struct Memory {
    file: ByteSize,
    weights: ByteSize,
    free: ByteSize,
}

/// Loads and measures a model; `sizes` are the batch sizes, ascending, or empty: the ladder that the server would choose.
///
/// # Errors
/// Why it cannot be loaded or measured, in words for the operator.
pub fn measure(config: &Config, candidate: &Candidate, sizes: &[Rows]) -> Result<Profile, String> {
    let loader = loader(config)?;
    let device = loader.devices.of(&candidate.settings)?.clone();
    let mut measured = loader.measure(candidate)?;
    loader.keep(candidate, &measured);
    if !sizes.is_empty() {
        loader.measure_sizes(&mut measured, sizes).map_err(|error| error.to_string())?;
    }
    let (recorded, unrecorded) = loader.record(candidate, &mut measured)?;
    let calibration = measured
        .calibration
        .map_err(|error| format!("it does not run on synthetic rows ({error}); [warmup] in model.toml can help"))?;
    let file = ByteSize(std::fs::metadata(&candidate.file).map_or(0, |file| file.len()));
    let memory = Memory { file, weights: weights(&device), free: device.sample(loader.clock.now()).budget };
    let mut profile = Profile::new(&measured.spec, measured.layout, &calibration, memory);
    for line in &mut profile.rows {
        line.device_seconds = device_time(&measured.sessions, line.rows).map(|time| time.as_secs_f64());
    }
    let padding = measured.spec.padding.as_ref().zip(measured.difference).map(|(plan, difference)| {
        let dims = plan.dims.iter().map(|dim| (dim.name.clone(), dim.lengths.clone())).collect();
        Padding { dims, difference }
    });
    Ok(Profile { recorded, unrecorded, padding, ..profile })
}

/// What loads a model of which nothing is served.
fn loader(config: &Config) -> Result<Loader, String> {
    let runtime = Runtime::load(config.runtime.library.as_deref()).map_err(|error| error.to_string())?;
    self_test(&runtime)?;
    // No worker reports.
    let (completions, _) = mpsc::channel(1);
    let (devices, clock, ids) = (Devices::open(config)?, Clock::start(), Default::default());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Loader { runtime, devices, clock, completions, cores, ids, store: server::store(config) })
}

/// How long the device needs for so many rows: in the slowest session, or in that which alone has recorded them.
fn device_time(sessions: &[Session], rows: Rows) -> Option<Duration> {
    let recorded = sessions.first().filter(|session| session.recorded().contains(&rows));
    match recorded {
        Some(session) => session.device_time(rows),
        None => sessions.iter().filter_map(|session| session.device_time(rows)).max(),
    }
}

/// Bytes that the weights of all sessions hold.
fn weights(device: &Device) -> ByteSize {
    let arenas = device.stats().arenas;
    ByteSize(arenas.iter().filter(|arena| arena.kind == ArenaKind::Weights).map(|arena| arena.reserved.0).sum())
}

impl Profile {
    fn new(spec: &ModelSpec, layout: Layout, calibration: &Calibration, memory: Memory) -> Self {
        let tolerance = spec.settings.knee_tolerance;
        let runs = observations(calibration);
        let fitted: Vec<_> = runs.first().into_iter().chain(runs.get(runs.len() / 2)).copied().collect();
        let line = Forecast::new(&calibration.ladder, tolerance, &fitted);
        let all = Forecast::new(&calibration.ladder, tolerance, &runs);
        let rows = runs.iter().map(|run| {
            let (predicted, observed) = (line.bytes(run.rows).0, run.bytes.0);
            let seconds = run.duration.as_secs_f64();
            Line {
                rows: run.rows,
                fitted: fitted.iter().any(|fitted| fitted.rows == run.rows),
                predicted_bytes: predicted,
                observed_bytes: observed,
                error_percent: 100.0 * (predicted as f64 - observed as f64) / (observed as f64).max(1.0),
                seconds,
                device_seconds: None,
                rows_per_second: layout.instances as f64 * f64::from(run.rows) / seconds.max(1e-9),
            }
        });
        let most = if spec.batch_axis.is_none() { 1 } else { MOST_ROWS };
        Self {
            model: spec.name.clone(),
            version: spec.version,
            batch_axis: spec.batch_axis,
            unbatched_reason: spec.unbatched_reason.clone(),
            instances: layout.instances,
            threads: layout.threads,
            file_bytes: memory.file.0,
            weights_bytes: memory.weights.0,
            dims: calibration.class_dims.clone(),
            rows: rows.collect(),
            cut_short: calibration.cut_short.clone(),
            knee: all.knee(),
            knee_tolerance: tolerance,
            max_batch_size: calibration.ladder.last().copied().unwrap_or(1),
            free_bytes: memory.free.0,
            fits_rows: all.largest_within(memory.free, most),
            padding: None,
            recorded: Vec::new(),
            unrecorded: None,
        }
    }

    /// As a table for people.
    #[must_use]
    pub fn text(&self) -> String {
        text::render(self)
    }

    /// As one JSON object.
    #[must_use]
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_else(|error| unreachable!("numbers and texts: {error}"))
    }

    /// As a picture: rows per second and bytes over rows.
    #[must_use]
    pub fn svg(&self) -> String {
        svg::render(self)
    }
}

#[cfg(test)]
mod tests;
