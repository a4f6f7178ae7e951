//! The loop under a paused clock, with workers that are tasks: time moves only when everybody waits.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use concertina::batcher::{Batcher, Control, DeviceLoad, Ends, Event, InferError, Loop, ModelLoad, Statistics};
use concertina::clock::Clock;
use concertina::config::Config;
use concertina::metrics::Metrics;
use concertina::model::{Dim, InferRequest, InferResponse, InputTensor, ModelSpec, Settings, TensorSpec, ValidRequest};
use concertina::runtime::batch::Stages;
use concertina::runtime::{Batch, Completion, RunError, WorkerHandle};
use concertina::scheduler::{ModelPlan, Packing, Rejection, Rounding};
use concertina::tensor::{DataType, Tensor};
use concertina::units::{ByteSize, DeviceId, InstanceId, ModelId, Rows};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// How long the fake device takes for a batch, whatever its size.
const RUN: Duration = Duration::from_millis(10);
/// An input value that makes the fake device fail its batch.
const POISON: u8 = 200;
/// An input value that makes the fake device die.
const DEADLY: u8 = 201;

/// Lets virtual time pass: nothing really waits under a paused clock.
async fn pass(time: Duration) {
    let _ = tokio::time::timeout(time, std::future::pending::<()>()).await;
}

struct Server {
    batcher: Batcher,
    control: mpsc::Sender<Control>,
    events: mpsc::Receiver<Event>,
    spec: Arc<ModelSpec>,
    clock: Clock,
    /// Rows of each batch that ran, in order.
    batches: Arc<Mutex<Vec<Rows>>>,
    finished: tokio::task::JoinHandle<()>,
}

fn spec() -> ModelSpec {
    let tensor = |name: &str| TensorSpec {
        name: name.to_owned(),
        datatype: DataType::Uint8,
        shape: vec![Dim::Symbol("batch".to_owned()), Dim::Any],
    };
    ModelSpec {
        id: ModelId(7),
        name: "echo".to_owned(),
        version: 1,
        inputs: vec![tensor("x")],
        outputs: vec![tensor("y")],
        batch_axis: Some(0),
        unbatched_reason: None,
        max_batch_size: 8,
        padding: None,
        settings: Settings::default(),
        text: None,
    }
}

async fn start(instances: u32, max_in_flight: usize) -> Server {
    start_on(&[instances], max_in_flight).await
}

/// So many instances on each device.
async fn start_on(devices: &[u32], max_in_flight: usize) -> Server {
    let clock = Clock::start();
    let (task, ends) = Loop::new(max_in_flight, Config::default().scaling, clock, Arc::new(Metrics::new()));
    let Ends { batcher, control, completions, events, .. } = ends;
    let finished = tokio::spawn(task.run());
    let spec = Arc::new(spec());
    let batches = Arc::new(Mutex::new(Vec::new()));
    let on_device = |(device, instances): (u32, &u32)| {
        let worker =
            |instance| fake_worker(InstanceId(100 * device + instance), completions.clone(), Arc::clone(&batches));
        let workers: Vec<WorkerHandle> = (0..*instances).map(worker).collect();
        DeviceLoad { plan: plan(ModelId(spec.id.0 + device), DeviceId(device), &workers), workers, samples: Vec::new() }
    };
    let load = ModelLoad { spec: Arc::clone(&spec), devices: (0..).zip(devices).map(on_device).collect() };
    let (taken, is_taken) = oneshot::channel();
    control.send(Control::Load { model: Box::new(load), taken }).await.unwrap();
    is_taken.await.unwrap();
    Server { batcher, control, events, spec, clock, batches, finished }
}

fn plan(model: ModelId, device: DeviceId, workers: &[WorkerHandle]) -> ModelPlan {
    ModelPlan {
        model,
        device,
        instances: workers.iter().map(|worker| worker.instance).collect(),
        ladder: vec![1, 2, 4, 8],
        rounding: Rounding::Off,
        pipeline: 1,
        staged_unit: None,
        max_queue_delay: Duration::ZERO,
        max_gather_delay: Duration::ZERO,
        max_queue_rows: 64,
        max_queue_bytes: ByteSize(1 << 20),
        priority_levels: 1,
        knee_tolerance: 0.03,
        packing: Packing::Near,
        observations: Vec::new(),
    }
}

async fn statistics(server: &Server) -> Statistics {
    server.batcher.statistics().await.unwrap().remove(&server.spec.id).unwrap()
}

/// Echoes its rows after a while. A batch with a poisoned row fails; one with a deadly row ends the worker.
fn fake_worker(
    instance: InstanceId,
    completions: mpsc::Sender<Completion>,
    log: Arc<Mutex<Vec<Rows>>>,
) -> WorkerHandle {
    let (batches, mut receiver) = mpsc::channel::<Batch>(2);
    tokio::spawn(async move {
        while let Some(batch) = receiver.recv().await {
            log.lock().unwrap().push(batch.parts.iter().map(|part| part.rows).sum());
            pass(RUN).await;
            let result = echo(&batch);
            let lost = matches!(result, Err(RunError::Lost(_)));
            let stages = Stages { compute: RUN, ..Stages::default() };
            let completion = Completion { batch: batch.id, instance, result, stages, bytes: ByteSize::ZERO };
            if completions.send(completion).await.is_err() || lost {
                return;
            }
        }
    });
    WorkerHandle { instance, batches, thread: None }
}

fn echo(batch: &Batch) -> Result<Vec<Vec<Tensor>>, RunError> {
    let mut outputs = Vec::new();
    for part in &batch.parts {
        let input = &part.request.inputs[0];
        let width = input.shape[1];
        let range = part.start as usize * width..(part.start + part.rows) as usize * width;
        let data = input.data.slice(range);
        let values = data.to_contiguous();
        if values.contains(&DEADLY) {
            return Err(RunError::Lost("the fake device died".to_owned()));
        }
        if values.contains(&POISON) {
            return Err(RunError::Model("poisoned".to_owned()));
        }
        let shape = [part.rows as usize, width].as_slice().into();
        outputs.push(vec![Tensor { datatype: DataType::Uint8, shape, data }]);
    }
    Ok(outputs)
}

impl Server {
    fn request(&self, rows: usize, value: u8) -> ValidRequest {
        self.request_within(rows, value, None)
    }

    fn request_within(&self, rows: usize, value: u8, timeout: Option<Duration>) -> ValidRequest {
        let data: Vec<u8> = (0..rows * 3).map(|index| if index == 0 { value } else { value % 100 }).collect();
        let tensor = Tensor { datatype: DataType::Uint8, shape: [rows, 3].as_slice().into(), data: data.into() };
        let request = InferRequest {
            inputs: vec![InputTensor { name: "x".to_owned(), tensor }],
            timeout,
            ..InferRequest::default()
        };
        ValidRequest::new(Arc::clone(&self.spec), request, 64).unwrap()
    }

    /// Sends a request without waiting for its answer.
    fn send(&self, request: ValidRequest) -> tokio::task::JoinHandle<Result<InferResponse, InferError>> {
        let batcher = self.batcher.clone();
        tokio::spawn(async move { batcher.infer(request).await })
    }

    fn batches(&self) -> Vec<Rows> {
        self.batches.lock().unwrap().clone()
    }
}

fn first_values(response: &InferResponse) -> (usize, u8) {
    let tensor = &response.outputs[0].tensor;
    (tensor.shape[0], tensor.data.to_contiguous()[0])
}

#[tokio::test(start_paused = true)]
async fn a_lonely_request_is_not_kept_waiting() {
    let server = start(1, 16).await;
    let answer = server.batcher.infer(server.request(1, 5)).await.unwrap();
    assert_eq!(first_values(&answer), (1, 5));
    assert!(server.clock.now().0 < RUN.as_nanos() as u64 * 2, "{:?}", server.clock.now());
}

#[tokio::test(start_paused = true)]
async fn two_devices_work_at_the_same_time_and_are_one_model_to_whoever_asks() {
    let mut server = start_on(&[1, 1], 16).await;
    let sent: Vec<_> = (1..=4).map(|value| server.send(server.request(8, value))).collect();
    for (value, answer) in (1..).zip(sent) {
        assert_eq!(first_values(&answer.await.unwrap().unwrap()), (8, value));
    }
    // Four full batches, two at a time.
    assert!(server.clock.now().0 < RUN.as_nanos() as u64 * 3, "{:?}", server.clock.now());
    let seen = statistics(&server).await;
    assert_eq!((seen.success.count, seen.rows, seen.batches), (4, 32, 4));

    // What was on the device that dies is refused or served by the other one; whatever comes then is served.
    let _ = server.batcher.infer(server.request(1, DEADLY)).await;
    let Some(Event::InstanceLost { model, remaining: 1, .. }) = server.events.recv().await else {
        panic!("one is left")
    };
    assert_eq!(model, server.spec.id);
    for value in 1..=4 {
        let answer = server.batcher.infer(server.request(1, value)).await.unwrap();
        assert_eq!(first_values(&answer), (1, value));
    }
    let (drained, is_drained) = oneshot::channel();
    server.control.send(Control::Drain(drained)).await.unwrap();
    is_drained.await.unwrap();
    server.finished.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_comes_while_the_instance_is_busy_runs_together() {
    let server = start(1, 16).await;
    let first = server.send(server.request(1, 1));
    // The first is on the device when the others come.
    pass(RUN / 2).await;
    let others: Vec<_> = (2..7).map(|value| server.send(server.request(1, value))).collect();
    assert_eq!(first_values(&first.await.unwrap().unwrap()), (1, 1));
    for (value, other) in (2..7).zip(others) {
        assert_eq!(first_values(&other.await.unwrap().unwrap()), (1, value));
    }
    assert_eq!(server.batches(), [1, 5]);
}

#[tokio::test(start_paused = true)]
async fn a_request_larger_than_a_batch_is_split_and_answered_whole() {
    let server = start(1, 16).await;
    let request = server.request(19, 42);
    let sent = request.inputs[0].clone();
    let answer = server.batcher.infer(request).await.unwrap();
    assert_eq!(answer.outputs[0].tensor, sent);
    assert_eq!(server.batches(), [8, 8, 3]);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_goes_leaves_the_queue() {
    let server = start(1, 16).await;
    let first = server.send(server.request(1, 1));
    pass(RUN / 2).await;
    let gone = server.send(server.request(4, 2));
    let stays = server.send(server.request(1, 3));
    pass(RUN / 4).await;
    gone.abort();
    first.await.unwrap().unwrap();
    assert_eq!(first_values(&stays.await.unwrap().unwrap()), (1, 3));
    assert_eq!(server.batches(), [1, 1]);
}

#[tokio::test(start_paused = true)]
async fn one_bad_request_does_not_spoil_its_neighbours() {
    let server = start(1, 16).await;
    let first = server.send(server.request(1, 1));
    pass(RUN / 2).await;
    let values = [2, POISON, 3, 4];
    let mixed: Vec<_> = values.iter().map(|&value| server.send(server.request(1, value))).collect();
    first.await.unwrap().unwrap();
    for (value, answer) in values.into_iter().zip(mixed) {
        match answer.await.unwrap() {
            Ok(response) => assert_eq!(first_values(&response), (1, value)),
            Err(error) => {
                assert_eq!(value, POISON);
                assert_eq!(error, InferError::Model("poisoned".to_owned()));
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_instance_is_told_and_its_rows_end() {
    let mut server = start(1, 16).await;
    let error = server.batcher.infer(server.request(1, DEADLY)).await.unwrap_err();
    assert_eq!(error, InferError::Rejected(Rejection::Unhealthy));
    let event = server.events.recv().await.unwrap();
    let Event::InstanceLost { model, remaining, reason, .. } = event;
    assert_eq!((model, remaining, reason.as_str()), (ModelId(7), 0, "the fake device died"));
    let later = server.batcher.infer(server.request(1, 1)).await.unwrap_err();
    assert_eq!(later, InferError::Rejected(Rejection::Unhealthy));
}

#[tokio::test(start_paused = true)]
async fn requests_beyond_the_limit_are_refused_and_places_come_back() {
    let server = start(1, 2).await;
    let one = server.send(server.request(1, 1));
    let two = server.send(server.request(1, 2));
    pass(RUN / 2).await;
    assert_eq!(server.batcher.infer(server.request(1, 3)).await, Err(InferError::Overloaded));
    one.await.unwrap().unwrap();
    two.await.unwrap().unwrap();
    server.batcher.infer(server.request(1, 4)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_deadline_ends_the_wait() {
    let server = start(1, 16).await;
    let first = server.send(server.request(1, 1));
    pass(RUN / 4).await;
    let late = server.batcher.infer(server.request_within(1, 2, Some(RUN / 4))).await.unwrap_err();
    assert_eq!(late, InferError::Rejected(Rejection::DeadlineExceeded));
    assert!(server.clock.now().0 < RUN.as_nanos() as u64);
    first.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_drain_answers_what_is_inside_and_refuses_what_comes() {
    let server = start(1, 16).await;
    let inside: Vec<_> = (1..6).map(|value| server.send(server.request(1, value))).collect();
    pass(RUN / 2).await;
    let (done, drained) = oneshot::channel();
    server.control.send(Control::Drain(done)).await.unwrap();
    pass(RUN / 4).await;
    let late = server.batcher.infer(server.request(1, 9)).await.unwrap_err();
    assert_eq!(late, InferError::Rejected(Rejection::Draining));
    for (value, answer) in (1..6).zip(inside) {
        assert_eq!(first_values(&answer.await.unwrap().unwrap()), (1, value));
    }
    drained.await.unwrap();
    let after = server.request(1, 1);
    server.finished.await.unwrap();
    assert_eq!(server.batcher.infer(after).await, Err(InferError::Closed));
}

#[tokio::test(start_paused = true)]
async fn a_drain_ends_well_when_the_last_handle_is_gone_already() {
    let server = start(1, 16).await;
    let inside = server.send(server.request(1, 1));
    pass(RUN / 2).await;
    drop(server.batcher);
    inside.await.unwrap().unwrap();
    pass(RUN).await;
    let (done, drained) = oneshot::channel();
    server.control.send(Control::Drain(done)).await.unwrap();
    drained.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn clients_that_go_at_any_moment_leave_the_others_alone() {
    let server = start(2, 64).await;
    // In steps that hit the start and the end of runs to the tick: the answer and the leave come in one burst.
    for step in 0..200u32 {
        let patience = RUN * (step % 41) / 20;
        let batcher = server.batcher.clone();
        let (leaves, stays) = (server.request(1 + step as usize % 11, 1), server.request(1, 2));
        let gone = tokio::spawn(async move { tokio::time::timeout(patience, batcher.infer(leaves)).await.is_ok() });
        assert_eq!(first_values(&server.batcher.infer(stays).await.unwrap()), (1, 2), "step {step}");
        gone.await.unwrap();
    }
    assert!(!server.finished.is_finished());
}

#[tokio::test(start_paused = true)]
async fn what_does_not_end_in_time_is_refused_and_not_forgotten() {
    let server = start(1, 16).await;
    let inside: Vec<_> = (1..6).map(|value| server.send(server.request(8, value))).collect();
    pass(RUN / 2).await;
    server.control.send(Control::Abandon).await.unwrap();
    for answer in inside {
        assert_eq!(answer.await.unwrap(), Err(InferError::Rejected(Rejection::Draining)));
    }
    assert!(server.clock.now().0 < RUN.as_nanos() as u64, "nobody waits for what is on the device");
    let late = server.batcher.infer(server.request(1, 9)).await;
    assert_eq!(late, Err(InferError::Rejected(Rejection::Draining)));
}

#[tokio::test(start_paused = true)]
async fn statistics_tell_waiting_from_running() {
    let server = start(1, 16).await;
    let first = server.send(server.request(1, 1));
    pass(RUN / 2).await;
    // Two wait for the rest of the first run, together.
    let others = [2, 3].map(|value| server.send(server.request(1, value)));
    first.await.unwrap().unwrap();
    for other in others {
        other.await.unwrap().unwrap();
    }
    let Statistics { success, fail, queue, compute, rows, batches, by_rows, last_inference } =
        statistics(&server).await;
    assert_eq!((success.count, fail.count, rows, batches), (3, 0, 3, 2));
    assert_eq!(compute.infer.time, 3 * RUN, "both requests of the second batch are charged all of it");
    assert_eq!((queue.count, success.time), (3, queue.time + compute.infer.time));
    assert!(queue.time >= RUN && queue.time < RUN + RUN / 2, "{:?}", queue.time);
    let by_rows: Vec<_> = by_rows.iter().map(|(rows, totals)| (*rows, totals.infer.count, totals.infer.time)).collect();
    assert_eq!(by_rows, [(1, 1, RUN), (2, 1, RUN)]);
    assert!(last_inference.unwrap() > Duration::from_secs(1_700_000_000), "milliseconds since 1970");
}

#[tokio::test(start_paused = true)]
async fn what_fails_or_is_left_counts_as_failed_once() {
    let server = start(1, 16).await;
    server.batcher.infer(server.request(1, POISON)).await.unwrap_err();
    let left = server.send(server.request(1, 1));
    pass(RUN / 2).await;
    left.abort();
    let late = server.request_within(1, 1, Some(RUN / 10));
    server.batcher.infer(late).await.unwrap_err();
    server.batcher.infer(server.request(1, 2)).await.unwrap();
    let Statistics { success, fail, .. } = statistics(&server).await;
    assert_eq!((success.count, fail.count), (1, 3));
}

#[tokio::test(start_paused = true)]
async fn parts_of_a_split_request_are_charged_once_each() {
    let server = start(1, 16).await;
    server.batcher.infer(server.request(20, 1)).await.unwrap();
    let Statistics { success, compute, rows, batches, .. } = statistics(&server).await;
    assert_eq!((success.count, rows, batches), (1, 20, 3));
    assert_eq!((compute.infer.count, compute.infer.time), (1, 3 * RUN));
}

#[tokio::test]
async fn a_question_sees_everything_that_was_told_before_it() {
    let (task, ends) = Loop::new(8, Config::default().scaling, Clock::start(), Arc::new(Metrics::new()));
    let models = [0, 1, 2].map(ModelId);
    for id in models {
        let devices = vec![DeviceLoad { plan: plan(id, DeviceId(0), &[]), workers: Vec::new(), samples: Vec::new() }];
        let load = ModelLoad { spec: Arc::new(ModelSpec { id, ..spec() }), devices };
        let told = Control::Load { model: Box::new(load), taken: oneshot::channel().0 };
        assert!(ends.control.try_send(told).is_ok(), "there is room");
    }
    let mut asked = std::pin::pin!(ends.batcher.statistics());
    tokio::select! {
        biased;
        _ = &mut asked => panic!("nobody is there to answer yet"),
        () = std::future::ready(()) => {}
    }
    tokio::spawn(task.run());
    let mut known: Vec<_> = asked.await.unwrap().into_keys().collect();
    known.sort();
    assert_eq!(known, models);
}
