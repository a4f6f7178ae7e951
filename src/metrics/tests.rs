//! What is exposed, and that it belongs together.

use super::*;
use crate::memory::{ArenaKind, ArenaStats, Counters};
use crate::scheduler::LimitedBy;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn text(metrics: &Metrics) -> String {
    String::from_utf8(metrics.encode()).unwrap()
}

/// The value of a line, by its name with all labels.
fn value(text: &str, name: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

#[test]
fn what_was_counted_is_exposed_under_its_labels() {
    let metrics = Metrics::new();
    let model = metrics.model("m", 3);
    model.limited(LimitedBy::Knee).inc();
    model.spent(Stage::Encode, Duration::from_millis(1500));
    model.triton.succeeded(4, RequestTimes { total: Duration::from_millis(7), ..RequestTimes::default() });
    model.saturated(Some(100.0), Some(0.25));
    metrics.reject("m", 3, &Rejection::Draining);
    metrics.answered("m", 3, "ok", 0.001);
    metrics.answered("m", 3, "overloaded", 0.001);
    metrics.answered("m", 3, "ok", 0.001);
    metrics.offered("m", 3, 5);
    let text = text(&metrics);
    for line in [
        r#"concertina_batch_limited_total{by="knee",model="m",version="3"} 1"#,
        r#"concertina_batch_limited_total{by="bytes",model="m",version="3"} 0"#,
        r#"concertina_rejections_total{model="m",reason="draining",version="3"} 1"#,
        r#"concertina_requests_total{code="ok",model="m",version="3"} 2"#,
        r#"concertina_requests_total{code="overloaded",model="m",version="3"} 1"#,
        r#"concertina_request_rows_total{model="m",version="3"} 5"#,
        r#"concertina_request_seconds_count{model="m",version="3"} 3"#,
        r#"concertina_stage_seconds_total{model="m",stage="encode",version="3"} 1.5"#,
        r#"concertina_saturation{model="m",version="3"} 0.25"#,
        r#"nv_inference_count{model="m",version="3"} 4"#,
        r#"nv_inference_request_duration_us{model="m",version="3"} 7000"#,
        r#"nv_inference_request_failure{model="m",reason="OTHER",version="3"} 1"#,
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

#[test]
fn a_version_that_is_gone_leaves_nothing_and_the_others_stay() {
    let metrics = Metrics::new();
    let before = text(&metrics).lines().filter(|line| !line.starts_with("process_")).count();
    for version in 1..=50 {
        metrics.model("m", version).saturated(Some(1.0), Some(1.0));
        metrics.answered("m", version, "device_error", 0.1);
        metrics.forget("m", version);
        metrics.answered("m", version, "ok", 0.1);
    }
    metrics.model("n", 1).done.inc();
    let after = text(&metrics);
    assert!(!after.contains("model=\"m\""), "{after}");
    assert!(after.contains(r#"concertina_batches_total{model="n",outcome="done",version="1"} 1"#));
    metrics.forget("n", 1);
    let left = text(&metrics).lines().filter(|line| !line.starts_with("process_")).count();
    assert!(left <= before, "{left} lines are left of {before}");
}

#[test]
fn what_is_not_known_has_no_series() {
    let metrics = Metrics::new();
    let model = metrics.model("m", 1);
    model.saturated(Some(10.0), Some(2.0));
    model.saturated(None, None);
    assert!(!text(&metrics).contains("concertina_saturation{"), "a zero would scale down");
    assert!(!text(&metrics).contains("nv_gpu_"), "there is no such device");
}

#[test]
fn sensors_are_exposed_under_both_names() {
    let metrics = Metrics::new();
    let reading = DeviceReading {
        device: DeviceId(1),
        uuid: "GPU-1".to_owned(),
        utilization: Some(0.5),
        memory_others: Some(ByteSize(7)),
        celsius: Some(61.0),
        memory_total: Some(ByteSize(1 << 30)),
        ..DeviceReading::default()
    };
    metrics.devices(vec![reading]);
    let text = text(&metrics);
    assert_eq!(value(&text, r#"concertina_device_temperature_celsius{device="1"}"#), Some(61.0));
    assert_eq!(value(&text, r#"nv_gpu_utilization{gpu_uuid="GPU-1"}"#), Some(0.5));
    assert_eq!(value(&text, r#"concertina_device_neighbours_bytes{device="1"}"#), Some(7.0));
    assert_eq!(value(&text, r#"nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"}"#), Some(f64::from(1 << 30)));
    assert!(!text.contains("nv_gpu_power_usage{"), "it did not tell");
}

#[test]
fn the_process_is_seen_as_it_is() {
    let text = text(&Metrics::new());
    for (name, least, most) in [
        ("process_resident_memory_bytes", 1e5, 1e12),
        ("process_virtual_memory_bytes", 1e6, 1e15),
        ("process_open_fds", 3.0, 1e6),
        ("process_max_fds", 16.0, 1e10),
        ("process_threads", 1.0, 1e4),
        ("process_cpu_seconds_total", 0.0, 1e6),
        ("process_start_time_seconds", 1.6e9, 1e10),
    ] {
        let found = value(&text, name).unwrap_or_else(|| panic!("{name} is not in\n{text}"));
        assert!((least..=most).contains(&found), "{name} {found}");
    }
}

/// A ledger that adds up, whatever the round.
fn ledger(round: u64) -> LedgerStats {
    let (committed, outside, total) = (ByteSize(round * 7 % 1000), ByteSize(round * 13 % 1000), ByteSize(5000));
    let arena = ArenaStats {
        label: format!("m/run{}", round % 3),
        kind: ArenaKind::Run,
        priority: 1,
        allocated: ByteSize(1),
        reserved: committed,
        active: ByteSize(1),
        peak_allocated: ByteSize(1),
        peak_reserved: ByteSize(1),
        peak_active: ByteSize(1),
        blocks: 1,
        granules: 1,
        allocations: round,
        frees: round,
        denied: round,
        last_denied: None,
        free: ByteSize(4),
        largest_free: ByteSize(3),
        in_run: false,
    };
    LedgerStats {
        device: DeviceId(0),
        limit: total,
        headroom: ByteSize::ZERO,
        margin: ByteSize::ZERO,
        committed,
        allocated: ByteSize(1),
        free: ByteSize(total.0 - committed.0 - outside.0),
        total,
        outside,
        counters: Counters::default(),
        last_failure: None,
        arenas: vec![arena],
    }
}

#[test]
fn every_scrape_adds_up_while_the_ledger_changes() {
    let metrics = Metrics::new();
    metrics.ledger(ledger(0));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut round = 0;
            while !done.load(Ordering::Relaxed) {
                round += 1;
                metrics.ledger(ledger(round));
            }
        });
        for _ in 0..300 {
            let text = text(&metrics);
            let kind = |kind: &str| {
                let name = format!(r#"concertina_memory_bytes{{device="0",kind="{kind}"}}"#);
                value(&text, &name).unwrap_or_else(|| panic!("{name} is not in\n{text}"))
            };
            assert_eq!(kind("committed") + kind("outside") + kind("free"), kind("total"));
            let arenas: Vec<_> = text.lines().filter(|line| line.contains(r#"kind="reserved""#)).collect();
            assert_eq!(arenas.len(), 1, "arenas that are gone do not stay: {arenas:?}");
            assert!(arenas[0].ends_with(&format!(" {}", kind("committed"))), "{arenas:?}");
        }
        done.store(true, Ordering::Relaxed);
    });
}

mod names;
