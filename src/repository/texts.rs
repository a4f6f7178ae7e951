//! What lies beside a model that makes it take texts.

use super::Candidate;
use crate::model::text::Ends;
use crate::model::{ModelSpec, TextModel};
use crate::text::{Folder, Tokenizer};
use std::sync::Arc;

/// What makes tensors of texts for a loaded model; `None` if it takes none. A model whose model.toml has no `[text]` is served
/// all the same where that cannot be done, and the log says why.
///
/// # Errors
/// Why it cannot be done for a model whose model.toml asks for it.
pub(super) fn text_model(candidate: &Candidate, spec: &ModelSpec) -> Result<Option<Arc<TextModel>>, String> {
    match read(candidate, spec) {
        Ok(Some((folder, text))) => {
            let head = match (&text.vectors, &text.scores) {
                (Some(vectors), _) => {
                    format!("{}, pooling {}", spec.outputs[vectors.output].name, vectors.pooling.word())
                }
                (None, Some(scores)) => format!("{}, {} labels", spec.outputs[scores.output].name, scores.labels.len()),
                (None, None) => String::new(),
            };
            let from = folder.found.join(", ");
            tracing::info!(
                model = spec.name,
                version = spec.version,
                head,
                max_tokens = text.max_tokens,
                from,
                "model takes texts"
            );
            Ok(Some(Arc::new(text)))
        }
        Ok(None) if !candidate.settings.text.given => Ok(None),
        Ok(None) => Err("model.toml has [text], but there is no tokenizer.json beside the model".to_owned()),
        Err(reason) if candidate.settings.text.given => Err(format!("[text]: {reason}")),
        Err(reason) => {
            tracing::warn!(model = spec.name, version = spec.version, reason, "model takes no texts");
            Ok(None)
        }
    }
}

fn read(candidate: &Candidate, spec: &ModelSpec) -> Result<Option<(Folder, TextModel)>, String> {
    let Some(folder) = Folder::read(&candidate.file)? else { return Ok(None) };
    let named = |reason: String| format!("{}: {reason}", folder.tokenizer.display());
    let tokenizer = Tokenizer::load(&folder.tokenizer).map_err(named)?;
    let ends = Ends {
        inputs: &spec.inputs,
        outputs: &spec.outputs,
        batch_axis: spec.batch_axis,
        settings: &candidate.settings,
    };
    let text = TextModel::derive(ends, &folder, tokenizer)?;
    Ok(Some((folder, text)))
}
