//! W3C Trace Context: whose request this is, from `traceparent` and `tracestate`, and back.
//!
//! What is not exactly as the specification says is as if it were not there: the trace begins here.

use super::{TRACE_PARENT, TRACE_STATE};
use axum::http::{HeaderMap, HeaderValue};
use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};

/// The length of a `traceparent` of version 00; later versions may only add to it.
const LEN: usize = 55;
/// Longer states are not taken over: as much as the specification asks every vendor to carry.
const MOST_STATE: usize = 512;

/// The span that a request comes from.
pub(super) fn parent(headers: &HeaderMap) -> Option<SpanContext> {
    let mut values = headers.get_all(TRACE_PARENT).iter();
    let (value, None) = (values.next()?, values.next()) else { return None };
    let (trace, span, flags) = read(value.to_str().ok()?)?;
    let context = SpanContext::new(trace, span, flags & TraceFlags::SAMPLED, true, state(headers));
    context.is_valid().then_some(context)
}

/// The parts of a `traceparent`.
fn read(text: &str) -> Option<(TraceId, SpanId, TraceFlags)> {
    let hex = |text: &str| text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let (known, rest) = text.split_at_checked(LEN)?;
    let mut parts = known.split('-');
    let [version, trace, span, flags] = std::array::from_fn(|_| parts.next().unwrap_or_default());
    let sound =
        [(version, 2), (trace, 32), (span, 16), (flags, 2)].iter().all(|(part, len)| part.len() == *len && hex(part));
    let whole = if version == "00" { rest.is_empty() } else { rest.is_empty() || rest.starts_with('-') };
    if !sound || !whole || version == "ff" {
        return None;
    }
    let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?);
    Some((TraceId::from_hex(trace).ok()?, SpanId::from_hex(span).ok()?, flags))
}

/// The state of all headers together; nothing if there is anything wrong with it.
fn state(headers: &HeaderMap) -> TraceState {
    let lines: Option<Vec<&str>> = headers.get_all(TRACE_STATE).iter().map(|value| value.to_str().ok()).collect();
    let whole = lines.unwrap_or_default().join(",");
    if whole.len() > MOST_STATE { TraceState::default() } else { whole.parse().unwrap_or_default() }
}

/// A span as `traceparent` has it.
pub(super) fn header(span: &SpanContext) -> HeaderValue {
    let flags = span.trace_flags() & TraceFlags::SAMPLED;
    let text = format!("00-{}-{}-{:02x}", span.trace_id(), span.span_id(), flags.to_u8());
    HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static(""))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const SPAN: &str = "b7ad6b7169203331";

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let line = |(name, value): &(&'static str, &str)| {
            (axum::http::HeaderName::from_static(name), HeaderValue::try_from(*value).expect("a value"))
        };
        lines.iter().map(line).fold(HeaderMap::new(), |mut map, (name, value)| {
            map.append(name, value);
            map
        })
    }

    #[test]
    fn a_parent_is_read_and_written_back() {
        for (flags, sampled) in [("00", false), ("01", true), ("03", true), ("fe", false)] {
            let text = format!("00-{TRACE}-{SPAN}-{flags}");
            let parent = parent(&headers(&[("traceparent", &text)])).expect("a parent");
            assert_eq!((parent.trace_id().to_string(), parent.span_id().to_string()), (TRACE.into(), SPAN.into()));
            assert_eq!((parent.is_sampled(), parent.is_remote()), (sampled, true), "{flags}");
            assert_eq!(header(&parent), format!("00-{TRACE}-{SPAN}-0{}", u8::from(sampled)).as_str());
        }
    }

    #[test]
    fn what_the_specification_forbids_is_as_if_it_were_not_there() {
        let good = format!("00-{TRACE}-{SPAN}-01");
        for text in [
            String::new(),
            "00".to_owned(),
            format!("{good}-"),
            format!("{good}-00"),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("01-{TRACE}-{SPAN}-01x"),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-{}-{SPAN}-01", "0".repeat(32)),
            format!("00-{TRACE}-{}-01", "0".repeat(16)),
            format!("00-{TRACE}-{SPAN}-+1"),
            format!("00-{TRACE}0-{SPAN}-1"),
            format!("00-+{}-{SPAN}-01", &TRACE[1..]),
            good.replace('-', "_"),
        ] {
            assert_eq!(parent(&headers(&[("traceparent", &text)])), None, "{text}");
        }
        assert_eq!(parent(&headers(&[("traceparent", &good), ("traceparent", &good)])), None, "two parents");
        let later = format!("cc-{TRACE}-{SPAN}-01-more");
        assert!(parent(&headers(&[("traceparent", &later)])).is_some(), "a later version");
    }

    #[test]
    fn states_are_joined_and_a_broken_one_costs_only_itself() {
        let good = format!("00-{TRACE}-{SPAN}-01");
        let state = |lines: &[(&'static str, &str)]| {
            let all = [&[("traceparent", good.as_str())], lines].concat();
            parent(&headers(&all)).expect("a parent").trace_state().header()
        };
        assert_eq!(state(&[("tracestate", "a=1, b=2"), ("tracestate", "c=3")]), "a=1,b=2,c=3");
        assert_eq!(state(&[("tracestate", "no pair")]), "");
        assert_eq!(state(&[("tracestate", &format!("a={}", "x".repeat(MOST_STATE)))]), "");
        assert_eq!(state(&[]), "");
    }
}
