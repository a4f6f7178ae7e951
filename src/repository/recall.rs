//! Starting with what an earlier start has measured. Blocking.

use super::Candidate;
use super::layouts::Layout;
use super::load::Loader;
use super::measure::{Measured, at_once};
use super::store::{AtLength, Entry, Key, Machine, Stored, digest, fill_of, ignored};
use crate::model::ModelSpec;
use crate::model::derive::derive;
use crate::model::settings::{BatchAxis, Fill};
use crate::runtime::calibrate::{self, Calibration};
use crate::runtime::lengths::{Length, confirm_lengths, measured_lengths};
use crate::units::ByteSize;
use std::sync::Arc;
use std::time::Duration;

impl Loader {
    /// Loads a candidate as an earlier start has measured it, if it has and runs confirm it; else measures it and keeps
    /// what was found.
    ///
    /// # Errors
    /// Why it cannot be served, in words for the operator.
    pub fn recall(&self, candidate: &Candidate) -> Result<Measured, String> {
        let key = self.key(candidate);
        if let Some(key) = &key
            && let Some(stored) = self.store.read(key)
        {
            match self.restore(candidate, &stored) {
                Ok(measured) => return Ok(measured),
                Err(reason) => ignored(&self.store.path(key).unwrap_or_default(), &reason),
            }
        }
        let measured = self.measure(candidate)?;
        if let Some(stored) = key.and_then(|key| to_store(key, &measured)) {
            self.store.write(&stored);
        }
        Ok(measured)
    }

    /// Keeps what was measured for the next start.
    pub fn keep(&self, candidate: &Candidate, measured: &Measured) {
        if let Some(stored) = self.key(candidate).and_then(|key| to_store(key, measured)) {
            self.store.write(&stored);
        }
    }

    /// `None` if nothing is kept, or if the file cannot be read, which loading it will say.
    fn key(&self, candidate: &Candidate) -> Option<Key> {
        if !self.store.is_on() {
            return None;
        }
        let machine = Machine::here(self.runtime.build_info(), self.cores);
        let key = Key::new(digest(&candidate.file).ok()?, machine, &candidate.settings);
        Some(match self.devices.of(&candidate.settings).ok()?.gpu() {
            Some(gpu) => key.on(&gpu.name(), (self.devices.provider(), &candidate.settings.cuda)),
            None => key,
        })
    }

    /// Loads in the layout that was chosen, and has each session run the smallest and the largest size once.
    fn restore(&self, candidate: &Candidate, stored: &Stored) -> Result<Measured, String> {
        let Layout { instances, threads } = stored.layout;
        if !self.layouts(candidate)?.contains(&stored.layout) {
            return Err(format!("{instances} instances with {threads} threads are not to choose from"));
        }
        let mut first = self.session(candidate, stored.layout)?;
        let derived =
            derive(&candidate.name, first.graph(), &candidate.settings).map_err(|faults| faults.join("; "))?;
        let given_up = stored.batch_axis.is_none() && !matches!(candidate.settings.batch_axis, BatchAxis::Axis(_));
        if stored.batch_axis != derived.batch_axis && !given_up {
            return Err("its batch axis is not the model's".to_owned());
        }
        let mut spec = self.spec(candidate, &first, derived);
        if stored.batch_axis.is_none() {
            (spec.batch_axis, spec.padding, spec.max_batch_size) = (None, None, 1);
            spec.unbatched_reason.clone_from(&stored.unbatched_reason);
        }
        let difference = self.confirm_padding(candidate, &mut first, &mut spec);
        let shared = Arc::new(spec.clone());
        let mut sessions = vec![first];
        for _ in 1..instances {
            sessions.push(self.session(candidate, stored.layout)?);
        }
        let measured = stored.measured.iter().map(entry).collect();
        let integers = fill_of(&stored.integers).unwrap_or_default();
        let lengths = lengths(&shared, stored, integers)?;
        let known = calibrate::recalled(&shared, stored.ladder.clone(), measured, integers);
        let known = known.map_err(|error| error.to_string())?;
        let confirmed = at_once(&mut sessions, |session| {
            session.set_spec(Arc::clone(&shared));
            calibrate::confirm(session, &shared, &known, self.clock)?;
            confirm_lengths(session, &shared, &lengths, (integers, self.clock))
        });
        confirmed.into_iter().collect::<Result<(), _>>().map_err(|error| error.to_string())?;
        let (layout, calibration) = (stored.layout, Ok(known));
        Ok(Measured { spec, layout, sessions, calibration, lengths, difference })
    }
}

/// What is known of other lengths: of exactly those that would be measured now.
fn lengths(spec: &ModelSpec, stored: &Stored, integers: Fill) -> Result<Vec<Length>, String> {
    let sizes: Vec<usize> = stored.lengths.iter().map(|length| length.size).collect();
    let wanted = measured_lengths(spec);
    if sizes != wanted {
        return Err(format!("it has measured rows of the lengths {sizes:?}, and the model's are {wanted:?}"));
    }
    let length = |AtLength { size, measured }: &AtLength| {
        Length::of(spec, *size, measured.iter().map(entry).collect(), integers)
    };
    stored.lengths.iter().map(length).collect()
}

/// What is worth keeping: not a ladder that ended early for a reason of the moment, such as a lack of memory, and no part of the
/// lengths.
fn to_store(key: Key, measured: &Measured) -> Option<Stored> {
    let calibration = measured.calibration.as_ref().ok().filter(|found| found.cut_short.is_none())?;
    let sizes = measured.lengths.iter().map(|length| length.size);
    if !sizes.eq(measured_lengths(&measured.spec)) {
        return None;
    }
    let mut stored = Stored::new(key, measured.layout, calibration.integers);
    stored.batch_axis = measured.spec.batch_axis;
    stored.unbatched_reason.clone_from(&measured.spec.unbatched_reason);
    stored.ladder.clone_from(&calibration.ladder);
    stored.measured = entries(calibration);
    let at_length = |Length { size, calibration }: &Length| AtLength { size: *size, measured: entries(calibration) };
    stored.lengths = measured.lengths.iter().map(at_length).collect();
    Some(stored)
}

fn entries(calibration: &Calibration) -> Vec<Entry> {
    let entry = |known: &calibrate::Measured| Entry {
        rows: known.rows,
        seconds: known.duration.as_secs_f64(),
        bytes: known.bytes.0,
    };
    calibration.measured.iter().map(entry).collect()
}

fn entry(stored: &Entry) -> calibrate::Measured {
    let Entry { rows, seconds, bytes } = *stored;
    calibrate::Measured { rows, duration: Duration::from_secs_f64(seconds), bytes: ByteSize(bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Settings;
    use crate::runtime::calibrate::CalibrationError;

    fn measured(calibration: Result<Calibration, CalibrationError>) -> Measured {
        let spec = ModelSpec::of_nothing();
        Measured {
            spec,
            layout: Layout { instances: 1, threads: 1 },
            sessions: Vec::new(),
            calibration,
            lengths: Vec::new(),
            difference: None,
        }
    }

    #[test]
    fn only_a_whole_measurement_is_worth_keeping() {
        let size = calibrate::Measured { rows: 1, duration: Duration::from_millis(1), bytes: ByteSize(64) };
        let whole = Calibration {
            ladder: vec![1],
            measured: vec![size.clone()],
            class_dims: Vec::new(),
            units: 1,
            integers: Fill::Zero,
            cut_short: None,
            from_cache: false,
        };
        let machine = Machine { runtime: String::new(), cpu: String::new(), cores: 1 };
        let key = || Key::new(String::new(), machine.clone(), &Settings::default());
        let cut = Calibration { cut_short: Some("2 rows: no memory".to_owned()), ..whole.clone() };
        assert_eq!(to_store(key(), &measured(Ok(cut))), None);
        assert_eq!(to_store(key(), &measured(Err(CalibrationError::DoesNotRun("x".to_owned())))), None);
        let stored = to_store(key(), &measured(Ok(whole))).expect("it is whole");
        assert_eq!((stored.check(&key()), fill_of(&stored.integers)), (Ok(()), Some(Fill::Zero)));
        assert_eq!(stored.measured.iter().map(entry).collect::<Vec<_>>(), [size]);
    }
}
