//! The process itself, under the names that every Prometheus client library gives. Read when it is asked for.
//!
//! Our own, because the library's version of this needs crates that the server otherwise has in another version.

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Counter, Gauge, Opts};
use std::fs;

/// The kernel's unit of time in `/proc`, the same on every architecture that this runs on.
const TICKS_PER_SECOND: f64 = 100.0;

const GAUGES: [(&str, &str); 6] = [
    ("process_resident_memory_bytes", "Memory that is resident."),
    ("process_virtual_memory_bytes", "Addresses in use."),
    ("process_open_fds", "File descriptors in use."),
    ("process_max_fds", "File descriptors that may be in use."),
    ("process_threads", "Threads."),
    ("process_start_time_seconds", "When the process began, since 1970."),
];

/// Reads `/proc/self` at each scrape.
#[derive(Clone, Debug)]
pub(super) struct Process {
    gauges: [Gauge; 6],
    cpu_seconds: Counter,
}

impl Process {
    pub(super) fn new() -> Self {
        const VALID: &str = "names are constants";
        let cpu = Opts::new("process_cpu_seconds_total", "Seconds of processors, user and system.");
        Self {
            gauges: GAUGES.map(|(name, help)| Gauge::with_opts(Opts::new(name, help)).expect(VALID)),
            cpu_seconds: Counter::with_opts(cpu).expect(VALID),
        }
    }
}

impl Collector for Process {
    fn desc(&self) -> Vec<&Desc> {
        self.gauges.iter().flat_map(Collector::desc).chain(self.cpu_seconds.desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let read = |name: &str| fs::read_to_string(format!("/proc/{name}")).unwrap_or_default();
        let (status, stat, limits) = (read("self/status"), read("self/stat"), read("self/limits"));
        // The name of the program may have spaces and parentheses: what follows the last one is numbers.
        let fields: Vec<f64> =
            stat.rsplit(") ").next().unwrap_or_default().split(' ').filter_map(|field| field.parse().ok()).collect();
        // The state, a letter, is not among them: field 14 of the manual page, utime, is the eleventh number.
        let ticks = |field: usize| fields.get(field - 4).map(|ticks| ticks / TICKS_PER_SECOND);
        let booted = number(&read("stat"), "btime", 1);
        let values = [
            number(&status, "VmRSS:", 1).map(|kib| kib * 1024.0),
            number(&status, "VmSize:", 1).map(|kib| kib * 1024.0),
            fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count() as f64),
            number(&limits, "Max open files", 3),
            number(&status, "Threads:", 1),
            booted.zip(ticks(22)).map(|(booted, after)| booted + after),
        ];
        let mut families = Vec::new();
        for (gauge, value) in self.gauges.iter().zip(values) {
            if let Some(value) = value {
                gauge.set(value);
                families.extend(gauge.collect());
            }
        }
        if let Some(seconds) = ticks(14).zip(ticks(15)).map(|(user, system)| user + system) {
            // Two scrapes at once may both add what is new; the next one puts nothing right that is too high, so only what
            // is missing is added.
            self.cpu_seconds.inc_by((seconds - self.cpu_seconds.get()).max(0.0));
            families.extend(self.cpu_seconds.collect());
        }
        families
    }
}

/// The number in the word `index` of the line that begins so.
fn number(text: &str, begin: &str, index: usize) -> Option<f64> {
    text.lines().find(|line| line.starts_with(begin))?.split_whitespace().nth(index)?.parse().ok()
}
