//! Clients that ask again right behind their answers, in virtual time.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "support/plan.rs"]
mod support;

use concertina::scheduler::{Action, Dispatch, Input, ModelPlan, Observation, Outcome, Scheduler};
use concertina::units::{ByteSize, ClassId, Instant, Rows};
use std::time::Duration;
use support::{plan, request};

fn gathering(max_gather_delay: Duration, observations: Vec<Observation>) -> ModelPlan {
    ModelPlan { max_gather_delay, observations, ..plan(0) }
}

/// Eight clients, each asking again 100 µs after its answer, one after the other; the batch sizes of the last rounds.
fn closed_loop(gather: Duration, micros: impl Fn(u64) -> u64) -> Vec<Rows> {
    let observation = |rows: Rows| Observation {
        class: ClassId(0),
        units: 1,
        rows,
        duration: Duration::from_micros(micros(u64::from(rows))),
        bytes: ByteSize(1),
    };
    let observations = [1, 2, 4, 8].map(observation).to_vec();
    let mut scheduler = Scheduler::new();
    let mut now = Instant(1);
    scheduler.handle(now, Input::Load(gathering(gather, observations)));
    let mut arrivals: Vec<Instant> = (0..8).map(|client| now + Duration::from_micros(client * 100)).collect();
    let (mut id, mut running, mut sizes) = (0, None, Vec::new());
    while sizes.len() < 200 {
        let due = arrivals.iter().copied().chain(scheduler.poll_timeout()).chain(running.as_ref().map(|(end, _)| *end));
        now = due.min().expect("clients come again").max(now);
        for _ in arrivals.extract_if(.., |arrival| *arrival <= now) {
            id += 1;
            scheduler.handle(now, Input::Arrive(request(id)));
        }
        if let Some((_, dispatch)) = running.take_if(|(end, _): &mut (Instant, Dispatch)| *end <= now) {
            let duration = Duration::from_micros(micros(u64::from(dispatch.rows)));
            scheduler.handle(now, Input::Complete(dispatch.batch, Outcome::Done { duration, bytes: ByteSize(1) }));
        }
        while let Some(action) = scheduler.poll_action(now) {
            match action {
                Action::Dispatch(dispatch) => {
                    sizes.push(dispatch.rows);
                    running = Some((now + Duration::from_micros(micros(u64::from(dispatch.rows))), dispatch));
                }
                Action::Finish(_) => arrivals.push(now + Duration::from_micros(100 * (1 + arrivals.len() as u64))),
                other => panic!("{other:?}"),
            }
        }
    }
    sizes.split_off(180)
}

#[test]
fn clients_that_ask_again_share_the_next_batch_where_that_pays() {
    let (gather, never) = (Duration::from_millis(5), Duration::ZERO);
    let bound_by_weights = |rows| 9000 + 100 * rows;
    assert_eq!(closed_loop(gather, bound_by_weights), [8; 20], "all eight in each batch");
    let mean = |sizes: Vec<Rows>| f64::from(sizes.iter().sum::<Rows>()) / sizes.len() as f64;
    assert!(mean(closed_loop(never, bound_by_weights)) < 5.0, "without, every second batch is one row");
    let bound_by_rows = |rows| 9000 * rows;
    assert_eq!(closed_loop(gather, bound_by_rows), closed_loop(never, bound_by_rows), "nothing would be gained");
    let short = |rows| 30 + rows;
    assert_eq!(closed_loop(gather, short), closed_loop(never, short), "no timer is so fine");
}
