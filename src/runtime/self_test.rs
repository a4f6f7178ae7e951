//! The self-test at start-up: does a denied allocation come back as a clean refusal on this machine?
//!
//! Everything that the server promises about memory rests on an exception passing through ONNX Runtime. A library built
//! with another C++ runtime would end the process instead: better at the start than under load.

use super::{Arenas, Runtime, Session, SessionOptions};
use crate::memory::{Device, DeviceOptions, HOST_ALIGNMENT, Host};
use crate::units::{ByteSize, DeviceId};

/// `2x + 1`, a few hundred bytes.
const MODEL: &[u8] = include_bytes!("../../tests/models/affine/1/model.onnx");
/// The model allocates less often than this while it loads; one that never stops is a fault too.
const MOST: u64 = 64;

/// Denies one allocation after the other while a tiny model loads, until it loads.
///
/// # Errors
/// What went otherwise than it must, in words for the operator.
pub fn self_test(runtime: &Runtime) -> Result<(), String> {
    let options =
        DeviceOptions { id: DeviceId(0), limit: ByteSize::MAX, headroom: ByteSize::ZERO, alignment: HOST_ALIGNMENT };
    let device = Device::new(Box::new(Host::new()), options);
    let mut denials = 0;
    for nth in 1..MOST {
        let arenas = Arenas::new(&device, "self-test", 1).map_err(|error| error.to_string())?;
        arenas.weights.deny_nth(nth);
        let loaded =
            Session::load_bytes(runtime, MODEL, SessionOptions { intra_op_threads: 1, optimize: true }, arenas.clone());
        let denied = arenas.weights.stats().denied;
        match (loaded, denied) {
            (Ok(_), 0) if denials > 0 => return Ok(()),
            (Ok(_), 0) => return Err("ONNX Runtime does not use our allocator".to_owned()),
            (Err(_), 1) => denials += 1,
            (Ok(_), _) => return Err("ONNX Runtime did not notice that an allocation was denied".to_owned()),
            (Err(text), _) => return Err(format!("the tiny model does not load: {text}")),
        }
    }
    Err(format!("the tiny model wants more than {MOST} allocations"))
}
