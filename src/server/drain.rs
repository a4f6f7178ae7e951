//! The end: announce, stop accepting, let everything inside end, and answer what does not end in time.

use super::traces::Exporting;
use crate::batcher::Control;
use crate::config::Config;
use crate::http::Phase;
use std::io::IsTerminal;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

/// How long answers may take to leave once the grace period is over, and threads to end.
pub(super) const FLUSH: Duration = Duration::from_secs(2);

/// The long-lived tasks.
pub(super) struct Parts {
    pub(super) batching: JoinHandle<()>,
    pub(super) managing: JoinHandle<()>,
    pub(super) sampling: JoinHandle<()>,
    pub(super) following: JoinHandle<()>,
    pub(super) serving: JoinHandle<()>,
    /// Not waited for: who answers requests does not need it.
    pub(super) exporting: Option<Exporting>,
}

impl Parts {
    /// Waits for one of them to end before it was told to, which only a broken invariant makes it do: without it the process
    /// would look alive and serve nobody. Answers which.
    pub(super) async fn any_ends(&mut self) -> &'static str {
        tokio::select! {
            _ = &mut self.batching => "the batcher",
            _ = &mut self.managing => "the model manager",
            _ = &mut self.sampling => "the memory sampler",
            _ = &mut self.following => "what follows the files of secrets",
            _ = &mut self.serving => "the HTTP server",
        }
    }
}

/// Announces the end, stops accepting, and lets everything inside end within the grace period; what does not is answered
/// 503. Returns whether everything that was accepted has had an answer.
pub(super) async fn drain(
    config: &Config,
    phase: &watch::Sender<Phase>,
    control: &mpsc::Sender<Control>,
    mut parts: Parts,
) -> bool {
    let announce = config.drain.announce(std::io::stderr().is_terminal());
    tracing::info!(?announce, grace = ?config.drain.grace, "draining");
    phase.send_replace(Phase::Announced);
    tokio::time::sleep(announce).await;
    phase.send_replace(Phase::Closing);
    // What HTTP has accepted goes through the batcher as ever; only then is the batcher told that nothing more comes.
    let mut answered = tokio::time::timeout(config.drain.grace, &mut parts.serving).await.is_ok();
    if !answered {
        tracing::warn!("the grace period is over: what is left is answered 503");
        let told = control.send(Control::Abandon).await.is_ok();
        answered = told && tokio::time::timeout(FLUSH, &mut parts.serving).await.is_ok();
    }
    let (done, drained) = oneshot::channel();
    let emptied = async { control.send(Control::Drain(done)).await.is_ok() && drained.await.is_ok() };
    // The loop ends with the drain and joins its workers: nothing runs when the library's own clean-up begins. A run that
    // takes longer than this is left to the end of the process.
    let ended = tokio::time::timeout(FLUSH, emptied).await.unwrap_or(false);
    if let Some(exporting) = parts.exporting.take() {
        exporting.end(FLUSH).await;
    }
    parts.managing.abort();
    parts.sampling.abort();
    parts.following.abort();
    tracing::info!(answered, ended, "drained");
    answered
}
