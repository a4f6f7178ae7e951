use super::*;
use crate::model::{Graph, ModelSpec, derive};
use crate::tensor::Tensor;
use crate::text::{Pooling, Tokens};
use crate::units::ModelId;
use std::sync::Arc;

const WORDS: &str = include_str!("../../../tests/text/tokenizer.json");

/// `name[batch, 3, ?]` in the graph's own notation.
fn tensor(text: &str, datatype: DataType) -> TensorSpec {
    let (name, dims) = text.trim_end_matches(']').split_once('[').expect(text);
    let dim = |dim: &str| match dim {
        "?" => Dim::Any,
        number if number.parse::<usize>().is_ok() => Dim::Fixed(number.parse().expect(number)),
        symbol => Dim::Symbol(symbol.to_owned()),
    };
    TensorSpec { name: name.to_owned(), datatype, shape: dims.split(", ").map(dim).collect() }
}

fn spec(inputs: &[&str], outputs: &[&str], settings: &str) -> ModelSpec {
    let side = |texts: &[&str], datatype| texts.iter().map(|text| tensor(text, datatype)).collect();
    ModelSpec {
        id: ModelId(1),
        name: "m".to_owned(),
        version: 1,
        inputs: side(inputs, DataType::Int64),
        outputs: side(outputs, DataType::Fp32),
        batch_axis: Some(0),
        unbatched_reason: None,
        max_batch_size: 8,
        padding: None,
        settings: Settings::from_toml(settings, "model.toml", &Settings::default_keys()).expect(settings),
        text: None,
    }
}

fn derived(spec: &ModelSpec, folder: &Folder) -> Result<TextModel, String> {
    let ModelSpec { inputs, outputs, batch_axis, settings, .. } = spec;
    let tokenizer = Tokenizer::from_bytes(WORDS.as_bytes()).expect("a tokenizer");
    TextModel::derive(Ends { inputs, outputs, batch_axis: *batch_axis, settings }, folder, tokenizer)
}

const BERT: [&str; 3] = ["input_ids[batch, seq]", "attention_mask[batch, seq]", "token_type_ids[batch, seq]"];

#[test]
fn a_vector_for_the_text_goes_over_pooling_unless_somebody_wants_pooling() {
    let outputs = ["last_hidden_state[batch, seq, 4]", "sentence_embedding[batch, 4]"];
    let head =
        |settings: &str, folder: &Folder| derived(&spec(&BERT, &outputs, settings), folder).map(|text| text.vectors);
    let vectors = |output, pooling| Ok(Some(Vectors { output, pooling, width: Some(4) }));
    let cls = Folder { pooling: Some(Ok(Pooling::Cls)), ..Folder::default() };
    assert_eq!(head("", &cls), vectors(1, Pooling::None));
    assert_eq!(head("[text]\npooling = \"last\"", &cls), vectors(0, Pooling::Last));
    assert_eq!(head("[text]\noutput = \"last_hidden_state\"", &cls), vectors(0, Pooling::Cls));
    assert_eq!(head("[text]\noutput = \"last_hidden_state\"", &Folder::default()), vectors(0, Pooling::Mean));
    assert!(head("[text]\noutput = \"y\"", &cls).is_err_and(|fault| fault.contains("no output of this name")));
    // An export of an encoder alone.
    let text = derived(&spec(&BERT, &outputs[..1], ""), &cls).expect("texts");
    assert_eq!(
        (text.vectors, text.tokens),
        (Some(Vectors { output: 0, pooling: Pooling::Cls, width: Some(4) }), Some(0))
    );
}

#[test]
fn what_an_export_lacks_is_said_and_not_made_up() {
    let encoder = spec(&BERT, &["last_hidden_state[batch, seq, 4]"], "");
    let dense = Folder { layers: vec!["Dense".to_owned()], ..Folder::default() };
    let max = Folder { pooling: Some(Err("max_tokens".to_owned())), ..Folder::default() };
    let prompt = Folder { default_prompt: Some("query".to_owned()), ..Folder::default() };
    for (spec, folder, part) in [
        (&encoder, &dense, "layers after pooling (Dense)"),
        (&encoder, &max, "pooling by max_tokens"),
        (&encoder, &prompt, "'query' is not among its prompts"),
        (&spec(&["x[batch, 3]"], &["y[batch, 4]"], ""), &Folder::default(), "input 'x' is none of input_ids"),
        (&spec(&["attention_mask[batch, seq]"], &["y[batch, 4]"], ""), &Folder::default(), "no input called input_ids"),
        (&spec(&["input_ids[batch]"], &["y[batch, 4]"], ""), &Folder::default(), "no matrix"),
        (&spec(&BERT, &["y[batch]"], ""), &Folder::default(), "no output has a vector"),
    ] {
        let fault = derived(spec, folder).expect_err(part);
        assert!(fault.contains(part), "{part}: {fault}");
    }
}

#[test]
fn scores_are_named_by_the_folder_as_far_as_it_does() {
    let labels = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let scores = |outputs: &[&str], folder: &Folder| derived(&spec(&BERT, outputs, ""), folder).map(|text| text.scores);
    let named = Folder { labels: labels(&["no", "yes"]), classifies: true, ..Folder::default() };
    let found = scores(&["logits[batch, 2]"], &named).expect("texts").expect("scores");
    assert_eq!((found.labels.clone(), found.ranks()), (labels(&["no", "yes"]), false));
    let found = scores(&["logits[batch, 1]"], &Folder::default()).expect("texts").expect("scores");
    assert_eq!((found.labels.clone(), found.ranks()), (labels(&["LABEL_0"]), true));
    assert!(scores(&["logits[batch, 3]"], &named).is_err_and(|fault| fault.contains("names 2 labels")));
    assert!(scores(&["logits[batch, ?]"], &Folder::default()).is_err_and(|fault| fault.contains("how many scores")));
}

#[test]
fn the_shortest_limit_of_tokens_holds() {
    let text =
        |settings: &str, folder: &Folder| derived(&spec(&BERT, &["y[batch, 4]"], settings), folder).expect("texts");
    let limits = |max_tokens, positions| Folder { max_tokens, positions, ..Folder::default() };
    assert_eq!(text("", &limits(Some(256), Some(512))).max_tokens, 256);
    assert_eq!(text("", &limits(Some(512), Some(300))).max_tokens, 300);
    // The tokenizer's own limit is 5.
    assert_eq!(text("", &limits(None, None)).max_tokens, 5);
    assert_eq!(text("[text]\nmax_tokens = 40", &limits(Some(256), Some(512))).max_tokens, 40);
    let fixed = spec(&["input_ids[batch, 7]", "attention_mask[batch, 7]"], &["y[batch, 4]"], "");
    let text = derived(&fixed, &limits(Some(256), None)).expect("texts");
    assert_eq!((text.max_tokens, text.lengths), (7, vec![7]));
}

#[test]
fn lengths_are_declared_or_short_where_a_mask_allows_padding() {
    let folder = Folder { max_tokens: Some(600), ..Folder::default() };
    let lengths = |inputs: &[&str], settings: &str| {
        derived(&spec(inputs, &["y[batch, 4]"], settings), &folder).expect("texts").lengths
    };
    assert_eq!(lengths(&BERT, ""), [8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 600]);
    let declared = "padding.seq.lengths = [16, 600]\npadding.inputs = { input_ids = 0 }";
    assert_eq!(lengths(&BERT, declared), [16, 600]);
    assert_eq!(lengths(&BERT[..1], ""), Vec::<usize>::new());
    assert_eq!(lengths(&BERT[..1], declared), [16, 600]);
}

#[test]
fn texts_become_requests_by_length_and_keep_their_places() {
    let spec =
        Arc::new(spec(&["input_ids[batch, seq]", "position_ids[batch, seq]", BERT[1], BERT[2]], &["y[batch, 4]"], ""));
    let text = derived(&spec, &Folder { max_tokens: Some(16), ..Folder::default() }).expect("texts");
    let tokens = |ids: &[u32]| Tokens { ids: ids.to_vec(), types: vec![1; ids.len()] };
    let texts = [tokens(&[7; 9]), tokens(&[5, 6]), tokens(&[8; 10]), tokens(&[9; 8])];
    let parts = text.parts(&spec, &texts, 0, 100).expect("requests");
    let shapes: Vec<_> = parts.iter().map(|part| (part.rows.clone(), part.request.inputs[0].shape.to_vec())).collect();
    assert_eq!(shapes, [(vec![1, 3], vec![2, 8]), (vec![0, 2], vec![2, 16])]);
    let values = |tensor: &Tensor| -> Vec<i64> {
        let data = tensor.data.to_contiguous();
        data.chunks(8).map(|bytes| i64::from_le_bytes(bytes.try_into().expect("8 bytes"))).collect()
    };
    // 3 is the tokenizer's token that fills up.
    let first = &parts[0].request.inputs;
    assert_eq!(values(&first[0])[..8], [5, 6, 3, 3, 3, 3, 3, 3]);
    assert_eq!(values(&first[1])[..8], [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(values(&first[2])[..8], [1, 1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(values(&first[3])[..8], [1, 1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(values(&first[2])[8..], [1; 8]);
    let parts = text.parts(&spec, &texts, 0, 1).expect("requests");
    assert_eq!(parts.len(), 4);
}

#[test]
fn texts_of_a_model_whose_batches_are_padded_are_grouped_as_the_batcher_pads_them() {
    let graph = |spec: &ModelSpec| Graph {
        inputs: spec.inputs.clone(),
        outputs: spec.outputs.clone(),
        unsupported: Vec::new(),
    };
    let mut spec = spec(&BERT, &["y[batch, 4]"], "");
    spec.padding = derive("m", &graph(&spec), &spec.settings).expect("a model").padding;
    let spec = Arc::new(spec);
    let text = derived(&spec, &Folder::default()).expect("texts");
    let texts = [34, 48, 36, 9, 47, 37].map(|tokens| Tokens { ids: vec![7; tokens], types: vec![0; tokens] });
    let parts = text.parts(&spec, &texts, 0, 100).expect("requests");
    let shapes: Vec<_> = parts.iter().map(|part| (part.rows.clone(), part.request.inputs[0].shape.to_vec())).collect();
    // Steps of four tokens; each part is as long as the longest in it.
    assert_eq!(
        shapes,
        [(vec![3], vec![1, 9]), (vec![0, 2], vec![2, 36]), (vec![5], vec![1, 37]), (vec![1, 4], vec![2, 48])]
    );
}

#[test]
fn outputs_become_one_vector_for_each_text_whatever_stands_in_the_padding() {
    let tensor = |shape: &[usize], values: &[f32]| Tensor {
        datatype: DataType::Fp32,
        shape: shape.into(),
        data: values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into(),
    };
    let hidden = tensor(&[2, 2, 2], &[1.0, 2.0, f32::NAN, f32::NAN, 3.0, 4.0, 5.0, 8.0]);
    assert_eq!(vectors(&hidden, &[1, 2], Pooling::Mean), Ok(vec![vec![1.0, 2.0], vec![4.0, 6.0]]));
    assert_eq!(vectors(&hidden, &[1, 2], Pooling::Last), Ok(vec![vec![1.0, 2.0], vec![5.0, 8.0]]));
    let each = token_vectors(&hidden, &[1, 2]).expect("vectors");
    assert_eq!(each, [vec![vec![1.0, 2.0]], vec![vec![3.0, 4.0], vec![5.0, 8.0]]]);
    assert!(vectors(&hidden, &[2, 2], Pooling::Mean).is_err_and(|fault| fault.contains("not a number")));
    assert!(vectors(&hidden, &[1, 3], Pooling::Mean).is_err_and(|fault| fault.contains("shape")));
    assert!(vectors(&hidden, &[1], Pooling::Mean).is_err());
    assert_eq!(vectors(&tensor(&[2, 1], &[1.0, 2.0]), &[9, 9], Pooling::None), Ok(vec![vec![1.0], vec![2.0]]));
}

#[test]
fn lengths_of_vectors_and_prompts_are_those_that_the_model_has() {
    let text =
        derived(&spec(&BERT, &["y[batch, 8]"], "[text]\ndimensions = [2, 4]"), &Folder::default()).expect("texts");
    for (wanted, fits) in [(2, true), (4, true), (8, true), (3, false), (0, false), (9, false), (u64::MAX, false)] {
        assert_eq!(text.width(wanted, 8).is_ok(), fits, "{wanted}");
    }
    let settings = "[text]\ndefault_prompt = \"q\"\n[text.prompts]\nq = \"query: \"\nd = \"\"";
    let text = derived(&spec(&BERT, &["y[batch, 8]"], settings), &Folder::default()).expect("texts");
    assert_eq!((text.prompt(None), text.prompt(Some("d"))), (Ok("query: "), Ok("")));
    assert!(text.prompt(Some("x")).is_err_and(|fault| fault.contains("its prompts are: d, q")));
}
