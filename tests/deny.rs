//! Every single allocation of loading and of running each test model is denied once: always a clean refusal, never a crash,
//! nothing left behind, and the next answer is bit-identical.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use concertina::clock::Clock;
use concertina::model::derive::derive;
use concertina::model::{Dim, InferRequest, InputTensor, ModelSpec, Settings, ValidRequest};
use concertina::runtime::{Arenas, Batch, BatchPart, Ran, RunError, Session, SessionOptions};
use concertina::tensor::{DataType, Shape, Tensor};
use concertina::units::{BatchId, ByteSize};
use std::sync::Arc;

/// No test model allocates more often than this while it loads or runs.
const MOST: u64 = 2000;

fn models() -> Vec<String> {
    let folder = support::root().join("tests/models");
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let folders = entries.filter(|path| path.join("1/model.onnx").is_file());
    let mut names: Vec<String> = folders.map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    assert!(names.len() >= 12, "{names:?}");
    names
}

fn load(name: &str, arenas: Arenas) -> Result<Session, String> {
    let options = SessionOptions { intra_op_threads: 2, optimize: true };
    Session::load(support::runtime(), &support::test_model(name), options, arenas)
}

#[test]
fn every_denied_allocation_of_a_load_is_a_clean_refusal() {
    for name in models() {
        let device = support::device();
        let mut refused = 0;
        for nth in 1..MOST {
            let arenas = Arenas::new(&device, &name, 1).unwrap();
            arenas.weights.deny_nth(nth);
            let loaded = load(&name, arenas.clone());
            let denied = arenas.weights.stats().denied;
            assert_eq!(loaded.is_err(), denied > 0, "{name}: denial {nth}");
            drop((loaded, arenas));
            assert_eq!(device.stats().committed, ByteSize::ZERO, "{name}: denial {nth} left something behind");
            refused += denied;
            if denied == 0 {
                break;
            }
        }
        assert!(refused < MOST, "{name} allocates more than {MOST} times");
    }
}

#[test]
fn every_denied_allocation_of_a_run_is_out_of_memory_and_nothing_else() {
    let mut denials = 0;
    for name in models() {
        let device = support::device();
        let arenas = Arenas::new(&device, &name, 1).unwrap();
        let mut model = Model::new(&name, arenas.clone());
        let expected = model.run().result.unwrap();
        let idle = arenas.run.stats().allocated;
        assert_eq!(idle, ByteSize::ZERO, "{name} keeps something between runs");
        for nth in 1..MOST {
            arenas.run.deny_nth(nth);
            let before = arenas.run.stats().denied;
            let result = model.run().result;
            let denied = arenas.run.stats().denied - before;
            arenas.run.set_denier(None);
            match result {
                Err(RunError::OutOfMemory { .. }) => assert_eq!(denied, 1, "{name}: denial {nth}"),
                Ok(answer) => assert_eq!((denied, &answer), (0, &expected), "{name}: denial {nth}"),
                Err(other) => panic!("{name}: denial {nth} is {other}"),
            }
            assert_eq!(arenas.run.stats().allocated, idle, "{name}: denial {nth} left something behind");
            assert_eq!(model.run().result.unwrap(), expected, "{name}: the run after denial {nth}");
            denials += denied;
            if denied == 0 {
                break;
            }
        }
    }
    assert!(denials > 20, "only {denials} allocations were denied");
}

#[test]
fn a_warm_run_commits_nothing_and_needs_the_same_bytes_each_time() {
    for name in models() {
        let device = support::device();
        let mut model = Model::new(&name, Arenas::new(&device, &name, 1).unwrap());
        let first = model.run().bytes;
        let warm = device.stats();
        for _ in 0..5 {
            assert_eq!(model.run().bytes, first, "{name}");
        }
        let after = device.stats();
        assert_eq!(after.counters.commits, warm.counters.commits, "{name} commits in a warm run");
        assert_eq!(after.counters.decommits, warm.counters.decommits, "{name} gives back in a warm run");
    }
}

#[test]
fn what_is_predicted_is_committed_before_the_run_or_the_run_does_not_begin() {
    let device = support::device();
    let arenas = Arenas::new(&device, "affine", 1).unwrap();
    let mut model = Model::new("affine", arenas);
    model.run().result.unwrap();
    device.set_limit(device.stats().committed);
    model.batch.bytes = ByteSize(1 << 30);
    let refused = model.run().result;
    assert!(matches!(refused, Err(RunError::OutOfMemory { .. })), "{refused:?}");
    model.batch.bytes = ByteSize::ZERO;
    model.run().result.unwrap();
}

#[test]
fn the_self_test_at_start_up_passes_here() {
    assert_eq!(concertina::runtime::self_test(support::runtime()), Ok(()));
}

struct Model {
    session: Session,
    batch: Batch,
    clock: Clock,
}

impl Model {
    /// A loaded model with a request of two rows (one where there is no batch axis).
    fn new(name: &str, arenas: Arenas) -> Self {
        let mut session = load(name, arenas).unwrap();
        let settings = Settings::default();
        let derived = derive(name, session.graph(), &settings).unwrap();
        // Nothing is confirmed by runs here, so only what the names prove counts as a batch axis.
        let batch_axis = derived.batch_axis.filter(|_| derived.unproven.is_empty());
        let spec = support::settle(&mut session, name, batch_axis, 8);
        let request = Arc::new(request(&spec));
        let rows = request.rows;
        let parts = vec![BatchPart { request, start: 0, rows }];
        let batch = Batch { id: BatchId(1), parts, bytes: ByteSize::ZERO, padded_rows: rows };
        Self { session, batch, clock: Clock::start() }
    }

    fn run(&mut self) -> Ran {
        self.session.run(&self.batch, self.clock)
    }
}

/// Small numbers that every test model takes; variable dimensions are 2.
fn request(spec: &Arc<ModelSpec>) -> ValidRequest {
    let inputs = spec.inputs.iter().map(|input| {
        let size = |dim: &Dim| if let Dim::Fixed(size) = dim { *size } else { 2 };
        let shape: Shape = input.shape.iter().map(size).collect();
        let count: usize = shape.iter().product();
        let element: Vec<u8> = match input.datatype {
            DataType::Fp32 => 0.5f32.to_le_bytes().to_vec(),
            DataType::Bytes => vec![1, 0, 0, 0, b'a'],
            other => [vec![1], vec![0; other.size().unwrap() - 1]].concat(),
        };
        let tensor = Tensor { datatype: input.datatype, shape, data: element.repeat(count).into() };
        InputTensor { name: input.name.clone(), tensor }
    });
    let request = InferRequest { inputs: inputs.collect(), ..InferRequest::default() };
    ValidRequest::new(Arc::clone(spec), request, 1000).unwrap()
}
