//! Tensors that nobody sent: what measuring runs on.

use crate::model::settings::Fill;
use crate::tensor::{DataType, Shape, Tensor, rows};

/// Whether its elements are floats.
pub(super) fn is_float(datatype: DataType) -> bool {
    matches!(datatype, DataType::Fp16 | DataType::Bf16 | DataType::Fp32 | DataType::Fp64)
}

/// A tensor of this shape.
pub(super) fn synthetic(datatype: DataType, shape: Shape, fill: Fill) -> Tensor {
    let count: usize = shape.iter().product();
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut random = move || {
        // A linear congruential step; the upper bits are good enough for weights of a benchmark.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let mut data = Vec::with_capacity(count * datatype.size().unwrap_or(5));
    for _ in 0..count {
        let value = match fill {
            Fill::Zero => 0.0,
            Fill::One => 1.0,
            Fill::Random if is_float(datatype) => random(),
            Fill::Random => random().round(),
        };
        push_element(&mut data, datatype, value);
    }
    Tensor { datatype, shape, data: data.into() }
}

/// Writes a small number as one element. Strings get its decimal digit.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn push_element(out: &mut Vec<u8>, datatype: DataType, value: f32) {
    match datatype {
        DataType::Bool | DataType::Uint8 | DataType::Int8 => out.push(value as u8),
        DataType::Uint16 | DataType::Int16 => out.extend_from_slice(&(value as u16).to_le_bytes()),
        DataType::Uint32 | DataType::Int32 => out.extend_from_slice(&(value as u32).to_le_bytes()),
        DataType::Uint64 | DataType::Int64 => out.extend_from_slice(&(value as u64).to_le_bytes()),
        DataType::Fp16 => out.extend_from_slice(&half::f16::from_f32(value).to_le_bytes()),
        DataType::Bf16 => out.extend_from_slice(&half::bf16::from_f32(value).to_le_bytes()),
        DataType::Fp32 => out.extend_from_slice(&value.to_le_bytes()),
        DataType::Fp64 => out.extend_from_slice(&f64::from(value).to_le_bytes()),
        DataType::Bytes => rows::push_string(out, if value >= 0.5 { b"1" } else { b"0" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn synthetic_tensors_have_the_bytes_of_their_shape() {
        for datatype in DataType::ALL {
            let tensor = synthetic(datatype, smallvec::smallvec![2, 3], Fill::One);
            let expected = datatype.size().map_or(6 * 5, |size| 6 * size);
            assert_eq!(tensor.data.len(), expected, "{datatype}");
        }
    }
}
