//! What is fuzzed, for `load-tests/fuzz.rs` and the targets of cargo-fuzz: the server's router or accept loop in this process, the
//! first inputs, and what counts as broken.
#![allow(unsafe_code, reason = "memory is counted where it is allocated")]
#![allow(clippy::unwrap_used, reason = "what breaks shall break here")]

use crate::support;
use axum::Router;
use axum::body::Body;
use axum::http::{Request, Version};
use concertina::batcher::InferError;
use concertina::http::serve::{ServeLimits, serve};
use concertina::tensor::DataType;
use http_body_util::BodyExt as _;
use std::alloc::{GlobalAlloc, Layout, System};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tower::ServiceExt as _;

/// What an answer may take beside four times the input: its own text, the parsed head, the tracing span.
const CONSTANT: usize = 64 << 10;
/// The same over a socket, where both ends and their buffers are in this process.
const SOCKET: usize = 512 << 10;
/// The longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is the system's; only sizes are added up beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(NOW.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // As if both were there for a moment, which they may be.
        PEAK.fetch_max(NOW.fetch_add(size, Relaxed) + size, Relaxed);
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// What the inputs are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Target {
    /// Bodies that are JSON.
    Json,
    /// Bodies of JSON and binary tensors, and the header that divides them.
    Binary,
    /// Whole requests as bytes, over a socket.
    Headers,
}

impl Target {
    /// Bytes that an answer may take beside four times its input.
    pub(crate) const fn constant(self) -> usize {
        match self {
            Self::Headers => SOCKET,
            Self::Json | Self::Binary => CONSTANT,
        }
    }
}

/// Inputs to begin with.
pub(crate) fn seeds(target: Target) -> Vec<Vec<u8>> {
    let body = |datatype: &str, data: &str, shape: &str| {
        format!(
            r#"{{"id":"a","inputs":[{{"name":"{datatype}","shape":{shape},"datatype":"{datatype}","data":{data}}}]}}"#
        )
    };
    let mut bodies = vec![
        body("FP64", &format!("[{}1]", "1,".repeat(999)), "[1,1000]"),
        body("FP32", "[[0.5,-1e3],[NaN,Inf]]", "[2,2]"),
        body("INT64", "[9223372036854775807,-5]", "[1,2]"),
        body("UINT8", "[0,255]", "[2,1]"),
        body("BOOL", "[true,false]", "[1,2]"),
        body("BYTES", r#"["a\u00e9\n",""]"#, "[1,2]"),
        body("FP16", "[1.5]", "[1,1]"),
        r#"{"inputs":[{"data":[1],"datatype":"FP32","shape":[1,1],"name":"FP32","parameters":{"x":{"y":[]}}}],"outputs":[{"name":"FP32","parameters":{"binary_data":true}}],"parameters":{"priority":1,"timeout":5,"binary_data_output":true}}"#.to_owned(),
    ];
    match target {
        Target::Json => bodies.into_iter().map(String::into_bytes).collect(),
        Target::Binary => ["FP32", "BYTES", "BOOL"]
            .map(|datatype| {
                let json = format!(
                    r#"{{"inputs":[{{"name":"{datatype}","shape":[1,2],"datatype":"{datatype}","parameters":{{"binary_data_size":8}}}}]}}"#
                );
                // The length of the JSON is in front, in two bytes.
                let length = u16::try_from(json.len()).unwrap().to_le_bytes();
                [&length, json.as_bytes(), &[0, 0, 0, 0, 0, 0, 0, 0]].concat()
            })
            .into(),
        Target::Headers => {
            let body = bodies.swap_remove(1);
            ["", "Expect: 100-continue\r\n", "Connection: close\r\nX-Request-Id: abc\r\n", "Inference-Header-Content-Length: 20\r\n"]
                .map(|extra| {
                    let length = body.len();
                    format!("POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n{extra}\r\n{body}").into_bytes()
                })
                .into_iter()
                .chain([b"GET /v2/models/m HTTP/1.1\r\nHost: x\r\n\r\n".to_vec()])
                .chain([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0\0\0\x06\x01\x05\0\0\0\x01\x82\x86\x84\x41\x01x".to_vec()])
                .collect()
        }
    }
}

/// A server in this process.
pub(crate) struct Server {
    router: Router,
    address: Option<SocketAddr>,
}

/// Starts it.
pub(crate) async fn server(target: Target) -> Server {
    // One model with an input for each datatype would need them all: as many models as datatypes, each with one input.
    let models = DataType::ALL.map(|datatype| {
        let name = if datatype == DataType::Fp32 { "m" } else { datatype.name() };
        support::echo(name, vec![support::tensor(datatype.name(), datatype)])
    });
    let app = support::app_answering(models.into(), |_| Err(InferError::Overloaded));
    let mut address = None;
    if target == Target::Headers {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        address = Some(listener.local_addr().unwrap());
        let limits = ServeLimits {
            connections: 64,
            streams_per_connection: 16,
            crowded_idle_timeout: Duration::from_secs(1),
            header_read_timeout: Duration::from_secs(5),
            write_timeout: Duration::from_secs(5),
            header_bytes: 16 << 10,
            grace: Duration::from_secs(1),
        };
        tokio::spawn(serve(listener, app.router.clone(), limits, None, app.phase.subscribe()));
    }
    // The phase must outlive the server.
    let router = app.router.clone();
    std::mem::forget(app);
    Server { router, address }
}

/// The status and the beginning of the answer.
async fn send(server: &Server, target: Target, input: &[u8], model: &str) -> (u16, Vec<u8>) {
    if let Some(address) = server.address {
        return over_socket(address, input).await;
    }
    let mut request = Request::post(format!("/v2/models/{model}/infer")).version(Version::HTTP_11);
    let body = match (target, input.split_at_checked(2)) {
        (Target::Binary, Some((length, rest))) => {
            let length = u16::from_le_bytes([length[0], length[1]]);
            request = request.header("inference-header-content-length", length);
            rest
        }
        _ => input,
    };
    let response = server.router.clone().oneshot(request.body(Body::from(body.to_vec())).unwrap()).await.unwrap();
    let status = response.status().as_u16();
    (status, response.into_body().collect().await.unwrap().to_bytes().to_vec())
}

async fn over_socket(address: SocketAddr, input: &[u8]) -> (u16, Vec<u8>) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // The server may have hung up before it has read everything: that is an answer, too.
    let _ = stream.write_all(input).await;
    let _ = stream.shutdown().await;
    let mut answer = vec![0; 4096];
    let mut len = 0;
    while let Ok(read @ 1..) = stream.read(&mut answer[len..]).await {
        len += read;
    }
    answer.truncate(len);
    let status = answer.get(9..12).and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok()).unwrap_or(0);
    (status, answer)
}

/// The models that an input can be sent to.
fn models() -> impl Iterator<Item = &'static str> {
    DataType::ALL.into_iter().map(|kind| if kind == DataType::Fp32 { "m" } else { kind.name() })
}

/// The model that the input itself names.
pub(crate) fn named(input: &[u8]) -> Option<&'static str> {
    models().find(|name| input.windows(name.len() + 2).any(|part| part == format!("\"{name}\"").as_bytes()))
}

/// What one input led to.
pub(crate) struct Answered {
    pub(crate) status: u16,
    pub(crate) text: Vec<u8>,
    /// Bytes allocated at the highest, less what was there before.
    pub(crate) memory: usize,
}

/// Sends the input and looks at what came of it.
///
/// # Errors
/// What is broken: an answer 500, none in 10 seconds, or memory above four times the input and a constant.
pub(crate) async fn attempt(server: &Server, target: Target, input: &[u8], model: &str) -> Result<Answered, String> {
    let before = NOW.load(Relaxed);
    PEAK.store(before, Relaxed);
    let answer = tokio::time::timeout(PATIENCE, send(server, target, input, model)).await;
    let memory = PEAK.load(Relaxed).saturating_sub(before);
    let (status, text) = answer.map_err(|_| "no answer within 10 s".to_owned())?;
    if status == 500 {
        return Err(format!("an answer 500: {}", String::from_utf8_lossy(&text)));
    }
    if memory > 4 * input.len() + target.constant() {
        return Err(format!("{memory} bytes of memory for {} of input", input.len()));
    }
    Ok(Answered { status, text, memory })
}
