//! Typed tensor contents, kept as they came until datatype and shape are known.
//!
//! A list of `int64` may have eight bytes in memory for each byte on the wire. Decoded by the rules of its message, a request
//! would take up that memory before anybody has compared it with its model; so its elements are read once, straight into the
//! tensor, and no further than its shape goes.

use crate::http::ApiError;
use crate::tensor::{Chunks, DataType};
use bytes::{Buf, BufMut, Bytes};
use prost::DecodeError;
use prost::encoding::{
    DecodeContext, WireType, decode_varint, encode_key, encode_varint, encoded_len_varint, key_len, skip_field,
};

/// `InferTensorContents`: elements of one kind, as they are on the wire.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Contents {
    /// The number of the field that they are in; 0: there are none.
    field: u32,
    /// Whether elements came in another field as well.
    mixed: bool,
    /// The first part of the list, as it lies in the message.
    first: Bytes,
    /// What came after it; all of it for `bytes_contents`, in the binary form of tensors.
    more: Vec<u8>,
    /// The number of `bytes_contents`.
    strings: usize,
}

/// The fields by number, with how an element of each is encoded.
const FIELDS: [(&str, WireType); 8] = [
    ("bool_contents", WireType::Varint),
    ("int_contents", WireType::Varint),
    ("int64_contents", WireType::Varint),
    ("uint_contents", WireType::Varint),
    ("uint64_contents", WireType::Varint),
    ("fp32_contents", WireType::ThirtyTwoBit),
    ("fp64_contents", WireType::SixtyFourBit),
    ("bytes_contents", WireType::LengthDelimited),
];

/// The number of `bytes_contents`.
const STRINGS: u32 = 8;

impl Contents {
    /// How many bytes [`Contents::into_data`] makes anew at the most, for a tensor of so many elements.
    pub(super) fn bytes_in_memory(&self, datatype: DataType, elements: usize) -> u64 {
        let wire = self.first.len() + self.more.len();
        match datatype.size() {
            Some(size) if ![DataType::Fp32, DataType::Fp64].contains(&datatype) => (elements.min(wire) * size) as u64,
            // These are in memory as they are on the wire, but for the lengths of strings.
            _ => self.more.len() as u64,
        }
    }

    /// The elements as a tensor's data. `field` is the name of the whole, for complaints.
    pub(super) fn into_data(self, datatype: DataType, elements: usize, field: &str) -> Result<Chunks, ApiError> {
        let expected = match datatype {
            DataType::Bool => 1,
            DataType::Int8 | DataType::Int16 | DataType::Int32 => 2,
            DataType::Int64 => 3,
            DataType::Uint8 | DataType::Uint16 | DataType::Uint32 => 4,
            DataType::Uint64 => 5,
            DataType::Fp32 => 6,
            DataType::Fp64 => 7,
            DataType::Bytes => STRINGS,
            DataType::Fp16 | DataType::Bf16 => {
                return Err(ApiError::invalid(format!(
                    "{field}: {datatype} has no typed form; use raw_input_contents"
                )));
            }
        };
        let name = FIELDS[expected as usize - 1].0;
        if self.mixed || ![0, expected].contains(&self.field) {
            return Err(ApiError::invalid(format!("{field}: a tensor of {datatype} has {name} and nothing else")));
        }
        let at = Place { field, name, elements };
        match datatype {
            DataType::Bytes => {
                at.count(self.strings)?;
                Ok(self.more.into())
            }
            DataType::Bool => self.varints(&at, |value| Some([u8::from(value != 0)])),
            DataType::Int8 => self.varints(&at, |value| Some(i8::try_from(value as i32).ok()?.to_le_bytes())),
            DataType::Int16 => self.varints(&at, |value| Some(i16::try_from(value as i32).ok()?.to_le_bytes())),
            DataType::Int32 => self.varints(&at, |value| Some((value as i32).to_le_bytes())),
            DataType::Uint8 => self.varints(&at, |value| Some(u8::try_from(value as u32).ok()?.to_le_bytes())),
            DataType::Uint16 => self.varints(&at, |value| Some(u16::try_from(value as u32).ok()?.to_le_bytes())),
            DataType::Uint32 => self.varints(&at, |value| Some((value as u32).to_le_bytes())),
            DataType::Int64 | DataType::Uint64 => self.varints(&at, |value| Some(value.to_le_bytes())),
            DataType::Fp32 => self.fixed(&at, 4),
            DataType::Fp64 => self.fixed(&at, 8),
            DataType::Fp16 | DataType::Bf16 => Err(ApiError::Internal),
        }
    }

    /// Elements that are encoded as they are in memory.
    fn fixed(self, at: &Place<'_>, size: usize) -> Result<Chunks, ApiError> {
        let bytes = self.first.len() + self.more.len();
        at.count(bytes / size)?;
        let mut data = Chunks::from(self.first);
        data.push(self.more.into());
        Ok(data)
    }

    /// Elements of `N` bytes from numbers of any length.
    fn varints<const N: usize>(
        self,
        at: &Place<'_>,
        element: impl Fn(u64) -> Option<[u8; N]>,
    ) -> Result<Chunks, ApiError> {
        let len = self.first.len() + self.more.len();
        let mut out = Vec::with_capacity(at.elements.min(len) * N);
        let mut rest = self.first.chain(&self.more[..]);
        let mut count = 0;
        while rest.has_remaining() {
            if count == at.elements {
                return Err(at.too_many());
            }
            let value = decode_varint(&mut rest)
                .map_err(|_| ApiError::invalid(format!("{}.{}[{count}] is malformed", at.field, at.name)))?;
            let bytes = element(value).ok_or_else(|| {
                ApiError::invalid(format!(
                    "{}.{}[{count}] is out of the range of the tensor's datatype",
                    at.field, at.name
                ))
            })?;
            out.extend_from_slice(&bytes);
            count += 1;
        }
        at.count(count)?;
        Ok(out.into())
    }

    fn add(&mut self, wire: WireType, field: u32, buf: &mut impl Buf) -> Result<(), DecodeError> {
        let (_, element) = FIELDS[field as usize - 1];
        if field == STRINGS {
            let string = take(buf)?;
            self.strings += 1;
            // No message is as long as a `u32` can say.
            self.more.put_u32_le(u32::try_from(string.len()).unwrap_or(u32::MAX));
            self.more.put(string);
        } else if wire == WireType::LengthDelimited {
            let list = take(buf)?;
            if element == WireType::ThirtyTwoBit && list.len() % 4 != 0
                || element == WireType::SixtyFourBit && list.len() % 8 != 0
            {
                return Err(broken());
            }
            if self.first.is_empty() && self.more.is_empty() {
                self.first = list;
            } else {
                self.more.put(list);
            }
        } else if wire != element {
            return Err(broken());
        } else {
            // One by one, as writers may.
            match element {
                WireType::ThirtyTwoBit => self.more.put(whole(buf, 4)?),
                WireType::SixtyFourBit => self.more.put(whole(buf, 8)?),
                _ => encode_varint(decode_varint(buf)?, &mut self.more),
            }
        }
        Ok(())
    }
}

fn take(buf: &mut impl Buf) -> Result<Bytes, DecodeError> {
    let len = usize::try_from(decode_varint(buf)?).map_err(|_| broken())?;
    whole(buf, len)
}

fn whole(buf: &mut impl Buf, len: usize) -> Result<Bytes, DecodeError> {
    if buf.remaining() < len { Err(broken()) } else { Ok(buf.copy_to_bytes(len)) }
}

/// What prost itself says where bytes are missing.
fn broken() -> DecodeError {
    decode_varint(&mut &[][..]).err().unwrap_or_else(|| unreachable!("there is no number in no bytes"))
}

/// Where elements stand, and how many there must be.
struct Place<'a> {
    field: &'a str,
    name: &'a str,
    elements: usize,
}

impl Place<'_> {
    fn count(&self, count: usize) -> Result<(), ApiError> {
        if count == self.elements {
            return Ok(());
        }
        Err(ApiError::invalid(format!(
            "{}.{} has {count} elements, but the tensor's shape needs {}",
            self.field, self.name, self.elements
        )))
    }

    fn too_many(&self) -> ApiError {
        ApiError::invalid(format!(
            "{}.{} has more than the {} elements of the tensor's shape",
            self.field, self.name, self.elements
        ))
    }
}

impl prost::Message for Contents {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        if self.field == STRINGS {
            let mut rest = &self.more[..];
            while rest.has_remaining() {
                let len = rest.get_u32_le() as usize;
                encode_key(STRINGS, WireType::LengthDelimited, buf);
                encode_varint(len as u64, buf);
                buf.put_slice(&rest[..len]);
                rest.advance(len);
            }
        } else if self.field > 0 {
            encode_key(self.field, WireType::LengthDelimited, buf);
            encode_varint((self.first.len() + self.more.len()) as u64, buf);
            buf.put_slice(&self.first);
            buf.put_slice(&self.more);
        }
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        ctx: DecodeContext,
    ) -> Result<(), DecodeError> {
        if !(1..=STRINGS).contains(&tag) {
            return skip_field(wire_type, tag, buf, ctx);
        }
        self.mixed |= ![0, tag].contains(&self.field);
        if self.mixed {
            // It is refused once its name is known; until then nothing of it is kept.
            return skip_field(wire_type, tag, buf, ctx);
        }
        self.field = tag;
        self.add(wire_type, tag, buf)
    }

    fn encoded_len(&self) -> usize {
        if self.field == STRINGS {
            let mut rest = &self.more[..];
            let mut len = 0;
            while rest.has_remaining() {
                let string = rest.get_u32_le() as usize;
                len += key_len(STRINGS) + encoded_len_varint(string as u64) + string;
                rest.advance(string);
            }
            len
        } else if self.field > 0 {
            let list = self.first.len() + self.more.len();
            key_len(self.field) + encoded_len_varint(list as u64) + list
        } else {
            0
        }
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests;
