//! ONNX Runtime alone, no server: what a model costs on this machine, per layout and batch size.
//!
//!     ort_alone --library LIB --model FILE --case minilm:64 [--seconds 1] [--batches 1,2,4] [--layouts 1x2,2x1]
//!
//! With `--lengths 16,80,…` rows have these lengths, one each: they are sorted, cut into batches, and each batch is padded to its
//! longest row; all batches run in turn, over and over. With `--padded` too, `--batches` are not rows but the most elements that a
//! batch has once it is padded, so that there are more of the short rows in one.
//!
//! A layout `IxT` is I sessions at once with T intra-op threads each. Prints one JSON object per line: layout, batch, rows
//! per second, CPU seconds per row, and the median seconds of one run. With `--turns` it loads the first layout, and measures the
//! first batch once for each line of its input, which says for how many seconds: so it can take turns with a server.

#[path = "cases.rs"]
mod cases;

use cases::Case;
use clap::Parser;
use ort::session::Session;
use ort::session::builder::{AutoDevicePolicy, GraphOptimizationLevel};
use ort::value::TensorRef;
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[derive(Parser)]
struct Arguments {
    #[arg(long)]
    library: PathBuf,
    #[arg(long)]
    model: PathBuf,
    #[arg(long)]
    case: Case,
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64")]
    batches: Vec<usize>,
    #[arg(long, value_delimiter = ',', default_value = "1x2,2x1")]
    layouts: Vec<String>,
    /// Rows of these lengths instead of one, for a case that has lengths.
    #[arg(long, value_delimiter = ',')]
    lengths: Vec<usize>,
    /// Batches of so many elements instead of rows.
    #[arg(long, requires = "lengths")]
    padded: bool,
    /// One measurement for each line read, of as many seconds as it says.
    #[arg(long)]
    turns: bool,
    /// Between runs each session waits so long, as it would for its next request.
    #[arg(long, default_value_t = 0)]
    pause_microseconds: u64,
}

fn main() -> anyhow::Result<()> {
    concertina::runtime::prepare_process();
    let arguments = Arguments::parse();
    let environment = ort::environment::init_from(&arguments.library)?.with_telemetry(false).build()?;
    for layout in &arguments.layouts {
        let (sessions, threads) = layout.split_once('x').ok_or_else(|| anyhow::anyhow!("a layout is like 2x1"))?;
        let (sessions, threads): (usize, usize) = (sessions.parse()?, threads.parse()?);
        let mut loaded = Vec::new();
        for _ in 0..sessions {
            loaded.push(load(&environment, &arguments.model, threads)?);
        }
        if arguments.turns {
            for line in std::io::stdin().lines() {
                report(&arguments, layout, arguments.batches[0], &mut loaded, line?.trim().parse()?)?;
            }
            return Ok(());
        }
        for &batch in &arguments.batches {
            report(&arguments, layout, batch, &mut loaded, arguments.seconds)?;
        }
    }
    Ok(())
}

fn report(
    arguments: &Arguments,
    layout: &str,
    batch: usize,
    sessions: &mut [Session],
    time: f64,
) -> anyhow::Result<()> {
    let entry = measure(sessions, arguments, batch, Duration::from_secs_f64(time))?;
    println!(
        "{}",
        serde_json::json!({
            "layout": layout, "batch": batch, "rows_per_second": entry.rows_per_second,
            "cpu_seconds_per_row": entry.cpu_per_row, "median_seconds": entry.median,
        })
    );
    Ok(())
}

/// The same options as the server's sessions.
fn load(environment: &ort::environment::Environment, model: &PathBuf, threads: usize) -> anyhow::Result<Session> {
    let text = |error: ort::Error| anyhow::anyhow!("{}", error.message());
    let build = || -> ort::Result<Session> {
        Session::builder(environment)?
            .with_auto_device(AutoDevicePolicy::PreferCPU)?
            .with_optimization_level(GraphOptimizationLevel::All)?
            .with_intra_threads(threads)?
            .with_inter_threads(1)?
            .with_intra_op_spinning(false)?
            .with_memory_pattern(false)?
            .commit_from_file(model)
    };
    build().map_err(text)
}

struct Entry {
    rows_per_second: f64,
    cpu_per_row: f64,
    median: f64,
}

#[allow(clippy::disallowed_methods, reason = "a benchmark reads the clock")]
fn measure(sessions: &mut [Session], arguments: &Arguments, batch: usize, time: Duration) -> anyhow::Result<Entry> {
    let (cpu, started) = (cases::own_cpu_seconds(), Instant::now());
    let results: Vec<anyhow::Result<Vec<f64>>> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            sessions.iter_mut().map(|session| scope.spawn(move || run_for(session, arguments, batch, time))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let (wall, cpu) = (started.elapsed().as_secs_f64(), cases::own_cpu_seconds() - cpu);
    let mut runs: Vec<f64> = results.into_iter().collect::<anyhow::Result<Vec<_>>>()?.concat();
    runs.sort_by(f64::total_cmp);
    let rows = if arguments.lengths.is_empty() {
        (runs.len() * batch) as f64
    } else {
        // Whole rounds through all batches.
        (runs.len() / sorted(arguments, batch).len() * arguments.lengths.len()) as f64
    };
    Ok(Entry { rows_per_second: rows / wall, cpu_per_row: cpu / rows, median: runs[runs.len() / 2] })
}

/// The lengths in batches, ascending.
fn sorted(arguments: &Arguments, batch: usize) -> Vec<Vec<usize>> {
    let mut lengths = arguments.lengths.clone();
    lengths.sort_unstable();
    let mut batches: Vec<Vec<usize>> = Vec::new();
    for length in lengths {
        let most = if arguments.padded { batch / length } else { batch };
        match batches.last_mut() {
            Some(last) if last.len() < most => last.push(length),
            _ => batches.push(vec![length]),
        }
    }
    batches
}

#[allow(clippy::disallowed_methods, reason = "a benchmark reads the clock")]
fn run_for(session: &mut Session, arguments: &Arguments, batch: usize, time: Duration) -> anyhow::Result<Vec<f64>> {
    let padded = |rows: &Vec<usize>| arguments.case.of_length(rows[rows.len() - 1]).inputs(rows.len(), 1);
    let mut batches: Vec<_> = sorted(arguments, batch).iter().map(padded).collect();
    if batches.is_empty() {
        batches.push(arguments.case.inputs(batch, 1));
    }
    let pause = Duration::from_micros(arguments.pause_microseconds);
    let started = Instant::now();
    let mut runs = Vec::new();
    while runs.len() < 3 || !runs.len().is_multiple_of(batches.len()) || started.elapsed() < time {
        let inputs = &batches[runs.len() % batches.len()];
        let begin = Instant::now();
        let mut values: Vec<(String, ort::session::SessionInputValue<'_>)> = Vec::new();
        for input in inputs {
            let value: ort::session::SessionInputValue<'_> = match &input.data {
                cases::Data::I64(data) => TensorRef::from_array_view((input.shape.as_slice(), data.as_slice()))?.into(),
                cases::Data::I32(data) => TensorRef::from_array_view((input.shape.as_slice(), data.as_slice()))?.into(),
                cases::Data::F32(data) => TensorRef::from_array_view((input.shape.as_slice(), data.as_slice()))?.into(),
            };
            values.push((input.name.to_owned(), value));
        }
        let outputs = session.run(values)?;
        drop(outputs);
        runs.push(begin.elapsed().as_secs_f64());
        if !pause.is_zero() {
            std::thread::park_timeout(pause);
        }
    }
    Ok(runs)
}
