//! Ledgers as JSON. Every structure is taken apart by name, so that a new number cannot be forgotten here.

use crate::memory::{ArenaKind, ArenaStats, Counters, LedgerStats, Sample};
use serde_json::{Value, json};

/// One device. All sizes are bytes.
pub(super) fn device(stats: LedgerStats, sample: Sample) -> Value {
    let LedgerStats {
        device,
        limit,
        headroom,
        margin,
        committed,
        allocated,
        free,
        total,
        outside,
        counters,
        last_failure,
        arenas,
    } = stats;
    let Sample { device: _, budget, capacity } = sample;
    let Counters { commits, decommits, failures, reclaimed, trimmed } = counters;
    json!({
        "device": device.0,
        "limit": limit.0,
        "headroom": headroom.0,
        "margin": margin.0,
        "committed": committed.0,
        "allocated": allocated.0,
        "free": free.0,
        "total": total.0,
        "outside": outside.0,
        "budget": budget.0,
        "capacity": capacity.0,
        "counters": {
            "commits": commits,
            "decommits": decommits,
            "failures": failures,
            "reclaimed": reclaimed,
            "trimmed": trimmed,
        },
        "last_failure": last_failure,
        "arenas": arenas.into_iter().map(arena).collect::<Vec<_>>(),
    })
}

fn arena(stats: ArenaStats) -> Value {
    let fragmentation = stats.fragmentation();
    let ArenaStats {
        label,
        kind,
        priority,
        allocated,
        reserved,
        active,
        peak_allocated,
        peak_reserved,
        peak_active,
        blocks,
        granules,
        allocations,
        frees,
        denied,
        last_denied,
        free,
        largest_free,
        in_run,
    } = stats;
    json!({
        "label": label,
        "kind": kind_name(kind),
        "priority": priority,
        "allocated": allocated.0,
        "reserved": reserved.0,
        "active": active.0,
        "peak_allocated": peak_allocated.0,
        "peak_reserved": peak_reserved.0,
        "peak_active": peak_active.0,
        "blocks": blocks,
        "granules": granules,
        "allocations": allocations,
        "frees": frees,
        "denied": denied,
        "last_denied": last_denied.map(|last| json!({"wanted": last.wanted.0, "available": last.available.0})),
        "free": free.0,
        "largest_free": largest_free.0,
        "fragmentation": fragmentation,
        "in_run": in_run,
    })
}

fn kind_name(kind: ArenaKind) -> &'static str {
    match kind {
        ArenaKind::Weights => "weights",
        ArenaKind::Run => "run",
        ArenaKind::Buffers => "buffers",
    }
}
