//! What padding does to answers: nothing, or the model gets none.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "simulation/random.rs"]
#[allow(dead_code, reason = "each test program uses a part")]
mod random;
mod support;

use concertina::clock::Clock;
use concertina::model::{InferRequest, InputTensor, ModelSpec, PadPlan, Settings, ValidRequest, derive};
use concertina::runtime::calibrate::{Measured, calibrate};
use concertina::runtime::lengths::{measure_lengths, measured_lengths};
use concertina::runtime::padding::confirm_padding;
use concertina::runtime::{Arenas, Batch, BatchPart, Session, SessionOptions};
use concertina::tensor::{DataType, Tensor};
use concertina::units::{BatchId, ByteSize, Rows};
use random::Random;
use std::path::Path;
use std::sync::Arc;

struct Loaded {
    session: Session,
    spec: ModelSpec,
}

/// A model as its file and a model.toml of this text describe it; nothing is confirmed.
fn load(name: &str, file: &Path, text: &str) -> Loaded {
    let options = SessionOptions { intra_op_threads: 1, optimize: true };
    let arenas = Arenas::new(&support::device(), name, 1).unwrap();
    let mut session = Session::load(support::runtime(), file, options, arenas).unwrap();
    let settings = Settings::from_toml(text, "model.toml", &Settings::default_keys()).unwrap();
    let derived = derive(name, session.graph(), &settings).unwrap();
    let spec = support::settle(&mut session, name, derived.batch_axis, 64);
    let spec = ModelSpec { padding: derived.padding, settings, ..ModelSpec::clone(&spec) };
    Loaded { session, spec }
}

fn varlen(text: &str) -> Loaded {
    load("varlen", &support::test_model("varlen"), text)
}

fn minilm(text: &str) -> Loaded {
    let file = support::root().join("models/minilm/1/model.onnx");
    assert!(file.exists(), "{} is missing: run `make setup`", file.display());
    load("minilm", &file, text)
}

impl Loaded {
    /// One text of these tokens.
    fn text(&self, ids: &[i64]) -> Arc<ValidRequest> {
        let input = |(name, values): (&str, Vec<i64>)| {
            let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let tensor =
                Tensor { datatype: DataType::Int64, shape: [1, ids.len()].as_slice().into(), data: data.into() };
            InputTensor { name: name.to_owned(), tensor }
        };
        let (ones, zeros) = (vec![1; ids.len()], vec![0; ids.len()]);
        let inputs = [("input_ids", ids.to_vec()), ("attention_mask", ones), ("token_type_ids", zeros)];
        let request = InferRequest { inputs: inputs.into_iter().map(input).collect(), ..InferRequest::default() };
        Arc::new(ValidRequest::new(Arc::new(self.spec.clone()), request, 1000).unwrap())
    }

    /// The outputs of each, all of them in one batch.
    fn run(&mut self, requests: &[&Arc<ValidRequest>]) -> Vec<Vec<Tensor>> {
        self.session.set_spec(Arc::new(self.spec.clone()));
        let part = |request: &&Arc<ValidRequest>| BatchPart { request: Arc::clone(request), start: 0, rows: 1 };
        let parts: Vec<BatchPart> = requests.iter().map(part).collect();
        let batch = Batch { id: BatchId(1), bytes: ByteSize::ZERO, padded_rows: parts.len() as Rows, parts };
        self.session.run(&batch, Clock::start()).result.unwrap()
    }
}

fn plan(model: &Loaded) -> &PadPlan {
    model.spec.padding.as_ref().unwrap()
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    let bytes = tensor.data.to_contiguous();
    bytes.chunks_exact(4).map(|chunk| f32::from_le_bytes(chunk.try_into().unwrap())).collect()
}

/// The largest difference as a part of the largest value.
fn apart(one: &Tensor, other: &Tensor) -> f32 {
    assert_eq!(one.shape, other.shape);
    let (one, other) = (floats(one), floats(other));
    let largest = one.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    one.iter().zip(&other).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs())) / largest
}

fn tokens(random: &mut Random, length: usize) -> Vec<i64> {
    (0..length).map(|_| random.between(1000, 20_000) as i64).collect()
}

#[test]
fn a_masked_model_is_padded_and_one_that_shows_its_padding_is_not() {
    let masked = "padding = { sequence = { lengths = [4, 8, 32] }, inputs = { ids = 9, mask = 0 } }";
    let mut model = varlen(masked);
    // Which outputs follow the length is found where nothing says it.
    let said = plan(&model).outputs.clone();
    model.spec.padding.as_mut().unwrap().outputs.iter_mut().for_each(Vec::clear);
    let confirmed = confirm_padding(&mut model.session, &model.spec, Clock::start()).unwrap();
    assert_eq!((confirmed.difference, &confirmed.plan.outputs), (0.0, &said));
    assert_eq!(confirmed.plan.dims, plan(&model).dims);

    let seen = "padding = { sequence = { lengths = [4, 8, 32] }, inputs = { ids = 9, mask = 1 } }";
    let mut model = varlen(seen);
    let reason = confirm_padding(&mut model.session, &model.spec, Clock::start()).unwrap_err();
    assert!(reason.starts_with("output 'mean' of a row of sequence = 1 differs by "), "{reason}");
    assert!(reason.contains("of its largest value if the row is padded to sequence = 4, more than 1e-5"), "{reason}");
}

#[test]
fn an_encoder_of_text_is_recognised_and_its_lengths_end_where_its_positions_do() {
    let mut model = minilm("");
    let dim = &plan(&model).dims[0];
    assert_eq!((dim.name.as_str(), dim.lengths[0], dim.lengths.last()), ("sequence", 8, Some(&512)));
    let said = "padding = { sequence = { lengths = [8, 512, 513, 600] }, \
                inputs = { input_ids = 0, attention_mask = 0, token_type_ids = 0 } }";
    model.spec = minilm(said).spec;
    let confirmed = confirm_padding(&mut model.session, &model.spec, Clock::start()).unwrap();
    assert_eq!(confirmed.plan.dims[0].lengths, [8, 512]);
    assert!(confirmed.difference < 1e-5, "{}", confirmed.difference);
}

#[test]
fn neighbours_change_no_bit_at_equal_shape_and_next_to_nothing_across_shapes() {
    let mut model = minilm("");
    let mut random = Random(5);
    for round in 0..12 {
        let length = random.between(1, 40) as usize;
        let mine = model.text(&tokens(&mut random, length));
        let neighbours: Vec<_> = (0..random.between(1, 5))
            .map(|_| {
                let length = random.between(1, 60) as usize;
                model.text(&tokens(&mut random, length))
            })
            .collect();
        // Others of the same lengths, in the same places.
        let others: Vec<_> = neighbours
            .iter()
            .map(|neighbour| {
                let length = neighbour.inputs[0].shape[1];
                model.text(&tokens(&mut random, length))
            })
            .collect();
        let beside = |neighbours: &[Arc<ValidRequest>], model: &mut Loaded| {
            let batch: Vec<_> = std::iter::once(&mine).chain(neighbours).collect();
            model.run(&batch).swap_remove(0)
        };
        let first = beside(&neighbours, &mut model);
        assert_eq!(first, beside(&others, &mut model), "round {round}: the same bits");
        let padding = model.spec.padding.take();
        let alone = model.run(&[&mine]).swap_remove(0);
        model.spec.padding = padding;
        for (output, (alone, padded)) in alone.iter().zip(&first).enumerate() {
            let apart = apart(alone, padded);
            assert!(apart < 1e-5, "round {round}: output {output} of {length} tokens is {apart} apart");
        }
    }
}

#[test]
fn some_lengths_are_measured_and_grow_with_length_and_rows() {
    let mut model = varlen(
        "warmup.seconds = 0.05\npadding = { sequence = { lengths = [4, 6, 8, 64, 100] }, inputs = { ids = 0, mask = 0 } }",
    );
    let spec = Arc::new(model.spec.clone());
    model.session.set_spec(Arc::clone(&spec));
    let clock = Clock::start();
    let known = calibrate(&mut model.session, &spec, clock).unwrap();
    let found = measure_lengths(&mut model.session, &spec, (&known.ladder, known.integers), clock);
    assert_eq!(found.iter().map(|length| length.size).collect::<Vec<_>>(), [4, 8, 64, 100]);
    assert_eq!(measured_lengths(&spec), [4, 8, 64, 100]);
    let dims: Vec<&[usize]> = found.iter().map(|length| length.calibration.class_dims.as_slice()).collect();
    assert_eq!(dims, [[4, 4], [8, 8], [64, 64], [100, 100]]);
    let found: Vec<_> = found.into_iter().map(|length| length.calibration).collect();
    for pair in found.windows(2) {
        let bytes = |entry: &Measured| entry.bytes;
        assert!(pair[0].measured.len() >= 2, "two sizes of each");
        assert!(pair[0].units < pair[1].units && bytes(&pair[0].measured[0]) < bytes(&pair[1].measured[0]));
        assert!(bytes(&pair[0].measured[0]) < bytes(&pair[0].measured[1]));
    }
}
