//! What is measured against on a GPU: ONNX Runtime alone with bound inputs and outputs, and a closed-loop load of binary
//! requests from a process of its own.
//!
//!     gpu_bench alone --library LIB --model FILE [--dim 128] [--batches 1,2,4] [--seconds 1] [--arena-limit BYTES]
//!     gpu_bench load --address HOST:PORT --model NAME --input NAME:INT64:128 [--rows 1] [--connections 64] [--seconds 5]
//!
//! `alone` prints one JSON object per batch size; a batch that fails ends it with the message. `load` prints one object; every
//! answer is compared with the one that its request got when it was sent alone.
#![allow(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use anyhow::Context;
use clap::Parser;
use half::f16;
use ort::ep::ArbitrarilyConfigurableExecutionProvider as _;
use ort::ep::cuda::ConvAlgorithmSearch;
use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::session::builder::GraphOptimizationLevel;
use ort::session::{IoBinding, Session};
use ort::value::{DynTensor, Tensor, TensorElementType, ValueType};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Parser)]
enum Command {
    Alone(Alone),
    Load(Load),
}

#[derive(clap::Args)]
struct Alone {
    #[arg(long)]
    library: PathBuf,
    #[arg(long)]
    model: PathBuf,
    /// The size of every dimension that varies, but the first.
    #[arg(long, default_value_t = 128)]
    dim: i64,
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64,128,256")]
    batches: Vec<i64>,
    /// The limit of ONNX Runtime's own arena.
    #[arg(long)]
    arena_limit: Option<usize>,
    /// Options of the provider, such as prefer_nhwc=1.
    #[arg(long)]
    option: Vec<String>,
    /// How far ONNX Runtime rewrites the graph: basic, extended, or all.
    #[arg(long, default_value = "all")]
    level: String,
    /// Where the rewritten graph is written to.
    #[arg(long)]
    optimized: Option<PathBuf>,
    /// Measures one run of each batch size in turn, instead of many of the same one after the other.
    #[arg(long)]
    in_turn: bool,
    /// Waits for a line on standard input before each batch size, for whoever changes the memory in between.
    #[arg(long)]
    step: bool,
}

#[derive(clap::Args, Clone)]
struct Load {
    #[arg(long)]
    address: String,
    #[arg(long)]
    model: String,
    /// NAME:DATATYPE:DIMS, without the batch, such as `x:FP32:3x224x224`.
    #[arg(long, required = true)]
    input: Vec<String>,
    #[arg(long, default_value_t = 1)]
    rows: usize,
    #[arg(long, default_value_t = 64)]
    connections: usize,
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    #[arg(long, default_value_t = 8)]
    distinct: usize,
    /// How far two answers may be apart, relative to the largest value of the answer.
    #[arg(long, default_value_t = 0.02)]
    tolerance: f32,
    /// The datatype of the outputs, to compare them.
    #[arg(long, default_value = "FP32")]
    output: String,
}

fn main() -> anyhow::Result<()> {
    concertina::runtime::prepare_process();
    match Command::parse() {
        Command::Alone(options) => alone(&options),
        Command::Load(options) => load(&options),
    }
}

fn alone(options: &Alone) -> anyhow::Result<()> {
    let environment = ort::environment::init_from(&options.library)?.with_telemetry(false).build()?;
    environment.set_log_level(ort::logging::LogLevel::Fatal);
    let mut provider = ort::ep::CUDA::default().with_conv_algorithm_search(ConvAlgorithmSearch::Heuristic);
    for (key, value) in options.option.iter().filter_map(|option| option.split_once('=')) {
        provider = provider.with_arbitrary_config(key, value);
    }
    if let Some(limit) = options.arena_limit {
        provider = provider.with_memory_limit(limit);
    }
    let text = |error: ort::Error| anyhow::anyhow!("{}", error.message().split(" ; GPU=").next().unwrap_or_default());
    let level = match options.level.as_str() {
        "basic" => GraphOptimizationLevel::Level1,
        "extended" => GraphOptimizationLevel::Level2,
        _ => GraphOptimizationLevel::All,
    };
    let build = || -> ort::Result<Session> {
        let mut builder = Session::builder(&environment)?;
        if let Some(path) = &options.optimized {
            builder = builder.with_optimized_model_path(path)?;
        }
        builder
            .with_optimization_level(level)?
            .with_intra_threads(1)?
            .with_execution_providers([provider.build().error_on_failure()])?
            .commit_from_file(&options.model)
    };
    let mut session = build().map_err(text)?;
    if options.in_turn {
        return in_turn(&mut session, options);
    }
    for &batch in &options.batches {
        if options.step && std::io::stdin().lock().read_line(&mut String::new())? == 0 {
            return Ok(());
        }
        match measure(&mut session, options, batch) {
            Ok((runs, wall)) => {
                let rate = runs.len() as f64 * batch as f64 / wall;
                let median = runs[runs.len() / 2];
                println!("{}", serde_json::json!({"batch": batch, "rows_per_second": rate, "median_seconds": median}));
            }
            Err(error) => {
                let error = error.to_string();
                let error = error.split(" ; GPU=").next().unwrap_or_default();
                println!("{}", serde_json::json!({"batch": batch, "error": error}));
                if !options.step {
                    return Ok(());
                }
            }
        }
    }
    Ok(())
}

/// What a run costs after one of another size.
fn in_turn(session: &mut Session, options: &Alone) -> anyhow::Result<()> {
    let bindings = options.batches.iter().map(|&batch| bind(session, options, batch));
    let mut bindings = bindings.collect::<anyhow::Result<Vec<_>>>()?;
    let mut runs = vec![Vec::new(); bindings.len()];
    for _ in 0..8 {
        for ((binding, runs), batch) in bindings.iter_mut().zip(&mut runs).zip(&options.batches) {
            *binding = bind(session, options, *batch)?;
            let begin = Instant::now();
            session.run_binding(binding)?;
            runs.push(begin.elapsed().as_secs_f64());
        }
    }
    for (batch, mut runs) in options.batches.iter().zip(runs) {
        runs.sort_by(f64::total_cmp);
        println!("{}", serde_json::json!({"batch": batch, "median_seconds_in_turn": runs[runs.len() / 2]}));
    }
    Ok(())
}

fn bind(session: &Session, options: &Alone, batch: i64) -> anyhow::Result<IoBinding> {
    let device = MemoryInfo::new(AllocationDevice::CUDA, 0, AllocatorType::Device, MemoryType::Default)?;
    let mut binding = session.create_binding()?;
    for input in session.inputs() {
        let ValueType::Tensor { ty, shape, .. } = input.dtype() else { anyhow::bail!("an input is no tensor") };
        let shape: Vec<i64> = shape
            .iter()
            .enumerate()
            .map(|(axis, &dim)| {
                if axis == 0 {
                    batch
                } else if dim < 0 {
                    options.dim
                } else {
                    dim
                }
            })
            .collect();
        // What is bound from the host is copied to the device now, once.
        binding.bind_input(input.name(), &tensor(input.name(), *ty, &shape)?)?;
    }
    for output in session.outputs() {
        binding.bind_output_to_device(output.name(), &device)?;
    }
    Ok(binding)
}

/// The seconds of each run, sorted, and of all of them.
fn measure(session: &mut Session, options: &Alone, batch: i64) -> anyhow::Result<(Vec<f64>, f64)> {
    let binding = bind(session, options, batch)?;
    for _ in 0..5 {
        session.run_binding(&binding)?;
    }
    let (started, mut runs) = (Instant::now(), Vec::new());
    while runs.len() < 10 || started.elapsed().as_secs_f64() < options.seconds {
        let begin = Instant::now();
        session.run_binding(&binding)?;
        runs.push(begin.elapsed().as_secs_f64());
    }
    let wall = started.elapsed().as_secs_f64();
    runs.sort_by(f64::total_cmp);
    Ok((runs, wall))
}

fn tensor(name: &str, datatype: TensorElementType, shape: &[i64]) -> anyhow::Result<DynTensor> {
    let count = usize::try_from(shape.iter().product::<i64>())?;
    let mut random = Random(7);
    Ok(match datatype {
        TensorElementType::Int64 => {
            let ids: Vec<i64> = (0..count).map(|_| random.id(name)).collect();
            Tensor::from_array((shape.to_vec(), ids))?.upcast()
        }
        TensorElementType::Float32 => {
            let floats: Vec<f32> = (0..count).map(|_| random.float()).collect();
            Tensor::from_array((shape.to_vec(), floats))?.upcast()
        }
        TensorElementType::Float16 => {
            let floats: Vec<f16> = (0..count).map(|_| f16::from_f32(random.float())).collect();
            Tensor::from_array((shape.to_vec(), floats))?.upcast()
        }
        other => anyhow::bail!("inputs of {other} are not known here"),
    })
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 16
    }

    fn float(&mut self) -> f32 {
        (self.next() % 10_000) as f32 / 10_000.0
    }

    fn id(&mut self, name: &str) -> i64 {
        if name.contains("mask") {
            1
        } else if name.contains("type") {
            0
        } else {
            (self.next() % 20_000) as i64 + 1000
        }
    }
}

/// One request, whole, and the values that belong to it.
struct Question {
    request: Vec<u8>,
    answer: Vec<f32>,
}

#[derive(Default)]
struct Tally {
    latencies: Vec<f64>,
    /// In tenths of a second since the start.
    answered: Vec<usize>,
    errors: u64,
    wrong: u64,
    first_error: Option<String>,
}

fn load(options: &Load) -> anyhow::Result<()> {
    let mut questions = Vec::new();
    let mut connection = Connection::open(options)?;
    for seed in 0..options.distinct {
        let request = request(options, seed as u64 + 1)?;
        let answer = connection.ask(&request, &options.output)?;
        questions.push(Question { request, answer });
    }
    let (questions, start) = (Arc::new(questions), Instant::now());
    let clients: Vec<_> = (0..options.connections)
        .map(|client| {
            let (options, questions) = (options.clone(), Arc::clone(&questions));
            std::thread::spawn(move || client_loop(&options, &questions, client, start))
        })
        .collect();
    let mut total = Tally::default();
    for client in clients {
        let tally = client.join().map_err(|_| anyhow::anyhow!("a client panicked"))?;
        total.latencies.extend(tally.latencies);
        total.answered.extend(tally.answered);
        total.errors += tally.errors;
        total.wrong += tally.wrong;
        total.first_error = total.first_error.or(tally.first_error);
    }
    let wall = start.elapsed().as_secs_f64();
    total.latencies.sort_by(f64::total_cmp);
    let quantile = |q: f64| {
        let last = total.latencies.len().saturating_sub(1);
        total.latencies.get(((q * total.latencies.len() as f64) as usize).min(last)).copied().unwrap_or(f64::NAN)
    };
    let mut timeline = vec![0; total.answered.iter().map(|tenth| tenth + 1).max().unwrap_or(0)];
    total.answered.iter().for_each(|&tenth| timeline[tenth] += options.rows);
    println!(
        "{}",
        serde_json::json!({
            "requests": total.latencies.len(), "rows_per_second": (total.latencies.len() * options.rows) as f64 / wall,
            "p50_seconds": quantile(0.5), "p99_seconds": quantile(0.99), "errors": total.errors, "wrong": total.wrong,
            "first_error": total.first_error, "timeline": timeline,
        })
    );
    Ok(())
}

fn client_loop(options: &Load, questions: &[Question], client: usize, start: Instant) -> Tally {
    let end = start + Duration::from_secs_f64(options.seconds);
    let (mut tally, mut connection, mut next) = (Tally::default(), None, client);
    while Instant::now() < end && tally.errors < 100 {
        let question = &questions[next % questions.len()];
        next += 1;
        let begin = Instant::now();
        let open = connection.take().map_or_else(|| Connection::open(options), Ok);
        let asked = open.and_then(|mut open| {
            let answer = open.ask(&question.request, &options.output)?;
            Ok((open, answer))
        });
        match asked {
            Ok((open, answer)) => {
                connection = Some(open);
                tally.latencies.push(begin.elapsed().as_secs_f64());
                tally.answered.push(start.elapsed().as_millis() as usize / 100);
                tally.wrong += u64::from(!same(&answer, &question.answer, options.tolerance));
            }
            Err(error) => {
                tally.errors += 1;
                tally.first_error.get_or_insert(format!("{error:#}"));
            }
        }
    }
    tally
}

fn same(answer: &[f32], expected: &[f32], tolerance: f32) -> bool {
    let largest = expected.iter().fold(1e-6f32, |most, value| most.max(value.abs()));
    answer.len() == expected.len() && answer.iter().zip(expected).all(|(a, b)| (a - b).abs() <= tolerance * largest)
}

fn request(options: &Load, seed: u64) -> anyhow::Result<Vec<u8>> {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let (mut described, mut data) = (Vec::new(), Vec::new());
    for input in &options.input {
        let mut parts = input.split(':');
        let (Some(name), Some(datatype), Some(dims)) = (parts.next(), parts.next(), parts.next()) else {
            anyhow::bail!("an input is NAME:DATATYPE:DIMS");
        };
        let dims: Vec<usize> = dims.split('x').map(str::parse).collect::<Result<_, _>>()?;
        let count = options.rows * dims.iter().product::<usize>();
        let begin = data.len();
        for _ in 0..count {
            match datatype {
                "INT64" => data.extend(random.id(name).to_le_bytes()),
                "FP32" => data.extend(random.float().to_le_bytes()),
                "FP16" => data.extend(f16::from_f32(random.float()).to_le_bytes()),
                _ => anyhow::bail!("inputs of {datatype} are not known here"),
            }
        }
        let shape: Vec<usize> = std::iter::once(options.rows).chain(dims).collect();
        described.push(serde_json::json!({
            "name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": data.len() - begin},
        }));
    }
    let head = serde_json::json!({"inputs": described, "parameters": {"binary_data_output": true}}).to_string();
    let mut request = format!(
        "POST /v2/models/{}/infer HTTP/1.1\r\nhost: {}\r\ninference-header-content-length: {}\r\ncontent-length: {}\r\n\r\n{head}",
        options.model,
        options.address,
        head.len(),
        head.len() + data.len()
    )
    .into_bytes();
    request.extend(data);
    Ok(request)
}

struct Connection(BufReader<TcpStream>);

impl Connection {
    fn open(options: &Load) -> anyhow::Result<Self> {
        let stream =
            TcpStream::connect(&options.address).with_context(|| format!("connecting to {}", options.address))?;
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::with_capacity(1 << 16, stream)))
    }

    fn ask(&mut self, request: &[u8], datatype: &str) -> anyhow::Result<Vec<f32>> {
        self.0.get_mut().write_all(request)?;
        let mut status = String::new();
        self.0.read_line(&mut status)?;
        let (mut length, mut head) = (0usize, 0usize);
        loop {
            let mut line = String::new();
            anyhow::ensure!(self.0.read_line(&mut line)? > 0, "the connection ended");
            let Some((name, value)) = line.trim().split_once(':') else { break };
            match name.to_ascii_lowercase().as_str() {
                "content-length" => length = value.trim().parse()?,
                "inference-header-content-length" => head = value.trim().parse()?,
                _ => {}
            }
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body)?;
        let is_ok = status.split(' ').nth(1) == Some("200");
        anyhow::ensure!(is_ok, "{}: {}", status.trim(), String::from_utf8_lossy(&body));
        let data = &body[head.min(length)..];
        Ok(match datatype {
            "FP16" => data.chunks_exact(2).map(|bytes| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()).collect(),
            _ => {
                data.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect()
            }
        })
    }
}
