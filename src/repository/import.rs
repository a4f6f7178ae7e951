//! A folder as Hugging Face's hub has it becomes a model of the repository: `model.onnx` or `onnx/model.onnx` with the files that
//! belong to it, what says how texts are treated, and a model.toml that holds what was found and chosen.

use super::layout::MODEL;
use crate::model::text::Ends;
use crate::model::{Derived, Dim, Graph, Settings, TextModel, check_name};
use crate::runtime::external;
use crate::text::{Folder, Tokenizer};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// The files beside a model that are taken along, if they are there; the tokenizer is one of them.
const BESIDE: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "modules.json",
    "1_Pooling/config.json",
];

/// What is to be imported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Import {
    /// The name that the model will have.
    pub name: String,
    /// Its ONNX file.
    pub model: PathBuf,
    /// The files of weights that it names: where they lie, from its own folder.
    pub weights: Vec<PathBuf>,
    /// What else belongs to it: where it lies, and where below the model's folder it goes.
    pub beside: Vec<(PathBuf, PathBuf)>,
}

/// A model.toml, and each choice in it in words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// The text of model.toml.
    pub toml: String,
    /// What was found and chosen, one a line.
    pub choices: Vec<String>,
}

impl Import {
    /// Looks into a folder. `file` is the ONNX file to take, relative to it, if a person says so, and `name` what the model is to
    /// be called.
    ///
    /// # Errors
    /// Why there is nothing to import, and what to do.
    pub fn find(folder: &Path, file: Option<&Path>, name: Option<&str>) -> Result<Self, String> {
        let shown = folder.display();
        if !folder.is_dir() {
            return Err(format!("{shown}: not a folder"));
        }
        let places = file
            .map_or_else(|| vec![folder.join(MODEL), folder.join("onnx").join(MODEL)], |file| vec![folder.join(file)]);
        let Some(model) = places.iter().find(|path| path.is_file()).cloned() else {
            let wanted: Vec<String> = places.iter().map(|path| path.display().to_string()).collect();
            let others = onnx_files(folder);
            let hint = if others.is_empty() {
                "export the model to ONNX first".to_owned()
            } else {
                format!("--file chooses one of {}", others.join(", "))
            };
            return Err(format!("there is no {}; {hint}", wanted.join(" and no ")));
        };
        let own = fs::canonicalize(folder).ok();
        let own = own.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
        let name = name.map(str::to_owned).or(own).unwrap_or_default();
        check_name(&name).map_err(|allowed| format!("'{name}': expected {allowed}; --name gives another one"))?;
        let near = model.parent().unwrap_or(folder);
        // Those of the folder go over those beside an ONNX file in a folder of its own.
        let find = |name: &str| [folder, near].into_iter().map(|place| place.join(name)).find(|path| path.is_file());
        let beside = BESIDE.into_iter().filter_map(|name| Some((find(name)?, PathBuf::from(name)))).collect();
        let named = |fault: String| format!("{}: {fault}", model.display());
        let weights = external::names(&model).map_err(|error| named(format!("cannot be read: {error}")))?;
        let weights = weights.into_iter().map(|name| external::open(&model, &name).map(|_| PathBuf::from(name)));
        Ok(Self { weights: weights.collect::<Result<_, String>>().map_err(named)?, name, model, beside })
    }

    /// What model.toml is to say of a graph.
    ///
    /// # Errors
    /// If a file that belongs to the model is broken.
    pub fn describe(&self, graph: &Graph, derived: &Derived) -> Result<Written, String> {
        let mut written = Written::default();
        let _ =
            writeln!(written.toml, "# Written by `concertina add`: what it found, to be changed where it is wrong.");
        let tokenizer = self.beside.iter().find(|(_, to)| to.as_os_str() == "tokenizer.json");
        let Some((path, _)) = tokenizer else {
            written.choices.push("no tokenizer.json: it takes tensors, and no texts".to_owned());
            return Ok(written);
        };
        let folder = Folder::of(&self.beside)?;
        let tokenizer = Tokenizer::load(path).map_err(|reason| format!("{}: {reason}", path.display()))?;
        let settings = Settings::default();
        let ends = Ends {
            inputs: &graph.inputs,
            outputs: &graph.outputs,
            batch_axis: derived.batch_axis,
            settings: &settings,
        };
        match TextModel::derive(ends, &folder, tokenizer) {
            Err(reason) => {
                let reason = format!("it takes tensors, and no texts: {reason}");
                let _ = writeln!(written.toml, "# {reason}");
                written.choices.push(reason);
            }
            Ok(text) => {
                let from = folder.found.join(", ");
                written.choices.push(format!("it takes texts; read for that: tokenizer.json, {from}"));
                texts(&text, graph, &mut written);
                padding(&text, graph, &mut written);
            }
        }
        Ok(written)
    }

    /// Copies everything to a new folder of the repository, which is there whole or not at all. Answers where.
    ///
    /// # Errors
    /// If there is such a model already, or if something cannot be copied.
    pub fn place(&self, repository: &Path, toml: &str) -> Result<PathBuf, String> {
        let target = repository.join(&self.name);
        if target.exists() {
            return Err(format!("{}: there is such a model already; --name gives another name", target.display()));
        }
        // A name that the server does not look at.
        let part = repository.join(format!(".{}.part", self.name));
        let placed = self.copy(&part, toml).and_then(|()| fs::rename(&part, &target));
        placed.map_err(|error| {
            let _ = fs::remove_dir_all(&part);
            format!("{}: cannot be written: {error}", target.display())
        })?;
        Ok(target)
    }

    fn copy(&self, part: &Path, toml: &str) -> std::io::Result<()> {
        if part.exists() {
            fs::remove_dir_all(part)?;
        }
        let version = part.join("1");
        fs::create_dir_all(&version)?;
        fs::copy(&self.model, version.join(MODEL))?;
        let near = self.model.parent().unwrap_or(Path::new(""));
        let weights = self.weights.iter().map(|name| (near.join(name), version.join(name)));
        let beside = self.beside.iter().map(|(from, to)| (from.clone(), part.join(to)));
        for (from, to) in weights.chain(beside) {
            fs::create_dir_all(to.parent().unwrap_or(part))?;
            fs::copy(from, to)?;
        }
        fs::write(part.join("model.toml"), toml)
    }
}

/// The section `[text]`.
fn texts(text: &TextModel, graph: &Graph, written: &mut Written) {
    let toml = &mut written.toml;
    let _ = writeln!(toml, "\n[text]\nmax_tokens = {}", text.max_tokens);
    written.choices.push(format!("texts of at most {} tokens", text.max_tokens));
    if let Some(vectors) = &text.vectors {
        let output = &graph.outputs[vectors.output].name;
        let _ = writeln!(toml, "output = {}\npooling = \"{}\"", quoted(output), vectors.pooling.word());
        written.choices.push(format!("vectors from '{output}', pooling {}", vectors.pooling.word()));
    }
    if let Some(scores) = &text.scores {
        let output = &graph.outputs[scores.output].name;
        let _ = writeln!(toml, "output = {}", quoted(output));
        written.choices.push(format!("scores from '{output}': {}", scores.labels.join(", ")));
    }
}

/// The sections `[padding]` and `[warmup]`: how texts of different lengths share a batch.
fn padding(text: &TextModel, graph: &Graph, written: &mut Written) {
    let toml = &mut written.toml;
    for input in graph.inputs.iter().filter(|input| input.name == "attention_mask") {
        let _ = writeln!(toml, "\n[warmup.inputs]\n{} = {{ data = \"one\" }}", quoted(&input.name));
    }
    let lengths = text.lengths();
    let dim = match graph.inputs.first().and_then(|input| input.shape.get(1)) {
        Some(Dim::Symbol(name)) if !lengths.is_empty() => name,
        _ => {
            return written
                .choices
                .push("texts of different lengths run apart: nothing says how to pad them".to_owned());
        }
    };
    // One name for the length of all inputs, or it is not one length.
    if !graph.inputs.iter().all(|input| matches!(input.shape.get(1), Some(Dim::Symbol(other)) if other == dim)) {
        written
            .choices
            .push("texts of different lengths run apart: its inputs name their lengths differently".to_owned());
        return;
    }
    let _ = writeln!(toml, "\n[padding.{}]\nlengths = {lengths:?}\n\n[padding.inputs]", quoted(dim));
    for input in &graph.inputs {
        let value = if input.name == "input_ids" { text.pad() } else { 0 };
        let _ = writeln!(toml, "{} = {value}", quoted(&input.name));
    }
    written.choices.push(format!("'{dim}' is padded to {lengths:?}"));
}

/// A key or a text of TOML.
fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// The ONNX files of a folder and of its folder `onnx`, for people.
fn onnx_files(folder: &Path) -> Vec<String> {
    let mut found: Vec<String> = ["", "onnx"]
        .into_iter()
        .filter_map(|inner| fs::read_dir(folder.join(inner)).ok())
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "onnx"))
        .filter_map(|path| Some(path.strip_prefix(folder).ok()?.display().to_string()))
        .collect();
    found.sort();
    found
}
