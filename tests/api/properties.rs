//! Random tensors, random frames, random damage.

use crate::support::{App, echo_app, tensor};
use axum::body::Body;
use axum::body::Bytes;
use concertina::tensor::DataType;
use http_body::Frame;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

/// One element in its two forms, made independently of the server.
#[derive(Clone, Debug)]
struct Element {
    json: Value,
    binary: Vec<u8>,
}

fn element(datatype: DataType) -> BoxedStrategy<Element> {
    macro_rules! of {
        ($type:ty) => {
            any::<$type>().prop_map(|x| Element { json: json!(x), binary: x.to_le_bytes().to_vec() }).boxed()
        };
    }
    match datatype {
        DataType::Bool => any::<bool>().prop_map(|x| Element { json: json!(x), binary: vec![u8::from(x)] }).boxed(),
        DataType::Uint8 => of!(u8),
        DataType::Uint16 => of!(u16),
        DataType::Uint32 => of!(u32),
        DataType::Uint64 => of!(u64),
        DataType::Int8 => of!(i8),
        DataType::Int16 => of!(i16),
        DataType::Int32 => of!(i32),
        DataType::Int64 => of!(i64),
        DataType::Fp64 => of!(f64),
        DataType::Fp32 => {
            any::<f32>().prop_map(|x| Element { json: json!(f64::from(x)), binary: x.to_le_bytes().to_vec() }).boxed()
        }
        DataType::Fp16 => any::<u16>()
            .prop_map(half::f16::from_bits)
            .prop_filter("finite", |x| x.is_finite())
            .prop_map(|x| Element { json: json!(x.to_f64()), binary: x.to_le_bytes().to_vec() })
            .boxed(),
        DataType::Bf16 => any::<u16>()
            .prop_map(half::bf16::from_bits)
            .prop_filter("finite", |x| x.is_finite())
            .prop_map(|x| Element { json: json!(x.to_f64()), binary: x.to_le_bytes().to_vec() })
            .boxed(),
        DataType::Bytes => any::<String>()
            .prop_map(|x| {
                let len = u32::try_from(x.len()).unwrap().to_le_bytes();
                Element { json: json!(x), binary: [&len, x.as_bytes()].concat() }
            })
            .boxed(),
    }
}

/// A datatype, and rows of equal length.
fn rows() -> impl Strategy<Value = (DataType, Vec<Vec<Element>>)> {
    (prop::sample::select(&DataType::ALL[..]), 1usize..4, 0usize..6).prop_flat_map(|(datatype, rows, columns)| {
        let row = prop::collection::vec(element(datatype), columns);
        (Just(datatype), prop::collection::vec(row, rows))
    })
}

fn run<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
}

/// Equal as values of the datatype: numbers may be written in several ways.
fn same(datatype: DataType, sent: &Value, got: &Value) -> bool {
    match datatype {
        DataType::Fp32 => sent.as_f64().map(|x| x as f32) == got.as_f64().map(|x| x as f32),
        DataType::Fp16 => sent.as_f64().map(half::f16::from_f64) == got.as_f64().map(half::f16::from_f64),
        DataType::Bf16 => sent.as_f64().map(half::bf16::from_f64) == got.as_f64().map(half::bf16::from_f64),
        DataType::Fp64 => sent.as_f64() == got.as_f64(),
        _ => sent == got,
    }
}

/// A body in frames of these sizes, again and again.
struct Split(VecDeque<Bytes>);

impl Split {
    fn new(body: &[u8], sizes: &[usize]) -> Self {
        let mut rest = Bytes::copy_from_slice(body);
        let mut frames = VecDeque::new();
        for &size in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            frames.push_back(rest.split_to(size.min(rest.len())));
        }
        Self(frames)
    }
}

impl http_body::Body for Split {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|frame| Ok(Frame::data(frame))))
    }
}

/// A request for model `m` that asks for JSON or for binary, and its binary part.
fn request(datatype: DataType, rows: &[Vec<Element>], binary_in: bool, binary_out: bool) -> (String, Vec<u8>) {
    let shape = [rows.len(), rows[0].len()];
    let tail: Vec<u8> = rows.iter().flatten().flat_map(|element| element.binary.clone()).collect();
    let data = if binary_in {
        json!({"name": "x", "shape": shape, "datatype": datatype.name(), "parameters": {"binary_data_size": tail.len()}})
    } else {
        let data: Vec<Vec<&Value>> = rows.iter().map(|row| row.iter().map(|element| &element.json).collect()).collect();
        // Keys in alphabetical order: `data` comes before what is needed to read it.
        json!({"name": "x", "shape": shape, "datatype": datatype.name(), "data": data})
    };
    let output = json!({"name": "x", "parameters": {"binary_data": binary_out}});
    let json = json!({"id": "é", "inputs": [data], "outputs": [output]}).to_string();
    (json, if binary_in { tail } else { Vec::new() })
}

async fn round_trip(app: &App, datatype: DataType, rows: &[Vec<Element>], binary_in: bool, sizes: &[usize]) {
    let (json, tail) = request(datatype, rows, binary_in, false);
    let body = [json.as_bytes(), &tail].concat();
    let reply = app.infer_binary(Some(&json.len().to_string()), Body::new(Split::new(&body, sizes))).await;
    assert_eq!(reply.status, 200, "{json}: {}", reply.text());
    let output = &reply.json()["outputs"][0];
    let got = output["data"].as_array().unwrap();
    let sent: Vec<&Value> = rows.iter().flatten().map(|element| &element.json).collect();
    assert_eq!(got.len(), sent.len());
    for (sent, got) in sent.iter().zip(got) {
        assert!(same(datatype, sent, got), "{datatype}: {sent} came back as {got}");
    }
    assert_eq!((&output["shape"], &output["datatype"]), (&json!([rows.len(), rows[0].len()]), &json!(datatype.name())));

    let (json, tail) = request(datatype, rows, binary_in, true);
    let reply = app.infer_mixed(&json, &tail).await;
    let length: usize = reply.header("inference-header-content-length").unwrap().parse().unwrap();
    let sent: Vec<u8> = rows.iter().flatten().flat_map(|element| element.binary.clone()).collect();
    assert_eq!(&reply.body[length..], sent);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn tensors_survive_both_forms_in_any_frames(
        (datatype, rows) in rows(),
        binary_in in any::<bool>(),
        sizes in prop::collection::vec(1usize..40, 1..5),
    ) {
        run(async {
            let app = echo_app(vec![tensor("x", datatype)]);
            round_trip(&app, datatype, &rows, binary_in, &sizes).await;
        });
    }

    #[test]
    fn damage_is_answered(
        (datatype, rows) in rows(),
        binary_in in any::<bool>(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        header in 0usize..400,
    ) {
        run(async {
            let app = echo_app(vec![tensor("x", datatype)]);
            let (json, tail) = request(datatype, &rows, binary_in, false);
            let mut body = [json.as_bytes(), &tail].concat();
            for (index, byte) in damage {
                let index = index.index(body.len());
                body[index] = byte;
            }
            let length = if header < 300 { json.len() } else { header };
            body.truncate(body.len() - cut.index(body.len().min(40)));
            let status = app.infer_binary(Some(&length.to_string()), body).await.status.as_u16();
            assert!(matches!(status, 200 | 400 | 404 | 501), "{status}");
        });
    }
}
