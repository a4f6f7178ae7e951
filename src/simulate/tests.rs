use super::*;

fn setting() -> Setting {
    let scaling = Scaling { target: 0.7, window: Duration::from_secs(15) };
    Setting { peak: 2000.0, ..Setting::new(scaling, 4096, 0.03) }
}

#[test]
fn the_seed_repeats_a_run_exactly_and_another_seed_does_not() {
    let setting = || Setting { peak: 300.0, ..setting() };
    for signal in [SignalKind::Saturation, SignalKind::QueueTime] {
        let target = reading_at(&setting(), signal, 0.6);
        let first = run(&setting(), Workload::Burst, signal, target);
        assert_eq!(first, run(&setting(), Workload::Burst, signal, target), "{signal:?}");
        let other = run(&Setting { seed: 2, ..setting() }, Workload::Burst, signal, target);
        assert_ne!(first, other, "{signal:?}");
    }
}

#[test]
fn as_many_requests_come_as_the_load_says_and_pods_follow_it() {
    let outcome = run(&setting(), Workload::Ramp, SignalKind::Saturation, 0.6);
    // Half an hour up, half an hour at the peak, half an hour down.
    let expected = 2000.0 * 60.0 * (2.0 * 30.0 * 0.55 + 30.0);
    let came = (outcome.answered + outcome.refused) as f64;
    assert!((came / expected - 1.0).abs() < 0.01, "{came} of {expected}");
    assert!(outcome.meets(setting().objective), "{:?}", outcome.p99);
    let at = |minute: usize| outcome.minutes[minute].replicas;
    let needed = (2000.0 / setting().capacity() / 0.6).ceil() as u32;
    assert!(at(5) <= 2 && at(58).abs_diff(needed) <= 1, "{} pods, then {} of {needed}", at(5), at(58));
    let hours: f64 = outcome.minutes.iter().map(|minute| f64::from(minute.replicas) / 60.0).sum();
    assert!((outcome.replica_hours / hours - 1.0).abs() < 0.05, "{} and by minutes {hours}", outcome.replica_hours);
}

#[test]
fn a_target_that_is_too_high_keeps_requests_waiting() {
    let small = Setting { peak: 1000.0, replicas: (1, 1), ..setting() };
    let outcome = run(&small, Workload::Ramp, SignalKind::Saturation, 0.6);
    assert!(!outcome.meets(small.objective) && outcome.refused > 0, "one pod of 899 rows/s for 1000: {outcome:?}");
    assert_eq!(outcome.most_replicas, 1);
}

#[test]
fn saturation_sees_a_squeeze_that_the_processors_do_not() {
    let pods = |signal, target| {
        let outcome = run(&setting(), Workload::Squeeze, signal, target);
        (outcome.minutes[15].replicas, outcome.minutes[35].replicas)
    };
    let (before, during) = pods(SignalKind::Saturation, 0.6);
    assert!(during >= 2 * before, "{before} pods, then {during}");
    let (before, during) = pods(SignalKind::Cpu, reading_at(&setting(), SignalKind::Cpu, 0.6));
    assert!(during <= before + 1, "{before} pods, then {during}");
}

#[test]
fn saturation_sees_rows_that_become_longer_and_the_processors_do_not() {
    let pods = |signal, target| {
        let outcome = run(&setting(), Workload::Lengthen, signal, target);
        (outcome.minutes[10].replicas, outcome.minutes[35].replicas)
    };
    let (before, during) = pods(SignalKind::Saturation, 0.6);
    assert!(during >= 2 * before - 1, "{before} pods, then {during}");
    let (before, during) = pods(SignalKind::Cpu, reading_at(&setting(), SignalKind::Cpu, 0.6));
    assert!(during <= before + 1, "{before} pods, then {during}");
}
