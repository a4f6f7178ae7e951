//! Rows of different lengths in one batch: each gets the answer that it would get alone.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use concertina::clock::Clock;
use concertina::model::{InferRequest, InputTensor, ModelSpec, Settings, ValidRequest, derive};
use concertina::runtime::{Arenas, Batch, BatchPart, RunError, Session, SessionOptions};
use concertina::tensor::{DataType, Tensor};
use concertina::units::{BatchId, ByteSize, Rows};
use proptest::prelude::*;
use std::sync::Arc;

/// Lengths are padded to the next of these.
const LENGTHS: [usize; 3] = [4, 8, 32];

const VARLEN: &str = "padding.sequence.lengths = [4, 8, 32]\npadding.inputs = { ids = 7, mask = 0 }";

struct Loaded {
    session: Session,
    spec: Arc<ModelSpec>,
}

/// A test model with a model.toml of this text.
fn load(name: &str, text: &str) -> Loaded {
    let options = SessionOptions { intra_op_threads: 1, optimize: true };
    let arenas = Arenas::new(&support::device(), name, 1).unwrap();
    let mut session = Session::load(support::runtime(), &support::test_model(name), options, arenas).unwrap();
    let settings = Settings::from_toml(text, "model.toml", &Settings::default_keys()).unwrap();
    let derived = derive(name, session.graph(), &settings).unwrap();
    let spec = support::settle(&mut session, name, derived.batch_axis, 64);
    let spec = Arc::new(ModelSpec { padding: derived.padding, settings, ..ModelSpec::clone(&spec) });
    session.set_spec(Arc::clone(&spec));
    Loaded { session, spec }
}

impl Loaded {
    fn request(&self, inputs: Vec<(&str, Tensor)>) -> Arc<ValidRequest> {
        let inputs = inputs.into_iter().map(|(name, tensor)| InputTensor { name: name.to_owned(), tensor }).collect();
        let request = InferRequest { inputs, ..InferRequest::default() };
        Arc::new(ValidRequest::new(Arc::clone(&self.spec), request, 1000).unwrap())
    }

    /// Rows of `varlen`: ids, all of which its mask lets through.
    fn tokens(&self, rows: usize, ids: &[i64]) -> Arc<ValidRequest> {
        let shape = [rows, ids.len() / rows];
        self.request(vec![("ids", ints(&shape, ids)), ("mask", ints(&shape, &vec![1; ids.len()]))])
    }

    fn run(&mut self, parts: &[(&Arc<ValidRequest>, Rows, Rows)], padding: Rows) -> Result<Vec<Vec<Tensor>>, RunError> {
        let rows: Rows = parts.iter().map(|(_, _, rows)| rows).sum();
        let part = |&(request, start, rows): &(&Arc<ValidRequest>, Rows, Rows)| {
            let request = Arc::clone(request);
            BatchPart { request, start, rows }
        };
        let parts = parts.iter().map(part).collect();
        let batch = Batch { id: BatchId(1), parts, bytes: ByteSize::ZERO, padded_rows: rows + padding };
        self.session.run(&batch, Clock::start()).result
    }
}

fn ints(shape: &[usize], values: &[i64]) -> Tensor {
    let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Tensor { datatype: DataType::Int64, shape: shape.into(), data: data.into() }
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    let bytes = tensor.data.to_contiguous();
    bytes.chunks_exact(4).map(|chunk| f32::from_le_bytes(chunk.try_into().unwrap())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// `doubled` is twice the ids, `mean` their mean: both are exact in floats, whatever the neighbours' lengths are.
    #[test]
    fn rows_of_any_lengths_get_their_own_answers(
        sizes in prop::collection::vec((1usize..4, 1usize..40), 1..7),
        cut in 0usize..4,
        padding in 0u32..3,
    ) {
        let mut model = load("varlen", VARLEN);
        let mut next = 0;
        let mut requests = Vec::new();
        for (index, &(rows, length)) in sizes.iter().enumerate() {
            let ids: Vec<i64> = (0..rows * length).map(|_| { next += 3; next % 1000 }).collect();
            // The last request takes part with some of its rows only.
            let start = if index + 1 == sizes.len() { cut.min(rows - 1) } else { 0 };
            requests.push((model.tokens(rows, &ids), start, rows, ids));
        }
        let parts: Vec<_> = requests
            .iter()
            .map(|(request, start, rows, _)| (request, *start as Rows, (rows - start) as Rows))
            .collect();
        let answers = model.run(&parts, padding).unwrap();
        for ((_, start, rows, ids), answer) in requests.iter().zip(&answers) {
            let (length, rows) = (ids.len() / rows, rows - start);
            let ids = &ids[start * length..];
            prop_assert_eq!(answer[0].shape.as_slice(), &[rows, length]);
            prop_assert_eq!(floats(&answer[0]), ids.iter().map(|id| 2.0 * *id as f32).collect::<Vec<_>>());
            prop_assert_eq!(answer[1].shape.as_slice(), &[rows, 1]);
            let mean = |row: &[i64]| row.iter().sum::<i64>() as f32 / length as f32;
            prop_assert_eq!(floats(&answer[1]), ids.chunks(length).map(mean).collect::<Vec<_>>());
        }
    }
}

#[test]
fn lengths_between_two_steps_are_one_class_and_longer_ones_are_their_own() {
    let model = load("varlen", VARLEN);
    let dims = |length: usize| {
        let request = model.tokens(1, &vec![1; length]);
        assert_eq!(request.units, request.class_dims.iter().sum::<usize>() as u64, "units count the padding");
        request.class_dims.clone()
    };
    for length in 1..=33 {
        let padded = LENGTHS.into_iter().find(|padded| *padded >= length).unwrap_or(length);
        assert_eq!(dims(length), [padded, padded], "{length}");
    }
}

#[test]
fn inputs_are_filled_up_with_the_value_of_the_settings() {
    let doubled = "padding.sequence.lengths = [4]\npadding.inputs = { ids = 21, mask = 1 }";
    let mut model = load("varlen", doubled);
    let (short, long) = (model.tokens(1, &[3]), model.tokens(1, &[1, 2, 3, 4]));
    let answers = model.run(&[(&short, 0, 1), (&long, 0, 1)], 0).unwrap();
    // A mask that lets the padding through: the mean shows what it was, (3 + 3 * 21) / 4.
    assert_eq!((floats(&answers[0][0]), floats(&answers[0][1])), (vec![6.0], vec![16.5]));
    assert_eq!(floats(&answers[1][1]), [2.5]);
}

#[test]
fn texts_are_not_padded() {
    let inputs: Vec<String> = load("datatypes", "").spec.inputs.iter().map(|input| input.name.clone()).collect();
    // Texts cannot be padded, so the settings are refused by name.
    let values: Vec<String> = inputs.iter().map(|name| format!("{name} = 0")).collect();
    let text = format!("padding.width.lengths = [4]\npadding.inputs = {{ {} }}", values.join(", "));
    let settings = Settings::from_toml(&text, "model.toml", &Settings::default_keys()).unwrap();
    let model = load("datatypes", "");
    let faults = derive("datatypes", model.session.graph(), &settings).unwrap_err();
    assert_eq!(faults, ["padding.inputs.in_bytes = 0: not a value of BYTES"]);
}

#[test]
fn a_dimension_that_an_output_does_not_follow_is_found_by_the_first_run() {
    // `mean` has one column, whatever the sequence is.
    let mut model = load("varlen", VARLEN);
    let mut spec = ModelSpec::clone(&model.spec);
    spec.padding.as_mut().unwrap().outputs[1] = spec.padding.as_ref().unwrap().outputs[0].clone();
    model.spec = Arc::new(spec);
    model.session.set_spec(Arc::clone(&model.spec));
    let request = model.tokens(1, &[1, 2, 3]);
    let error = model.run(&[(&request, 0, 1)], 0).unwrap_err();
    let expected = "output 'mean': its shape is [1, 1], expected 4 on axis 1, the size of 'sequence' in this run";
    assert_eq!(error, RunError::Model(expected.to_owned()));
}

#[test]
fn only_what_the_lengths_provide_for_has_a_family() {
    let model = load("varlen", VARLEN);
    let family = |model: &Loaded, length: usize| model.tokens(1, &vec![1; length]).family_dims();
    for length in [1, 4, 5, 32] {
        assert_eq!(family(&model, length), Some(vec![0, 0]), "{length}");
    }
    assert_eq!((family(&model, 33), model.tokens(1, &[]).family_dims()), (None, None));
    assert_eq!(family(&load("varlen", ""), 4), None);
    assert_eq!(family(&load("varlen", &format!("packing = \"off\"\n{VARLEN}")), 4), None);
}
