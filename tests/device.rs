//! What only a GPU can show: its memory, its answers against the CPU's, what happens when it is full, and when it is lost.
//! Where there is none, each test says so and passes.
//!
//! ONNX Runtime must have its CUDA provider: `CONCERTINA_ONNXRUNTIME` names it. The tests share one process, as the library
//! does; the one that loses the device does so in a process of its own.
//!
//! `unsafe`: copies to and from a GPU, and launching a kernel that writes where nothing is.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(unsafe_code, reason = "see above")]
#![allow(clippy::disallowed_methods, reason = "a process that has lost its device ends where it is")]

#[path = "device/recorded.rs"]
mod recorded;
mod support;

use concertina::clock::Clock;
use concertina::memory::cuda::{Cuda, Gpu, Nvml, Pinned, Stream};
use concertina::memory::{ArenaKind, ArenaOptions, Backing, CUDA_ALIGNMENT, Device, DeviceOptions};
use concertina::model::settings::{CudaGraph, Fill};
use concertina::model::{Dim, InferRequest, InputTensor, ModelSpec, Settings, ValidRequest};
use concertina::runtime::{
    Arenas, Batch, BatchPart, CudaOptions, Plan, Ran, Recipe, RunError, Session, SessionOptions, Weights, cuda,
};
use concertina::tensor::{DataType, Shape, Tensor};
use concertina::units::{BatchId, ByteSize, DeviceId, Instant, Rows};
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

/// Past the capture of passing tests, so that it is seen.
fn skipped(reason: &dyn std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {reason}");
}

/// The GPU, or a line that says that there is none.
fn gpu() -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(reason) => {
            skipped(&reason);
            None
        }
    }
}

/// The same, with an ONNX Runtime that can use it.
fn gpu_with_provider() -> Option<Gpu> {
    let gpu = gpu()?;
    support::runtime();
    match cuda::available() {
        Ok(()) => Some(gpu),
        Err(reason) => {
            skipped(&reason);
            None
        }
    }
}

fn device(gpu: Gpu, limit: ByteSize) -> Device {
    let options = DeviceOptions { id: DeviceId(1), limit, headroom: ByteSize::ZERO, alignment: CUDA_ALIGNMENT };
    Device::new(Box::new(Cuda::new(gpu).unwrap()), options)
}

fn at(seconds: u64) -> Instant {
    Instant(seconds * 1_000_000_000)
}

const MIB: u64 = 1 << 20;

#[test]
fn memory_is_committed_used_and_given_back() {
    let Some(gpu) = gpu() else { return };
    let (device, stream) = (device(gpu, ByteSize::MAX), Stream::new(gpu).unwrap());
    let options = ArenaOptions { label: "t".into(), kind: ArenaKind::Buffers, priority: 1, address_space: 8 << 30 };
    let arena = device.arena(options).unwrap();
    let bytes = 300 * MIB as usize;
    let block = arena.block(bytes).unwrap();
    assert_eq!(block.pointer().addr().get() % CUDA_ALIGNMENT, 0);
    let stats = device.stats();
    assert!(stats.committed.0 >= bytes as u64 && stats.outside.0 < stats.total.0, "{stats:?}");
    // What goes in comes out, at both ends of a block that lies over several granules.
    let mut out = Pinned::new(gpu, bytes).unwrap();
    let mut data = Pinned::new(gpu, bytes).unwrap();
    data.as_mut_slice().iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 4097) as u8);
    // SAFETY: all three live until the stream has been waited for, and nobody touches them before.
    unsafe {
        stream.copy_in(&data, bytes, &block).unwrap();
        stream.copy_out(block.pointer().addr().get(), &mut out, 0..bytes).unwrap();
    }
    stream.synchronize().unwrap();
    assert!(data.as_slice() == out.as_slice(), "the bytes come back");
    let before = gpu.free_and_total().unwrap().0;
    drop(block);
    device.trim(at(10));
    assert!(device.trim(at(20)).0 >= bytes as u64, "what has been quiet goes");
    let after = gpu.free_and_total().unwrap().0;
    assert!(after >= before + bytes as u64 - 2 * MIB, "the driver has it back: {before} {after}");
    assert_eq!(device.stats().committed, ByteSize::ZERO);
    assert_eq!(device.stats().last_failure, None);
}

#[test]
fn memory_beyond_the_card_is_denied_and_nothing_leaks() {
    let Some(gpu) = gpu() else { return };
    let device = device(gpu, ByteSize::MAX);
    let total = device.stats().total.0 as usize;
    let options = ArenaOptions { label: "t".into(), kind: ArenaKind::Run, priority: 1, address_space: 2 * total };
    let arena = device.arena(options).unwrap();
    let denied = arena.allocate(total + total / 2).unwrap_err();
    assert!(denied.available.0 < total as u64, "{denied:?}");
    assert!(device.stats().committed.0 <= total as u64);
    let most = denied.available.0 as usize / 2;
    let pointer = arena.allocate(most).unwrap();
    arena.free(pointer).unwrap();
    device.trim(at(10));
    assert!(device.trim(at(20)).0 >= most as u64, "what has been quiet goes");
    assert_eq!(device.stats().committed, ByteSize::ZERO);
}

/// Not a test of speed, but the numbers that decide whether handles are worth keeping.
#[test]
fn memory_calls_are_counted() {
    let Some(gpu) = gpu() else { return };
    let (backing, clock) = (Cuda::new(gpu).unwrap(), Clock::start());
    let reservation = backing.reserve(8 << 30).unwrap();
    for size in [2usize << 20, 32 << 20, 256 << 20] {
        let (mut commit, mut decommit) = (Vec::new(), Vec::new());
        for round in 0..20 {
            let range = round * size..(round + 1) * size;
            let begin = clock.now();
            backing.commit(&reservation, range.clone()).unwrap();
            commit.push(clock.now().since(begin));
            let begin = clock.now();
            backing.decommit(&reservation, range).unwrap();
            decommit.push(clock.now().since(begin));
        }
        commit.sort_unstable();
        decommit.sort_unstable();
        println!("NUMBER granule {} MiB: commit {:?}, decommit {:?}", size >> 20, commit[10], decommit[10]);
    }
    let begin = clock.now();
    (0..100).for_each(|_| assert!(backing.free_bytes().0 > 0));
    println!("NUMBER free bytes: {:?}", clock.now().since(begin) / 100);
    println!("NUMBER driver: {} with {}", gpu.name(), Gpu::driver_version());
}

/// What NVML says agrees with the driver, where it says something.
#[test]
fn sensors_speak_of_this_gpu() {
    let Some(gpu) = gpu() else { return };
    let Some(nvml) = Nvml::open(&gpu.pci_bus_id()) else {
        return skipped(&"NVML (libnvidia-ml.so.1) is not installed");
    };
    let (state, clock) = (nvml.state(), Clock::start());
    let begin = clock.now();
    (0..10).for_each(|_| assert_eq!(nvml.state().total_bytes, state.total_bytes));
    println!("NUMBER nvml: {:?} {state:?}, {:?} a look", nvml.uuid(), clock.now().since(begin) / 10);
    assert!(nvml.uuid().is_some_and(|uuid| uuid.starts_with("GPU-") || uuid.starts_with("MIG-")));
    let (_, total) = gpu.free_and_total().unwrap();
    assert!(state.total_bytes.is_some_and(|bytes| bytes.abs_diff(total) < total / 10), "{state:?} {total}");
    assert!(state.busy_percent.is_none_or(|percent| percent <= 100), "{state:?}");
    assert!(state.celsius.is_none_or(|celsius| (5..120).contains(&celsius)), "{state:?}");
}

struct Loaded {
    session: Session,
    spec: Arc<ModelSpec>,
    arenas: Arenas,
    clock: Clock,
}

fn load(device: &Device, file: &Path, batch_axis: Option<usize>) -> Result<Loaded, String> {
    let options = SessionOptions { intra_op_threads: 2, optimize: true };
    let arenas = Arenas::new(device, "test", 1).unwrap();
    let mut session = Session::load(support::runtime(), file, options, arenas.clone())?;
    let spec = support::settle(&mut session, "m", batch_axis, 64);
    Ok(Loaded { session, spec, arenas, clock: Clock::start() })
}

impl Loaded {
    fn batch(&self, rows: Rows, padded_rows: Rows, seed: u64) -> Batch {
        let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let inputs = self.spec.inputs.iter().map(|input| {
            let size = |(axis, dim): (usize, &Dim)| match dim {
                _ if self.spec.batch_axis == Some(axis) => rows as usize,
                Dim::Fixed(size) => *size,
                _ => 16,
            };
            let shape: Shape = input.shape.iter().enumerate().map(size).collect();
            let count: usize = shape.iter().product();
            let mut data = Vec::new();
            for _ in 0..count {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let value = (random >> 40) as f32 / (1u64 << 24) as f32;
                match input.datatype {
                    DataType::Int64 => {
                        let whole = if input.name == "input_ids" { (value * 1000.0) as i64 } else { 1 };
                        data.extend_from_slice(&whole.to_le_bytes());
                    }
                    DataType::Int32 => data.extend_from_slice(&((value * 250.0) as i32).to_le_bytes()),
                    DataType::Fp32 => data.extend_from_slice(&value.to_le_bytes()),
                    other => panic!("{other}"),
                }
            }
            InputTensor {
                name: input.name.clone(),
                tensor: Tensor { datatype: input.datatype, shape, data: data.into() },
            }
        });
        let request = InferRequest { inputs: inputs.collect(), ..InferRequest::default() };
        let request = Arc::new(ValidRequest::new(Arc::clone(&self.spec), request, 1000).unwrap());
        let parts = vec![BatchPart { request, start: 0, rows }];
        Batch { id: BatchId(1), parts, bytes: ByteSize::ZERO, padded_rows }
    }

    fn run(&mut self, batch: &Batch) -> Ran {
        self.session.run(batch, self.clock)
    }
}

fn values(ran: Ran) -> Vec<f32> {
    let tensors = ran.result.unwrap().remove(0);
    let floats = |tensor: &Tensor| {
        let bytes = tensor.data.to_contiguous();
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect::<Vec<_>>()
    };
    tensors.iter().filter(|tensor| tensor.datatype == DataType::Fp32).flat_map(floats).collect()
}

/// The models that are there: the test models always, larger ones where `CONCERTINA_DEVICE_MODELS` names a folder with them.
fn models() -> Vec<(&'static str, std::path::PathBuf)> {
    let mut models = vec![("affine", support::test_model("affine")), ("wide", support::test_model("wide"))];
    let folder =
        std::env::var_os("CONCERTINA_DEVICE_MODELS").map_or_else(|| support::root().join("models"), Into::into);
    models.extend(["resnet32", "minilm"].map(|name| (name, folder.join(name).join("1/model.onnx"))));
    models.into_iter().filter(|(_, file)| file.exists()).collect()
}

#[test]
fn answers_are_those_of_the_cpu() {
    let Some(gpu) = gpu_with_provider() else { return };
    let (device, host) = (device(gpu, ByteSize::MAX), support::device());
    for (name, file) in models() {
        let mut on_device = load(&device, &file, Some(0)).unwrap();
        let mut on_host = load(&host, &file, Some(0)).unwrap();
        for (rows, padded) in [(1, 1), (3, 3), (5, 8), (2, 2), (64, 64)] {
            let batch = on_device.batch(rows, padded, u64::from(rows));
            let expected = values(on_host.run(&on_host.batch(rows, padded, u64::from(rows))));
            let answer = values(on_device.run(&batch));
            let largest = expected.iter().fold(1e-6f32, |most, value| most.max(value.abs()));
            let apart = answer.iter().zip(&expected).map(|(a, b)| (a - b).abs() / largest).fold(0.0, f32::max);
            println!("NUMBER {name} rows {rows}: {apart:.2e} apart");
            assert_eq!(answer.len(), expected.len(), "{name}");
            // TF32, ONNX Runtime's default, has ten bits.
            assert!(apart < 5e-3, "{name} rows {rows}: {apart}");
        }
        let stats = on_device.arenas.run.stats();
        assert_eq!(stats.allocated, ByteSize::ZERO, "{name}: a run leaves nothing");
        assert!(stats.allocations > 0, "{name}: runs allocate from our arena");
    }
}

#[test]
fn a_run_that_is_denied_memory_says_so_and_the_next_one_works() {
    let Some(gpu) = gpu_with_provider() else { return };
    let device = device(gpu, ByteSize::MAX);
    for (name, file) in models() {
        let mut loaded = load(&device, &file, Some(0)).unwrap();
        let batch = loaded.batch(4, 4, 9);
        let expected = values(loaded.run(&batch));
        let before = loaded.arenas.run.stats().allocations;
        loaded.run(&batch);
        let allocations = loaded.arenas.run.stats().allocations - before;
        let step = (allocations / 40).max(1);
        for nth in (1..=allocations).step_by(step as usize) {
            loaded.arenas.run.deny_nth(nth);
            let ran = loaded.run(&batch);
            loaded.arenas.run.set_denier(None);
            assert!(matches!(ran.result, Err(RunError::OutOfMemory { .. })), "{name} {nth}: {:?}", ran.result);
            assert_eq!(loaded.arenas.run.stats().allocated, ByteSize::ZERO, "{name} {nth}: nothing leaks");
        }
        assert_eq!(values(loaded.run(&batch)), expected, "{name}: as if nothing had happened");
        println!("NUMBER {name}: {allocations} allocations per run");
    }
}

#[test]
fn a_load_that_is_denied_memory_fails_and_gives_everything_back() {
    let Some(gpu) = gpu_with_provider() else { return };
    let (name, file) = models().remove(1);
    for limit in [0, 1] {
        let device = device(gpu, ByteSize(limit * MIB));
        let error = load(&device, &file, Some(0)).map(|_| ()).unwrap_err();
        assert!(error.contains("do not fit"), "{name}: {error}");
        assert_eq!(device.stats().committed, ByteSize::ZERO, "{name}");
    }
}

#[test]
fn a_full_card_fails_a_run_and_an_empty_one_serves_it() {
    let Some(gpu) = gpu_with_provider() else { return };
    let (name, file) = models().into_iter().find(|(name, _)| *name == "minilm").unwrap_or_else(|| models().remove(0));
    let device = device(gpu, ByteSize::MAX);
    let mut loaded = load(&device, &file, Some(0)).unwrap();
    let small = loaded.batch(1, 1, 3);
    let expected = values(loaded.run(&small));
    device.trim(at(1_000_000));
    device.trim(at(1_000_010));
    // All that is left of the card, taken by another ledger: to ours it is a neighbour.
    let neighbour = self::device(gpu, ByteSize::MAX);
    let total = neighbour.stats().total.0 as usize;
    let options = ArenaOptions { label: "n".into(), kind: ArenaKind::Buffers, priority: 1, address_space: total };
    let hog = neighbour.arena(options).unwrap();
    let most = hog.allocate(total).unwrap_err().available.0 as usize;
    let held = hog.allocate(most).unwrap();
    let large = loaded.batch(64, 64, 5);
    let ran = loaded.run(&large);
    println!("NUMBER {name} on a full card: {:?}", ran.result.as_ref().map(|_| "ran"));
    if name == "minilm" {
        assert!(matches!(ran.result, Err(RunError::OutOfMemory { .. })), "{name}: {:?}", ran.result);
    }
    hog.free(held).unwrap();
    neighbour.trim(at(1_000_000));
    neighbour.trim(at(1_000_010));
    assert_eq!(values(loaded.run(&small)), expected);
    loaded.run(&large).result.unwrap();
}

#[test]
fn two_sessions_on_two_threads_share_the_card() {
    let Some(gpu) = gpu_with_provider() else { return };
    let device = device(gpu, ByteSize::MAX);
    let file = support::test_model("affine");
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let (device, file) = (&device, &file);
            scope.spawn(move || {
                let mut loaded = load(device, file, Some(0)).unwrap();
                for round in 0..200u32 {
                    let batch = loaded.batch(1 + round % 7, 8, u64::from(round) + seed);
                    let input = batch.parts[0].request.inputs[0].data.to_contiguous();
                    let expected: Vec<f32> = input
                        .chunks_exact(4)
                        .map(|b| 2.0f32.mul_add(f32::from_le_bytes([b[0], b[1], b[2], b[3]]), 1.0))
                        .collect();
                    assert_eq!(values(loaded.run(&batch)), expected);
                }
            });
        }
    });
}

/// A kernel that writes to an address that is not mapped: afterwards nothing runs in this process any more.
fn lose(stream: &Stream) {
    use cudarc::driver::sys;
    let source =
        c".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry bad() {\n.reg .u64 %a;\n.reg .u32 %b;\n\
        mov.u64 %a, 16;\nmov.u32 %b, 1;\nst.global.u32 [%a], %b;\nret;\n}\n";
    let (mut module, mut function, none) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: names of the driver's that were just made; what the kernel does to the device is what is tested.
    unsafe {
        assert_eq!(sys::cuModuleLoadData(&raw mut module, source.as_ptr().cast()), sys::CUresult::CUDA_SUCCESS);
        let found = sys::cuModuleGetFunction(&raw mut function, module, c"bad".as_ptr());
        assert_eq!(found, sys::CUresult::CUDA_SUCCESS);
        let none_too = std::ptr::null_mut();
        let raw = stream.raw().cast();
        sys::cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, raw, none, none_too);
    }
}

#[test]
fn a_lost_device_is_noticed_by_the_next_run() {
    const INNER: &str = "CONCERTINA_TEST_LOSES_THE_DEVICE";
    let Some(gpu) = gpu_with_provider() else { return };
    if std::env::var_os(INNER).is_none() {
        let mut inner = std::process::Command::new(std::env::current_exe().unwrap());
        inner.args(["a_lost_device_is_noticed_by_the_next_run", "--exact", "--nocapture"]).env(INNER, "1");
        let done = inner.output().unwrap();
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(text.contains("NOTICED"), "{text}{}", String::from_utf8_lossy(&done.stderr));
        return;
    }
    let device = device(gpu, ByteSize::MAX);
    let mut loaded = load(&device, &support::test_model("affine"), Some(0)).unwrap();
    let batch = loaded.batch(2, 2, 1);
    loaded.run(&batch).result.unwrap();
    assert_eq!(device.lost(), None);
    lose(&Stream::new(gpu).unwrap());
    let mut ran = loaded.run(&batch);
    // The kernel may come to its end after the first run.
    for _ in 0..1000 {
        if ran.result.is_err() {
            break;
        }
        ran = loaded.run(&batch);
    }
    assert!(matches!(ran.result, Err(RunError::Lost(_))), "{:?}", ran.result);
    assert!(device.lost().is_some_and(|reason| reason.contains("700")), "{:?}", device.lost());
    println!("NOTICED {:?}", device.lost());
    // What clean-up does after that is the libraries' own; the process ends here, as the server's does.
    std::process::exit(0);
}
