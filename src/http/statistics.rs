//! The statistics extension: what became of requests and batches, per model and version.

use super::AppState;
use super::error::ApiError;
use super::path::ModelPath;
use super::status::json_response;
use crate::batcher::{StageTotals, Statistics, Total};
use crate::model::{MemoryUsage, ModelSpec};
use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) async fn all(State(state): State<Arc<AppState>>) -> Result<Response, ApiError> {
    statistics_of(&state, None).await.map(|statistics| json_response(&statistics))
}

pub(super) async fn model(State(state): State<Arc<AppState>>, path: ModelPath) -> Result<Response, ApiError> {
    statistics_of(&state, Some(&path)).await.map(|statistics| json_response(&statistics))
}

/// The statistics of one model, of every version that serves or of the one that is named; without a path, of all models.
pub(crate) async fn statistics_of(state: &AppState, path: Option<&ModelPath>) -> Result<Value, ApiError> {
    let named = path.map(|path| path.ready(state)).transpose()?;
    let ready: Vec<Arc<ModelSpec>> = state.models.load().ready().cloned().collect();
    let of_version = path.is_some_and(|path| path.version.is_some());
    let concerned = |spec: &Arc<ModelSpec>| match &named {
        None => true,
        Some(named) if of_version => spec.id == named.id,
        Some(named) => spec.name == named.name,
    };
    let specs = ready.iter().filter(|spec| concerned(spec));
    let counted = state.batcher.statistics().await?;
    let nothing = Statistics::default();
    let entry = |spec: &Arc<ModelSpec>| {
        let statistics = counted.get(&spec.id).unwrap_or(&nothing);
        entry(spec, statistics, &(state.memory)(spec))
    };
    Ok(json!({"model_stats": specs.map(entry).collect::<Vec<_>>()}))
}

fn entry(spec: &ModelSpec, statistics: &Statistics, memory: &[MemoryUsage]) -> Value {
    let Statistics { success, fail, queue, compute, by_rows, .. } = statistics;
    let by_rows = by_rows.iter().map(|(rows, StageTotals { input, infer, output })| {
        json!({
            "batch_size": rows,
            "compute_input": total(input),
            "compute_infer": total(infer),
            "compute_output": total(output),
        })
    });
    let memory = memory.iter().map(|usage| json!({"type": usage.kind, "id": usage.device, "byte_size": usage.bytes}));
    let last = statistics.last_inference.map_or(0, |at| u64::try_from(at.as_millis()).unwrap_or(u64::MAX));
    json!({
        "name": spec.name,
        "version": spec.version.to_string(),
        "last_inference": last,
        "inference_count": statistics.rows,
        "execution_count": statistics.batches,
        "inference_stats": {
            "success": total(success),
            "fail": total(fail),
            "queue": total(queue),
            "compute_input": total(&compute.input),
            "compute_infer": total(&compute.infer),
            "compute_output": total(&compute.output),
            // There is no cache.
            "cache_hit": total(&Total::default()),
            "cache_miss": total(&Total::default()),
        },
        "response_stats": {},
        "batch_stats": by_rows.collect::<Vec<_>>(),
        "memory_usage": memory.collect::<Vec<_>>(),
    })
}

fn total(total: &Total) -> Value {
    json!({"count": total.count, "ns": u64::try_from(total.time.as_nanos()).unwrap_or(u64::MAX)})
}
