//! What a comparison found, as Markdown.

use super::compare::{Candidate, Comparison, Trial};
use super::fleet::Outcome;
use super::{SignalKind, Workload};
use std::fmt::Write;
use std::time::Duration;

/// Loads with what came of them.
type Runs = Vec<(Workload, Outcome)>;

impl Comparison {
    /// As Markdown. `command` is what was run; pictures are named `simulate-LOAD.svg`.
    #[must_use]
    pub fn markdown(&self, command: &str) -> String {
        let mut out = String::new();
        // Writing to a text does not fail.
        let _ = writeln!(out, "# What to scale on\n\n`{command}`, version {}.\n", env!("CARGO_PKG_VERSION"));
        out.push_str(&self.conditions());
        out.push_str(&self.verdict());
        out.push_str(&self.as_configured());
        out.push_str(&self.results());
        out.push_str(&self.tuning());
        out.push_str(&self.own_best());
        for load in &self.reported {
            let _ = writeln!(out, "\n![{0}](simulate-{0}.svg)", load.name());
        }
        out
    }

    fn conditions(&self) -> String {
        let s = &self.setting;
        let (least, most) = s.replicas;
        format!(
            "Requests of one row come as a Poisson process, up to {peak:.0}/s, to a balancer that picks a ready replica at random. A replica \
             is the server's own scheduler and signal over a device that takes {machine} ({capacity:.0} rows/s at its best batch, runs \
             ±{jitter:.0}%), with a queue of {queue} rows. A pod takes requests {startup:?} after it was decided on. It is scraped every \
             {scrape:?}; the query takes the mean or the rate over {window:?}; {delay:?} more pass until the autoscaler sees it, which \
             decides every {sync:?} by the rules of Kubernetes' HorizontalPodAutoscaler (tolerance 10%, {least} to {most} replicas, the \
             policies and windows of config/kubernetes/components/autoscale-hpa). The promise: 99 of 100 requests answered \
             within {objective:?}; a refused one is late. Each run begins with 15 minutes of its first load that do not count. \
             `cpu` takes {cpu_row} ms of a processor for each row and {cpu_batch} ms for each batch.\n\n",
            peak = s.peak,
            machine = s.machine.name,
            capacity = s.capacity(),
            jitter = 100.0 * s.machine.jitter,
            queue = s.max_queue_rows,
            startup = s.startup,
            scrape = s.scrape_interval,
            window = s.query_window,
            delay = s.metric_delay,
            sync = s.sync_period,
            objective = s.objective,
            cpu_row = 1e3 * s.machine.cpu_seconds.0,
            cpu_batch = 1e3 * s.machine.cpu_seconds.1,
        )
    }

    /// Whether the claim holds, in words that come from the numbers.
    fn verdict(&self) -> String {
        let objective = self.setting.objective;
        let runs = |candidate: &Candidate| -> (Runs, Runs) {
            let all = self.reported.iter().copied().zip(candidate.reported.iter().cloned());
            all.partition(|(_, outcome)| outcome.meets(objective))
        };
        let hours = |kept: &Runs| kept.iter().map(|(_, outcome)| outcome.replica_hours).sum::<f64>();
        let mut order: Vec<_> = self.candidates.iter().map(|candidate| (candidate, runs(candidate))).collect();
        order.sort_by(|(_, (a, _)), (_, (b, _))| b.len().cmp(&a.len()).then(hours(a).total_cmp(&hours(b))));
        let mut out = "## In short\n\nBy how many loads keep the promise, then by their replica-hours.\n\n".to_owned();
        for (candidate, (kept, missed)) in order {
            let names: Vec<&str> = kept.iter().map(|(load, _)| load.name()).collect();
            let late =
                |(load, outcome): &(Workload, Outcome)| format!("{} ({} late)", load.name(), percent(outcome.late));
            let missed: Vec<String> = missed.iter().map(late).collect();
            let kept = if kept.is_empty() {
                "kept in no load".to_owned()
            } else {
                format!("kept with {:.0} replica-hours in {}", hours(&kept), names.join(", "))
            };
            let missed = if missed.is_empty() { String::new() } else { format!("; missed in {}", missed.join(", ")) };
            let target = shown(candidate.signal, candidate.trials[candidate.kept].target);
            let _ = writeln!(out, "- `{}` at {target}: {kept}{missed}.", candidate.signal.name());
        }
        out
    }

    /// What the target that is configured keeps, and what it cannot.
    fn as_configured(&self) -> String {
        let target = self.setting.scaling.target;
        let mut out = format!(
            "\n## As configured\n\n`saturation` at {target}, the key `scaling.target`, with the same random numbers as the table below. A fleet \
             whose saturation is at the target is overloaded when its load, or what a row takes, grows by more than {:.0}% before new \
             pods take requests, which is {:?} and what the metric takes to be seen.\n\n\
             | load | p99 | late | replica-hours | most replicas |\n|---|---:|---:|---:|---:|\n",
            100.0 * (1.0 / target - 1.0),
            self.setting.startup,
        );
        for (load, outcome) in self.reported.iter().zip(&self.configured) {
            let p99 = self.bold(outcome, &millis(outcome.p99));
            let (late, hours, most) = (percent(outcome.late), outcome.replica_hours, outcome.most_replicas);
            let _ = writeln!(out, "| {} | {p99} | {late} | {hours:.1} | {most} |", load.name());
        }
        out
    }

    fn results(&self) -> String {
        let mut out = format!(
            "\n## With the target that was kept, other random numbers (seed {} XOR 0x5eed)\n\n\
             `day`, `squeeze`, `surge` and `lengthen` were not tuned on. Late: refused, or later than {:?}. Bold: the promise is kept.\n\n\
             | load | signal | p50 | p99 | late | refused | replica-hours | most replicas |\n|---|---|---:|---:|---:|---:|---:|---:|\n",
            self.setting.seed, self.setting.objective
        );
        for (index, load) in self.reported.iter().enumerate() {
            for candidate in &self.candidates {
                let outcome = &candidate.reported[index];
                let _ = writeln!(
                    out,
                    "| {} | {} | {} | {} | {} | {} | {:.1} | {} |",
                    load.name(),
                    candidate.signal.name(),
                    millis(outcome.p50),
                    self.bold(outcome, &millis(outcome.p99)),
                    percent(outcome.late),
                    outcome.refused,
                    outcome.replica_hours,
                    outcome.most_replicas,
                );
            }
        }
        out
    }

    fn tuning(&self) -> String {
        let loads: Vec<&str> = self.tuned.iter().map(|load| load.name()).collect();
        let mut out = format!(
            "\n## How the targets were chosen\n\nOver {}. A target is what the signal reads at a steady load of that part of a replica's \
             capacity; each cell has the target, the worst share of late requests and the replica-hours of all; a star: all keep \
             the promise; bold: kept.\n\n| part |",
            loads.join(", ")
        );
        self.candidates.iter().for_each(|candidate| {
            let _ = write!(out, " {} |", candidate.signal.name());
        });
        let _ = writeln!(out, "\n|---:|{}", "---|".repeat(self.candidates.len()));
        for (index, fraction) in super::FRACTIONS.iter().enumerate() {
            let _ = write!(out, "| {fraction} |");
            for candidate in &self.candidates {
                let trial = &candidate.trials[index];
                let star = if trial.meets(self.setting.objective) { " *" } else { "" };
                let (target, late) = (shown(candidate.signal, trial.target), percent(trial.worst_late()));
                let cell = format!("{target}: {late}, {:.1} h{star}", trial.replica_hours());
                let _ = if candidate.kept == index { write!(out, " **{cell}** |") } else { write!(out, " {cell} |") };
            }
            out.push('\n');
        }
        out
    }

    /// What each signal would do with a target of its own for each load: more than an operator can have.
    fn own_best(&self) -> String {
        let mut out = "\n## With a target of its own for each load\n\nThe fewest replica-hours with which the promise is kept in that \
                       load alone (the seed of the tuning), and the part of the capacity that does it.\n\n| load |"
            .to_owned();
        self.candidates.iter().for_each(|candidate| {
            let _ = write!(out, " {} |", candidate.signal.name());
        });
        let _ = writeln!(out, "\n|---|{}", "---:|".repeat(self.candidates.len()));
        for (index, load) in self.tuned.iter().enumerate() {
            let _ = write!(out, "| {} |", load.name());
            for candidate in &self.candidates {
                let hours = |trial: &&Trial| trial.outcomes[index].replica_hours;
                let meeting =
                    candidate.trials.iter().filter(|trial| trial.outcomes[index].meets(self.setting.objective));
                let best = meeting.min_by(|a, b| hours(a).total_cmp(&hours(b)));
                let cell =
                    best.map_or("none".to_owned(), |trial| format!("{:.1} h at {}", hours(&trial), trial.fraction));
                let _ = write!(out, " {cell} |");
            }
            out.push('\n');
        }
        out
    }

    fn bold(&self, outcome: &Outcome, text: &str) -> String {
        if outcome.meets(self.setting.objective) { format!("**{text}**") } else { text.to_owned() }
    }
}

impl Outcome {
    /// As one line for people.
    #[must_use]
    pub fn line(&self, load: Workload, signal: SignalKind, target: f64) -> String {
        format!(
            "{} on {} at {}: {} answered, {} refused, p50 {}, p99 {}, late {}, {:.1} replica-hours, at most {} replicas, {} batches",
            load.name(),
            signal.name(),
            shown(signal, target),
            self.answered,
            self.refused,
            millis(self.p50),
            millis(self.p99),
            percent(self.late),
            self.replica_hours,
            self.most_replicas,
            self.batches,
        )
    }
}

/// A target with its unit.
pub(super) fn shown(signal: SignalKind, target: f64) -> String {
    match signal {
        SignalKind::Saturation | SignalKind::Busy => format!("{target:.2}"),
        SignalKind::Cpu => format!("{target:.2} cores"),
        SignalKind::QueueTime => format!("{:.1} ms", 1e3 * target),
        SignalKind::Concurrency => format!("{target:.1}"),
    }
}

fn millis(time: Option<Duration>) -> String {
    time.map_or("refused".to_owned(), |time| format!("{:.0} ms", 1e3 * time.as_secs_f64()))
}

fn percent(share: f64) -> String {
    format!("{:.2}%", 100.0 * share)
}
