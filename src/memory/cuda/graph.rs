//! Work that was put into a stream once and is launched from then on with one call.

use super::driver::{CudaError, Gpu, check};
use super::stream::Stream;
use cudarc::driver::sys;

/// A CUDA graph, ready to be launched.
#[derive(Debug)]
pub struct Graph {
    gpu: Gpu,
    raw: sys::CUgraphExec,
}

// SAFETY: a graph is a name that the driver knows; its calls may come from any thread, one at a time for each graph, and all that
// use it are `&mut` or the last.
unsafe impl Send for Graph {}

impl Stream {
    /// Has all that `work` puts into this stream recorded and not run. No other work may be in it before. Work that cannot be
    /// recorded fails, and the graph with it. Other calls of `work` are not watched ([`Gpu::bind`] has told the driver so for this
    /// thread): memory that they allocate or free is not part of the graph.
    ///
    /// # Errors
    /// Those of `work`, or why there is no graph.
    pub fn capture<E: From<CudaError>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        self.gpu().bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a stream of ours.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.handle(), mode) })?;
        let mut capture = Capture { stream: self, ended: false };
        let worked = work();
        let recorded = capture.end();
        worked?;
        Ok(recorded.and_then(|recorded| recorded.instantiate(self))?)
    }
}

/// A stream that records, until this is dropped.
struct Capture<'s> {
    stream: &'s Stream,
    ended: bool,
}

impl Capture<'_> {
    fn end(&mut self) -> Result<Recorded, CudaError> {
        self.ended = true;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a pointer to a value of ours, and a stream of ours that records since this was made, on this thread.
        let ended = check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(self.stream.handle(), &raw mut raw) });
        let recorded = Recorded { raw };
        ended.map(|()| recorded)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // After a panic: whatever was recorded is thrown away.
            let _ = self.end();
        }
    }
}

/// What was recorded.
struct Recorded {
    /// Null if there is nothing.
    raw: sys::CUgraph,
}

impl Recorded {
    fn instantiate(&self, stream: &Stream) -> Result<Graph, CudaError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: a pointer to a value of ours, and what `end` was given without an error.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut raw, self.raw, 0) };
        check("cuGraphInstantiateWithFlags", made)?;
        let graph = Graph { gpu: stream.gpu(), raw };
        // SAFETY: a graph and a stream of ours. Nothing of the work runs.
        check("cuGraphUpload", unsafe { sys::cuGraphUpload(graph.raw, stream.handle()) })?;
        Ok(graph)
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if self.raw.is_null() {
            return;
        }
        // SAFETY: a graph of ours that is not used again. What was made of it lives on by itself.
        if let Err(error) = check("cuGraphDestroy", unsafe { sys::cuGraphDestroy(self.raw) }) {
            tracing::debug!(%error, "what was recorded could not be let go");
        }
    }
}

impl Graph {
    /// Puts all of the recorded work into a stream of the same GPU.
    ///
    /// # Errors
    /// If the device is lost.
    ///
    /// # Safety
    /// From the call until the stream has been waited for, or an event behind the work has happened, all that the work uses lives at
    /// the addresses that it had when it was recorded, and nothing else uses what it writes, except work that is in order with it.
    pub unsafe fn launch(&mut self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: a graph and a stream of ours; the rest is as the caller says. Breach: `device::recorded_*`.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.raw, stream.handle()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: a graph of ours that is not used again. The driver lets a launch that is under way end.
        let destroyed =
            self.gpu.bind().and_then(|()| check("cuGraphExecDestroy", unsafe { sys::cuGraphExecDestroy(self.raw) }));
        if let Err(error) = destroyed {
            tracing::debug!(%error, "a graph could not be let go");
        }
    }
}
