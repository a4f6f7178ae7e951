//! What a call may cost, and when it must end.

use crate::support::{BODY_LIMIT, echo, give_back, tensor};
use crate::{Calls, calls, calls_with, echo_calls, raw};
use arc_swap::ArcSwap;
use axum::body::Body;
use axum::http::{Request, StatusCode, Version};
use axum::response::Response;
use bytes::Bytes;
use concertina::grpc::proto::{ModelInferRequest, ServerLiveRequest};
use concertina::http::Phase;
use concertina::tensor::DataType;
use futures_util::StreamExt as _;
use http_body_util::{BodyExt as _, StreamBody};
use prost::Message as _;
use std::convert::Infallible;
use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;
use tonic::Code;
use tower::ServiceExt as _;

const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";

fn call(path: &str, body: Body) -> Request<Body> {
    let request = Request::post(path).version(Version::HTTP_2).header("content-type", "application/grpc");
    request.body(body).unwrap()
}

/// Frames, and then no end.
fn open(frames: Vec<Vec<u8>>) -> Body {
    let frames = frames.into_iter().map(|bytes| Ok::<_, Infallible>(http_body::Frame::data(Bytes::from(bytes))));
    Body::new(StreamBody::new(futures_util::stream::iter(frames).chain(futures_util::stream::pending())))
}

fn framed(flag: u8, message: &[u8]) -> Vec<u8> {
    [&[flag][..], &u32::try_from(message.len()).unwrap().to_be_bytes(), message].concat()
}

/// The status of a response, wherever it stands in it.
async fn code(response: Response) -> Code {
    let (parts, body) = response.into_parts();
    assert_eq!(parts.status, StatusCode::OK);
    let trailers = body.collect().await.unwrap().trailers().cloned().unwrap_or_default();
    let status = parts.headers.get("grpc-status").or(trailers.get("grpc-status")).unwrap();
    Code::from_bytes(status.as_bytes())
}

async fn send(calls: &Calls, request: Request<Body>) -> Response {
    calls.router.clone().oneshot(request).await.unwrap()
}

#[tokio::test]
async fn a_message_that_announces_too_much_is_refused_by_its_first_bytes() {
    let calls = echo_calls(DataType::Uint8);
    let length = u32::try_from(BODY_LIMIT + 1).unwrap().to_be_bytes();
    let body = open(vec![vec![0], length.to_vec()]);
    assert_eq!(code(send(&calls, call(INFER, body)).await).await, Code::ResourceExhausted);
    let largest = vec![1; BODY_LIMIT - 100];
    let message = raw(DataType::Uint8, &[1, largest.len() as i64], &largest);
    assert!(calls.client().model_infer(message).await.is_ok());
}

#[tokio::test]
async fn a_message_grows_no_larger_when_it_is_inflated() {
    let calls = echo_calls(DataType::Uint8);
    let message = raw(DataType::Uint8, &[1, 4 * BODY_LIMIT as i64], &vec![0; 4 * BODY_LIMIT]).encode_to_vec();
    let mut deflated = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    deflated.write_all(&message).unwrap();
    let bomb = deflated.finish().unwrap();
    assert!(bomb.len() < BODY_LIMIT / 10);
    let mut request = call(INFER, Body::from(framed(1, &bomb)));
    request.headers_mut().insert("grpc-encoding", "gzip".parse().unwrap());
    assert_eq!(code(send(&calls, request).await).await, Code::ResourceExhausted);
}

#[tokio::test(start_paused = true)]
async fn a_message_that_does_not_come_is_given_up() {
    let calls = echo_calls(DataType::Uint8);
    for frames in [vec![], vec![vec![0, 0]], vec![framed(0, &[1, 2, 3])[..7].to_vec()]] {
        let response = tokio::time::timeout(Duration::from_secs(60), send(&calls, call(INFER, open(frames)))).await;
        assert_eq!(code(response.expect("given up")).await, Code::DeadlineExceeded);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_may_be_silent_between_messages_but_not_within_one() {
    let calls = echo_calls(DataType::Uint8);
    let message = framed(0, &raw(DataType::Uint8, &[1, 1], &[1]).encode_to_vec());
    let later = |frames: Vec<Vec<u8>>| {
        let frames = futures_util::stream::iter(frames).then(|bytes| async move {
            tokio::time::sleep(Duration::from_secs(100)).await;
            Ok::<_, Infallible>(http_body::Frame::data(Bytes::from(bytes)))
        });
        call("/inference.GRPCInferenceService/ModelStreamInfer", Body::new(StreamBody::new(frames)))
    };
    let (first, second) = message.split_at(9);
    assert_eq!(code(send(&calls, later(vec![message.clone(), message.clone()])).await).await, Code::Ok);
    let halves = vec![message.clone(), first.to_vec(), second.to_vec()];
    assert_eq!(code(send(&calls, later(halves)).await).await, Code::DeadlineExceeded);
    assert_eq!(calls.failures(), [None; 3]);
}

#[tokio::test]
async fn messages_count_among_the_bodies_of_all_requests() {
    let (calls, mut jobs) = calls(vec![echo("m", vec![tensor("x", DataType::Uint8)])], 16);
    let size = BODY_LIMIT - 100;
    let large = || raw(DataType::Uint8, &[1, size as i64], &vec![1; size]);
    let (mut one, mut two, mut three) = (calls.client(), calls.client(), calls.client());
    let mut held = Box::pin(async { tokio::join!(one.model_infer(large()), two.model_infer(large())) });
    let mut waiting = Vec::new();
    while waiting.len() < 2 {
        tokio::select! {
            _ = &mut held => panic!("nobody has answered"),
            job = jobs.recv() => waiting.push(job.unwrap()),
        }
    }
    let status = three.model_infer(raw(DataType::Uint8, &[1, 4096], &[1; 4096])).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    for job in waiting {
        job.reply.send(give_back(&job.request)).unwrap();
    }
    let (first, second) = held.await;
    assert!(first.is_ok() && second.is_ok());
    let (answer, ()) = tokio::join!(three.model_infer(raw(DataType::Uint8, &[1, 1], &[1])), async {
        let job = jobs.recv().await.unwrap();
        job.reply.send(give_back(&job.request)).unwrap();
    });
    assert!(answer.is_ok());
}

#[tokio::test]
async fn a_stream_runs_no_more_requests_than_it_may() {
    let (calls, mut jobs) = calls(vec![echo("m", vec![tensor("x", DataType::Uint8)])], 16);
    let requests = futures_util::stream::iter((0..9).map(|_| raw(DataType::Uint8, &[1, 1], &[1])));
    let mut answers = calls.client().model_stream_infer(requests).await.unwrap().into_inner();
    let mut first = Box::pin(answers.message());
    let mut running = Vec::new();
    while running.len() < 4 {
        tokio::select! {
            _ = &mut first => panic!("nobody has answered"),
            job = jobs.recv() => running.push(job.unwrap()),
        }
    }
    tokio::select! {
        biased;
        _ = &mut first => panic!("nobody has answered"),
        _ = jobs.recv() => panic!("a fifth request runs"),
        () = tokio::task::yield_now() => {}
    }
    for job in running {
        job.reply.send(give_back(&job.request)).unwrap();
    }
    assert!(first.await.unwrap().is_some());
}

#[tokio::test]
async fn a_closing_server_ends_streams_after_what_they_carry() {
    let (calls, mut jobs) = calls(vec![echo("m", vec![tensor("x", DataType::Uint8)])], 16);
    let requests =
        futures_util::stream::iter([raw(DataType::Uint8, &[1, 1], &[1])]).chain(futures_util::stream::pending());
    let mut answers = calls.client().model_stream_infer(requests).await.unwrap().into_inner();
    let mut first = Box::pin(answers.message());
    let job = tokio::select! {
        _ = &mut first => panic!("nobody has answered"),
        job = jobs.recv() => job.unwrap(),
    };
    calls.server.phase.send_replace(Phase::Closing);
    job.reply.send(give_back(&job.request)).unwrap();
    assert!(first.await.unwrap().unwrap().infer_response.is_some());
    assert_eq!(answers.message().await.unwrap_err().code(), Code::Unavailable);
}

#[tokio::test]
async fn with_keys_only_health_checks_and_their_holders_are_answered() {
    let keys = Arc::new(ArcSwap::from_pointee(["alpha"].iter().collect()));
    let (calls, _jobs) =
        calls_with(vec![echo("m", vec![tensor("x", DataType::Uint8)])], 4, |state| state.keys = Some(keys));
    let live = |authorization: Option<&str>| {
        let mut request = tonic::Request::new(ServerLiveRequest {});
        if let Some(value) = authorization {
            request.metadata_mut().insert("authorization", value.parse().unwrap());
        }
        request
    };
    let mut client = calls.client();
    for wrong in [None, Some("Bearer beta"), Some("alpha")] {
        let status = client.server_live(live(wrong)).await.unwrap_err();
        assert_eq!(status.code(), Code::Unauthenticated, "{status:?}");
    }
    assert!(client.server_live(live(Some("Bearer alpha"))).await.unwrap().into_inner().live);
    let check = tonic_health::pb::HealthCheckRequest::default();
    assert!(tonic_health::pb::health_client::HealthClient::new(calls.service()).check(check).await.is_ok());
}

#[tokio::test]
async fn what_is_no_call_of_ours_has_an_answer() {
    let calls = echo_calls(DataType::Uint8);
    let unknown = call("/other.Service/Method", Body::empty());
    assert_eq!(code(send(&calls, unknown).await).await, Code::Unimplemented);
    let method = call("/inference.GRPCInferenceService/Nothing", Body::empty());
    assert_eq!(code(send(&calls, method).await).await, Code::Unimplemented);
    for body in [framed(0, b"\xff\xff\xff"), framed(7, b""), framed(1, b"x"), vec![0, 0]] {
        let response = send(&calls, call(INFER, Body::from(body.clone()))).await;
        assert_ne!(code(response).await, Code::Ok, "{body:?}");
    }
    let old = Request::get("/v2/health/live").body(Body::empty()).unwrap();
    assert_eq!(send(&calls, old).await.status(), StatusCode::HTTP_VERSION_NOT_SUPPORTED);
    assert!(calls.client().model_infer(ModelInferRequest::default()).await.is_err());
}
