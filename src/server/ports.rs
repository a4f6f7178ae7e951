//! The two ports: bound at once, served together.

use super::drain::FLUSH;
use super::secrets::Secrets;
use crate::config::Config;
use crate::http::serve::{ServeLimits, serve};
use crate::http::{Phase, Tls};
use anyhow::Context as _;
use axum::Router;
use std::future::Future;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// File descriptors that are kept for anything but connections.
const RESERVED_DESCRIPTORS: usize = 256;

/// Where HTTP is spoken, and gRPC if it is.
pub(super) struct Ports {
    http: TcpListener,
    grpc: Option<TcpListener>,
}

/// What answers on the ports.
pub(super) struct Apps {
    pub(super) http: Router,
    pub(super) grpc: Router,
}

impl Ports {
    /// Listens, so that whoever connects from now on is served as soon as there is somebody to serve.
    pub(super) async fn bind(config: &Config, secrets: &Secrets) -> anyhow::Result<Self> {
        let http = TcpListener::bind(&config.address)
            .await
            .with_context(|| format!("cannot listen on {} (key server.address, flag --address)", config.address))?;
        let mut grpc = None;
        if let Some(address) = &config.grpc.address {
            let bound = TcpListener::bind(address).await.with_context(|| {
                format!("cannot listen on {address} for gRPC (key grpc.address, flag --grpc-address; \"off\": no gRPC)")
            });
            grpc = Some(bound?);
        }
        let shown = match &grpc {
            Some(listener) => listener.local_addr()?.to_string(),
            None => "off".to_owned(),
        };
        let word = |on| if on { "on" } else { "off" };
        tracing::info!(
            address = %http.local_addr()?,
            grpc = shown,
            admin_routes = word(secrets.admin_token.is_some()),
            tls = word(secrets.tls.is_some()),
            keys = word(secrets.keys.is_some()),
            "listening"
        );
        Ok(Self { http, grpc })
    }

    /// Serves on both until told to close, and ends when both have.
    pub(super) fn serve(
        self,
        apps: Apps,
        config: &Config,
        tls: Option<Tls>,
        phases: watch::Receiver<Phase>,
    ) -> impl Future<Output = ()> + Send + use<> {
        let limits = serve_limits(config, descriptors());
        async move {
            let http = serve(self.http, apps.http, limits.clone(), tls.clone(), phases.clone());
            let grpc = async {
                if let Some(listener) = self.grpc {
                    serve(listener, apps.grpc, limits, tls, phases).await;
                }
            };
            tokio::join!(http, grpc);
        }
    }
}

/// As many files and connections as the process may open at all.
fn descriptors() -> usize {
    let limit = rlimit::increase_nofile_limit(u64::MAX).unwrap_or(1024);
    usize::try_from(limit).unwrap_or(usize::MAX)
}

/// The connections that each of so many ports may have, after what models, libraries and logs hold.
fn share(descriptors: usize, ports: usize) -> usize {
    (descriptors.saturating_sub(RESERVED_DESCRIPTORS) / ports).max(1)
}

fn serve_limits(config: &Config, descriptors: usize) -> ServeLimits {
    let most = share(descriptors, 1 + usize::from(config.grpc.address.is_some()));
    let connections = config.http.max_connections.get().min(most);
    if connections < config.http.max_connections.get() {
        tracing::warn!(
            connections,
            descriptors,
            "the system lets the process open fewer files than http.max_connections needs (ulimit -n)"
        );
    }
    ServeLimits {
        connections,
        crowded_idle_timeout: config.http.crowded_idle_timeout,
        streams_per_connection: config.http.max_streams_per_connection.get(),
        header_read_timeout: config.http.header_read_timeout,
        write_timeout: config.http.write_timeout,
        header_bytes: usize::try_from(config.http.max_header_bytes.0).unwrap_or(usize::MAX),
        // The last word on the grace period is the drain's; this is the backstop behind it.
        grace: config.drain.grace + 2 * FLUSH,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_share_the_descriptors_that_are_left() {
        for (descriptors, ports, connections) in [(20_256, 1, 20_000), (20_256, 2, 10_000), (256, 1, 1), (0, 2, 1)] {
            assert_eq!(share(descriptors, ports), connections, "{descriptors} for {ports}");
        }
    }
}
