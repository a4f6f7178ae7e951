//! One behaviour of the scheduler at a time; `simulation.rs` mixes them.

#[path = "support/plan.rs"]
mod support;

use concertina::scheduler::{
    Action, Dispatch, Input, LimitedBy, MemorySample, ModelPlan, Observation, Outcome, Packing, Part, Rejection,
    RequestMeta, Scheduler,
};
use concertina::units::{
    BatchId, ByteSize, ClassId, DeviceId, FamilyId, InstanceId, Instant, ModelId, RequestId, Rows,
};
use std::time::Duration;
use support::{plan, request};

const DONE: Outcome = Outcome::Done { duration: Duration::from_millis(10), bytes: ByteSize(0) };
const DENIED: Outcome = Outcome::OutOfMemory { bytes: ByteSize(0) };

/// A scheduler, its clock in milliseconds, and everything it has said.
struct Rig {
    scheduler: Scheduler,
    now: u64,
    said: Vec<Action>,
}

impl Rig {
    fn new(plans: impl IntoIterator<Item = ModelPlan>) -> Self {
        let mut rig = Self { scheduler: Scheduler::new(), now: 1000, said: Vec::new() };
        for plan in plans {
            rig.tell(Input::Load(plan));
        }
        rig
    }

    fn tell(&mut self, input: Input) {
        self.scheduler.handle(at(self.now), input);
        self.poll();
    }

    fn poll(&mut self) {
        while let Some(action) = self.scheduler.poll_action(at(self.now)) {
            self.said.push(action);
        }
    }

    /// Lets time pass, waking the scheduler when it wants to be woken.
    fn pass(&mut self, millis: u64) {
        let end = self.now + millis;
        while let Some(wake) = self.scheduler.poll_timeout().filter(|wake| *wake <= at(end)) {
            self.now = self.now.max(wake.0.div_ceil(1_000_000));
            self.poll();
        }
        self.now = end;
    }

    fn arrive(&mut self, requests: impl IntoIterator<Item = RequestMeta>) {
        for meta in requests {
            self.tell(Input::Arrive(meta));
        }
    }

    fn memory(&mut self, budget: u64, capacity: u64) {
        let (device, budget, capacity) = (DeviceId(0), ByteSize(budget), ByteSize(capacity));
        self.tell(Input::Memory(MemorySample { device, budget, capacity }));
    }

    /// Ends the latest batch.
    fn end(&mut self, outcome: Outcome) {
        let batch = self.batches().last().expect("a batch is in flight").batch;
        self.tell(Input::Complete(batch, outcome));
    }

    fn batches(&self) -> Vec<Dispatch> {
        let dispatch =
            |action: &Action| if let Action::Dispatch(dispatch) = action { Some(dispatch.clone()) } else { None };
        self.said.iter().filter_map(dispatch).collect()
    }

    fn rows(&self) -> Vec<Rows> {
        self.batches().iter().map(|batch| batch.rows).collect()
    }

    fn rejected(&self) -> Vec<(u64, Rejection)> {
        let reject = |action: &Action| if let Action::Reject(id, why) = action { Some((id.0, *why)) } else { None };
        self.said.iter().filter_map(reject).collect()
    }

    fn finished(&self) -> Vec<u64> {
        let finish = |action: &Action| if let Action::Finish(id) = action { Some(id.0) } else { None };
        self.said.iter().filter_map(finish).collect()
    }
}

fn at(millis: u64) -> Instant {
    Instant(millis * 1_000_000)
}

fn requests(ids: std::ops::RangeInclusive<u64>) -> impl Iterator<Item = RequestMeta> {
    ids.map(request)
}

fn part(request: u64, start: Rows, rows: Rows) -> Part {
    Part { request: RequestId(request), start, rows }
}

#[test]
fn a_client_that_goes_between_its_last_row_and_the_word_of_it_hears_nothing() {
    let mut rig = Rig::new([plan(0)]);
    rig.arrive([request(1)]);
    let batch = rig.batches().last().map(|dispatch| dispatch.batch).expect("an idle instance takes it");
    // Both come in before anybody asks what to do.
    rig.scheduler.handle(at(rig.now), Input::Complete(batch, DONE));
    rig.scheduler.handle(at(rig.now), Input::Cancel(RequestId(1)));
    rig.poll();
    assert!(rig.finished().is_empty());
    assert!(rig.scheduler.is_idle());
}

#[test]
fn an_idle_instance_takes_what_is_there_and_the_queue_grows_the_next_batch() {
    let mut rig = Rig::new([plan(0)]);
    rig.arrive(requests(1..=12));
    rig.end(DONE);
    rig.end(DONE);
    assert_eq!(rig.rows(), [1, 8, 3]);
    let limits: Vec<_> = rig.batches().iter().map(|batch| batch.limited_by).collect();
    assert_eq!(limits, [LimitedBy::Rows, LimitedBy::Ladder, LimitedBy::Rows]);
}

#[test]
fn of_two_idle_instances_the_one_that_ran_last_runs_next() {
    let both = vec![InstanceId(0), InstanceId(1)];
    let mut rig = Rig::new([ModelPlan { instances: both, ..plan(0) }]);
    for id in 1..=4 {
        rig.arrive([request(id)]);
        rig.pass(10);
        rig.end(DONE);
        rig.pass(10);
    }
    let mut ran: Vec<InstanceId> = rig.batches().iter().map(|batch| batch.instance).collect();
    ran.dedup();
    assert_eq!(ran.len(), 1, "its memory is warm: {ran:?}");
    rig.arrive(requests(5..=6));
    let ran: Vec<InstanceId> = rig.batches().iter().skip(4).map(|batch| batch.instance).collect();
    assert_ne!(ran[0], ran[1], "but nobody waits for it while another is idle");
}

#[test]
fn instances_that_are_idle_together_share_the_bytes() {
    let both = vec![InstanceId(0), InstanceId(1)];
    let mut rig = Rig::new([ModelPlan { instances: both, knee_tolerance: 0.0, ..plan(0) }]);
    rig.memory(60, 1000);
    rig.arrive([RequestMeta { rows: 20, ..request(1) }]);
    // Sixty bytes are six rows: three for each, not six for one and nothing for the other.
    assert_eq!(rig.rows(), [3, 3]);
    let one_fits = 15;
    let mut rig = Rig::new([ModelPlan { instances: vec![InstanceId(0), InstanceId(1)], ..plan(0) }]);
    rig.memory(one_fits, 1000);
    rig.arrive([RequestMeta { rows: 2, ..request(1) }]);
    assert_eq!(rig.rows(), [1], "a share too small for a row is no reason to wait");
}

#[test]
fn a_large_request_is_split_over_batches_and_finishes_once() {
    let mut rig = Rig::new([ModelPlan { instances: vec![InstanceId(0), InstanceId(1)], ..plan(0) }]);
    rig.arrive([RequestMeta { rows: 20, ..request(1) }]);
    assert_eq!(rig.batches().iter().map(|batch| batch.instance.0).collect::<Vec<_>>(), [0, 1]);
    rig.tell(Input::Complete(BatchId(2), DONE));
    rig.tell(Input::Complete(BatchId(1), DONE));
    assert!(rig.finished().is_empty());
    rig.end(DONE);
    let parts: Vec<_> = rig.batches().into_iter().flat_map(|batch| batch.parts).collect();
    assert_eq!((parts, rig.finished()), (vec![part(1, 0, 8), part(1, 8, 8), part(1, 16, 4)], vec![1]));
}

#[test]
fn rows_that_ran_out_of_memory_run_again_in_halves_before_anything_else() {
    let mut rig = Rig::new([plan(0)]);
    rig.arrive([RequestMeta { rows: 8, ..request(1) }]);
    rig.arrive(requests(2..=9));
    for outcome in [DENIED, DENIED, DONE, DONE, DONE] {
        rig.end(outcome);
    }
    assert_eq!(rig.rows(), [8, 4, 2, 2, 2, 2]);
    assert_eq!(rig.batches()[2].parts, [part(1, 0, 2)]);
    assert_eq!(rig.batches()[5].parts, [part(1, 6, 2)]);
    assert!(rig.batches()[1..].iter().all(|batch| batch.limited_by == LimitedBy::Retry));
    assert_eq!(rig.said.iter().filter(|action| **action == Action::Trim(DeviceId(0))).count(), 2);
    rig.end(DONE);
    assert_eq!((rig.rows().pop(), rig.finished()), (Some(2), vec![1]), "the ceiling holds for those who come later");
    rig.pass(1000);
    rig.end(DONE);
    assert_eq!(rig.rows().pop(), Some(6), "and is forgotten");
}

#[test]
fn one_row_without_memory_waits_with_pauses_and_is_given_up_in_the_end() {
    for (deadline, given_up) in [(None, 11_000), (Some(at(1_700)), 1_700)] {
        let mut rig = Rig::new([plan(0), plan(1)]);
        rig.arrive([RequestMeta { deadline, ..request(1) }]);
        let mut tries = 0;
        while rig.rejected().is_empty() {
            if rig.batches().len() > tries {
                tries += 1;
                rig.end(DENIED);
            }
            rig.pass(1);
            assert!(tries < 40, "a hot loop");
        }
        assert!(matches!(rig.rejected()[0], (1, Rejection::MemoryExhausted { .. })));
        assert!((given_up..given_up + 600).contains(&rig.now), "given up at {}", rig.now);
        assert!(tries >= 5);
    }
}

#[test]
fn others_go_on_while_a_class_waits_for_memory() {
    let mut rig = Rig::new([plan(0), plan(1)]);
    rig.arrive([request(1)]);
    rig.end(DENIED);
    rig.arrive([RequestMeta { class: ClassId(7), ..request(2) }, RequestMeta { model: ModelId(1), ..request(3) }]);
    assert_eq!(rig.batches()[1..].iter().map(|batch| batch.parts[0].request.0).collect::<Vec<_>>(), [2, 3]);
}

#[test]
fn what_never_fits_is_refused_at_once() {
    let mut rig = Rig::new([plan(0)]);
    rig.memory(5, 9);
    rig.arrive([request(1)]);
    assert_eq!(rig.rejected(), [(1, Rejection::TooLarge { needed: ByteSize(10), capacity: ByteSize(9) })]);
}

#[test]
fn a_prediction_that_forbids_a_row_is_tried_alone_with_all_there_is() {
    let mut rig = Rig::new([plan(0)]);
    rig.memory(9, 100);
    rig.arrive([request(1)]);
    assert!(rig.batches().is_empty());
    rig.pass(50);
    assert_eq!((rig.rows(), rig.batches()[0].bytes), (vec![1], ByteSize(9)));
    rig.end(DENIED);
    assert_eq!(rig.rows(), [1]);
    rig.memory(100, 100);
    rig.pass(10);
    rig.end(DONE);
    assert_eq!(rig.finished(), [1]);
}

#[test]
fn a_head_that_waits_for_bytes_is_overtaken_by_few_batches() {
    let mut rig = Rig::new([0, 1, 2].map(|model| ModelPlan { ladder: vec![1, 2], ..plan(model) }));
    rig.memory(100, 100);
    let small = |id| RequestMeta { model: ModelId(1 + (id % 2) as u32), rows: 2, ..request(id) };
    let large = |id| RequestMeta { class: ClassId(9), units: 9, ..request(id) };
    rig.arrive([small(1), small(2), large(3), large(4)]);
    rig.arrive((5..=20).map(small));
    for batch in 1..=7 {
        let bytes = ByteSize(if batch == 7 { 90 } else { 20 });
        rig.tell(Input::Complete(BatchId(batch), Outcome::Done { duration: Duration::from_millis(10), bytes }));
    }
    let models: Vec<_> = rig.batches().iter().map(|batch| batch.model.0).collect();
    assert_eq!(models[..2], [2, 1], "these run when the large one comes");
    assert_eq!(models[2..6], [2, 1, 2, 1], "four overtake it, then nobody");
    assert_eq!(models[6..], [0, 2, 1], "the next large one has no claim yet");
}

#[test]
fn urgent_rows_go_first_but_not_for_ever() {
    let mut rig = Rig::new([ModelPlan { ladder: vec![1], max_queue_rows: 1000, ..plan(0) }]);
    rig.arrive([request(1), RequestMeta { priority: 2, ..request(2) }]);
    rig.arrive(requests(3..=40));
    for _ in 0..30 {
        rig.end(DONE);
    }
    let place = rig.finished().iter().position(|id| *id == 2).expect("served");
    assert_eq!(place, 1 + 16, "after the first and 16 that overtook it");
}

#[test]
fn a_busy_instance_is_given_a_second_batch_only_if_it_is_full() {
    let mut rig = Rig::new([ModelPlan { pipeline: 2, ..plan(0) }]);
    rig.arrive(requests(1..=8));
    assert_eq!(rig.rows(), [1]);
    rig.arrive([request(9)]);
    assert_eq!(rig.rows(), [1, 8]);
    rig.arrive(requests(10..=30));
    assert_eq!(rig.rows(), [1, 8], "two batches at most");
}

#[test]
fn rows_wait_for_company_until_the_delay_a_full_batch_or_the_drain() {
    let delayed = || ModelPlan { max_queue_delay: Duration::from_millis(5), ..plan(0) };
    let mut rig = Rig::new([delayed()]);
    rig.arrive(requests(1..=2));
    rig.pass(4);
    assert!(rig.rows().is_empty());
    rig.pass(1);
    assert_eq!(rig.rows(), [2]);

    let mut rig = Rig::new([delayed()]);
    rig.arrive(requests(1..=8));
    assert_eq!(rig.rows(), [8]);

    let mut rig = Rig::new([delayed()]);
    rig.arrive([request(1)]);
    rig.tell(Input::Drain);
    assert_eq!(rig.rows(), [1]);
    rig.arrive([request(2)]);
    assert_eq!(rig.rejected(), [(2, Rejection::Draining)]);

    let mut rig = Rig::new([delayed()]);
    rig.arrive([RequestMeta { deadline: Some(at(1022)), ..request(1) }]);
    rig.pass(2);
    assert_eq!(rig.rows(), [1], "waiting longer would endanger its deadline");
}

#[test]
fn a_full_queue_says_when_to_come_back() {
    let mut rig = Rig::new([ModelPlan { max_queue_rows: 10, ..plan(0) }]);
    rig.arrive([request(1), RequestMeta { rows: 99, ..request(2) }, request(3)]);
    let Rejection::QueueFull { retry_after } = rig.rejected()[0].1 else { panic!("{:?}", rig.rejected()) };
    assert_eq!(rig.rejected().len(), 1, "an empty queue takes a request of any size");
    let half = Duration::from_millis(99 / 2 * 17 / 8);
    assert!(retry_after >= half - Duration::from_millis(3) && retry_after <= half + Duration::from_millis(3));
}

#[test]
fn late_requests_are_refused_as_early_as_possible() {
    let mut rig = Rig::new([plan(0)]);
    let until = |id, millis| RequestMeta { deadline: Some(at(millis)), ..request(id) };
    rig.arrive([until(1, 1009)]);
    assert_eq!(rig.rejected(), [(1, Rejection::DeadlineExceeded)], "a row takes 10 ms");
    rig.arrive([until(2, 1010), until(3, 1015)]);
    assert_eq!((rig.rows(), rig.rejected().len()), (vec![1], 1));
    rig.pass(15);
    assert_eq!(rig.rejected().last(), Some(&(3, Rejection::DeadlineExceeded)), "it has waited too long");
    rig.arrive(requests(4..=43));
    rig.arrive([until(44, 1015 + 80)]);
    assert_eq!(rig.rejected().last(), Some(&(44, Rejection::DeadlineExceeded)), "40 rows need 85 ms");
}

#[test]
fn a_deadline_makes_a_batch_smaller() {
    let mut rig = Rig::new([plan(0)]);
    rig.arrive([request(1), RequestMeta { deadline: Some(at(1023)), ..request(2) }]);
    rig.arrive(requests(3..=9));
    rig.now = 1010;
    rig.end(DONE);
    let second = &rig.batches()[1];
    assert_eq!((second.rows, second.limited_by), (4, LimitedBy::Deadline));
}

#[test]
fn only_the_guilty_request_fails() {
    let mut rig = Rig::new([plan(0)]);
    rig.arrive(requests(1..=9));
    rig.end(DONE);
    for _ in 0..20 {
        let Some(last) = rig.batches().pop().filter(|_| !rig.scheduler.is_idle()) else { break };
        let guilty = last.parts.iter().any(|part| part.request == RequestId(6));
        rig.end(if guilty { Outcome::Failed } else { DONE });
    }
    assert_eq!((rig.rejected(), rig.finished()), (vec![(6, Rejection::Failed)], vec![1, 2, 3, 4, 5, 7, 8, 9]));
}

#[test]
fn rows_of_a_lost_instance_run_elsewhere_or_are_refused() {
    let mut rig = Rig::new([ModelPlan { instances: vec![InstanceId(0), InstanceId(1)], ..plan(0) }]);
    rig.arrive([request(1)]);
    rig.end(Outcome::InstanceLost);
    assert_eq!(rig.batches()[1].instance, InstanceId(1));
    rig.arrive([request(2)]);
    rig.end(Outcome::InstanceLost);
    rig.arrive([request(3)]);
    assert_eq!(rig.rejected(), [1, 2, 3].map(|id| (id, Rejection::Unhealthy)));
    rig.tell(Input::Load(plan(0)));
    rig.arrive([request(4)]);
    rig.end(DONE);
    assert_eq!(rig.finished(), [4]);
}

#[test]
fn unloading_refuses_what_waits_and_lets_the_rest_end() {
    let mut rig = Rig::new([plan(0)]);
    rig.arrive(requests(1..=3));
    rig.tell(Input::Unload(ModelId(0)));
    rig.end(DONE);
    rig.arrive([request(4)]);
    assert_eq!((rig.rejected(), rig.finished()), ([2, 3, 4].map(|id| (id, Rejection::Unhealthy)).to_vec(), vec![1]));
    assert!(rig.scheduler.is_idle());
}

#[test]
fn a_cancelled_request_costs_nothing_more() {
    let mut rig = Rig::new([plan(0)]);
    rig.arrive([RequestMeta { rows: 20, ..request(1) }, request(2)]);
    rig.tell(Input::Cancel(RequestId(1)));
    rig.end(DENIED);
    rig.end(DONE);
    assert_eq!((rig.rows(), rig.finished()), (vec![8, 1], vec![2]));
    assert!(rig.scheduler.is_idle() && rig.rejected().is_empty());
}

#[test]
fn rows_that_were_padded_and_came_back_leave_no_claim_behind_when_their_clients_go() {
    let mut padding = ModelPlan { packing: Packing::Fifo, ..plan(0) };
    let long =
        |run: &Observation| Observation { class: ClassId(9), units: 9, bytes: ByteSize(9 * run.bytes.0), ..*run };
    padding.observations.extend(padding.observations.iter().map(long).collect::<Vec<_>>());
    let mut rig = Rig::new([padding, plan(1)]);
    let of = |id, class, units| {
        let (class, family) = (ClassId(class), Some(FamilyId(0)));
        Input::Arrive(RequestMeta { class, family, units, ..request(id) })
    };
    // Both before anybody asks what to do: the short row runs padded to the long one.
    rig.scheduler.handle(at(rig.now), of(1, 0, 1));
    rig.tell(of(2, 9, 9));
    rig.arrive((3..=11).map(|id| RequestMeta { model: ModelId(1), ..request(id) }));
    assert_eq!(rig.rows(), [2, 1]);
    rig.tell(Input::Complete(BatchId(2), DONE));
    rig.memory(150, 1000);
    rig.tell(Input::Complete(BatchId(1), DENIED));
    assert_eq!(
        rig.rows(),
        [2, 1, 8],
        "one long row needs 90 bytes, of which 70 are left: it has a claim on the next ones"
    );
    rig.tell(Input::Cancel(RequestId(2)));
    rig.tell(Input::Cancel(RequestId(1)));
    rig.arrive([RequestMeta { model: ModelId(1), ..request(12) }]);
    rig.end(DONE);
    assert_eq!(rig.rows(), [2, 1, 8, 1], "nobody waits any more");
}

#[test]
fn bytes_bound_a_batch_and_are_released_at_its_end() {
    let mut rig = Rig::new([ModelPlan { instances: vec![InstanceId(0), InstanceId(1)], ..plan(0) }]);
    rig.memory(50, 100);
    rig.arrive([RequestMeta { rows: 3, ..request(1) }, RequestMeta { rows: 9, ..request(2) }]);
    assert_eq!((rig.rows(), rig.batches()[1].limited_by), (vec![3, 2], LimitedBy::Bytes));
    assert_eq!(rig.scheduler.device_stats().map(|stats| stats.reserved).collect::<Vec<_>>(), [ByteSize(50)]);
    for (batch, bytes) in [(1, ByteSize(30)), (2, ByteSize(20))] {
        rig.tell(Input::Complete(BatchId(batch), Outcome::Done { duration: Duration::from_millis(10), bytes }));
    }
    assert_eq!(rig.rows(), [3, 2, 3, 2]);
}
