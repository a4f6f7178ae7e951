//! The sections `[tls]` and `[access]`, and who may ask from within a browser.

use super::MAX_TOKEN_LEN;
use crate::keys::value::text_or_empty;
use crate::keys::{HIDDEN, Keys, Relation};
use std::fmt;
use std::path::PathBuf;
use toml::Value;

/// The section `[tls]`: PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate chain.
    pub certificate: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

/// The section `[access]`.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Access {
    /// The keys that open the door.
    pub keys: Vec<String>,
    /// A file of further ones.
    pub key_file: Option<PathBuf>,
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").field("keys", &self.keys.len()).field("key_file", &self.key_file).finish()
    }
}

/// `None`: a value is missing or wrong; `Some(None)`: no TLS.
pub(super) fn tls(keys: &mut Keys) -> Option<Option<TlsFiles>> {
    let certificate = keys.read("tls.certificate", text_or_empty)?;
    let key = keys.read("tls.key", text_or_empty)?;
    keys.require(
        Some(certificate.is_some() == key.is_some()),
        &Relation {
            key: "tls.certificate",
            must_be: "given together with",
            other: "tls.key",
            or_else: "there is no TLS",
        },
    );
    let paths = certificate.zip(key);
    Some(paths.map(|(certificate, key)| TlsFiles { certificate: certificate.into(), key: key.into() }))
}

pub(super) fn read(keys: &mut Keys) -> Option<Access> {
    let given = keys.read("access.keys", |value| {
        let text = text_or_empty(value).map_err(|_| allowed())?.unwrap_or_default();
        api_keys(text.split(','))
    });
    let key_file = keys.read("access.key_file", text_or_empty);
    Some(Access { keys: given?, key_file: key_file?.map(PathBuf::from) })
}

/// Keys from texts that hold one each, or none, or a remark behind `#`.
///
/// # Errors
/// What a key may be, if one of them is not.
pub fn api_keys<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Vec<String>, String> {
    let texts = texts.map(str::trim).filter(|text| !text.is_empty() && !text.starts_with('#'));
    let good = |key: &&str| {
        key.len() <= MAX_TOKEN_LEN && *key != HIDDEN && key.bytes().all(|byte| byte.is_ascii_graphic() && byte != b',')
    };
    texts.map(|key| if good(&key) { Ok(key.to_owned()) } else { Err(allowed()) }).collect()
}

fn allowed() -> String {
    format!("keys of up to {MAX_TOKEN_LEN} visible ASCII characters without spaces, separated by commas")
}

/// Origins as browsers write them, or `*`; as a list, or as one text with commas, as flags have it.
pub(super) fn origins(value: &Value) -> Result<Vec<String>, String> {
    let list: Option<Vec<&str>> = match value {
        Value::Array(list) => list.iter().map(Value::as_str).collect(),
        Value::String(text) => Some(text.split(',').map(str::trim).filter(|origin| !origin.is_empty()).collect()),
        _ => None,
    };
    let good = |origin: &&str| {
        let bare = origin
            .split_once("://")
            .is_some_and(|(scheme, host)| !scheme.is_empty() && !host.is_empty() && !host.contains('/'));
        *origin == "*" || (bare && origin.bytes().all(|byte| byte.is_ascii_graphic()))
    };
    match list {
        Some(list) if list.iter().all(good) && (list.len() == 1 || !list.contains(&"*")) => {
            Ok(list.into_iter().map(str::to_owned).collect())
        }
        _ => Err("a list of origins such as [\"https://example.org\"] without paths, or [\"*\"] alone".to_owned()),
    }
}
