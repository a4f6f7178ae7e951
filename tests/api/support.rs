//! Models, a server without sockets, and answers to look at.

use arc_swap::ArcSwap;
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use concertina::batcher::{Batcher, InferError, Jobs};
use concertina::clock::Clock;
use concertina::http::{Admin, AppState, Bodies, Limits, Outcome, Phase, Texts, router};
use concertina::model::{
    Dim, InferResponse, MemoryUsage, ModelSpec, ModelState, OutputTensor, Settings, Table, TensorSpec, ValidRequest,
};
use concertina::tensor::DataType;
use concertina::text::Pool;
use concertina::units::{ByteSize, ModelId};
use http_body_util::BodyExt as _;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tower::ServiceExt as _;

/// The limit of bodies in these tests; there is room for two as large.
pub(crate) const BODY_LIMIT: usize = 1 << 20;

/// Input and output `name` of a model that gives back what it gets: two dimensions, the first is the batch.
pub(crate) fn tensor(name: &str, datatype: DataType) -> TensorSpec {
    TensorSpec { name: name.to_owned(), datatype, shape: vec![Dim::Symbol("batch".to_owned()), Dim::Any] }
}

/// A model whose outputs are its inputs, under the same names.
pub(crate) fn echo(name: &str, tensors: Vec<TensorSpec>) -> ModelSpec {
    ModelSpec {
        id: ModelId(1),
        name: name.to_owned(),
        version: 1,
        inputs: tensors.clone(),
        outputs: tensors,
        batch_axis: Some(0),
        unbatched_reason: None,
        max_batch_size: 8,
        padding: None,
        settings: Settings {
            max_queue_delay: Duration::from_millis(2),
            max_gather_delay: Duration::ZERO,
            max_queue_rows: 100,
            max_queue_bytes: ByteSize(1 << 20),
            priority_levels: 2,
            default_priority: 1,
            ..Settings::default()
        },
        text: None,
    }
}

/// What the fake batcher answers with.
pub(crate) type Answer = fn(&ValidRequest) -> Result<InferResponse, InferError>;

/// Gives the inputs back as outputs.
pub(crate) fn give_back(request: &ValidRequest) -> Result<InferResponse, InferError> {
    let output = |&index: &usize| OutputTensor { index, tensor: request.inputs[index].clone() };
    Ok(InferResponse { outputs: request.outputs.iter().map(output).collect() })
}

/// A server without a socket.
pub(crate) struct App {
    pub(crate) router: Router,
    pub(crate) models: Arc<ArcSwap<Table>>,
    pub(crate) phase: watch::Sender<Phase>,
}

/// A server, and the end at which its requests arrive.
pub(crate) fn app_with_jobs(specs: Vec<ModelSpec>, capacity: usize) -> (App, Jobs) {
    assemble(specs, capacity, None)
}

/// A server without models, but with these admin routes.
pub(crate) fn app_with_admin(admin: Admin) -> App {
    assemble(vec![], 1, Some(admin)).0
}

fn assemble(specs: Vec<ModelSpec>, capacity: usize, admin: Option<Admin>) -> (App, Jobs) {
    let (state, server, jobs) = state(specs, capacity, admin);
    (App { router: router(Arc::new(state)), models: server.models, phase: server.phase }, jobs)
}

/// A server with model `m` and no batcher behind it, with this change to what its routes need.
pub(crate) fn app_with(change: impl FnOnce(&mut AppState)) -> App {
    let specs = vec![echo("m", vec![tensor("x", DataType::Uint8)])];
    let (mut state, server, _) = state(specs, 1, None);
    change(&mut state);
    App { router: router(Arc::new(state)), models: server.models, phase: server.phase }
}

/// What of a server tests change.
pub(crate) struct Assembled {
    pub(crate) models: Arc<ArcSwap<Table>>,
    pub(crate) phase: watch::Sender<Phase>,
}

/// What routes need, and the other ends of it.
pub(crate) fn state(specs: Vec<ModelSpec>, capacity: usize, admin: Option<Admin>) -> (AppState, Assembled, Jobs) {
    let mut table = Table { scanned: true, ..Table::default() };
    for spec in specs {
        let versions = table.models.entry(spec.name.clone()).or_default();
        versions.insert(spec.version, ModelState::Ready(Arc::new(spec)));
    }
    let models = Arc::new(ArcSwap::from_pointee(table));
    let (batcher, jobs) = Batcher::channel(capacity);
    let (phase, phase_receiver) = watch::channel(Phase::Serving);
    let state = AppState {
        batcher,
        models: Arc::clone(&models),
        limits: Limits {
            body_bytes: BODY_LIMIT,
            body_read_timeout: Duration::from_secs(30),
            request_rows: 1000,
            compress_answers: true,
        },
        bodies: Bodies::new(2 * BODY_LIMIT as u64),
        offered: Box::new(|_, _| {}),
        spent: Box::new(|_, _, _| {}),
        clock: Clock::start(),
        tracer: None,
        phase: phase_receiver,
        metrics: Box::new(|| "up 1\n".to_owned()),
        keys: None,
        cors_origins: Vec::new(),
        admin,
        repository: None,
        logging: serde_json::json!({"log_info": true}),
        memory: Box::new(|_| vec![MemoryUsage { kind: "CPU", device: 0, bytes: 4096 }]),
        texts: Texts {
            pool: Pool::new(NonZeroUsize::MIN, NonZeroUsize::new(16).unwrap()).unwrap(),
            max_inputs: 100,
            max_input_bytes: 1000,
            model: None,
        },
    };
    (state, Assembled { models, phase }, jobs)
}

/// A server whose requests are answered by `answer`.
pub(crate) fn app_answering(specs: Vec<ModelSpec>, answer: Answer) -> App {
    let (app, mut jobs) = app_with_jobs(specs, 16);
    tokio::spawn(async move {
        while let Some(job) = jobs.recv().await {
            let _gone = job.reply.send(answer(&job.request));
        }
    });
    app
}

/// A server with one model `m` that gives back what it gets.
pub(crate) fn echo_app(tensors: Vec<TensorSpec>) -> App {
    app_answering(vec![echo("m", tensors)], give_back)
}

/// A response, read to its end.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    pub(crate) outcome: Option<Outcome>,
}

impl Reply {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        assert_eq!(self.header("content-type"), Some("application/json"));
        serde_json::from_slice(&self.body).unwrap()
    }

    /// The text and the code of an error.
    pub(crate) fn error(&self) -> (String, String) {
        let json = self.json();
        (json["error"].as_str().unwrap().to_owned(), json["code"].as_str().unwrap().to_owned())
    }
}

impl App {
    pub(crate) async fn send(&self, request: Request<Body>) -> Reply {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes().to_vec();
        Reply {
            status: parts.status,
            outcome: parts.extensions.get::<Outcome>().cloned(),
            headers: parts.headers,
            body,
        }
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        self.request("GET", path).await
    }

    pub(crate) async fn request(&self, method: &str, path: &str) -> Reply {
        self.send(Request::builder().method(method).uri(path).body(Body::empty()).unwrap()).await
    }

    /// An inference by model `m` with a JSON body.
    pub(crate) async fn infer(&self, body: impl Into<Body>) -> Reply {
        self.infer_binary(None, body).await
    }

    /// The same with `Inference-Header-Content-Length`.
    pub(crate) async fn infer_binary(&self, json_length: Option<&str>, body: impl Into<Body>) -> Reply {
        let mut request = Request::post("/v2/models/m/infer");
        if let Some(length) = json_length {
            request = request.header("Inference-Header-Content-Length", length);
        }
        self.send(request.body(body.into()).unwrap()).await
    }

    /// JSON followed by binary tensors, with the right header.
    pub(crate) async fn infer_mixed(&self, json: &str, tail: &[u8]) -> Reply {
        let body = [json.as_bytes(), tail].concat();
        self.infer_binary(Some(&json.len().to_string()), body).await
    }
}
