//! What calls answer, and what each failure is.

use crate::{calls, echo_calls, parameter, raw, set_state};
use concertina::batcher::{InferError, Rejection};
use concertina::grpc::Contents;
use concertina::grpc::proto::infer_parameter::ParameterChoice;
use concertina::grpc::proto::*;
use concertina::http::{Code as Word, Phase};
use concertina::model::ModelState;
use concertina::tensor::DataType;
use prost::Message as _;
use std::time::Duration;
use tonic::{Code, Request, Status};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};

fn word(status: &Status) -> &str {
    status.metadata().get("error-code").unwrap().to_str().unwrap()
}

#[tokio::test]
async fn raw_contents_come_back_with_names_and_shape() {
    let calls = echo_calls(DataType::Uint16);
    let request = ModelInferRequest { id: "a 1".to_owned(), ..raw(DataType::Uint16, &[2, 1], &[1, 2, 3, 4]) };
    let answer = calls.client().model_infer(request).await.unwrap().into_inner();
    assert_eq!((answer.id.as_str(), answer.model_name.as_str(), answer.model_version.as_str()), ("a 1", "m", "1"));
    let output = &answer.outputs[0];
    assert_eq!((output.name.as_str(), output.datatype.as_str(), &output.shape[..]), ("x", "UINT16", &[2, 1][..]));
    assert_eq!(answer.raw_output_contents, [&[1, 2, 3, 4][..]]);
    assert_eq!(calls.failures(), [None]);
}

#[tokio::test]
async fn typed_contents_are_the_same_request() {
    // Field 4 is that of unsigned integers, packed.
    let contents = Contents::decode(&[0x22, 3, 7, 0x80, 0x02][..]).unwrap();
    let mut request = raw(DataType::Uint16, &[1, 2], &[]);
    request.raw_input_contents.clear();
    request.inputs[0].contents = Some(contents);
    let answer = echo_calls(DataType::Uint16).client().model_infer(request).await.unwrap().into_inner();
    assert_eq!(answer.raw_output_contents, [&[7, 0, 0, 1][..]]);
    assert!(answer.outputs[0].contents.is_none());
}

#[tokio::test]
async fn bad_requests_name_the_field_and_the_remedy() {
    let calls = echo_calls(DataType::Fp32);
    let good = || raw(DataType::Fp32, &[1, 1], &[0; 4]);
    let with = |change: fn(&mut ModelInferRequest)| {
        let mut request = good();
        change(&mut request);
        request
    };
    for (request, code, words) in [
        (with(|it| it.model_name.clear()), Code::InvalidArgument, "name of the model is missing"),
        (with(|it| it.model_name = "n".into()), Code::NotFound, "model 'n' is not known"),
        (with(|it| it.model_version = "2".into()), Code::NotFound, "no version 2"),
        (with(|it| it.model_version = "v1".into()), Code::InvalidArgument, "'v1' is not"),
        (with(|it| it.model_version = "+1".into()), Code::InvalidArgument, "'+1' is not"),
        (with(|it| it.inputs[0].name = "y".into()), Code::InvalidArgument, "has no input 'y'"),
        (with(|it| it.inputs[0].datatype = "FLOAT".into()), Code::InvalidArgument, "inputs[0] ('x').datatype"),
        (with(|it| it.inputs[0].datatype = "FP64".into()), Code::InvalidArgument, "expects FP32"),
        (with(|it| it.inputs[0].shape = vec![-1, 1]), Code::InvalidArgument, "inputs[0] ('x').shape"),
        (with(|it| it.inputs[0].shape = vec![1; 33]), Code::InvalidArgument, "more than 32 dimensions"),
        (with(|it| it.inputs[0].shape = vec![2, 1]), Code::InvalidArgument, "needs 8"),
        (with(|it| it.inputs[0].shape = vec![i64::MAX, 9]), Code::InvalidArgument, "too many elements"),
        (with(|it| it.raw_input_contents.push(vec![].into())), Code::InvalidArgument, "raw_input_contents has 2"),
        (with(|it| it.raw_input_contents.clear()), Code::InvalidArgument, "has no data"),
        (with(|it| it.inputs[0].contents = Some(Contents::default())), Code::InvalidArgument, "send one of them"),
        (
            with(|it| {
                it.outputs
                    .push(model_infer_request::InferRequestedOutputTensor { name: "q".into(), ..Default::default() });
            }),
            Code::InvalidArgument,
            "no output 'q'",
        ),
        (
            with(|it| {
                let region = parameter(ParameterChoice::StringParam("r".into()));
                it.inputs[0].parameters.insert("shared_memory_region".into(), region);
            }),
            Code::NotFound,
            "region 'r'",
        ),
        (
            with(|it| {
                it.parameters.insert("priority".into(), parameter(ParameterChoice::StringParam("high".into())));
            }),
            Code::InvalidArgument,
            "parameter priority",
        ),
    ] {
        let status = calls.client().model_infer(request).await.expect_err(words);
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(words), "{words}: {status:?}");
    }
    assert!(calls.client().model_infer(good()).await.is_ok());
}

#[tokio::test]
async fn failures_of_the_batcher_have_the_code_that_http_has() {
    let retry_after = Duration::from_secs(7);
    for (error, code, expected, seconds) in [
        (InferError::Rejected(Rejection::QueueFull { retry_after }), Code::Unavailable, "overloaded", Some("7")),
        (InferError::Rejected(Rejection::DeadlineExceeded), Code::DeadlineExceeded, "deadline_exceeded", None),
        (
            InferError::Rejected(Rejection::TooLarge { needed: Default::default(), capacity: Default::default() }),
            Code::ResourceExhausted,
            "request_too_large",
            None,
        ),
        (InferError::Model("bad token".into()), Code::Internal, "device_error", None),
        (InferError::Closed, Code::Unavailable, "unavailable", Some("2")),
    ] {
        let (calls, mut jobs) =
            calls(vec![crate::support::echo("m", vec![crate::support::tensor("x", DataType::Bool)])], 4);
        let mut client = calls.client();
        let request = raw(DataType::Bool, &[1, 1], &[1]);
        let (answer, ()) = tokio::join!(client.model_infer(request), async {
            jobs.recv().await.unwrap().reply.send(Err(error)).unwrap();
        });
        let status = answer.unwrap_err();
        assert_eq!((status.code(), word(&status)), (code, expected));
        assert_eq!(status.metadata().get("retry-after").map(|value| value.to_str().unwrap()), seconds);
        assert!(calls.failures()[0].is_some());
    }
}

#[tokio::test]
async fn parameters_and_deadlines_reach_the_batcher() {
    let mut spec = crate::support::echo("m", vec![crate::support::tensor("x", DataType::Uint8)]);
    spec.settings.default_priority = 2;
    let (calls, mut jobs) = calls(vec![spec], 4);
    let mut request = raw(DataType::Uint8, &[1, 1], &[1]);
    request.parameters.insert("priority".into(), parameter(ParameterChoice::Uint64Param(1)));
    request.parameters.insert("timeout".into(), parameter(ParameterChoice::Int64Param(9_000_000)));
    request.parameters.insert("unknown".into(), parameter(ParameterChoice::DoubleParam(0.5)));
    let mut request = Request::new(request);
    request.set_timeout(Duration::from_secs(5));
    let mut client = calls.client();
    let seen = async {
        let job = jobs.recv().await.unwrap();
        let seen = (job.request.priority, job.request.timeout);
        job.reply.send(crate::support::give_back(&job.request)).unwrap();
        seen
    };
    let (answer, seen) = tokio::join!(client.model_infer(request), seen);
    assert_eq!(seen, (1, Some(Duration::from_secs(5))));
    assert!(answer.is_ok());
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_past_the_deadline_of_a_call() {
    let (calls, mut jobs) =
        calls(vec![crate::support::echo("m", vec![crate::support::tensor("x", DataType::Uint8)])], 4);
    let mut request = Request::new(raw(DataType::Uint8, &[1, 1], &[1]));
    request.set_timeout(Duration::from_secs(5));
    let mut client = calls.client();
    let (answer, mut job) = tokio::join!(client.model_infer(request), async { jobs.recv().await.unwrap() });
    assert_eq!(answer.unwrap_err().code(), Code::DeadlineExceeded);
    job.reply.closed().await;
    assert_eq!(calls.failures(), [Some(Word::DeadlineExceeded)]);
}

#[tokio::test]
async fn a_call_that_is_dropped_cancels_its_request() {
    let (calls, mut jobs) =
        calls(vec![crate::support::echo("m", vec![crate::support::tensor("x", DataType::Uint8)])], 4);
    let mut client = calls.client();
    let mut call = Box::pin(client.model_infer(raw(DataType::Uint8, &[1, 1], &[1])));
    let mut job = tokio::select! {
        _ = &mut call => panic!("nobody has answered"),
        job = jobs.recv() => job.unwrap(),
    };
    drop(call);
    job.reply.closed().await;
    assert_eq!(calls.failures(), []);
}

#[tokio::test]
async fn a_stream_answers_in_order_and_survives_bad_requests() {
    let calls = echo_calls(DataType::Uint8);
    let requests = (0..20u8).map(|n| {
        let bytes = if n == 7 { vec![n; 3] } else { vec![n] };
        ModelInferRequest { id: n.to_string(), ..raw(DataType::Uint8, &[1, 1], &bytes) }
    });
    let mut answers =
        calls.client().model_stream_infer(futures_util::stream::iter(requests)).await.unwrap().into_inner();
    for n in 0..20u8 {
        let answer = answers.message().await.unwrap().unwrap();
        let response = answer.infer_response.unwrap();
        assert_eq!(response.id, n.to_string());
        assert_eq!(
            response.parameters["triton_final_response"].parameter_choice,
            Some(ParameterChoice::BoolParam(true))
        );
        if n == 7 {
            assert!(answer.error_message.contains("has 3 bytes of data"), "{}", answer.error_message);
            assert!(response.outputs.is_empty());
        } else {
            assert_eq!((answer.error_message.as_str(), &response.raw_output_contents[0][..]), ("", &[n][..]));
        }
    }
    assert!(answers.message().await.unwrap().is_none());
    assert_eq!(calls.failures().iter().flatten().count(), 1);
}

#[tokio::test]
async fn the_server_and_its_models_say_what_they_are_and_whether_they_serve() {
    let calls = echo_calls(DataType::Fp16);
    let mut client = calls.client();
    assert!(client.server_live(ServerLiveRequest {}).await.unwrap().into_inner().live);
    assert!(client.server_ready(ServerReadyRequest {}).await.unwrap().into_inner().ready);
    let server = client.server_metadata(ServerMetadataRequest {}).await.unwrap().into_inner();
    assert!(server.name == "concertina" && server.extensions.contains(&"binary_tensor_data".to_owned()));
    let named = |name: &str| ModelMetadataRequest { name: name.into(), version: String::new() };
    let model = client.model_metadata(named("m")).await.unwrap().into_inner();
    assert_eq!((&model.versions[..], model.platform.as_str()), (&["1".to_owned()][..], "onnxruntime_onnx"));
    assert_eq!((model.inputs[0].datatype.as_str(), &model.inputs[0].shape[..]), ("FP16", &[-1, -1][..]));
    let config = ModelConfigRequest { name: "m".into(), version: "1".into() };
    let config = client.model_config(config).await.unwrap().into_inner().config.unwrap();
    assert_eq!((config.max_batch_size, &config.input[0].dims[..]), (8, &[-1][..]));
    assert_eq!(config.output[0].data_type, DataType::Fp16.config_name().parse_type());
    let index = client.repository_index(RepositoryIndexRequest::default()).await.unwrap().into_inner();
    assert_eq!((index.models[0].name.as_str(), index.models[0].state.as_str()), ("m", "READY"));

    let ready = |name: &str| ModelReadyRequest { name: name.into(), version: String::new() };
    assert!(client.model_ready(ready("m")).await.unwrap().into_inner().ready);
    assert_eq!(client.model_ready(ready("n")).await.unwrap_err().code(), Code::NotFound);
    set_state(&calls, ModelState::Loading);
    assert!(!client.model_ready(ready("m")).await.unwrap().into_inner().ready);
    assert!(!client.server_ready(ServerReadyRequest {}).await.unwrap().into_inner().ready);
    assert_eq!(client.model_metadata(named("m")).await.unwrap_err().code(), Code::Unavailable);
}

trait ParseType {
    fn parse_type(&self) -> i32;
}

impl ParseType for String {
    fn parse_type(&self) -> i32 {
        concertina::grpc::proto::DataType::from_str_name(self).unwrap() as i32
    }
}

#[tokio::test]
async fn shared_memory_is_answered_as_where_it_is_switched_off() {
    let calls = echo_calls(DataType::Uint8);
    let mut client = calls.client();
    let all = client.system_shared_memory_status(SystemSharedMemoryStatusRequest::default()).await.unwrap();
    assert!(all.into_inner().regions.is_empty());
    let one = CudaSharedMemoryStatusRequest { name: "r".into() };
    assert_eq!(client.cuda_shared_memory_status(one).await.unwrap_err().code(), Code::NotFound);
    let register = client.system_shared_memory_register(SystemSharedMemoryRegisterRequest::default()).await;
    assert_eq!(register.unwrap_err().code(), Code::Unimplemented);
}

#[tokio::test]
async fn the_largest_elements_stand_in_for_an_output() {
    let calls = echo_calls(DataType::Fp32);
    let values = [0.5f32, 4.0, -1.0, 2.0];
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let asked = |choice| {
        let parameters = [("classification".to_owned(), parameter(choice))].into();
        let output = model_infer_request::InferRequestedOutputTensor { name: "x".into(), parameters };
        ModelInferRequest { outputs: vec![output], ..raw(DataType::Fp32, &[2, 2], &bytes) }
    };
    let answer = calls.client().model_infer(asked(ParameterChoice::Int64Param(1))).await.unwrap().into_inner();
    assert_eq!((answer.outputs[0].datatype.as_str(), &answer.outputs[0].shape[..]), ("BYTES", &[2, 1][..]));
    assert_eq!(&answer.raw_output_contents[0][..], b"\x0a\0\0\x004.000000:1\x0a\0\0\x002.000000:1");
    let status = calls.client().model_infer(asked(ParameterChoice::Int64Param(-1))).await.unwrap_err();
    assert!(status.message().contains("classification"), "{status:?}");
    let many = vec![0u8; 4 * 40_000];
    let mut large = asked(ParameterChoice::Uint64Param(3));
    large.inputs[0].shape = vec![1, 40_000];
    large.raw_input_contents = vec![many.into()];
    let answer = calls.client().model_infer(large).await.unwrap().into_inner();
    assert_eq!(answer.outputs[0].shape, [1, 3], "an output that is ranked beside the others");
}

#[tokio::test]
async fn the_log_settings_are_shown_and_stay() {
    use log_settings_request::{SettingValue, setting_value::ParameterChoice as Wanted};
    use log_settings_response::setting_value::ParameterChoice as Shown;
    let calls = echo_calls(DataType::Uint8);
    let wanted = |choice: Option<Wanted>| LogSettingsRequest {
        settings: [("log_info".to_owned(), SettingValue { parameter_choice: choice })].into(),
    };
    for same in [LogSettingsRequest::default(), wanted(None), wanted(Some(Wanted::BoolParam(true)))] {
        let shown = calls.client().log_settings(same).await.unwrap().into_inner();
        assert_eq!(shown.settings["log_info"].parameter_choice, Some(Shown::BoolParam(true)));
    }
    let other = calls.client().log_settings(wanted(Some(Wanted::BoolParam(false)))).await.unwrap_err();
    assert_eq!(other.code(), Code::Unimplemented);
}

#[tokio::test(start_paused = true)]
async fn the_standard_health_service_follows_models_and_phase() {
    let calls = echo_calls(DataType::Uint8);
    let mut health = HealthClient::new(calls.service());
    let named = |name: &str| HealthCheckRequest { service: name.to_owned() };
    for name in ["", "inference.GRPCInferenceService", "m"] {
        let status = health.check(named(name)).await.unwrap().into_inner().status();
        assert_eq!(status, ServingStatus::Serving, "{name}");
    }
    assert_eq!(health.check(named("n")).await.unwrap_err().code(), Code::NotFound);
    let mut watch = health.watch(named("m")).await.unwrap().into_inner();
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    set_state(&calls, ModelState::Unhealthy { reason: "lost".into() });
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    assert_eq!(health.check(named("")).await.unwrap().into_inner().status(), ServingStatus::NotServing);
    calls.server.phase.send_replace(Phase::Closing);
    assert!(watch.message().await.unwrap().is_none(), "a watch does not keep the server from ending");
}
