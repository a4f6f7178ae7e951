//! Threads for work on texts, apart from those that serve HTTP: so many, and so many requests that wait for them.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;

/// No further request may wait for the threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// A piece of work panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

/// The right of one request to have its texts worked on, until it is dropped.
#[derive(Debug)]
pub struct Place {
    _permit: OwnedSemaphorePermit,
}

/// The threads. Cheap to clone; they end when the last clone goes.
#[derive(Clone)]
pub struct Pool {
    threads: Arc<Threads>,
    places: Arc<Semaphore>,
    count: NonZeroUsize,
    requests: NonZeroUsize,
}

/// A runtime of which only the threads for blocking work are used: they are counted, named, and take work in its order. How
/// much of it there can be is bounded by the places.
struct Threads(Option<Runtime>);

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            // Wherever this is dropped, nobody waits for a text that nobody waits for.
            runtime.shutdown_background();
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("count", &self.count).finish_non_exhaustive()
    }
}

/// Work that is not begun once nobody waits for it.
struct Job<T>(JoinHandle<T>);

impl<T> Drop for Job<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Pool {
    /// So many threads, and so many requests that may be with them at a time.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn new(threads: NonZeroUsize, requests: NonZeroUsize) -> std::io::Result<Self> {
        let runtime = Builder::new_current_thread().max_blocking_threads(threads.get()).thread_name("text").build()?;
        let places = Arc::new(Semaphore::new(requests.get()));
        Ok(Self { threads: Arc::new(Threads(Some(runtime))), places, count: threads, requests })
    }

    /// How many threads there are.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.count.get()
    }

    /// How many requests may be with them at a time.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.requests.get()
    }

    /// A place for one request.
    ///
    /// # Errors
    /// If as many as may be are there.
    pub fn admit(&self) -> Result<Place, Full> {
        let permit = Arc::clone(&self.places).try_acquire_owned().map_err(|_| Full)?;
        Ok(Place { _permit: permit })
    }

    /// Has a request's work done by one of the threads. Dropping the future before it has begun calls it off.
    ///
    /// # Errors
    /// If it panics.
    pub async fn run<T: Send + 'static>(
        &self,
        _place: &Place,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Broken> {
        let Some(runtime) = &self.threads.0 else { return Err(Broken) };
        let mut job = Job(runtime.spawn_blocking(work));
        (&mut job.0).await.map_err(|error| {
            tracing::error!(%error, "work on a text broke off");
            Broken
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::task::Poll;

    fn pool(threads: usize, requests: usize) -> Pool {
        let count = |count| NonZeroUsize::new(count).expect("a count");
        Pool::new(count(threads), count(requests)).expect("threads")
    }

    #[tokio::test]
    async fn work_is_done_on_other_threads_and_a_panic_stays_there() {
        let pool = pool(1, 4);
        let place = pool.admit().expect("room");
        let here = std::thread::current().id();
        let there = pool.run(&place, || std::thread::current().id()).await.expect("an answer");
        assert_ne!(here, there);
        assert_eq!(pool.run(&place, || panic!("on purpose")).await, Err::<(), _>(Broken));
        assert_eq!(pool.run(&place, || 7).await, Ok(7));
    }

    #[tokio::test]
    async fn there_are_as_many_places_as_said() {
        let pool = pool(1, 2);
        let first = pool.admit().expect("room");
        let second = pool.admit().expect("room");
        assert_eq!(pool.admit().err(), Some(Full));
        drop((first, second));
        assert!(pool.admit().is_ok());
    }

    #[tokio::test]
    async fn no_more_threads_work_than_said_and_what_nobody_waits_for_is_not_begun() {
        let pool = pool(1, 4);
        let place = pool.admit().expect("room");
        let (begun, has_begun) = mpsc::sync_channel(1);
        let (go, may_go) = mpsc::sync_channel::<()>(1);
        let done = Arc::new(AtomicUsize::new(0));
        let holding = pool.clone();
        let holder = tokio::spawn(async move {
            let place = holding.admit().expect("room");
            holding.run(&place, move || (begun.send(()), may_go.recv())).await.map(|_| ())
        });
        while has_begun.try_recv().is_err() {
            tokio::task::yield_now().await;
        }
        let counted = Arc::clone(&done);
        let mut waiting = Box::pin(pool.run(&place, move || counted.fetch_add(1, Ordering::SeqCst)));
        let polled = poll_fn(|cx| Poll::Ready(waiting.as_mut().poll(cx).is_pending())).await;
        assert!(polled, "the only thread is busy");
        drop(waiting);
        go.send(()).expect("somebody listens");
        holder.await.expect("no panic").expect("done");
        pool.run(&place, || ()).await.expect("done");
        assert_eq!(done.load(Ordering::SeqCst), 0);
    }
}
