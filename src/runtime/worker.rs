//! One OS thread per instance: it alone touches its session.

use super::batch::Stages;
use super::session::Ran;
use super::{Batch, Completion, RunError, Session};
use crate::clock::Clock;
use crate::units::{ByteSize, InstanceId};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;
use tokio::sync::mpsc;

/// What a worker thread owns.
#[derive(Debug)]
pub struct Worker {
    /// Its identity.
    pub instance: InstanceId,
    /// Its session.
    pub session: Session,
    /// Where completions go.
    pub completions: mpsc::Sender<Completion>,
    /// The clock that times its runs.
    pub clock: Clock,
}

/// The sending end of a worker: batches go in, completions come out of the channel that it was given.
#[derive(Debug)]
pub struct WorkerHandle {
    /// The worker's identity.
    pub instance: InstanceId,
    /// Batches to run; closing it ends the thread after the last of them.
    pub batches: mpsc::Sender<Batch>,
    /// The thread, to be joined when the worker is let go. `None` for one that is not a thread (tests).
    pub thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread. `depth` is the number of batches that may wait in its channel.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn spawn(self, depth: usize) -> std::io::Result<WorkerHandle> {
        let (batches, receiver) = mpsc::channel(depth);
        let instance = self.instance;
        let thread =
            std::thread::Builder::new().name(format!("instance-{instance}")).spawn(move || self.work(receiver))?;
        Ok(WorkerHandle { instance, batches, thread: Some(thread) })
    }

    fn work(mut self, mut batches: mpsc::Receiver<Batch>) {
        while let Some(batch) = batches.blocking_recv() {
            let completion = self.complete(&batch);
            let lost = matches!(completion.result, Err(RunError::Lost(_)));
            // The requests are let go before the answer is sent: their bytes are not needed any more.
            drop(batch);
            if self.completions.blocking_send(completion).is_err() || lost {
                return;
            }
        }
    }

    fn complete(&mut self, batch: &Batch) -> Completion {
        let clock = self.clock;
        let run = catch_unwind(AssertUnwindSafe(|| self.session.run(batch, clock)));
        let ran = run.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message");
            let result = Err(RunError::Lost(text.to_owned()));
            Ran { result, stages: Stages::default(), bytes: ByteSize::ZERO }
        });
        let Ran { result, stages, bytes } = ran;
        Completion { batch: batch.id, instance: self.instance, result, stages, bytes }
    }
}
