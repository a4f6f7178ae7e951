//! The file of one measurement: its key, its values, and which of them can be believed. Pure.

use super::super::layouts::Layout;
use crate::model::Settings;
use crate::model::settings::{BatchAxis, Fill, MOST_INSTANCES, MOST_THREADS, Packing};
use crate::units::Rows;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Changes whenever the meaning of a field does.
const SCHEMA: u32 = 3;
/// The most sizes of a ladder.
const MOST_SIZES: usize = 64;
/// The most rows, as in `max_batch_size`.
const MOST_ROWS: Rows = 65_536;
/// The most lengths that are measured.
const MOST_LENGTHS: usize = 64;
/// The longest run.
const MOST_SECONDS: f64 = 3600.0;
/// The most bytes of a run.
const MOST_BYTES: u64 = 1 << 50;
/// The longest text.
const MOST_TEXT: usize = 4096;

/// Where a model was measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// ONNX Runtime's description of its build.
    pub runtime: String,
    /// The processor, as the system calls it.
    pub cpu: String,
    /// Cores that models may compute on.
    pub cores: usize,
}

impl Machine {
    /// This machine.
    #[must_use]
    pub fn here(runtime: &str, cores: usize) -> Self {
        let cpu = cpu(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default());
        Self { runtime: runtime.to_owned(), cpu, cores }
    }
}

/// The processor that /proc/cpuinfo speaks of: its first block, without what differs from core to core or moment to moment.
fn cpu(info: &str) -> String {
    const NAMES: [&str; 6] = ["model name", "stepping", "CPU implementer", "CPU variant", "CPU part", "CPU revision"];
    let first = info.lines().take_while(|line| !line.trim().is_empty()).filter_map(|line| line.split_once(':'));
    let values: Vec<&str> =
        first.filter(|(name, _)| NAMES.contains(&name.trim())).map(|(_, value)| value.trim()).collect();
    format!("{} {}", std::env::consts::ARCH, values.join(" "))
}

/// What a measurement depends on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// The digest of the model's file. Weights that lie in other files change neither shapes nor work.
    pub model: String,
    /// Where.
    pub machine: Machine,
    /// The kind of device whose memory was measured.
    pub device: String,
    batch_axis: String,
    max_batch_size: Option<Rows>,
    instances: Option<u32>,
    intra_op_threads: Option<u32>,
    warmup_nanoseconds: u64,
    default_dim: usize,
    dims: BTreeMap<String, usize>,
    inputs: BTreeMap<String, String>,
    /// Whether rows may be padded at all, and to which lengths where model.toml says so.
    packed: bool,
    lengths: BTreeMap<String, Vec<usize>>,
}

impl Key {
    /// The key of a model whose file has this digest.
    #[must_use]
    pub fn new(model: String, machine: Machine, settings: &Settings) -> Self {
        let warmup = &settings.warmup;
        Self {
            model,
            machine,
            device: "host".to_owned(),
            batch_axis: match settings.batch_axis {
                BatchAxis::Auto => "auto".to_owned(),
                BatchAxis::None => "none".to_owned(),
                BatchAxis::Axis(axis) => axis.to_string(),
            },
            max_batch_size: settings.max_batch_size,
            instances: settings.instances.map(u32::from),
            intra_op_threads: settings.intra_op_threads.map(u32::from),
            // Whole: a key must read back as it was written.
            warmup_nanoseconds: u64::try_from(warmup.seconds.as_nanos()).unwrap_or(u64::MAX),
            default_dim: warmup.default_dim,
            dims: warmup.dims.clone(),
            inputs: warmup.inputs.iter().map(|(name, fill)| (name.clone(), name_of(*fill).to_owned())).collect(),
            packed: settings.packing != Packing::Off,
            lengths: settings.padding.lengths.clone(),
        }
    }

    /// The key of the same model on a GPU, run by a provider with these options.
    #[must_use]
    pub fn on(mut self, gpu: &str, (provider, options): (&str, &BTreeMap<String, String>)) -> Self {
        let options: Vec<String> = options.iter().map(|(name, value)| format!(" {name}={value}")).collect();
        self.device = format!("{gpu} by {provider}{}", options.concat());
        self
    }

    /// The same text for the same key.
    pub(super) fn canonical(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|error| unreachable!("numbers and texts: {error}"))
    }
}

/// One measured size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    pub(crate) rows: Rows,
    pub(crate) seconds: f64,
    pub(crate) bytes: u64,
}

/// What was measured of rows of one length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AtLength {
    pub(crate) size: usize,
    pub(crate) measured: Vec<Entry>,
}

/// One measurement with the layout that was chosen by it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Stored {
    schema: u32,
    pub(crate) key: Key,
    /// The axis that runs have confirmed.
    pub(crate) batch_axis: Option<usize>,
    pub(crate) unbatched_reason: Option<String>,
    pub(crate) layout: Layout,
    /// What integers were that the settings do not speak of.
    pub(crate) integers: String,
    pub(crate) ladder: Vec<Rows>,
    pub(crate) measured: Vec<Entry>,
    /// The same for other lengths of rows.
    pub(crate) lengths: Vec<AtLength>,
}

impl Stored {
    pub(crate) fn new(key: Key, layout: Layout, integers: Fill) -> Self {
        Self {
            schema: SCHEMA,
            key,
            batch_axis: None,
            unbatched_reason: None,
            layout,
            integers: name_of(integers).to_owned(),
            ladder: Vec::new(),
            measured: Vec::new(),
            lengths: Vec::new(),
        }
    }

    /// Reads a file that must be of this key.
    pub(crate) fn parse(bytes: &[u8], key: &Key) -> Result<Self, String> {
        /// Of another schema only this much can be understood.
        #[derive(Deserialize)]
        struct Any {
            schema: u32,
        }
        let broken = |error: serde_json::Error| format!("it is broken: {error}");
        let Any { schema } = serde_json::from_slice(bytes).map_err(broken)?;
        if schema != SCHEMA {
            return Err(format!("it is of schema {schema}, this is {SCHEMA}"));
        }
        let stored: Self = serde_json::from_slice(bytes).map_err(broken)?;
        stored.check(key)?;
        Ok(stored)
    }

    pub(crate) fn render(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_else(|error| unreachable!("numbers and texts: {error}"))
    }

    /// Whether a measurement for this key could have given these values.
    pub(crate) fn check(&self, key: &Key) -> Result<(), String> {
        let holds = |what: bool, fault: &str| if what { Ok(()) } else { Err(fault.to_owned()) };
        let ascending = |rows: &[Rows]| rows.windows(2).all(|pair| pair[0] < pair[1]);
        let rows: Vec<Rows> = self.measured.iter().map(|entry| entry.rows).collect();
        holds(self.key == *key, "it belongs to another model, machine or setting")?;
        holds((1..=MOST_SIZES).contains(&self.ladder.len()), "its ladder has too few or too many sizes")?;
        holds(ascending(&self.ladder) && self.ladder[0] == 1, "its ladder does not ascend from 1")?;
        holds(self.ladder.iter().all(|rows| *rows <= MOST_ROWS), "its ladder has too many rows")?;
        holds(!rows.is_empty() && self.ladder.starts_with(&rows), "what it measured is not its ladder")?;
        let top = key.max_batch_size.filter(|_| self.batch_axis.is_some()).or(rows.last().copied());
        holds(self.ladder.last().copied() == top, "its ladder does not end where it was measured or set")?;
        holds(self.batch_axis.is_some() || self.ladder == [1], "it has batches and no batch axis")?;
        holds(self.batch_axis.is_some() != self.unbatched_reason.is_some(), "its batch axis and reason disagree")?;
        holds(self.batch_axis.is_none_or(|axis| axis < 32), "its batch axis is no axis")?;
        holds(self.unbatched_reason.as_ref().is_none_or(|text| text.len() <= MOST_TEXT), "its reason is too long")?;
        holds(fill_of(&self.integers).is_some(), "its integers are unknown")?;
        possible(&self.measured)?;
        let sizes: Vec<usize> = self.lengths.iter().map(|length| length.size).collect();
        holds(
            sizes.len() <= MOST_LENGTHS && sizes.windows(2).all(|pair| pair[0] < pair[1]),
            "its lengths do not ascend",
        )?;
        for AtLength { measured, .. } in &self.lengths {
            let rows: Vec<Rows> = measured.iter().map(|entry| entry.rows).collect();
            holds(
                !rows.is_empty() && self.ladder.starts_with(&rows),
                "what it measured of a length is not its ladder",
            )?;
            possible(measured)?;
        }
        let Layout { instances, threads } = self.layout;
        let possible = |count: usize, most: u32| (1..=most as usize).contains(&count);
        holds(possible(instances, MOST_INSTANCES) && possible(threads, MOST_THREADS), "its layout is impossible")
    }
}

/// Whether runs could have taken so long, and needed so many bytes.
fn possible(measured: &[Entry]) -> Result<(), String> {
    let time = |entry: &Entry| entry.seconds.is_finite() && entry.seconds > 0.0 && entry.seconds <= MOST_SECONDS;
    if !measured.iter().all(time) {
        return Err("a duration is impossible".to_owned());
    }
    if !measured.iter().all(|entry| (1..=MOST_BYTES).contains(&entry.bytes)) {
        return Err("a size is impossible".to_owned());
    }
    Ok(())
}

const FILLS: [(Fill, &str); 3] = [(Fill::Zero, "zero"), (Fill::One, "one"), (Fill::Random, "random")];

/// The name of a fill in a file.
pub(crate) fn name_of(fill: Fill) -> &'static str {
    FILLS.iter().find(|(known, _)| *known == fill).map_or("zero", |(_, name)| name)
}

/// The fill that a file names.
pub(crate) fn fill_of(name: &str) -> Option<Fill> {
    FILLS.iter().find(|(_, known)| *known == name).map(|(fill, _)| *fill)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_named_by_its_first_block() {
        let intel = "processor\t: 0\nmodel name\t: Fast 9\nstepping\t: 3\ncpu MHz\t: 2100.1\n\nmodel name\t: Slow 1\n";
        let arm = "processor\t: 0\nBogoMIPS\t: 243\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\nCPU part\t: 0xd0d\n";
        let arch = std::env::consts::ARCH;
        for (info, expected) in [(intel, "Fast 9 3"), (arm, "0x41 0xd0c"), ("", "")] {
            assert_eq!(cpu(info), format!("{arch} {expected}"));
        }
    }

    #[test]
    fn fills_have_names() {
        for (fill, name) in FILLS {
            assert_eq!((fill_of(name), name_of(fill)), (Some(fill), name));
        }
        assert_eq!(fill_of("two"), None);
    }
}
