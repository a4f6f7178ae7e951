//! The manager: loads what the repository holds, publishes the table, loads and unloads what is asked for or has changed, and
//! loads again what was lost.
//!
//! Whatever replaces a version that serves is loaded beside it and takes its place in the table in one step; the old one is
//! let go when the last request that found it there has its answer. What fails to load changes nothing for what serves.

use super::changes::{Change, Key, Old, Print, Seen, changes, key};
use super::control::{Controller, Refused};
use super::load::Loader;
use super::published::{for_clients, table};
use super::reloads::Reloads;
use super::{Candidate, Fault, Sent, scan_with};
use crate::batcher::{Control, Event, ModelLoad};
use crate::config::Config;
use crate::metrics::Metrics;
use crate::model::{ModelSpec, ModelState, Table};
use crate::units::ModelId;
use arc_swap::ArcSwap;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;

/// A line is written this often while a model loads.
const PROGRESS: Duration = Duration::from_secs(2);
/// How often it is asked whether requests still use a version that was replaced.
const STILL_USED: Duration = Duration::from_millis(20);

/// Loads models, one after the other, and tells everybody.
#[derive(Debug)]
pub struct Manager {
    loader: Loader,
    models: Arc<ArcSwap<Table>>,
    control: mpsc::Sender<Control>,
    metrics: Arc<Metrics>,
    config: Config,
    commands: mpsc::Receiver<Command>,
    known: BTreeMap<Key, Known>,
    seen: Seen,
    /// What requests to load have sent.
    sent: Sent,
    /// Models that only a request loads.
    held: BTreeSet<String>,
    /// The faults that were there at the start and still are: the server is not ready because of them.
    faults: Vec<Fault>,
    starting: bool,
}

/// What somebody has asked for.
#[derive(Debug)]
pub(super) enum Command {
    Load { model: String, sent: Vec<(String, toml::Value)>, reply: oneshot::Sender<Result<(), Refused>> },
    Unload { model: String, reply: oneshot::Sender<Result<(), Refused>> },
}

/// A version that was found and dealt with.
#[derive(Debug)]
struct Known {
    candidate: Candidate,
    print: Print,
    state: ModelState,
    /// What the batcher has of it. Table and requests hold the same one and nobody else does, so that its count tells whether
    /// it is in use.
    spec: Option<Arc<ModelSpec>>,
    reloads: Reloads,
}

impl Known {
    fn serves(&self) -> bool {
        matches!(self.state, ModelState::Ready(_))
    }

    /// Whether the server is not ready because of it.
    fn is_missed(&self) -> bool {
        matches!(self.state, ModelState::Unhealthy { .. } | ModelState::Unavailable { failed: true, .. })
    }
}

impl Manager {
    /// A manager that publishes to `models` and hands loaded models to the batcher through `control`, and the handle by which
    /// models are loaded and unloaded on request.
    #[must_use]
    pub fn new(
        loader: Loader,
        models: Arc<ArcSwap<Table>>,
        control: mpsc::Sender<Control>,
        metrics: Arc<Metrics>,
        config: Config,
    ) -> (Self, Controller) {
        let (controller, commands) = Controller::new();
        let manager = Self {
            loader,
            models,
            control,
            metrics,
            config,
            commands,
            known: BTreeMap::new(),
            seen: Seen::default(),
            sent: Sent::new(),
            held: BTreeSet::new(),
            faults: Vec::new(),
            starting: true,
        };
        (manager, controller)
    }

    /// Loads everything in the repository, then does what is asked for, what changes demand and what lost instances need,
    /// until the batcher is gone.
    pub async fn run(mut self, mut events: mpsc::Receiver<Event>) {
        self.start().await;
        let every = self.config.models.poll_interval;
        let mut poll = tokio::time::interval(every.max(Duration::from_millis(1)));
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let due = self.known.values().filter_map(|known| known.reloads.due()).min();
            let due = due.map(|due| self.loader.clock.to_tokio(due));
            tokio::select! {
                event = events.recv() => match event {
                    Some(event) => self.note(event),
                    None => return,
                },
                Some(command) = self.commands.recv() => self.command(command).await,
                _ = poll.tick(), if !every.is_zero() => self.poll().await,
                () = reached(due) => self.reload().await,
            }
        }
    }

    async fn start(&mut self) {
        self.seen = self.look(self.sent.clone()).await;
        self.faults.clone_from(&self.seen.scan.faults);
        for fault in &self.faults {
            tracing::error!(%fault, "a model cannot be served");
        }
        let names: BTreeSet<String> =
            self.seen.scan.candidates.iter().map(|candidate| candidate.name.clone()).collect();
        let state = if self.config.models.load_at_start {
            ModelState::Loading
        } else {
            self.held.clone_from(&names);
            ModelState::Unavailable { reason: "not loaded yet: ask for it".to_owned(), failed: false }
        };
        for candidate in &self.seen.scan.candidates {
            let print = self.seen.prints[&key(candidate)].clone();
            let known = Known {
                candidate: candidate.clone(),
                print,
                state: state.clone(),
                spec: None,
                reloads: Reloads::default(),
            };
            self.known.insert(key(candidate), known);
        }
        self.publish();
        for name in names.difference(&self.held.clone()) {
            // Each fault is in the log and in the table.
            let _ = self.bring(name, true).await;
        }
        self.starting = false;
        self.publish();
        let ready = self.models.load().ready().count();
        let failed = self.models.load().index().filter(|entry| entry.state == "UNAVAILABLE").count();
        if self.known.is_empty() {
            // It is what it should be if models are still to come, and a wrong folder otherwise.
            let folder = self.config.models.path.display().to_string();
            tracing::warn!(folder, "there are no models: each is a folder in this one, as in <name>/1/model.onnx");
        }
        tracing::info!(ready, failed, "loading is over");
    }

    /// Looks at the repository.
    async fn look(&self, sent: Sent) -> Seen {
        let config = self.config.clone();
        let look = move || Seen::new(scan_with(&config.models.path, &config, &sent));
        // Reading folders does not panic; if it did, nothing would be seen to have changed.
        tokio::task::spawn_blocking(look).await.unwrap_or_else(|_| self.seen.clone())
    }

    /// Loads what the repository wants of a model: `all` of it, or what is new or different. Once any of that serves, the
    /// versions that are not wanted go.
    async fn bring(&mut self, name: &str, all: bool) -> Result<(), String> {
        let wanted = self.seen.wanted(name);
        let mut faults = Vec::new();
        for candidate in &wanted {
            let print = self.seen.prints[&key(candidate)].clone();
            if all || self.known.get(&key(candidate)).is_none_or(|known| known.print != print) {
                let result = self.load(candidate.clone(), print, None).await;
                faults.extend(result.err().map(|reason| format!("version {}: {reason}", candidate.version)));
            }
        }
        let wanted: BTreeSet<Key> = wanted.iter().map(key).collect();
        if wanted.iter().any(|key| self.known.get(key).is_some_and(Known::serves)) {
            self.forget(|key| key.0 == name && !wanted.contains(key));
        }
        if faults.is_empty() { Ok(()) } else { Err(faults.join("; ")) }
    }

    /// Loads a version; `lost` has the reloads of one that has lost instances.
    async fn load(&mut self, candidate: Candidate, print: Print, lost: Option<Reloads>) -> Result<(), String> {
        let (key, mut reloads) = (key(&candidate), lost.unwrap_or_default());
        let missed = self.starting || self.known.get(&key).is_some_and(Known::is_missed);
        if !self.known.get(&key).is_some_and(Known::serves) {
            let spec = self.known.remove(&key).and_then(|known| known.spec);
            let known =
                Known { candidate: candidate.clone(), print: print.clone(), state: ModelState::Loading, spec, reloads };
            self.known.insert(key.clone(), known);
            self.publish();
        }
        let result = self.attempt(&candidate).await;
        let old = self.known.remove(&key);
        let (old_state, old_spec) = old.map_or((None, None), |old| (Some(old.state), old.spec));
        let (state, spec, result) = match result {
            Ok(load) => {
                let spec = Arc::new(ModelSpec::clone(&load.spec));
                let (taken, is_taken) = oneshot::channel();
                // Not sent means that `taken` is dropped, and that is an error of `is_taken`.
                let _ = self.control.send(Control::Load { model: Box::new(load), taken }).await;
                if is_taken.await.is_err() {
                    return Err("the server is shutting down".to_owned());
                }
                (ModelState::Ready(Arc::clone(&spec)), Some(spec), Ok(()))
            }
            Err(reason) => match old_state {
                Some(serving @ ModelState::Ready(_)) => (serving, old_spec.clone(), Err(reason)),
                _ => {
                    let failed = missed || old_spec.is_some();
                    (ModelState::Unavailable { reason: reason.clone(), failed }, None, Err(reason))
                }
            },
        };
        if lost.is_some() {
            reloads.end(self.loader.clock.now(), result.is_ok());
        }
        let replaced = old_spec.filter(|old| spec.as_ref().is_none_or(|spec| spec.id != old.id));
        self.known.insert(key, Known { candidate, print, state, spec, reloads });
        self.publish();
        replaced.into_iter().for_each(|old| self.retire(old));
        result
    }

    /// Loads a candidate up to running workers.
    async fn attempt(&self, candidate: &Candidate) -> Result<ModelLoad, String> {
        let (name, version) = (&candidate.name, candidate.version);
        let started = self.loader.clock.now();
        let (loader, job) = (self.loader.clone(), candidate.clone());
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
                let seconds = self.loader.clock.now().since(started).as_secs_f64();
                self.metrics.model(name, version).load_seconds.set(seconds);
                Ok(load)
            }
            Ok(Err(reason)) => {
                tracing::error!(model = name, version, reason, "a model cannot be served");
                Err(for_clients(&reason, &candidate.file))
            }
            Err(panic) => {
                tracing::error!(model = name, version, %panic, "loading a model panicked");
                Err("loading it failed unexpectedly; the log says more".to_owned())
            }
        }
    }

    /// Lets an old version go once no request uses it any more. Nobody finds it in the table by now.
    fn retire(&self, spec: Arc<ModelSpec>) {
        let (control, most) = (self.control.clone(), self.config.drain.grace);
        tokio::spawn(async move {
            let unused = async {
                while Arc::strong_count(&spec) > 1 {
                    tokio::time::sleep(STILL_USED).await;
                }
            };
            if tokio::time::timeout(most, unused).await.is_err() {
                tracing::warn!(model = spec.name, version = spec.version, "requests that use it are refused now");
            }
            if control.send(Control::Unload(spec.id)).await.is_ok() {
                tracing::info!(model = spec.name, version = spec.version, "model is unloaded");
            }
        });
    }

    /// Takes versions out of the table and lets them go.
    fn forget(&mut self, which: impl Fn(&Key) -> bool) {
        let keys: Vec<Key> = self.known.keys().filter(|key| which(key)).cloned().collect();
        let gone: Vec<_> = keys.iter().filter_map(|key| self.known.remove(key)?.spec).collect();
        self.publish();
        gone.into_iter().for_each(|spec| self.retire(spec));
    }

    fn publish(&self) {
        let states = self.known.iter().map(|(key, known)| (key.clone(), known.state.clone()));
        let table = table(&self.seen.scan, &self.faults, states.collect());
        self.models.store(Arc::new(Table { starting: self.starting, ..table }));
    }

    async fn command(&mut self, command: Command) {
        match command {
            Command::Load { model, sent, reply } => {
                let result = self.load_on_request(&model, sent).await;
                // Whoever asked may have gone.
                let _ = reply.send(result);
            }
            Command::Unload { model, reply } => {
                let _ = reply.send(self.unload_on_request(&model));
            }
        }
    }

    async fn load_on_request(&mut self, model: &str, sent: Vec<(String, toml::Value)>) -> Result<(), Refused> {
        let mut all = self.sent.clone();
        let is_sent = !sent.is_empty();
        if is_sent {
            all.insert(model.to_owned(), sent);
        } else {
            all.remove(model);
        }
        let seen = self.look(all.clone()).await;
        if seen.wanted(model).is_empty() {
            let concerned = seen.scan.faults.iter().filter(|fault| fault.model.as_deref().is_none_or(|of| of == model));
            let reasons: Vec<String> = concerned.map(|fault| for_clients(&fault.message, &fault.path)).collect();
            return Err(match (reasons.is_empty(), is_sent) {
                (true, _) => Refused::Unknown(model.to_owned()),
                (false, true) => Refused::Invalid(reasons.join("; ")),
                (false, false) => Refused::Failed { model: model.to_owned(), reason: reasons.join("; ") },
            });
        }
        (self.sent, self.seen) = (all, seen);
        self.held.remove(model);
        tracing::info!(model, "loading on request");
        let result = self.bring(model, true).await;
        result.map_err(|reason| Refused::Failed { model: model.to_owned(), reason })
    }

    fn unload_on_request(&mut self, model: &str) -> Result<(), Refused> {
        if !self.models.load().models.contains_key(model) {
            return Err(Refused::Unknown(model.to_owned()));
        }
        tracing::info!(model, "unloading on request");
        self.held.insert(model.to_owned());
        let mut gone = Vec::new();
        for (_, known) in self.known.iter_mut().filter(|((name, _), _)| name == model) {
            gone.extend(known.spec.take());
            known.reloads = Reloads::default();
            known.state = ModelState::Unavailable { reason: "unloaded".to_owned(), failed: false };
        }
        self.publish();
        gone.into_iter().for_each(|spec| self.retire(spec));
        Ok(())
    }

    /// Looks for changes and follows them.
    async fn poll(&mut self) {
        let now = self.look(self.sent.clone()).await;
        for fault in now.scan.faults.iter().filter(|fault| !self.seen.scan.faults.contains(fault)) {
            tracing::error!(%fault, "a model cannot be served");
        }
        if !self.config.models.load_at_start {
            // What was loaded on request is followed, new versions of it as well.
            let known: BTreeSet<&String> = self.known.keys().map(|(name, _)| name).collect();
            self.held.extend(now.prints.keys().map(|(name, _)| name).filter(|name| !known.contains(name)).cloned());
        }
        let old = |known: &Known| Old { print: known.print.clone(), serves: known.serves() };
        let known = self.known.iter().map(|(key, known)| (key.clone(), old(known))).collect();
        let changes = changes(&known, &self.held, &self.seen, &now);
        self.faults.retain(|fault| now.scan.faults.contains(fault));
        let same = now.scan.faults == self.seen.scan.faults;
        self.seen = now;
        if !same {
            self.publish();
        }
        for change in changes {
            tracing::info!(?change, "the repository has changed");
            match change {
                // Each fault is in the log and in the table.
                Change::Bring(name) => drop(self.bring(&name, false).await),
                Change::Drop(name) => self.forget(|key| key.0 == name),
            }
        }
    }

    /// Notes that a model has lost an instance. Its other instances serve until it is loaded anew; without any it is unhealthy.
    fn note(&mut self, lost: Event) {
        let Event::InstanceLost { model, reason, remaining, .. } = lost;
        let now = self.loader.clock.now();
        let Some(known) = self.by_id(model) else { return };
        let seconds = known.reloads.lost(now).since(now).as_secs();
        let Candidate { name, version, .. } = &known.candidate;
        tracing::warn!(
            model = name,
            version,
            remaining,
            seconds,
            "an instance is lost: the model is to be loaded again"
        );
        if remaining == 0 {
            known.state = ModelState::Unhealthy { reason };
            self.publish();
        }
    }

    /// Loads again what has lost instances, as far as it is due.
    async fn reload(&mut self) {
        let now = self.loader.clock.now();
        let due = self.known.values().filter(|known| known.reloads.due().is_some_and(|due| due <= now));
        let due: Vec<_> = due.map(|known| (known.candidate.clone(), known.print.clone(), known.reloads)).collect();
        for (candidate, print, mut reloads) in due {
            tracing::warn!(model = candidate.name, version = candidate.version, "loading the model again");
            reloads.begin();
            // A fault is in the log and in the table.
            let _ = self.load(candidate, print, Some(reloads)).await;
        }
    }

    fn by_id(&mut self, model: ModelId) -> Option<&mut Known> {
        self.known.values_mut().find(|known| known.spec.as_ref().is_some_and(|spec| spec.id == model))
    }
}

/// Waits for this time, or for ever.
async fn reached(time: Option<tokio::time::Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}
