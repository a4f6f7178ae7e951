//! A small model for tests of the scheduler.

use concertina::scheduler::{ModelPlan, Observation, Packing, RequestMeta, Rounding};
use concertina::units::{ByteSize, ClassId, DeviceId, InstanceId, ModelId, RequestId, Rows};
use std::time::Duration;

/// One instance, up to 8 rows; a row takes 10 bytes, a batch about 10 ms.
pub(crate) fn plan(model: u32) -> ModelPlan {
    let observation = |rows: Rows| Observation {
        class: ClassId(0),
        units: 1,
        rows,
        duration: Duration::from_millis(9 + u64::from(rows)),
        bytes: ByteSize(10 * u64::from(rows)),
    };
    ModelPlan {
        model: ModelId(model),
        device: DeviceId(0),
        instances: vec![InstanceId(model)],
        ladder: vec![1, 2, 4, 8],
        rounding: Rounding::Off,
        pipeline: 1,
        staged_unit: None,
        max_queue_delay: Duration::ZERO,
        max_gather_delay: Duration::ZERO,
        max_queue_rows: 100,
        max_queue_bytes: ByteSize(1000),
        priority_levels: 2,
        knee_tolerance: 0.03,
        packing: Packing::Near,
        observations: [1, 4, 8].map(observation).to_vec(),
    }
}

/// One row that has no deadline, of the only model and class.
pub(crate) fn request(id: u64) -> RequestMeta {
    RequestMeta {
        id: RequestId(id),
        model: ModelId(0),
        class: ClassId(0),
        family: None,
        units: 1,
        rows: 1,
        bytes: ByteSize(1),
        deadline: None,
        priority: 1,
    }
}
