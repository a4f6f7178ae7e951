//! A connection that wakes itself while it is polled goes on at once.
//!
//! hyper wakes its own task for every piece of a body. To a runtime of several threads that is a task among others: it goes to the
//! end of a queue, another thread is woken to look for work, which costs a system call, and if that one takes the task, everything that
//! the task works on is in the caches of the wrong core.

use futures_util::task::AtomicWaker;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// A future that wakes itself is polled so often before others have their turn: about two MiB of a body.
const MOST: usize = 64;

/// Nobody has woken it since it was polled.
const ASLEEP: u8 = 0;
/// It is being polled, and nobody has woken it since that began.
const POLLED: u8 = 1;
/// It has been woken.
const WOKEN: u8 = 2;

/// Polls one future, which must be the same each time.
#[derive(Debug)]
pub(super) struct Eager {
    relay: Arc<Relay>,
    waker: Waker,
}

/// Stands between a future and the task that it belongs to.
#[derive(Debug, Default)]
struct Relay {
    state: AtomicU8,
    task: AtomicWaker,
}

impl Wake for Relay {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Whoever polls it sees this, and a task that was woken need not be woken again.
        if self.state.swap(WOKEN, Ordering::AcqRel) == ASLEEP {
            self.task.wake();
        }
    }
}

impl Eager {
    pub(super) fn new() -> Self {
        let relay = Arc::<Relay>::default();
        Self { waker: Waker::from(Arc::clone(&relay)), relay }
    }

    /// Polls the future until it waits for something.
    pub(super) fn poll<F: Future>(&self, mut future: Pin<&mut F>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.relay.task.register(cx.waker());
        let mut inner = Context::from_waker(&self.waker);
        for _ in 0..MOST {
            self.relay.state.store(POLLED, Ordering::Release);
            if let Poll::Ready(output) = future.as_mut().poll(&mut inner) {
                return Poll::Ready(output);
            }
            let state = &self.relay.state;
            if state.compare_exchange(POLLED, ASLEEP, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    impl Count {
        fn get(&self) -> usize {
            self.0.load(Ordering::SeqCst)
        }
    }

    /// Polls once, and says how often the future was polled and its task woken.
    fn polled(eager: &Eager, task: &Arc<Count>, poll: impl FnMut(&mut Context<'_>) -> Poll<()>) -> Poll<()> {
        let waker = Waker::from(Arc::clone(task));
        let future = std::pin::pin!(std::future::poll_fn(poll));
        eager.poll(future, &mut Context::from_waker(&waker))
    }

    #[test]
    fn what_wakes_itself_goes_on_without_its_task_being_woken() {
        let (eager, task, mut polls) = (Eager::new(), Arc::<Count>::default(), 0);
        let ended = polled(&eager, &task, |cx| {
            polls += 1;
            cx.waker().wake_by_ref();
            if polls == 20 { Poll::Ready(()) } else { Poll::Pending }
        });
        assert_eq!((ended, polls, task.get()), (Poll::Ready(()), 20, 0));
    }

    #[test]
    fn what_never_stops_waking_itself_gives_way_and_has_its_task_woken() {
        let (eager, task, mut polls) = (Eager::new(), Arc::<Count>::default(), 0);
        let mut restless = |cx: &mut Context<'_>| {
            polls += 1;
            cx.waker().wake_by_ref();
            Poll::Pending
        };
        assert_eq!(polled(&eager, &task, &mut restless), Poll::Pending);
        assert_eq!(polled(&eager, &task, &mut restless), Poll::Pending);
        assert_eq!((polls, task.get()), (2 * MOST, 2));
    }

    #[test]
    fn what_waits_is_woken_once_by_others_and_again_after_the_next_poll() {
        let (eager, task) = (Eager::new(), Arc::<Count>::default());
        let mut kept = None;
        for woken in 0..3 {
            let waits = polled(&eager, &task, |cx| {
                kept = Some(cx.waker().clone());
                Poll::Pending
            });
            assert_eq!((waits, task.get()), (Poll::Pending, woken));
            let waker = kept.take().expect("it was polled");
            waker.wake_by_ref();
            waker.wake();
        }
        assert_eq!(task.get(), 3);
    }

    #[test]
    fn a_wake_from_another_thread_is_never_lost() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().expect("a runtime");
        // Each step waits for a message that another task sends at any moment of the poll.
        runtime.block_on(async {
            let (ask, mut asked) = tokio::sync::mpsc::channel::<()>(1);
            let (tell, mut told) = tokio::sync::mpsc::channel::<()>(1);
            let echo =
                tokio::spawn(async move { while asked.recv().await.is_some() && tell.send(()).await.is_ok() {} });
            let mut steps = std::pin::pin!(async {
                for _ in 0..20_000 {
                    ask.send(()).await.expect("it listens");
                    told.recv().await.expect("it answers");
                }
            });
            let eager = Eager::new();
            let all = std::future::poll_fn(|cx| eager.poll(steps.as_mut(), cx));
            let limit = std::time::Duration::from_secs(60);
            assert!(tokio::time::timeout(limit, all).await.is_ok(), "it waits for what has come");
            echo.abort();
        });
    }
}
