//! The manager: loads what the repository holds, publishes the table, and loads again what was lost.

use super::Candidate;
use super::load::Loader;
use crate::batcher::{Control, Event};
use crate::config::Config;
use crate::metrics::Metrics;
use crate::model::{ModelState, Table};
use crate::units::ModelId;
use arc_swap::ArcSwap;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// A line is written this often while a model loads.
const PROGRESS: Duration = Duration::from_secs(2);
/// A model that loses its instances again and again is given up after this many loads.
const MAX_RELOADS: u32 = 3;

/// Loads models, one after the other, and tells everybody.
#[derive(Debug)]
pub struct Manager {
    loader: Loader,
    models: Arc<ArcSwap<Table>>,
    control: mpsc::Sender<Control>,
    metrics: Arc<Metrics>,
    loaded: HashMap<ModelId, (Candidate, u32)>,
}

impl Manager {
    /// A manager that publishes to `models` and hands loaded models to the batcher through `control`.
    #[must_use]
    pub fn new(
        loader: Loader,
        models: Arc<ArcSwap<Table>>,
        control: mpsc::Sender<Control>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { loader, models, control, metrics, loaded: HashMap::new() }
    }

    /// Loads everything in the repository, then waits for lost instances until the batcher is gone.
    pub async fn run(mut self, config: Config, mut events: mpsc::Receiver<Event>) {
        let scan = super::scan(&config.models.path, &config);
        for fault in &scan.faults {
            tracing::error!(%fault, "a model cannot be served");
        }
        self.models.store(Arc::new(table(&scan)));
        for candidate in scan.candidates {
            self.load(candidate, 0).await;
        }
        let ready = self.models.load().ready().count();
        let failed = self.models.load().models.values().map(std::collections::BTreeMap::len).sum::<usize>() - ready;
        tracing::info!(ready, failed, "loading is over");
        while let Some(event) = events.recv().await {
            self.replace(event).await;
        }
    }

    async fn load(&mut self, candidate: Candidate, reloads: u32) {
        let (name, version, file) = (candidate.name.clone(), candidate.version, candidate.file.clone());
        let started = self.loader.clock.now();
        let loader = self.loader.clone();
        let job = candidate.clone();
        let mut loading = tokio::task::spawn_blocking(move || loader.load(&job));
        let result = loop {
            match tokio::time::timeout(PROGRESS, &mut loading).await {
                Ok(result) => break result,
                Err(_) => {
                    let seconds = self.loader.clock.now().since(started).as_secs();
                    tracing::info!(model = name, version, seconds, "still loading");
                }
            }
        };
        match result {
            Ok(Ok(load)) => {
                let spec = Arc::clone(&load.spec);
                let seconds = self.loader.clock.now().since(started).as_secs_f64();
                self.metrics.model(&name, version).load_seconds.set(seconds);
                self.loaded.insert(spec.id, (candidate, reloads));
                if self.control.send(Control::Load(Box::new(load))).await.is_ok() {
                    self.publish(&name, version, ModelState::Ready(spec));
                }
            }
            Ok(Err(reason)) => {
                tracing::error!(model = name, version, reason, "a model cannot be served");
                self.fail(&name, version, for_clients(&reason, &file));
            }
            Err(panic) => {
                tracing::error!(model = name, version, %panic, "loading a model panicked");
                self.fail(&name, version, "loading it failed unexpectedly; the log says more".to_owned());
            }
        }
    }

    fn fail(&self, name: &str, version: u64, reason: String) {
        self.publish(name, version, ModelState::Unavailable { reason, failed: true });
    }

    fn publish(&self, name: &str, version: u64, state: ModelState) {
        let mut table = Table::clone(&self.models.load());
        table.models.entry(name.to_owned()).or_default().insert(version, state);
        self.models.store(Arc::new(table));
    }

    /// Loads a model anew that has lost an instance. Until that is done its other instances serve; without any it is unhealthy.
    async fn replace(&mut self, lost: Event) {
        let Event::InstanceLost { model, reason, remaining, .. } = lost;
        let Some((candidate, reloads)) = self.loaded.remove(&model) else { return };
        let (name, version) = (candidate.name.clone(), candidate.version);
        if remaining == 0 {
            self.publish(&name, version, ModelState::Unhealthy { reason: reason.clone() });
        }
        if reloads < MAX_RELOADS {
            tracing::warn!(model = name, version, "loading the model again");
            self.load(candidate, reloads + 1).await;
        } else if remaining == 0 {
            self.fail(&name, version, format!("given up after {reloads} reloads: {reason}"));
        } else {
            // What is left goes on serving; a further loss finds no entry in `loaded` and changes nothing.
            tracing::error!(model = name, version, remaining, "given up replacing lost instances");
            return;
        }
        // The new instances serve already, so nothing is refused in between.
        let _ = self.control.send(Control::Unload(model)).await;
    }
}

/// The table before anything is loaded. All that was found is in it, so that clients can tell "not yet" from "no".
fn table(scan: &super::Scan) -> Table {
    let mut table = Table { scanned: true, ..Table::default() };
    for candidate in &scan.candidates {
        table.models.entry(candidate.name.clone()).or_default().insert(candidate.version, ModelState::Loading);
    }
    for fault in &scan.faults {
        let Some(name) = &fault.model else {
            table.fault = Some(for_clients(&fault.message, &fault.path));
            continue;
        };
        let reason = for_clients(&fault.message, &fault.path);
        let state = ModelState::Unavailable { reason, failed: true };
        let suspects = scan.suspects.iter().filter(|suspect| suspect.name == *name).map(|suspect| suspect.version);
        let concerned: Vec<u64> = fault.version.map_or_else(|| suspects.collect(), |version| vec![version]);
        let versions = table.models.entry(name.clone()).or_default();
        // Where no version is known there is one all the same: clients must see that the model failed.
        let first = concerned.is_empty().then_some(1);
        for version in concerned.into_iter().chain(first) {
            versions.entry(version).or_insert_with(|| state.clone());
        }
    }
    table
}

/// A reason that clients may read: where things lie on this machine is none of their business.
fn for_clients(reason: &str, file: &Path) -> String {
    let name = file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    reason.replace(&file.display().to_string(), &name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_announced_by_the_version_that_they_concern() {
        let root = tempfile::tempdir().expect("a temporary folder");
        for (file, text) in [
            ("copied/1/model.onnx", ""),
            ("copied/2/model.onnx.data", ""),
            ("settings/3/model.onnx", ""),
            ("settings/model.toml", "speed = 1"),
            ("empty/readme.txt", ""),
        ] {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().expect(file)).expect(file);
            std::fs::write(path, text).expect(file);
        }
        let table = table(&crate::repository::scan(root.path(), &Config::default()));
        let seen = |name: &str| -> Vec<(u64, bool)> {
            let state = |(version, state): (&u64, &ModelState)| (*version, matches!(state, ModelState::Loading));
            table.models[name].iter().map(state).collect()
        };
        assert_eq!(seen("copied"), [(1, true), (2, false)]);
        assert_eq!(seen("settings"), [(3, false)]);
        assert_eq!(seen("empty"), [(1, false)]);
    }

    #[test]
    fn clients_see_no_paths() {
        let file = Path::new("/srv/models/m/1/model.onnx");
        let reason = "Load model from /srv/models/m/1/model.onnx failed: not a graph";
        assert_eq!(for_clients(reason, file), "Load model from model.onnx failed: not a graph");
    }
}
