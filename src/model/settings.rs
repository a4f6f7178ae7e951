//! model.toml: what a person may say about a model. Everything has a default.

use std::time::Duration;

/// The settings of one model: its model.toml over the server's `[model]` defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// How long an idle instance waits for more rows before it runs fewer than it could. Zero: never.
    pub max_queue_delay: Duration,
    /// The most rows that may wait.
    pub max_queue_rows: u64,
    /// The most bytes of inputs that may wait.
    pub max_queue_bytes: u64,
    /// Levels of priority, 1 the most urgent.
    pub priority_levels: u32,
    /// The level of a request that names none.
    pub default_priority: u32,
}
