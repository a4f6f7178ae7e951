//! A load of binary infer requests over N connections. Closed loop: each sends its next request when it has its answer. Open loop
//! (--rate): requests are due at a constant rate whatever the server does, and a request that finds all connections busy is
//! late; latencies count from when it was due, so that a server that stalls does not hide it.
//!
//!     loadgen --address 127.0.0.1:8000 --case minilm:64 --connections 64 --seconds 10 [--rows 1] [--distinct 64]
//!             [--rate 100] [--lengths 16,64,256]
//!
//! First every distinct request is sent alone and its answer kept; under load every answer is compared with the one that
//! belongs to its request. Prints one JSON object: requests, rows per second, latencies, errors, wrong answers. With `--turns` it
//! does so once for each line of its input, which says for how many seconds: so several servers can take turns.

#[path = "cases.rs"]
mod cases;

use anyhow::Context;
use bytes::Bytes;
use cases::Case;
use clap::Parser;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

/// Answers of other batch sizes may differ in the last bits.
const TOLERANCE: f32 = 1e-4;

/// What a plot of latencies is drawn by.
const QUANTILES: [f64; 9] = [0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0];

#[derive(Parser, Clone)]
struct Arguments {
    #[arg(long)]
    address: String,
    #[arg(long)]
    case: Case,
    #[arg(long, default_value_t = 64)]
    connections: usize,
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    #[arg(long, default_value_t = 1)]
    rows: usize,
    #[arg(long, default_value_t = 64)]
    distinct: usize,
    /// Random rows from 1 to `rows` in each request, instead of always `rows`.
    #[arg(long)]
    mixed_rows: bool,
    /// Of a thousand requests so many are given up by their client after a random time: the connection is cut.
    #[arg(long, default_value_t = 0)]
    cut_per_mille: u64,
    /// Requests per second, however long answers take.
    #[arg(long)]
    rate: Option<f64>,
    /// Rows of these lengths instead of one, for a case that has lengths; each request has one of them.
    #[arg(long, value_delimiter = ',')]
    lengths: Vec<usize>,
    /// The only output to ask for; all if left out.
    #[arg(long)]
    output: Option<String>,
    /// One load for each line read, of as many seconds as it says.
    #[arg(long)]
    turns: bool,
}

/// One request and the answer that belongs to it.
struct Question {
    rows: usize,
    head_length: usize,
    body: Bytes,
    answer: Vec<f32>,
}

#[derive(Default)]
struct Tally {
    latencies: Vec<f64>,
    /// When each answer came, in tenths of a second since the start, and its rows.
    answered: Vec<(usize, usize)>,
    cut: u64,
    errors: u64,
    /// Of the errors, those that the server answered, by status.
    refused: BTreeMap<u16, u64>,
    wrong: u64,
    first_error: Option<String>,
}

/// An answer that is not 200.
#[derive(Debug, thiserror::Error)]
#[error("{status}: {text}")]
struct Refused {
    status: StatusCode,
    text: String,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let mut arguments = Arguments::parse();
    let mut questions: Vec<Question> =
        (0..arguments.distinct as u64).map(|seed| question(&arguments, seed + 1)).collect();
    let mut connection = connect(&arguments.address).await?;
    for question in &mut questions {
        question.answer = ask(&mut connection, &arguments, question).await?;
    }
    drop(connection);
    let questions = Arc::new(questions);
    if !arguments.turns {
        report(&arguments, load(&arguments, questions).await?);
        return Ok(());
    }
    println!("ready");
    for line in std::io::stdin().lines() {
        arguments.seconds = line?.trim().parse()?;
        report(&arguments, load(&arguments, Arc::clone(&questions)).await?);
    }
    Ok(())
}

fn question(arguments: &Arguments, seed: u64) -> Question {
    let rows = if arguments.mixed_rows { 1 + (seed as usize * 7) % arguments.rows } else { arguments.rows };
    let length = arguments.lengths.get(seed as usize % arguments.lengths.len().max(1));
    let case = length.map_or(arguments.case, |length| arguments.case.of_length(*length));
    let inputs = case.inputs(rows, seed);
    let described: Vec<serde_json::Value> = inputs
        .iter()
        .map(|input| {
            serde_json::json!({
                "name": input.name, "shape": input.shape, "datatype": input.datatype(),
                "parameters": {"binary_data_size": input.bytes().len()},
            })
        })
        .collect();
    let mut head = serde_json::json!({"inputs": described});
    match &arguments.output {
        Some(name) => head["outputs"] = serde_json::json!([{"name": name, "parameters": {"binary_data": true}}]),
        None => head["parameters"] = serde_json::json!({"binary_data_output": true}),
    }
    let mut body = serde_json::to_vec(&head).expect("a JSON value");
    let head_length = body.len();
    inputs.iter().for_each(|input| body.extend(input.bytes()));
    Question { rows, head_length, body: body.into(), answer: Vec::new() }
}

async fn connect(address: &str) -> anyhow::Result<SendRequest<Full<Bytes>>> {
    let stream = TcpStream::connect(address).await.with_context(|| format!("connecting to {address}"))?;
    stream.set_nodelay(true)?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender)
}

async fn ask(
    connection: &mut SendRequest<Full<Bytes>>,
    arguments: &Arguments,
    question: &Question,
) -> anyhow::Result<Vec<f32>> {
    let request = Request::post(format!("/v2/models/{}/infer", arguments.case.model()))
        .header("host", &arguments.address)
        .header("inference-header-content-length", question.head_length)
        .body(Full::new(question.body.clone()))?;
    connection.ready().await?;
    let response = connection.send_request(request).await?;
    let status = response.status();
    let head: usize = response
        .headers()
        .get("inference-header-content-length")
        .and_then(|value| value.to_str().ok()?.parse().ok())
        .unwrap_or(0);
    let body = response.into_body().collect().await?.to_bytes();
    if status != StatusCode::OK {
        return Err(Refused { status, text: String::from_utf8_lossy(&body).into_owned() }.into());
    }
    let values = body[head..].chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    Ok(values.collect())
}

#[allow(clippy::disallowed_methods, reason = "a load generator reads the clock")]
async fn load(arguments: &Arguments, questions: Arc<Vec<Question>>) -> anyhow::Result<Tally> {
    let start = Instant::now();
    let due = Arc::new(AtomicU64::new(0));
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..arguments.connections {
        let (arguments, questions, due) = (arguments.clone(), Arc::clone(&questions), Arc::clone(&due));
        match arguments.rate {
            Some(rate) => clients.spawn(async move { open_loop(arguments, questions, (&due, rate), start).await }),
            None => clients.spawn(async move { client_loop(arguments, questions, client, start).await }),
        };
    }
    let mut total = Tally::default();
    while let Some(tally) = clients.join_next().await {
        let tally = tally?;
        total.latencies.extend(tally.latencies);
        total.answered.extend(tally.answered);
        total.cut += tally.cut;
        total.errors += tally.errors;
        tally.refused.into_iter().for_each(|(status, count)| *total.refused.entry(status).or_default() += count);
        total.wrong += tally.wrong;
        total.first_error = total.first_error.or(tally.first_error);
    }
    Ok(total)
}

#[allow(clippy::disallowed_methods, reason = "a load generator reads the clock")]
async fn client_loop(arguments: Arguments, questions: Arc<Vec<Question>>, client: usize, start: Instant) -> Tally {
    let end = start + Duration::from_secs_f64(arguments.seconds);
    let mut tally = Tally::default();
    let mut connection = None;
    let mut next = client;
    let mut dice = cases::Random(client as u64 * 7919 + 1);
    while Instant::now() < end && tally.errors < 100 {
        let question = &questions[next % questions.len()];
        next += 1;
        let begin = Instant::now();
        let answer = async {
            let connection = match &mut connection {
                Some(connection) => connection,
                empty => empty.insert(connect(&arguments.address).await?),
            };
            ask(connection, &arguments, question).await
        };
        if dice.next() % 1000 < arguments.cut_per_mille {
            let patience = Duration::from_micros(dice.next() % 30_000);
            if tokio::time::timeout(patience, answer).await.is_err() {
                tally.cut += 1;
            }
            connection = None;
            continue;
        }
        match answer.await {
            Ok(answer) => {
                tally.latencies.push(begin.elapsed().as_secs_f64());
                tally.answered.push((start.elapsed().as_millis() as usize / 100, question.rows));
                tally.wrong += u64::from(!same(&answer, &question.answer));
            }
            Err(error) => {
                tally.errors += 1;
                tally.first_error.get_or_insert(error.to_string());
                connection = None;
            }
        }
    }
    tally
}

/// One connection of an open loop: takes the next request that is due, and waits for it if it is early.
#[allow(clippy::disallowed_methods, reason = "a load generator reads the clock")]
async fn open_loop(
    arguments: Arguments,
    questions: Arc<Vec<Question>>,
    (next, rate): (&AtomicU64, f64),
    start: Instant,
) -> Tally {
    let mut tally = Tally::default();
    let mut connection = None;
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let due = start + Duration::from_secs_f64(number as f64 / rate);
        if due >= start + Duration::from_secs_f64(arguments.seconds) {
            return tally;
        }
        tokio::time::sleep_until(due.into()).await;
        let question = &questions[number as usize % questions.len()];
        let answer = async {
            let connection = match &mut connection {
                Some(connection) => connection,
                empty => empty.insert(connect(&arguments.address).await?),
            };
            ask(connection, &arguments, question).await
        };
        match answer.await {
            Ok(answer) => {
                tally.latencies.push(due.elapsed().as_secs_f64());
                tally.answered.push((start.elapsed().as_millis() as usize / 100, question.rows));
                tally.wrong += u64::from(!same(&answer, &question.answer));
            }
            Err(error) => {
                tally.errors += 1;
                match error.downcast_ref::<Refused>() {
                    Some(refused) => *tally.refused.entry(refused.status.as_u16()).or_default() += 1,
                    None => connection = None,
                }
                tally.first_error.get_or_insert(error.to_string());
            }
        }
    }
}

fn same(answer: &[f32], expected: &[f32]) -> bool {
    answer.len() == expected.len() && answer.iter().zip(expected).all(|(a, b)| (a - b).abs() <= TOLERANCE)
}

fn report(arguments: &Arguments, mut tally: Tally) {
    tally.latencies.sort_by(f64::total_cmp);
    let quantile = |q: f64| {
        let index = (q * tally.latencies.len() as f64) as usize;
        tally.latencies.get(index.min(tally.latencies.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
    };
    let rows: usize = tally.answered.iter().map(|(_, rows)| rows).sum();
    // What is answered after the end was begun before it, but not in this time.
    let end = (arguments.seconds * 10.0) as usize;
    let within: usize = tally.answered.iter().filter(|(tenth, _)| *tenth < end).map(|(_, rows)| rows).sum();
    let mut timeline = vec![0; tally.answered.iter().map(|(tenth, _)| tenth + 1).max().unwrap_or(0)];
    tally.answered.iter().for_each(|&(tenth, rows)| timeline[tenth] += rows);
    println!(
        "{}",
        serde_json::json!({
            "requests": tally.latencies.len(),
            "rows": rows, "rows_per_second": within as f64 / arguments.seconds,
            "timeline": timeline, "cut": tally.cut,
            "p50_seconds": quantile(0.50), "p90_seconds": quantile(0.90), "p99_seconds": quantile(0.99),
            "quantiles": QUANTILES.map(|q| (q, quantile(q))), "refused": tally.refused,
            "errors": tally.errors, "wrong": tally.wrong, "first_error": tally.first_error,
        })
    );
}
