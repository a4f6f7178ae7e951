//! The manager of the repository, with a loop that the test plays.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "repository/import.rs"]
mod import;
#[path = "repository/manager.rs"]
mod manager;
mod support;

use arc_swap::ArcSwap;
use concertina::batcher::{Batcher, Control, Ends, Loop};
use concertina::clock::Clock;
use concertina::config::Config;
use concertina::memory::{Device, DeviceOptions, HOST_ALIGNMENT, Host};
use concertina::metrics::Metrics;
use concertina::model::settings::{Group, Place};
use concertina::model::table::Lookup;
use concertina::model::{InferRequest, InputTensor, ModelSpec, Settings, Table, ValidRequest};
use concertina::repository::Candidate;
use concertina::repository::devices::Devices;
use concertina::repository::load::Loader;
use concertina::repository::manager::Manager;
use concertina::repository::store::Store;
use concertina::scheduler::MemorySample;
use concertina::tensor::{DataType, Tensor};
use concertina::units::ByteSize;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Requests reach the loop by another channel than models do: one that is shown before the loop has it would be refused.
#[tokio::test]
async fn a_model_is_shown_to_clients_only_when_the_loop_has_it() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join("affine/1")).unwrap();
    std::fs::copy(support::test_model("affine"), folder.path().join("affine/1/model.onnx")).unwrap();
    let mut config = Config::default();
    config.models.path = folder.path().to_owned();
    config.model.warmup.seconds = Duration::from_millis(20);
    let loader = loader_on_host();
    let models = Arc::new(ArcSwap::from_pointee(Table::default()));
    let (control, mut controls) = mpsc::channel(8);
    let (_lost, events) = mpsc::channel(1);
    let (manager, _controller) = Manager::new(loader, Arc::clone(&models), control, Arc::new(Metrics::new()), config);
    tokio::spawn(manager.run(events));

    let Some(Control::Load { taken, .. }) = controls.recv().await else { panic!("a model is loaded") };
    assert!(matches!(models.load().lookup("affine", None), Lookup::NotReady(_)), "the loop does not have it yet");
    taken.send(()).unwrap();
    while !matches!(models.load().lookup("affine", None), Lookup::Ready(_)) {
        tokio::task::yield_now().await;
    }
}

fn loader_on_host() -> Loader {
    Loader {
        runtime: support::runtime().clone(),
        devices: Devices::host_only(support::device()),
        clock: Clock::start(),
        completions: mpsc::channel(1).0,
        cores: 1,
        ids: Default::default(),
        store: Store::new(None),
    }
}

fn device(place: Place) -> Device {
    let (id, limit) = (place.device(), ByteSize::MAX);
    let options = DeviceOptions { id, limit, headroom: ByteSize::ZERO, alignment: HOST_ALIGNMENT };
    Device::new(Box::new(Host::new()), options)
}

/// Blocks that were ever allocated on a device.
fn allocations(device: &Device) -> u64 {
    device.stats().arenas.iter().map(|arena| arena.allocations).sum()
}

/// Asks for many rows at once, each in a request of its own.
async fn answered(batcher: &Batcher, spec: &Arc<ModelSpec>) {
    let mut answers = tokio::task::JoinSet::new();
    for value in 0..48_u16 {
        let (batcher, spec) = (batcher.clone(), Arc::clone(spec));
        answers.spawn(async move {
            let bytes = |value: f32| [value; 4].iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
            let (shape, data) = ([1, 4].as_slice().into(), bytes(value.into()).into());
            let tensor = Tensor { datatype: DataType::Fp32, shape, data };
            let inputs = vec![InputTensor { name: "x".to_owned(), tensor }];
            let request = ValidRequest::new(spec, InferRequest { inputs, ..InferRequest::default() }, 64).unwrap();
            let answer = batcher.infer(request).await.unwrap();
            assert_eq!(answer.outputs[0].tensor.data.to_contiguous(), bytes(2.0 * f32::from(value) + 1.0));
        });
    }
    while let Some(answer) = answers.join_next().await {
        answer.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_on_two_devices_has_sessions_and_memory_on_both_and_answers_as_one() {
    let places = [Place::Cpu, Place::Cuda(0), Place::Cuda(2)];
    let devices = places.map(device);
    let [host, near, far] = devices.clone();
    let clock = Clock::start();
    let config = Config::default();
    let (task, ends) = Loop::new(256, config.scaling, clock, Arc::new(Metrics::new()));
    let Ends { batcher, control, completions, .. } = ends;
    let running = tokio::spawn(task.run());
    let loader = Loader {
        runtime: support::runtime().clone(),
        devices: Devices::pretended(host, vec![(places[1], near), (places[2], far)]),
        clock,
        completions,
        cores: 1,
        ids: Default::default(),
        store: Store::new(None),
    };
    let mut settings = Settings { place: Some(places[1]), instances: NonZeroU32::new(2), ..Settings::default() };
    settings.beside = vec![Group { place: places[2], count: NonZeroU32::new(1) }];
    settings.warmup.seconds = Duration::from_millis(20);
    let candidate = Candidate { name: "affine".to_owned(), version: 1, file: support::test_model("affine"), settings };
    let nowhere = Settings { beside: vec![Group { place: Place::Cuda(1), count: None }], ..candidate.settings.clone() };
    let refused = loader.load(&Candidate { settings: nowhere, ..candidate.clone() }).unwrap_err();
    assert!(refused.contains("cuda:1"), "{refused}");

    let load = tokio::task::spawn_blocking(move || loader.load(&candidate).unwrap()).await.unwrap();
    let counts: Vec<usize> = load.devices.iter().map(|device| device.workers.len()).collect();
    assert_eq!(counts, [2, 1]);
    assert_eq!(load.spec.settings.beside, [Group { place: places[2], count: NonZeroU32::new(1) }]);
    let spec = Arc::clone(&load.spec);
    let (taken, is_taken) = tokio::sync::oneshot::channel();
    control.send(Control::Load { model: Box::new(load), taken }).await.unwrap();
    is_taken.await.unwrap();

    for (taker, other) in [(1, 2), (2, 1)] {
        // As long as one has no room, everything goes to the other one.
        for (device, budget) in [(taker, ByteSize::MAX), (other, ByteSize::ZERO)] {
            let sample = MemorySample { device: places[device].device(), budget, capacity: ByteSize::MAX };
            control.send(Control::Memory(sample)).await.unwrap();
        }
        // Once this is answered twice, what was sent before has been taken in.
        batcher.statistics().await.unwrap();
        batcher.statistics().await.unwrap();
        let before = devices.each_ref().map(allocations);
        answered(&batcher, &spec).await;
        let after = devices.each_ref().map(allocations);
        assert!(after[taker] > before[taker], "{before:?} {after:?}");
        assert_eq!((after[0], after[other]), (before[0], before[other]), "nothing runs elsewhere");
    }
    drop((batcher, control));
    running.await.unwrap();
}
