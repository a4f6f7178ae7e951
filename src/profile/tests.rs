use super::*;
use crate::model::Settings;
use crate::model::settings::Fill;
use crate::runtime::calibrate::Measured;
use crate::units::ModelId;
use std::time::Duration;

/// `points` are rows, milliseconds and bytes.
fn profile(points: &[(Rows, u64, u64)], free: u64) -> Profile {
    let spec = ModelSpec {
        id: ModelId(0),
        name: "m".to_owned(),
        version: 3,
        inputs: Vec::new(),
        outputs: Vec::new(),
        batch_axis: Some(0),
        unbatched_reason: None,
        max_batch_size: 32,
        padding: None,
        settings: Settings::default(),
        text: None,
    };
    let measured =
        |&(rows, millis, bytes)| Measured { rows, duration: Duration::from_millis(millis), bytes: ByteSize(bytes) };
    let calibration = Calibration {
        ladder: points.iter().map(|point| point.0).collect(),
        measured: points.iter().map(measured).collect(),
        class_dims: vec![64, 64],
        units: 128,
        integers: Fill::One,
        cut_short: None,
        from_cache: false,
    };
    let memory = Memory { file: ByteSize(2 << 20), weights: ByteSize(1 << 20), free: ByteSize(free) };
    Profile::new(&spec, Layout { instances: 2, threads: 1 }, &calibration, memory)
}

const POINTS: [(Rows, u64, u64); 4] = [(1, 10, 1100), (2, 12, 1200), (4, 20, 1400), (8, 40, 2000)];

#[test]
fn predictions_come_from_the_smallest_and_a_middle_size() {
    let profile = profile(&POINTS, 3300);
    let seen: Vec<_> =
        profile.rows.iter().map(|line| (line.fitted, line.predicted_bytes, line.observed_bytes)).collect();
    assert_eq!(seen, [(true, 1100, 1100), (false, 1200, 1200), (true, 1400, 1400), (false, 1800, 2000)]);
    let close = |a: f64, b: f64| (a - b).abs() < 1e-6;
    assert!(close(profile.rows[3].error_percent, -10.0) && close(profile.rows[1].error_percent, 0.0));
    assert!(close(profile.rows[3].rows_per_second, 400.0), "two instances");
    assert_eq!((profile.knee, profile.max_batch_size), (Some(4), 8));
    // Beyond what was measured the steepest slope holds: 150 bytes per row from 2000 at 8 rows.
    assert_eq!(profile.fits_rows, 16);
}

#[test]
fn the_bound_by_memory_is_found_below_and_beyond_what_was_measured() {
    for (free, rows) in [(0, 0), (1099, 0), (1100, 1), (1399, 3), (2000, 8), (2150, 9)] {
        assert_eq!(profile(&POINTS, free).fits_rows, rows, "{free}");
    }
    assert_eq!(profile(&POINTS, u64::MAX >> 8).fits_rows, MOST_ROWS);
    assert_eq!(profile(&POINTS[..1], 2200).fits_rows, 2, "one point: in proportion");
}

#[test]
fn the_table_names_everything() {
    let text = profile(&POINTS, 3300).text();
    for part in [
        "m, version 3\n",
        "  batch    axis 0\n",
        "  layout   2 instances with 1 thread each\n",
        "  weights  1.0 MiB in the ledger, of a file of 2.0 MiB\n",
        "  knee     4 rows (within 2% of the best rows/s)\n",
        "  memory   3.2 KiB free for runs now: enough for 16 rows in one batch; the largest that was measured or set is 8\n",
        "rows   dims  predicted  observed    error   seconds  rows/s\n",
        "   4  64,64   1.4 KiB*   1.4 KiB   +0.00%  0.020000   400.0  <- knee\n",
        "   8  64,64   1.8 KiB    2.0 KiB  -10.00%  0.040000   400.0\n",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    assert!(profile(&POINTS, 10).text().contains("not enough for one row"));
    let mut padded = profile(&POINTS, 3300);
    assert!(!padded.text().contains("padded"));
    padded.padding = Some(Padding { dims: [("seq".to_owned(), vec![8, 12])].into(), difference: 4.2e-7 });
    let line = "  padded   seq to 8 12: changes answers by at most 4.2e-7 of the largest value\n";
    assert!(padded.text().contains(line), "{}", padded.text());
    assert!(padded.json().contains("4.2e-7"));
}

#[test]
fn json_reads_back() {
    let read: serde_json::Value = serde_json::from_str(&profile(&POINTS, 3300).json()).expect("JSON");
    assert_eq!(read["rows"][3]["observed_bytes"], 2000);
    assert_eq!((&read["knee"], &read["fits_rows"], &read["instances"]), (&4.into(), &16.into(), &2.into()));
}

#[test]
fn device_times_are_shown_where_a_device_has_taken_them() {
    let mut timed = profile(&POINTS, 3300);
    let on_a_cpu = (timed.text(), timed.json());
    assert!(!on_a_cpu.0.contains("device") && !on_a_cpu.1.contains("device"), "{on_a_cpu:?}");
    timed.rows[2].device_seconds = Some(0.015);
    let text = timed.text();
    for part in [
        "rows   dims  predicted  observed    error   seconds    device  rows/s\n",
        "   4  64,64   1.4 KiB*   1.4 KiB   +0.00%  0.020000  0.015000   400.0  <- knee\n",
        "   8  64,64   1.8 KiB    2.0 KiB  -10.00%  0.040000             400.0\n",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    let read: serde_json::Value = serde_json::from_str(&timed.json()).expect("JSON");
    assert_eq!((&read["rows"][2]["device_seconds"], read["rows"][3].get("device_seconds")), (&0.015.into(), None));
}

#[test]
fn the_picture_marks_the_knee_and_the_bound_and_is_complete_for_any_profile() {
    let near = profile(&POINTS, 3300).svg();
    for part in ["<svg xmlns=", "prefers-color-scheme: dark", ">knee 4</text>", ">memory 16</text>", "</svg>\n"] {
        assert!(near.contains(part), "{part} in\n{near}");
    }
    assert!(!near.contains("http://www.w3.org/1999/xlink") && !near.contains("url("), "self-contained");
    for (points, free) in [(&POINTS[..], 1 << 40), (&POINTS[..1], 0), (&POINTS[..0], 0), (&[(1, 0, 0)][..], 1)] {
        let svg = profile(points, free).svg();
        assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.contains(">memory"), "{svg}");
        assert_eq!(svg.matches("<circle").count(), 2 * points.len());
    }
}
