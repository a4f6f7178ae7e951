//! The manager of the repository, with a loop that the test plays.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "repository/import.rs"]
mod import;
mod support;

use arc_swap::ArcSwap;
use concertina::batcher::Control;
use concertina::clock::Clock;
use concertina::config::Config;
use concertina::metrics::Metrics;
use concertina::model::Table;
use concertina::model::table::Lookup;
use concertina::repository::devices::Devices;
use concertina::repository::load::Loader;
use concertina::repository::manager::Manager;
use concertina::repository::store::Store;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Requests reach the loop by another channel than models do: one that is shown before the loop has it would be refused.
#[tokio::test]
async fn a_model_is_shown_to_clients_only_when_the_loop_has_it() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join("affine/1")).unwrap();
    std::fs::copy(support::test_model("affine"), folder.path().join("affine/1/model.onnx")).unwrap();
    let mut config = Config::default();
    config.models.path = folder.path().to_owned();
    config.model.warmup.seconds = Duration::from_millis(20);
    let loader = Loader {
        runtime: support::runtime().clone(),
        devices: Devices::host_only(support::device()),
        clock: Clock::start(),
        completions: mpsc::channel(1).0,
        cores: 1,
        ids: Default::default(),
        store: Store::new(None),
    };
    let models = Arc::new(ArcSwap::from_pointee(Table::default()));
    let (control, mut controls) = mpsc::channel(8);
    let (_lost, events) = mpsc::channel(1);
    let (manager, _controller) = Manager::new(loader, Arc::clone(&models), control, Arc::new(Metrics::new()), config);
    tokio::spawn(manager.run(events));

    let Some(Control::Load { taken, .. }) = controls.recv().await else { panic!("a model is loaded") };
    assert!(matches!(models.load().lookup("affine", None), Lookup::NotReady(_)), "the loop does not have it yet");
    taken.send(()).unwrap();
    while !matches!(models.load().lookup("affine", None), Lookup::Ready(_)) {
        tokio::task::yield_now().await;
    }
}
