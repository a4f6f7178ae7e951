//! HTTP: the Open Inference Protocol as a skin over the batcher's handle.
//!
//! A request passes `edge` (request id, log span, `traced`, panic to 500, bodies left `unread`), then its route. Of the inference path, `body` reads
//! within limits, `decode`, `reader`, `data` (with `fast`) and `binary` make an [`InferRequest`](crate::model::InferRequest) of it,
//! and `inference`, which all protocols have in common, compares it with its model
//! ([`ValidRequest`](crate::model::ValidRequest)) and has the batcher answer; `encode` writes. Every
//! failure is an `ApiError`, and one function in `error` gives it a status. `coding` compresses on both ways. `predict` is TensorFlow
//! Serving's way to the same batcher, `text` that of texts; `page` is what a browser sees at `/`; `statistics`, `repository` and
//! `absent` are extensions of the protocol. `serve` accepts connections,
//! and `stall` finds those over HTTP/2 that take nothing. The routes of `admin`
//! exist only if there is a token for them.
//!
//! The handler of a request awaits the batcher itself and spawns nothing but the ranking of large outputs: when its client goes,
//! the connection drops the handler, and with it the request.

mod absent;
mod access;
mod admin;
mod binary;
mod body;
mod coding;
mod data;
mod decode;
mod eager;
mod edge;
mod encode;
mod error;
mod fast;
mod infer;
mod inference;
mod metadata;
mod openapi;
mod page;
mod path;
mod predict;
mod reader;
mod repository;
pub mod serve;
mod stall;
mod statistics;
mod status;
mod text;
mod tls;
mod traced;
mod unread;

pub use access::{ApiKeys, KeyRing};
pub use admin::{Admin, ChangeMemory, MemoryChange};
pub use body::Bodies;
pub use error::Code;
pub use text::Texts;
pub use tls::Tls;

// What gRPC, another skin over the same, has in common with HTTP.
pub(crate) use absent::{SHARED_MEMORY, log_settings};
pub(crate) use access::authorized;
pub(crate) use admin::required as admin_required;
pub(crate) use binary::normalised;
pub(crate) use body::{Collected, LOAD_BODY_BYTES, Room, SMALL_BODY_BYTES};
pub(crate) use coding::{Coding, inflate};
pub(crate) use edge::caught;
pub(crate) use error::ApiError;
pub(crate) use inference::Inference;
pub(crate) use metadata::{model_config, model_metadata, server_metadata};
pub(crate) use path::{ModelPath, version};
pub(crate) use repository::{controller, index_of};
pub(crate) use statistics::statistics_of;
pub(crate) use status::not_ready;
pub(crate) use traced::Traced;

use crate::batcher::Batcher;
use crate::clock::Clock;
use crate::metrics::Stage;
use crate::model::{MemoryUsage, ModelSpec, Table};
use crate::repository::Controller;
use crate::trace::{TRACE_PARENT, TRACE_RESPONSE, TRACE_STATE, Trace, Tracer};
use arc_swap::ArcSwap;
use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tower_http::cors::{AllowOrigin, CorsLayer};

/// Exactly this: one client compares the whole value.
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const BINARY: HeaderValue = HeaderValue::from_static("application/octet-stream");

/// What a request may cost before its model sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// The largest body.
    pub body_bytes: usize,
    /// How long a body may take to arrive.
    pub body_read_timeout: Duration,
    /// The most rows in one request.
    pub request_rows: u32,
    /// Whether answers are compressed for clients that ask for it.
    pub compress_answers: bool,
}

/// Where the process is in its life, as HTTP needs to know it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Serving, or loading in order to serve.
    #[default]
    Serving,
    /// About to stop: readiness says so, everything is still served.
    Announced,
    /// Stopping: no new connections, and each connection is closed after the request that it carries.
    Closing,
}

/// Told of a model and how long a stage of one of its requests took.
pub type Spent = Box<dyn Fn(&ModelSpec, Stage, Duration) + Send + Sync>;

/// Told of a model and the rows that somebody wants from it.
pub type Offered = Box<dyn Fn(&ModelSpec, u32) + Send + Sync>;

/// Says what a model holds of the memory of each device.
pub type MemoryOf = Box<dyn Fn(&ModelSpec) -> Vec<MemoryUsage> + Send + Sync>;

/// Everything that the routes need.
pub struct AppState {
    /// Runs requests.
    pub batcher: Batcher,
    /// Which models there are.
    pub models: Arc<ArcSwap<Table>>,
    /// What a request may cost.
    pub limits: Limits,
    /// The room for the bodies of all requests together.
    pub bodies: Bodies,
    /// Where the process is in its life.
    pub phase: watch::Receiver<Phase>,
    /// Told of each request that fits its model, before anybody can refuse it for want of room.
    pub offered: Offered,
    /// Told how long it took to read a request and to write its answer.
    pub spent: Spent,
    /// Times them.
    pub clock: Clock,
    /// Records requests; `None`: nobody does.
    pub tracer: Option<Tracer>,
    /// All metrics in the text format of Prometheus.
    pub metrics: Box<dyn Fn() -> String + Send + Sync>,
    /// The keys of those who may ask; `None`: anybody may.
    pub keys: KeyRing,
    /// Origins whose pages may ask from within a browser; `*`: any.
    pub cors_origins: Vec<String>,
    /// What the admin routes do; `None`: there are none.
    pub admin: Option<Admin>,
    /// Loads and unloads models, for those who may use the admin routes.
    pub repository: Option<Controller>,
    /// What a model holds of the memory of each device.
    pub memory: MemoryOf,
    /// What is logged, in the words of the logging extension.
    pub logging: serde_json::Value,
    /// The threads for texts, and what texts may cost.
    pub texts: Texts,
}

impl fmt::Debug for AppState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AppState").field("limits", &self.limits).field("phase", &self.phase).finish_non_exhaustive()
    }
}

/// How an inference ended. Every response of an infer route carries one as an extension, for a layer around the router that
/// counts; a client that goes away leaves none.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The model; `None` if the request named none that is ready, so that clients cannot invent names.
    pub model: Option<Arc<ModelSpec>>,
    /// `None`: answered. Otherwise the kind of failure.
    pub failure: Option<Code>,
    /// Its rows; 0 if the request was refused before they were known.
    pub rows: u32,
    /// The trace that the request is in.
    pub trace: Option<Trace>,
}

impl Outcome {
    /// That of a request which has just come.
    fn of(state: &AppState, request: &Request) -> Self {
        let trace = state.tracer.as_ref().and_then(|_| request.extensions().get().cloned());
        Self { trace, ..Self::default() }
    }

    /// The response of an infer route, with how it ended.
    fn response(mut self, answer: Result<Response, ApiError>) -> Response {
        self.failure = answer.as_ref().err().map(ApiError::code);
        let mut response = answer.unwrap_or_else(IntoResponse::into_response);
        response.extensions_mut().insert(self);
        response
    }
}

/// The routes of the repository, and of extensions that the server does not have.
fn extensions() -> Router<Arc<AppState>> {
    let mut router = Router::new()
        .route("/v2/repository/index", post(repository::index))
        .route("/v2/repository/models/{model}/load", post(repository::load))
        .route("/v2/repository/models/{model}/unload", post(repository::unload))
        .route("/v2/repository/{repository}/index", post(repository::named))
        .route("/v2/repository/{repository}/models/{model}/load", post(repository::named))
        .route("/v2/repository/{repository}/models/{model}/unload", post(repository::named))
        .route("/v2/trace/setting", get(absent::trace).post(absent::trace))
        .route("/v2/models/{model}/trace/setting", get(absent::trace).post(absent::trace))
        .route("/v2/logging", get(absent::logging).post(absent::set_logging));
    for kind in ["systemsharedmemory", "cudasharedmemory"] {
        router = router
            .route(&format!("/v2/{kind}/status"), get(absent::no_regions))
            .route(&format!("/v2/{kind}/region/{{region}}/status"), get(absent::no_region))
            .route(&format!("/v2/{kind}/region/{{region}}/register"), post(absent::shared_memory))
            .route(&format!("/v2/{kind}/region/{{region}}/unregister"), post(absent::shared_memory))
            .route(&format!("/v2/{kind}/unregister"), post(absent::shared_memory));
    }
    router
}

/// The routes that take texts.
fn texts() -> Router<Arc<AppState>> {
    let mut router = Router::new();
    // KServe has OpenAI's routes below a prefix, and TEI without the version.
    for path in ["/v1/embeddings", "/openai/v1/embeddings", "/embeddings"] {
        router = router.route(path, post(text::openai::embeddings));
    }
    // TEI serves one model; several are told apart by the path, so that its clients need only another address.
    for prefix in ["", "/tei/{model}"] {
        let path = |name: &str| format!("{prefix}/{name}");
        router = router
            .route(&path("embed"), post(text::tei::embed))
            .route(&path("embed_all"), post(text::tei::embed_all))
            .route(&path("predict"), post(text::tei::predict))
            .route(&path("rerank"), post(text::tei::rerank))
            .route(&path("similarity"), post(text::tei::similarity))
            .route(&path("tokenize"), post(text::tei::tokenize))
            .route(&path("decode"), post(text::tei::decode))
            .route(&path("info"), get(text::tei::info));
    }
    router
}

/// The routes below `/v1/models`.
fn tensorflow_serving() -> Router<Arc<AppState>> {
    let mut router = Router::new().route("/v1/models", get(predict::list));
    for path in ["/v1/models/{model}", "/v1/models/{model}/versions/{version}", "/v1/models/{model}/labels/{label}"] {
        router = router
            .route(path, get(predict::status).post(predict::predict).fallback(predict::other_method))
            .route(&format!("{path}/metadata"), get(predict::metadata));
    }
    router
}

/// The router with all routes and middleware.
pub fn router(state: Arc<AppState>) -> Router {
    let edge = edge::Edge {
        ids: edge::RequestIds::new(),
        body_read_timeout: state.limits.body_read_timeout,
        phase: state.phase.clone(),
        tracer: state.tracer.clone(),
    };
    let origins = state.cors_origins.clone();
    let guarded = Arc::clone(&state);
    let page = page::Page::new();
    let mut router = Router::new();
    if state.admin.is_some() {
        router = router.route("/admin/memory", get(admin::read_memory).post(admin::change_memory));
    }
    let router = router
        .route("/", get(async move |headers: HeaderMap| page.answer(&headers)))
        .route("/openapi.json", get(openapi::document))
        .route("/metrics", get(status::metrics))
        .route("/v2", get(metadata::server))
        .route("/v2/", get(metadata::server))
        .route("/v2/health/live", get(status::live))
        .route("/v2/health/ready", get(status::ready))
        .route("/v2/models", get(metadata::models))
        .route("/v2/models/{model}", get(metadata::model))
        .route("/v2/models/{model}/versions/{version}", get(metadata::model))
        .route("/v2/models/{model}/ready", get(status::model_ready))
        .route("/v2/models/{model}/versions/{version}/ready", get(status::model_ready))
        .route("/v2/models/{model}/config", get(metadata::config))
        .route("/v2/models/{model}/versions/{version}/config", get(metadata::config))
        .route("/v2/models/{model}/infer", post(infer::infer))
        .route("/v2/models/{model}/versions/{version}/infer", post(infer::infer))
        .route("/v2/models/stats", get(statistics::all))
        .route("/v2/models/{model}/stats", get(statistics::model))
        .route("/v2/models/{model}/versions/{version}/stats", get(statistics::model))
        .merge(extensions())
        .merge(tensorflow_serving())
        .merge(texts())
        .fallback(async || ApiError::RouteNotFound)
        .method_not_allowed_fallback(async || ApiError::MethodNotAllowed { allow: "" })
        .with_state(state)
        .layer(axum::middleware::from_fn_with_state(guarded, access::guard))
        .layer(axum::middleware::from_fn_with_state(edge, edge::edge))
        .layer(axum::middleware::from_fn(text::form::dress));
    if origins.is_empty() { router } else { router.layer(cors(&origins)) }
}

/// What browsers are told, and what pages may see of an answer beyond what they may see of any.
fn cors(origins: &[String]) -> CorsLayer {
    const SENT: [HeaderName; 6] = [
        header::AUTHORIZATION,
        header::CONTENT_ENCODING,
        header::CONTENT_TYPE,
        binary::JSON_LENGTH,
        TRACE_PARENT,
        TRACE_STATE,
    ];
    const SEEN: [HeaderName; 4] = [binary::JSON_LENGTH, header::RETRY_AFTER, edge::REQUEST_ID, TRACE_RESPONSE];
    let origin = match origins {
        [any] if any == "*" => AllowOrigin::any(),
        _ => AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok())),
    };
    CorsLayer::new()
        .allow_origin(origin)
        .allow_methods([Method::GET, Method::HEAD, Method::POST])
        .allow_headers(SENT.into_iter().chain([edge::REQUEST_ID]).collect::<Vec<_>>())
        .expose_headers(SEEN)
}
