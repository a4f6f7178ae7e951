//! What OpenTelemetry's own environment variables say, as keys of the configuration.

use crate::config::Override;
use crate::keys::Origin;

/// Keys, and the variables that stand for them, the more special ones last.
const VARIABLES: [(&str, &[&str]); 6] = [
    ("tracing.endpoint", &["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"]),
    ("tracing.protocol", &["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"]),
    ("tracing.service_name", &["OTEL_SERVICE_NAME"]),
    ("tracing.sampler", &["OTEL_TRACES_SAMPLER"]),
    ("tracing.sample_ratio", &["OTEL_TRACES_SAMPLER_ARG"]),
    ("tracing.max_queue_spans", &["OTEL_BSP_MAX_QUEUE_SIZE"]),
];

/// The keys that are set so. An empty variable says nothing (OpenTelemetry's specification has it so, too).
pub(super) fn overrides(variable: &dyn Fn(&str) -> Option<String>) -> Vec<Override> {
    let is = |name: &str, word: &str| variable(name).is_some_and(|value| value.eq_ignore_ascii_case(word));
    if is("OTEL_SDK_DISABLED", "true") {
        return Vec::new();
    }
    let silent = is("OTEL_TRACES_EXPORTER", "none");
    let mut found = Vec::new();
    for (key, names) in VARIABLES.into_iter().filter(|(key, _)| !(silent && *key == "tracing.endpoint")) {
        for name in names {
            if let Some(value) = variable(name).filter(|value| !value.is_empty()) {
                found.push(Override { key: key.to_owned(), value, origin: Origin::Environment((*name).to_owned()) });
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::trace::Sampler;

    fn with(variables: &[(&str, &str)]) -> Vec<Override> {
        overrides(&|name| variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn the_variables_of_opentelemetry_set_the_keys() {
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:4317");
        let settings =
            |variables: &[(&str, &str)]| Config::resolve(None, &with(variables)).expect("good values").tracing;
        assert_eq!(settings(&[]), Config::default().tracing);
        assert_eq!(settings(&[endpoint]).endpoint.as_deref(), Some("http://a:4317"));
        let special = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://b:4317/");
        assert_eq!(settings(&[special, endpoint]).endpoint.as_deref(), Some("http://b:4317"));
        for off in [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")] {
            assert_eq!(settings(&[endpoint, off]).endpoint, None, "{off:?}");
        }
        let sampled = settings(&[("OTEL_TRACES_SAMPLER", "traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "0.25")]);
        assert_eq!((sampled.sampler, sampled.ratio), (Sampler::Ratio, 0.25));
        assert_eq!(settings(&[("OTEL_SERVICE_NAME", "")]).service_name, "concertina");
    }

    #[test]
    fn what_is_not_spoken_is_refused_with_the_variable_that_wants_it() {
        for (name, value, expected) in [
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "expected one of \"grpc\""),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://a:4317", "TLS is not spoken"),
            ("OTEL_TRACES_SAMPLER", "jaeger_remote", "\"parentbased_always_on\""),
        ] {
            let faults = Config::resolve(None, &with(&[(name, value)])).expect_err(value);
            assert_eq!(faults.len(), 1, "{faults:?}");
            assert!(faults[0].contains(&format!("environment {name}")) && faults[0].contains(expected), "{faults:?}");
        }
    }
}
