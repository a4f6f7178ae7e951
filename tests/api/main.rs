//! The HTTP interface: through the router as a service, and a few times over a real socket.

mod errors;
mod infer;
mod properties;
mod routes;
mod socket;
mod support;
