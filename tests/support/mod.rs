//! What several test programs share.
#![allow(dead_code, reason = "each test program uses a part")]

use concertina::memory::{Device, DeviceOptions, HOST_ALIGNMENT, Host};
use concertina::model::{ModelSpec, Settings};
use concertina::runtime::{Runtime, Session};
use concertina::units::{ByteSize, DeviceId, ModelId, Rows};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// The checkout.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The file of a test model.
pub(crate) fn test_model(name: &str) -> PathBuf {
    root().join("tests/models").join(name).join("1/model.onnx")
}

/// The library: the one that is named in the environment, or what set-up fetched. One per process.
pub(crate) fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        let path = std::env::var_os("CONCERTINA_ONNXRUNTIME")
            .map_or_else(|| root().join(".setup/onnxruntime/libonnxruntime.so.1.31.1"), PathBuf::from);
        Runtime::load(Some(&path)).expect("the library is there: run `make setup`")
    })
}

/// All of this machine's memory.
pub(crate) fn device() -> Device {
    let options =
        DeviceOptions { id: DeviceId(0), limit: ByteSize::MAX, headroom: ByteSize::ZERO, alignment: HOST_ALIGNMENT };
    Device::new(Box::new(Host::new()), options)
}

/// Settles what the axes of a loaded session mean, as the loader would.
pub(crate) fn settle(
    session: &mut Session,
    name: &str,
    batch_axis: Option<usize>,
    max_batch_size: Rows,
) -> Arc<ModelSpec> {
    let spec = Arc::new(ModelSpec {
        id: ModelId(0),
        name: name.to_owned(),
        version: 1,
        inputs: session.graph().inputs.clone(),
        outputs: session.graph().outputs.clone(),
        batch_axis,
        unbatched_reason: None,
        max_batch_size,
        padding: None,
        settings: Settings::default(),
        text: None,
    });
    session.set_spec(Arc::clone(&spec));
    spec
}
