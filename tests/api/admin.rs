//! The admin routes: who may use them, what they answer, and that a changed limit limits.

use crate::support::{App, Reply, app_with_admin, app_with_jobs};
use axum::body::{Body, Bytes};
use axum::http::Request;
use concertina::admin::Memory;
use concertina::clock::Clock;
use concertina::http::{Admin, MemoryChange};
use concertina::memory::{Arena, ArenaKind, ArenaOptions, Device, DeviceOptions, HOST_ALIGNMENT, Host};
use concertina::units::{ByteSize, DeviceId, Instant};
use http_body::Frame;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::task::{Context, Poll};
use tokio::sync::Notify;

const TOKEN: &str = "correct-horse/battery+staple=";
const PATH: &str = "/admin/memory";
const MIB: u64 = 1 << 20;

async fn send(app: &App, method: &str, authorization: Option<&[u8]>, body: impl Into<Body>) -> Reply {
    let mut request = Request::builder().method(method).uri(PATH);
    if let Some(authorization) = authorization {
        request = request.header("Authorization", authorization);
    }
    app.send(request.body(body.into()).unwrap()).await
}

async fn read(app: &App) -> Value {
    let reply = send(app, "GET", Some(format!("Bearer {TOKEN}").as_bytes()), "").await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

async fn change(app: &App, body: impl Into<Body>) -> Reply {
    send(app, "POST", Some(format!("Bearer {TOKEN}").as_bytes()), body).await
}

/// Routes that do nothing.
pub(crate) fn nothing() -> Admin {
    Admin { token: "t".to_owned(), read: Box::new(|| json!({})), change: Box::new(|_: &MemoryChange| Ok(json!({}))) }
}

/// Hooks that count how often they are called.
fn counting(token: &str) -> (App, Arc<AtomicU32>) {
    let calls = Arc::new(AtomicU32::new(0));
    let [read, change] = [Arc::clone(&calls), Arc::clone(&calls)];
    let admin = Admin {
        token: token.to_owned(),
        read: Box::new(move || json!({"read": read.fetch_add(1, SeqCst)})),
        change: Box::new(move |_: &MemoryChange| Ok(json!({"change": change.fetch_add(1, SeqCst)}))),
    };
    assert!(!format!("{admin:?}").contains("horse"));
    (app_with_admin(admin), calls)
}

/// The host with a limit of 256 MiB.
struct Fixture {
    app: App,
    device: Device,
    look: Arc<Notify>,
}

fn fixture() -> Fixture {
    let limit = ByteSize(256 * MIB);
    let options = DeviceOptions { id: DeviceId(0), limit, headroom: ByteSize::ZERO, alignment: HOST_ALIGNMENT };
    let device = Device::new(Box::new(Host::new()), options);
    let look = Arc::new(Notify::new());
    let memory = Memory { devices: vec![device.clone()], clock: Clock::start(), look: Arc::clone(&look) };
    Fixture { app: app_with_admin(memory.admin(TOKEN.to_owned())), device, look }
}

impl Fixture {
    /// An arena that is idle, with so many bytes committed.
    fn idle(&self, bytes: u64) -> Arena {
        let options =
            ArenaOptions { label: "m/run".to_owned(), kind: ArenaKind::Run, priority: 1, address_space: 1 << 30 };
        let arena = self.device.arena(options).unwrap();
        arena.begin_run(Instant(1));
        arena.ensure(bytes as usize).unwrap();
        let block = arena.allocate(bytes as usize).unwrap();
        arena.free(block).unwrap();
        arena.end_run(Instant(1));
        arena
    }

    /// Whether the sampler has been told to look since the last call.
    async fn looks(&self) -> bool {
        tokio::select! {
            biased;
            () = self.look.notified() => true,
            () = std::future::ready(()) => false,
        }
    }
}

#[tokio::test]
async fn without_a_token_there_are_no_such_routes() {
    let (app, _jobs) = app_with_jobs(vec![], 1);
    let unknown = app.get("/nothing").await;
    for method in ["GET", "HEAD", "POST", "PUT", "DELETE"] {
        for authorization in [None, Some(&b"Bearer "[..]), Some(b"Bearer x")] {
            let reply = send(&app, method, authorization, "{}").await;
            assert_eq!(reply.status, 404, "{method}");
            assert_eq!(reply.header("www-authenticate"), None);
            if method != "HEAD" {
                assert_eq!(reply.json(), unknown.json(), "{method}");
            }
        }
    }
}

#[tokio::test]
async fn whoever_has_no_token_learns_and_changes_nothing() {
    let (app, calls) = counting(TOKEN);
    let shorter = format!("Bearer {}", &TOKEN[..TOKEN.len() - 1]);
    let longer = format!("Bearer {TOKEN}x");
    let other = format!("Bearer {}", TOKEN.to_uppercase());
    let basic = format!("Basic {TOKEN}");
    let split = format!("Bearer x {TOKEN}");
    let wrong = ["", "Bearer", "Bearer ", "Bearer x", TOKEN, "bearer\u{ff}", &shorter, &longer, &other, &basic, &split];
    for authorization in std::iter::once(None).chain(wrong.into_iter().map(Some)) {
        for (method, body) in [("GET", ""), ("HEAD", ""), ("POST", "{}"), ("POST", "nonsense")] {
            let reply = send(&app, method, authorization.map(str::as_bytes), body).await;
            assert_eq!(reply.status, 401, "{method} {authorization:?}");
            assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
            if method != "HEAD" {
                assert_eq!(reply.error().1, "unauthorized");
                assert!(!reply.text().contains("horse"));
            }
        }
    }
    assert_eq!(calls.load(SeqCst), 0);
    for authorization in [format!("Bearer {TOKEN}"), format!("bearer {TOKEN}"), format!("BEARER   {TOKEN}")] {
        assert_eq!(send(&app, "GET", Some(authorization.as_bytes()), "").await.status, 200, "{authorization}");
    }
    assert_eq!(calls.load(SeqCst), 3);
    assert_eq!(send(&app, "PUT", None, "").await.status, 405);
}

#[tokio::test]
async fn an_empty_token_opens_nothing() {
    let (app, calls) = counting("");
    for authorization in [None, Some(&b"Bearer "[..]), Some(b"Bearer"), Some(b"")] {
        assert_eq!(send(&app, "POST", authorization, "{}").await.status, 401);
    }
    assert_eq!(calls.load(SeqCst), 0);
}

#[tokio::test]
async fn strangers_get_no_byte_of_their_body_read() {
    let (app, _) = counting(TOKEN);
    let reply = send(&app, "POST", None, Body::new(Unread)).await;
    assert_eq!((reply.status.as_u16(), reply.header("connection")), (401, Some("close")));
}

/// A body that must not be looked at.
struct Unread;

impl http_body::Body for Unread {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        panic!("it was read")
    }
}

#[tokio::test]
async fn bodies_have_a_limit_of_64_kib() {
    let (app, calls) = counting(TOKEN);
    let padded = |length: usize| format!("{{}}{}", " ".repeat(length - 2));
    assert_eq!(change(&app, padded(64 << 10)).await.status, 200);
    let reply = change(&app, padded((64 << 10) + 1)).await;
    assert_eq!((reply.status.as_u16(), reply.error().1.as_str()), (413, "body_too_large"));
    assert_eq!(calls.load(SeqCst), 1);
}

#[tokio::test]
async fn a_bad_change_names_the_key_and_what_is_allowed_and_changes_nothing() {
    let fixture = fixture();
    let before = (fixture.device.stats().limit, fixture.device.stats().headroom);
    for (body, expected) in [
        ("", &["the body must be a JSON object"][..]),
        ("[]", &["the body must be a JSON object"]),
        (r#"[0,"1MiB","1MiB"]"#, &["the body must be a JSON object"]),
        ("{", &["the body must be a JSON object", "line 1"]),
        ("{} {}", &["trailing characters"]),
        (r#"{"limt":"1GiB"}"#, &["`limt`", "expected one of `device`, `limit`, `headroom`"]),
        (r#"{"limit":"1GiB","limit":"2GiB"}"#, &["duplicate field `limit`"]),
        (
            r#"{"limit":"64mib"}"#,
            &[r#"limit = "64mib": expected "auto", a part of the device such as "80%", or a size"#],
        ),
        (r#"{"limit":0}"#, &["limit = 0: expected ", "from 1.0 MiB to 1.0 PiB"]),
        (r#"{"limit":"101%"}"#, &[r#"limit = "101%": expected "#]),
        (r#"{"limit":null}"#, &["limit = null: expected "]),
        (r#"{"limit":18446744073709551615}"#, &["limit = 18446744073709551615: expected "]),
        (r#"{"limit":{"$__toml_private_datetime":"1979-05-27"}}"#, &["limit = ", ": expected "]),
        (r#"{"headroom":-1}"#, &["headroom = -1: expected a size", "from 0 B to 1.0 PiB"]),
        (r#"{"headroom":"10%"}"#, &[r#"headroom = "10%": expected a size"#]),
        (r#"{"device":1,"limit":"1GiB"}"#, &["device = 1: expected the number of a device: 0"]),
        (r#"{"device":"gpu"}"#, &[r#"device = "gpu": expected the number of a device: 0"#]),
        (r#"{"limit":"1GiB","headroom":true}"#, &["headroom = true: expected "]),
        (r#"{"device":-1,"limit":1.5,"headroom":[]}"#, &["device = -1", "limit = 1.5", "headroom = []"]),
    ] {
        let reply = change(&fixture.app, body).await;
        assert_eq!(reply.status, 400, "{body}: {}", reply.text());
        let (text, code) = reply.error();
        assert_eq!(code, "invalid_request");
        assert!(expected.iter().all(|part| text.contains(part)), "{body}: {text:?} lacks one of {expected:?}");
        let stats = fixture.device.stats();
        assert_eq!((stats.limit, stats.headroom), before, "{body}");
        assert!(!fixture.looks().await, "{body}");
    }
}

#[tokio::test]
async fn every_number_of_the_ledger_is_shown() {
    let fixture = fixture();
    let arena = fixture.idle(8 * MIB);
    arena.allocate(1 << 40).unwrap_err();
    let json = read(&fixture.app).await;
    let device = &json["devices"][0];
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ");
    assert_eq!(
        keys(device),
        "allocated arenas budget capacity committed counters device free headroom last_failure limit margin outside total"
    );
    assert_eq!(keys(&device["counters"]), "commits decommits failures reclaimed trimmed");
    assert_eq!(
        keys(&device["arenas"][0]),
        "active allocated allocations blocks denied fragmentation free frees granules in_run kind label largest_free \
         last_denied peak_active peak_allocated peak_reserved priority reserved"
    );
    let stats = fixture.device.stats();
    assert_eq!(device["limit"], 256 * MIB);
    assert_eq!(device["committed"], stats.committed.0);
    assert_eq!(device["total"], stats.total.0);
    let shown = &device["arenas"][0];
    assert_eq!((&shown["label"], &shown["kind"]), (&json!("m/run"), &json!("run")));
    assert_eq!(shown["reserved"], arena.stats().reserved.0);
    assert_eq!(shown["peak_allocated"], 8 * MIB);
    assert_eq!(shown["last_denied"]["wanted"], 1u64 << 40);
    assert_eq!((&shown["in_run"], &shown["denied"], &shown["fragmentation"]), (&json!(false), &json!(1), &json!(0.0)));
    assert!(device["budget"].as_u64() <= device["capacity"].as_u64());
}

#[tokio::test]
async fn a_lower_limit_shrinks_an_idle_arena_at_once() {
    let fixture = fixture();
    let arena = fixture.idle(64 * MIB);
    assert!(fixture.device.stats().committed >= ByteSize(64 * MIB));
    assert!(!fixture.looks().await);
    let reply = change(&fixture.app, r#"{"device":0,"limit":"16MiB"}"#).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let committed = fixture.device.stats().committed;
    assert!(committed <= ByteSize(16 * MIB), "{committed}");
    assert_eq!(arena.stats().reserved, committed);
    let device = &reply.json()["devices"][0];
    assert_eq!((&device["limit"], &device["committed"]), (&json!(16 * MIB), &json!(committed.0)));
    assert!(device["capacity"].as_u64().unwrap() <= 16 * MIB);
    assert!(fixture.looks().await, "the scheduler has to hear of it");
    // And back.
    let reply = change(&fixture.app, json!({"limit": 128 * MIB}).to_string()).await;
    assert_eq!(reply.json()["devices"][0]["limit"], 128 * MIB);
    assert!(fixture.looks().await);
    arena.begin_run(Instant(2));
    arena.ensure(64 << 20).unwrap();
}

#[tokio::test]
async fn limits_are_relative_to_the_device_and_keys_that_are_not_sent_stay() {
    let fixture = fixture();
    let total = fixture.device.stats().total.0;
    for (body, limit, headroom) in [
        (r#"{}"#, 256 * MIB, 0),
        (r#"{"headroom":"64MiB"}"#, 256 * MIB, 64 * MIB),
        (r#"{"limit":"auto"}"#, total, 64 * MIB),
        (r#"{"device":"0","limit":"50%","headroom":0}"#, total / 2, 0),
        (r#" {"limit":"1.5GiB"} "#, 1536 * MIB, 0),
    ] {
        let reply = change(&fixture.app, body).await;
        assert_eq!(reply.status, 200, "{body}: {}", reply.text());
        let device = &reply.json()["devices"][0];
        assert_eq!((&device["limit"], &device["headroom"]), (&json!(limit), &json!(headroom)), "{body}");
    }
}

#[tokio::test]
async fn a_headroom_that_is_lacking_is_made_at_once() {
    let fixture = fixture();
    let _arena = fixture.idle(64 * MIB);
    let reply = change(&fixture.app, r#"{"headroom":"1TiB"}"#).await;
    let device = &reply.json()["devices"][0];
    assert_eq!((&device["committed"], &device["budget"]), (&json!(0), &json!(0)));
}
