//! What the source must look like: the direction of dependencies, the length of files and functions, and what is not used.
//!
//! These are texts, not syntax trees: strings and comments are cut out by [`code`], which knows enough of Rust for that.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Which modules each module may name. A module that is not here is a new part of the architecture: say what it may use.
const DIRECTIONS: [(&str, &[&str]); 22] = [
    ("main", &["cli", "profile", "runtime", "server"]),
    ("cli", &["config", "keys", "model", "optimize", "profile", "repository", "simulate", "tensor", "trace", "units"]),
    // Measures on the same device as the server, with the same loader.
    (
        "profile",
        &["clock", "config", "memory", "model", "repository", "runtime", "scheduler", "server", "tensor", "units"],
    ),
    (
        "server",
        &[
            "admin",
            "batcher",
            "clock",
            "config",
            "grpc",
            "http",
            "memory",
            "metrics",
            "model",
            "repository",
            "runtime",
            "sampler",
            "text",
            "trace",
            "units",
        ],
    ),
    // What stands behind the admin routes; HTTP itself does not know what memory is.
    ("admin", &["clock", "config", "http", "keys", "memory", "model", "units"]),
    ("sampler", &["batcher", "clock", "memory", "metrics", "scheduler", "units"]),
    // Another skin over the same handle; what both say and refuse is said by HTTP's functions.
    ("grpc", &["batcher", "http", "metrics", "model", "tensor", "trace", "units"]),
    // Of the repository, the handle that loads and unloads.
    ("http", &["batcher", "clock", "metrics", "model", "repository", "tensor", "text", "trace", "units"]),
    // The loader hands what it loads to the batcher, with a plan for the scheduler.
    (
        "repository",
        &["batcher", "clock", "config", "keys", "memory", "metrics", "model", "runtime", "scheduler", "text", "units"],
    ),
    ("batcher", &["clock", "metrics", "model", "runtime", "scheduler", "signal", "tensor", "trace", "units"]),
    ("runtime", &["clock", "memory", "model", "tensor", "units"]),
    ("config", &["keys", "model", "signal", "trace", "units"]),
    ("metrics", &["memory", "scheduler", "signal", "units"]),
    // Told of instants and stages; what is made of them concerns nobody else.
    ("trace", &["clock", "metrics", "units"]),
    // The scheduler and the signal under a virtual clock.
    ("simulate", &["scheduler", "signal", "units"]),
    // Pure, as the scheduler: what it is made of comes in as numbers.
    ("signal", &["units"]),
    ("clock", &["units"]),
    ("model", &["keys", "tensor", "text", "units"]),
    ("memory", &["units"]),
    ("scheduler", &["units"]),
    ("tensor", &["units"]),
    ("keys", &["units"]),
];

/// Modules that name no other.
const LEAVES: [&str; 3] = ["optimize", "text", "units"];

/// The most lines of a file, tests included. The aim is 400.
const MOST_FILE_LINES: usize = 450;
/// The most lines of a function, from its first to its closing brace.
const MOST_FUNCTION_LINES: usize = 70;

/// What may not stand in code, and why.
const FORBIDDEN: [(&str, &str); 7] = [
    ("todo!", "what is not there yet has an issue, not a panic"),
    ("unimplemented!", "what is not there yet has an issue, not a panic"),
    ("dbg!", "use tracing"),
    ("unbounded_channel", "every queue has a named limit"),
    ("crossbeam_channel::unbounded", "every queue has a named limit"),
    ("#[ignore", "a test that is not run is not a test"),
    ("thread::sleep", "wait for a condition, not for a time"),
];

/// Written by a program, which `tools/proto` is; nobody reads or edits it.
const GENERATED: &str = "src/grpc/proto/generated.rs";

struct Source {
    /// Relative to the root of the package.
    path: PathBuf,
    text: String,
    /// The text with comments and the insides of strings blanked out; lines stay where they are.
    code: String,
}

fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["src", "tests", "load-tests"] {
        collect(&root.join(folder), &mut files);
    }
    files.sort();
    let source = |file: PathBuf| {
        let text = fs::read_to_string(&file).expect("a source file");
        let path = file.strip_prefix(root).expect("below the root").to_owned();
        let code = code(&text);
        Source { path, text, code }
    };
    files.into_iter().map(source).collect()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with(GENERATED) {
            files.push(path);
        }
    }
}

/// Blanks comments and the insides of strings, raw strings and character literals; keeps every line break.
fn code(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = skip(&chars, at);
        if end == at {
            out.push(chars[at]);
            at += 1;
        } else {
            out.push(' ');
            out.extend(chars[at..end].iter().filter(|c| **c == '\n'));
            at = end;
        }
    }
    out
}

/// The end of the comment or literal that begins here; `at` if none does.
fn skip(chars: &[char], at: usize) -> usize {
    let starts = |text: &str, at: usize| text.chars().enumerate().all(|(i, c)| chars.get(at + i) == Some(&c));
    let find = |text: &str, from: usize| (from..chars.len()).find(|i| starts(text, *i)).unwrap_or(chars.len());
    if starts("//", at) {
        return find("\n", at);
    }
    if starts("/*", at) {
        return (find("*/", at + 2) + 2).min(chars.len());
    }
    let inside_word = at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_');
    let hashes = chars[at + 1..].iter().take_while(|c| **c == '#').count();
    if chars[at] == 'r' && !inside_word && chars.get(at + 1 + hashes) == Some(&'"') {
        let close = format!("\"{}", "#".repeat(hashes));
        return (find(&close, at + 2 + hashes) + close.len()).min(chars.len());
    }
    if chars[at] == '"' {
        let mut end = at + 1;
        while end < chars.len() && chars[end] != '"' {
            end += if chars[end] == '\\' { 2 } else { 1 };
        }
        return (end + 1).min(chars.len());
    }
    // A quote and one character, or an escape, and a quote: not a lifetime.
    if chars[at] == '\'' && starts("\\", at + 1) {
        return find("'", at + 3) + 1;
    }
    if chars[at] == '\'' && chars.get(at + 2) == Some(&'\'') {
        return at + 3;
    }
    at
}

/// The top-level module that a file of `src` belongs to.
fn module(path: &Path) -> Option<String> {
    let inner = path.strip_prefix("src").ok()?;
    let first = inner.components().next()?.as_os_str().to_str()?;
    Some(first.trim_end_matches(".rs").to_owned()).filter(|name| name != "lib")
}

/// The modules of this crate that a text names: `crate::x`, `concertina::x`, and each of `crate::{x, y::z}`.
fn named(code: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for root in ["crate::", "concertina::"] {
        for (at, _) in code.match_indices(root) {
            let before = code[..at].chars().next_back();
            // The end of a longer name, or a module of another crate.
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            let rest = &code[at + root.len()..];
            match rest.strip_prefix('{') {
                None => names.extend(first_word(rest)),
                Some(group) => names.extend(members(group).into_iter().filter_map(first_word)),
            }
        }
    }
    names
}

fn first_word(text: &str) -> Option<String> {
    let word: String = text.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    // Modules are in small letters; what begins with a capital is an item of lib.rs.
    Some(word).filter(|word| word.starts_with(|c: char| c.is_lowercase()) && word != "self")
}

/// The members of a group whose opening brace has been cut off.
fn members(group: &str) -> Vec<&str> {
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                found.push(&group[start..at]);
                return found;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(&group[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    found
}

#[test]
fn dependencies_point_one_way() {
    let directions: BTreeMap<&str, &[&str]> =
        DIRECTIONS.into_iter().chain(LEAVES.into_iter().map(|leaf| (leaf, &[][..]))).collect();
    let mut wrong = Vec::new();
    for source in sources() {
        let Some(module) = module(&source.path) else { continue };
        let Some(allowed) = directions.get(module.as_str()) else {
            wrong.push(format!("{}: module '{module}' is not in the table of directions", source.path.display()));
            continue;
        };
        for name in named(&source.code).into_iter().filter(|name| *name != module) {
            if !allowed.contains(&name.as_str()) {
                wrong.push(format!("{}: '{module}' may not name '{name}'", source.path.display()));
            }
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
}

#[test]
fn the_table_of_directions_has_no_circle() {
    let directions: BTreeMap<&str, &[&str]> = DIRECTIONS.into_iter().collect();
    let mut settled: BTreeSet<&str> = LEAVES.into_iter().collect();
    while let Some(next) = directions
        .iter()
        .find(|(module, uses)| !settled.contains(*module) && uses.iter().all(|name| settled.contains(name)))
    {
        settled.insert(next.0);
    }
    let circular: Vec<_> = directions.keys().filter(|module| !settled.contains(*module)).collect();
    assert!(circular.is_empty(), "{circular:?}");
}

#[test]
fn the_scheduler_names_no_other_crate() {
    for source in sources().iter().filter(|source| module(&source.path).as_deref() == Some("scheduler")) {
        // Its tests may use what they like.
        let pure = source.code.split("#[cfg(test)]").next().unwrap_or_default();
        let foreign =
            ["tokio", "tracing", "prometheus", "std::sync", "std::thread", "std::fs", "std::env", "std::time::Instant"];
        let found: Vec<_> = foreign.into_iter().filter(|name| pure.contains(name)).collect();
        let test_file = source.path.file_name().is_some_and(|name| name == "tests.rs");
        assert!(found.is_empty() || test_file, "{}: {found:?}", source.path.display());
    }
}

#[test]
fn files_and_functions_stay_short() {
    let mut long = Vec::new();
    for source in sources() {
        let lines = source.text.lines().count();
        if lines > MOST_FILE_LINES {
            long.push(format!("{}: {lines} lines, at most {MOST_FILE_LINES}", source.path.display()));
        }
        for (line, length) in functions(&source.code) {
            if length > MOST_FUNCTION_LINES {
                long.push(format!("{}:{line}: {length} lines, at most {MOST_FUNCTION_LINES}", source.path.display()));
            }
        }
    }
    assert_eq!(long, Vec::<String>::new());
}

/// The line and the length of each function: from the line of its `fn` to the first later line that closes a brace at the
/// same indentation, as rustfmt lays it out. A test may be longer: its table of cases is data.
fn functions(code: &str) -> Vec<(usize, usize)> {
    let lines: Vec<&str> = code.lines().collect();
    let indentation = |line: &str| line.len() - line.trim_start().len();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let before_fn = words.iter().position(|word| *word == "fn");
        let is_function =
            before_fn.is_some_and(|at| words[..at].iter().all(|word| word.starts_with(|c: char| c.is_lowercase())));
        let is_test = at > 0 && lines[at - 1].trim_start().starts_with("#[") && lines[at - 1].contains("test");
        if !is_function || is_test || line.trim_end().ends_with([';', '}']) {
            continue;
        }
        let close = |later: &&str| indentation(later) == indentation(line) && later.trim_start().starts_with('}');
        if let Some(length) = lines[at + 1..].iter().position(&close) {
            found.push((at + 1, length + 2));
        }
    }
    found
}

#[test]
fn unsafe_code_is_where_lib_rs_says() {
    let sources = sources();
    let lib = sources.iter().find(|source| source.path == Path::new("src/lib.rs")).expect("src/lib.rs");
    let documented: String = lib.text.lines().filter(|line| line.starts_with("//!")).collect();
    for source in &sources {
        let words = || source.code.split(|c: char| !c.is_alphanumeric() && c != '_');
        let name = source.path.display().to_string().replace('\\', "/");
        assert!(
            !words().any(|word| word == "unsafe") || documented.contains(&name),
            "{name}: unsafe, not named in lib.rs"
        );
    }
}

#[test]
fn nothing_forbidden_is_used() {
    let mut found = Vec::new();
    for source in sources() {
        for (at, line) in source.code.lines().enumerate() {
            for (pattern, reason) in FORBIDDEN {
                if line.contains(pattern) {
                    found.push(format!("{}:{}: {pattern}: {reason}", source.path.display(), at + 1));
                }
            }
        }
    }
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn code_is_told_from_comments_and_strings() {
    let text = "a // crate::x\n/* crate::y */ b \"crate::z \\\" \" r#\"\"crate::w\"# 'c' '\\n' &'a str 'x: crate::{u, v::{w}, self}";
    assert_eq!(code(text).split_whitespace().collect::<Vec<_>>().join(" "), "a b &'a str 'x: crate::{u, v::{w}, self}");
    assert_eq!(named(&code(text)).into_iter().collect::<Vec<_>>(), ["u", "v"]);
    assert!(named("$crate::a xcrate::b crate::C").contains("a"));
    let function = "fn a() {\n    b();\n}\n\n    pub async fn c(\n        d: u8,\n    ) -> u8 {\n        d\n    }\n";
    assert_eq!(functions(function), [(1, 3), (5, 5)]);
}
