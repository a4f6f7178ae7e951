//! Importing a folder of the hub: what is found, what is written, and what is refused.

use concertina::config::Config;
use concertina::model::derive::derive;
use concertina::model::{Dim, Graph, Settings, TensorSpec};
use concertina::repository::import::{Import, Written};
use concertina::repository::scan;
use concertina::tensor::DataType;
use std::fs;
use std::path::Path;

const WORDS: &str = include_str!("../text/tokenizer.json");

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a temporary folder");
    for (name, text) in files {
        let path = root.path().join(name);
        fs::create_dir_all(path.parent().expect(name)).expect(name);
        fs::write(path, text).expect(name);
    }
    root
}

/// The bytes of an ONNX file whose tensors lie in these files.
fn naming(names: &[&str]) -> String {
    let field = |number: u8, text: &str| {
        let length = u8::try_from(text.len()).ok().filter(u8::is_ascii).expect("a length of one byte");
        format!("{}{}{text}", char::from(number << 3 | 2), char::from(length))
    };
    let tensor = |name: &&str| {
        let location = field(1, "location") + &field(2, name);
        field(7, &field(5, &(field(8, "w") + &field(13, &location) + "\x70\x01")))
    };
    names.iter().map(tensor).collect()
}

fn tensor(name: &str, datatype: DataType, rest: &[Dim]) -> TensorSpec {
    let shape = [Dim::Symbol("batch".to_owned())].into_iter().chain(rest.iter().cloned()).collect();
    TensorSpec { name: name.to_owned(), datatype, shape }
}

/// A graph as exporters of encoders write it.
fn encoder() -> Graph {
    let length = Dim::Symbol("sequence_length".to_owned());
    let input = |name| tensor(name, DataType::Int64, std::slice::from_ref(&length));
    Graph {
        inputs: ["input_ids", "attention_mask", "token_type_ids"].map(input).into(),
        outputs: vec![tensor("last_hidden_state", DataType::Fp32, &[length, Dim::Fixed(384)])],
        unsupported: Vec::new(),
    }
}

fn written(import: &Import, graph: &Graph) -> Result<Written, String> {
    let derived = derive(&import.name, graph, &Settings::default()).expect("a graph");
    import.describe(graph, &derived)
}

#[test]
fn a_folder_of_the_hub_becomes_a_model_that_is_found_and_fits_its_graph() {
    let hub = folder(&[
        ("org/encoder/onnx/model.onnx", &naming(&["model.onnx_data", "model.data", "more/weights.bin"])),
        ("org/encoder/onnx/model.onnx_data", "weights"),
        ("org/encoder/onnx/model.data", "weights"),
        ("org/encoder/onnx/more/weights.bin", "weights"),
        ("org/encoder/onnx/model.onnx.old", "left where it is"),
        ("org/encoder/onnx/other.onnx", ""),
        ("org/encoder/tokenizer.json", WORDS),
        ("org/encoder/README.md", "left where it is"),
        ("org/encoder/1_Pooling/config.json", r#"{"pooling_mode_cls_token": true}"#),
        ("org/encoder/sentence_bert_config.json", r#"{"max_seq_length": 40}"#),
    ]);
    let import = Import::find(&hub.path().join("org/encoder"), None, None).expect("a model");
    assert_eq!(import.name, "encoder");
    let graph = encoder();
    let written = written(&import, &graph).expect("a model.toml");
    let text = written.choices.join("\n");
    for part in
        ["at most 40 tokens", "'last_hidden_state', pooling cls", "'sequence_length' is padded to [8, 16, 24, 32, 40]"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let repository = folder(&[]);
    let place = import.place(repository.path(), &written.toml).expect("room");
    for file in [
        "1/model.onnx",
        "1/model.onnx_data",
        "1/model.data",
        "1/more/weights.bin",
        "tokenizer.json",
        "1_Pooling/config.json",
        "sentence_bert_config.json",
    ] {
        assert!(place.join(file).is_file(), "{file}");
    }
    assert!(!place.join("README.md").exists() && !place.join("1/model.onnx.old").exists());
    assert!(fs::read_dir(repository.path()).expect("a folder").count() == 1);
    // It reads back without a fault, and every name in it is one of the graph.
    let scan = scan(repository.path(), &Config::default());
    assert_eq!(scan.faults, Vec::new(), "{}", written.toml);
    let settings = &scan.candidates[0].settings;
    derive("encoder", &graph, settings).expect("it fits the graph");
    assert_eq!((settings.text.max_tokens, settings.text.output.as_deref()), (Some(40), Some("last_hidden_state")));
    // The tokenizer's own token fills up.
    assert_eq!(settings.padding.inputs.get("input_ids"), Some(&3.0));
    let again = import.place(repository.path(), "").expect_err("there already");
    assert!(again.contains("already; --name"), "{again}");
}

#[test]
fn without_a_tokenizer_or_a_graph_for_it_the_model_takes_tensors() {
    let hub = folder(&[("a/model.onnx", ""), ("b/model.onnx", ""), ("b/tokenizer.json", WORDS)]);
    let import = |name: &str| Import::find(&hub.path().join(name), None, None).expect("a model");
    let one = Graph { inputs: vec![tensor("x", DataType::Fp32, &[])], ..encoder() };
    for (name, part) in [("a", "no tokenizer.json"), ("b", "its input 'x' is none of input_ids")] {
        let written = written(&import(name), &one).expect("a model.toml");
        assert!(written.choices[0].contains(part), "{:?}", written.choices);
        assert_eq!(written.toml.parse::<toml::Table>().expect("TOML"), toml::Table::new());
    }
}

#[test]
fn what_cannot_be_imported_says_what_to_do() {
    let hub = folder(&[
        ("empty/config.json", ""),
        ("quantized/onnx/model_quantized.onnx", ""),
        ("halves/onnx/model_fp16.onnx", &naming(&["model_fp16.onnx_data"])),
        ("halves/onnx/model_fp16.onnx_data", "weights"),
        ("without/model.onnx", &naming(&["weights.bin"])),
        ("outside/model.onnx", &naming(&["../halves/onnx/model_fp16.onnx_data"])),
        ("a b/model.onnx", ""),
        ("broken/model.onnx", ""),
        ("broken/tokenizer.json", "{"),
    ]);
    let find =
        |name: &str, file: Option<&str>, called| Import::find(&hub.path().join(name), file.map(Path::new), called);
    for (name, part) in [
        ("nowhere", "not a folder"),
        ("empty", "export the model to ONNX first"),
        ("quantized", "--file chooses one of onnx/model_quantized.onnx"),
        ("a b", "--name gives another one"),
        ("without", "'weights.bin', which the model names as a file of its weights, cannot be opened"),
        (
            "outside",
            "model_fp16.onnx_data', which the model names as a file of its weights, is not in the model's folder",
        ),
    ] {
        let fault = find(name, None, None).expect_err(name);
        assert!(fault.contains(part), "{name}: {fault}");
    }
    let chosen = find("quantized", Some("onnx/model_quantized.onnx"), Some("q")).expect("a model");
    assert_eq!((chosen.name.as_str(), chosen.weights.len()), ("q", 0));
    let halves = find("halves", Some("onnx/model_fp16.onnx"), None).expect("a model");
    let repository = folder(&[]);
    let place = halves.place(repository.path(), "").expect("room").join("1");
    assert!(place.join("model.onnx").is_file() && place.join("model_fp16.onnx_data").is_file());
    let fault = written(&find("broken", None, None).expect("a model"), &encoder()).expect_err("broken");
    assert!(fault.contains("tokenizer.json: no tokenizer"), "{fault}");
}
