//! ONNX Runtime's element types and ours, and values of one as bytes of the other.

use super::{RunError, strings};
use crate::tensor::{DataType, Shape, rows};
use bytes::Bytes;
use half::{bf16, f16};
use ort::session::SessionInputValue;
use ort::value::{DynValue, TensorElementType, TensorRef, ValueType};

/// Runs `$body` with `$T` as the Rust type of `$datatype`; BYTES and BOOL have no plain type and go to their own arms.
macro_rules! with_plain_type {
    ($datatype:expr, $T:ident => $body:expr, bool => $bool:expr, bytes => $bytes:expr) => {
        match $datatype {
            DataType::Bool => $bool,
            DataType::Bytes => $bytes,
            DataType::Uint8 => {
                type $T = u8;
                $body
            }
            DataType::Uint16 => {
                type $T = u16;
                $body
            }
            DataType::Uint32 => {
                type $T = u32;
                $body
            }
            DataType::Uint64 => {
                type $T = u64;
                $body
            }
            DataType::Int8 => {
                type $T = i8;
                $body
            }
            DataType::Int16 => {
                type $T = i16;
                $body
            }
            DataType::Int32 => {
                type $T = i32;
                $body
            }
            DataType::Int64 => {
                type $T = i64;
                $body
            }
            DataType::Fp16 => {
                type $T = f16;
                $body
            }
            DataType::Bf16 => {
                type $T = bf16;
                $body
            }
            DataType::Fp32 => {
                type $T = f32;
                $body
            }
            DataType::Fp64 => {
                type $T = f64;
                $body
            }
        }
    };
}

/// Our name for ONNX Runtime's element type; `None` for those that the protocol has no name for.
#[must_use]
pub fn datatype(element: TensorElementType) -> Option<DataType> {
    Some(match element {
        TensorElementType::Bool => DataType::Bool,
        TensorElementType::Uint8 => DataType::Uint8,
        TensorElementType::Uint16 => DataType::Uint16,
        TensorElementType::Uint32 => DataType::Uint32,
        TensorElementType::Uint64 => DataType::Uint64,
        TensorElementType::Int8 => DataType::Int8,
        TensorElementType::Int16 => DataType::Int16,
        TensorElementType::Int32 => DataType::Int32,
        TensorElementType::Int64 => DataType::Int64,
        TensorElementType::Float16 => DataType::Fp16,
        TensorElementType::Bfloat16 => DataType::Bf16,
        TensorElementType::Float32 => DataType::Fp32,
        TensorElementType::Float64 => DataType::Fp64,
        TensorElementType::String => DataType::Bytes,
        _ => return None,
    })
}

/// A value for ONNX Runtime over `data`, which must be aligned for the datatype and as long as the shape says; strings are
/// copied, everything else is borrowed.
///
/// # Errors
/// If the bytes do not make such a tensor.
pub fn input_value<'a>(datatype: DataType, shape: &'a Shape, data: &'a [u8]) -> Result<SessionInputValue<'a>, String> {
    let text = |error: ort::Error| error.message().to_owned();
    with_plain_type!(datatype, T => {
        let elements: &[T] = bytemuck::try_cast_slice(data).map_err(|error| error.to_string())?;
        Ok(TensorRef::from_array_view((shape.as_slice(), elements)).map_err(text)?.into())
    }, bool => {
        let elements: &[bool] = bytemuck::checked::try_cast_slice(data).map_err(|error| error.to_string())?;
        Ok(TensorRef::from_array_view((shape.as_slice(), elements)).map_err(text)?.into())
    }, bytes => {
        let elements = rows::string_elements(&Bytes::copy_from_slice(data)).ok_or("a string runs past its tensor")?;
        Ok(strings::create(shape, &elements)?.into())
    })
}

/// The shape of an output, and its bytes.
pub enum OutputBytes<'a> {
    /// Elements of fixed size, as they lie in memory.
    Plain(&'a [u8]),
    /// Strings.
    Strings(Vec<Bytes>),
}

impl OutputBytes<'_> {
    /// Bytes of the elements in the wire's binary form.
    #[must_use]
    pub fn size(&self) -> usize {
        match self {
            Self::Plain(bytes) => bytes.len(),
            Self::Strings(strings) => strings.iter().map(|string| rows::string_size(string)).sum(),
        }
    }
}

/// Looks into an output value.
///
/// # Errors
/// If it is not a tensor of this datatype, or if there is no memory to look into it.
pub fn output_bytes(value: &DynValue, wanted: DataType) -> Result<(Shape, OutputBytes<'_>), RunError> {
    let text = |error: ort::Error| RunError::Model(error.message().to_owned());
    let ValueType::Tensor { ty, shape, .. } = value.dtype() else {
        return Err(RunError::Model("the output is not a tensor".to_owned()));
    };
    if datatype(*ty) != Some(wanted) {
        return Err(RunError::Model(format!("the output has element type {ty:?}, expected {wanted}")));
    }
    let shape: Shape = shape.iter().map(|&dim| usize::try_from(dim).unwrap_or(0)).collect();
    let bytes = with_plain_type!(wanted, T => {
        OutputBytes::Plain(bytemuck::cast_slice(value.try_extract_tensor::<T>().map_err(text)?.1))
    }, bool => {
        OutputBytes::Plain(bytemuck::cast_slice(value.try_extract_tensor::<bool>().map_err(text)?.1))
    }, bytes => {
        OutputBytes::Strings(strings::extract(value, shape.iter().product())?)
    });
    Ok((shape, bytes))
}
