use super::*;
use crate::signal::Scaling;
use crate::simulate::Machine;

fn setting() -> Setting {
    let scaling = Scaling { target: 0.7, window: Duration::from_secs(15) };
    Setting::new(scaling, 4096, 0.03)
}

/// Ten minutes at a part of the capacity: the replica, its latencies, and how many requests came per second.
fn lived(part: f64) -> (Replica, Histogram, f64) {
    let setting = setting();
    let (mut replica, mut latencies) = (Replica::new(&setting, 1, Instant::default()), Histogram::new());
    let rate = part * setting.capacity();
    for tick in 1..=2400 {
        replica.advance(Instant::default() + Duration::from_millis(250) * tick, rate, &mut latencies);
        replica.publish();
    }
    (replica, latencies, rate)
}

/// The same, request by request, by a queue that is nothing but a list: what waits when a batch ends is the next batch.
fn reference(rate: f64, seconds: f64) -> (Vec<u64>, u64) {
    let (machine, mut random) = (Machine::small_gpu(), Random::new(99, 0));
    let mut arrivals = Vec::new();
    let mut at = random.exponential(rate);
    while at < seconds {
        arrivals.push(at);
        at += random.exponential(rate);
    }
    let (mut next, mut free, mut batches, mut latencies) = (0, 0.0_f64, 0, Vec::new());
    while next < arrivals.len() {
        let begin = free.max(arrivals[next]);
        let rows = arrivals[next..].iter().take(64).take_while(|arrival| **arrival <= begin).count();
        free = begin + machine.seconds(rows as Rows) * (1.0 + 0.03 * (2.0 * random.unit() - 1.0));
        latencies.extend(arrivals[next..next + rows].iter().map(|arrival| ((free - arrival) * 1e6) as u64));
        next += rows;
        batches += 1;
    }
    latencies.sort_unstable();
    (latencies, batches)
}

#[test]
fn requests_in_groups_fare_as_requests_one_by_one() {
    for part in [0.02, 0.1, 0.5, 0.8, 0.95] {
        let (replica, latencies, rate) = lived(part);
        let (truth, batches) = reference(rate, 600.0);
        let near = |a: f64, b: f64, what: &str| {
            assert!((a / b - 1.0).abs() < 0.06, "{what} at {part} of the capacity: {a}, one by one {b}");
        };
        near(latencies.answered() as f64, truth.len() as f64, "requests");
        near(replica.counters.batches as f64, batches as f64, "batches");
        for share in [0.1, 0.5, 0.9, 0.99] {
            let expected = truth[(share * truth.len() as f64) as usize] as f64;
            let found = latencies.quantile(share).expect("nothing is refused").as_micros() as f64;
            near(found, expected, &format!("quantile {share}"));
        }
        let Counters { offered, dispatched, .. } = replica.counters;
        assert_eq!(offered, latencies.answered() + replica.inside(), "everything is answered or inside");
        assert_eq!(dispatched, offered - replica.waiting);
    }
}

#[test]
fn the_signal_is_the_load_over_the_capacity_and_counts_what_is_refused() {
    for part in [0.1, 0.5, 0.9] {
        let (replica, ..) = lived(part);
        let saturation = replica.counters.saturation;
        assert!((saturation / part - 1.0).abs() < 0.12, "{part}: {saturation}");
    }
    let (replica, latencies, _) = lived(2.0);
    assert!(latencies.refused() > 100_000, "half of 2 × 899 × 600: {}", latencies.refused());
    // Twice the capacity, and a full queue of 4096 rows to be worked off within 15 seconds beside it.
    let expected = 2.0 + 4096.0 / 15.0 / 898.9;
    assert!((replica.counters.saturation / expected - 1.0).abs() < 0.1, "{}", replica.counters.saturation);
    assert_eq!(replica.counters.offered, latencies.answered() + latencies.refused() + replica.inside());
}

#[test]
fn a_neighbour_makes_batches_smaller_and_the_capacity_less() {
    let setting = setting();
    let (mut replica, mut latencies) = (Replica::new(&setting, 1, Instant::default()), Histogram::new());
    let full = replica.capacity();
    replica.remember(0.125);
    let squeezed = setting.machine.best_rate(0.125);
    assert!((replica.capacity() / squeezed - 1.0).abs() < 0.01, "{full} to {} of {squeezed}", replica.capacity());
    replica.advance(Instant::default() + Duration::from_secs(60), 0.9 * squeezed, &mut latencies);
    let rows = replica.counters.dispatched as f64 / replica.counters.batches as f64;
    assert!((2.0..=8.0).contains(&rows), "{rows} rows a batch");
    replica.remember(1.0);
    assert!((replica.capacity() / full - 1.0).abs() < 0.05);
}
