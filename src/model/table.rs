//! Which models there are and in what state: published by the repository, read by HTTP.

use super::ModelSpec;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The state of one version of a model, in the words of the model repository extension.
#[derive(Clone, Debug)]
pub enum ModelState {
    /// Being loaded; requests are answered 503.
    Loading,
    /// Serving.
    Ready(Arc<ModelSpec>),
    /// Was serving; its session is lost (`reason`), requests are answered 503.
    Unhealthy {
        /// What happened.
        reason: String,
    },
    /// Could not be loaded, or was unloaded on purpose (`failed` is false then).
    Unavailable {
        /// Why, in words for the operator.
        reason: String,
        /// Whether the server counts as not ready because of it.
        failed: bool,
    },
}

/// An immutable picture of all models; a new one replaces it on every change.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// State by name and version.
    pub models: BTreeMap<String, BTreeMap<u64, ModelState>>,
    /// Whether the first scan of the repository is complete.
    pub scanned: bool,
    /// Whether what the first scan found is still being loaded.
    pub starting: bool,
    /// Why the repository as a whole cannot be read.
    pub fault: Option<String>,
}

/// The answer to "which model does this request mean?".
#[derive(Clone, Debug)]
pub enum Lookup {
    /// This one.
    Ready(Arc<ModelSpec>),
    /// It exists but cannot serve now: the reason, fit for clients.
    NotReady(String),
    /// No such model or version.
    Unknown,
}

impl Table {
    /// The model with this name; without a version, its newest ready one.
    #[must_use]
    pub fn lookup(&self, name: &str, version: Option<u64>) -> Lookup {
        let Some(versions) = self.models.get(name) else { return Lookup::Unknown };
        let state = match version {
            Some(version) => versions.get(&version),
            None => versions
                .values()
                .rev()
                .find(|state| matches!(state, ModelState::Ready(_)))
                .or_else(|| versions.values().next_back()),
        };
        match state {
            None => Lookup::Unknown,
            Some(ModelState::Ready(spec)) => Lookup::Ready(Arc::clone(spec)),
            Some(ModelState::Loading) => Lookup::NotReady("the model is still loading".to_owned()),
            Some(ModelState::Unhealthy { reason } | ModelState::Unavailable { reason, .. }) => {
                Lookup::NotReady(reason.clone())
            }
        }
    }

    /// Every ready version of every model, in order of name and version.
    pub fn ready(&self) -> impl Iterator<Item = &Arc<ModelSpec>> {
        self.models.values().flat_map(BTreeMap::values).filter_map(|state| match state {
            ModelState::Ready(spec) => Some(spec),
            _ => None,
        })
    }

    /// Why the server as a whole is not ready; `None` if it is.
    #[must_use]
    pub fn not_ready_reason(&self) -> Option<String> {
        if !self.scanned {
            return Some("the model repository has not been read yet".to_owned());
        }
        if let Some(fault) = &self.fault {
            return Some(fault.clone());
        }
        self.models.iter().find_map(|(name, versions)| self.missing(name, versions))
    }

    /// Why a model keeps the server from being ready. One that serves in any version does not, once the start is over: a
    /// new version that is broken, or not loaded yet, must not take a server out of service that does its work.
    fn missing(&self, name: &str, versions: &BTreeMap<u64, ModelState>) -> Option<String> {
        let loading = versions.iter().find(|(_, state)| matches!(state, ModelState::Loading));
        if let Some((version, _)) = loading.filter(|_| self.starting || !serves(versions)) {
            return Some(format!("model '{name}' version {version} is still loading"));
        }
        if serves(versions) {
            return None;
        }
        versions.iter().find_map(|(version, state)| match state {
            ModelState::Unhealthy { reason } | ModelState::Unavailable { reason, failed: true } => {
                Some(format!("model '{name}' version {version} is not available: {reason}"))
            }
            _ => None,
        })
    }

    /// Every version of every model with its state, in order of name and version.
    pub fn index(&self) -> impl Iterator<Item = IndexEntry<'_>> {
        let versions = self.models.iter().flat_map(|(name, versions)| versions.iter().map(move |entry| (name, entry)));
        versions.map(|(name, (version, state))| {
            let (word, reason) = match state {
                ModelState::Loading => ("LOADING", ""),
                ModelState::Ready(_) => ("READY", ""),
                ModelState::Unhealthy { reason } | ModelState::Unavailable { reason, .. } => ("UNAVAILABLE", &**reason),
            };
            IndexEntry { name, version: *version, state: word, reason }
        })
    }
}

fn serves(versions: &BTreeMap<u64, ModelState>) -> bool {
    versions.values().any(|state| matches!(state, ModelState::Ready(_)))
}

/// One line of the repository's index, in the words of the model repository extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexEntry<'a> {
    /// The model.
    pub name: &'a str,
    /// Its version.
    pub version: u64,
    /// `READY`, `LOADING` or `UNAVAILABLE`.
    pub state: &'static str,
    /// Why it is not available; empty if it is.
    pub reason: &'a str,
}

/// Memory that one version of a model holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUsage {
    /// `CPU` or `GPU`.
    pub kind: &'static str,
    /// The number of the device among those of its kind.
    pub device: u32,
    /// Bytes.
    pub bytes: u64,
}
