//! What a call may cost, and when it must end.

use crate::support::{BODY_LIMIT, echo, give_back, tensor};
use crate::{Calls, calls, calls_with, echo_calls, raw};
use arc_swap::ArcSwap;
use axum::body::Body;
use axum::http::{Request, StatusCode, Version};
use axum::response::Response;
use bytes::Bytes;
use concertina::grpc::proto::{ModelInferRequest, ServerLiveRequest};
use concertina::http::{Admin, Phase};
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
    let bomb = zipped(&raw(DataType::Uint8, &[1, 4 * BODY_LIMIT as i64], &vec![0; 4 * BODY_LIMIT]));
    assert!(bomb.len() < BODY_LIMIT / 10);
    let mut request = call(INFER, Body::from(bomb));
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
        call(STREAM, Body::new(StreamBody::new(frames)))
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

/// A message that nothing follows: neither another one nor the end of the call.
fn unended(message: &ModelInferRequest) -> Request<Body> {
    call(INFER, open(vec![framed(0, &message.encode_to_vec())]))
}

fn zipped(message: &ModelInferRequest) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&message.encode_to_vec()).unwrap();
    framed(1, &gzip.finish().unwrap())
}

#[tokio::test]
async fn a_message_counts_until_its_call_has_ended_and_with_its_size_when_inflated() {
    let size = BODY_LIMIT - 100;
    let large = raw(DataType::Uint8, &[1, size as i64], &vec![1; size]);
    let compressed = || {
        let mut request = call(INFER, open(vec![zipped(&large)]));
        request.headers_mut().insert("grpc-encoding", "gzip".parse().unwrap());
        request
    };
    assert!(zipped(&large).len() < BODY_LIMIT / 10);
    let whole = || unended(&large);
    for request in [&compressed as &dyn Fn() -> Request<Body>, &whole] {
        let calls = echo_calls(DataType::Uint8);
        let (mut one, mut two) = (Box::pin(send(&calls, request())), Box::pin(send(&calls, request())));
        let mut third = calls.client();
        let full = async {
            // The others come first; what is inflated has a word to this one between its pieces.
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            third.model_infer(raw(DataType::Uint8, &[1, 4096], &[1; 4096])).await.expect_err("the room is full")
        };
        let status = tokio::select! {
            biased;
            _ = &mut one => panic!("the call has not ended"),
            _ = &mut two => panic!("the call has not ended"),
            status = full => status,
        };
        assert_eq!(status.code(), Code::Unavailable, "{status:?}");
        drop((one, two));
        assert!(third.model_infer(large.clone()).await.is_ok(), "what they took is given back");
    }
}

#[tokio::test]
async fn a_small_message_does_not_become_a_large_one() {
    let calls = echo_calls(DataType::Uint8);
    // Inputs, outputs and raw contents of nothing; an input's dimensions; an input's parameters.
    let many = BODY_LIMIT / 4;
    let dims = [&[0x2a, 0x80, 0x80, 4, 0x1a, 0xfc, 0xff, 3][..], &vec![1; 65532]].concat();
    let parameters = [&[0x2a, 0x80, 0x80, 4][..], &[0x22, 0].repeat(32768)].concat();
    for (message, words) in [
        ([0x2a, 0].repeat(many), "inputs has more than"),
        ([0x32, 0].repeat(many), "outputs has more than"),
        ([0x3a, 0].repeat(many), "raw_input_contents has more than"),
        ([0x22, 0].repeat(many), "more than 4096 parameters"),
        (dims, "inputs[0].shape has more than 32 dimensions"),
        (parameters, "more than 4096 parameters"),
    ] {
        let response = send(&calls, call(INFER, Body::from(framed(0, &message)))).await;
        let status = tonic::Status::from_header_map(response.headers()).unwrap();
        assert_eq!(status.code(), Code::InvalidArgument, "{words}");
        assert!(status.message().contains(words), "{status:?}");
    }
    assert_eq!(calls.failures(), [], "nothing of it reached an inference");
}

#[tokio::test]
async fn typed_contents_count_before_they_are_unpacked() {
    let calls = echo_calls(DataType::Int64);
    // One byte on the wire is eight in memory: a third of what is allowed would be more than all there is room for.
    let elements = BODY_LIMIT / 3;
    let mut request = raw(DataType::Int64, &[1, elements as i64], &[]);
    request.raw_input_contents.clear();
    let list = vec![1; elements];
    let mut contents = vec![0x1a];
    prost::encoding::encode_varint(elements as u64, &mut contents);
    contents.extend(list);
    request.inputs[0].contents = Some(concertina::grpc::Contents::decode(&contents[..]).unwrap());
    let status = calls.client().model_infer(request).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
}

/// The bytes of these messages in frames that never end where a message does.
fn shifted(messages: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let all = messages.concat();
    let (first, rest) = all.split_at(messages[0].len() + 1);
    let mut frames = vec![first.to_vec()];
    frames.extend(rest.chunks(messages[0].len()).map(<[u8]>::to_vec));
    frames
}

const STREAM: &str = "/inference.GRPCInferenceService/ModelStreamInfer";

#[tokio::test(start_paused = true)]
async fn a_stream_without_pauses_has_the_room_and_the_time_of_one_message_for_each() {
    let calls = echo_calls(DataType::Uint8);
    let size = BODY_LIMIT / 4;
    let message = framed(0, &raw(DataType::Uint8, &[1, size as i64], &vec![1; size]).encode_to_vec());
    let frames = shifted(&vec![message; 12]);
    let frames = futures_util::stream::iter(frames).then(|bytes| async move {
        tokio::time::sleep(Duration::from_secs(20)).await;
        Ok::<_, Infallible>(http_body::Frame::data(Bytes::from(bytes)))
    });
    let response = send(&calls, call(STREAM, Body::new(StreamBody::new(frames)))).await;
    assert_eq!(code(response).await, Code::Ok);
    assert_eq!(calls.failures(), [None; 12]);
}

#[tokio::test]
async fn a_stream_without_pauses_ends_when_the_server_closes() {
    let calls = echo_calls(DataType::Uint8);
    let message = framed(0, &raw(DataType::Uint8, &[1, 1], &[1]).encode_to_vec());
    let frames = shifted(&vec![message; 3000]);
    calls.server.phase.send_replace(Phase::Serving);
    let close = calls.server.phase.clone();
    let mut sent = 0;
    let frames = frames.into_iter().map(move |bytes| {
        sent += 1;
        if sent == 100 {
            close.send_replace(Phase::Closing);
        }
        Ok::<_, Infallible>(http_body::Frame::data(Bytes::from(bytes)))
    });
    let body = Body::new(StreamBody::new(futures_util::stream::iter(frames)));
    assert_eq!(code(send(&calls, call(STREAM, body)).await).await, Code::Unavailable);
    assert!((90..=100).contains(&calls.failures().len()), "{}", calls.failures().len());
}

#[tokio::test]
async fn a_call_of_one_message_has_no_second_one() {
    let calls = echo_calls(DataType::Uint8);
    let message = framed(0, &raw(DataType::Uint8, &[1, 1], &[1]).encode_to_vec());
    let response = send(&calls, call(INFER, Body::from([&message[..], &message].concat()))).await;
    assert_eq!(code(response).await, Code::InvalidArgument);
}

#[tokio::test(start_paused = true)]
async fn strangers_and_large_messages_are_not_read_where_the_admin_token_is_asked_for() {
    const LOAD: &str = "/inference.GRPCInferenceService/RepositoryModelLoad";
    let token = "let-me-in".to_owned();
    let (calls, _jobs) = calls_with(vec![], 4, |state| {
        let nothing = || serde_json::Value::Null;
        let admin = Admin { token, read: Box::new(nothing), change: Box::new(|_| Ok(serde_json::Value::Null)) };
        state.admin = Some(admin);
    });
    let begun = |length: u32| open(vec![[&[0][..], &length.to_be_bytes(), b"abc"].concat()]);
    let with = |length: u32, token: &str| {
        let mut request = call(LOAD, begun(length));
        request.headers_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        request
    };
    assert_eq!(code(send(&calls, call(LOAD, begun(100))).await).await, Code::Unauthenticated);
    assert_eq!(code(send(&calls, with(100, "wrong")).await).await, Code::Unauthenticated);
    assert_eq!(code(send(&calls, with(2 << 20, "let-me-in")).await).await, Code::ResourceExhausted);
    assert_eq!(code(send(&calls, with(100, "let-me-in")).await).await, Code::DeadlineExceeded, "it is waited for");
    let ready = "/inference.GRPCInferenceService/ModelReady";
    assert_eq!(code(send(&calls, call(ready, begun(65537))).await).await, Code::ResourceExhausted);
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
