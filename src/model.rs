//! What a model is, what a request for it is, and whether the two agree. Pure.

mod name;
pub mod request;
pub mod settings;
pub mod spec;
pub mod table;

pub use name::check_name;
pub use request::{InferRequest, InferResponse, InputTensor, InvalidRequest, OutputTensor, ValidRequest};
pub use settings::Settings;
pub use spec::{Dim, Graph, ModelSpec, TensorSpec};
pub use table::{Lookup, ModelState, Table};
