//! The recordings of one instance: which of them fits a batch, when they may be dropped, and the guard over the run memory
//! that they remember. What a recording is does not matter here.
//!
//! One thread records and plays; any thread may ask for all of them to be dropped. While one is played or made they cannot
//! go, so whoever asks then is remembered: they go as soon as that is over.

use crate::clock::Clock;
use crate::memory::cuda::CudaError;
use crate::memory::{Arena, Block, Denied};
use crate::tensor::Shape;
use crate::units::{ByteSize, Rows};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Recordings that share one arena of run memory, which nobody else may use.
#[derive(Debug)]
pub(super) struct Shelf<R> {
    state: Mutex<State<R>>,
}

#[derive(Debug)]
struct State<R> {
    kept: Vec<Kept<R>>,
    /// Lies over all run memory that recordings remember, so that the arena gives none of it back or to anyone.
    guard: Option<Block>,
    /// One of them is played or made: nobody may drop it.
    busy: bool,
    /// Somebody has asked for their memory meanwhile.
    unwanted: bool,
}

/// One recording and what is known of it.
#[derive(Debug)]
pub(super) struct Kept<R> {
    /// Rows that it runs.
    pub(super) rows: Rows,
    /// The shape of each input.
    pub(super) inputs: Vec<Shape>,
    /// Run memory that so many rows need without it.
    pub(super) bytes: ByteSize,
    /// Bytes from the beginning of the arena that it remembers.
    pub(super) footprint: usize,
    /// Itself. Played under its own lock, lest whoever asks for memory waits for a launch.
    pub(super) recording: Arc<Mutex<R>>,
}

/// Why there is no recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Unrecorded {
    /// The model cannot be recorded: why.
    Impossible(String),
    /// Memory was short; another time it may work.
    Short(String),
    /// Somebody else loads or records, and a thread that serves does not wait.
    Busy,
}

impl From<String> for Unrecorded {
    fn from(reason: String) -> Self {
        Self::Impossible(reason)
    }
}

impl From<Denied> for Unrecorded {
    fn from(denied: Denied) -> Self {
        Self::Short(denied.to_string())
    }
}

impl From<CudaError> for Unrecorded {
    fn from(error: CudaError) -> Self {
        let reason = error.to_string();
        if error.is_out_of_memory() { Self::Short(reason) } else { Self::Impossible(reason) }
    }
}

impl std::fmt::Display for Unrecorded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Impossible(reason) | Self::Short(reason) => f.write_str(reason),
            Self::Busy => f.write_str("another model is being loaded"),
        }
    }
}

impl<R> Default for Shelf<R> {
    fn default() -> Self {
        Self { state: Mutex::new(State { kept: Vec::new(), guard: None, busy: false, unwanted: false }) }
    }
}

impl<R> Shelf<R> {
    fn lock(&self) -> MutexGuard<'_, State<R>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rows of the smallest recording of at least so many whose input shapes `fit`.
    pub(super) fn rows_for(&self, rows: Rows, fit: impl Fn(&[Shape]) -> bool) -> Option<Rows> {
        let fits = |kept: &&Kept<R>| kept.rows >= rows && fit(&kept.inputs);
        self.lock().kept.iter().filter(fits).map(|kept| kept.rows).min()
    }

    /// Lets `play` use the recording of so many rows; `None` if it was dropped in the meantime. It counts as playing until
    /// [`Self::played`]. Also answers what so many rows need without it.
    pub(super) fn play<T>(&self, rows: Rows, play: impl FnOnce(&mut R) -> T) -> Option<(T, ByteSize)> {
        let mut state = self.lock();
        let kept = state.kept.iter().find(|kept| kept.rows == rows)?;
        let (recording, bytes) = (Arc::clone(&kept.recording), kept.bytes);
        state.busy = true;
        drop(state);
        let mut recording = recording.lock().unwrap_or_else(PoisonError::into_inner);
        Some((play(&mut recording), bytes))
    }

    /// The device is through with what it played. If somebody has asked for the memory meanwhile, it is given up now.
    pub(super) fn played(&self) {
        let mut state = self.lock();
        state.busy = false;
        if std::mem::take(&mut state.unwanted) {
            state.drop_all();
        }
    }

    /// Drops all recordings; whether there were any. While one is played or made, none goes now and all go behind it.
    pub(super) fn drop_all(&self) -> bool {
        let mut state = self.lock();
        if state.busy {
            state.unwanted = true;
            return false;
        }
        state.drop_all()
    }

    /// Drops the recording of so many rows, and guards no more than the others remember.
    pub(super) fn forget(&self, scratch: &Arena, rows: Rows, clock: Clock) {
        // In a run nobody takes memory of the arena: not in the moment without a guard either.
        scratch.begin_run(clock.now());
        let mut state = self.lock();
        state.kept.retain(|kept| kept.rows != rows);
        // If it is denied all are dropped, and that is what was to be said.
        let _ = state.guard_again(scratch);
        // Before the run ends: that may ask for memory, here too.
        drop(state);
        scratch.end_run(clock.now());
    }

    /// Keeps what `record` makes. It has all of `scratch`, whose memory stays committed meanwhile, must leave nothing in it, and
    /// may begin its run anew, but not end it.
    ///
    /// # Errors
    /// What `record` says; if an operator keeps run memory; or if memory was wanted elsewhere, and then no recording is left.
    pub(super) fn record(
        &self,
        scratch: &Arena,
        clock: Clock,
        record: impl FnOnce() -> Result<Kept<R>, Unrecorded>,
    ) -> Result<(), Unrecorded> {
        scratch.begin_run(clock.now());
        let mut state = self.lock();
        (state.busy, state.guard) = (true, None);
        drop(state);
        let made = record();
        let mut state = self.lock();
        state.busy = false;
        let keeps_memory = made.is_ok() && scratch.stats().allocated != ByteSize::ZERO;
        let result = match made {
            // It goes before the guard comes back, which lies where its memory is.
            Ok(made) if keeps_memory => {
                drop(made);
                Err(Unrecorded::Impossible("an operator keeps run memory".to_owned()))
            }
            Ok(made) => {
                state.kept.push(made);
                Ok(())
            }
            Err(reason) => Err(reason),
        };
        let result = if std::mem::take(&mut state.unwanted) {
            state.drop_all();
            Err(Unrecorded::Short("memory was wanted elsewhere meanwhile".to_owned()))
        } else {
            result
        };
        let guarded = state.guard_again(scratch);
        drop(state);
        scratch.end_run(clock.now());
        guarded.map_err(Unrecorded::from).and(result)
    }

    /// How many are recorded.
    pub(super) fn count(&self) -> usize {
        self.lock().kept.len()
    }

    /// The sizes that are recorded.
    pub(super) fn sizes(&self) -> Vec<Rows> {
        self.lock().kept.iter().map(|kept| kept.rows).collect()
    }
}

impl<R> State<R> {
    fn drop_all(&mut self) -> bool {
        let recordings = self.kept.len();
        if recordings > 0 {
            tracing::info!(recordings, "recorded runs are dropped for their memory");
        }
        self.kept.clear();
        self.guard = None;
        recordings > 0
    }

    /// Makes the guard as large as what is remembered. If that is denied, all recordings go: what they remember is not theirs.
    fn guard_again(&mut self, scratch: &Arena) -> Result<(), Denied> {
        let remembered = self.kept.iter().map(|kept| kept.footprint).max().unwrap_or(0);
        self.guard = None;
        if remembered > 0 {
            let guard = scratch.block(remembered);
            self.guard = Some(guard.inspect_err(|_| self.kept.clear())?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{ArenaKind, ArenaOptions, Device, DeviceOptions, HOST_ALIGNMENT, Host};
    use crate::units::{DeviceId, Instant};

    const MIB: usize = 1 << 20;

    fn device(limit: usize) -> Device {
        let (limit, headroom) = (ByteSize(limit as u64), ByteSize::ZERO);
        let options = DeviceOptions { id: DeviceId(0), limit, headroom, alignment: HOST_ALIGNMENT };
        Device::new(Box::new(Host::new()), options)
    }

    fn arena(device: &Device) -> Arena {
        let options = ArenaOptions { label: "t".into(), kind: ArenaKind::Buffers, priority: 1, address_space: 1 << 30 };
        device.arena(options).unwrap()
    }

    /// What recording so many rows does to the arena: it takes memory and frees it again.
    fn run(scratch: &Arena, rows: Rows, mib: usize) -> Result<Kept<Arc<()>>, Unrecorded> {
        scratch.begin_run(Instant::default());
        scratch.free(scratch.allocate(mib * MIB)?).unwrap();
        Ok(Kept { rows, inputs: Vec::new(), bytes: ByteSize(7), footprint: mib * MIB, recording: Arc::default() })
    }

    fn shelf(scratch: &Arena, sizes: &[(Rows, usize)]) -> Shelf<Arc<()>> {
        let shelf = Shelf::default();
        for &(rows, mib) in sizes {
            shelf.record(scratch, Clock::start(), || run(scratch, rows, mib)).unwrap();
        }
        shelf
    }

    fn guarded(scratch: &Arena) -> usize {
        usize::try_from(scratch.stats().allocated.0).unwrap() / MIB
    }

    #[test]
    fn the_driver_without_memory_is_a_shortage_and_its_other_faults_are_not() {
        assert_eq!(Unrecorded::from(CudaError::of(2)), Unrecorded::Short("a call: CUDA_ERROR (2)".to_owned()));
        assert_eq!(Unrecorded::from(CudaError::of(900)), Unrecorded::Impossible("a call: CUDA_ERROR (900)".to_owned()));
    }

    #[test]
    fn the_guard_is_as_large_as_what_the_recordings_that_are_left_remember() {
        let (device, clock) = (device(usize::MAX), Clock::start());
        let scratch = arena(&device);
        let shelf = shelf(&scratch, &[(1, 2), (8, 32), (4, 8)]);
        assert_eq!((guarded(&scratch), shelf.sizes()), (32, vec![1, 8, 4]));
        shelf.forget(&scratch, 8, clock);
        assert_eq!((guarded(&scratch), shelf.sizes()), (8, vec![1, 4]));
        // What fails on the way leaves the guard as it was, though it had taken more.
        let failed = shelf.record(&scratch, clock, || run(&scratch, 16, 64).and(Err(String::from("no").into())));
        assert_eq!(failed, Err(Unrecorded::Impossible("no".to_owned())));
        assert_eq!((guarded(&scratch), shelf.count()), (8, 2));
        // The same where something stays in the arena as long as the recording does.
        let keeps = scratch.clone();
        let kept = Shelf::<Option<Block>>::default();
        let refused = kept.record(&scratch, clock, || {
            let left = Arc::new(Mutex::new(Some(keeps.block(MIB)?)));
            Ok(Kept { rows: 2, inputs: Vec::new(), bytes: ByteSize::ZERO, footprint: MIB, recording: left })
        });
        assert!(matches!(refused, Err(Unrecorded::Impossible(reason)) if reason.contains("keeps run memory")));
        assert_eq!(kept.count(), 0);
        assert!(shelf.drop_all() && !shelf.drop_all());
        assert_eq!((guarded(&scratch), shelf.count(), scratch.stats().in_run), (0, 0, false));
    }

    #[test]
    fn what_is_asked_for_while_one_plays_is_dropped_behind_it() {
        let device = device(usize::MAX);
        let scratch = arena(&device);
        let shelf = shelf(&scratch, &[(1, 2), (4, 8)]);
        assert_eq!(shelf.rows_for(2, |_| true), Some(4));
        assert_eq!(shelf.rows_for(5, |_| true), None);
        assert_eq!(shelf.play(3, |_| ()), None, "there is none of so many rows");
        let (token, bytes) = shelf.play(4, |recording| Arc::clone(recording)).unwrap();
        assert_eq!(bytes, ByteSize(7));
        assert!(!shelf.drop_all(), "nothing goes while it plays");
        assert_eq!((shelf.count(), guarded(&scratch), Arc::strong_count(&token)), (2, 8, 2));
        shelf.played();
        assert_eq!((shelf.count(), guarded(&scratch), Arc::strong_count(&token)), (0, 0, 1));
        // It was asked for once: what is recorded from now on stays.
        shelf.record(&scratch, Clock::start(), || run(&scratch, 1, 2)).unwrap();
        shelf.play(1, |_| ()).unwrap();
        shelf.played();
        assert_eq!((shelf.count(), guarded(&scratch)), (1, 2));
    }

    #[test]
    fn what_is_asked_for_while_one_is_made_is_dropped_behind_it() {
        let device = device(usize::MAX);
        let scratch = arena(&device);
        let shelf = shelf(&scratch, &[(1, 2)]);
        let made = shelf.record(&scratch, Clock::start(), || {
            assert!(!shelf.drop_all());
            run(&scratch, 4, 8)
        });
        assert!(matches!(made, Err(Unrecorded::Short(_))), "{made:?}");
        assert_eq!((shelf.count(), guarded(&scratch), scratch.stats().in_run), (0, 0, false));
    }

    #[test]
    fn while_one_is_made_nobody_takes_the_memory_that_the_others_remember() {
        let device = device(64 * MIB);
        let (scratch, other) = (arena(&device), arena(&device));
        let shelf = shelf(&scratch, &[(1, 48)]);
        let before = scratch.stats().reserved;
        let made = shelf.record(&scratch, Clock::start(), || {
            assert_eq!(guarded(&scratch), 0, "the new one has all of it");
            other.allocate(32 * MIB).unwrap_err();
            assert_eq!(scratch.stats().reserved, before);
            run(&scratch, 2, 4)
        });
        assert_eq!((made, guarded(&scratch), scratch.stats().reserved), (Ok(()), 48, before));
        // Without recordings the other one may have it.
        shelf.drop_all();
        other.allocate(32 * MIB).unwrap();
    }
}
