//! The server's configuration: text to [`Config`], with every bound and cross-check, and every fault in one report.
//!
//! Values come in layers, the later over the earlier: config/concertina.toml (which the binary carries, and which is the
//! only source of defaults), the user's file, the environment, flags.

use crate::keys::value::{auto_or, bytes, choice, count, duration, integer, number, text_or_empty};
use crate::keys::{HIDDEN, Keys, Origin, Relation};
use crate::model::Settings;
use crate::model::settings::DEFAULTS;
use crate::signal::Scaling;
use crate::trace;
use crate::units::{ByteSize, Rows};
use std::ffi::OsString;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;
use toml::Value;

mod access;
mod address;
mod device;
mod memory;
mod text;
mod tracing;

pub use access::{Access, TlsFiles, api_keys};
pub use address::Grpc;
pub use device::{Provider, Providers, Runtime};
pub use memory::{Memory, MemoryLimit, headroom};
pub use text::Text;

/// A longer token of the admin routes is refused.
const MAX_TOKEN_LEN: usize = 1024;

/// The checked configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// HOST:PORT to listen on.
    pub address: String,
    /// Which models are served.
    pub models: Models,
    /// The threads and the library.
    pub runtime: Runtime,
    /// The limits of connections and requests.
    pub http: Http,
    /// Whether and where gRPC is spoken, and its own limits.
    pub grpc: Grpc,
    /// What texts may cost.
    pub text: Text,
    /// What holds for every model without a model.toml.
    pub model: Settings,
    /// The memory that models may use.
    pub memory: Memory,
    /// How the scaling signal is made.
    pub scaling: Scaling,
    /// Certificate and key of TLS; `None`: in the clear.
    pub tls: Option<TlsFiles>,
    /// Who may ask.
    pub access: Access,
    /// Who may change things while the server runs.
    pub admin: Admin,
    /// How the server ends.
    pub drain: Drain,
    /// What is logged, and how.
    pub log: Log,
    /// Whether and where requests are traced.
    pub tracing: trace::Settings,
    keys: Keys,
}

/// The section `[models]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Models {
    /// The model repository, one model's own folder, or an .onnx file.
    pub path: PathBuf,
    /// The name of the model if `path` is one model's own folder or file.
    pub name: Option<String>,
    /// Whether everything is loaded at the start; otherwise models wait for somebody to ask for them.
    pub load_at_start: bool,
    /// How often the folder is looked at for changes; zero: never.
    pub poll_interval: Duration,
    cache: Cache,
}

/// The key `models.cache`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Cache {
    Auto,
    Off,
    Folder(PathBuf),
}

impl Models {
    /// Where what was measured is kept for the next start; `None`: nowhere. `variable` reads the environment.
    #[must_use]
    pub fn cache_folder(&self, variable: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
        // What is relative there is to be ignored (XDG Base Directory Specification).
        let folder = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        match &self.cache {
            Cache::Off => None,
            Cache::Folder(path) => Some(path.clone()),
            Cache::Auto => {
                let caches = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")));
                caches.map(|caches| caches.join("concertina"))
            }
        }
    }
}

/// The section `[http]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Http {
    /// The largest request body.
    pub max_body_bytes: ByteSize,
    /// The bodies of all requests inside the server together.
    pub max_bodies_bytes: ByteSize,
    /// The largest request line and headers together.
    pub max_header_bytes: ByteSize,
    /// How long a connection may wait for the headers of a request, also between two requests.
    pub header_read_timeout: Duration,
    /// How long a client may take to send the body.
    pub body_read_timeout: Duration,
    /// How long a connection may take to accept further bytes of an answer.
    pub write_timeout: Duration,
    /// Open connections.
    pub max_connections: NonZeroUsize,
    /// Requests that one HTTP/2 connection may have open.
    pub max_streams_per_connection: NonZeroU32,
    /// How long a connection may be without a request when there is no room for another.
    pub crowded_idle_timeout: Duration,
    /// Origins whose pages may ask from within a browser.
    pub cors_origins: Vec<String>,
    /// The most rows in one request.
    pub max_request_rows: Rows,
    /// Requests inside the server.
    pub max_in_flight_requests: NonZeroUsize,
    /// Whether answers are compressed for clients that ask for it.
    pub compress_answers: bool,
}

/// The section `[admin]`.
#[derive(Clone, PartialEq, Eq)]
pub struct Admin {
    /// What `Authorization: Bearer` must say; `None`, and no file either: the admin routes do not exist.
    pub token: Option<String>,
    /// The file that says it instead.
    pub token_file: Option<PathBuf>,
}

impl std::fmt::Debug for Admin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admin").field("token", &self.token.as_ref().map(|_| HIDDEN)).finish_non_exhaustive()
    }
}

/// The section `[drain]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drain {
    announce: Option<Duration>,
    /// How long requests inside the server may take to end.
    pub grace: Duration,
}

impl Drain {
    /// How long the server is not ready yet still serves. `on_terminal`: whether a person started it by hand, who has no
    /// proxy that must notice.
    #[must_use]
    pub fn announce(&self, on_terminal: bool) -> Duration {
        self.announce.unwrap_or(if on_terminal { Duration::ZERO } else { Duration::from_secs(5) })
    }
}

/// The section `[log]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// How lines look.
    pub format: LogFormat,
    /// Which lines there are, in the words of `tracing_subscriber::filter::Targets`.
    pub level: String,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Human,
    /// One JSON object per line.
    Json,
}

/// One value that is not from a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// The key, such as `server.address`.
    pub key: String,
    /// The value as text.
    pub value: String,
    /// The flag or variable that gave it.
    pub origin: Origin,
}

impl Config {
    /// The configuration of these layers. `file` is the path of the user's file and its text.
    ///
    /// # Errors
    /// Everything that is wrong, each naming the key, the value, where it came from and what is allowed.
    pub fn resolve(file: Option<(&str, &str)>, overrides: &[Override]) -> Result<Self, Vec<String>> {
        let mut keys = Keys::default();
        keys.overlay(DEFAULTS, &Origin::Default);
        if let Some((path, text)) = file {
            keys.overlay(text, &Origin::File(path.to_owned()));
        }
        for Override { key, value, origin } in overrides {
            keys.set(key, Value::from(value.as_str()), origin.clone());
        }
        let config = read(&mut keys);
        let faults = keys.finish();
        config.filter(|_| faults.is_empty()).ok_or(faults)
    }

    /// The settings of a model whose model.toml has this text and path, over the `[model]` section, and everything that is
    /// wrong with them, each naming the file and the key. Unknown keys do not keep the others from being read; a model is
    /// served only by settings without a fault.
    #[must_use]
    pub fn settings(&self, file: &str, text: &str) -> (Option<Settings>, Vec<String>) {
        self.settings_with(file, text, &[])
    }

    /// As [`Config::settings`], with the keys that a request to load the model has sent.
    #[must_use]
    pub fn settings_with(&self, file: &str, text: &str, sent: &[(String, Value)]) -> (Option<Settings>, Vec<String>) {
        let (settings, mut faults) = Settings::overridden(text, file, &self.keys.clone().table("model"), sent);
        let body = self.http.max_body_bytes;
        if let Some(queue) = settings.as_ref().map(|settings| settings.max_queue_bytes).filter(|queue| *queue < body) {
            faults.push(format!(
                "max_queue_bytes = {queue} (file {file}): must be at least http.max_body_bytes = {body}"
            ));
        }
        (settings, faults)
    }

    /// The values that hold, as TOML that can be read back, each with where it came from; secrets are not shown.
    #[must_use]
    pub fn render(&self) -> String {
        self.keys.render()
    }
}

impl Default for Config {
    /// What config/concertina.toml says.
    fn default() -> Self {
        Self::resolve(None, &[]).unwrap_or_else(|faults| unreachable!("config/concertina.toml: {faults:?}"))
    }
}

fn read(keys: &mut Keys) -> Option<Config> {
    // The whole section: a misspelt key in it may well hold the token.
    keys.hide("admin");
    keys.hide("access.keys");
    // All sections are read before any is missed, so that every fault is found.
    let address = keys.read("server.address", address::address);
    let path = keys.read("models.path", file_path);
    let name = keys.read("models.name", model_name);
    let cache = keys.read("models.cache", cache);
    let load_at_start = keys.read("models.load_at_start", choice(&[("all", true), ("none", false)]));
    let poll_interval = keys.read("models.poll_interval", poll_interval);
    let runtime = device::runtime(keys);
    let http = http(keys);
    let grpc = address::grpc(keys, address.as_deref());
    let text = text::read(keys);
    let model = model(keys);
    let limit = keys.read("memory.limit", MemoryLimit::read);
    let headroom = keys.read("memory.headroom", headroom);
    let target = keys.read("scaling.target", number(0.05..=1.0));
    let window = keys.read("scaling.window", seconds(3, 600));
    let tls = access::tls(keys);
    let access = access::read(keys);
    let token = keys.read("admin.token", token);
    let token_file = keys.read("admin.token_file", text_or_empty);
    let announce = keys.read("drain.announce", auto_or(seconds(0, 600)));
    let grace = keys.read("drain.grace", seconds(0, 3600));
    let formats = [("human", LogFormat::Human), ("json", LogFormat::Json)];
    let format = keys.read("log.format", choice(&formats));
    let level = keys.read("log.level", log_level);
    let tracing = tracing::read(keys);
    let (body, queue) =
        (http.as_ref().map(|http| http.max_body_bytes), model.as_ref().map(|model| model.max_queue_bytes));
    keys.require(
        body.zip(queue).map(|(body, queue)| body <= queue),
        &Relation {
            key: "model.max_queue_bytes",
            must_be: "at least",
            other: "http.max_body_bytes",
            or_else: "the largest request never fits the queue",
        },
    );
    Some(Config {
        address: address?,
        models: Models {
            path: path?,
            name: name?,
            load_at_start: load_at_start?,
            poll_interval: poll_interval?,
            cache: cache?,
        },
        runtime: runtime?,
        http: http?,
        grpc: grpc?,
        text: text?,
        model: model?,
        memory: Memory { limit: limit?, headroom: headroom? },
        scaling: Scaling { target: target?, window: window? },
        tls: tls?,
        access: access?,
        admin: Admin { token: token?, token_file: token_file?.map(PathBuf::from) },
        drain: Drain { announce: announce?, grace: grace? },
        log: Log { format: format?, level: level? },
        tracing: tracing?,
        keys: keys.clone(),
    })
}

fn http(keys: &mut Keys) -> Option<Http> {
    let kib = |count: u64| ByteSize(count << 10);
    let max_body_bytes = keys.read("http.max_body_bytes", bytes(kib(1)..=kib(1 << 30)));
    let max_bodies_bytes = keys.read("http.max_bodies_bytes", bytes(kib(1)..=kib(1 << 34)));
    keys.require(
        max_bodies_bytes.zip(max_body_bytes).map(|(all, one)| all >= one),
        &Relation {
            key: "http.max_bodies_bytes",
            must_be: "at least",
            other: "http.max_body_bytes",
            or_else: "the largest request is always refused",
        },
    );
    let max_header_bytes = keys.read("http.max_header_bytes", bytes(kib(8)..=kib(1024)));
    let header_read_timeout = keys.read("http.header_read_timeout", seconds(1, 3600));
    let body_read_timeout = keys.read("http.body_read_timeout", seconds(1, 3600));
    let write_timeout = keys.read("http.write_timeout", duration(Duration::from_millis(1)..=Duration::from_secs(3600)));
    let max_connections = keys.read("http.max_connections", count(1_000_000usize));
    let max_streams_per_connection = keys.read("http.max_streams_per_connection", count(1_000_000u32));
    let crowded_idle_timeout =
        keys.read("http.crowded_idle_timeout", duration(Duration::from_millis(10)..=Duration::from_secs(3600)));
    let cors_origins = keys.read("http.cors_origins", access::origins);
    let max_request_rows = keys.read("http.max_request_rows", integer(1..=1 << 24));
    let max_in_flight_requests = keys.read("http.max_in_flight_requests", count(1_000_000usize));
    let compress_answers = keys.read("http.compress_answers", choice(&[("on", true), ("off", false)]));
    Some(Http {
        max_body_bytes: max_body_bytes?,
        max_bodies_bytes: max_bodies_bytes?,
        max_header_bytes: max_header_bytes?,
        header_read_timeout: header_read_timeout?,
        body_read_timeout: body_read_timeout?,
        write_timeout: write_timeout?,
        max_connections: max_connections?,
        max_streams_per_connection: max_streams_per_connection?,
        crowded_idle_timeout: crowded_idle_timeout?,
        cors_origins: cors_origins?,
        max_request_rows: max_request_rows?,
        max_in_flight_requests: max_in_flight_requests?,
        compress_answers: compress_answers?,
    })
}

fn model(keys: &mut Keys) -> Option<Settings> {
    let mut table = keys.table("model");
    let settings = Settings::read_defaults(&mut table);
    keys.absorb(table);
    settings
}

fn seconds(least: u64, most: u64) -> impl Fn(&Value) -> Result<Duration, String> {
    duration(Duration::from_secs(least)..=Duration::from_secs(most))
}

fn poll_interval(value: &Value) -> Result<Duration, String> {
    let least = Duration::from_millis(100);
    let parsed = duration(Duration::ZERO..=Duration::from_secs(24 * 60 * 60))(value)?;
    if parsed.is_zero() || parsed >= least { Ok(parsed) } else { Err("\"0s\" or at least \"100ms\"".to_owned()) }
}

fn file_path(value: &Value) -> Result<PathBuf, String> {
    text_or_empty(value)
        .ok()
        .flatten()
        .map(PathBuf::from)
        .ok_or_else(|| "the path of a folder or .onnx file".to_owned())
}

fn model_name(value: &Value) -> Result<Option<String>, String> {
    match text_or_empty(value)? {
        Some(name) => crate::model::check_name(&name).map(|()| Some(name)),
        None => Ok(None),
    }
}

/// What a header can carry, so that a token with the line break of its file is found at the start and not by every request.
pub(crate) fn token(value: &Value) -> Result<Option<String>, String> {
    let allowed = || {
        format!(
            "up to {MAX_TOKEN_LEN} visible ASCII characters without spaces, other than the \"{HIDDEN}\" that `check` prints \
             instead, or \"\" for no admin routes"
        )
    };
    let token = text_or_empty(value).map_err(|_| allowed())?;
    let good = |token: &String| {
        token.len() <= MAX_TOKEN_LEN && token != HIDDEN && token.bytes().all(|byte| byte.is_ascii_graphic())
    };
    if token.as_ref().is_none_or(good) { Ok(token) } else { Err(allowed()) }
}

fn cache(value: &Value) -> Result<Cache, String> {
    let text = text_or_empty(value).map_err(|_| "\"auto\", the path of a folder, or \"\"".to_owned())?;
    Ok(match text.as_deref() {
        None => Cache::Off,
        Some("auto") => Cache::Auto,
        Some(path) => Cache::Folder(PathBuf::from(path)),
    })
}

fn log_level(value: &Value) -> Result<String, String> {
    let allowed = || {
        "\"error\", \"warn\", \"info\", \"debug\", \"trace\" or \"off\", then exceptions such as \
         \"info,concertina::http=debug\""
            .to_owned()
    };
    let text = value.as_str().ok_or_else(allowed)?.to_owned();
    // Targets takes a lone word that is no level for the name of a target, and no word at all for "error": a misspelt level
    // would log next to nothing.
    let level = |part: &str| !part.is_empty() && part.parse::<tracing_subscriber::filter::LevelFilter>().is_ok();
    let clear = |part: &str| part.contains('=') || level(part.trim());
    let parsed = text.parse::<tracing_subscriber::filter::Targets>();
    if parsed.is_err() || !text.split(',').all(clear) {
        return Err(allowed());
    }
    Ok(text)
}

#[cfg(test)]
mod tests;
