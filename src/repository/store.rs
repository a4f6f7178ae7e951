//! What was measured, kept on disk for the next start: one small JSON file for each model, machine and settings.
//!
//! A file is believed only if it is of this schema, has the very key that is asked for, and holds values that a measurement
//! could have given; even then runs confirm it. Whatever is wrong with it costs one warning and a new measurement.

mod format;

pub(super) use format::{AtLength, Entry, Stored, fill_of};
pub use format::{Key, Machine};

use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The most bytes of a file.
const MAX_FILE: u64 = 1 << 20;
/// Bytes of a model read at a time while it is digested.
const CHUNK: usize = 1 << 20;

/// The folder of measurements, or none.
#[derive(Clone, Debug, Default)]
pub struct Store {
    folder: Option<PathBuf>,
}

impl Store {
    /// A store in this folder, which need not be there yet; `None`: nothing is kept.
    #[must_use]
    pub fn new(folder: Option<PathBuf>) -> Self {
        Self { folder }
    }

    /// Whether anything is kept.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.folder.is_some()
    }

    /// Where what belongs to a key is kept.
    #[must_use]
    pub fn path(&self, key: &Key) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(format!("calibration-{}.json", &hex(&Sha256::digest(key.canonical()))[..32])))
    }

    /// What is kept for a key. What cannot be believed is ignored with a warning.
    pub(super) fn read(&self, key: &Key) -> Option<Stored> {
        let path = self.path(key)?;
        let read = match read(&path) {
            // Whether a folder can be made there is for the writing to find out.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return None;
            }
            other => other.map_err(|error| error.to_string()),
        };
        match read.and_then(|bytes| Stored::parse(&bytes, key)) {
            Ok(stored) => Some(stored),
            Err(reason) => {
                ignored(&path, &reason);
                None
            }
        }
    }

    /// Keeps what was measured. Failing to is a warning.
    pub(super) fn write(&self, stored: &Stored) {
        let (Some(folder), Some(path)) = (&self.folder, self.path(&stored.key)) else { return };
        if let Err(reason) = stored.check(&stored.key) {
            tracing::debug!(reason, "what was measured is not kept");
        } else if let Err(error) = fs::create_dir_all(folder).and_then(|()| replace(&path, &stored.render())) {
            tracing::warn!(path = %path.display(), %error, "what was measured cannot be kept for the next start");
        }
    }
}

/// Says that a file is not believed.
pub(super) fn ignored(path: &Path, reason: &str) {
    tracing::warn!(path = %path.display(), reason, "a kept measurement is ignored; the model is measured anew");
}

/// The digest of a file's contents, in hexadecimal digits.
///
/// # Errors
/// If the file cannot be read.
pub fn digest(file: &Path) -> io::Result<String> {
    let (mut file, mut digest, mut chunk) = (File::open(file)?, Sha256::new(), vec![0; CHUNK]);
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(hex(&digest.finalize())),
            count => digest.update(&chunk[..count]),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let other = |text: &str| Err(io::Error::other(text.to_owned()));
    if !file.metadata()?.is_file() {
        return other("it is not a file");
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE { other("it is larger than 1 MiB") } else { Ok(bytes) }
}

/// Writes a file so that readers see the old one or the new one, whole.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let (process, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let temporary = path.with_extension(format!("{process}-{next}.tmp"));
    let written = write_new(&temporary, text).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

fn write_new(path: &Path, text: &str) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(text.as_bytes())?;
    // A crash must not leave the new name on an empty file.
    file.sync_all()
}

#[cfg(test)]
mod tests;
