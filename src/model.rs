//! What a model is, what a request for it is, and whether the two agree. Pure.

pub mod classify;
pub mod config;
pub mod derive;
mod name;
pub mod pad;
pub mod request;
pub mod settings;
pub mod spec;
pub mod table;
pub mod text;

pub use derive::{Derived, derive};
pub use name::check_name;
pub use pad::PadPlan;
pub use request::{InferRequest, InferResponse, InputTensor, InvalidRequest, OutputTensor, ValidRequest};
pub use settings::{Labels, Settings};
pub use spec::{Dim, Graph, ModelSpec, Side, TensorSpec, Unsupported};
pub use table::{IndexEntry, Lookup, MemoryUsage, ModelState, Table};
pub use text::{Scores, TextModel, Vectors};
