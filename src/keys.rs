//! Keys and values of a TOML file, read one by one so that every fault is found and not only the first.
//!
//! [`Keys`] holds the values of several layers (defaults, a file, environment, flags), the later over the earlier, and knows
//! where each value came from. Whoever reads says what a key allows; what nobody reads is an unknown key.

pub mod value;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use toml::{Table, Value};

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The defaults inside the server.
    Default,
    /// This file.
    File(String),
    /// This environment variable.
    Environment(String),
    /// This flag.
    Flag(String),
    /// The request to load a model.
    Request,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "file {path}"),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
            Self::Request => f.write_str("the request"),
        }
    }
}

/// A key, from the outermost table inwards. Names of tensors may contain dots, so it is not one text.
pub type Path = Vec<String>;

/// How two keys must relate, in words.
#[derive(Clone, Copy, Debug)]
pub struct Relation<'a> {
    /// The key that is wrong if it does not hold.
    pub key: &'a str,
    /// Such as `at least`.
    pub must_be: &'a str,
    /// The key that it is compared with.
    pub other: &'a str,
    /// What would happen.
    pub or_else: &'a str,
}

/// What is shown in place of a secret.
pub const HIDDEN: &str = "***";

/// Values by key, the faults found while reading them, and which keys were asked for.
#[derive(Clone, Default, PartialEq)]
pub struct Keys {
    /// The table that the keys are in, for messages.
    scope: Path,
    /// Keys and tables whose values are secrets.
    hidden: Vec<Path>,
    values: BTreeMap<Path, (Value, Origin)>,
    asked: BTreeSet<Path>,
    faults: Vec<String>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").field("values", &self.render()).field("faults", &self.faults).finish_non_exhaustive()
    }
}

impl Keys {
    /// From now on, nothing shows the values of this key and of whatever is below it.
    pub fn hide(&mut self, key: &str) {
        self.hidden.push(path(key));
    }

    /// The value of a key as it may be shown. An empty text hides nothing.
    fn shown(&self, key: &[String], value: &Value) -> String {
        if self.is_hidden(key) && value.as_str() != Some("") { format!("\"{HIDDEN}\"") } else { value.to_string() }
    }

    fn is_hidden(&self, key: &[String]) -> bool {
        let full = [&self.scope, key].concat();
        self.hidden.iter().any(|hidden| full.starts_with(hidden))
    }

    /// Puts the values of a TOML text over those that are there. Text that is not TOML is one fault.
    pub fn overlay(&mut self, text: &str, origin: &Origin) {
        match text.parse::<Table>() {
            Ok(table) => self.flatten(&mut Vec::new(), table, origin),
            Err(error) => self.faults.push(not_toml(text, origin, &error)),
        }
    }

    /// Puts one value over what is there.
    pub fn set(&mut self, key: &str, value: Value, origin: Origin) {
        self.values.insert(path(key), (value, origin));
    }

    fn flatten(&mut self, prefix: &mut Path, table: Table, origin: &Origin) {
        for (name, value) in table {
            prefix.push(name);
            match value {
                Value::Table(inner) => self.flatten(prefix, inner, origin),
                leaf => {
                    self.values.insert(prefix.clone(), (leaf, origin.clone()));
                }
            }
            prefix.pop();
        }
    }

    /// The values below one table, as keys without its name, which messages still have. Counts as asking for all of them.
    pub fn table(&mut self, name: &str) -> Self {
        let inside = |key: &Path| key.len() > 1 && key[0] == name;
        let values: BTreeMap<Path, _> = self
            .values
            .iter()
            .filter(|(key, _)| inside(key))
            .map(|(key, value)| (key[1..].to_vec(), value.clone()))
            .collect();
        self.asked.extend(self.values.keys().filter(|key| inside(key)).cloned());
        Self { scope: path(name), hidden: self.hidden.clone(), values, ..Self::default() }
    }

    /// Takes over the faults of a table, unknown keys included.
    pub fn absorb(&mut self, table: Self) {
        self.faults.extend(table.finish());
    }

    /// The same values as the outermost keys of a file of their own.
    #[must_use]
    pub fn outermost(mut self) -> Self {
        self.scope.clear();
        self
    }

    /// The full name of a key.
    fn written(&self, key: &[String]) -> String {
        written(&[&self.scope, key].concat())
    }

    /// Reads one key that must be there. `parse` answers what is allowed if the value is not; then, and if the key is
    /// missing, the fault is kept and there is no value.
    pub fn read<T>(&mut self, key: &str, parse: impl FnOnce(&Value) -> Result<T, String>) -> Option<T> {
        let path = path(key);
        self.asked.insert(path.clone());
        if let Some((value, _)) = self.values.get(&path) {
            match parse(value) {
                Ok(parsed) => return Some(parsed),
                Err(allowed) => self.refuse(&path, &allowed),
            }
        } else {
            self.faults.push(format!("{} is missing", self.written(&path)));
        }
        None
    }

    /// Takes every key below a table whose keys are free names, with the rest of the key. Counts as asking for them.
    pub fn below(&mut self, table: &str) -> Vec<(Path, Value)> {
        let prefix = path(table);
        let found: Vec<_> = self
            .values
            .iter()
            .filter(|(key, _)| key.len() > prefix.len() && key.starts_with(&prefix))
            .map(|(key, (value, _))| (key.clone(), value.clone()))
            .collect();
        self.asked.extend(found.iter().map(|(key, _)| key.clone()));
        found.into_iter().map(|(key, value)| (key[prefix.len()..].to_vec(), value)).collect()
    }

    /// Keeps the fault that the value of a key is not what is allowed.
    pub fn refuse(&mut self, key: &[String], allowed: &str) {
        let fault = match self.values.get(key) {
            Some((value, origin)) => {
                format!("{} = {} ({origin}): expected {allowed}", self.written(key), self.shown(key, value))
            }
            None => format!("{}: expected {allowed}", self.written(key)),
        };
        self.faults.push(fault);
    }

    /// Keeps a fault if two keys do not relate as they must. `holds` is `None` if either has no value: then that is the fault.
    pub fn require(&mut self, holds: Option<bool>, relation: &Relation<'_>) {
        if holds == Some(false) {
            let (key, other) = (self.show(relation.key), self.show(relation.other));
            self.faults.push(format!("{key}: must be {} {other}, or {}", relation.must_be, relation.or_else));
        }
    }

    /// A key with its value as it was written and where it came from.
    fn show(&self, key: &str) -> String {
        let path = path(key);
        match self.values.get(&path) {
            Some((value, origin)) => format!("{} = {} ({origin})", self.written(&path), self.shown(&path, value)),
            None => self.written(&path),
        }
    }

    /// Ends the reading: the faults, with one more for each key that nobody asked for.
    #[must_use]
    pub fn finish(mut self) -> Vec<String> {
        let unknown: Vec<_> = self.values.iter().filter(|(key, _)| !self.asked.contains(*key)).collect();
        for (key, (value, origin)) in unknown {
            let nearest = self.nearest(key);
            // Whoever misspells the name of a secret has not made its value public.
            let shown = self.shown(nearest.filter(|known| self.is_hidden(known)).unwrap_or(key), value);
            let hint = match nearest {
                _ if self.asked.iter().any(|known| known.len() > key.len() && known.starts_with(key)) => {
                    format!("; [{}] is a table of keys", self.written(key))
                }
                Some(known) => format!("; did you mean {}?", self.written(known)),
                None => String::new(),
            };
            self.faults.push(format!("{} = {shown} ({origin}): unknown key{hint}", self.written(key)));
        }
        self.faults
    }

    /// A known key that looks like this one.
    fn nearest(&self, key: &[String]) -> Option<&Path> {
        let wanted = written(key);
        let last = key.last().map(String::as_str).unwrap_or_default();
        let score = |known: &Path| {
            let same_name = known.last().is_some_and(|name| name == last);
            strsim::jaro_winkler(&wanted, &written(known)) + if same_name { 1.0 } else { 0.0 }
        };
        let best = self.asked.iter().map(|known| (score(known), known)).max_by(|a, b| a.0.total_cmp(&b.0));
        best.filter(|(score, _)| *score > 0.85).map(|(_, known)| known)
    }

    /// All values as TOML, each with where it came from; secrets are not shown.
    #[must_use]
    pub fn render(&self) -> String {
        let mut tables: BTreeMap<&[String], String> = BTreeMap::new();
        for (key, (value, origin)) in &self.values {
            if let Some((name, table)) = key.split_last() {
                let line = format!("{} = {} # {origin}\n", written(std::slice::from_ref(name)), self.shown(key, value));
                tables.entry(table).or_default().push_str(&line);
            }
        }
        let header =
            |table: &[String]| if table.is_empty() { String::new() } else { format!("[{}]\n", written(table)) };
        let blocks: Vec<String> = tables.iter().map(|(table, lines)| format!("{}{lines}", header(table))).collect();
        blocks.join("\n")
    }

    /// Every key that was asked for with [`Keys::read`] or found by the others.
    pub fn asked(&self) -> impl Iterator<Item = String> {
        self.asked.iter().map(|key| written(key))
    }
}

/// Says where a text is not TOML without repeating the line, which may hold a secret.
fn not_toml(text: &str, origin: &Origin, error: &toml::de::Error) -> String {
    let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    let line = before.split('\n').count();
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    format!("{origin}: this is not TOML: line {line}, column {column}: {}", error.message().trim_end())
}

/// A key without free names in it, taken apart.
fn path(key: &str) -> Path {
    key.split('.').map(str::to_owned).collect()
}

/// A key as TOML writes it.
fn written(key: &[String]) -> String {
    let bare = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    let names: Vec<String> =
        key.iter().map(|name| if bare(name) { name.clone() } else { Value::from(name.as_str()).to_string() }).collect();
    names.join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(file: &str) -> Keys {
        let mut keys = Keys::default();
        keys.overlay("a = 1\n[t]\nb = \"x\"\nc = 2", &Origin::Default);
        keys.overlay(file, &Origin::File("f.toml".to_owned()));
        keys
    }

    #[test]
    fn later_layers_win_key_by_key_and_say_where_they_came_from() {
        let mut keys = layers("[t]\nb = \"y\"");
        keys.set("a", Value::from("9"), Origin::Flag("--a".to_owned()));
        assert_eq!(keys.read("a", value::integer(1..=9u32)), Some(9));
        assert_eq!(keys.read("t.b", value::text), Some("y".to_owned()));
        assert_eq!(keys.read("t.c", value::integer(1..=9u32)), Some(2));
        assert_eq!(keys.render(), "a = \"9\" # flag --a\n\n[t]\nb = \"y\" # file f.toml\nc = 2 # default\n");
        assert_eq!(keys.finish(), Vec::<String>::new());
    }

    #[test]
    fn every_fault_is_kept_with_key_value_origin_and_what_is_allowed() {
        let mut keys = layers("a = 0\nx = 1\n[t]\nb = 3\nbb = 1");
        assert_eq!(keys.read("a", value::integer(1..=9u32)), None);
        assert_eq!(keys.read("t.b", value::text), None);
        assert_eq!(keys.read("t.c", value::integer(1..=9u32)), Some(2));
        assert_eq!(keys.read("gone", value::text), None);
        assert_eq!(
            keys.finish(),
            [
                "a = 0 (file f.toml): expected an integer from 1 to 9",
                "t.b = 3 (file f.toml): expected a text in quotes",
                "gone is missing",
                "t.bb = 1 (file f.toml): unknown key; did you mean t.b?",
                "x = 1 (file f.toml): unknown key",
            ]
        );
    }

    #[test]
    fn a_value_in_place_of_a_table_and_text_that_is_not_toml_are_faults() {
        let mut keys = layers("t = 5");
        keys.overlay("= 1", &Origin::File("g.toml".to_owned()));
        let _ = (keys.read("a", value::text), keys.read("t.b", value::text), keys.read("t.c", value::text));
        let faults = keys.finish();
        assert!(faults.iter().any(|fault| fault.contains("[t] is a table of keys")), "{faults:?}");
        assert!(faults.iter().any(|fault| fault.starts_with("file g.toml: this is not TOML")), "{faults:?}");
    }

    #[test]
    fn secrets_are_shown_nowhere() {
        for file in [
            "[s]\nkey = \"S3CRET\"",
            "[s]\nkey = [\"S3CRET\"]",
            "[s]\nkee = \"S3CRET\"",
            "[s]\nother = \"S3CRET\"",
            "[s.key]\nvalue = \"S3CRET\"",
            "s = \"S3CRET\"",
            "[z]\nkey = \"S3CRET\"",
            "key = \"S3CRET\"",
            "[s]\nkey = S3CRET",
            "[s]\nkey = \"S3CRET",
            "[s]\nkey = \"x\" S3CRET",
        ] {
            let mut keys = Keys::default();
            keys.hide("s");
            keys.overlay(file, &Origin::File("f.toml".to_owned()));
            assert_eq!(keys.read("s.key", value::choice(&[("yes", true)])), None);
            let faults = keys.finish();
            assert!(!faults.is_empty() && faults.iter().all(|fault| !fault.contains("S3CRET")), "{file}: {faults:?}");
        }
        let mut keys = Keys::default();
        keys.hide("s");
        keys.overlay("[s]\na = \"\"\nb = \"x\"", &Origin::Default);
        assert_eq!(keys.render(), "[s]\na = \"\" # default\nb = \"***\" # default\n");
        assert!(!format!("{keys:?}").contains('x'), "{keys:?}");
    }

    #[test]
    fn text_that_is_not_toml_is_refused_with_its_place() {
        let mut keys = Keys::default();
        keys.overlay("a = 1\nb = nonsense", &Origin::Default);
        let faults = keys.finish();
        assert!(faults[0].starts_with("default: this is not TOML: line 2, column 5: "), "{faults:?}");
    }

    #[test]
    fn free_names_may_contain_dots() {
        let mut keys = Keys::default();
        keys.overlay("[dims]\n\"a.b\" = 3", &Origin::Default);
        let found = keys.below("dims");
        assert_eq!(found, [(vec!["a.b".to_owned()], Value::from(3))]);
        assert_eq!(keys.render(), "[dims]\n\"a.b\" = 3 # default\n");
    }
}
