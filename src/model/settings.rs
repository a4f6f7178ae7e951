//! model.toml: what a person may say about a model. Everything has a default: the `[model]` section of the server's
//! configuration, whose own defaults are in config/concertina.toml.

mod placement;
mod read;
mod text;

pub use placement::{Group, Instances, MOST_INSTANCES, Place};
pub use read::{DEFAULTS, MOST_THREADS};
pub use text::TextSettings;

use crate::keys::{Keys, Origin};
use crate::units::{ByteSize, Rows};
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

/// The settings of one model, checked: its model.toml over the server's `[model]` defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Which axis is the batch.
    pub batch_axis: BatchAxis,
    /// Worker threads with a session each. `None`: the server chooses.
    pub instances: Option<NonZeroU32>,
    /// The device that they are on. `None`: the preferred one.
    pub place: Option<Place>,
    /// Further devices with instances of their own.
    pub beside: Vec<Group>,
    /// Threads that one instance computes with on a CPU. `None`: the server chooses.
    pub intra_op_threads: Option<NonZeroU32>,
    /// The most rows in one batch. `None`: found while loading.
    pub max_batch_size: Option<Rows>,
    /// How long an idle instance waits for more rows before it runs fewer than it could. Zero: never.
    pub max_queue_delay: Duration,
    /// How long an idle instance may wait for the clients of the batch before to ask again. Zero: not at all.
    pub max_gather_delay: Duration,
    /// The most rows that may wait; at least `max_batch_size`.
    pub max_queue_rows: u64,
    /// The most bytes of inputs that may wait.
    pub max_queue_bytes: ByteSize,
    /// Levels of priority, 1 the most urgent.
    pub priority_levels: u32,
    /// The level of a request that names none.
    pub default_priority: u32,
    /// How long a request may take if it does not say so itself.
    pub default_timeout: Duration,
    /// A batch beyond the smallest size within this fraction of the best measured rows per second is not formed.
    pub knee_tolerance: f64,
    /// Batches that an instance may hold, the running one included.
    pub pipeline: u32,
    /// How the model is run before it serves.
    pub warmup: Warmup,
    /// Which versions are served.
    pub versions: VersionPolicy,
    /// How rows of different lengths may share a batch.
    pub padding: Padding,
    /// Which of them do.
    pub packing: Packing,
    /// Versions by the labels that clients may know them by.
    pub version_labels: BTreeMap<String, u64>,
    /// What the elements of an output mean, by the output's name.
    pub labels: BTreeMap<String, Labels>,
    /// Whether runs on a GPU are recorded once and then played back.
    pub cuda_graph: CudaGraph,
    /// Options of ONNX Runtime's CUDA provider, by its names.
    pub cuda: BTreeMap<String, String>,
    /// How its texts are treated.
    pub text: TextSettings,
}

/// The key `cuda_graph`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CudaGraph {
    /// Where it is faster.
    #[default]
    Auto,
    /// Wherever it can be done.
    On,
    /// Never.
    Off,
}

impl CudaGraph {
    /// The word in model.toml.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::On => "on",
            Self::Off => "off",
        }
    }
}

/// The key `packing`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packing {
    /// Those of about the same length.
    #[default]
    Near,
    /// In order of arrival, padded to the longest.
    Fifo,
    /// None: only rows of equal shape.
    Off,
}

impl Packing {
    /// The word in model.toml.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Near => "near",
            Self::Fifo => "fifo",
            Self::Off => "off",
        }
    }
}

/// The key `batch_axis`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchAxis {
    /// Axis 0 where the model's dimensions allow it.
    Auto,
    /// None: requests run one by one.
    None,
    /// This axis of every input and output.
    Axis(usize),
}

/// The section `[warmup]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Warmup {
    /// The most time spent on one instance; zero means one run.
    pub seconds: Duration,
    /// The size used for a varying dimension that `dims` does not name.
    pub default_dim: usize,
    /// Sizes of varying dimensions, by the name that the graph gives them.
    pub dims: BTreeMap<String, usize>,
    /// What inputs are filled with, by name; [`Fill::Zero`] for those not named.
    pub inputs: BTreeMap<String, Fill>,
}

/// What an input is filled with while warming up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fill {
    /// Zeros, `false`, empty texts.
    #[default]
    Zero,
    /// Ones, `true`, one-letter texts.
    One,
    /// Random values from 0 to 1 (integers: 0 or 1).
    Random,
}

/// The section `[versions]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VersionPolicy {
    /// The newest ones, this many.
    Latest {
        /// How many.
        count: usize,
    },
    /// These, ascending.
    Specific(Vec<u64>),
    /// All that are there.
    All,
}

/// One key of the section `[labels]`: the file that names the elements of an output, one a line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    /// The file, relative to the model's folder.
    pub file: String,
    /// Its lines; empty until the repository has read it.
    pub lines: Arc<[String]>,
}

/// The section `[padding]`: rows of different lengths share a batch, each padded to one of the lengths given here. The model's
/// answers must not depend on what is padded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Padding {
    /// Lengths that a dimension is padded to, ascending, by the name that the graph gives it.
    pub lengths: BTreeMap<String, Vec<usize>>,
    /// The value that pads an input, by name.
    pub inputs: BTreeMap<String, f64>,
    /// Axes of outputs that are cut back to the length of a dimension, by output, then axis: where the graph does not say
    /// so by giving them the dimension's name.
    pub outputs: BTreeMap<String, BTreeMap<usize, String>>,
}

impl Settings {
    /// The same settings for each device, with its instances alone.
    #[must_use]
    pub fn on_each_device(&self) -> Vec<Self> {
        let first = Self { beside: Vec::new(), ..self.clone() };
        let beside =
            self.beside.iter().map(|group| Self { place: Some(group.place), instances: group.count, ..first.clone() });
        let beside: Vec<Self> = beside.collect();
        std::iter::once(first).chain(beside).collect()
    }

    /// The settings of a model whose model.toml has this text and path. `defaults` are the keys of `[model]`.
    ///
    /// # Errors
    /// Everything that is wrong, each naming the file and the key.
    pub fn from_toml(text: &str, file: &str, defaults: &Keys) -> Result<Self, Vec<String>> {
        let (settings, faults) = Self::readable(text, file, defaults);
        settings.filter(|_| faults.is_empty()).ok_or(faults)
    }

    /// As [`Settings::from_toml`], with what can be read although something is wrong, such as an unknown key.
    #[must_use]
    pub fn readable(text: &str, file: &str, defaults: &Keys) -> (Option<Self>, Vec<String>) {
        Self::overridden(text, file, defaults, &[])
    }

    /// As [`Settings::readable`], with the keys that somebody has sent over what the file says.
    #[must_use]
    pub fn overridden(
        text: &str,
        file: &str,
        defaults: &Keys,
        sent: &[(String, toml::Value)],
    ) -> (Option<Self>, Vec<String>) {
        let mut keys = defaults.clone().outermost();
        keys.overlay(text, &Origin::File(file.to_owned()));
        for (key, value) in sent {
            keys.set(key, value.clone(), Origin::Request);
        }
        let settings = read::model(&mut keys);
        (settings, keys.finish())
    }

    /// The `[model]` keys of config/concertina.toml.
    #[must_use]
    pub fn default_keys() -> Keys {
        let mut keys = Keys::default();
        keys.overlay(DEFAULTS, &Origin::Default);
        keys.table("model")
    }

    /// Reads the `[model]` defaults: the keys that make sense for every model. Faults stay in `keys`.
    pub fn read_defaults(keys: &mut Keys) -> Option<Self> {
        read::defaults(keys)
    }
}

impl Default for Settings {
    /// What holds if neither the server's configuration nor a model.toml says anything.
    fn default() -> Self {
        let mut keys = Self::default_keys();
        let settings = read::defaults(&mut keys);
        settings.unwrap_or_else(|| unreachable!("config/concertina.toml: {:?}", keys.finish()))
    }
}

#[cfg(test)]
mod tests;
