//! The devices that models are put on: the host, and the GPUs that the configuration allows and this machine has.

use crate::config::Config;
use crate::memory::cuda::{Cuda, Gpu};
use crate::memory::{Backing, CUDA_ALIGNMENT, Device, DeviceOptions, HOST_ALIGNMENT, Host};
use crate::model::Settings;
use crate::model::settings::Place;
use crate::repository::Candidate;
use crate::repository::changes::{Stamp, stamp};
use crate::runtime::{CudaOptions, Weights, cuda, external};
use crate::units::{ByteSize, DeviceId};
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Each device once.
#[derive(Clone, Debug)]
pub struct Devices {
    host: Device,
    gpus: Vec<(Place, Device)>,
    /// Why there are no GPUs.
    without: Option<String>,
    tensorrt: bool,
    weights: Uploaded,
}

/// The weights that are on a device, by what they were read from.
type Uploaded = Arc<Mutex<HashMap<Key, Weak<Weights>>>>;
/// A device, and a model's files as they are now: one of them that was replaced has other weights.
type Key = (DeviceId, Vec<(Stamp, [i64; 2])>);

/// Copies that keep the times of what they were made of may differ in no more than when the kernel saw them change.
fn key(device: &Device, file: &Path) -> Result<Key, String> {
    let files = std::iter::once(file.to_owned()).chain(external::files(file));
    let stamp = |path: PathBuf| {
        let data = std::fs::metadata(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok((stamp(path, &data), [data.ctime(), data.ctime_nsec()]))
    };
    Ok((device.id(), files.map(stamp).collect::<Result<_, String>>()?))
}

impl Devices {
    /// The host alone.
    #[must_use]
    pub fn host_only(host: Device) -> Self {
        let without = Some("the server uses none".to_owned());
        Self { host, gpus: Vec::new(), without, tensorrt: false, weights: Arc::default() }
    }

    /// The host, and devices that stand for GPUs where there are none: models on them run on the host, in a memory of their own.
    #[must_use]
    pub fn pretended(host: Device, gpus: Vec<(Place, Device)>) -> Self {
        Self { gpus, without: None, ..Self::host_only(host) }
    }

    /// What the configuration allows. ONNX Runtime must be loaded.
    ///
    /// # Errors
    /// If a GPU is demanded and there is none.
    pub fn open(config: &Config) -> Result<Self, String> {
        let mut devices = Self::host_only(host(config));
        let providers = &config.runtime.providers;
        if !providers.allow_gpu() {
            devices.without = Some("runtime.providers does not name it first".to_owned());
            return Ok(devices);
        }
        match gpus(config) {
            Ok(gpus) => {
                (devices.gpus, devices.without, devices.tensorrt) = (gpus, None, providers.tensorrt());
            }
            Err(reason) if providers.demand_gpu() => {
                return Err(format!("runtime.providers demands a GPU, but {reason}"));
            }
            Err(reason) => {
                tracing::info!(reason, "no GPU is used: models run on the CPU");
                devices.without = Some(reason);
            }
        }
        Ok(devices)
    }

    /// All of them, the host first.
    #[must_use]
    pub fn all(&self) -> Vec<Device> {
        std::iter::once(&self.host).chain(self.gpus.iter().map(|(_, device)| device)).cloned().collect()
    }

    /// Where a model runs.
    ///
    /// # Errors
    /// If the device that its settings name is not there.
    pub fn of(&self, settings: &Settings) -> Result<&Device, String> {
        let found = match settings.place {
            Some(Place::Cpu) => Some(&self.host),
            Some(place) => self.gpus.iter().find(|(other, _)| *other == place).map(|(_, device)| device),
            None => Some(self.gpus.first().map_or(&self.host, |(_, device)| device)),
        };
        found.ok_or_else(|| {
            let known: Vec<String> = self.gpus.iter().map(|(place, _)| place.to_string()).collect();
            let reason = self.without.clone().unwrap_or_else(|| format!("runtime.gpus has {}", known.join(", ")));
            let place = settings.place.map_or_else(String::new, |place| place.to_string());
            format!("instances: there is no device {place} ({reason})")
        })
    }

    /// What runs models on GPUs.
    pub(super) fn provider(&self) -> &'static str {
        if self.tensorrt { "tensorrt" } else { "cuda" }
    }

    /// Bytes of a model's weights that lie on a device already and that its next sessions will share.
    #[must_use]
    pub fn shared_weights(&self, device: &Device, file: &Path) -> ByteSize {
        let uploaded = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        let weights = key(device, file).ok().and_then(|key| uploaded.get(&key)?.upgrade());
        ByteSize(weights.map_or(0, |weights| weights.bytes() as u64))
    }

    /// How the sessions of a model use the provider of its device. On a GPU they share its weights, which are uploaded when
    /// the first of them asks, and go with the last.
    ///
    /// # Errors
    /// If the weights do not fit the device.
    pub fn cuda_options(&self, device: &Device, candidate: &Candidate) -> Result<CudaOptions, String> {
        let mut options = CudaOptions { provider: candidate.settings.cuda.clone(), ..CudaOptions::default() };
        if device.gpu().is_none() {
            return Ok(options);
        }
        options.tensorrt = self.tensorrt;
        let key = key(device, &candidate.file)?;
        let mut uploaded = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        let known = uploaded.get(&key).and_then(Weak::upgrade);
        let weights = match known {
            Some(weights) => weights,
            None => {
                let label = format!("{}/{}", candidate.name, candidate.version);
                let priority = candidate.settings.default_priority;
                let weights = Weights::upload(device, &candidate.file, (&label, priority));
                let weights = Arc::new(weights.map_err(|error| format!("its weights cannot be uploaded: {error}"))?);
                tracing::debug!(label, ?weights, "weights are uploaded");
                uploaded.retain(|_, weights| weights.strong_count() > 0);
                uploaded.insert(key, Arc::downgrade(&weights));
                weights
            }
        };
        options.weights = Some(weights);
        Ok(options)
    }
}

/// The memory of this machine, within the configured limit.
fn host(config: &Config) -> Device {
    let backing = Box::new(Host::new());
    let (limit, headroom) = (config.memory.limit.of(backing.total_bytes()), config.memory.headroom);
    tracing::info!(%limit, %headroom, margin = %backing.margin(), total = %backing.total_bytes(), "memory of the host");
    Device::new(backing, DeviceOptions { id: DeviceId(0), limit, headroom, alignment: HOST_ALIGNMENT })
}

/// The configured GPUs, all of them or none.
fn gpus(config: &Config) -> Result<Vec<(Place, Device)>, String> {
    cuda::available()?;
    config.runtime.gpus.iter().map(|ordinal| gpu(config, *ordinal)).collect()
}

fn gpu(config: &Config, ordinal: u32) -> Result<(Place, Device), String> {
    let gpu = Gpu::open(ordinal as usize).map_err(|error| format!("runtime.gpus = {ordinal}: {error}"))?;
    let backing = Box::new(Cuda::new(gpu).map_err(|error| format!("{}: {error}", gpu.name()))?);
    let (limit, headroom) = (config.memory.limit.of(backing.total_bytes()), config.memory.headroom);
    let place = Place::Cuda(ordinal);
    tracing::info!(
        device = %place, number = %place.device(), name = gpu.name(), %limit, %headroom, margin = %backing.margin(),
        total = %backing.total_bytes(), free = %backing.free_bytes(), "memory of a GPU"
    );
    let options = DeviceOptions { id: place.device(), limit, headroom, alignment: CUDA_ALIGNMENT };
    Ok((place, Device::new(backing, options)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Device {
        let (limit, headroom) = (ByteSize::MAX, ByteSize::ZERO);
        Device::new(
            Box::new(Host::new()),
            DeviceOptions { id: DeviceId(0), limit, headroom, alignment: HOST_ALIGNMENT },
        )
    }

    #[test]
    fn a_model_goes_where_its_settings_say_or_to_the_first_gpu() {
        let other = |id| {
            let (limit, headroom) = (ByteSize::MAX, ByteSize::ZERO);
            let options = DeviceOptions { id: DeviceId(id), limit, headroom, alignment: CUDA_ALIGNMENT };
            (Place::Cuda(id - 1), Device::new(Box::new(Host::new()), options))
        };
        let two = Devices::pretended(host(), vec![other(1), other(3)]);
        let at = |devices: &Devices, place| {
            devices.of(&Settings { place, ..Settings::default() }).map(|device| device.id().0)
        };
        assert_eq!(at(&two, None), Ok(1));
        assert_eq!(at(&two, Some(Place::Cuda(2))), Ok(3));
        assert_eq!(at(&two, Some(Place::Cpu)), Ok(0));
        assert!(
            at(&two, Some(Place::Cuda(1)))
                .is_err_and(|text| text.contains("cuda:1") && text.contains("cuda:0, cuda:2"))
        );
        assert_eq!(at(&Devices::host_only(host()), None), Ok(0));
        assert!(at(&Devices::host_only(host()), Some(Place::Cuda(0))).is_err());
        assert_eq!(two.all().iter().map(|device| device.id().0).collect::<Vec<_>>(), [0, 1, 3]);
    }

    #[test]
    fn weights_are_shared_until_one_of_the_models_files_is_another_one() {
        let (folder, device) = (tempfile::tempdir().unwrap(), host());
        let at = |name: &str| folder.path().join(name);
        let model = external::naming(&["model.onnx.data", "more/w.bin"]);
        std::fs::create_dir(at("more")).unwrap();
        std::fs::write(at("model.onnx"), &model).unwrap();
        for name in ["model.onnx.data", "more/w.bin"] {
            std::fs::write(at(name), [1; 64]).unwrap();
        }
        let now = || key(&device, &at("model.onnx")).unwrap();
        let mut seen = now();
        assert_eq!(now(), seen);
        std::fs::write(at("tokenizer.json"), "{}").unwrap();
        assert_eq!(now(), seen, "it is no file of weights");
        // As long as before and as old as before, in the old one's place.
        let replace = |name: &str, bytes: &[u8]| {
            let modified = std::fs::metadata(at(name)).unwrap().modified().unwrap();
            std::fs::write(at("new"), bytes).unwrap();
            std::fs::File::options().write(true).open(at("new")).unwrap().set_modified(modified).unwrap();
            std::fs::rename(at("new"), at(name)).unwrap();
        };
        for (name, bytes) in [("model.onnx.data", &[2; 64][..]), ("more/w.bin", &[2; 64]), ("model.onnx", &model)] {
            replace(name, bytes);
            assert_ne!(now(), seen, "{name}");
            seen = now();
        }
        std::fs::remove_file(at("more/w.bin")).unwrap();
        let fault = key(&device, &at("model.onnx")).unwrap_err();
        assert!(fault.contains("more/w.bin"), "{fault}");
    }
}
