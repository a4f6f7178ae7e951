//! Models that come in: one to whoever asks, and to the scheduler one for each device.

use super::classes::Classes;
use super::run::{LoadedModel, Loop};
use super::statistics::Statistics;
use crate::model::ModelSpec;
use crate::runtime::WorkerHandle;
use crate::scheduler::{Input, ModelPlan, Observation};
use crate::units::ModelId;
use std::sync::Arc;

/// A model that is ready to run.
#[derive(Debug)]
pub struct ModelLoad {
    /// What it is.
    pub spec: Arc<ModelSpec>,
    /// Each device that it runs on; at least one.
    pub devices: Vec<DeviceLoad>,
}

/// The instances of a model on one device. To the scheduler they are a model of their own.
#[derive(Debug)]
pub struct DeviceLoad {
    /// What the scheduler needs to know; its observations are filled in from `samples`. No two plans have one number.
    pub plan: ModelPlan,
    /// Its workers, one for each instance of the plan.
    pub workers: Vec<WorkerHandle>,
    /// What was measured while loading.
    pub samples: Vec<Sample>,
}

/// One measured run of a class that the batcher has not numbered yet.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The non-batch dimensions of all inputs.
    pub dims: Vec<usize>,
    /// The observation; its class is filled in.
    pub observation: Observation,
}

impl Loop {
    pub(super) fn load(&mut self, load: ModelLoad) {
        let ModelLoad { spec, devices } = load;
        let (mut classes, mut instances, mut plans) = (Classes::default(), Vec::new(), Vec::new());
        for DeviceLoad { plan, workers, samples } in devices {
            let observations =
                samples.into_iter().map(|one| Observation { class: classes.id(&one.dims), ..one.observation });
            let plan = ModelPlan { observations: observations.collect(), ..plan };
            instances.extend_from_slice(&plan.instances);
            plans.push(plan.model);
            self.owners.insert(plan.model, spec.id);
            self.workers.extend(workers.into_iter().map(|worker| (worker.instance, worker)));
            self.handle(Input::Load(plan));
        }
        let metrics = self.metrics.model(&spec.name, spec.version);
        let statistics = Statistics::default();
        self.models.insert(spec.id, LoadedModel { instances, plans, classes, spec, metrics, statistics });
    }

    /// The model that a model of the scheduler is a part of; itself if it has been unloaded.
    pub(super) fn owner(&self, plan: ModelId) -> ModelId {
        self.owners.get(&plan).copied().unwrap_or(plan)
    }
}
