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
        let states = self.models.iter().flat_map(|(name, versions)| versions.iter().map(move |entry| (name, entry)));
        for (name, (version, state)) in states {
            match state {
                ModelState::Loading => return Some(format!("model '{name}' version {version} is still loading")),
                ModelState::Unhealthy { reason } | ModelState::Unavailable { reason, failed: true } => {
                    return Some(format!("model '{name}' version {version} is not available: {reason}"));
                }
                ModelState::Ready(_) | ModelState::Unavailable { failed: false, .. } => {}
            }
        }
        None
    }
}
