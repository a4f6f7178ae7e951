//! What the files of a model's folder say of how its texts are to be treated: those that Hugging Face's libraries write.

use super::Pooling;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// A larger file of these is not what its name says.
const MOST_BYTES: u64 = 16 << 20;
/// A tokenizer_config.json without a limit has a number beyond all texts.
const NO_LIMIT: u64 = 1 << 30;

const TOKENIZER: &str = "tokenizer.json";
const POOLING: &str = "1_Pooling/config.json";
const MODULES: &str = "modules.json";
/// Everything that may say something, apart from the tokenizer itself.
const FILES: [&str; 6] = [
    POOLING,
    MODULES,
    "config.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "tokenizer_config.json",
];

/// What is known of a folder's texts. Everything may be missing but the tokenizer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Folder {
    /// The tokenizer.json.
    pub tokenizer: PathBuf,
    /// How to make one vector of many; a way that the server does not have is an error with its name.
    pub pooling: Option<Result<Pooling, String>>,
    /// The most tokens that the model's author thinks good.
    pub max_tokens: Option<usize>,
    /// The most tokens that the graph has positions for.
    pub positions: Option<usize>,
    /// The token that fills up.
    pub pad: Option<u32>,
    /// The classes of a classifier, in the order of its scores.
    pub labels: Vec<String>,
    /// Whether the model scores texts instead of embedding them.
    pub classifies: bool,
    /// What is put before texts, by the name of what they are for.
    pub prompts: BTreeMap<String, String>,
    /// The one that is put before texts whose request names none.
    pub default_prompt: Option<String>,
    /// Layers that come after pooling and are more than a change of length: an export must have them in the graph.
    pub layers: Vec<String>,
    /// Each fact that was found, with the file that says it, for people.
    pub found: Vec<String>,
}

/// The folders that a model's file may have its other files in: its own and, if that is a version, the model's.
#[must_use]
pub fn folders(model: &Path) -> Vec<PathBuf> {
    let own = model.parent().map(Path::to_path_buf);
    let number = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().bytes().all(|byte| byte.is_ascii_digit()))
    };
    let above = own.as_ref().filter(|own| number(own)).and_then(|own| own.parent()).map(Path::to_path_buf);
    own.into_iter().chain(above).collect()
}

/// Every file that says something of a model's texts, if it is there.
#[must_use]
pub fn files(model: &Path) -> Vec<PathBuf> {
    let names = || FILES.into_iter().chain([TOKENIZER]);
    let all = folders(model).into_iter().flat_map(|folder| names().map(move |name| folder.join(name)));
    all.filter(|path| path.is_file()).collect()
}

impl Folder {
    /// Reads what lies beside a model's file; `None` if there is no tokenizer.
    ///
    /// # Errors
    /// The first file that is not what its name says.
    pub fn read(model: &Path) -> Result<Option<Self>, String> {
        let folders = folders(model);
        let find = |name: &str| folders.iter().map(|folder| folder.join(name)).find(|path| path.is_file());
        find(TOKENIZER).map(|tokenizer| Self::with(tokenizer, find)).transpose()
    }

    /// The same of files that lie anywhere, each with the name that it is to have.
    ///
    /// # Errors
    /// As for [`Folder::read`].
    pub fn of(files: &[(PathBuf, PathBuf)]) -> Result<Self, String> {
        let find = |name: &str| files.iter().find(|(_, to)| to == Path::new(name)).map(|(from, _)| from.clone());
        Self::with(find(TOKENIZER).unwrap_or_default(), find)
    }

    fn with(tokenizer: PathBuf, find: impl Fn(&str) -> Option<PathBuf>) -> Result<Self, String> {
        let mut folder = Self { tokenizer, ..Self::default() };
        for name in FILES {
            let Some(path) = find(name) else { continue };
            let value = json(&path).map_err(|reason| format!("{}: {reason}", path.display()))?;
            folder.learn(name, &value);
        }
        Ok(folder)
    }

    /// Takes over what one file says.
    fn learn(&mut self, name: &str, value: &Value) {
        let empty = Map::new();
        let keys = value.as_object().unwrap_or(&empty);
        match name {
            POOLING => self.pooling = pooling(keys),
            MODULES => self.layers = layers(value),
            "config.json" => self.config(keys),
            "config_sentence_transformers.json" => self.prompts(keys),
            "sentence_bert_config.json" => self.max_tokens = size(keys, "max_seq_length"),
            // Only where sentence_bert_config.json, read before, says nothing.
            _ => self.max_tokens = self.max_tokens.or_else(|| size(keys, "model_max_length")),
        }
        if value.is_object() || value.is_array() {
            self.found.push(name.to_owned());
        }
    }

    fn config(&mut self, keys: &Map<String, Value>) {
        let number = |key| keys.get(key).and_then(Value::as_u64);
        self.pad = number("pad_token_id").and_then(|id| u32::try_from(id).ok());
        let positions = size(keys, "max_position_embeddings");
        // These begin to count behind the padding token.
        let offset = keys
            .get("model_type")
            .and_then(Value::as_str)
            .is_some_and(|kind| ["roberta", "xlm-roberta", "camembert", "mpnet"].contains(&kind));
        let skipped = if offset { self.pad.map_or(2, |pad| pad as usize + 1) } else { 0 };
        self.positions =
            positions.map(|positions| positions.saturating_sub(skipped)).filter(|positions| *positions > 0);
        let architectures = keys.get("architectures").and_then(Value::as_array);
        self.classifies = architectures
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .any(|name| name.ends_with("ForSequenceClassification"));
        let mut labels: Vec<(usize, String)> = Vec::new();
        for (id, label) in keys.get("id2label").and_then(Value::as_object).into_iter().flatten() {
            if let (Ok(id), Some(label)) = (id.parse(), label.as_str()) {
                labels.push((id, label.to_owned()));
            }
        }
        labels.sort();
        let complete = labels.iter().enumerate().all(|(at, (id, _))| at == *id);
        self.labels = labels.into_iter().filter(|_| complete).map(|(_, label)| label).collect();
    }

    fn prompts(&mut self, keys: &Map<String, Value>) {
        let prompts = keys.get("prompts").and_then(Value::as_object).into_iter().flatten();
        let text = |(name, text): (&String, &Value)| Some((name.clone(), text.as_str()?.to_owned()));
        self.prompts = prompts.filter_map(text).collect();
        self.default_prompt = keys.get("default_prompt_name").and_then(Value::as_str).map(str::to_owned);
    }
}

/// A positive size that is a limit of something.
fn size(keys: &Map<String, Value>, key: &str) -> Option<usize> {
    // Some libraries write it as 1e30.
    let value = keys.get(key)?.as_u64().filter(|value| (1..NO_LIMIT).contains(value))?;
    usize::try_from(value).ok()
}

/// sentence-transformers has a switch for each way; two of them on are two vectors put together.
fn pooling(keys: &Map<String, Value>) -> Option<Result<Pooling, String>> {
    let on = |key: &&String| key.starts_with("pooling_mode_") && keys[*key] == Value::Bool(true);
    let modes: Vec<&str> = match keys.get("pooling_mode").and_then(Value::as_str) {
        Some(mode) => vec![mode],
        None => keys.keys().filter(on).map(|key| key.trim_start_matches("pooling_mode_")).collect(),
    };
    match modes.as_slice() {
        [] => None,
        ["mean_tokens" | "mean"] => Some(Ok(Pooling::Mean)),
        ["cls_token" | "cls"] => Some(Ok(Pooling::Cls)),
        ["lasttoken" | "last"] => Some(Ok(Pooling::Last)),
        other => Some(Err(other.join(" and "))),
    }
}

/// The kinds of the modules that change more than the length of a pooled vector.
fn layers(value: &Value) -> Vec<String> {
    let kinds = value.as_array().into_iter().flatten().filter_map(|module| module["type"].as_str());
    let kinds = kinds.map(|kind| kind.rsplit('.').next().unwrap_or(kind));
    kinds.filter(|kind| !["Transformer", "Pooling", "Normalize"].contains(kind)).map(str::to_owned).collect()
}

fn json(path: &Path) -> Result<Value, String> {
    let cannot = |error: std::io::Error| format!("cannot be read: {error}");
    let mut text = Vec::new();
    let read = File::open(path).map_err(cannot)?.take(MOST_BYTES + 1).read_to_end(&mut text).map_err(cannot)?;
    if read as u64 > MOST_BYTES {
        return Err(format!("larger than {MOST_BYTES} bytes"));
    }
    serde_json::from_slice(&text).map_err(|error| format!("not JSON: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().expect("a temporary folder");
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().expect(name)).expect(name);
            std::fs::write(path, text).expect(name);
        }
        let model = root.path().join("m/1/model.onnx");
        (root, model)
    }

    #[test]
    fn without_a_tokenizer_there_are_no_texts() {
        let (_root, model) = folder(&[("m/1/model.onnx", ""), ("m/config.json", "{}")]);
        assert_eq!(Folder::read(&model), Ok(None));
    }

    #[test]
    fn the_versions_own_files_go_over_those_of_the_model() {
        let (root, model) = folder(&[
            ("m/tokenizer.json", "{}"),
            ("m/sentence_bert_config.json", r#"{"max_seq_length": 256}"#),
            ("m/1/sentence_bert_config.json", r#"{"max_seq_length": 64}"#),
            ("m/tokenizer_config.json", r#"{"model_max_length": 512}"#),
        ]);
        let read = Folder::read(&model).expect("readable").expect("a tokenizer");
        assert_eq!(read.max_tokens, Some(64));
        assert_eq!(read.tokenizer, root.path().join("m/tokenizer.json"));
        assert_eq!(files(&model).len(), 4);
        // A file in no version folder has no other folder than its own.
        assert_eq!(folders(&root.path().join("m/model.onnx")), [root.path().join("m")]);
    }

    #[test]
    fn each_file_says_what_it_says() {
        let (_root, model) = folder(&[
            ("m/tokenizer.json", "{}"),
            ("m/1_Pooling/config.json", r#"{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}"#),
            ("m/tokenizer_config.json", r#"{"model_max_length": 1000000000000000019884624838656}"#),
            (
                "m/config.json",
                r#"{"model_type": "xlm-roberta", "pad_token_id": 1, "max_position_embeddings": 514,
                    "architectures": ["XLMRobertaForSequenceClassification"], "id2label": {"1": "no", "0": "yes"}}"#,
            ),
            (
                "m/config_sentence_transformers.json",
                r#"{"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}"#,
            ),
            (
                "m/modules.json",
                r#"[{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Pooling"},
                    {"type": "sentence_transformers.models.Dense"}, {"type": "sentence_transformers.models.Normalize"}]"#,
            ),
        ]);
        let read = Folder::read(&model).expect("readable").expect("a tokenizer");
        assert_eq!(read.pooling, Some(Ok(Pooling::Cls)));
        assert_eq!((read.max_tokens, read.positions, read.pad), (None, Some(512), Some(1)));
        assert_eq!((read.labels, read.classifies), (vec!["yes".to_owned(), "no".to_owned()], true));
        assert_eq!(read.prompts["query"], "query: ");
        assert_eq!(read.default_prompt.as_deref(), Some("query"));
        assert_eq!(read.layers, ["Dense"]);
    }

    #[test]
    fn ways_of_pooling_that_are_not_there_keep_their_name() {
        for (text, expected) in [
            (r#"{"pooling_mode_max_tokens": true}"#, Some(Err("max_tokens".to_owned()))),
            (
                r#"{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}"#,
                Some(Err("cls_token and mean_tokens".to_owned())),
            ),
            (r#"{"pooling_mode_lasttoken": true}"#, Some(Ok(Pooling::Last))),
            (r#"{"pooling_mode": "mean"}"#, Some(Ok(Pooling::Mean))),
            (r#"{}"#, None),
        ] {
            let value: Value = serde_json::from_str(text).expect(text);
            assert_eq!(pooling(value.as_object().expect(text)), expected, "{text}");
        }
    }

    #[test]
    fn a_file_that_is_broken_is_named() {
        let (_root, model) = folder(&[("m/tokenizer.json", "{}"), ("m/config.json", "{")]);
        let fault = Folder::read(&model).expect_err("broken");
        assert!(fault.contains("config.json: not JSON"), "{fault}");
    }
}
