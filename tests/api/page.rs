//! `/`: a page for browsers, JSON for everybody else.

use super::support::{App, Reply, app_with_jobs, echo, tensor};
use axum::body::Body;
use axum::http::Request;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use concertina::tensor::DataType;
use serde_json::json;
use sha2::{Digest as _, Sha256};

async fn root(app: &App, accept: &str) -> Reply {
    app.send(Request::get("/").header("accept", accept).body(Body::empty()).unwrap()).await
}

#[tokio::test]
async fn a_browser_gets_the_page_and_anybody_else_the_status() {
    let (app, _jobs) = app_with_jobs(vec![echo("m", vec![tensor("x", DataType::Uint8)])], 1);
    for accept in ["*/*", "application/json", "text/plain"] {
        let reply = root(&app, accept).await;
        assert_eq!(
            (reply.status.as_u16(), reply.header("vary"), reply.json()),
            (200, Some("accept"), json!({"status": "alive"}))
        );
    }
    assert_eq!(app.get("/").await.json(), json!({"status": "alive"}));
    let reply = root(&app, "text/html,application/xhtml+xml,*/*;q=0.8").await;
    assert_eq!((reply.status.as_u16(), reply.header("vary")), (200, Some("accept")));
    assert_eq!(reply.header("content-type"), Some("text/html; charset=utf-8"));
    assert_eq!(reply.header("x-content-type-options"), Some("nosniff"));
    assert!(reply.text().starts_with("<!DOCTYPE html>"));
}

#[tokio::test]
async fn the_policy_allows_this_style_this_script_and_nothing_else() {
    let (app, _jobs) = app_with_jobs(vec![], 1);
    let reply = root(&app, "text/html").await;
    let policy = reply.header("content-security-policy").unwrap();
    let part = |name: &str| {
        let (from, to) = (format!("<{name}>"), format!("</{name}>"));
        assert_eq!(reply.text().matches(&from).count(), 1, "one {name}");
        reply.text().split_once(&from).and_then(|(_, rest)| rest.split_once(&to)).unwrap().0
    };
    for name in ["style", "script"] {
        let hash = STANDARD.encode(Sha256::digest(part(name)));
        assert!(policy.contains(&format!("{name}-src 'sha256-{hash}';")), "{name} in {policy}");
    }
    for allowed in ["default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"] {
        assert!(policy.contains(allowed), "{allowed} in {policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
}
