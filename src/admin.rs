//! What the admin routes do: they show the ledgers of all devices and change their limits while the server runs.

mod report;

use crate::clock::Clock;
use crate::config::{MemoryLimit, headroom};
use crate::http::{Admin, MemoryChange, MemoryOf};
use crate::keys::value::integer;
use crate::memory::Device;
use crate::model::{MemoryUsage, ModelSpec};
use crate::units::DeviceId;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::sync::Notify;

/// What there is to look at and to change. Clones are handles to the same.
#[derive(Clone, Debug)]
pub struct Memory {
    /// The devices, each once.
    pub devices: Vec<Device>,
    /// Tells the ledgers the time.
    pub clock: Clock,
    /// Makes the sampler look at once, so that the scheduler hears of a change.
    pub look: Arc<Notify>,
}

impl Memory {
    /// The admin routes over this memory, for requests that bring the token.
    #[must_use]
    pub fn admin(self, token: String) -> Admin {
        let reader = self.clone();
        Admin { token, read: Box::new(move || reader.report()), change: Box::new(move |change| self.change(change)) }
    }

    /// All numbers of all devices.
    #[must_use]
    pub fn report(&self) -> Value {
        let device = |device: &Device| report::device(device.stats(), device.sample(self.clock.now()));
        json!({"devices": self.devices.iter().map(device).collect::<Vec<_>>()})
    }

    /// What models hold, for the statistics.
    #[must_use]
    pub fn usage(self) -> MemoryOf {
        Box::new(move |model| self.of(model))
    }

    /// What one version of a model holds of each device.
    fn of(&self, model: &ModelSpec) -> Vec<MemoryUsage> {
        let label = format!("{}/{}/", model.name, model.version);
        let usage = |device: &Device| {
            let arenas = device.stats().arenas;
            let own = arenas.iter().filter(|arena| arena.label.starts_with(&label));
            MemoryUsage { kind: "CPU", device: device.id().0, bytes: own.map(|arena| arena.reserved.0).sum() }
        };
        self.devices.iter().map(usage).collect()
    }

    /// Changes what is asked for, all of it or nothing, and answers the report of afterwards. What is idle above a lower
    /// limit has been given back by then; the rest goes as runs end.
    ///
    /// # Errors
    /// Everything that is wrong, each naming the key and what is allowed.
    pub fn change(&self, change: &MemoryChange) -> Result<Value, String> {
        let id = read("device", change.device.as_ref(), |value| self.device(value));
        let limit = read("limit", change.limit.as_ref(), MemoryLimit::read);
        let headroom = read("headroom", change.headroom.as_ref(), headroom);
        let (device, limit, headroom) = match (id, limit, headroom) {
            (Ok(device), Ok(limit), Ok(headroom)) => (device, limit, headroom),
            (device, limit, headroom) => {
                let faults = [device.err(), limit.err(), headroom.err()];
                return Err(faults.into_iter().flatten().collect::<Vec<_>>().join("; "));
            }
        };
        let device = match device {
            Some(device) => device,
            None => self.device(&toml::Value::from(0)).map_err(|allowed| format!("device: expected {allowed}"))?,
        };
        if let Some(limit) = limit {
            device.set_limit(limit.of(device.stats().total));
        }
        if let Some(headroom) = headroom {
            device.set_headroom(headroom);
        }
        self.look.notify_one();
        let stats = device.stats();
        tracing::info!(
            device = %device.id(),
            limit = %stats.limit,
            headroom = %stats.headroom,
            committed = %stats.committed,
            "the limits of memory were set"
        );
        Ok(self.report())
    }

    fn device(&self, value: &toml::Value) -> Result<&Device, String> {
        let id = integer(0..=u32::MAX)(value).ok().map(DeviceId);
        self.devices.iter().find(|device| Some(device.id()) == id).ok_or_else(|| {
            let ids: Vec<String> = self.devices.iter().map(|device| device.id().to_string()).collect();
            format!("the number of a device: {}", ids.join(", "))
        })
    }
}

/// Reads a key with a parser of the configuration; without the key there is no value.
fn read<T>(
    key: &str,
    value: Option<&Value>,
    parse: impl FnOnce(&toml::Value) -> Result<T, String>,
) -> Result<Option<T>, String> {
    let Some(value) = value else { return Ok(None) };
    // What TOML cannot say (null, integers of more than 63 bits) is nothing that a key allows, as the empty list.
    let toml = toml::Value::try_from(value).unwrap_or_else(|_| toml::Value::Array(Vec::new()));
    parse(&toml).map(Some).map_err(|allowed| format!("{key} = {value}: expected {allowed}"))
}
