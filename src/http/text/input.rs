//! What clients send: a body field by field, and in it texts: one, several, or the ids of tokens in place of either.

use crate::http::error::ApiError;
use serde::de::{Deserialize, DeserializeOwned, Deserializer, Error, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// One text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// As it is.
    Text(String),
    /// As tokens that the client has made.
    Ids(Vec<u32>),
    /// Two that a model reads together; a query is the same for many.
    Pair(Arc<str>, String),
}

impl Input {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Ids(ids) => size_of_val(ids.as_slice()),
            Self::Pair(one, other) => one.len() + other.len(),
        }
    }
}

/// What a request sends: a text, a list of them, a list of token ids, which is one text, or a list of such lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Inputs {
    pub(super) list: Vec<Input>,
    /// Whether it is a list of texts.
    pub(super) many: bool,
}

impl Inputs {
    /// A list of texts.
    pub(super) fn texts(texts: Vec<String>) -> Self {
        Self { list: texts.into_iter().map(Input::Text).collect(), many: true }
    }

    /// A text with each of several others.
    pub(super) fn pairs(one: &str, others: Vec<String>) -> Self {
        let one: Arc<str> = one.into();
        let pair = |other| Input::Pair(Arc::clone(&one), other);
        Self { list: others.into_iter().map(pair).collect(), many: true }
    }

    /// What an error calls one of the texts of a field.
    pub(super) fn name(&self, field: &str, at: usize) -> String {
        if self.many { format!("{field}[{at}]") } else { field.to_owned() }
    }
}

const EXPECTED: &str = "a text, a list of texts, a list of token ids, or a list of such lists";

impl<'de> Deserialize<'de> for Inputs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Inputs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(EXPECTED)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Inputs, E> {
                Ok(Inputs { list: vec![Input::Text(text.to_owned())], many: false })
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Inputs, A::Error> {
                let (mut list, mut ids) = (Vec::new(), Vec::new());
                while let Some(element) = seq.next_element()? {
                    match element {
                        Element::Text(text) => list.push(Input::Text(text)),
                        Element::Ids(inner) => list.push(Input::Ids(inner)),
                        Element::Id(id) => ids.push(id),
                    }
                    let kinds = list
                        .first()
                        .zip(list.last())
                        .map(|(first, last)| matches!(first, Input::Text(_)) == matches!(last, Input::Text(_)));
                    if kinds == Some(false) || !(list.is_empty() || ids.is_empty()) {
                        return Err(A::Error::custom(format!("the list mixes kinds; expected {EXPECTED}")));
                    }
                }
                let many = ids.is_empty();
                list.extend((!many).then_some(Input::Ids(ids)));
                Ok(Inputs { list, many })
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// What is to be classified: a text, a pair of texts, or a list of lists of one or two. A flat list of two is one pair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Pairs(pub(super) Inputs);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const EXPECTED: &str = "a text, a pair of texts, or a list of lists of one or two texts";
        let wrong = || D::Error::custom(format!("expected {EXPECTED}"));
        let one = |texts: Vec<String>| {
            let mut texts = texts.into_iter();
            match (texts.next(), texts.next(), texts.next()) {
                (Some(text), None, _) => Some(Input::Text(text)),
                (Some(one), Some(other), None) => Some(Input::Pair(one.into(), other)),
                _ => None,
            }
        };
        let list = match Texts::deserialize(deserializer)? {
            Texts::One(text) => return Ok(Self(Inputs { list: vec![Input::Text(text)], many: false })),
            Texts::Some(list) => list,
        };
        let flat: Option<Vec<String>> = list.iter().map(|inner| inner.alone().map(str::to_owned)).collect();
        if let Some(texts) = flat.filter(|texts| !texts.is_empty()) {
            return Ok(Self(Inputs { list: vec![one(texts).ok_or_else(wrong)?], many: false }));
        }
        let inner = |texts| match texts {
            Texts::One(_) => None,
            Texts::Some(texts) => one(texts.into_iter().map(Texts::into_alone).collect::<Option<_>>()?),
        };
        let list = list.into_iter().map(inner).collect::<Option<Vec<_>>>().ok_or_else(wrong)?;
        Ok(Self(Inputs { list, many: true }))
    }
}

/// A text, or texts and lists of texts.
#[derive(serde::Deserialize)]
#[serde(untagged, expecting = "expected a text, a pair of texts, or a list of lists of one or two texts")]
enum Texts {
    One(String),
    Some(Vec<Self>),
}

impl Texts {
    fn alone(&self) -> Option<&str> {
        match self {
            Self::One(text) => Some(text),
            Self::Some(_) => None,
        }
    }

    fn into_alone(self) -> Option<String> {
        match self {
            Self::One(text) => Some(text),
            Self::Some(_) => None,
        }
    }
}

/// What a list may hold.
enum Element {
    Text(String),
    Id(u32),
    Ids(Vec<u32>),
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Element;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a token id, or a list of token ids")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Element, E> {
                Ok(Element::Text(text.to_owned()))
            }

            fn visit_string<E: Error>(self, text: String) -> Result<Element, E> {
                Ok(Element::Text(text))
            }

            fn visit_u64<E: Error>(self, id: u64) -> Result<Element, E> {
                let too_large = |_| E::custom(format!("{id} is too large for a token id"));
                u32::try_from(id).map(Element::Id).map_err(too_large)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Element, A::Error> {
                let mut ids = Vec::new();
                while let Some(id) = seq.next_element::<u32>()? {
                    ids.push(id);
                }
                Ok(Element::Ids(ids))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// What a route reads out of the body of a request.
pub(super) trait Wanted: Sized + Send + 'static {
    /// Takes the fields that it knows; others are ignored.
    fn read(fields: &Fields<'_>) -> Result<Self, ApiError>;
}

/// The fields of a JSON object, not read yet, so that whatever is wrong with one is said with its name.
pub(super) struct Fields<'a>(HashMap<Cow<'a, str>, &'a RawValue>);

impl<'a> Fields<'a> {
    pub(super) fn new(body: &'a [u8]) -> Result<Self, ApiError> {
        let fields = serde_json::from_slice(body);
        fields.map(Self).map_err(|error| ApiError::invalid(format!("the body is not a JSON object: {error}")))
    }

    /// A field that may be missing, or null.
    pub(super) fn optional<T: DeserializeOwned>(&self, field: &'static str) -> Result<Option<T>, ApiError> {
        let Some(raw) = self.0.get(field).filter(|raw| raw.get() != "null") else { return Ok(None) };
        let wrong = |error: serde_json::Error| {
            // Where in the field it stands helps nobody.
            let text = error.to_string();
            let text = text.rsplit_once(" at line ").map_or(&*text, |(text, _)| text);
            // What Rust calls them.
            let text =
                text.replace("expected u32", "expected a token id").replace("expected u64", "expected a whole number");
            ApiError::Field { field, message: format!("{field}: {text}") }
        };
        serde_json::from_str(raw.get()).map(Some).map_err(wrong)
    }

    /// The fields of an object in a field; `None` if it is missing, or null.
    pub(super) fn within<T>(
        &self,
        field: &'static str,
        read: impl FnOnce(&Fields<'_>) -> Result<T, ApiError>,
    ) -> Result<Option<T>, ApiError> {
        let Some(raw) = self.0.get(field).filter(|raw| raw.get() != "null") else { return Ok(None) };
        let wrong = |_| ApiError::Field { field, message: format!("{field} must be a JSON object") };
        read(&Fields(serde_json::from_str(raw.get()).map_err(wrong)?)).map(Some)
    }

    /// A field that must be there.
    pub(super) fn required<T: DeserializeOwned>(&self, field: &'static str) -> Result<T, ApiError> {
        let missing = || ApiError::Field { field, message: format!("{field} is missing; the body must have it") };
        self.optional(field)?.ok_or_else(missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_input_is_read() {
        let text = |text: &str| Input::Text(text.to_owned());
        for (json, list, many) in [
            (r#""a""#, vec![text("a")], false),
            (r#"["a"]"#, vec![text("a")], true),
            (r#"["a", "b\n"]"#, vec![text("a"), text("b\n")], true),
            ("[1, 2]", vec![Input::Ids(vec![1, 2])], false),
            ("[[1], [2, 3]]", vec![Input::Ids(vec![1]), Input::Ids(vec![2, 3])], true),
            ("[[]]", vec![Input::Ids(vec![])], true),
            ("[]", vec![], true),
        ] {
            let read: Inputs = serde_json::from_str(json).expect(json);
            assert_eq!(read, Inputs { list, many }, "{json}");
        }
    }

    #[test]
    fn a_flat_list_of_two_is_one_pair() {
        let text = |text: &str| Input::Text(text.to_owned());
        let pair = |one: &str, other: &str| Input::Pair(one.into(), other.to_owned());
        for (json, list, many) in [
            (r#""a""#, vec![text("a")], false),
            (r#"["a"]"#, vec![text("a")], false),
            (r#"["a", "b"]"#, vec![pair("a", "b")], false),
            (r#"[["a"]]"#, vec![text("a")], true),
            (r#"[["a"], ["b", "c"]]"#, vec![text("a"), pair("b", "c")], true),
            ("[]", vec![], true),
        ] {
            let Pairs(read) = serde_json::from_str(json).expect(json);
            assert_eq!(read, Inputs { list, many }, "{json}");
        }
        for json in
            [r#"["a", "b", "c"]"#, r#"["a", ["b"]]"#, r#"[["a", "b", "c"]]"#, "[[]]", "[1]", "5", r#"[[["a"]]]"#]
        {
            let error = serde_json::from_str::<Pairs>(json).expect_err(json).to_string();
            assert!(error.contains("a pair of texts"), "{json}: {error}");
        }
    }

    #[test]
    fn what_is_none_of_them_is_refused_in_words() {
        for (json, part) in [
            ("5", "expected a text, a list of texts"),
            ("{}", "expected a text, a list of texts"),
            ("null", "expected a text, a list of texts"),
            (r#"["a", 1]"#, "mixes kinds"),
            (r#"[1, "a"]"#, "mixes kinds"),
            (r#"["a", [1]]"#, "mixes kinds"),
            (r#"[[1], "a"]"#, "mixes kinds"),
            ("[1, [2]]", "mixes kinds"),
            ("[-1]", "expected a text, a token id"),
            ("[1.5]", "expected a text, a token id"),
            ("[4294967296]", "too large for a token id"),
            ("[[4294967296]]", "expected u32"),
            (r#"[["a"]]"#, "expected u32"),
            ("[true]", "expected a text, a token id"),
        ] {
            let error = serde_json::from_str::<Inputs>(json).expect_err(json).to_string();
            assert!(error.contains(part), "{json}: {error}");
        }
    }
}
