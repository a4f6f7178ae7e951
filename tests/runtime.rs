//! Sessions on real graphs: every datatype, every layout of rows, and what happens when a model misbehaves.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use concertina::clock::Clock;
use concertina::memory::Device;
use concertina::model::{InferRequest, InputTensor, ModelSpec, ValidRequest};
use concertina::runtime::calibrate::{CalibrationError, calibrate};
use concertina::runtime::{Arenas, Batch, BatchPart, RunError, Session, SessionOptions};
use concertina::tensor::{DataType, Tensor};
use concertina::units::{BatchId, ByteSize, Rows};
use proptest::prelude::*;
use std::sync::Arc;

struct Loaded {
    device: Device,
    session: Session,
    spec: Arc<ModelSpec>,
    clock: Clock,
}

fn load(name: &str, batch_axis: Option<usize>) -> Loaded {
    let options = SessionOptions { intra_op_threads: 1, optimize: true };
    let device = support::device();
    let arenas = Arenas::new(&device, name, 1).unwrap();
    let mut session = Session::load(support::runtime(), &support::test_model(name), options, arenas).unwrap();
    let spec = support::settle(&mut session, name, batch_axis, 64);
    Loaded { device, session, spec, clock: Clock::start() }
}

impl Loaded {
    fn request(&self, inputs: Vec<(&str, Tensor)>) -> Arc<ValidRequest> {
        let inputs = inputs.into_iter().map(|(name, tensor)| InputTensor { name: name.to_owned(), tensor }).collect();
        let request = InferRequest { inputs, ..InferRequest::default() };
        Arc::new(ValidRequest::new(Arc::clone(&self.spec), request, 1000).unwrap())
    }

    fn run(
        &mut self,
        parts: Vec<(Arc<ValidRequest>, Rows, Rows)>,
        padding: Rows,
    ) -> Result<Vec<Vec<Tensor>>, RunError> {
        let rows: Rows = parts.iter().map(|(_, _, rows)| rows).sum();
        let parts = parts.into_iter().map(|(request, start, rows)| BatchPart { request, start, rows }).collect();
        let batch = Batch { id: BatchId(1), parts, bytes: ByteSize::ZERO, padded_rows: rows + padding };
        self.session.run(&batch, self.clock).result
    }
}

fn floats(shape: &[usize], values: &[f32]) -> Tensor {
    let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Tensor { datatype: DataType::Fp32, shape: shape.into(), data: data.into() }
}

fn ints(shape: &[usize], values: &[i64]) -> Tensor {
    let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Tensor { datatype: DataType::Int64, shape: shape.into(), data: data.into() }
}

fn as_floats(tensor: &Tensor) -> Vec<f32> {
    let bytes = tensor.data.to_contiguous();
    bytes.chunks_exact(4).map(|chunk| f32::from_le_bytes(chunk.try_into().unwrap())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// `2x + 1` for every row, whatever company it has and wherever its request is cut.
    #[test]
    fn each_row_gets_its_own_answer(
        sizes in prop::collection::vec(1usize..6, 1..6),
        cut in 0usize..6,
        padding in 0u32..4,
    ) {
        let mut model = load("affine", Some(0));
        let mut next = 0.0f32;
        let mut parts = Vec::new();
        let mut expected = Vec::new();
        for (index, &rows) in sizes.iter().enumerate() {
            let values: Vec<f32> = (0..rows * 4).map(|_| { next += 0.5; next }).collect();
            // The last request takes part with some of its rows only.
            let start = if index + 1 == sizes.len() { cut.min(rows - 1) } else { 0 };
            expected.push(values[start * 4..].iter().map(|x| 2.0 * x + 1.0).collect::<Vec<f32>>());
            let request = model.request(vec![("x", floats(&[rows, 4], &values))]);
            parts.push((request, start as Rows, (rows - start) as Rows));
        }
        let answers = model.run(parts, padding).unwrap();
        prop_assert_eq!(answers.len(), expected.len());
        for (answer, expected) in answers.iter().zip(&expected) {
            prop_assert_eq!(answer[0].shape.as_slice(), &[expected.len() / 4, 4]);
            prop_assert_eq!(&as_floats(&answer[0]), expected);
        }
    }
}

#[test]
fn rows_on_the_last_axis_are_columns() {
    let mut model = load("batch_last", Some(1));
    let one = model.request(vec![("x", floats(&[4, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]))]);
    let two = model.request(vec![("x", floats(&[4, 1], &[9.0, 10.0, 11.0, 12.0]))]);
    let answers = model.run(vec![(one, 0, 2), (two, 0, 1)], 0).unwrap();
    assert_eq!(as_floats(&answers[0][0]), [2.0, 5.0, 8.0, 11.0, 14.0, 17.0, 20.0, 23.0]);
    assert_eq!(answers[1][0].shape.as_slice(), [4, 1]);
    assert_eq!(as_floats(&answers[1][0]), [26.0, 29.0, 32.0, 35.0]);
}

#[test]
fn outputs_are_charged_until_the_last_of_a_response_is_gone() {
    let mut model = load("affine", Some(0));
    let values: Vec<f32> = (0..4000).map(|x| x as f32).collect();
    let request = model.request(vec![("x", floats(&[1000, 4], &values))]);
    let run = |model: &mut Loaded| model.run(vec![(Arc::clone(&request), 0, 1000)], 0).unwrap();
    drop(run(&mut model));
    let between_runs = model.device.stats().allocated;
    let answers = run(&mut model);
    assert_eq!(model.device.stats().allocated, between_runs + ByteSize(16_000));
    let more = run(&mut model);
    assert_eq!(model.device.stats().allocated, between_runs + ByteSize(32_000));
    let kept = answers[0][0].data.clone();
    drop((answers, more));
    assert_eq!(model.device.stats().allocated, between_runs + ByteSize(16_000));
    let (device, session) = (model.device, model.session);
    drop(session);
    let expected: Vec<u8> = values.iter().flat_map(|x| (2.0 * x + 1.0).to_le_bytes()).collect();
    assert_eq!(kept.to_contiguous(), expected);
    drop(kept);
    assert_eq!(device.stats().allocated, ByteSize::ZERO);
}

/// Elements of every datatype that differ from each other, in binary form, by element.
fn elements(datatype: DataType, seed: u8) -> Vec<u8> {
    let value = u16::from(seed);
    match datatype {
        DataType::Bool => vec![seed % 2],
        DataType::Fp16 => half::f16::from_f32(f32::from(seed) / 4.0).to_le_bytes().to_vec(),
        DataType::Bf16 => half::bf16::from_f32(f32::from(seed)).to_le_bytes().to_vec(),
        DataType::Fp32 => (f32::from(value) * 1.25).to_le_bytes().to_vec(),
        DataType::Fp64 => (f64::from(value) * 1.25).to_le_bytes().to_vec(),
        DataType::Bytes => {
            let text = "é".repeat(usize::from(seed % 4));
            [&(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
        }
        other => {
            let mut bytes = vec![0xFF; other.size().unwrap()];
            bytes[0] = seed;
            bytes
        }
    }
}

#[test]
fn every_datatype_comes_back_bit_for_bit_from_a_mixed_batch() {
    let mut model = load("datatypes", Some(0));
    let inputs = model.spec.inputs.clone();
    let mut seed = 0u8;
    let mut requests = Vec::new();
    for rows in [1usize, 3, 2] {
        let tensors: Vec<(&str, Tensor)> = inputs
            .iter()
            .map(|input| {
                let data: Vec<u8> = (0..rows * 2)
                    .flat_map(|_| {
                        seed = seed.wrapping_add(1);
                        elements(input.datatype, seed)
                    })
                    .collect();
                let tensor = Tensor { datatype: input.datatype, shape: [rows, 2].as_slice().into(), data: data.into() };
                (input.name.as_str(), tensor)
            })
            .collect();
        requests.push(model.request(tensors));
    }
    let parts = requests.iter().map(|request| (Arc::clone(request), 0, request.rows)).collect();
    let answers = model.run(parts, 0).unwrap();
    for (request, answer) in requests.iter().zip(answers) {
        for (input, sent) in inputs.iter().zip(&request.inputs) {
            let name = input.name.replacen("in_", "out_", 1);
            let (index, _) = model.spec.output(&name).expect("an output for each input");
            assert_eq!(&answer[index], sent, "{name}");
        }
    }
}

#[test]
fn strings_of_any_bytes_come_back() {
    let mut model = load("datatypes", Some(0));
    let texts: [&[u8]; 4] = [b"", b"a\0b", &[0xFF, 0xFE, 0x00], "é".as_bytes()];
    let data: Vec<u8> = texts.iter().flat_map(|t| [&(t.len() as u32).to_le_bytes()[..], t].concat()).collect();
    let inputs = model.spec.inputs.clone();
    let tensors = inputs.iter().map(|input| {
        let data = match input.datatype.size() {
            Some(size) => vec![0; 4 * size],
            None => data.clone(),
        };
        let tensor = Tensor { datatype: input.datatype, shape: [2, 2].as_slice().into(), data: data.into() };
        (input.name.as_str(), tensor)
    });
    let request = model.request(tensors.collect());
    let answers = model.run(vec![(request, 0, 2)], 0).unwrap();
    let (index, _) = model.spec.output("out_bytes").unwrap();
    assert_eq!(answers[0][index].data.to_contiguous(), data);
}

#[test]
fn a_model_that_fails_says_so_and_works_again() {
    let mut model = load("fails", Some(0));
    let bad = model.request(vec![("index", ints(&[1, 1], &[99]))]);
    let good = model.request(vec![("index", ints(&[2, 1], &[3, 4]))]);
    let error = model.run(vec![(Arc::clone(&good), 0, 2), (bad, 0, 1)], 0).unwrap_err();
    assert!(matches!(&error, RunError::Model(text) if text.contains("out of")), "{error}");
    assert!(!error.to_string().contains(".cc"), "{error}");
    let answers = model.run(vec![(good, 0, 2)], 0).unwrap();
    assert_eq!(as_floats(&answers[0][0]), [30.0, 40.0]);
}

/// Everything that is logged on this thread.
#[derive(Clone, Default)]
struct Lines(Arc<std::sync::Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn what_a_client_did_wrong_is_not_logged() {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(subscriber, || {
        let mut model = load("fails", Some(0));
        let bad = model.request(vec![("index", ints(&[1, 1], &[99]))]);
        model.run(vec![(bad, 0, 1)], 0).unwrap_err();
    });
    let lines = lines.0.lock().unwrap();
    assert!(lines.is_empty(), "{}", String::from_utf8_lossy(&lines));
}

#[test]
fn what_the_whole_device_could_not_hold_is_the_models_failure_and_is_not_tried_again() {
    // 1 MiB a row: 4 TiB.
    const ROWS: Rows = 1 << 22;
    let x = || floats(&[ROWS as usize, 1], &vec![0.0; ROWS as usize]);
    let mut model = load("wide", None);
    let request = model.request(vec![("x", x())]);
    let error = model.run(vec![(request, 0, 1)], 0).unwrap_err();
    let expected = "the model wants 4.0 TiB for this input, more than the device has (";
    assert!(matches!(&error, RunError::Model(text) if text.starts_with(expected)), "{error}");
    // Rows that can be divided may fit in smaller batches.
    let mut model = load("wide", Some(0));
    let request =
        InferRequest { inputs: vec![InputTensor { name: "x".to_owned(), tensor: x() }], ..Default::default() };
    let request = Arc::new(ValidRequest::new(Arc::clone(&model.spec), request, ROWS).unwrap());
    let error = model.run(vec![(request, 0, ROWS)], 0).unwrap_err();
    assert!(matches!(error, RunError::OutOfMemory { .. }), "{error}");
}

#[test]
fn an_output_without_the_batch_is_found_by_running() {
    for name in ["bad_output_fixed", "bad_output_symbolic", "nonzero"] {
        let mut model = load(name, Some(0));
        let result = calibrate(&mut model.session, &model.spec, model.clock);
        assert!(matches!(result, Err(CalibrationError::NotABatchAxis(_))), "{name}: {result:?}");
    }
}

#[test]
fn a_model_without_a_batch_axis_runs_a_request_as_it_is() {
    let mut model = load("nonzero", None);
    let request = model.request(vec![("x", floats(&[2, 4], &[0.0, 1.0, 0.0, 0.0, 5.0, 0.0, 0.0, 2.0]))]);
    let answers = model.run(vec![(request, 0, 1)], 0).unwrap();
    assert_eq!(answers[0][0].shape.as_slice(), [3, 2]);
    let calibration = calibrate(&mut model.session, &model.spec, model.clock).unwrap();
    assert_eq!(calibration.ladder, [1]);
}

#[test]
fn the_ladder_is_measured_and_belongs_to_the_synthetic_class() {
    let mut model = load("varlen", Some(0));
    let calibration = calibrate(&mut model.session, &model.spec, model.clock).unwrap();
    assert_eq!(calibration.ladder[..2], [1, 2]);
    assert!(calibration.measured.iter().all(|entry| !entry.duration.is_zero()));
    assert_eq!(model.session.device_time(1), None, "there is no device beside the host");
    let length = model.spec.settings.warmup.default_dim;
    assert_eq!(calibration.class_dims, [length, length]);
    assert_eq!(calibration.units, 2 * length as u64);
}
