//! `concertina simulate`: what a scaling signal is worth.

use super::{Options, report};
use crate::config::Config;
use crate::simulate::{Comparison, Machine, Setting, SignalKind, Workload, compare, reading_at, run};
use clap::Args;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What `simulate` takes.
#[derive(Debug, Args)]
pub(super) struct SimulateOptions {
    /// Write simulate.md and a picture of each load into this folder, in place of printing the text
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// The loads, such as step,day: step, ramp, burst, wave, day, squeeze; all of them if none is named. Targets are chosen on
    /// those of the first four that are named, or on all four
    #[arg(long, value_name = "LOADS", value_delimiter = ',', value_parser = named(&Workload::ALL))]
    workload: Vec<Workload>,
    /// Only one signal and no comparison: saturation, cpu, busy, queue-time or concurrency
    #[arg(long, value_name = "SIGNAL", value_parser = named(&SignalKind::ALL))]
    signal: Option<SignalKind>,
    /// With --signal: the part of a replica's capacity that the target stands for, 0.05 to 1 [key: scaling.target]
    #[arg(long, value_name = "PART", requires = "signal", value_parser = between(0.05, 1.0))]
    fraction: Option<f64>,
    /// What the random numbers come from; the same gives the same results
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
    /// The highest rate of requests, of one row each, per second, 1 to 1000000
    #[arg(long, value_name = "RATE", default_value_t = 10_000.0, value_parser = between(1.0, 1e6))]
    peak: f64,
    /// What 99 of 100 requests are to be answered within
    #[arg(long, value_name = "DURATION", default_value = "200ms", value_parser = humantime::parse_duration)]
    objective: Duration,
    /// From the decision for a pod until it takes requests
    #[arg(long, value_name = "DURATION", default_value = "45s", value_parser = humantime::parse_duration)]
    startup: Duration,
    /// What replicas run on: the JSON of `concertina profile --json`
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    #[command(flatten)]
    pub(super) options: Options,
}

/// Takes one of these names.
fn named<T: Copy + Send + Sync + 'static>(
    names: &'static [(&'static str, T)],
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let found = names.iter().find(|(name, _)| *name == text);
        let all: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
        found.map(|(_, value)| *value).ok_or_else(|| format!("expected one of {}", all.join(", ")))
    }
}

/// Takes a number of a range.
fn between(least: f64, most: f64) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("expected a number from {least} to {most}"))
    }
}

/// Simulates and prints or writes what came of it; the code is 1 if something cannot be read or written.
pub(super) fn simulate(
    options: &SimulateOptions,
    config: &Config,
    (out, err): (&mut dyn Write, &mut dyn Write),
) -> io::Result<u8> {
    let setting = match setting(options, config) {
        Ok(setting) => setting,
        Err(fault) => return report::faults(&[fault], err).map(|()| 1),
    };
    let loads: Vec<Workload> = match options.workload.as_slice() {
        [] => Workload::ALL.map(|(_, load)| load).to_vec(),
        some => some.to_vec(),
    };
    if let Some(signal) = options.signal {
        let target = reading_at(&setting, signal, options.fraction.unwrap_or(setting.scaling.target));
        for load in loads {
            writeln!(out, "{}", run(&setting, load, signal, target).line(load, signal, target))?;
        }
        return Ok(0);
    }
    let mut say = |name: &str| {
        // Progress that nobody reads is no fault.
        let _ = writeln!(err, "simulated: {name}");
    };
    let mut tuned = Workload::TUNED.to_vec();
    if tuned.iter().any(|load| loads.contains(load)) {
        tuned.retain(|load| loads.contains(load));
    }
    let comparison = compare(&setting, &tuned, &loads, &mut say);
    let Some(folder) = &options.out else {
        write!(out, "{}", comparison.markdown(&command(options)))?;
        return Ok(0);
    };
    match write_all(folder, &comparison, &command(options)) {
        Ok(()) => Ok(0),
        Err(error) => report::faults(&[format!("{}: cannot be written: {error}", folder.display())], err).map(|()| 1),
    }
}

fn setting(options: &SimulateOptions, config: &Config) -> Result<Setting, String> {
    let mut setting = Setting::new(config.scaling, config.model.max_queue_rows, config.model.knee_tolerance);
    (setting.seed, setting.peak) = (options.seed, options.peak);
    (setting.objective, setting.startup) = (options.objective, options.startup);
    if let Some(path) = &options.profile {
        let text = fs::read_to_string(path).map_err(|error| format!("{}: cannot be read: {error}", path.display()))?;
        setting.machine = Machine::from_profile(&text).map_err(|fault| format!("{}: {fault}", path.display()))?;
    }
    Ok(setting)
}

/// What to type for the same.
fn command(options: &SimulateOptions) -> String {
    let mut text = format!("concertina simulate --seed {} --peak {}", options.seed, options.peak);
    let time = |time: Duration| humantime::format_duration(time).to_string().replace(' ', "");
    text += &format!(" --objective {} --startup {}", time(options.objective), time(options.startup));
    if !options.workload.is_empty() {
        let names: Vec<&str> = options.workload.iter().map(|load| load.name()).collect();
        text += &format!(" --workload {}", names.join(","));
    }
    if let Some(path) = &options.profile {
        text += &format!(" --profile {}", path.display());
    }
    text
}

fn write_all(folder: &Path, comparison: &Comparison, command: &str) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    fs::write(folder.join("simulate.md"), comparison.markdown(command))?;
    for (index, load) in comparison.reported.iter().enumerate() {
        if let Some(svg) = comparison.svg(index) {
            fs::write(folder.join(format!("simulate-{}.svg", load.name())), svg)?;
        }
    }
    Ok(())
}
