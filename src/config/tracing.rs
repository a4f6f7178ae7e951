//! The section `[tracing]`: where spans go, and which.

use super::address;
use crate::keys::Keys;
use crate::keys::value::{choice, count, number, text_or_empty};
use crate::trace::{Sampler, Settings};
use toml::Value;

/// The samplers, in the words of `OTEL_TRACES_SAMPLER`.
const SAMPLERS: [(&str, Sampler); 6] = [
    ("always_on", Sampler::AlwaysOn),
    ("always_off", Sampler::AlwaysOff),
    ("traceidratio", Sampler::Ratio),
    ("parentbased_always_on", Sampler::ParentOrOn),
    ("parentbased_always_off", Sampler::ParentOrOff),
    ("parentbased_traceidratio", Sampler::ParentOrRatio),
];

pub(super) fn read(keys: &mut Keys) -> Option<Settings> {
    let endpoint = keys.read("tracing.endpoint", endpoint);
    let protocol = keys.read("tracing.protocol", choice(&[("grpc", ())]));
    let service_name = keys.read("tracing.service_name", service_name);
    let sampler = keys.read("tracing.sampler", choice(&SAMPLERS));
    let ratio = keys.read("tracing.sample_ratio", number(0.0..=1.0));
    let max_queue_spans = keys.read("tracing.max_queue_spans", count(10_000_000usize));
    protocol?;
    Some(Settings {
        endpoint: endpoint?,
        service_name: service_name?,
        sampler: sampler?,
        ratio: ratio?,
        max_queue_spans: max_queue_spans?,
    })
}

/// `http://HOST:PORT`, or nothing.
fn endpoint(value: &Value) -> Result<Option<String>, String> {
    let allowed = || {
        "http://HOST:PORT of an OpenTelemetry collector, such as \"http://127.0.0.1:4317\", or \"\" for no tracing (TLS is not \
         spoken to collectors: have one beside the server)"
            .to_owned()
    };
    let Some(text) = text_or_empty(value).map_err(|_| allowed())? else { return Ok(None) };
    let host = text.strip_prefix("http://").ok_or_else(allowed)?;
    let host = address::address(&Value::from(host.trim_end_matches('/'))).map_err(|_| allowed())?;
    let plain = host.bytes().all(|byte| byte.is_ascii_graphic() && !b"/?#@".contains(&byte));
    if plain { Ok(Some(format!("http://{host}"))) } else { Err(allowed()) }
}

fn service_name(value: &Value) -> Result<String, String> {
    let name = text_or_empty(value).ok().flatten().filter(|name| name.len() <= 256);
    name.ok_or_else(|| "a text of 1 to 256 bytes".to_owned())
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn bad_values_are_refused_by_name() {
        for (line, expected) in [
            ("endpoint = \"127.0.0.1:4317\"", "http://HOST:PORT"),
            ("endpoint = \"http://a\"", "http://HOST:PORT"),
            ("endpoint = \"https://a:4317\"", "TLS is not spoken"),
            ("endpoint = \"http://a:4317/v1/traces\"", "http://HOST:PORT"),
            ("endpoint = \"http://user@a:4317\"", "http://HOST:PORT"),
            ("protocol = \"http/json\"", "one of \"grpc\""),
            ("service_name = \"\"", "a text of 1 to 256"),
            ("sampler = \"some\"", "\"parentbased_always_off\""),
            ("sample_ratio = 1.5", "a number from 0 to 1"),
            ("max_queue_spans = 0", "an integer from 1 to 10000000"),
        ] {
            let faults = Config::resolve(Some(("c.toml", &format!("[tracing]\n{line}"))), &[]).expect_err(line);
            assert_eq!(faults.len(), 1, "{faults:?}");
            let key = line.split(' ').next().unwrap_or_default();
            assert!(faults[0].starts_with(&format!("tracing.{key} = ")) && faults[0].contains(expected), "{faults:?}");
        }
    }
}
