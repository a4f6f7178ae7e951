//! The live page: one HTML file without anything from elsewhere, which reads `/metrics` from within the browser. The server
//! keeps nothing for it, so it costs nothing while nobody looks.

use super::status::alive;
use axum::body::Body;
use axum::http::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, VARY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest as _, Sha256};
use std::sync::Arc;

const PAGE: &str = include_str!("page/index.html");
const STYLE: &str = include_str!("page/style.css");
const SCRIPT: &str = include_str!("page/script.js");

/// The page, put together once.
#[derive(Clone, Debug)]
pub(super) struct Page {
    text: bytes::Bytes,
    policy: Arc<HeaderValue>,
}

impl Page {
    pub(super) fn new() -> Self {
        let text = PAGE.replace("{{style}}", STYLE).replace("{{script}}", SCRIPT);
        Self { text: text.into(), policy: Arc::new(policy()) }
    }

    /// The page for whoever reads HTML, `{"status":"alive"}` for anybody else.
    pub(super) fn answer(&self, headers: &HeaderMap) -> Response {
        let reads_html = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()).any(prefers_html);
        let mut response = if reads_html { self.page() } else { alive() };
        response.headers_mut().insert(VARY, HeaderValue::from_static("accept"));
        response
    }

    fn page(&self) -> Response {
        let mut response = Response::new(Body::from(self.text.clone()));
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
        headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::clone(&self.policy));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
        response
    }
}

/// Nothing but this style, this script and requests to this server; no frame around it.
fn policy() -> HeaderValue {
    let hash = |text: &str| STANDARD.encode(Sha256::digest(text));
    let policy = format!(
        "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        hash(STYLE),
        hash(SCRIPT)
    );
    HeaderValue::try_from(policy).expect("letters of base64 and of these words")
}

/// Whether an `Accept` names HTML itself and likes it no less than JSON. `*/*` is what programs say that read anything.
fn prefers_html(accept: &str) -> bool {
    let quality = |wanted: &str| {
        let range = accept
            .split(',')
            .map(str::trim)
            .find(|range| range.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case(wanted)))?;
        let given = range.split(';').skip(1).filter_map(|parameter| parameter.trim().split_once('='));
        let mut given = given.filter(|(name, _)| name.trim().eq_ignore_ascii_case("q"));
        Some(given.next().map_or(1.0, |(_, value)| value.trim().parse().unwrap_or(0.0)))
    };
    let html: Option<f64> = quality("text/html");
    html.is_some_and(|html| html > 0.0 && html >= quality("application/json").unwrap_or(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn html_is_for_those_who_name_it() {
        for (accept, page) in [
            ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", true),
            ("Text/HTML", true),
            ("application/json;q=0.5, text/html;q=0.9", true),
            ("application/json, text/html;q=0.9", false),
            ("text/html;q=0", false),
            ("text/html;q=high", false),
            ("*/*", false),
            ("application/json", false),
            ("text/plain", false),
            ("", false),
        ] {
            assert_eq!(prefers_html(accept), page, "{accept}");
        }
    }

    #[test]
    fn the_page_is_whole_and_brings_everything_itself() {
        let page = Page::new();
        let text = std::str::from_utf8(&page.text).unwrap();
        assert!(text.contains("<style>:root") && text.contains("<script>\"use strict\"") && !text.contains("{{"));
        // A name for shapes, which nobody fetches.
        let text = text.replace("http://www.w3.org/2000/svg", "");
        for part in ["http:", "https:", "src=", "@import", "url(", "innerHTML", " style=", "onclick"] {
            assert!(!text.contains(part), "{part}");
        }
    }
}
