//! How much of each kind an inference may hold, counted before anything is made of it.
//!
//! Two bytes on the wire are an input, an output or a parameter without anything in it, and a hundred bytes in memory: a body
//! within its limit could become gigabytes. So a message is walked through where it lies, which takes no memory at all.

use crate::http::ApiError;
use crate::tensor::{Chunks, MAX_RANK};
use bytes::{Buf, Bytes};
use prost::encoding::{WireType, decode_key, decode_varint};

/// The most inputs of a request, its most requested outputs, and its most raw contents.
const MAX_TENSORS: usize = 4096;
/// The most parameters of a request, with those of its inputs and outputs.
const MAX_PARAMETERS: usize = 4096;

/// Compares a `ModelInferRequest` with the bounds.
///
/// # Errors
/// If something is there too often, or the message breaks off.
pub(super) fn check(message: &Chunks) -> Result<(), ApiError> {
    let mut counts = Counts::default();
    let mut rope = Rope { parts: message.iter().as_slice(), at: 0, left: message.len() };
    fields(&mut rope, |field, _, inner| match field {
        4 => counts.parameter(),
        5 => {
            let index = counts.inputs;
            Counts::tensor(&mut counts.inputs, "inputs")?;
            input(inner, index, &mut counts)
        }
        6 => {
            Counts::tensor(&mut counts.outputs, "outputs")?;
            fields(inner, |field, _, _| if field == 2 { counts.parameter() } else { Ok(()) })
        }
        7 => Counts::tensor(&mut counts.raw, "raw_input_contents"),
        _ => Ok(()),
    })
}

fn input(tensor: &mut impl Buf, index: usize, counts: &mut Counts) -> Result<(), ApiError> {
    let mut rank = 0;
    fields(tensor, |field, wire, inner| match field {
        3 => {
            rank += if wire == WireType::LengthDelimited { numbers(inner) } else { 1 };
            if rank <= MAX_RANK {
                return Ok(());
            }
            Err(ApiError::invalid(format!("inputs[{index}].shape has more than {MAX_RANK} dimensions")))
        }
        4 => counts.parameter(),
        _ => Ok(()),
    })
}

/// How many numbers a packed list has, as far as that matters: each ends with a byte below 128.
fn numbers(list: &mut impl Buf) -> usize {
    let mut count = 0;
    while list.has_remaining() && count <= MAX_RANK {
        count += usize::from(list.get_u8() < 0x80);
    }
    count
}

/// Hands over each field: its number, how it is encoded, and its bytes if there is a length before them.
fn fields<B: Buf>(
    buf: &mut B,
    mut each: impl FnMut(u32, WireType, &mut bytes::buf::Take<&mut B>) -> Result<(), ApiError>,
) -> Result<(), ApiError> {
    while buf.has_remaining() {
        let (field, wire) = decode_key(buf).map_err(|_| malformed())?;
        let len = match wire {
            WireType::Varint => {
                decode_varint(buf).map_err(|_| malformed())?;
                0
            }
            WireType::SixtyFourBit => 8,
            WireType::ThirtyTwoBit => 4,
            WireType::LengthDelimited => {
                decode_varint(buf).ok().and_then(|len| usize::try_from(len).ok()).ok_or_else(malformed)?
            }
            // Nothing that is published has groups, and what is inside of one would not be counted.
            WireType::StartGroup | WireType::EndGroup => return Err(malformed()),
        };
        if len > buf.remaining() {
            return Err(malformed());
        }
        let mut inner = (&mut *buf).take(len);
        each(field, wire, &mut inner)?;
        let unread = inner.remaining();
        inner.advance(unread);
    }
    Ok(())
}

fn malformed() -> ApiError {
    ApiError::invalid("the message is not a ModelInferRequest: it breaks off, or has fields of a kind that none has")
}

#[derive(Default)]
struct Counts {
    inputs: usize,
    outputs: usize,
    raw: usize,
    parameters: usize,
}

impl Counts {
    fn tensor(count: &mut usize, field: &str) -> Result<(), ApiError> {
        *count += 1;
        if *count <= MAX_TENSORS {
            return Ok(());
        }
        Err(ApiError::invalid(format!("{field} has more than {MAX_TENSORS} tensors; send fewer in one request")))
    }

    fn parameter(&mut self) -> Result<(), ApiError> {
        self.parameters += 1;
        if self.parameters <= MAX_PARAMETERS {
            return Ok(());
        }
        let words = "parameters, with those of inputs and outputs; send fewer";
        Err(ApiError::invalid(format!("the request has more than {MAX_PARAMETERS} {words}")))
    }
}

/// Reads a rope of bytes and leaves it as it is.
struct Rope<'a> {
    parts: &'a [Bytes],
    /// How far the first part has been read.
    at: usize,
    left: usize,
}

impl Buf for Rope<'_> {
    fn remaining(&self) -> usize {
        self.left
    }

    fn chunk(&self) -> &[u8] {
        self.parts.first().map_or(&[], |part| &part[self.at..])
    }

    fn advance(&mut self, mut count: usize) {
        assert!(count <= self.left, "{count} bytes of {}", self.left);
        self.left -= count;
        while let Some(part) = self.parts.first()
            && count >= part.len() - self.at
        {
            count -= part.len() - self.at;
            (self.parts, self.at) = (&self.parts[1..], 0);
        }
        self.at += count;
    }
}

#[cfg(test)]
mod tests {
    use super::super::proto::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
    use super::super::proto::{InferParameter, ModelInferRequest};
    use super::*;
    use proptest::prelude::*;
    use prost::Message as _;

    fn whole(message: &[u8]) -> Result<(), ApiError> {
        check(&message.to_vec().into())
    }

    fn refused(message: &[u8], words: &str) {
        let text = whole(message).expect_err(words).to_string();
        assert!(text.contains(words), "{text}");
    }

    #[test]
    fn nothing_is_there_more_often_than_it_may() {
        for (element, most, words) in [
            (&[0x22, 0][..], MAX_PARAMETERS, "parameters"),
            (&[0x2a, 0], MAX_TENSORS, "inputs has more"),
            (&[0x32, 0], MAX_TENSORS, "outputs has more"),
            (&[0x3a, 0], MAX_TENSORS, "raw_input_contents has more"),
            (&[0x2a, 2, 0x22, 0], MAX_TENSORS.min(MAX_PARAMETERS), "more than"),
            (&[0x32, 4, 0x12, 0, 0x12, 0], MAX_PARAMETERS / 2, "parameters"),
        ] {
            assert_eq!(whole(&element.repeat(most)), Ok(()), "{words}");
            refused(&element.repeat(most + 1), words);
        }
    }

    #[test]
    fn a_shape_has_no_more_dimensions_than_a_tensor_may() {
        let packed = |rank: usize| [&[0x2a, rank as u8 + 2, 0x1a, rank as u8][..], &vec![1; rank]].concat();
        let single = |rank: usize| [&[0x2a, 2 * rank as u8][..], &[0x18, 1].repeat(rank)].concat();
        for shape in [packed, single] {
            assert_eq!(whole(&shape(MAX_RANK)), Ok(()));
            refused(&shape(MAX_RANK + 1), "inputs[0].shape");
        }
    }

    #[test]
    fn what_cannot_be_walked_through_is_refused() {
        for message in [&[0x2a][..], &[0x2a, 9, 0], &[0x0b, 0x0c], &[0x2a, 2, 0x23, 0x24], &[0xff; 20], &[0x09, 1]] {
            refused(message, "not a ModelInferRequest");
        }
    }

    proptest! {
        /// Whatever the decoder takes and makes little of passes, in pieces as in one.
        #[test]
        fn honest_messages_pass(
            shapes in prop::collection::vec(prop::collection::vec(any::<i64>(), 0..=MAX_RANK), 0..5),
            keys in prop::collection::btree_set("[a-z]{0,3}", 0..5),
            cut in 1usize..9,
        ) {
            let parameters: std::collections::BTreeMap<_, _> =
                keys.into_iter().map(|key| (key, InferParameter::default())).collect();
            let input = |shape: &Vec<i64>| InferInputTensor {
                name: "x".to_owned(), shape: shape.clone(), parameters: parameters.clone(), ..Default::default()
            };
            let message = ModelInferRequest {
                inputs: shapes.iter().map(input).collect(),
                outputs: vec![InferRequestedOutputTensor { name: "y".to_owned(), parameters: parameters.clone() }],
                raw_input_contents: vec![Bytes::from_static(b"abc"); 3],
                parameters: parameters.clone(),
                ..Default::default()
            };
            let bytes = message.encode_to_vec();
            let mut chunks = Chunks::new();
            bytes.chunks(cut).for_each(|part| chunks.push(Bytes::copy_from_slice(part)));
            prop_assert_eq!(check(&chunks), Ok(()));
        }

        /// Whatever passes is no larger in memory than the bounds allow: nothing is hidden from the walk that the decoder sees.
        #[test]
        fn the_walk_sees_what_the_decoder_sees(bytes in prop::collection::vec(any::<u8>(), 0..64), many in 0usize..3) {
            let flood = [0x2a, 0].repeat(many * (MAX_TENSORS / 2 + 1));
            let message = [&bytes[..], &flood].concat();
            if whole(&message).is_ok() && let Ok(decoded) = ModelInferRequest::decode(&message[..]) {
                prop_assert!(decoded.inputs.len() <= MAX_TENSORS);
            }
        }
    }
}
