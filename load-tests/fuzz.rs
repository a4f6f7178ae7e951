//! Throws mutated requests at the server's router and, for `headers`, at its accept loop, in this process: for a while, or
//! until something breaks. Broken is an answer 500, no answer in 10 seconds, a panic, and memory above four times the input and a constant.
//!
//! Inputs that are answered in a new way (another status, or other words) are kept and mutated further, so that mutations
//! find their way through the checks one by one. It runs with whatever Rust builds the server; `load-tests/fuzz/` has the same targets for
//! cargo-fuzz, which is guided by coverage and needs a nightly Rust.
#![allow(clippy::unwrap_used, reason = "what breaks shall break here")]

#[path = "cases.rs"]
mod cases;
mod fuzz_server;
#[path = "../tests/api/support.rs"]
#[allow(dead_code, unreachable_pub, reason = "the tests use the rest")]
mod support;

use cases::Random;
use clap::{Parser, ValueEnum};
use fuzz_server::Target;
use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::time::Instant;

/// The longest input.
const LONGEST: usize = 64 << 10;

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    Json,
    Binary,
    Headers,
}

#[derive(Parser)]
struct Arguments {
    target: Kind,
    #[arg(long, default_value_t = 60.0)]
    seconds: f64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only write the inputs to begin with into this folder.
    #[arg(long)]
    write_seeds: Option<PathBuf>,
}

const WORDS: [&[u8]; 44] = [
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\"",
    b"\\u00e9",
    b"\\",
    b"null",
    b"true",
    b"false",
    b"0",
    b"-1",
    b"1e999",
    b"0.1",
    b"18446744073709551615",
    b"18446744073709551616",
    b"-9223372036854775808",
    b"NaN",
    b"Infinity",
    b"Inf",
    b"-Inf",
    b"[[[[",
    b"\"data\":",
    b"\"shape\":",
    b"\"datatype\":",
    b"\"parameters\":",
    b"\"binary_data_size\":",
    b"\"outputs\":",
    b"\"id\":",
    b"\"FP64\"",
    b"\"BYTES\"",
    b"\"BOOL\"",
    b"\r\n",
    b"Content-Length: ",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Expect: 100-continue\r\n",
    b"Inference-Header-Content-Length: ",
    b"Connection: close\r\n",
    b"\xff\xfe",
    b"\x00",
    b"%2F..%00",
];

fn mutate(corpus: &[Vec<u8>], dice: &mut Random) -> Vec<u8> {
    let pick = |dice: &mut Random, below: usize| (dice.next() as usize) % below.max(1);
    let mut input = corpus[pick(dice, corpus.len())].clone();
    for _ in 0..=pick(dice, 4) {
        let at = pick(dice, input.len() + 1);
        match pick(dice, 8) {
            0 if !input.is_empty() => {
                let at = at.min(input.len() - 1);
                input[at] ^= 1 << pick(dice, 8);
            }
            1 => input.truncate(at),
            2 => drop(input.splice(at..at, WORDS[pick(dice, WORDS.len())].iter().copied())),
            3 => {
                let end = at + pick(dice, (input.len() - at).min(64) + 1);
                input.drain(at..end);
            }
            4 => {
                let end = at + pick(dice, (input.len() - at).min(512) + 1);
                let part = input[at..end].repeat(1 + pick(dice, 32));
                input.splice(at..at, part);
            }
            5 => {
                let other = &corpus[pick(dice, corpus.len())];
                let from = pick(dice, other.len() + 1);
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            6 => {
                let word = WORDS[pick(dice, WORDS.len())];
                let end = (at + word.len()).min(input.len());
                input.splice(at..end, word.iter().copied());
            }
            _ => {
                if let Some(byte) = input.get_mut(at) {
                    *byte = dice.next() as u8;
                }
            }
        }
    }
    input.truncate(LONGEST);
    input
}

/// What an answer says, without the numbers and names in it.
fn shape_of(answer: &[u8]) -> Vec<u8> {
    let mut shape: Vec<u8> =
        answer.iter().take(120).map(|byte| if byte.is_ascii_digit() { b'0' } else { *byte }).collect();
    shape.dedup();
    shape
}

#[allow(clippy::disallowed_methods, reason = "a measuring program reads the clock")]
#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments = Arguments::parse();
    let target = match arguments.target {
        Kind::Json => Target::Json,
        Kind::Binary => Target::Binary,
        Kind::Headers => Target::Headers,
    };
    let mut corpus = fuzz_server::seeds(target);
    if let Some(folder) = arguments.write_seeds {
        std::fs::create_dir_all(&folder).unwrap();
        for (index, seed) in corpus.iter().enumerate() {
            std::fs::write(folder.join(format!("seed-{index}")), seed).unwrap();
        }
        return;
    }
    let server = fuzz_server::server(target).await;
    let mut dice = Random(arguments.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let (mut seen, mut statuses, mut runs, mut most) = (HashSet::new(), BTreeMap::<u16, u64>::new(), 0u64, 0f64);
    let begin = Instant::now();
    let mut first: Vec<_> = corpus.iter().cloned().rev().collect();
    while begin.elapsed().as_secs_f64() < arguments.seconds {
        let input = first.pop().unwrap_or_else(|| mutate(&corpus, &mut dice));
        // The model that the input itself names, as often as not.
        let model = fuzz_server::named(&input).filter(|_| !dice.next().is_multiple_of(8)).unwrap_or("m");
        runs += 1;
        let answer = fuzz_server::attempt(&server, target, &input, model).await.unwrap_or_else(|what| {
            std::fs::write("/tmp/concertina-fuzz-input", &input).unwrap();
            eprintln!("{what}; {} bytes to {model}, kept in /tmp/concertina-fuzz-input", input.len());
            std::process::exit(1)
        });
        most = most.max(answer.memory.saturating_sub(target.constant()) as f64 / input.len().max(1) as f64);
        *statuses.entry(answer.status).or_default() += 1;
        if seen.insert((answer.status, shape_of(&answer.text))) && corpus.len() < 4096 {
            corpus.push(input);
        }
    }
    println!(
        "{}",
        serde_json::json!({
            "target": format!("{target:?}").to_lowercase(), "seconds": arguments.seconds, "seed": arguments.seed, "inputs": runs,
            "kept": corpus.len(), "statuses": statuses, "most_memory_over_input_beyond_constant": most,
            "constant_bytes": target.constant(),
        })
    );
}
