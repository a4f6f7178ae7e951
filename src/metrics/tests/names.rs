//! What dashboards, alerts, autoscalers and texts name is what is exposed.

use super::*;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Every name that a scrape may show, each with its labels, as a server with a model and a GPU has them.
fn exposed() -> BTreeMap<String, BTreeSet<String>> {
    let metrics = Metrics::new();
    metrics.model("m", 1).saturated(Some(1.0), Some(1.0));
    metrics.answered("m", 1, "ok", 0.1);
    metrics.ledger(ledger(1));
    metrics.run_bytes(DeviceId(0), ByteSize(1), Some(ByteSize(2)));
    let some = Some(1.0);
    metrics.devices(vec![DeviceReading {
        utilization: some,
        memory_total: Some(ByteSize(1)),
        memory_used: Some(ByteSize(1)),
        memory_others: Some(ByteSize(1)),
        celsius: some,
        watts: some,
        watts_limit: some,
        joules: some,
        ..DeviceReading::default()
    }]);
    let mut names: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in text(&metrics).lines().filter(|line| !line.starts_with('#')) {
        let (name, rest) = line.split_at(line.find(['{', ' ']).expect("a value"));
        let labels = rest.split_once('}').map_or("", |(labels, _)| labels).trim_start_matches('{').split(',');
        let labels = labels.filter_map(|label| label.split_once('=')).map(|(label, _)| label.to_owned());
        names.entry(name.to_owned()).or_default().extend(labels);
    }
    names
}

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).expect(path)
}

/// The words of a text that begin like a metric of ours.
fn words(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("concertina_") || word.starts_with("nv_")).collect()
}

/// A family by its own name, and a histogram's by that of its parts.
fn known(exposed: &BTreeMap<String, BTreeSet<String>>, word: &str) -> bool {
    exposed.contains_key(word) || exposed.contains_key(&format!("{word}_count")) || word.ends_with('_')
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files(&path, found);
        } else {
            found.push(path);
        }
    }
}

#[test]
fn every_metric_that_is_named_anywhere_is_exposed() {
    let exposed = exposed();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut paths = vec![root.join("README.md"), root.join("src/http/page/script.js")];
    files(&root.join("config"), &mut paths);
    let mut named = 0;
    for path in paths {
        let Ok(text) = fs::read_to_string(&path) else { continue };
        for word in words(&text) {
            assert!(known(&exposed, word), "{}: {word} is nothing that is exposed", path.display());
            named += 1;
        }
    }
    assert!(named > 40, "only {named} names were found: are they where they were?");
    for absent in ["concertina_queue_length", "nv_gpu_speed"] {
        assert!(!known(&exposed, absent));
    }
}

#[test]
fn the_readme_names_every_metric_of_ours_and_no_other() {
    let exposed = exposed();
    let readme = read("README.md");
    let table = readme
        .split_once("| metric | type | meaning |")
        .and_then(|(_, rest)| rest.split_once("\n\n"))
        .expect("a table")
        .0;
    let cells = table.lines().filter_map(|line| line.split('|').nth(1));
    let listed: BTreeSet<String> =
        cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(|name| format!("concertina_{name}")).collect();
    for name in &listed {
        assert!(known(&exposed, name), "{name} is in the README and not exposed");
    }
    for name in exposed.keys().filter(|name| name.starts_with("concertina_")) {
        let family = ["_bucket", "_sum", "_count"].iter().find_map(|part| name.strip_suffix(part)).unwrap_or(name);
        assert!(listed.contains(family), "{family} is exposed and not in the README");
    }
}

#[test]
fn the_page_reads_only_what_is_exposed_with_these_labels() {
    let exposed = exposed();
    let script = read("src/http/page/script.js");
    let mut seen = 0;
    for call in ["all(", "total(", "one(", "grown(", "perSecond(", "quantile("] {
        for (at, _) in script.match_indices(call) {
            let Some(arguments) = script[at + call.len()..].split(')').next() else { continue };
            let Some(name) = arguments.split('"').nth(1).filter(|name| !name.starts_with('_')) else { continue };
            let name = format!("concertina_{name}");
            assert!(known(&exposed, &name), "{name}, by {call}");
            seen += 1;
        }
    }
    assert!(seen > 25, "only {seen} readings were found");
}

#[test]
fn every_alert_leads_to_a_heading_of_the_operations_guide() {
    let guide = read("config/operations.md");
    let anchor = |line: &str| line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
    let anchors: BTreeSet<String> = guide.lines().filter(|line| line.starts_with('#')).map(anchor).collect();
    let alerts = read("config/prometheus/alerts.yaml");
    let rules: Vec<&str> = alerts.split("- alert: ").skip(1).collect();
    assert_eq!(rules.len(), 8);
    for rule in rules {
        let name = rule.lines().next().unwrap_or_default();
        let found = rule.split_once("runbook: operations.md#").and_then(|(_, rest)| rest.lines().next());
        assert!(found.is_some_and(|found| anchors.contains(found)), "{name} leads to {found:?}");
        assert!(guide.contains(&format!("`{name}`")), "the guide does not name {name}");
    }
}
