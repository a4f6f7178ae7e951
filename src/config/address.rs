//! Where the server listens.

use crate::keys::Keys;
use crate::keys::value::count;
use std::num::NonZeroUsize;
use toml::Value;

/// The section `[grpc]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grpc {
    /// HOST:PORT to listen on; `None`: no gRPC.
    pub address: Option<String>,
    /// Requests of one stream that run at a time.
    pub max_stream_requests: NonZeroUsize,
}

/// Reads the section; `http` is where HTTP is spoken.
pub(super) fn grpc(keys: &mut Keys, http: Option<&str>) -> Option<Grpc> {
    let address = keys.read("grpc.address", grpc_address(http));
    let max_stream_requests = keys.read("grpc.max_stream_requests", count(65536usize));
    Some(Grpc { address: address?, max_stream_requests: max_stream_requests? })
}

pub(super) fn address(value: &Value) -> Result<String, String> {
    let host_and_port = value.as_str().and_then(|text| text.rsplit_once(':')).filter(|(host, port)| {
        let bare_ipv6 = host.contains(':') && !(host.starts_with('[') && host.ends_with(']'));
        !host.is_empty() && !bare_ipv6 && port.parse::<u16>().is_ok()
    });
    let allowed = || "HOST:PORT, such as \"127.0.0.1:8000\", \"0.0.0.0:8000\" or \"[::]:8000\"".to_owned();
    host_and_port.map(|(host, port)| format!("{host}:{port}")).ok_or_else(allowed)
}

/// Where gRPC is spoken if HTTP is at `http`.
fn grpc_address(http: Option<&str>) -> impl Fn(&Value) -> Result<Option<String>, String> {
    move |value| match value.as_str() {
        Some("off") => Ok(None),
        Some("auto") => match http.map(next_port) {
            Some(None) => Err("\"off\" or HOST:PORT, since no port comes after that of server.address".to_owned()),
            next => Ok(next.flatten()),
        },
        _ => address(value).map(Some).map_err(|allowed| format!("\"auto\", \"off\" or {allowed}")),
    }
}

/// The same host with the port after this one; any free port stays any free port.
fn next_port(address: &str) -> Option<String> {
    let (host, port) = address.rsplit_once(':')?;
    let port: u16 = port.parse().ok()?;
    Some(format!("{host}:{}", if port == 0 { 0 } else { port.checked_add(1)? }))
}
