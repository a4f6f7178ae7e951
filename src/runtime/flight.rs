//! A session's runs on a GPU, in three steps, so that one batch can be gathered while another one computes: its inputs are
//! put on their way, its run is put into the stream, and when the device is through with it its outputs are given out.
//!
//! A run of which there is a recording is played back instead.
//!
//! Who is denied device memory: staging and launching first have recordings dropped, of this instance and then of others, and try
//! once more. What is staged beside a run and still denied is staged again behind that run, which leaves it its memory. What is
//! denied then, and what an operator is denied in a run, is [`RunError::OutOfMemory`], upon which the scheduler runs the rows in
//! halves. Recordings that play meanwhile go behind their run.

use super::batch::Stages;
use super::cuda;
use super::graphs::{self, Graphs};
use super::inputs::batch_shape;
use super::lanes::{Lanes, Outputs, Staged};
use super::outputs::Wanted;
use super::session::{Ran, out_of_memory, without_paths};
use super::{Batch, RunError, Session};
use crate::clock::Clock;
use crate::memory::{Arena, RunStats};
use crate::tensor::Tensor;
use crate::units::{Instant, Rows};
use std::time::Duration;

/// A batch whose inputs are on their way to the device.
#[derive(Debug)]
pub(super) struct Ready {
    staged: Result<Staged, RunError>,
    /// When gathering began, and how long it took.
    gather: (Instant, Duration),
    /// Rows that will run.
    rows: Rows,
    /// Whether a recording of so many rows is to be played.
    recorded: bool,
}

impl Ready {
    /// The slot that it takes, and whether it was staged while the batch before was running.
    fn place(&self) -> (usize, bool) {
        self.staged.as_ref().map_or((0, false), |staged| (staged.slot, staged.behind))
    }

    /// Whether the device had no room for its inputs.
    pub(super) fn is_short(&self) -> bool {
        matches!(self.staged, Err(RunError::OutOfMemory { .. }))
    }
}

/// A batch that the device works on.
#[derive(Debug)]
pub(super) struct Running {
    slot: usize,
    outputs: Result<Outputs, RunError>,
    started: Instant,
    stages: Stages,
    stats: RunStats,
    recorded: bool,
    /// Whether it was staged while the batch before was running.
    behind: bool,
}

impl Running {
    /// How long it ran, once it is settled.
    pub(super) fn took(&self) -> Duration {
        self.stages.compute
    }
}

impl Session {
    /// All steps, one after the other.
    pub(super) fn run_on_device(&mut self, batch: &Batch, clock: Clock) -> Ran {
        let ready = self.stage(batch, clock);
        let mut running = self.launch(batch, ready, clock);
        self.settle(batch, &mut running, clock);
        self.scatter(batch, running, clock)
    }

    /// Gives back the device memory that inputs of earlier batches had. Nothing may be staged or running. Whether there was any.
    pub(super) fn let_go_inputs(&mut self) -> bool {
        self.lanes.as_mut().is_some_and(Lanes::let_go_inputs)
    }

    /// Whether batches can be staged while another one computes.
    pub(super) fn overlaps(&self) -> bool {
        self.lanes.is_some()
    }

    /// Gathers a batch and begins to copy it. At most one batch may be running, and one be staged.
    pub(super) fn stage(&mut self, batch: &Batch, clock: Clock) -> Ready {
        let recorded = self.spec.as_ref().and_then(|spec| {
            let shape = |index| batch_shape(spec, (batch, batch.padded_rows), index);
            let shapes: Vec<_> = (0..spec.inputs.len()).map(shape).collect();
            self.graphs.rows_for(batch.padded_rows, |inputs| graphs::fits(spec, inputs, &shapes))
        });
        self.stage_as(batch, recorded, clock)
    }

    fn stage_as(&mut self, batch: &Batch, recorded: Option<Rows>, clock: Clock) -> Ready {
        let started = clock.now();
        let (rows, arena) = (recorded.unwrap_or(batch.padded_rows), recorded.is_none().then_some(&self.arena));
        let (spec, lanes) = (&self.spec, &mut self.lanes);
        let mut stage = || match (spec, lanes.as_mut()) {
            (Some(spec), Some(lanes)) => lanes.stage(spec, (batch, rows), arena),
            _ => Err(RunError::Lost("the session has no model, or no device".to_owned())),
        };
        let mut staged = stage();
        if matches!(staged, Err(RunError::OutOfMemory { .. })) && make_room(&self.graphs, &self.arena) {
            staged = stage();
        }
        Ready { staged, gather: (started, clock.now().since(started)), rows, recorded: recorded.is_some() }
    }

    /// Puts the run of a staged batch into the stream. No other may be running.
    pub(super) fn launch(&mut self, batch: &Batch, ready: Ready, clock: Clock) -> Running {
        if ready.recorded {
            return self.launch_recorded(batch, &ready, clock);
        }
        let started = clock.now();
        let ensured = self.allocator.begin_run(started, batch.bytes).or_else(|denied| {
            // What is recorded goes before a batch is made smaller.
            let room = make_room(&self.graphs, &self.arena);
            if room { self.allocator.begin_run(started, batch.bytes) } else { Err(denied) }
        });
        let (slot, behind) = ready.place();
        let outputs = match (ready.staged, ensured, &self.spec, &mut self.lanes) {
            (Ok(staged), Ok(()), Some(spec), Some(lanes)) => {
                lanes.launch(&mut self.inner, spec, &staged, &Wanted::of(spec, batch, ready.rows))
            }
            (Ok(_), Err(denied), ..) => Err(out_of_memory(&denied)),
            (Err(error), ..) => Err(error),
            _ => Err(RunError::Lost("the session has no model, or no device".to_owned())),
        };
        let stages = launched(ready.gather, started, clock.now());
        Running { slot, outputs, started, stages, stats: RunStats::default(), recorded: false, behind }
    }

    fn launch_recorded(&mut self, batch: &Batch, ready: &Ready, clock: Clock) -> Running {
        let started = clock.now();
        let played = match (&ready.staged, &self.spec, &mut self.lanes) {
            (Ok(staged), Some(spec), Some(lanes)) => {
                let wanted = Wanted::of(spec, batch, ready.rows);
                let play = |recorded: &mut _, launch: graphs::Launch<'_>| {
                    lanes.play(spec, staged, (recorded, launch), &wanted)
                };
                self.graphs.play(ready.rows, |recording| recording.play(play))
            }
            _ => None,
        };
        let Some((outputs, bytes)) = played else {
            // Dropped in the meantime: it is gathered again, for a run like any other, where it was: the other slot may hold
            // what the batch before has not given out yet.
            if let (Ok(_), Some(lanes)) = (&ready.staged, &mut self.lanes) {
                lanes.unstage();
            }
            let again = self.stage_as(batch, None, clock);
            return self.launch(batch, again, clock);
        };
        let (slot, behind) = ready.place();
        let stages = launched(ready.gather, started, clock.now());
        // What the same rows need without a recording, for it may be dropped at any time.
        let stats = RunStats { footprint: bytes, ..RunStats::default() };
        Running { slot, outputs, started, stages, stats, recorded: true, behind }
    }

    /// Whether [`Self::settle`] would not wait.
    pub(super) fn is_done(&self, running: &Running) -> bool {
        let lanes = self.lanes.as_ref().filter(|_| running.outputs.is_ok());
        // A device that does not answer has nothing to wait for.
        lanes.is_none_or(|lanes| lanes.is_done(running.slot).unwrap_or(true))
    }

    /// Waits until the device is through with a batch. From then on the next one may be launched.
    pub(super) fn settle(&mut self, batch: &Batch, running: &mut Running, clock: Clock) {
        if let Some(lanes) = &mut self.lanes
            && running.outputs.is_ok()
            && let Err(error) = lanes.wait(running.slot)
        {
            running.outputs = Err(error);
        }
        let failed = running.outputs.is_err();
        let idle = self.lanes.as_mut().filter(|_| failed).map_or(Ok(()), Lanes::reset);
        let now = clock.now();
        running.stages.compute = now.since(running.started);
        if let Some(lanes) = self.lanes.as_ref().filter(|_| !failed) {
            let [copy, device, idle] = lanes.device_times(running.slot, (!running.recorded, running.behind));
            running.stages = Stages { copy, device, idle, ..running.stages };
        }
        if running.recorded {
            self.graphs.played();
        } else {
            running.stats = self.allocator.end_run(now);
        }
        if let Err(error) = &mut running.outputs {
            *error = self.explain(batch, error.clone(), running.stats);
            if let Err(fault) = idle.as_ref()
                && !fault.is_sticky()
            {
                tracing::warn!(%fault, "a stream ended with a failure");
            }
        }
    }

    /// What a failure means. What our own allocator has seen counts first, then whether the device still works, and what the
    /// message says comes last.
    fn explain(&self, batch: &Batch, error: RunError, stats: RunStats) -> RunError {
        let device = self.arena.device();
        if let Some(fatal) = device.gpu().and_then(cuda::fatal) {
            device.lose(&fatal.to_string());
            return RunError::Lost(format!("the device is lost: {fatal}"));
        }
        match error {
            RunError::Model(message) if stats.denials > 0 => self.shortage(batch, without_paths(&message)),
            RunError::Model(message) if cuda::is_shortage(&message) => {
                RunError::OutOfMemory { message: without_paths(cuda::without_host(&message)) }
            }
            RunError::Model(message) => RunError::Model(without_paths(cuda::without_host(&message))),
            other => other,
        }
    }

    /// Gives out the rows of a settled batch.
    pub(super) fn scatter(&self, batch: &Batch, running: Running, clock: Clock) -> Ran {
        let started = clock.now();
        let Running { slot, outputs, mut stages, stats, .. } = running;
        let scattered = |outputs: Outputs| -> Result<Vec<Vec<Tensor>>, RunError> {
            let (Some(spec), Some(lanes)) = (&self.spec, &self.lanes) else { return Ok(Vec::new()) };
            self.outputs.give_out(spec, batch, &lanes.produced(spec, slot, outputs))
        };
        let result = outputs.and_then(scattered);
        stages.scatter = clock.now().since(started);
        stages.begun[2] = started;
        Ran { result, stages, bytes: stats.footprint }
    }

    /// For tests: two batches as a worker runs them that works ahead, except that both give out their rows at the very end.
    /// `look` is called while the first one computes and the second one is staged, and again between the two.
    pub fn run_ahead(&mut self, [first, second]: [&Batch; 2], clock: Clock, mut look: impl FnMut(Moment)) -> [Ran; 2] {
        let ready = self.stage(first, clock);
        let mut running = self.launch(first, ready, clock);
        let ready = self.stage(second, clock);
        look(Moment::FirstComputes);
        self.settle(first, &mut running, clock);
        look(Moment::SecondWaits);
        let mut following = self.launch(second, ready, clock);
        self.settle(second, &mut following, clock);
        [self.scatter(first, running, clock), self.scatter(second, following, clock)]
    }
}

/// When [`Session::run_ahead`] calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The first batch is launched and the second one staged.
    FirstComputes,
    /// The first batch is settled and the second one not launched.
    SecondWaits,
}

/// The stages of a run that was begun and has been launched, whose rows were gathered then.
fn launched((begun, gather): (Instant, Duration), started: Instant, now: Instant) -> Stages {
    let launch = now.since(started);
    Stages { gather, launch, overlapped: true, begun: [begun, started, Instant::default()], ..Stages::default() }
}

/// Has recordings dropped, of this instance or else of others; whether there is more room now.
fn make_room(graphs: &Graphs, arena: &Arena) -> bool {
    graphs.drop_all() || arena.device().shed()
}
