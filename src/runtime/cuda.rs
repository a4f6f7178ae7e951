//! ONNX Runtime's CUDA provider: how a session gets it, and what its errors mean.

use super::bound;
use super::weights::Weights;
use crate::memory::cuda::{CudaError, Gpu, Stream};
use ort::ep::cuda::ConvAlgorithmSearch;
use ort::ep::{ArbitrarilyConfigurableExecutionProvider, CUDA, ExecutionProvider, ExecutionProviderDispatch, TensorRT};
use ort::session::builder::SessionBuilder;
use std::collections::BTreeMap;
use std::sync::Arc;

/// How the sessions of one model use a GPU.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// Options of the provider by ONNX Runtime's names, over ours.
    pub provider: BTreeMap<String, String>,
    /// Whether TensorRT is asked first, and CUDA for what it does not take.
    pub tensorrt: bool,
    /// Weights on the device that all sessions of the model share; what is not among them each has for itself.
    pub weights: Option<Arc<Weights>>,
}

/// Whether the CUDA provider can be used at all.
///
/// # Errors
/// Why not, in one line.
pub fn available() -> Result<(), String> {
    Gpu::count().map_err(|reason| reason.to_string())?;
    match CUDA::is_available() {
        Ok(true) => Ok(()),
        _ => Err("this ONNX Runtime is built without CUDA; `make setup-gpu` fetches one that has it".to_owned()),
    }
}

/// Adds the providers to a session: what they cannot have is an error, never a silent change to the CPU.
///
/// # Errors
/// ONNX Runtime's, such as for a library of CUDA that is not found.
#[allow(unsafe_code)]
pub(super) fn with_providers(
    builder: SessionBuilder,
    stream: &Stream,
    options: &CudaOptions,
    graph: bool,
) -> ort::Result<SessionBuilder> {
    let ordinal = stream.gpu().ordinal();
    let mut builder = builder;
    for (name, value) in options.weights.iter().flat_map(|weights| weights.values()) {
        builder = builder.with_initializer(name, Arc::clone(value))?;
    }
    let mut cuda = CUDA::default()
        .with_device_id(ordinal)
        .with_conv_algorithm_search(ConvAlgorithmSearch::Heuristic)
        .with_cuda_graph(graph);
    for (key, value) in &options.provider {
        cuda = cuda.with_arbitrary_config(key, value);
    }
    // SAFETY: the session's owner keeps the stream until the session is gone.
    let cuda = unsafe { cuda.with_compute_stream(stream.raw()) };
    let mut providers: Vec<ExecutionProviderDispatch> = Vec::new();
    if options.tensorrt {
        let tensorrt = TensorRT::default().with_device_id(ordinal);
        // SAFETY: as above.
        providers.push(unsafe { tensorrt.with_compute_stream(stream.raw()) }.build().error_on_failure());
    }
    providers.push(cuda.build().error_on_failure());
    builder
        .with_execution_providers(providers)?
        .with_config_entry("session.record_ep_graph_assignment_info", "1")
        .map_err(Into::into)
}

/// Says once which operators stay on the CPU.
pub(super) fn report(label: &str, session: &ort::session::Session) {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for operator in bound::operators_of(session, "CPUExecutionProvider") {
        *counts.entry(operator).or_default() += 1;
    }
    if !counts.is_empty() {
        let total: usize = counts.values().sum();
        let operators: Vec<String> = counts.iter().map(|(name, count)| format!("{name} × {count}")).collect();
        tracing::info!(label, total, operators = operators.join(", "), "ONNX Runtime runs some operators on the CPU");
    }
}

/// Whether a session's operators plan anew whenever their inputs have another shape than the last time: those that go to
/// cuDNN do, which costs tens of milliseconds for the convolutions of a model like ResNet-50.
pub(super) fn plans_by_shape(session: &ort::session::Session) -> bool {
    bound::operators_of(session, "CUDAExecutionProvider").iter().any(|operator| operator.contains("Conv"))
}

/// Whether the words of ONNX Runtime speak of a shortage of memory outside our own allocator.
pub(super) fn is_shortage(message: &str) -> bool {
    const SIGNS: [&str; 7] = [
        "out of memory",
        "std::bad_alloc",
        "CUBLAS failure 3",
        "CUDNN failure 4003",
        "CUDNN failure 4004",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
    ];
    SIGNS.iter().any(|sign| message.contains(sign))
}

/// The words of ONNX Runtime without the name of this machine, which its CUDA errors hold.
pub(super) fn without_host(message: &str) -> &str {
    message.split(" ; GPU=").next().unwrap_or(message)
}

/// Why a device does not work any more, if it does not.
pub(super) fn fatal(gpu: Gpu) -> Option<CudaError> {
    gpu.synchronize().err().filter(CudaError::is_sticky)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortages_are_told_from_faults_and_no_client_learns_the_host() {
        let shortage =
            "CUDA failure 2: out of memory ; GPU=0 ; hostname=box ; file=/x/y.cc ; line=9 ; expr=cudaMalloc(p)";
        assert!(is_shortage(shortage) && is_shortage("CUBLAS failure 3: x") && is_shortage("std::bad_alloc"));
        assert!(!is_shortage("CUDA failure 700: an illegal memory access was encountered"));
        assert_eq!(without_host(shortage), "CUDA failure 2: out of memory");
    }
}
