//! Tensors as they travel: datatype, shape and bytes in the wire's binary form. Pure.
//!
//! The one representation of tensor data is the binary form of the Open Inference Protocol: row-major, little-endian,
//! no padding; a BYTES element is a 4-byte little-endian length followed by that many bytes. It arrives and leaves as
//! [`Chunks`], a rope of reference-counted slices, so that a body is never copied just to be contiguous.

pub mod boxes;
pub mod chunks;
pub mod datatype;
pub mod rows;

pub use chunks::Chunks;
pub use datatype::DataType;

/// The concrete dimensions of a tensor; rank 0 means one element.
pub type Shape = smallvec::SmallVec<[usize; 4]>;

/// The largest rank that a request may name.
pub const MAX_RANK: usize = 32;

/// One tensor: datatype, dimensions, and data in the wire's binary form.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// What one element is.
    pub datatype: DataType,
    /// Dimensions, outermost first.
    pub shape: Shape,
    /// Row-major elements in binary form; `shape` and `datatype` fix its length, except for BYTES.
    pub data: Chunks,
}

/// The number of elements of a shape, or `None` if it does not fit in `usize`.
#[must_use]
pub fn element_count(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim))
}
