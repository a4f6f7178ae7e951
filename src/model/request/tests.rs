use super::*;
use crate::model::Settings;
use crate::units::{ByteSize, ModelId};
use bytes::Bytes;

fn spec(name: &str, datatype: DataType, shape: &[Dim]) -> TensorSpec {
    TensorSpec { name: name.to_owned(), datatype, shape: shape.to_vec() }
}

fn symbol(name: &str) -> Dim {
    Dim::Symbol(name.to_owned())
}

/// Two inputs with a common sequence length, two outputs, the batch on axis 0.
fn model() -> ModelSpec {
    ModelSpec {
        id: ModelId(1),
        name: "m".to_owned(),
        version: 1,
        inputs: vec![
            spec("ids", DataType::Int64, &[symbol("batch"), symbol("seq")]),
            spec("mask", DataType::Fp32, &[symbol("batch"), symbol("seq"), Dim::Fixed(2)]),
        ],
        outputs: vec![
            spec("y", DataType::Fp32, &[symbol("batch"), Dim::Fixed(3)]),
            spec("z", DataType::Fp32, &[symbol("batch")]),
        ],
        batch_axis: Some(0),
        unbatched_reason: None,
        max_batch_size: 4,
        padding: None,
        settings: Settings {
            max_queue_delay: Duration::ZERO,
            max_gather_delay: Duration::ZERO,
            max_queue_rows: 100,
            max_queue_bytes: ByteSize(1 << 20),
            priority_levels: 3,
            default_priority: 2,
            ..Settings::default()
        },
        text: None,
    }
}

fn input(name: &str, datatype: DataType, shape: &[usize], bytes: usize) -> InputTensor {
    let tensor = Tensor { datatype, shape: shape.into(), data: vec![0; bytes].into() };
    InputTensor { name: name.to_owned(), tensor }
}

fn request() -> InferRequest {
    InferRequest {
        inputs: vec![
            input("mask", DataType::Fp32, &[5, 7, 2], 5 * 7 * 2 * 4),
            input("ids", DataType::Int64, &[5, 7], 5 * 7 * 8),
        ],
        ..InferRequest::default()
    }
}

fn check(model: ModelSpec, request: InferRequest) -> Result<ValidRequest, String> {
    ValidRequest::new(Arc::new(model), request, 16).map_err(|error| error.message)
}

/// Changes a request that fits, and returns the complaint.
fn complaint(change: impl FnOnce(&mut InferRequest)) -> String {
    let mut request = request();
    change(&mut request);
    check(model(), request).unwrap_err()
}

#[test]
fn a_request_that_fits_is_put_in_the_models_order() {
    let valid = check(model(), request()).unwrap();
    assert_eq!(valid.inputs[0].datatype, DataType::Int64);
    assert_eq!(valid.outputs, [0, 1]);
    assert_eq!(valid.rows, 5, "more rows than one batch holds are fine");
    assert_eq!(valid.bytes, ByteSize(5 * 7 * 2 * 4 + 5 * 7 * 8));
    assert_eq!(valid.class_dims, [7, 7, 2]);
    assert_eq!(valid.units, 7 + 14);
    assert_eq!((valid.priority, valid.timeout), (2, None));
}

#[test]
fn each_misfit_is_named() {
    type Change = fn(&mut InferRequest);
    let table: &[(Change, &str)] = &[
        (|r| drop(r.inputs.pop()), "model 'm' needs 2 inputs but got 1: add 'ids'"),
        (|r| r.inputs.clear(), "add 'ids', 'mask'"),
        (|r| r.inputs[0].name = "x".into(), "inputs[0]: model 'm' has no input 'x'; its inputs are 'ids', 'mask'"),
        (|r| r.inputs.push(input("ids", DataType::Int64, &[5, 7], 280)), "inputs[2]: input 'ids' is given twice"),
        (|r| r.inputs[1].tensor.datatype = DataType::Int32, "'ids' has datatype INT32, but model 'm' expects INT64"),
        (
            |r| r.inputs[1].tensor.shape = [5, 7, 1][..].into(),
            "'ids' has shape [5, 7, 1], but model 'm' expects [-1, -1]",
        ),
        (|r| r.inputs[0].tensor.shape = [5, 7, 3][..].into(), "has shape [5, 7, 3], but model 'm' expects [-1, -1, 2]"),
        (
            |r| r.inputs[1] = input("ids", DataType::Int64, &[4, 7], 224),
            "'mask' has 5 rows, but input 'ids' of model 'm' has 4",
        ),
        (
            |r| r.inputs[1] = input("ids", DataType::Int64, &[5, 6], 240),
            "'mask' has size 7 on axis 1 ('seq'), but input 'ids'",
        ),
        (
            |r| r.inputs[1] = input("ids", DataType::Int64, &[5, 7], 279),
            "has 279 bytes of data, but shape [5, 7] of INT64 needs 280",
        ),
        (|r| r.inputs[1] = input("ids", DataType::Int64, &[usize::MAX, 2], 0), "too many elements to count"),
        (|r| r.inputs[1] = input("ids", DataType::Int64, &[usize::MAX / 4, 1], 0), "has 0 bytes of data"),
        (|r| r.outputs = vec!["q".into()], "outputs[0]: model 'm' has no output 'q'; its outputs are 'y', 'z'"),
        (|r| r.outputs = vec!["y".into(), "z".into(), "y".into()], "outputs[2]: output 'y' is listed twice"),
    ];
    for (change, expected) in table {
        let message = complaint(change);
        assert!(message.contains(expected), "{message:?} lacks {expected:?}");
    }
}

#[test]
fn rows_are_at_least_one_and_at_most_the_limit() {
    let rows = |rows: usize| {
        let mut request = request();
        request.inputs = vec![
            input("mask", DataType::Fp32, &[rows, 1, 2], rows * 8),
            input("ids", DataType::Int64, &[rows, 1], rows * 8),
        ];
        check(model(), request)
    };
    assert_eq!(rows(1).unwrap().rows, 1);
    assert_eq!(rows(16).unwrap().rows, 16);
    assert!(rows(0).unwrap_err().contains("has no rows; send at least 1"));
    assert!(rows(17).unwrap_err().contains("has 17 rows; send at most 16"));
}

#[test]
fn the_batch_may_be_any_axis() {
    let mut model = model();
    model.batch_axis = Some(1);
    model.inputs = vec![spec("x", DataType::Uint8, &[symbol("seq"), Dim::Any, Dim::Fixed(2)])];
    let request = InferRequest { inputs: vec![input("x", DataType::Uint8, &[9, 3, 2], 54)], ..request() };
    let valid = check(model, request).unwrap();
    assert_eq!((valid.rows, valid.class_dims, valid.units), (3, vec![9, 2], 18));
}

#[test]
fn without_a_batch_axis_there_is_one_row() {
    let mut model = model();
    model.batch_axis = None;
    model.inputs = vec![spec("x", DataType::Uint8, &[Dim::Any, Dim::Any]), spec("s", DataType::Fp64, &[])];
    let inputs = vec![input("x", DataType::Uint8, &[20, 0], 0), input("s", DataType::Fp64, &[], 8)];
    let valid = check(model, InferRequest { inputs, ..request() }).unwrap();
    assert_eq!((valid.rows, valid.class_dims, valid.units, valid.bytes), (1, vec![20, 0], 1, ByteSize(8)));
}

#[test]
fn tensors_without_elements_fit_where_the_dimensions_allow() {
    let mut request = request();
    request.inputs = vec![input("mask", DataType::Fp32, &[2, 0, 2], 0), input("ids", DataType::Int64, &[2, 0], 0)];
    assert_eq!(check(model(), request).unwrap().rows, 2);
}

#[test]
fn dimensions_of_tensors_without_elements_are_bounded() {
    let mut model = model();
    model.batch_axis = None;
    model.inputs = vec![spec("x", DataType::Fp32, &[Dim::Any, Dim::Any, Dim::Any])];
    let given = |shape: &[usize]| {
        let inputs = vec![input("x", DataType::Fp32, shape, 0)];
        check(model.clone(), InferRequest { inputs, ..InferRequest::default() })
    };
    for good in [[0, 0, 0], [0, 1 << 24, 1], [1 << 12, 0, 1 << 12]] {
        assert!(given(&good).is_ok(), "{good:?}");
    }
    for bad in [[0, (1 << 24) + 1, 1], [0, 900_000_000, 0], [1 << 13, 1 << 12, 0], [0, i64::MAX as usize + 1, 1]] {
        let message = given(&bad).unwrap_err();
        assert!(message.starts_with(&format!("input 'x' has shape {bad:?}")), "{message}");
        assert!(message.ends_with("make the product of its other dimensions at most 16777216"), "{message}");
    }
    // Here the product overflows before it meets the zero.
    assert!(given(&[usize::MAX, 2, 0]).unwrap_err().contains("input 'x' has shape"));
}

#[test]
fn priorities_out_of_range_mean_the_default() {
    for (given, expected) in [(0, 2), (1, 1), (3, 3), (4, 2), (u64::MAX, 2)] {
        assert_eq!(check(model(), InferRequest { priority: given, ..request() }).unwrap().priority, expected);
    }
}

#[test]
fn a_timeout_of_zero_is_none() {
    for (given, expected) in [(0, None), (5, Some(Duration::from_micros(5)))] {
        let request = InferRequest { timeout: Some(Duration::from_micros(given)), ..request() };
        assert_eq!(check(model(), request).unwrap().timeout, expected);
    }
}

#[test]
fn outputs_keep_the_wanted_order() {
    let request = InferRequest { outputs: vec!["z".into(), "y".into()], ..request() };
    assert_eq!(check(model(), request).unwrap().outputs, [1, 0]);
}

#[test]
fn strings_are_checked_across_parts() {
    let data = b"\x03\0\0\0abc\0\0\0\0\x01\0\0\0z";
    for split in 0..data.len() {
        let mut chunks = Chunks::from(Bytes::from_static(&data[..split]));
        chunks.push(Bytes::from_static(&data[split..]));
        assert_eq!(check_strings("s", &chunks, 3), Ok(()));
        assert!(check_strings("s", &chunks, 2).unwrap_err().message.contains("has 3 elements, but its shape needs 2"));
        let cut = Chunks::from(Bytes::from_static(&data[..split]));
        let between = matches!(split, 0 | 7 | 11);
        assert_eq!(check_strings("s", &cut, 3).unwrap_err().message.contains("ends early"), !between, "{split}");
    }
    let long = Chunks::from(Bytes::from_static(b"\xff\xff\xff\xffabc"));
    assert!(check_strings("s", &long, 1).unwrap_err().message.contains("element 0 of its BYTES data ends early"));
}
