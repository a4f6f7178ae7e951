//! `[text]`: how the texts of a model are treated, where the files beside it do not say so or are wrong.

use crate::keys::value::{choice, integer, integers, text};
use crate::keys::{Keys, Path};
use crate::text::{Keep, Pooling};
use std::collections::BTreeMap;
use toml::Value;

/// More tokens than any model has positions for.
const MOST_TOKENS: usize = 1 << 20;
/// A larger vector is none.
const MOST_DIMENSIONS: usize = 1 << 16;

/// The section `[text]`. What is `None` comes from the files beside the model, or from its graph.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextSettings {
    /// Whether there is such a section: then a model that cannot take texts is not served.
    pub given: bool,
    /// How the vectors of tokens become one.
    pub pooling: Option<Pooling>,
    /// Whether vectors are brought to unit length where the request does not say so itself.
    pub normalize: Option<bool>,
    /// The most tokens of a text, special ones included.
    pub max_tokens: Option<usize>,
    /// Whether longer texts are cut where the request does not say so itself.
    pub truncate: Option<bool>,
    /// Which end of them stays.
    pub keep: Option<Keep>,
    /// The output that holds vectors or scores.
    pub output: Option<String>,
    /// The shorter lengths that a vector may be asked for; empty: any.
    pub dimensions: Vec<usize>,
    /// What is put before texts, by name.
    pub prompts: BTreeMap<String, String>,
    /// The one of them for requests that name none.
    pub default_prompt: Option<String>,
}

/// Reads the section.
pub(super) fn section(keys: &mut Keys) -> TextSettings {
    let mut found = TextSettings::default();
    for (rest, value) in keys.below("text") {
        found.given = true;
        if let Err(allowed) = key(&mut found, &rest, &value) {
            let full: Path = ["text".to_owned()].into_iter().chain(rest).collect();
            keys.refuse(&full, &allowed);
        }
    }
    found
}

fn key(found: &mut TextSettings, rest: &[String], value: &Value) -> Result<(), String> {
    let names: Vec<&str> = rest.iter().map(String::as_str).collect();
    let truth = |value: &Value| value.as_bool().ok_or_else(|| "true or false".to_owned());
    match names.as_slice() {
        ["pooling"] => found.pooling = Some(choice(&Pooling::WORDS)(value)?),
        ["normalize"] => found.normalize = Some(truth(value)?),
        ["max_tokens"] => found.max_tokens = Some(integer(1..=MOST_TOKENS)(value)?),
        ["truncate"] => found.truncate = Some(truth(value)?),
        ["truncation_direction"] => {
            found.keep = Some(choice(&[("right", Keep::Start), ("left", Keep::End)])(value)?);
        }
        ["output"] => found.output = Some(text(value)?),
        ["dimensions"] => found.dimensions = integers(1..=MOST_DIMENSIONS)(value)?,
        ["default_prompt"] => found.default_prompt = Some(text(value)?),
        ["prompts", name] => drop(found.prompts.insert((*name).to_owned(), text(value)?)),
        _ => {
            let known = "pooling, normalize, max_tokens, truncate, truncation_direction, output, dimensions, \
                         default_prompt or [text.prompts] NAME";
            return Err(known.to_owned());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::model::Settings;
    use crate::text::{Keep, Pooling};

    fn read(text: &str) -> Result<super::TextSettings, Vec<String>> {
        Settings::from_toml(text, "model.toml", &Settings::default_keys()).map(|settings| settings.text)
    }

    #[test]
    fn every_key_is_read() {
        let text = "[text]\npooling = \"last\"\nnormalize = false\nmax_tokens = 77\ntruncate = true\n\
                    truncation_direction = \"left\"\noutput = \"y\"\ndimensions = [64, 128]\ndefault_prompt = \"q\"\n\
                    [text.prompts]\nq = \"query: \"\n";
        let found = read(text).expect(text);
        assert!(found.given);
        assert_eq!((found.pooling, found.normalize, found.max_tokens), (Some(Pooling::Last), Some(false), Some(77)));
        assert_eq!((found.truncate, found.keep, found.output.as_deref()), (Some(true), Some(Keep::End), Some("y")));
        assert_eq!((found.dimensions, found.default_prompt.as_deref()), (vec![64, 128], Some("q")));
        assert_eq!(found.prompts["q"], "query: ");
        assert!(!read("").expect("nothing").given);
    }

    #[test]
    fn what_a_key_does_not_allow_is_named() {
        for (text, fault) in [
            ("[text]\npooling = \"max\"", "text.pooling = \"max\" (file model.toml): expected one of \"mean\""),
            ("[text]\nmax_tokens = 0", "text.max_tokens = 0"),
            ("[text]\ntruncate = 1", "text.truncate = 1 (file model.toml): expected true or false"),
            ("[text]\ntruncation_direction = \"up\"", "text.truncation_direction = \"up\""),
            ("[text]\nlength = 5", "text.length = 5 (file model.toml): expected pooling, normalize"),
            ("[text.prompts]\nq = 5", "text.prompts.q = 5"),
        ] {
            let faults = read(text).expect_err(text);
            assert!(faults.len() == 1 && faults[0].starts_with(fault), "{text}: {faults:?}");
        }
    }
}
