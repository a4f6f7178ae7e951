//! The span of a request: begun with its head, ended with its answer or with its client.
//!
//! Requests by POST have one; reading health, metrics and what models are is no work that anybody follows.

use super::Outcome;
use super::error::Code;
use crate::trace::{KeyValue, TRACE_RESPONSE, Trace, Tracer};
use axum::extract::{MatchedPath, Request};
use axum::http::Method;
use axum::response::Response;
use std::borrow::Cow;

/// What is said of a request whose client has gone before its answer.
const GONE: &str = "cancelled";

/// A request that is being answered; dropped before that, its client has gone.
#[derive(Debug)]
pub(crate) struct Traced {
    trace: Trace,
    name: Cow<'static, str>,
    attributes: Vec<KeyValue>,
    ended: bool,
}

impl Traced {
    /// A request by HTTP, which carries its trace from now on.
    pub(super) fn http(tracer: &Tracer, request: &mut Request) -> Option<Self> {
        if request.method() != Method::POST {
            return None;
        }
        let trace = tracer.begin(request.headers());
        request.extensions_mut().insert(trace.clone());
        if !trace.is_recorded() {
            return Some(Self::new(trace, "".into(), Vec::new()));
        }
        let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
        let name = route.as_ref().map_or("POST".into(), |route| format!("POST {route}").into());
        let mut attributes = vec![
            KeyValue::new("http.request.method", "POST"),
            KeyValue::new("url.path", request.uri().path().to_owned()),
        ];
        attributes.extend(route.map(|route| KeyValue::new("http.route", route)));
        Some(Self::new(trace, name, attributes))
    }

    /// A call by gRPC.
    pub(crate) fn call(trace: Trace, service: &'static str, method: &'static str) -> Self {
        if !trace.is_recorded() {
            return Self::new(trace, "".into(), Vec::new());
        }
        let name = format!("{service}/{method}").into();
        let attributes = vec![
            KeyValue::new("rpc.system", "grpc"),
            KeyValue::new("rpc.service", service),
            KeyValue::new("rpc.method", method),
        ];
        Self::new(trace, name, attributes)
    }

    fn new(trace: Trace, name: Cow<'static, str>, attributes: Vec<KeyValue>) -> Self {
        Self { trace, name, attributes, ended: false }
    }

    /// What the answer and the log say of it.
    pub(crate) fn trace(&self) -> &Trace {
        &self.trace
    }

    /// Ends it with its answer, which says so.
    pub(super) fn answered(mut self, response: &mut Response) {
        response.headers_mut().insert(TRACE_RESPONSE, self.trace.header());
        let status = response.status();
        self.attributes.push(KeyValue::new("http.response.status_code", i64::from(status.as_u16())));
        let outcome = response.extensions().get::<Outcome>();
        let failure = outcome.and_then(|outcome| outcome.failure).map(Code::as_str);
        // A client's fault is none of the server's (OpenTelemetry's conventions for HTTP).
        let fault = status.is_server_error().then(|| failure.unwrap_or("internal"));
        self.end(outcome, failure, fault);
    }

    /// Ends a call with its outcome.
    pub(crate) fn called(mut self, outcome: &Outcome, code: tonic::Code) {
        self.attributes.push(KeyValue::new("rpc.grpc.status_code", i64::from(code as i32)));
        let failure = outcome.failure.map(Code::as_str);
        let blame = [
            tonic::Code::Unknown,
            tonic::Code::DeadlineExceeded,
            tonic::Code::Unimplemented,
            tonic::Code::Internal,
            tonic::Code::Unavailable,
            tonic::Code::DataLoss,
        ];
        self.end(Some(outcome), failure, failure.filter(|_| blame.contains(&code)));
    }

    /// Ends it; `fault` is what the server is to blame for.
    fn end(mut self, outcome: Option<&Outcome>, failure: Option<&'static str>, fault: Option<&'static str>) {
        self.ended = true;
        if !self.trace.is_recorded() {
            return;
        }
        let attributes = &mut self.attributes;
        if let Some(model) = outcome.and_then(|outcome| outcome.model.as_ref()) {
            attributes.push(KeyValue::new("concertina.model.name", model.name.clone()));
            attributes
                .push(KeyValue::new("concertina.model.version", i64::try_from(model.version).unwrap_or(i64::MAX)));
        }
        attributes.extend(outcome.map(|outcome| KeyValue::new("concertina.rows", i64::from(outcome.rows))));
        attributes.extend(failure.map(|code| KeyValue::new("error.type", code)));
        self.trace.end(std::mem::take(&mut self.name), std::mem::take(attributes), fault);
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        if !self.ended && self.trace.is_recorded() {
            let mut attributes = std::mem::take(&mut self.attributes);
            attributes.push(KeyValue::new("error.type", GONE));
            self.trace.end(std::mem::take(&mut self.name), attributes, Some(GONE));
        }
    }
}
