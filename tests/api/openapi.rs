//! `/openapi.json` says what the router does.

use crate::support::{App, app_with};
use axum::http::Method;
use std::collections::BTreeSet;

/// The paths of the router, from what it shows of itself.
fn paths(app: &App) -> BTreeSet<String> {
    let shown = format!("{:?}", app.router);
    let (_, paths) = shown.split_once("paths: {").expect("the router shows its paths in another way now");
    // Texts in quotes, up to the first brace between them.
    let parts: Vec<&str> = paths.split('"').collect();
    let pairs = parts.chunks_exact(2).take_while(|pair| !pair[0].contains('}'));
    pairs.map(|pair| pair[1].to_owned()).collect()
}

/// The methods of a path, from what it answers to one that no path has.
async fn methods(app: &App, path: &str) -> BTreeSet<String> {
    let concrete = path.replace("{version}", "1").replace(['{', '}'], "");
    let reply = app.request(Method::TRACE.as_str(), &concrete).await;
    assert_eq!(reply.status, 405, "{path}");
    let allow = reply.header("allow").expect(path).to_lowercase();
    allow.split(',').filter(|method| *method != "head").map(str::to_owned).collect()
}

/// The paths that the router takes for one: what stands behind a colon is part of a name to it.
fn verbs(path: &str) -> Vec<String> {
    let named = path.starts_with("/v1/models/{") && path.ends_with('}');
    std::iter::once(path.to_owned()).chain(named.then(|| format!("{path}:predict"))).collect()
}

#[tokio::test]
async fn every_route_is_in_the_document_and_the_reverse() {
    let app = app_with(|state| state.admin = Some(crate::admin::nothing()));
    let mut routed = BTreeSet::new();
    for path in paths(&app).iter().flat_map(|path| verbs(path)) {
        for method in methods(&app, &path).await {
            routed.insert(format!("{method} {path}"));
        }
    }
    assert!(routed.len() >= 50, "{routed:?}");
    let document = app.get("/openapi.json").await.json();
    let mut described = BTreeSet::new();
    for (path, operations) in document["paths"].as_object().unwrap() {
        let methods = operations.as_object().unwrap().keys().filter(|key| *key != "parameters");
        described.extend(methods.map(|method| format!("{method} {path}")));
    }
    let missing: Vec<_> = routed.difference(&described).collect();
    let invented: Vec<_> = described.difference(&routed).collect();
    assert!(
        missing.is_empty() && invented.is_empty(),
        "not in src/http/openapi.rs: {missing:#?}; no routes: {invented:#?}"
    );
}

#[tokio::test]
async fn without_an_admin_token_its_routes_are_not_described() {
    let document = app_with(|_| {}).get("/openapi.json").await.json();
    assert_eq!(document["paths"].get("/admin/memory"), None);
    assert!(document["paths"]["/v2"]["get"].get("security").is_none());
}
