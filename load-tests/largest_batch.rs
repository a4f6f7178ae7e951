//! The largest batch that runs in N bytes of run memory, for each test model, in the server's own arenas.
//!
//!     largest_batch --library LIB --models tests/models [--mebibytes 16,32,64,128]
//!
//! Prints one JSON object per model and size. `largest_batch.py` runs it and ONNX Runtime's own arena side by side.

#[path = "../tests/support/mod.rs"]
mod support;

use clap::Parser;
use concertina::clock::Clock;
use concertina::memory::{Device, DeviceOptions, HOST_ALIGNMENT, Host};
use concertina::model::derive::derive;
use concertina::model::{Dim, InferRequest, InputTensor, ModelSpec, Settings, ValidRequest};
use concertina::runtime::{Arenas, Batch, BatchPart, Runtime, Session, SessionOptions};
use concertina::tensor::{DataType, Shape, Tensor};
use concertina::units::{BatchId, ByteSize, DeviceId, Rows};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// No search goes further.
const MOST: Rows = 1 << 20;
/// The size of every variable dimension but the batch.
const DIM: usize = 64;

#[derive(Parser)]
struct Arguments {
    #[arg(long)]
    library: PathBuf,
    #[arg(long)]
    models: PathBuf,
    #[arg(long, value_delimiter = ',', default_value = "16,32,64,128")]
    mebibytes: Vec<u64>,
}

fn main() -> anyhow::Result<()> {
    concertina::runtime::prepare_process();
    let arguments = Arguments::parse();
    let runtime = Runtime::load(Some(&arguments.library))?;
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(&arguments.models)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    folders.sort();
    for folder in folders {
        let file = folder.join("1/model.onnx");
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if file.is_file() {
            for &mebibytes in &arguments.mebibytes {
                if let Some(rows) = largest(&runtime, &name, &file, mebibytes << 20)? {
                    println!("{}", serde_json::json!({"model": name, "mebibytes": mebibytes, "rows": rows}));
                }
            }
        }
    }
    Ok(())
}

/// `None` for a model without a proven batch axis.
fn largest(runtime: &Runtime, name: &str, file: &Path, bytes: u64) -> anyhow::Result<Option<Rows>> {
    // Input buffers are not run memory: they lie on a device of their own here, and only the run is limited.
    let device = |limit| {
        let options = DeviceOptions { id: DeviceId(0), limit, headroom: ByteSize::ZERO, alignment: HOST_ALIGNMENT };
        Device::new(Box::new(Host::new()), options)
    };
    let (run, rest) = (device(ByteSize(bytes)), device(ByteSize::MAX));
    let (limited, free) = (Arenas::new(&run, name, 1)?, Arenas::new(&rest, name, 1)?);
    let arenas = Arenas { run: limited.run, ..free };
    let options = SessionOptions { intra_op_threads: 1, optimize: true };
    let mut session = Session::load(runtime, file, options, arenas).map_err(anyhow::Error::msg)?;
    let settings = Settings::default();
    let derived = derive(name, session.graph(), &settings).map_err(|faults| anyhow::anyhow!(faults.join("; ")))?;
    if derived.batch_axis != Some(0) || !derived.unproven.is_empty() {
        return Ok(None);
    }
    let spec = support::settle(&mut session, name, derived.batch_axis, MOST);
    let clock = Clock::start();
    let mut runs = |rows: Rows| {
        let Ok(request) = ValidRequest::new(Arc::clone(&spec), request(&spec, rows), MOST) else { return false };
        let parts = vec![BatchPart { request: Arc::new(request), start: 0, rows }];
        let batch = Batch { id: BatchId(0), parts, bytes: ByteSize::ZERO, padded_rows: rows };
        session.run(&batch, clock).result.is_ok()
    };
    let (mut low, mut high) = (0, 1);
    while high < MOST && runs(high) {
        (low, high) = (high, 2 * high);
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if runs(middle) { low = middle } else { high = middle }
    }
    Ok(Some(low))
}

fn request(spec: &ModelSpec, rows: Rows) -> InferRequest {
    let inputs = spec.inputs.iter().map(|input| {
        let size = |(axis, dim): (usize, &Dim)| match dim {
            _ if axis == 0 => rows as usize,
            Dim::Fixed(size) => *size,
            _ => DIM,
        };
        let shape: Shape = input.shape.iter().enumerate().map(size).collect();
        let element = if input.datatype == DataType::Bytes {
            vec![1, 0, 0, 0, b'a']
        } else {
            vec![0; input.datatype.size().unwrap_or(1)]
        };
        let data = element.repeat(shape.iter().product());
        let tensor = Tensor { datatype: input.datatype, shape, data: data.into() };
        InputTensor { name: input.name.clone(), tensor }
    });
    InferRequest { inputs: inputs.collect(), ..InferRequest::default() }
}
