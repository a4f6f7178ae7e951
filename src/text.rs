//! Text: what stands beside a graph that reads tokens. A [`Tokenizer`] makes tokens of texts, [`pooling`] makes one vector of
//! many, [`Folder`] holds what the other files of a model's folder say of both, and a [`Pool`] has them done by threads of
//! its own, so that no text, however long, keeps a thread from serving HTTP.
//!
//! Nothing here knows a graph: [`crate::model::TextModel`] brings the two together.

mod folder;
mod pool;
pub mod pooling;
mod tokenizer;

pub use folder::{Folder, files, folders};
pub use pool::{Broken, Full, Place, Pool};
pub use pooling::Pooling;
pub use tokenizer::{Cut, Fault, Keep, Piece, Tokenizer, Tokens};
