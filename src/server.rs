//! The only assembly point: builds the parts, spawns them, and ends them in order.

use crate::admin;
mod drain;
mod ports;
mod secrets;
mod traces;

use crate::batcher::{Control, Loop};
use crate::clock::Clock;
use crate::config::{Config, Log};
use crate::grpc;
use crate::http::{AppState, Bodies, Limits, Outcome, Phase, Texts, router};
use crate::metrics::Metrics;
use crate::model::Table;
use crate::repository::devices::Devices;
use crate::repository::load::{Ids, Loader};
use crate::repository::manager::Manager;
use crate::repository::store::Store;
use crate::runtime::{Runtime, self_test};
use crate::sampler::{Listeners, sample, sensors, watch};
use crate::text::Pool;
use arc_swap::ArcSwap;
use drain::{Parts, drain};
use ports::{Apps, Ports};
use secrets::Secrets;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tracing_subscriber::filter::LevelFilter;

/// Serves until a signal ends it.
///
/// # Errors
/// If ONNX Runtime is not found, if the address cannot be listened on, or if not everything that was accepted has had its
/// answer when the grace period is over.
pub fn run(config: Config) -> anyhow::Result<()> {
    let runtime = Runtime::load(config.runtime.library.as_deref())?;
    self_test(&runtime)
        .map_err(|fault| anyhow::anyhow!("the memory self-test failed, so nothing is served: {fault}"))?;
    let devices = Devices::open(&config).map_err(anyhow::Error::msg)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = config.runtime.threads.map_or(cores, usize::from);
    let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    let drained = tokio.block_on(serve_until_signal(config, (runtime, devices), cores));
    // A model that is still loading is not waited for.
    tokio.shutdown_background();
    anyhow::ensure!(drained?, "ended before everything that was accepted had its answer");
    Ok(())
}

/// Returns whether everything that was accepted has had its answer.
async fn serve_until_signal(
    config: Config,
    (runtime, devices): (Runtime, Devices),
    cores: usize,
) -> anyhow::Result<bool> {
    let mut signals = Signals::new()?;
    let secrets = Secrets::read(&config)?;
    let ports = Ports::bind(&config, &secrets).await?;

    let clock = Clock::start();
    let metrics = Arc::new(Metrics::new());
    let max_in_flight = config.http.max_in_flight_requests.get();
    let (batcher_loop, ends) = Loop::new(max_in_flight, config.scaling, clock, Arc::clone(&metrics));
    let (tracer, exporting) = traces::start(&config.tracing, clock, &metrics)?;
    let batching = tokio::spawn(batcher_loop.traced(tracer.clone()).run());

    let models = Arc::new(ArcSwap::from_pointee(Table::default()));
    let (tell, lost) = oneshot::channel();
    let tell = Listeners { control: ends.control.clone(), metrics: Arc::clone(&metrics), lost: Some(tell) };
    let sampling = tokio::spawn(sample(devices.all(), clock, Arc::clone(&ends.trim), tell));
    // Nobody waits for it: it goes with the runtime.
    tokio::spawn(watch(sensors(&devices.all()), Arc::clone(&metrics)));
    let memory = admin::Memory { devices: devices.all(), clock, look: Arc::clone(&ends.trim) };
    let ids = Arc::new(Ids::default());
    let store = store(&config);
    let loader = Loader { runtime, devices, clock, completions: ends.completions, cores, ids, store };
    let (manager, controller) =
        Manager::new(loader, Arc::clone(&models), ends.control.clone(), Arc::clone(&metrics), config.clone());
    let managing = tokio::spawn(manager.run(ends.events));

    let (phase, phases) = watch::channel(Phase::Serving);
    let texts = texts(&config, cores)?;
    let mut state = app_state(&config, (ends.batcher, texts), models, phases.clone(), (Arc::clone(&metrics), clock));
    state.repository = Some(controller);
    state.memory = memory.clone().usage();
    state.admin = secrets.admin_token.clone().map(|token| memory.admin(token));
    state.keys = secrets.keys.clone();
    state.tracer = tracer;
    let state = Arc::new(state);
    let counted = Arc::clone(&metrics);
    let calls = grpc::router(grpc::Grpc {
        state: Arc::clone(&state),
        stream_requests: config.grpc.max_stream_requests,
        begins: Box::new(move || begins(&counted, clock)),
    });
    let app = router(state).layer(axum::middleware::from_fn_with_state((metrics, clock), count));
    let serving = tokio::spawn(ports.serve(Apps { http: app, grpc: calls }, &config, secrets.tls.clone(), phases));
    let following = tokio::spawn(secrets.follow());

    let parts = Parts { batching, managing, sampling, following, serving, exporting };
    until_the_end(&config, (&phase, &ends.control), parts, (&mut signals, lost)).await
}

/// Waits for a signal, or for what makes the process useless, and drains. Returns whether everything that was accepted has
/// had its answer.
async fn until_the_end(
    config: &Config,
    (phase, control): (&watch::Sender<Phase>, &mpsc::Sender<Control>),
    mut parts: Parts,
    (signals, lost): (&mut Signals, oneshot::Receiver<String>),
) -> anyhow::Result<bool> {
    let mut fault = None;
    tokio::select! {
        () = signals.recv() => {}
        Ok(reason) = lost => {
            tracing::error!(reason, "a GPU is lost for this process: draining, to be started anew");
            fault = Some(reason);
        }
        part = parts.any_ends() => anyhow::bail!("{part} has ended, which it never should: ending, to be started anew"),
    }
    let drained = tokio::select! {
        drained = drain(config, phase, control, parts) => drained,
        () = signals.recv() => {
            tracing::warn!("a second signal: ending at once");
            false
        }
    };
    match fault {
        Some(reason) => anyhow::bail!("a GPU was lost ({reason}): only a new process can use it again"),
        None => Ok(drained),
    }
}

/// Where what was measured is kept.
pub(crate) fn store(config: &Config) -> Store {
    Store::new(config.models.cache_folder(&|name| std::env::var_os(name)))
}

fn app_state(
    config: &Config,
    (batcher, texts): (crate::batcher::Batcher, Texts),
    models: Arc<ArcSwap<Table>>,
    phase: watch::Receiver<Phase>,
    (metrics, clock): (Arc<Metrics>, Clock),
) -> AppState {
    let (offered, spent) = (Arc::clone(&metrics), Arc::clone(&metrics));
    AppState {
        batcher,
        models,
        limits: Limits {
            body_bytes: usize::try_from(config.http.max_body_bytes.0).unwrap_or(usize::MAX),
            body_read_timeout: config.http.body_read_timeout,
            request_rows: config.http.max_request_rows,
            compress_answers: config.http.compress_answers,
        },
        bodies: Bodies::new(config.http.max_bodies_bytes.0),
        phase,
        offered: Box::new(move |model, rows| offered.offered(&model.name, model.version, rows)),
        spent: Box::new(move |model, stage, time| {
            if let Some(model) = spent.known(&model.name, model.version) {
                model.spent(stage, time);
            }
        }),
        clock,
        tracer: None,
        metrics: Box::new(move || String::from_utf8_lossy(&metrics.encode()).into_owned()),
        keys: None,
        cors_origins: config.http.cors_origins.clone(),
        admin: None,
        repository: None,
        logging: logging(&config.log),
        memory: Box::new(|_| Vec::new()),
        texts,
    }
}

/// The threads for texts, and what texts may cost.
fn texts(config: &Config, cores: usize) -> std::io::Result<Texts> {
    let text = &config.text;
    Ok(Texts {
        pool: Pool::new(text.threads(cores), text.max_requests)?,
        max_inputs: text.max_inputs,
        max_input_bytes: usize::try_from(text.max_input_bytes.0).unwrap_or(usize::MAX),
        model: text.model.clone(),
    })
}

/// What is logged, in the words of the logging extension.
fn logging(log: &Log) -> serde_json::Value {
    let most = log.level.split(',').next().and_then(|level| level.trim().parse().ok()).unwrap_or(LevelFilter::INFO);
    serde_json::json!({
        "log_file": "",
        "log_info": most >= LevelFilter::INFO,
        "log_warning": most >= LevelFilter::WARN,
        "log_error": most >= LevelFilter::ERROR,
        "log_verbose_level": if most >= LevelFilter::TRACE { 2 } else { u8::from(most >= LevelFilter::DEBUG) },
        "log_format": "ISO8601",
    })
}

/// Counts one inference by gRPC: it is inside until what this answers is called or dropped.
fn begins(metrics: &Arc<Metrics>, clock: Clock) -> grpc::Ended {
    let started = clock.now();
    let inside = metrics.request_begins();
    let metrics = Arc::clone(metrics);
    Box::new(move |outcome| {
        drop(inside);
        answered(&metrics, outcome, clock.now().since(started));
    })
}

fn answered(metrics: &Metrics, outcome: &Outcome, took: Duration) {
    if let Some(model) = &outcome.model {
        let code = outcome.failure.map_or("ok", crate::http::Code::as_str);
        metrics.answered(&model.name, model.version, code, took.as_secs_f64());
    }
}

/// Counts each inference by HTTP by how it ended.
async fn count(
    axum::extract::State((metrics, clock)): axum::extract::State<(Arc<Metrics>, Clock)>,
    request: axum::extract::Request,
    next: axum::middleware::Next,
) -> axum::response::Response {
    let started = clock.now();
    let inside = metrics.request_begins();
    let response = next.run(request).await;
    drop(inside);
    if let Some(outcome) = response.extensions().get::<Outcome>() {
        answered(&metrics, outcome, clock.now().since(started));
    }
    response
}

/// SIGTERM and SIGINT.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn recv(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => tracing::info!("SIGTERM"),
            _ = self.interrupt.recv() => tracing::info!("SIGINT"),
        }
    }
}

#[cfg(test)]
mod tests;
