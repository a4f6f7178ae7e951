//! Protocol buffers, read so that what nobody looks at can be written again as it was.

use bytes::Buf as _;
use prost::encoding::{WireType, decode_key, decode_varint, encode_key, encode_varint};

/// One field of a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field<'a> {
    /// Its number.
    pub(super) number: u32,
    /// What it holds.
    value: Value<'a>,
    /// All of its bytes, key included.
    pub(super) raw: &'a [u8],
}

#[derive(Clone, Copy, Debug)]
enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    Fixed,
}

impl<'a> Field<'a> {
    /// What it holds, if that is a string, bytes or a message.
    pub(super) fn bytes(&self) -> Option<&'a [u8]> {
        if let Value::Bytes(bytes) = self.value { Some(bytes) } else { None }
    }

    /// The text of the field with this number.
    pub(super) fn text(&self, number: u32) -> Option<&'a str> {
        std::str::from_utf8(self.bytes().filter(|_| self.number == number)?).ok()
    }

    /// The integers of the field with this number, which may be packed.
    pub(super) fn integers(&self, number: u32) -> Vec<i64> {
        match self.value {
            _ if self.number != number => Vec::new(),
            Value::Number(value) => vec![value.cast_signed()],
            Value::Bytes(mut packed) => std::iter::from_fn(|| {
                let more = packed.has_remaining();
                more.then(|| decode_varint(&mut packed).ok()).flatten().map(u64::cast_signed)
            })
            .collect(),
            Value::Fixed => Vec::new(),
        }
    }
}

/// All fields of a message in their order; `None` if it is none.
pub(super) fn fields(message: &[u8]) -> Option<Vec<Field<'_>>> {
    let (mut rest, mut found) = (message, Vec::new());
    while !rest.is_empty() {
        let start = rest;
        let (number, kind) = decode_key(&mut rest).ok()?;
        let value = match kind {
            WireType::Varint => Value::Number(decode_varint(&mut rest).ok()?),
            WireType::SixtyFourBit => take(&mut rest, 8).map(|_| Value::Fixed)?,
            WireType::ThirtyTwoBit => take(&mut rest, 4).map(|_| Value::Fixed)?,
            WireType::LengthDelimited => {
                let len = decode_varint(&mut rest).ok()?;
                Value::Bytes(take(&mut rest, len)?)
            }
            WireType::StartGroup | WireType::EndGroup => return None,
        };
        found.push(Field { number, value, raw: &start[..start.len() - rest.len()] });
    }
    Some(found)
}

/// Cuts so many bytes off.
fn take<'a>(rest: &mut &'a [u8], count: u64) -> Option<&'a [u8]> {
    let (head, tail) = rest.split_at_checked(usize::try_from(count).ok()?)?;
    *rest = tail;
    Some(head)
}

/// Writes a string, bytes or a message.
pub(super) fn put_bytes(out: &mut Vec<u8>, number: u32, bytes: &[u8]) {
    encode_key(number, WireType::LengthDelimited, out);
    encode_varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

/// Writes an integer.
pub(super) fn put_number(out: &mut Vec<u8>, number: u32, value: i64) {
    encode_key(number, WireType::Varint, out);
    encode_varint(value.cast_unsigned(), out);
}

/// Writes a number of four bytes.
pub(super) fn put_float(out: &mut Vec<u8>, number: u32, value: f32) {
    encode_key(number, WireType::ThirtyTwoBit, out);
    out.extend_from_slice(&value.to_le_bytes());
}
