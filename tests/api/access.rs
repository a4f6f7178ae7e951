//! Keys, pages of other origins, and TLS.

use crate::socket::{limits, read_response};
use crate::support::{App, app_with, app_with_jobs, echo, tensor};
use arc_swap::ArcSwap;
use axum::body::Body;
use axum::http::Request;
use concertina::http::serve::serve;
use concertina::http::{ApiKeys, Tls};
use concertina::tensor::DataType;
use std::sync::Arc;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

fn guarded(keys: &[&str]) -> (App, Arc<ArcSwap<ApiKeys>>) {
    let ring = Arc::new(ArcSwap::from_pointee(keys.iter().collect()));
    let shared = Arc::clone(&ring);
    (app_with(|state| state.keys = Some(shared)), ring)
}

async fn asked(app: &App, path: &str, authorization: Option<&str>) -> u16 {
    let mut request = Request::get(path);
    if let Some(value) = authorization {
        request = request.header("authorization", value);
    }
    app.send(request.body(Body::empty()).unwrap()).await.status.as_u16()
}

#[tokio::test]
async fn with_keys_only_probes_and_their_holders_are_answered() {
    let (app, ring) = guarded(&["alpha", "beta"]);
    for path in ["/", "/metrics", "/v2/health/live", "/v2/health/ready"] {
        assert_eq!(asked(&app, path, None).await, 200, "{path}");
    }
    for path in ["/v2", "/v2/models", "/v2/models/m", "/v2/models/m/infer", "/nothing"] {
        for wrong in [None, Some("Bearer alph"), Some("Bearer "), Some("Basic alpha"), Some("alpha")] {
            assert_eq!(asked(&app, path, wrong).await, 401, "{path} {wrong:?}");
        }
    }
    for key in ["Bearer alpha", "bearer beta"] {
        assert_eq!(asked(&app, "/v2", Some(key)).await, 200, "{key}");
    }
    ring.store(Arc::new(["gamma"].iter().collect()));
    assert_eq!(asked(&app, "/v2", Some("Bearer alpha")).await, 401);
    assert_eq!(asked(&app, "/v2", Some("Bearer gamma")).await, 200);
}

#[tokio::test]
async fn a_refusal_says_what_is_missing() {
    let (app, _) = guarded(&["alpha"]);
    let reply = app.infer("{}").await;
    let (text, code) = reply.error();
    assert!(text.contains("Authorization: Bearer KEY") && code == "unauthorized", "{text}");
    assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
    assert!(!text.contains("alpha"));
}

async fn from_page(app: &App, method: &str, origin: &str) -> crate::support::Reply {
    let request = Request::builder().method(method).uri("/v2").header("origin", origin);
    let request = request.header("access-control-request-method", "POST");
    app.send(request.body(Body::empty()).unwrap()).await
}

#[tokio::test]
async fn pages_of_other_origins_are_let_in_only_if_they_are_named() {
    let closed = app_with(|_| {});
    let reply = from_page(&closed, "GET", "https://a.example").await;
    assert_eq!(reply.header("access-control-allow-origin"), None);
    assert_eq!(from_page(&closed, "OPTIONS", "https://a.example").await.status, 405);

    let named = app_with(|state| {
        state.cors_origins = vec!["https://a.example".to_owned()];
        state.keys = Some(Arc::new(ArcSwap::from_pointee(["k"].iter().collect())));
    });
    // A browser asks first, and sends no key with that.
    let reply = from_page(&named, "OPTIONS", "https://a.example").await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("access-control-allow-origin"), Some("https://a.example"));
    assert!(reply.header("access-control-allow-headers").unwrap().contains("inference-header-content-length"));
    let reply = from_page(&named, "GET", "https://a.example").await;
    assert_eq!((reply.status.as_u16(), reply.header("access-control-allow-origin")), (401, Some("https://a.example")));
    assert!(reply.header("access-control-expose-headers").unwrap().contains("inference-header-content-length"));
    assert_eq!(from_page(&named, "GET", "https://b.example").await.header("access-control-allow-origin"), None);

    let any = app_with(|state| state.cors_origins = vec!["*".to_owned()]);
    let reply = from_page(&any, "GET", "https://b.example").await;
    assert_eq!((reply.status.as_u16(), reply.header("access-control-allow-origin")), (200, Some("*")));
}

const ONE: [&[u8]; 2] = [include_bytes!("../tls/one.crt"), include_bytes!("../tls/one.key")];
const TWO: [&[u8]; 2] = [include_bytes!("../tls/two.crt"), include_bytes!("../tls/two.key")];

/// A connection of a client that trusts this certificate and nothing else.
async fn trusting(certificate: &[u8], server: TcpStream, protocol: &[u8]) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(certificate).unwrap()).unwrap();
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![protocol.to_vec()];
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, server).await
}

#[tokio::test]
async fn a_new_certificate_is_for_new_connections_and_the_old_ones_live_on() {
    let tls = Tls::new(ONE[0], ONE[1]).unwrap();
    let (app, _jobs) = app_with_jobs(vec![echo("m", vec![tensor("x", DataType::Uint8)])], 4);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(listener, app.router.clone(), limits(), Some(tls.clone()), app.phase.subscribe()));
    let connect = || async { TcpStream::connect(address).await.unwrap() };

    let mut first = trusting(ONE[0], connect().await, b"http/1.1").await.unwrap();
    first.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    assert!(read_response(&mut first).await.0.starts_with("http/1.1 200"));

    assert_eq!(tls.replace(TWO[0], ONE[1]), Err("the key is not that of the certificate".to_owned()));
    tls.replace(TWO[0], TWO[1]).unwrap();
    assert!(trusting(ONE[0], connect().await, b"http/1.1").await.is_err(), "the old certificate is still shown");
    let second = trusting(TWO[0], connect().await, b"h2").await.unwrap();
    assert_eq!(second.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    drop(second);
    first.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    assert!(read_response(&mut first).await.0.starts_with("http/1.1 200"), "the old connection has ended");

    // Who speaks in the clear is not answered, and does no harm.
    let mut clear = connect().await;
    clear.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    drop(clear);
}
