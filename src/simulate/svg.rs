//! One load as a picture: replicas above, latency below, over time.

use super::compare::Comparison;
use super::fleet::Minute;
use std::fmt::Write;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 520.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 690.0;
/// Top and bottom of the two panels.
const REPLICAS: (f64, f64) = (56.0, 250.0);
const LATENCY: (f64, f64) = (300.0, 470.0);
/// Seconds at the bottom and the top of the logarithmic axis; what was refused is above.
const SECONDS: (f64, f64) = (0.02, 10.0);

/// A colour for light and one for dark paper, and a pattern, so that colours are not all that tells lines apart.
const LINES: [(&str, &str, &str); 5] = [
    ("#0b6bcb", "#6cb6ff", ""),
    ("#b35900", "#f0a35e", "6 3"),
    ("#6e40c9", "#c29bff", "2 3"),
    ("#cf222e", "#ff7b72", "9 3 2 3"),
    ("#1a7f37", "#57d27a", "12 4"),
];

impl Comparison {
    /// One reported load as a self-contained SVG; `None` if there is no such load.
    #[must_use]
    pub fn svg(&self, load: usize) -> Option<String> {
        let workload = self.reported.get(load)?;
        let runs: Vec<&[Minute]> =
            self.candidates.iter().map(|candidate| candidate.reported[load].minutes.as_slice()).collect();
        let minutes = runs.iter().map(|run| run.len()).max().unwrap_or(1).max(2);
        let ideal = |minute: &Minute| minute.offered / self.setting.capacity();
        let counts = runs.iter().flat_map(|run| run.iter()).map(|minute| f64::from(minute.replicas).max(ideal(minute)));
        let most = counts.fold(1.0, f64::max) * 1.05;
        let x = |index: usize| LEFT + (RIGHT - LEFT) * index as f64 / (minutes - 1) as f64;
        let y = |value: f64| REPLICAS.1 - (REPLICAS.1 - REPLICAS.0) * value / most;
        let mut out = head(&format!("Load: {}", workload.name()));
        axes(&mut out, minutes, most, self.setting.objective.as_secs_f64());
        let needed: Vec<_> =
            runs.first().into_iter().flat_map(|run| run.iter().enumerate()).map(|(i, m)| (x(i), y(ideal(m)))).collect();
        polyline(&mut out, "needed", &needed);
        for (index, (run, candidate)) in runs.iter().zip(&self.candidates).enumerate() {
            let class = format!("line{index}");
            let replicas: Vec<_> = run.iter().enumerate().map(|(i, m)| (x(i), y(f64::from(m.replicas)))).collect();
            let latency: Vec<_> = run.iter().enumerate().map(|(i, m)| (x(i), seconds(m.p99))).collect();
            polyline(&mut out, &class, &replicas);
            polyline(&mut out, &class, &latency);
            legend(&mut out, index, &class, candidate.signal.name());
        }
        legend(&mut out, runs.len(), "needed", "load ÷ capacity");
        out.push_str("</svg>\n");
        Some(out)
    }
}

fn head(title: &str) -> String {
    let (mut light, mut dark, mut rules) = (String::new(), String::new(), String::new());
    for (index, (day, night, dashes)) in LINES.iter().enumerate() {
        // Writing to a text does not fail.
        let _ = write!(light, " --c{index}: {day};");
        let _ = write!(dark, " --c{index}: {night};");
        let _ = writeln!(
            rules,
            "  .line{index} {{ stroke: var(--c{index}); stroke-dasharray: {} }}",
            if dashes.is_empty() { "none" } else { dashes }
        );
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">\n<title>{title}</title>\n<style>\n  \
         svg {{ --ink: #1b1f24; --faint: #d5d9de; --paper: #ffffff;{light} }}\n  \
         @media (prefers-color-scheme: dark) {{ svg {{ --ink: #e6e9ec; --faint: #3a4048; --paper: #14171b;{dark} }} }}\n  \
         text {{ font: 12px system-ui, sans-serif; fill: var(--ink) }}\n  .title {{ font-size: 15px; font-weight: 600 }}\n  \
         .paper {{ fill: var(--paper) }} .grid {{ stroke: var(--faint) }}\n  polyline, .key {{ fill: none; stroke-width: 1.8 }}\n  \
         .needed {{ stroke: var(--ink); stroke-dasharray: 1 4 }} .objective {{ stroke: var(--ink); stroke-width: 1.2 }}\n{rules}</style>\n\
         <rect class=\"paper\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>\n<text class=\"title\" x=\"{LEFT}\" y=\"24\">{title}</text>\n"
    )
}

fn axes(out: &mut String, minutes: usize, most: f64, objective: f64) {
    let mut across = |y: f64, class: &str, label: &str| {
        let _ = writeln!(out, "<line class=\"{class}\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>");
        let (x, y) = (LEFT - 8.0, y + 4.0);
        let _ = writeln!(out, "<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{label}</text>");
    };
    for part in 0..=4 {
        let value = most * f64::from(part) / 4.0;
        across(REPLICAS.1 - (REPLICAS.1 - REPLICAS.0) * f64::from(part) / 4.0, "grid", &format!("{value:.0}"));
    }
    for value in [0.02, 0.1, 1.0, 10.0] {
        across(seconds(Some(value)), "grid", &format!("{value} s"));
    }
    across(seconds(Some(objective)), "objective", "promise");
    across(LATENCY.0, "grid", "refused");
    for part in 0..=4 {
        let minute = (minutes - 1) * part / 4;
        let x = LEFT + (RIGHT - LEFT) * minute as f64 / (minutes - 1) as f64;
        let text = if minutes > 240 { format!("{:.0} h", minute as f64 / 60.0) } else { format!("{minute} min") };
        let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{text}</text>", LATENCY.1 + 20.0);
    }
    for (y, text) in
        [(REPLICAS.0 - 8.0, "replicas, those that start included"), (LATENCY.0 - 8.0, "p99 of each minute")]
    {
        let _ = writeln!(out, "<text x=\"{LEFT}\" y=\"{y}\">{text}</text>");
    }
}

/// Where a latency is on the lower panel.
fn seconds(value: Option<f64>) -> f64 {
    let Some(value) = value else { return LATENCY.0 };
    let part = (value.clamp(SECONDS.0, SECONDS.1) / SECONDS.0).ln() / (SECONDS.1 / SECONDS.0).ln();
    LATENCY.1 - (LATENCY.1 - LATENCY.0 - 14.0) * part
}

/// Points closer together than a pixel say nothing: each pixel keeps its highest.
fn polyline(out: &mut String, class: &str, points: &[(f64, f64)]) {
    let mut kept: Vec<(f64, f64)> = Vec::new();
    for (x, y) in points {
        match kept.last_mut() {
            Some(last) if x - last.0 < 1.0 => last.1 = last.1.min(*y),
            _ => kept.push((*x, *y)),
        }
    }
    let points: Vec<String> = kept.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _ = writeln!(out, "<polyline class=\"{class}\" points=\"{}\"/>", points.join(" "));
}

fn legend(out: &mut String, index: usize, class: &str, name: &str) {
    let y = REPLICAS.0 + 18.0 * index as f64;
    let (begin, end) = (RIGHT + 14.0, RIGHT + 44.0);
    let _ = writeln!(out, "<line class=\"key {class}\" x1=\"{begin}\" x2=\"{end}\" y1=\"{y}\" y2=\"{y}\"/>");
    let _ = writeln!(out, "<text x=\"{}\" y=\"{}\">{name}</text>", end + 8.0, y + 4.0);
}
