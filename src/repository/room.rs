//! Whether a model can be loaded at all, asked before anything of it is read.

use crate::memory::{Device, LedgerStats};
use crate::runtime::external;
use crate::units::ByteSize;
use std::path::Path;
use std::{fs, io};

/// A model's file is parsed on the heap of the host while the weights are copied out of it and rearranged: at the highest, so
/// many times its size is in memory. Measured with one of 86 MiB: 1.8 times.
const PARSED: u64 = 2;

/// Refuses a model that needs more than what its device could give; so many bytes of `shared` weights lie there already, and are
/// not needed twice. On a host the kernel would end the process in the middle of loading: what is idle is given back first
/// where it is needed, and what arenas hold then does not count, since most of loading is done on the heap.
///
/// # Errors
/// The numbers, or which of its files cannot be opened.
pub(super) fn check(file: &Path, device: &Device, shared: ByteSize) -> Result<(), String> {
    let weights = weights(file)?;
    let needed = if device.gpu().is_some() { weights.all() } else { weights.while_loading() };
    let needed = needed.saturating_sub(shared);
    if device.gpu().is_none() && free(&device.stats()) < needed {
        device.give_back_idle();
    }
    let stats = device.stats();
    let room = if device.gpu().is_some() { room(&stats) } else { free(&stats) };
    if needed <= room {
        return Ok(());
    }
    Err(format!(
        "its weights are {} on disk, loading them takes {needed}, and the device has room for {room} now: unload another \
         model, or give it more memory",
        weights.all()
    ))
}

/// What could be committed, idle memory of others included.
fn room(stats: &LedgerStats) -> ByteSize {
    let LedgerStats { free, committed, allocated, headroom, margin, .. } = stats;
    (*free + committed.saturating_sub(*allocated)).saturating_sub(*headroom + *margin)
}

/// What the heap could take without anybody giving back. Most of what is loaded on a host lies outside the arenas, so the
/// configured limit says nothing about it: what it denies while loading is reported then.
fn free(stats: &LedgerStats) -> ByteSize {
    stats.free.saturating_sub(stats.headroom + stats.margin)
}

/// The sizes of a model's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Weights {
    /// The model's own file.
    file: ByteSize,
    /// The files that it names: external data, which is mapped and not read.
    data: ByteSize,
}

impl Weights {
    fn all(self) -> ByteSize {
        self.file + self.data
    }

    /// On the host, at the highest.
    fn while_loading(self) -> ByteSize {
        ByteSize(self.file.0.saturating_mul(PARSED)) + self.data
    }
}

/// The bytes of a model on the disk, with all files that it names.
pub(super) fn on_disk(file: &Path) -> ByteSize {
    weights(file).map_or(ByteSize::MAX, Weights::all)
}

/// A file that the model names and that may not be opened is an error, since nothing good comes of loading it.
fn weights(file: &Path) -> Result<Weights, String> {
    let size = |data: io::Result<fs::Metadata>| ByteSize(data.map_or(0, |data| data.len()));
    let mut found = Weights { file: size(fs::metadata(file)), data: ByteSize::ZERO };
    // What cannot be read at all loading will say.
    for name in external::names(file).unwrap_or_default() {
        found.data += size(external::open(file, &name)?.metadata());
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{DeviceOptions, HOST_ALIGNMENT, Host};
    use crate::units::DeviceId;

    fn device() -> Device {
        let (limit, headroom) = (ByteSize::MAX, ByteSize::ZERO);
        let options = DeviceOptions { id: DeviceId(0), limit, headroom, alignment: HOST_ALIGNMENT };
        Device::new(Box::new(Host::new()), options)
    }

    #[test]
    fn what_must_stay_free_is_taken_from_idle_memory_as_well() {
        let stats = |free| LedgerStats {
            free: ByteSize(free),
            committed: ByteSize(100),
            allocated: ByteSize(60),
            headroom: ByteSize(20),
            margin: ByteSize(10),
            ..device().stats()
        };
        assert_eq!([50, 30, 10, 0].map(|bytes| room(&stats(bytes)).0), [60, 40, 20, 10]);
        assert_eq!([50, 30, 10].map(|bytes| free(&stats(bytes)).0), [20, 0, 0]);
    }

    #[test]
    fn weights_larger_than_the_machine_are_refused_with_both_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.onnx");
        let model = external::naming(&["model.onnx_data", "other.bin"]);
        let size = model.len() as u64;
        fs::write(&file, &model).unwrap();
        // Neither is named, whatever it is called.
        for name in ["notes.txt", "model.onnx.data"] {
            fs::write(folder.path().join(name), [0; 999]).unwrap();
        }
        fs::write(folder.path().join("other.bin"), [0; 6]).unwrap();
        let data = fs::File::create(folder.path().join("model.onnx_data")).unwrap();
        let device = device();
        data.set_len(24).unwrap();
        let found = weights(&file).unwrap();
        assert_eq!(found, Weights { file: ByteSize(size), data: ByteSize(30) });
        assert_eq!(found.while_loading(), ByteSize(2 * size + 30), "the file is parsed, its data are mapped");
        assert_eq!(on_disk(&file), ByteSize(size + 30));
        assert_eq!(check(&file, &device, ByteSize::ZERO), Ok(()));
        // A hole: it takes no room on the disk.
        data.set_len(1 << 42).unwrap();
        let refused = check(&file, &device, ByteSize(1000)).unwrap_err();
        assert!(refused.contains("4.0 TiB on disk") && refused.contains("has room for"), "{refused}");
        // Another session of a model that is there already needs next to nothing.
        assert_eq!(check(&file, &device, ByteSize(1 << 42)), Ok(()));
    }

    #[test]
    fn weights_that_may_not_be_opened_are_refused_before_anything_reads_them() {
        let folder = tempfile::tempdir().unwrap();
        let made = std::process::Command::new("mkfifo").arg(folder.path().join("pipe")).status().unwrap();
        assert!(made.success());
        let file = folder.path().join("model.onnx");
        for (name, part) in [
            ("pipe", "'pipe', which the model names as a file of its weights, is not a regular file"),
            ("missing.bin", "'missing.bin', which the model names as a file of its weights, cannot be opened"),
            ("../w.bin", "'../w.bin', which the model names as a file of its weights, is not in the model's folder"),
        ] {
            fs::write(&file, external::naming(&[name])).unwrap();
            let refused = check(&file, &device(), ByteSize::ZERO).unwrap_err();
            assert!(refused.starts_with(part), "{refused}");
        }
    }
}
