//! One OS thread per instance: it alone touches its session.

use super::batch::Stages;
use super::flight::{Ready, Running};
use super::recording::IDLE;
use super::session::Ran;
use super::{Batch, Completion, RunError, Session};
use crate::clock::Clock;
use crate::units::{BatchId, ByteSize, InstanceId, Rows};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TryRecvError;

/// The longest time that a thread without a batch keeps its processor.
const LONGEST_LINGER: Duration = Duration::from_millis(1);

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

/// What a worker has recorded, when it has: rows, and how long a run of so many takes.
pub type Recorded = Receiver<Vec<(Rows, Duration)>>;

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
        self.spawn_recording(depth).map(|(handle, _)| handle)
    }

    /// As [`Self::spawn`]; the thread first records what its session is planned to, and says what it has recorded and how
    /// long that takes now.
    ///
    /// # Errors
    /// As [`Self::spawn`].
    pub fn spawn_recording(self, depth: usize) -> std::io::Result<(WorkerHandle, Recorded)> {
        let (batches, receiver) = mpsc::channel(depth);
        let (tell, recorded) = std::sync::mpsc::sync_channel(1);
        let instance = self.instance;
        let work = move || self.work(receiver, &tell);
        let thread = std::thread::Builder::new().name(format!("instance-{instance}")).spawn(work)?;
        Ok((WorkerHandle { instance, batches, thread: Some(thread) }, recorded))
    }

    fn work(mut self, batches: mpsc::Receiver<Batch>, tell: &SyncSender<Vec<(Rows, Duration)>>) {
        let clock = self.clock;
        let recorded = catch_unwind(AssertUnwindSafe(|| self.session.record(clock)));
        // Whoever does not listen does not want to know.
        let _ = tell.send(recorded.unwrap_or_default());
        if self.session.overlaps() { self.work_ahead(batches) } else { self.work_in_turn(batches) }
    }

    fn work_in_turn(mut self, mut batches: mpsc::Receiver<Batch>) {
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

    /// While the device computes one batch, the next one is gathered and copied; it is launched before the outputs of the
    /// first are given out.
    fn work_ahead(mut self, mut batches: mpsc::Receiver<Batch>) {
        let mut desk = Desk::default();
        while desk.running.is_some() || desk.next.is_some() || self.await_batch(&mut batches, &mut desk) {
            let turn = catch_unwind(AssertUnwindSafe(|| self.turn(&mut batches, &mut desk)));
            // After a panic one batch that is not answered yet is enough: the loop gives up all others of this instance.
            let (batch, ran) = match turn {
                Ok(None) => continue,
                Ok(Some((batch, ran))) => (batch.id, ran),
                Err(panic) => (desk.oldest, lost_by(&*panic)),
            };
            let Ran { result, stages, bytes } = ran;
            let lost = matches!(result, Err(RunError::Lost(_)));
            let completion = Completion { batch, instance: self.instance, result, stages, bytes };
            if self.completions.blocking_send(completion).is_err() || lost {
                return;
            }
        }
    }

    /// Takes the next batch; whether there is one. While none comes, what is missing among the recordings is made.
    fn await_batch(&mut self, batches: &mut mpsc::Receiver<Batch>, desk: &mut Desk) -> bool {
        let (clock, idle_since) = (self.clock, self.clock.now());
        if let Some(batch) = linger(batches, desk.worked.min(LONGEST_LINGER), clock) {
            return desk.take(Some(batch));
        }
        while self.session.misses_recordings() {
            if let Some(batch) = receive_within(batches, IDLE, clock) {
                return desk.take(batch);
            }
            let restored = catch_unwind(AssertUnwindSafe(|| self.session.restore_one(idle_since, clock)));
            if restored.is_err() {
                return false;
            }
        }
        desk.take(batches.blocking_recv())
    }

    /// Launches what is there, or waits for what runs and launches the next one behind it.
    fn turn(&mut self, batches: &mut mpsc::Receiver<Batch>, desk: &mut Desk) -> Option<(Batch, Ran)> {
        let (session, clock) = (&mut self.session, self.clock);
        let Some((batch, mut running)) = desk.running.take() else {
            let (batch, ready) = desk.next.take()?;
            let ready = ready.unwrap_or_else(|| session.stage(&batch, clock));
            let running = session.launch(&batch, ready, clock);
            desk.running = Some((batch, running));
            return None;
        };
        // Busy, but only while the device is: a sleeping thread would wake up too late for the next batch.
        while desk.next.is_none() && !session.is_done(&running) {
            match batches.try_recv() {
                Ok(next) => {
                    // What finds no room beside this run may find it behind it.
                    let ready = Some(session.stage(&next, clock)).filter(|ready| !ready.is_short());
                    desk.next = Some((next, ready));
                }
                Err(_) => std::hint::spin_loop(),
            }
        }
        session.settle(&batch, &mut running, clock);
        desk.worked = running.took();
        if let Some((next, ready)) = desk.next.take() {
            desk.oldest = batch.id;
            let ready = ready.unwrap_or_else(|| session.stage(&next, clock));
            let following = session.launch(&next, ready, clock);
            desk.running = Some((next, following));
        }
        let ran = session.scatter(&batch, running, clock);
        if let Some((next, _)) = &desk.running {
            desk.oldest = next.id;
        }
        Some((batch, ran))
    }

    fn complete(&mut self, batch: &Batch) -> Completion {
        let clock = self.clock;
        let run = catch_unwind(AssertUnwindSafe(|| self.session.run(batch, clock)));
        let Ran { result, stages, bytes } = run.unwrap_or_else(|panic| lost_by(&*panic));
        Completion { batch: batch.id, instance: self.instance, result, stages, bytes }
    }
}

/// What lies on the desk of a worker that works ahead.
#[derive(Default)]
struct Desk {
    next: Option<(Batch, Option<Ready>)>,
    running: Option<(Batch, Running)>,
    /// The batch that is answered next.
    oldest: BatchId,
    /// How long the last batch ran.
    worked: Duration,
}

impl Desk {
    /// Takes a batch as the next one; whether there is one.
    fn take(&mut self, batch: Option<Batch>) -> bool {
        self.oldest = batch.as_ref().map_or(self.oldest, |batch| batch.id);
        self.next = batch.map(|batch| (batch, None));
        self.next.is_some()
    }
}

/// What comes while this thread keeps its processor for so long; `None`: nothing, or the end of the channel. Waking a thread that
/// sleeps costs a lonely request tens of microseconds, and who waits no longer than it has worked at most doubles what it takes.
fn linger<T>(channel: &mut mpsc::Receiver<T>, within: Duration, clock: Clock) -> Option<T> {
    let end = clock.now() + within;
    loop {
        match channel.try_recv() {
            Ok(came) => return Some(came),
            Err(TryRecvError::Empty) if clock.now() < end => std::thread::yield_now(),
            Err(_) => return None,
        }
    }
}

/// What comes within this time, where `Some(None)` is the end of the channel, or `None`. Outside of any runtime, whose timers this
/// thread does not have.
fn receive_within<T>(channel: &mut mpsc::Receiver<T>, within: Duration, clock: Clock) -> Option<Option<T>> {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let end = clock.now() + within;
    loop {
        if let Poll::Ready(came) = channel.poll_recv(&mut context) {
            return Some(came);
        }
        let left = end.since(clock.now());
        if left.is_zero() {
            return None;
        }
        std::thread::park_timeout(left);
    }
}

/// Wakes a thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// What a panic leaves of a run.
fn lost_by(panic: &(dyn Any + Send)) -> Ran {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message");
    Ran { result: Err(RunError::Lost(text.to_owned())), stages: Stages::default(), bytes: ByteSize::ZERO }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn who_lingers_takes_what_comes_meanwhile_and_stays_no_longer_than_that() {
        let (sender, mut receiver) = mpsc::channel(1);
        let clock = Clock::start();
        assert_eq!(linger(&mut receiver, Duration::ZERO, clock), None);
        sender.try_send(7).expect("there is room");
        assert_eq!(linger(&mut receiver, Duration::ZERO, clock), Some(7));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| [(); 2].map(|()| linger(&mut receiver, LONG, clock)));
            sender.blocking_send(8).expect("it is taken");
            drop(sender);
            assert_eq!(waiter.join().expect("no panic"), [Some(8), None], "the end of the channel is not waited for");
        });
    }

    #[test]
    fn what_comes_in_time_is_taken_and_what_does_not_is_not_waited_for() {
        let (sender, mut receiver) = mpsc::channel(1);
        let clock = Clock::start();
        assert_eq!(receive_within(&mut receiver, Duration::ZERO, clock), None);
        assert_eq!(receive_within(&mut receiver, Duration::from_millis(1), clock), None);
        sender.try_send(7).expect("there is room");
        assert_eq!(receive_within(&mut receiver, LONG, clock), Some(Some(7)));
        // Whoever waits already is woken, by a value as by the end.
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| [(); 2].map(|()| receive_within(&mut receiver, LONG, clock)));
            sender.blocking_send(8).expect("it is taken");
            drop(sender);
            assert_eq!(waiter.join().expect("no panic"), [Some(Some(8)), Some(None)]);
        });
    }
}
