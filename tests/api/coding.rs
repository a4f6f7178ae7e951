//! Compressed bodies, in both directions.

use crate::support::{App, BODY_LIMIT, Reply, app_answering, echo, echo_app, give_back, tensor};
use axum::body::Body;
use axum::http::Request;
use concertina::tensor::DataType;
use flate2::Compression;
use flate2::read::{DeflateDecoder, GzDecoder, ZlibDecoder};
use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
use std::io::{Read, Write};

fn app() -> App {
    echo_app(vec![tensor("x", DataType::Uint8)])
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zlib(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn raw(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

async fn send(app: &App, coding: &str, body: Vec<u8>, more: &[(&str, &str)]) -> Reply {
    let mut request = Request::post("/v2/models/m/infer").header("content-encoding", coding);
    for (name, value) in more {
        request = request.header(*name, *value);
    }
    app.send(request.body(Body::from(body)).unwrap()).await
}

const JSON: &str = r#"{"inputs":[{"name":"x","shape":[1,3],"datatype":"UINT8","data":[1,2,3]}]}"#;

#[tokio::test]
async fn gzip_and_deflate_come_in_whatever_the_wrapper() {
    let app = app();
    let twice = [gzip(&JSON.as_bytes()[..9]), gzip(&JSON.as_bytes()[9..])].concat();
    for (coding, body) in [
        ("gzip", gzip(JSON.as_bytes())),
        ("x-gzip", gzip(JSON.as_bytes())),
        ("GZIP", twice),
        ("deflate", zlib(JSON.as_bytes())),
        ("deflate", raw(JSON.as_bytes())),
        ("deflate", gzip(JSON.as_bytes())),
        ("identity", JSON.into()),
        ("", JSON.into()),
    ] {
        let reply = send(&app, coding, body, &[]).await;
        assert_eq!(reply.status, 200, "{coding}: {}", reply.text());
        assert_eq!(reply.json()["outputs"][0]["data"], serde_json::json!([1, 2, 3]));
    }
}

#[tokio::test]
async fn the_length_of_the_json_counts_bytes_before_compression() {
    let json = r#"{"inputs":[{"name":"x","shape":[1,3],"datatype":"UINT8","parameters":{"binary_data_size":3}}]}"#;
    let body = gzip(&[json.as_bytes(), &[7, 8, 9]].concat());
    let reply = send(&app(), "gzip", body, &[("inference-header-content-length", &json.len().to_string())]).await;
    assert_eq!(reply.json()["outputs"][0]["data"], serde_json::json!([7, 8, 9]));
}

#[tokio::test]
async fn broken_and_unknown_codings_are_refused() {
    let app = app();
    let whole = gzip(JSON.as_bytes());
    let mut flipped = whole.clone();
    let end = flipped.len() - 6; // in the checksum
    flipped[end] ^= 1;
    for (coding, body) in [
        ("gzip", JSON.into()),
        ("gzip", Vec::new()),
        ("gzip", whole[..whole.len() - 1].to_vec()),
        ("gzip", flipped),
        ("gzip", [whole.clone(), b"more".to_vec()].concat()),
        ("gzip", zlib(JSON.as_bytes())),
        ("deflate", zlib(JSON.as_bytes())[..9].to_vec()),
        ("deflate", [zlib(JSON.as_bytes()), b"more".to_vec()].concat()),
    ] {
        let reply = send(&app, coding, body, &[]).await;
        assert_eq!((reply.status.as_u16(), &*reply.error().1), (400, "invalid_request"), "{coding}");
        assert!(reply.error().0.contains(coding), "{}", reply.text());
    }
    for coding in ["br", "zstd", "gzip, gzip"] {
        let reply = send(&app, coding, whole.clone(), &[]).await;
        assert_eq!((reply.status.as_u16(), reply.header("accept-encoding")), (415, Some("gzip, deflate")), "{coding}");
    }
}

/// The limit is one of what comes out: what goes in is a thousandth of it.
#[tokio::test]
async fn a_bomb_is_413_and_leaves_room_for_others() {
    let app = app();
    for body in [vec![b' '; BODY_LIMIT + 1], vec![b' '; 64 * BODY_LIMIT]] {
        let bomb = gzip(&body);
        assert!(bomb.len() < BODY_LIMIT / 10);
        for _ in 0..4 {
            let reply = send(&app, "gzip", bomb.clone(), &[]).await;
            assert_eq!((reply.status.as_u16(), &*reply.error().1), (413, "body_too_large"));
            assert_eq!(reply.header("connection"), None, "the body was read, so the connection lives on");
        }
    }
    let spaces = [JSON.as_bytes(), &vec![b' '; BODY_LIMIT - JSON.len()]].concat();
    assert_eq!(send(&app, "gzip", gzip(&spaces), &[]).await.status, 200, "exactly the limit");
}

fn large(value: impl Fn(usize) -> u8) -> String {
    let data: Vec<String> = (0..4000).map(|index| value(index).to_string()).collect();
    format!(r#"{{"inputs":[{{"name":"x","shape":[1,4000],"datatype":"UINT8","data":[{}]}}]}}"#, data.join(","))
}

async fn accepting(app: &App, accept: &str, path: &str, body: String) -> Reply {
    let request = Request::post(path).header("accept-encoding", accept).body(Body::from(body)).unwrap();
    app.send(request).await
}

#[tokio::test]
async fn answers_are_compressed_as_the_client_likes() {
    let app = app();
    let plain = accepting(&app, "identity", "/v2/models/m/infer", large(|_| 5)).await;
    assert_eq!(plain.header("content-encoding"), None);
    for accept in ["gzip", "deflate", "deflate, gzip", "gzip;q=0.5, deflate;q=0.9, br"] {
        let reply = accepting(&app, accept, "/v2/models/m/infer", large(|_| 5)).await;
        let coding = if accept == "gzip" { "gzip" } else { "deflate" };
        assert_eq!(reply.header("content-encoding"), Some(coding), "{accept}");
        assert_eq!(reply.header("content-length"), Some(&*reply.body.len().to_string()));
        assert!(reply.body.len() < plain.body.len() / 4);
        let mut out = Vec::new();
        match coding {
            "gzip" => GzDecoder::new(&reply.body[..]).read_to_end(&mut out).unwrap(),
            _ => ZlibDecoder::new(&reply.body[..]).read_to_end(&mut out).unwrap(),
        };
        assert_eq!(out, plain.body);
        assert!(DeflateDecoder::new(&reply.body[..]).read_to_end(&mut Vec::new()).is_err(), "zlib's wrapper is there");
    }
}

#[tokio::test]
async fn what_does_not_shrink_or_is_no_answer_stays_as_it_is() {
    let app = app_answering(vec![echo("m", vec![tensor("x", DataType::Uint8)])], give_back);
    let unchanged = async |body: String, path: &str, status: u16| {
        let reply = accepting(&app, "gzip", path, body).await;
        assert_eq!((reply.status.as_u16(), reply.header("content-encoding")), (status, None));
    };
    // Small; noise in binary form; errors.
    unchanged(JSON.to_owned(), "/v2/models/m/infer", 200).await;
    let noise = large(|index| {
        let mixed = (index as u32).wrapping_mul(2_654_435_761);
        (mixed ^ mixed >> 15).wrapping_mul(2_246_822_519).to_be_bytes()[0]
    });
    let binary = noise.replace(r#"{"inputs""#, r#"{"parameters":{"binary_data_output":true},"inputs""#);
    unchanged(binary, "/v2/models/m/infer", 200).await;
    unchanged(large(|_| 5).replace("UINT8", "INT8"), "/v2/models/m/infer", 400).await;
    unchanged(" ".repeat(5000), "/v2/repository/index", 400).await;
    for path in ["/v2", "/v2/models/m", "/v2/models/m/config", "/v2/models/stats", "/metrics"] {
        let request = Request::get(path).header("accept-encoding", "gzip, deflate").body(Body::empty()).unwrap();
        assert_eq!(app.send(request).await.header("content-encoding"), None, "{path}");
    }
}
