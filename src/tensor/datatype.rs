//! The element types of the Open Inference Protocol.

use std::fmt;

/// What one element of a tensor is, under the protocol's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DataType {
    /// One byte, zero or one.
    Bool,
    /// Unsigned 8-bit integer.
    Uint8,
    /// Unsigned 16-bit integer.
    Uint16,
    /// Unsigned 32-bit integer.
    Uint32,
    /// Unsigned 64-bit integer.
    Uint64,
    /// Signed 8-bit integer.
    Int8,
    /// Signed 16-bit integer.
    Int16,
    /// Signed 32-bit integer.
    Int32,
    /// Signed 64-bit integer.
    Int64,
    /// IEEE 754 binary16.
    Fp16,
    /// bfloat16.
    Bf16,
    /// IEEE 754 binary32.
    Fp32,
    /// IEEE 754 binary64.
    Fp64,
    /// Byte strings of any length.
    Bytes,
}

impl DataType {
    /// Every datatype, in the protocol's order.
    pub const ALL: [Self; 14] = [
        Self::Bool,
        Self::Uint8,
        Self::Uint16,
        Self::Uint32,
        Self::Uint64,
        Self::Int8,
        Self::Int16,
        Self::Int32,
        Self::Int64,
        Self::Fp16,
        Self::Bf16,
        Self::Fp32,
        Self::Fp64,
        Self::Bytes,
    ];

    /// The name on the wire, such as `FP32`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::Uint8 => "UINT8",
            Self::Uint16 => "UINT16",
            Self::Uint32 => "UINT32",
            Self::Uint64 => "UINT64",
            Self::Int8 => "INT8",
            Self::Int16 => "INT16",
            Self::Int32 => "INT32",
            Self::Int64 => "INT64",
            Self::Fp16 => "FP16",
            Self::Bf16 => "BF16",
            Self::Fp32 => "FP32",
            Self::Fp64 => "FP64",
            Self::Bytes => "BYTES",
        }
    }

    /// The name in a Triton model configuration, such as `TYPE_FP32`.
    #[must_use]
    pub fn config_name(self) -> String {
        match self {
            Self::Bytes => "TYPE_STRING".to_owned(),
            other => format!("TYPE_{}", other.name()),
        }
    }

    /// The datatype with this wire name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|datatype| datatype.name() == name)
    }

    /// Bytes per element; `None` for [`DataType::Bytes`], whose elements differ in length.
    #[must_use]
    pub fn size(self) -> Option<usize> {
        match self {
            Self::Bool | Self::Uint8 | Self::Int8 => Some(1),
            Self::Uint16 | Self::Int16 | Self::Fp16 | Self::Bf16 => Some(2),
            Self::Uint32 | Self::Int32 | Self::Fp32 => Some(4),
            Self::Uint64 | Self::Int64 | Self::Fp64 => Some(8),
            Self::Bytes => None,
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for datatype in DataType::ALL {
            assert_eq!(DataType::from_name(datatype.name()), Some(datatype));
        }
        assert_eq!(DataType::from_name("fp32"), None);
        assert_eq!(DataType::from_name("STRING"), None);
    }

    #[test]
    fn strings_have_no_size_and_their_own_config_name() {
        assert_eq!(DataType::Bytes.size(), None);
        assert_eq!(DataType::Bytes.config_name(), "TYPE_STRING");
        assert_eq!(DataType::Bf16.config_name(), "TYPE_BF16");
    }
}
