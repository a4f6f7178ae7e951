//! What ends a server, with parts that are made up and a sampler that is not.

use super::*;
use crate::batcher::Ends;
use crate::memory::{Device, DeviceOptions, HOST_ALIGNMENT, Host};
use crate::units::{ByteSize, DeviceId};
use tokio::task::JoinHandle;

fn device() -> Device {
    let (limit, headroom) = (ByteSize::MAX, ByteSize::ZERO);
    let options = DeviceOptions { id: DeviceId(1), limit, headroom, alignment: HOST_ALIGNMENT };
    Device::new(Box::new(Host::new()), options)
}

/// A server without models whose HTTP part ends when it is told to stop, and the phases that it was in until then.
struct Rig {
    config: Config,
    phase: watch::Sender<Phase>,
    control: mpsc::Sender<Control>,
    parts: Parts,
    lost: oneshot::Receiver<String>,
    device: Device,
    phases: JoinHandle<Vec<Phase>>,
    // Kept, or the loop would see its clients gone.
    _ends: Ends,
}

fn rig() -> Rig {
    let (config, clock, metrics) = (Config::default(), Clock::start(), Arc::new(Metrics::new()));
    let (batcher_loop, ends) = Loop::new(8, config.scaling, clock, Arc::clone(&metrics));
    let (phase, mut seen) = watch::channel(Phase::Serving);
    let (tell, lost) = oneshot::channel();
    let device = device();
    let listeners = Listeners { control: ends.control.clone(), metrics, lost: Some(tell) };
    let mut closing = phase.subscribe();
    let phases = tokio::spawn(async move {
        let mut phases = vec![*seen.borrow_and_update()];
        while phases.last() != Some(&Phase::Closing) && seen.changed().await.is_ok() {
            phases.push(*seen.borrow_and_update());
        }
        phases
    });
    let parts = Parts {
        batching: tokio::spawn(batcher_loop.run()),
        managing: tokio::spawn(std::future::pending()),
        sampling: tokio::spawn(sample(vec![device.clone()], clock, Arc::clone(&ends.trim), listeners)),
        following: tokio::spawn(std::future::pending()),
        serving: tokio::spawn(async move {
            let _ = closing.wait_for(|phase| *phase == Phase::Closing).await;
        }),
        exporting: None,
    };
    Rig { config, phase, control: ends.control.clone(), parts, lost, device, phases, _ends: ends }
}

#[tokio::test(start_paused = true)]
async fn a_lost_gpu_drains_the_server_and_ends_it_with_a_failure() {
    let Rig { config, phase, control, parts, lost, device, phases, _ends } = rig();
    let mut signals = Signals::new().unwrap();
    let ending = until_the_end(&config, (&phase, &control), parts, (&mut signals, lost));
    let (ended, ()) = tokio::join!(ending, async { device.lose("cuCtxSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS (700)") });
    let reason = ended.unwrap_err().to_string();
    assert!(reason.contains("ILLEGAL_ADDRESS (700)") && reason.contains("a new process"), "{reason}");
    assert_eq!(phases.await.unwrap(), [Phase::Serving, Phase::Announced, Phase::Closing], "everybody was told first");
    // The loop took the word that nothing more comes, and ended.
    assert!(control.send(Control::Abandon).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_part_that_ends_ends_the_server() {
    let Rig { config, phase, control, mut parts, lost, _ends, .. } = rig();
    parts.managing.abort();
    parts.managing = tokio::spawn(async {});
    let mut signals = Signals::new().unwrap();
    let ended = until_the_end(&config, (&phase, &control), parts, (&mut signals, lost)).await;
    assert!(ended.unwrap_err().to_string().contains("the model manager has ended"));
}
