//! What a replica runs on: how long a batch takes and what it needs.

use crate::scheduler::{Forecast, Observation};
use crate::units::{ByteSize, ClassId, Rows};
use std::time::Duration;

/// Rows may be so many quarters longer than usual.
const LONGEST: u32 = 4;

/// How many times as long such rows take.
pub(super) fn stretched(quarters: u32) -> f64 {
    1.0 + f64::from(quarters) / 4.0
}

/// One measured batch size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    rows: Rows,
    seconds: f64,
    bytes: u64,
}

/// A device with a model on it: one instance that runs batches of these sizes, and between them in proportion.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// What it is called in reports.
    pub name: String,
    /// Ascending in rows.
    points: Vec<Point>,
    /// Runs take up to this much more or less than the curve says, evenly.
    pub jitter: f64,
    /// Seconds of a processor per row and per batch: decoding, copying, encoding.
    pub cpu_seconds: (f64, f64),
}

impl Machine {
    /// A small GPU: 20 ms for any batch and 0.8 ms for each row, 8 MiB a row, up to 64 rows.
    #[must_use]
    pub fn small_gpu() -> Self {
        let point =
            |rows: Rows| Point { rows, seconds: 0.02 + 0.0008 * f64::from(rows), bytes: u64::from(rows) * (8 << 20) };
        Self {
            name: "20 ms + 0.8 ms a row, up to 64 rows".to_owned(),
            points: [1, 2, 4, 8, 16, 32, 64].map(point).to_vec(),
            jitter: 0.03,
            cpu_seconds: (0.0005, 0.0005),
        }
    }

    /// What `concertina profile --json` has measured.
    ///
    /// # Errors
    /// What is missing or makes no sense in it.
    pub fn from_profile(text: &str) -> Result<Self, String> {
        let profile: serde_json::Value =
            serde_json::from_str(text).map_err(|error| format!("is not the JSON of `concertina profile`: {error}"))?;
        let instances = profile["instances"].as_u64().filter(|count| *count > 0).ok_or("has no field `instances`")?;
        let rows = profile["rows"].as_array().ok_or("has no field `rows`")?;
        let mut points = Vec::new();
        for (index, line) in rows.iter().enumerate() {
            let number =
                |field: &str| line[field].as_f64().ok_or_else(|| format!("rows[{index}].{field}: expected a number"));
            let (rows, seconds, bytes) = (number("rows")?, number("seconds")?, number("observed_bytes")?);
            let ascends = points.last().is_none_or(|last: &Point| f64::from(last.rows) < rows);
            if !(1.0..=65_536.0).contains(&rows) || !ascends || !(1e-6..=3600.0).contains(&seconds) || bytes < 0.0 {
                return Err(format!("rows[{index}]: expected ascending rows, seconds over 0 and bytes"));
            }
            // One instance that is as fast as all of them together.
            points.push(Point { rows: rows as Rows, seconds: seconds / instances as f64, bytes: bytes as u64 });
        }
        if points.len() < 3 {
            return Err("has fewer than 3 measured batch sizes: too few to know a knee".to_owned());
        }
        let name = format!("{} as measured", profile["model"].as_str().unwrap_or("a model"));
        Ok(Self { name, points, ..Self::small_gpu() })
    }

    /// The batch sizes, ascending.
    pub(super) fn ladder(&self) -> Vec<Rows> {
        self.points.iter().map(|point| point.rows).collect()
    }

    /// Seconds of a batch, without jitter.
    #[must_use]
    pub fn seconds(&self, rows: Rows) -> f64 {
        self.between(rows, |point| point.seconds)
    }

    /// Bytes of a batch.
    pub(super) fn bytes(&self, rows: Rows) -> u64 {
        self.between(rows, |point| point.bytes as f64).ceil() as u64
    }

    /// What was measured of it while loading: rows of the usual length, and of up to twice that.
    pub(super) fn observations(&self) -> Vec<Observation> {
        let observation = |quarters: u32| {
            self.points.iter().map(move |point| Observation {
                class: ClassId(quarters),
                units: 4 + u64::from(quarters),
                rows: point.rows,
                duration: Duration::from_secs_f64(point.seconds * stretched(quarters)),
                bytes: ByteSize(point.bytes),
            })
        };
        (0..=LONGEST).flat_map(observation).collect()
    }

    /// Bytes that a part of the memory of the largest batch is.
    pub(super) fn budget(&self, part: f64) -> ByteSize {
        let largest = self.points.last().map_or(1, |point| point.bytes);
        let smallest = self.points.first().map_or(1, |point| point.bytes);
        ByteSize(((largest as f64 * part) as u64).max(smallest))
    }

    /// The best rows per second within a part of the memory of the largest batch.
    #[must_use]
    pub fn best_rate(&self, part: f64) -> f64 {
        let observations = self.observations().into_iter().filter(|one| one.class == ClassId(0));
        let forecast = Forecast::new(&self.ladder(), 0.0, &observations.collect::<Vec<_>>());
        let most = forecast.largest_within(self.budget(part), self.points.last().map_or(1, |point| point.rows));
        (1..=most.max(1)).map(|rows| f64::from(rows) / self.seconds(rows)).fold(0.0, f64::max)
    }

    fn between(&self, rows: Rows, value: impl Fn(&Point) -> f64) -> f64 {
        let after = self.points.partition_point(|point| point.rows < rows);
        let (Some(first), Some(last)) = (self.points.first(), self.points.last()) else { return 0.0 };
        match (after.checked_sub(1).map(|before| &self.points[before]), self.points.get(after)) {
            (Some(before), Some(after)) => {
                let part = f64::from(rows - before.rows) / f64::from(after.rows - before.rows);
                value(before) + part * (value(after) - value(before))
            }
            (Some(_), None) => value(last),
            _ => value(first),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_small_gpu_is_what_it_says() {
        let machine = Machine::small_gpu();
        for (rows, seconds) in [(1, 0.0208), (3, 0.0224), (48, 0.0584), (64, 0.0712)] {
            assert!((machine.seconds(rows) - seconds).abs() < 1e-9, "{rows}");
        }
        assert!((machine.best_rate(1.0) - 64.0 / 0.0712).abs() < 0.1);
        assert!((machine.best_rate(0.125) - 8.0 / 0.0264).abs() < 0.1, "an eighth of the memory: 8 rows");
    }

    #[test]
    fn a_profile_is_read_and_a_broken_one_is_named() {
        let line =
            |rows: u32| serde_json::json!({"rows": rows, "seconds": 0.01 * f64::from(rows), "observed_bytes": 7});
        let profile = |rows: &[u32]| {
            let rows: Vec<_> = rows.iter().map(|rows| line(*rows)).collect();
            serde_json::json!({"model": "m", "instances": 2, "rows": rows}).to_string()
        };
        let machine = Machine::from_profile(&profile(&[1, 2, 4])).expect("a profile");
        assert!((machine.seconds(4) - 0.02).abs() < 1e-12, "two instances are one that is twice as fast");
        for (text, part) in [
            ("x", "is not the JSON"),
            ("{}", "`instances`"),
            (r#"{"instances": 1}"#, "`rows`"),
            (r#"{"instances": 1, "rows": [{"rows": 1}]}"#, "rows[0].seconds"),
            (&profile(&[1, 2]), "fewer than 3"),
            (&profile(&[2, 1, 4]), "rows[1]: expected ascending"),
        ] {
            let error = Machine::from_profile(text).expect_err(part);
            assert!(error.contains(part), "{error}");
        }
    }
}
