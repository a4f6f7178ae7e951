//! Whether a model can be loaded at all, asked before anything of it is read.

use crate::memory::{Device, LedgerStats};
use crate::units::ByteSize;
use std::fs;
use std::path::Path;

/// A model's file is parsed on the heap of the host while the weights are copied out of it and rearranged: at the highest, so
/// many times its size is in memory. Measured with one of 86 MiB: 1.8 times.
const PARSED: u64 = 2;

/// Refuses a model that needs more than what its device could give; so many bytes of `shared` weights lie there already, and are
/// not needed twice. On a host the kernel would end the process in the middle of loading: what is idle is given back first
/// where it is needed, and what arenas hold then does not count, since most of loading is done on the heap.
///
/// # Errors
/// The numbers.
pub(super) fn check(file: &Path, device: &Device, shared: ByteSize) -> Result<(), String> {
    let weights = weights(file);
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
    /// The files beside it that bear its name: external data, which is mapped and not read.
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

fn weights(file: &Path) -> Weights {
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let data = format!("{}.data", file.file_stem().unwrap_or_default().to_string_lossy());
    let entries = file.parent().and_then(|folder| fs::read_dir(folder).ok());
    let size = |path: &Path| ByteSize(fs::metadata(path).map_or(0, |data| data.len()));
    let mut found = Weights { file: size(file), data: ByteSize::ZERO };
    for entry in entries.into_iter().flatten().flatten() {
        let other = entry.file_name().to_string_lossy().into_owned();
        if (other.starts_with(&name) && other != name) || other == data {
            // Through links, which `DirEntry::metadata` does not follow.
            found.data += size(&entry.path());
        }
    }
    found
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
        fs::write(&file, [0; 1000]).unwrap();
        fs::write(folder.path().join("notes.txt"), [0; 999]).unwrap();
        let data = fs::File::create(folder.path().join("model.onnx_data")).unwrap();
        let device = device();
        data.set_len(24).unwrap();
        assert_eq!(weights(&file), Weights { file: ByteSize(1000), data: ByteSize(24) });
        assert_eq!(weights(&file).while_loading(), ByteSize(2024), "the file is parsed, its data are mapped");
        assert_eq!(check(&file, &device, ByteSize::ZERO), Ok(()));
        // A hole: it takes no room on the disk.
        data.set_len(1 << 42).unwrap();
        let refused = check(&file, &device, ByteSize(1000)).unwrap_err();
        assert!(refused.contains("4.0 TiB on disk") && refused.contains("has room for"), "{refused}");
        // Another session of a model that is there already needs next to nothing.
        assert_eq!(check(&file, &device, ByteSize(1 << 42)), Ok(()));
    }
}
