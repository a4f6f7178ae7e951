//! The profile as one self-contained SVG: rows per second above, bytes below, over rows on a logarithmic axis.

use super::Profile;
use crate::units::{ByteSize, Rows};
use std::fmt::Write;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 86.0;
const RIGHT: f64 = 730.0;
/// Top and bottom of the two panels.
const SPEED: (f64, f64) = (64.0, 270.0);
const BYTES: (f64, f64) = (318.0, 500.0);
/// The memory bound is shown if it is at most this many times the largest size that was measured.
const FARTHEST: u32 = 16;

const STYLE: &str = "
  svg { --ink: #1b1f24; --faint: #d5d9de; --speed: #0b6bcb; --bytes: #b35900; --knee: #1a7f37; --bound: #cf222e; --paper: #ffffff }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #e6e9ec; --faint: #3a4048; --speed: #6cb6ff; --bytes: #f0a35e; --knee: #57d27a; --bound: #ff7b72; --paper: #14171b }
  }
  text { font: 12px system-ui, sans-serif; fill: var(--ink) }
  .title { font-size: 15px; font-weight: 600 }
  .paper { fill: var(--paper) }
  .grid { stroke: var(--faint) }
  .speed, .bytes, .predicted { fill: none; stroke-width: 2 }
  .speed { stroke: var(--speed) } .bytes { stroke: var(--bytes) } .predicted { stroke: var(--ink); stroke-dasharray: 3 6 }
  .dot-speed { fill: var(--speed) } .dot-bytes { fill: var(--bytes) }
  .knee { stroke: var(--knee); stroke-dasharray: 2 3 } .bound { stroke: var(--bound); stroke-dasharray: 7 4 }
  .knee, .bound { stroke-width: 1.5 }
  text.knee-label { fill: var(--knee) } text.bound-label { fill: var(--bound) }
";

/// Where rows and values are on the sheet.
struct Scale {
    /// Logarithms of the first and the last row.
    rows: (f64, f64),
    /// The best rows per second, with room above.
    speed: f64,
    /// Logarithms of the least and the most bytes.
    bytes: (f64, f64),
}

impl Scale {
    fn new(profile: &Profile, bound: Option<Rows>) -> Self {
        let first = profile.rows.first().map_or(1, |line| line.rows);
        let last = profile.rows.last().map_or(1, |line| line.rows).max(bound.unwrap_or(0));
        let rows = (f64::from(first).log2(), f64::from(last).log2().max(f64::from(first).log2() + 1.0));
        let speed = profile.rows.iter().map(|line| line.rows_per_second).fold(1e-9, f64::max);
        let bytes = profile.rows.iter().flat_map(|line| [line.predicted_bytes, line.observed_bytes]);
        let bytes = bytes.chain(bound.map(|_| profile.free_bytes)).filter(|bytes| *bytes > 0);
        let (least, most) = bytes.fold((u64::MAX, 1), |(least, most), bytes| (least.min(bytes), most.max(bytes)));
        let (least, most) = ((least.min(most) as f64).log2().floor(), (most as f64).log2().ceil());
        Self { rows, speed: 1.1 * speed, bytes: (least, most.max(least + 1.0)) }
    }

    fn x(&self, rows: Rows) -> f64 {
        let (first, last) = self.rows;
        LEFT + (RIGHT - LEFT) * (f64::from(rows.max(1)).log2() - first) / (last - first)
    }

    fn speed(&self, value: f64) -> f64 {
        SPEED.1 - (SPEED.1 - SPEED.0) * value / self.speed
    }

    fn bytes(&self, value: u64) -> f64 {
        let (least, most) = self.bytes;
        BYTES.1 - (BYTES.1 - BYTES.0) * ((value.max(1) as f64).log2() - least) / (most - least)
    }
}

pub(super) fn render(profile: &Profile) -> String {
    let largest = profile.rows.last().map_or(1, |line| line.rows);
    let near = profile.fits_rows >= 1 && profile.fits_rows <= largest.saturating_mul(FARTHEST);
    let bound = near.then_some(profile.fits_rows);
    let scale = Scale::new(profile, bound);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">\n<title>{title}</title>\n\
         <style>{STYLE}</style>\n<rect class=\"paper\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>\n",
        title = escape(&title(profile)),
    );
    // Writing to a text does not fail.
    let _ = writeln!(out, "<text class=\"title\" x=\"{LEFT}\" y=\"24\">{}</text>", escape(&title(profile)));
    let _ = writeln!(out, "<text x=\"{LEFT}\" y=\"44\">{}</text>", escape(&subtitle(profile, bound)));
    grid(&mut out, profile, &scale);
    curves(&mut out, profile, &scale);
    if let Some(knee) = profile.knee {
        upright(&mut out, scale.x(knee), "knee", &format!("knee {knee}"));
    }
    if let Some(bound) = bound {
        upright(&mut out, scale.x(bound), "bound", &format!("memory {bound}"));
        let y = scale.bytes(profile.free_bytes);
        let _ = writeln!(out, "<line class=\"bound\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>");
    }
    out.push_str("</svg>\n");
    out
}

fn title(profile: &Profile) -> String {
    format!("{}, version {}", profile.model, profile.version)
}

fn subtitle(profile: &Profile, bound: Option<Rows>) -> String {
    let layout = format!("{} instances × {} threads", profile.instances, profile.threads);
    let weights = ByteSize(profile.weights_bytes);
    let free = ByteSize(profile.free_bytes);
    let far = match (bound, profile.fits_rows) {
        (Some(_), _) => String::new(),
        (None, 0) => ", too little for one row".to_owned(),
        (None, rows) => format!(", enough for {rows} rows and more than is shown"),
    };
    format!("{layout}, weights {weights}, free for runs {free}{far}")
}

/// Axes, their labels and faint lines.
fn grid(out: &mut String, profile: &Profile, scale: &Scale) {
    let mut across = |y: f64, label: &str| {
        let _ = writeln!(out, "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>");
        let (x, y) = (LEFT - 8.0, y + 4.0);
        let _ = writeln!(out, "<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{label}</text>");
    };
    for part in 0..=4 {
        let value = scale.speed * f64::from(part) / 4.0;
        across(scale.speed(value), &if value < 10.0 { format!("{value:.2}") } else { format!("{value:.0}") });
    }
    let (least, most) = scale.bytes;
    let step = ((most - least) / 5.0).ceil().max(1.0);
    let mut power = least;
    while power <= most {
        let bytes = power.exp2() as u64;
        across(scale.bytes(bytes), &ByteSize(bytes).to_string());
        power += step;
    }
    for line in &profile.rows {
        let (x, y) = (scale.x(line.rows), BYTES.1 + 18.0);
        let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{}</text>", line.rows);
    }
    let middle = f64::midpoint(LEFT, RIGHT);
    for (x, y, text) in [
        (LEFT, SPEED.0 - 6.0, "rows per second"),
        (LEFT, BYTES.0 - 12.0, "bytes of run memory (dashed: predicted from the smallest and a middle size)"),
        (middle - 48.0, BYTES.1 + 40.0, "rows in one batch"),
    ] {
        let _ = writeln!(out, "<text x=\"{x}\" y=\"{y}\">{text}</text>");
    }
}

fn curves(out: &mut String, profile: &Profile, scale: &Scale) {
    let line = |out: &mut String, class: &str, points: &[(f64, f64)]| {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(out, "<polyline class=\"{class}\" points=\"{}\"/>", points.join(" "));
    };
    let at = |y: &dyn Fn(&super::Line) -> f64| -> Vec<(f64, f64)> {
        profile.rows.iter().map(|line| (scale.x(line.rows), y(line))).collect()
    };
    let speed = at(&|line| scale.speed(line.rows_per_second));
    let observed = at(&|line| scale.bytes(line.observed_bytes));
    line(out, "speed", &speed);
    line(out, "bytes", &observed);
    line(out, "predicted", &at(&|line| scale.bytes(line.predicted_bytes)));
    for (class, points) in [("dot-speed", &speed), ("dot-bytes", &observed)] {
        for (x, y) in points {
            let _ = writeln!(out, "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\"/>");
        }
    }
}

/// A marked number of rows, through both panels. Labels stand on whichever side has room.
fn upright(out: &mut String, x: f64, class: &str, label: &str) {
    let (top, bottom) = (SPEED.0, BYTES.1);
    let _ = writeln!(out, "<line class=\"{class}\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{bottom}\"/>");
    let (at, anchor) = if x > f64::midpoint(LEFT, RIGHT) { (x - 5.0, "end") } else { (x + 5.0, "start") };
    let y = if class == "knee" { SPEED.1 - 10.0 } else { SPEED.1 - 26.0 };
    let _ =
        writeln!(out, "<text class=\"{class}-label\" x=\"{at:.1}\" y=\"{y}\" text-anchor=\"{anchor}\">{label}</text>");
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
