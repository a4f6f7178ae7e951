//! What memory may be used: parsers that the configuration and whoever changes it while serving share.

use crate::keys::value::bytes;
use crate::units::ByteSize;
use toml::Value;

/// The section `[memory]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    /// The most bytes that weights, buffers and runs together may hold.
    pub limit: MemoryLimit,
    /// Bytes of the device that are left to neighbours.
    pub headroom: ByteSize,
}

/// The most bytes that may be used of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MemoryLimit {
    /// All that it has.
    All,
    /// So many.
    Bytes(ByteSize),
    /// This part of it, above 0 and at most 1.
    Fraction(f64),
}

impl MemoryLimit {
    /// The limit for a device with so many bytes.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub fn of(self, total: ByteSize) -> ByteSize {
        match self {
            Self::All => total,
            Self::Bytes(bytes) => bytes,
            Self::Fraction(part) => ByteSize((total.0 as f64 * part) as u64),
        }
    }

    /// Reads the value of a limit.
    ///
    /// # Errors
    /// What is allowed, if the value is not.
    pub fn read(value: &Value) -> Result<Self, String> {
        let allowed = |also: &str| format!("\"auto\", a part of the device such as \"80%\", or {also}");
        if value.as_str() == Some("auto") {
            return Ok(Self::All);
        }
        if let Some(percent) = value.as_str().and_then(|text| text.strip_suffix('%')) {
            let percent = percent.trim().parse::<f64>().ok().filter(|percent| *percent > 0.0 && *percent <= 100.0);
            return percent.map(|percent| Self::Fraction(percent / 100.0)).ok_or_else(|| allowed("a size"));
        }
        bytes(ByteSize(1 << 20)..=ByteSize(1 << 50))(value).map(Self::Bytes).map_err(|size| allowed(&size))
    }
}

/// Reads the value of a headroom.
///
/// # Errors
/// What is allowed, if the value is not.
pub fn headroom(value: &Value) -> Result<ByteSize, String> {
    bytes(ByteSize::ZERO..=ByteSize(1 << 50))(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_sizes_parts_or_all_of_the_device() {
        let device = ByteSize(1 << 30);
        for (value, limit) in [
            (Value::from("auto"), Some(1 << 30)),
            (Value::from("25%"), Some(1 << 28)),
            (Value::from("12.5 %"), Some(1 << 27)),
            (Value::from("100%"), Some(1 << 30)),
            (Value::from("512MiB"), Some(1 << 29)),
            (Value::from(1 << 20), Some(1 << 20)),
            (Value::from("0%"), None),
            (Value::from("101%"), None),
            (Value::from("%"), None),
            (Value::from("NaN%"), None),
            (Value::from((1 << 20) - 1), None),
            (Value::from("all"), None),
            (Value::from(0.5), None),
        ] {
            assert_eq!(MemoryLimit::read(&value).map(|limit| limit.of(device)).ok(), limit.map(ByteSize), "{value}");
        }
    }
}
