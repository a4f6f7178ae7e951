//! Certificates and keys in files: read at the start, and again when they change.

use crate::config::{Access, Admin, Config, api_keys, token};
use crate::http::{ApiKeys, KeyRing, Tls};
use anyhow::Context as _;
use arc_swap::ArcSwap;
use sha2::{Digest as _, Sha256};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// What of the server comes from files of secrets.
pub(super) struct Secrets {
    pub(super) tls: Option<Tls>,
    pub(super) keys: KeyRing,
    pub(super) admin_token: Option<String>,
    files: Vec<Watched>,
}

/// Files that mean something together.
struct Watched {
    paths: Vec<PathBuf>,
    /// The digest of what was in them when they were last looked at.
    seen: [u8; 32],
    replace: Replace,
}

/// Puts new texts in the place of the old ones, or says what is wrong with them.
type Replace = Box<dyn Fn(&[Vec<u8>]) -> Result<(), String> + Send>;

impl Secrets {
    /// Reads what the configuration names.
    pub(super) fn read(config: &Config) -> anyhow::Result<Self> {
        let mut files = Vec::new();
        let tls = match &config.tls {
            None => None,
            Some(paths) => Some(certified(vec![paths.certificate.clone(), paths.key.clone()], &mut files)?),
        };
        let keys = key_ring(&config.access, &mut files)?;
        Ok(Self { tls, keys, admin_token: admin_token(&config.admin)?, files })
    }

    /// Looks at the files for ever. What is wrong with them then changes nothing, and is said once.
    pub(super) async fn follow(mut self) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            for watched in &mut self.files {
                watched.look();
            }
        }
    }
}

fn certified(paths: Vec<PathBuf>, files: &mut Vec<Watched>) -> anyhow::Result<Tls> {
    let texts = read(&paths).context("keys tls.certificate and tls.key")?;
    let tls = Tls::new(&texts[0], &texts[1])
        .map_err(|fault| anyhow::anyhow!("{} and {}: {fault}", paths[0].display(), paths[1].display()))?;
    let shared = tls.clone();
    let replace = Box::new(move |texts: &[Vec<u8>]| shared.replace(&texts[0], &texts[1]));
    files.push(Watched { seen: digest(&texts), paths, replace });
    Ok(tls)
}

fn admin_token(admin: &Admin) -> anyhow::Result<Option<String>> {
    let Some(path) = &admin.token_file else { return Ok(admin.token.clone()) };
    anyhow::ensure!(admin.token.is_none(), "admin.token and admin.token_file are both given; give one of them");
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("{} cannot be read (key admin.token_file)", path.display()))?;
    let fault = |allowed| anyhow::anyhow!("{} (key admin.token_file): expected {allowed}", path.display());
    let token = token(&toml::Value::from(text.trim())).map_err(fault)?;
    anyhow::ensure!(token.is_some(), "{} (key admin.token_file) is empty", path.display());
    Ok(token)
}

/// The keys of the configuration and of its file together.
fn key_ring(access: &Access, files: &mut Vec<Watched>) -> anyhow::Result<KeyRing> {
    let Some(path) = access.key_file.clone() else {
        return Ok((!access.keys.is_empty()).then(|| Arc::new(ArcSwap::from_pointee(access.keys.iter().collect()))));
    };
    let given = access.keys.clone();
    let parse = move |text: &[u8]| -> Result<ApiKeys, String> {
        let text = std::str::from_utf8(text).map_err(|_| "the file of keys is not text".to_owned())?;
        let keys = api_keys(text.lines())?;
        let all: ApiKeys = keys.iter().chain(&given).collect();
        if all.is_empty() { Err("the file of keys holds none".to_owned()) } else { Ok(all) }
    };
    let texts = read(std::slice::from_ref(&path)).context("key access.key_file")?;
    let keys =
        parse(&texts[0]).map_err(|fault| anyhow::anyhow!("{} (key access.key_file): {fault}", path.display()))?;
    let ring = Arc::new(ArcSwap::from_pointee(keys));
    let shared = Arc::clone(&ring);
    let replace = Box::new(move |texts: &[Vec<u8>]| {
        shared.store(Arc::new(parse(&texts[0])?));
        Ok(())
    });
    files.push(Watched { seen: digest(&texts), paths: vec![path], replace });
    Ok(Some(ring))
}

impl Watched {
    fn look(&mut self) {
        let texts = match read(&self.paths) {
            Ok(texts) => texts,
            // Between two steps of whoever replaces them.
            Err(error) => return tracing::debug!(error = %format!("{error:#}"), "secrets cannot be read now"),
        };
        let found = digest(&texts);
        if found == std::mem::replace(&mut self.seen, found) {
            return;
        }
        let paths = self.paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
        match (self.replace)(&texts) {
            Ok(()) => tracing::info!(paths, "secrets have changed and hold from now on"),
            Err(fault) => tracing::warn!(paths, fault, "secrets have changed but cannot be used; the old ones hold"),
        }
    }
}

fn read(paths: &[PathBuf]) -> anyhow::Result<Vec<Vec<u8>>> {
    let read = |path: &Path| std::fs::read(path).with_context(|| format!("{} cannot be read", path.display()));
    paths.iter().map(|path| read(path)).collect()
}

fn digest(texts: &[Vec<u8>]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for text in texts {
        hash.update(text.len().to_le_bytes());
        hash.update(text);
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(keys: &[&str], file: Option<&Path>) -> Access {
        Access { keys: keys.iter().map(|&key| key.to_owned()).collect(), key_file: file.map(Path::to_owned) }
    }

    fn ring(keys: &[&str]) -> ApiKeys {
        keys.iter().collect()
    }

    #[test]
    fn keys_come_from_both_places_and_follow_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        std::fs::write(&path, "# of the team\none\n\n two \n").unwrap();
        let mut files = Vec::new();
        let keys = key_ring(&access(&["zero"], Some(&path)), &mut files).unwrap().unwrap();
        assert_eq!(**keys.load(), ring(&["one", "two", "zero"]));
        std::fs::write(&path, "three").unwrap();
        files[0].look();
        assert_eq!(**keys.load(), ring(&["three", "zero"]));
        for bad in [&b"two words"[..], b"\xff"] {
            std::fs::write(&path, bad).unwrap();
            files[0].look();
            assert_eq!(**keys.load(), ring(&["three", "zero"]), "what cannot be used changes nothing");
        }
        std::fs::remove_file(&path).unwrap();
        files[0].look();
        assert_eq!(**keys.load(), ring(&["three", "zero"]));
    }

    #[test]
    fn a_door_without_keys_is_no_door_and_a_file_without_keys_a_fault() {
        assert!(key_ring(&access(&[], None), &mut Vec::new()).unwrap().is_none());
        let empty = tempfile::NamedTempFile::new().unwrap();
        let fault = key_ring(&access(&[], Some(empty.path())), &mut Vec::new()).unwrap_err();
        assert!(fault.to_string().contains("access.key_file"), "{fault:#}");
        let fault = key_ring(&access(&[], Some(Path::new("/nowhere"))), &mut Vec::new()).unwrap_err();
        assert!(format!("{fault:#}").contains("/nowhere cannot be read"), "{fault:#}");
    }
}
