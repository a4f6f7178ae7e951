//! The section `[text]`: what texts may cost before a model sees them.

use crate::keys::Keys;
use crate::keys::value::{auto_or, bytes, count, integer};
use crate::units::ByteSize;
use std::num::NonZeroUsize;

/// The section `[text]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    threads: Option<NonZeroUsize>,
    /// Requests with texts inside the server.
    pub max_requests: NonZeroUsize,
    /// The most texts in one request.
    pub max_inputs: usize,
    /// The longest text.
    pub max_input_bytes: ByteSize,
    /// The model that routes without a model mean; `None`: the only one that can do what is asked.
    pub model: Option<String>,
}

impl Text {
    /// Threads that make tokens of texts, on a machine with so many cores: half of them, so that models and HTTP go on.
    #[must_use]
    pub fn threads(&self, cores: usize) -> NonZeroUsize {
        self.threads.or(NonZeroUsize::new(cores / 2)).unwrap_or(NonZeroUsize::MIN)
    }
}

pub(super) fn read(keys: &mut Keys) -> Option<Text> {
    let threads = keys.read("text.threads", auto_or(count(1024usize)));
    let max_requests = keys.read("text.max_requests", count(1_000_000usize));
    let max_inputs = keys.read("text.max_inputs", integer(1..=1 << 24));
    let max_input_bytes = keys.read("text.max_input_bytes", bytes(ByteSize(1)..=ByteSize(1 << 30)));
    let model = keys.read("text.model", super::model_name);
    Some(Text {
        threads: threads?,
        max_requests: max_requests?,
        max_inputs: max_inputs?,
        max_input_bytes: max_input_bytes?,
        model: model?,
    })
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn threads_are_half_of_the_cores_and_at_least_one() {
        let text = Config::default().text;
        let threads: Vec<usize> = [1, 2, 3, 8].into_iter().map(|cores| text.threads(cores).get()).collect();
        assert_eq!(threads, [1, 1, 1, 4]);
    }
}
