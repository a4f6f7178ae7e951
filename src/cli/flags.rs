//! The flags: each is an environment variable and a key of the configuration as well.

use super::otel;
use crate::config::{Config, Override};
use crate::keys::Origin;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args};
use std::path::PathBuf;

/// What `serve`, `check`, `models` and `profile` take.
#[derive(Clone, Debug, Default, Args)]
pub struct Options {
    /// The configuration file; without it, the defaults of config/concertina.toml hold
    #[arg(long, value_name = "FILE", env = "CONCERTINA_CONFIG")]
    config: Option<PathBuf>,
    /// The model repository: a folder of models, one model's own folder, or one .onnx file [key: models.path]
    #[arg(long, value_name = "PATH", env = "CONCERTINA_MODELS")]
    models: Option<String>,
    /// The name of the model if --models is one model's own folder or file [key: models.name]
    #[arg(long, value_name = "NAME", env = "CONCERTINA_MODEL_NAME")]
    model_name: Option<String>,
    /// The folder that keeps what was measured for the next start: a path, auto, or nothing to keep nothing [key:
    /// models.cache]
    #[arg(long, value_name = "PATH", env = "CONCERTINA_CACHE")]
    cache: Option<String>,
    /// Where to listen [key: server.address]
    #[arg(long, value_name = "HOST:PORT", env = "CONCERTINA_ADDRESS")]
    address: Option<String>,
    /// Where to listen for gRPC: HOST:PORT, auto (the port after that of HTTP) or off [key: grpc.address]
    #[arg(long, value_name = "HOST:PORT", env = "CONCERTINA_GRPC_ADDRESS")]
    grpc_address: Option<String>,
    /// The path of libonnxruntime.so [key: runtime.library]
    #[arg(long, value_name = "PATH", env = "CONCERTINA_ONNXRUNTIME")]
    onnxruntime: Option<String>,
    /// The most memory that all models together may hold: a size, 80%, or auto [key: memory.limit]
    #[arg(long, value_name = "LIMIT", env = "CONCERTINA_MEMORY_LIMIT")]
    memory_limit: Option<String>,
    /// What requests to /admin must bring; better given by the environment, which other users cannot see [key: admin.token]
    #[arg(long, value_name = "TOKEN", env = "CONCERTINA_ADMIN_TOKEN", hide_env_values = true)]
    admin_token: Option<String>,
    /// API keys, separated by commas, one of which every request must bring; better given by the environment [key: access.keys]
    #[arg(long, value_name = "KEYS", env = "CONCERTINA_API_KEYS", hide_env_values = true)]
    api_keys: Option<String>,
    /// How long to be "not ready" yet serve after SIGTERM: 5s, or auto [key: drain.announce]
    #[arg(long, value_name = "DURATION", env = "CONCERTINA_DRAIN_ANNOUNCE")]
    drain_announce: Option<String>,
    /// How long requests may then take to end [key: drain.grace]
    #[arg(long, value_name = "DURATION", env = "CONCERTINA_DRAIN_GRACE")]
    drain_grace: Option<String>,
    /// How log lines look: human or json [key: log.format]
    #[arg(long, value_name = "FORMAT", env = "CONCERTINA_LOG_FORMAT")]
    log_format: Option<String>,
    /// Which log lines there are, such as debug or info,concertina::http=debug [key: log.level]
    #[arg(long, value_name = "LEVEL", env = "CONCERTINA_LOG_LEVEL")]
    log_level: Option<String>,
    /// Where an OpenTelemetry collector listens for spans (OTLP over gRPC), such as http://127.0.0.1:4317 [key:
    /// tracing.endpoint]
    #[arg(long, value_name = "URL", env = "CONCERTINA_TRACING_ENDPOINT")]
    tracing_endpoint: Option<String>,
    /// Any key of the configuration, such as --set model.max_batch_size=8; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_and_value)]
    set: Vec<(String, String)>,
}

fn key_and_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected KEY=VALUE")?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

impl Options {
    /// The configuration of all layers. `matches` tells flags from environment variables; without it, all count as flags.
    pub(super) fn resolve(&self, matches: Option<&ArgMatches>) -> Result<Config, Vec<String>> {
        let overrides = self.overrides(matches);
        let Some(path) = self.config.as_ref().filter(|path| !path.as_os_str().is_empty()) else {
            return Config::resolve(None, &overrides);
        };
        let shown = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => Config::resolve(Some((&shown, &text)), &overrides),
            Err(error) => {
                // The other layers are still checked, so that one run names everything.
                let mut faults = vec![format!("{shown}: cannot be read: {error}")];
                faults.extend(Config::resolve(None, &overrides).err().unwrap_or_default());
                Err(faults)
            }
        }
    }

    /// The defaults with the repository and the library that flags, environment and file name: what models are checked by
    /// when the configuration is broken.
    pub(super) fn resolve_repository(&self, matches: Option<&ArgMatches>) -> Result<Config, Vec<String>> {
        const NEEDED: [&str; 3] = ["models.path", "models.name", "runtime.library"];
        let mut overrides = self.in_file(&NEEDED);
        overrides.extend(self.overrides(matches).into_iter().filter(|given| NEEDED.contains(&given.key.as_str())));
        Config::resolve(None, &overrides)
    }

    /// What the file says of these keys, if it can be read so far.
    fn in_file(&self, keys: &[&str]) -> Vec<Override> {
        let Some(path) = &self.config else { return Vec::new() };
        let table = std::fs::read_to_string(path).ok().and_then(|text| text.parse::<toml::Table>().ok());
        let value = |key: &str| {
            let (section, name) = key.split_once('.')?;
            table.as_ref()?.get(section)?.get(name)?.as_str().map(str::to_owned)
        };
        let origin = Origin::File(path.display().to_string());
        let given = keys
            .iter()
            .filter_map(|key| Some(Override { key: (*key).to_owned(), value: value(key)?, origin: origin.clone() }));
        given.collect()
    }

    fn overrides(&self, matches: Option<&ArgMatches>) -> Vec<Override> {
        let flags = [
            ("models", "models.path", &self.models),
            ("model_name", "models.name", &self.model_name),
            ("cache", "models.cache", &self.cache),
            ("address", "server.address", &self.address),
            ("grpc_address", "grpc.address", &self.grpc_address),
            ("onnxruntime", "runtime.library", &self.onnxruntime),
            ("memory_limit", "memory.limit", &self.memory_limit),
            ("api_keys", "access.keys", &self.api_keys),
            ("admin_token", "admin.token", &self.admin_token),
            ("drain_announce", "drain.announce", &self.drain_announce),
            ("drain_grace", "drain.grace", &self.drain_grace),
            ("log_format", "log.format", &self.log_format),
            ("log_level", "log.level", &self.log_level),
            ("tracing_endpoint", "tracing.endpoint", &self.tracing_endpoint),
        ];
        let named = flags.into_iter().filter_map(|(id, key, value)| {
            let source = matches.and_then(|matches| matches.value_source(id));
            let origin = if source == Some(ValueSource::EnvVariable) {
                Origin::Environment(format!("CONCERTINA_{}", id.to_uppercase()))
            } else {
                Origin::Flag(format!("--{}", id.replace('_', "-")))
            };
            let value = value.clone()?;
            // Compose files and charts pass variables that nobody filled in: an empty one says nothing.
            let unfilled = value.is_empty() && matches!(origin, Origin::Environment(_));
            (!unfilled).then(|| Override { key: key.to_owned(), value, origin })
        });
        let set = self.set.iter().map(|(key, value)| Override {
            key: key.clone(),
            value: value.clone(),
            origin: Origin::Flag("--set".to_owned()),
        });
        // The environment comes before every flag, and --set before a flag of its own: the more explicit one is the last.
        let (environment, named): (Vec<_>, Vec<_>) =
            named.partition(|given| matches!(given.origin, Origin::Environment(_)));
        let standard = otel::overrides(&|name| std::env::var(name).ok());
        standard.into_iter().chain(environment).chain(set).chain(named).collect()
    }
}
