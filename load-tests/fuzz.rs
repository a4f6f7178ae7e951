//! Throws mutated requests at the server's router and, for `headers`, at its accept loop, in this process: for a while, or
//! until something breaks. Broken is an answer 500, no answer in 10 seconds, a panic, and memory above four times the input and a constant.
//!
//! Inputs that are answered in a new way (another status, or other words) are kept and mutated further, so that mutations
//! find their way through the checks one by one. It runs with whatever Rust builds the server.
#![allow(unsafe_code, reason = "memory is counted where it is allocated")]
#![allow(clippy::unwrap_used, reason = "what breaks shall break here")]

#[path = "cases.rs"]
mod cases;
#[path = "../tests/api/support.rs"]
#[allow(dead_code, unreachable_pub, reason = "the tests use the rest")]
mod support;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Version};
use cases::Random;
use clap::{Parser, ValueEnum};
use concertina::batcher::InferError;
use concertina::http::serve::{ServeLimits, serve};
use concertina::tensor::DataType;
use http_body_util::BodyExt as _;
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tower::ServiceExt as _;

/// What an answer may take beside four times the input: its own text, the parsed head, the tracing span.
const CONSTANT: usize = 64 << 10;
/// The same over a socket, where both ends and their buffers are in this process.
const SOCKET: usize = 512 << 10;
/// The longest input.
const LONGEST: usize = 64 << 10;

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

#[derive(Clone, Copy, ValueEnum, Debug, PartialEq)]
enum Target {
    /// Bodies that are JSON.
    Json,
    /// Bodies of JSON and binary tensors, and the header that divides them.
    Binary,
    /// Whole requests as bytes, over a socket.
    Headers,
}

#[derive(Parser)]
struct Arguments {
    target: Target,
    #[arg(long, default_value_t = 60.0)]
    seconds: f64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

const WORDS: [&[u8]; 44] = [
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\"",
    b"\\u00e9",
    b"\\",
    b"null",
    b"true",
    b"false",
    b"0",
    b"-1",
    b"1e999",
    b"0.1",
    b"18446744073709551615",
    b"18446744073709551616",
    b"-9223372036854775808",
    b"NaN",
    b"Infinity",
    b"Inf",
    b"-Inf",
    b"[[[[",
    b"\"data\":",
    b"\"shape\":",
    b"\"datatype\":",
    b"\"parameters\":",
    b"\"binary_data_size\":",
    b"\"outputs\":",
    b"\"id\":",
    b"\"FP64\"",
    b"\"BYTES\"",
    b"\"BOOL\"",
    b"\r\n",
    b"Content-Length: ",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Expect: 100-continue\r\n",
    b"Inference-Header-Content-Length: ",
    b"Connection: close\r\n",
    b"\xff\xfe",
    b"\x00",
    b"%2F..%00",
];

fn seeds(target: Target) -> Vec<Vec<u8>> {
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

fn mutate(corpus: &[Vec<u8>], dice: &mut Random) -> Vec<u8> {
    let pick = |dice: &mut Random, below: usize| (dice.next() as usize) % below.max(1);
    let mut input = corpus[pick(dice, corpus.len())].clone();
    for _ in 0..=pick(dice, 4) {
        let at = pick(dice, input.len() + 1);
        match pick(dice, 8) {
            0 if !input.is_empty() => {
                let at = at.min(input.len() - 1);
                input[at] ^= 1 << pick(dice, 8);
            }
            1 => input.truncate(at),
            2 => drop(input.splice(at..at, WORDS[pick(dice, WORDS.len())].iter().copied())),
            3 => {
                let end = at + pick(dice, (input.len() - at).min(64) + 1);
                input.drain(at..end);
            }
            4 => {
                let end = at + pick(dice, (input.len() - at).min(512) + 1);
                let part = input[at..end].repeat(1 + pick(dice, 32));
                input.splice(at..at, part);
            }
            5 => {
                let other = &corpus[pick(dice, corpus.len())];
                let from = pick(dice, other.len() + 1);
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            6 => {
                let word = WORDS[pick(dice, WORDS.len())];
                let end = (at + word.len()).min(input.len());
                input.splice(at..end, word.iter().copied());
            }
            _ => {
                if let Some(byte) = input.get_mut(at) {
                    *byte = dice.next() as u8;
                }
            }
        }
    }
    input.truncate(LONGEST);
    input
}

/// What an answer says, without the numbers and names in it.
fn shape_of(answer: &[u8]) -> Vec<u8> {
    let mut shape: Vec<u8> =
        answer.iter().take(120).map(|byte| if byte.is_ascii_digit() { b'0' } else { *byte }).collect();
    shape.dedup();
    shape
}

struct Server {
    router: Router,
    address: Option<SocketAddr>,
}

async fn server(target: Target) -> Server {
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

#[allow(clippy::disallowed_methods, reason = "a measuring program reads the clock")]
#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments = Arguments::parse();
    let target = arguments.target;
    let server = server(target).await;
    let mut dice = Random(arguments.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut corpus = seeds(target);
    let (mut seen, mut statuses, mut runs, mut most) = (HashSet::new(), BTreeMap::<u16, u64>::new(), 0u64, 0f64);
    let models: Vec<&str> = DataType::ALL.map(|kind| if kind == DataType::Fp32 { "m" } else { kind.name() }).into();
    let begin = Instant::now();
    let mut first: Vec<_> = corpus.iter().cloned().rev().collect();
    while begin.elapsed().as_secs_f64() < arguments.seconds {
        let input = first.pop().unwrap_or_else(|| mutate(&corpus, &mut dice));
        // The model that the input itself names, as often as not.
        let named = models
            .iter()
            .find(|name| input.windows(name.len() + 2).any(|part| part == format!("\"{name}\"").as_bytes()));
        let model = named.filter(|_| !dice.next().is_multiple_of(8)).copied().unwrap_or("m");
        let before = NOW.load(Relaxed);
        PEAK.store(before, Relaxed);
        let answer = tokio::time::timeout(Duration::from_secs(10), send(&server, target, &input, model)).await;
        let took = PEAK.load(Relaxed).saturating_sub(before);
        let constant = if target == Target::Headers { SOCKET } else { CONSTANT };
        runs += 1;
        let broken = match &answer {
            Err(_) => Some("no answer within 10 s".to_owned()),
            Ok((500, _)) => Some("an answer 500".to_owned()),
            Ok(_) if took > 4 * input.len() + constant => Some(format!("{took} bytes of memory")),
            Ok(_) => None,
        };
        if let Some(what) = broken {
            std::fs::write("/tmp/concertina-fuzz-input", &input).unwrap();
            eprintln!(
                "{what} for {} bytes of input to {model}, kept in /tmp/concertina-fuzz-input: {answer:?}",
                input.len()
            );
            std::process::exit(1);
        }
        most = most.max(took.saturating_sub(constant) as f64 / input.len().max(1) as f64);
        let (status, text) = answer.unwrap();
        *statuses.entry(status).or_default() += 1;
        if seen.insert((status, shape_of(&text))) && corpus.len() < 4096 {
            corpus.push(input);
        }
    }
    println!(
        "{}",
        serde_json::json!({
            "target": format!("{target:?}").to_lowercase(), "seconds": arguments.seconds, "seed": arguments.seed, "inputs": runs,
            "kept": corpus.len(), "statuses": statuses, "most_memory_over_input_beyond_constant": most, "constant_bytes":
            if target == Target::Headers { SOCKET } else { CONSTANT },
        })
    );
}
