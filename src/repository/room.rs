//! Whether the weights of a model can fit at all, asked before they are read.

use crate::memory::{Device, LedgerStats};
use crate::units::ByteSize;
use std::fs;
use std::path::Path;

/// Refuses a model whose files alone are larger than what its device could give. So many bytes of `shared` weights lie there
/// already, and are not needed twice.
///
/// # Errors
/// The numbers.
pub(super) fn check(file: &Path, device: &Device, shared: ByteSize) -> Result<(), String> {
    let (weights, room) = (weights(file), room(&device.stats()));
    let needed = weights.saturating_sub(shared);
    if needed <= room {
        return Ok(());
    }
    Err(format!(
        "its weights are {weights} on disk, {shared} of them on the device already, and the device has room for {room} now: unload another model, or give it more \
         memory"
    ))
}

/// What could be committed, idle memory of others included. What is loaded on a host lies outside the arenas in part, so
/// that the configured limit says nothing about it: what it denies while loading is reported then.
fn room(stats: &LedgerStats) -> ByteSize {
    let LedgerStats { free, committed, allocated, headroom, margin, .. } = stats;
    (*free + committed.saturating_sub(*allocated)).saturating_sub(*headroom + *margin)
}

/// The size of a model's file and of the files beside it that bear its name: external data.
fn weights(file: &Path) -> ByteSize {
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let data = format!("{}.data", file.file_stem().unwrap_or_default().to_string_lossy());
    let entries = file.parent().and_then(|folder| fs::read_dir(folder).ok());
    let mut total = 0;
    for entry in entries.into_iter().flatten().flatten() {
        let other = entry.file_name().to_string_lossy().into_owned();
        if other.starts_with(&name) || other == data {
            // Through links, which `DirEntry::metadata` does not follow.
            total += fs::metadata(entry.path()).map_or(0, |data| data.len());
        }
    }
    ByteSize(total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{DeviceOptions, HOST_ALIGNMENT, Host};
    use crate::units::DeviceId;

    #[test]
    fn weights_larger_than_the_machine_are_refused_with_both_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.onnx");
        fs::write(&file, [0; 1000]).unwrap();
        fs::write(folder.path().join("notes.txt"), [0; 999]).unwrap();
        let data = fs::File::create(folder.path().join("model.onnx_data")).unwrap();
        let options = DeviceOptions {
            id: DeviceId(0),
            limit: ByteSize::MAX,
            headroom: ByteSize::ZERO,
            alignment: HOST_ALIGNMENT,
        };
        let device = Device::new(Box::new(Host::new()), options);
        data.set_len(24).unwrap();
        assert_eq!(weights(&file), ByteSize(1024));
        assert_eq!(check(&file, &device, ByteSize::ZERO), Ok(()));
        // A hole: it takes no room on the disk.
        data.set_len(1 << 42).unwrap();
        let refused = check(&file, &device, ByteSize(1000)).unwrap_err();
        assert!(refused.contains("4.0 TiB on disk") && refused.contains("has room for"), "{refused}");
        // Another session of a model that is there already needs next to nothing.
        assert_eq!(check(&file, &device, ByteSize(1 << 42)), Ok(()));
    }
}
