//! The HTTP interface: through the router as a service, and a few times over a real socket.

// A test may fail where it stands, and tables of cases are types of their own.
#![allow(clippy::unwrap_used, clippy::type_complexity)]

mod access;
mod admin;
mod coding;
mod errors;
mod extensions;
mod infer;
mod openapi;
mod page;
mod predict;
mod properties;
mod routes;
mod socket;
mod support;
mod tei;
mod text;
mod traces;
