//! What the manager does about models that fail, that lose instances, and that come later; time is virtual.

use super::support;
use arc_swap::ArcSwap;
use concertina::batcher::{Control, Event};
use concertina::config::Config;
use concertina::metrics::Metrics;
use concertina::model::Table;
use concertina::repository::Controller;
use concertina::repository::manager::Manager;
use concertina::units::{InstanceId, ModelId};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::sync::mpsc;

/// Longer than anything waits.
const DAY: Duration = Duration::from_secs(24 * 3600);

/// A manager of a folder, and the ends of a loop.
struct World {
    folder: TempDir,
    models: Arc<ArcSwap<Table>>,
    controls: mpsc::Receiver<Control>,
    lost: mpsc::Sender<Event>,
    controller: Controller,
}

impl World {
    /// With these files; where a text is `affine`, that model is meant.
    fn start(files: &[(&str, &str)], change: impl FnOnce(&mut Config)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.models.path = folder.path().to_owned();
        config.model.warmup.seconds = Duration::ZERO;
        change(&mut config);
        let loader = super::loader_on_host();
        let models = Arc::new(ArcSwap::from_pointee(Table::default()));
        let ((control, controls), (lost, events)) = (mpsc::channel(8), mpsc::channel(1));
        let (manager, controller) =
            Manager::new(loader, Arc::clone(&models), control, Arc::new(Metrics::new()), config);
        let world = Self { folder, models, controls, lost, controller };
        files.iter().for_each(|(name, text)| world.put(name, text));
        tokio::spawn(manager.run(events));
        world
    }

    fn put(&self, name: &str, text: &str) {
        let path: PathBuf = self.folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let bytes = if text == "affine" { fs::read(support::test_model("affine")).unwrap() } else { text.into() };
        fs::write(self.folder.path().join(".new"), bytes).unwrap();
        fs::rename(self.folder.path().join(".new"), path).unwrap();
    }

    /// Takes the next model that is loaded, and answers its name, version and number.
    async fn loaded(&mut self) -> (String, u64, ModelId) {
        let next = async {
            loop {
                if let Some(Control::Load { model, taken }) = self.controls.recv().await {
                    taken.send(()).unwrap();
                    break (model.spec.name.clone(), model.spec.version, model.spec.id);
                }
            }
        };
        tokio::time::timeout(DAY, next).await.expect("a model is loaded")
    }

    /// Waits until the table is as it should be.
    async fn until(&self, is: impl Fn(&Table) -> bool) {
        let waiting = async {
            while !is(&self.models.load()) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(DAY, waiting).await.expect("the table becomes so");
    }

    fn not_ready(&self) -> Option<String> {
        self.models.load().not_ready_reason()
    }
}

fn is_over(table: &Table) -> bool {
    table.scanned && !table.starting
}

#[tokio::test(start_paused = true)]
async fn a_model_that_fails_once_more_still_keeps_the_server_from_being_ready() {
    let mut world = World::start(&[("m/model.onnx", "broken")], |_| {});
    world.until(is_over).await;
    assert!(world.not_ready().is_some(), "it has failed at the start");
    for text in ["broken", "broken in another way"] {
        world.put("m/model.onnx", text);
        world.controller.load("m", []).await.unwrap_err();
        assert!(world.not_ready().is_some(), "{text}");
    }
    world.put("m/model.onnx", "affine");
    let controller = world.controller.clone();
    let (loaded, answer) = tokio::join!(world.loaded(), controller.load("m", []));
    assert_eq!((loaded.0.as_str(), answer), ("m", Ok(())));
    assert_eq!(world.not_ready(), None);
}

#[tokio::test(start_paused = true)]
async fn a_model_that_lost_its_instances_is_loaded_again_until_that_works() {
    let mut world = World::start(&[("m/model.onnx", "affine")], |_| {});
    let (_, _, first) = world.loaded().await;
    world.until(|table| is_over(table) && table.ready().count() == 1).await;
    world.put("m/model.onnx", "for a while there is none");
    let lost = |model| Event::InstanceLost { model, instance: InstanceId(0), reason: "gone".to_owned(), remaining: 0 };
    world.lost.send(lost(first)).await.unwrap();
    world.until(|table| table.index().any(|entry| entry.state == "UNAVAILABLE" && entry.reason != "gone")).await;
    assert!(world.not_ready().is_some());
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(world.not_ready().is_some(), "several times later it is still missed");
    world.put("m/model.onnx", "affine");
    let (_, _, second) = world.loaded().await;
    assert_ne!(first, second);
    world.until(|table| table.not_ready_reason().is_none()).await;
}

#[tokio::test(start_paused = true)]
async fn what_was_loaded_on_request_is_followed_and_what_is_new_waits_for_a_request() {
    let change = |config: &mut Config| {
        (config.models.load_at_start, config.models.poll_interval) = (false, Duration::from_secs(1));
    };
    let mut world = World::start(&[("m/1/model.onnx", "affine"), ("n/1/model.onnx", "affine")], change);
    world.until(is_over).await;
    let controller = world.controller.clone();
    let (loaded, answer) = tokio::join!(world.loaded(), controller.load("m", []));
    assert_eq!(((loaded.0.as_str(), loaded.1), answer), (("m", 1), Ok(())));
    // A model that nobody has asked for goes before it by its name.
    world.put("a/1/model.onnx", "affine");
    for version in [2, 3] {
        world.put(&format!("m/{version}/model.onnx"), "affine");
        let loaded = world.loaded().await;
        assert_eq!((loaded.0.as_str(), loaded.1), ("m", version));
    }
    assert_eq!(world.models.load().ready().map(|spec| spec.name.as_str()).collect::<Vec<_>>(), ["m"]);
}
