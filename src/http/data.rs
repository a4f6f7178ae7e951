//! The `data` array of a JSON tensor, straight into the wire's binary form: no values in between.

use super::error::ApiError;
use super::fast;
use super::reader::{Fault, Reader, integer, must_be};
use crate::tensor::DataType;
use half::{bf16, f16};
use jiter::{Jiter, Peek};

/// How deep `data` may be nested.
pub(super) const MAX_DEPTH: usize = 100;

/// Reads `data`, flat or nested in any way, of exactly `elements` elements. `input` is its position in the request.
pub(super) fn read(
    reader: &mut Reader<'_>,
    datatype: DataType,
    elements: usize,
    input: usize,
) -> Result<Vec<u8>, ApiError> {
    // Both paths of a type: the fast one over bare text, the general one that also finds the words for a fault.
    macro_rules! fixed {
        ($fast:expr, $general:expr, $to_bytes:expr) => {{
            let fast = |text: &[u8]| $fast(text).map(|(value, len)| ($to_bytes(value), len));
            let general = |json: &mut Jiter<'_>, peek| $general(json, peek).map($to_bytes);
            fixed(reader, datatype, elements, input, (fast, general))
        }};
    }
    macro_rules! integers {
        ($type:ty) => {
            fixed!(fast::integer::<$type>, integer::<$type>, <$type>::to_le_bytes)
        };
    }
    match datatype {
        DataType::Bool => fixed!(fast::bool, bool, |value| [u8::from(value)]),
        DataType::Uint8 => integers!(u8),
        DataType::Uint16 => integers!(u16),
        DataType::Uint32 => integers!(u32),
        DataType::Uint64 => integers!(u64),
        DataType::Int8 => integers!(i8),
        DataType::Int16 => integers!(i16),
        DataType::Int32 => integers!(i32),
        DataType::Int64 => integers!(i64),
        DataType::Fp16 => fixed!(fast::float64, number, |value| f16::from_f64(value).to_le_bytes()),
        DataType::Bf16 => fixed!(fast::float64, number, |value| bf16::from_f64(value).to_le_bytes()),
        DataType::Fp32 => {
            let general = |json: &mut Jiter<'_>, peek| number(json, peek).map(|value| value as f32);
            fixed!(fast::float32, general, f32::to_le_bytes)
        }
        DataType::Fp64 => fixed!(fast::float64, number, f64::to_le_bytes),
        DataType::Bytes => strings(reader, elements, input),
    }
}

/// Elements of `N` bytes each, by the fast path or else by the general one.
fn fixed<const N: usize>(
    reader: &mut Reader<'_>,
    datatype: DataType,
    elements: usize,
    input: usize,
    (fast, general): (
        impl Fn(&[u8]) -> Option<([u8; N], usize)>,
        impl Fn(&mut Jiter<'_>, Peek) -> Result<[u8; N], Fault>,
    ),
) -> Result<Vec<u8>, ApiError> {
    if let Some((out, len)) = fast::array(reader.rest(), elements, fast) {
        reader.advance(len);
        return Ok(out);
    }
    let mut out = Vec::new();
    walk(reader, datatype, elements, input, |json, peek| {
        out.extend_from_slice(&general(json, peek)?);
        Ok(())
    })?;
    Ok(out)
}

/// Elements of BYTES: a length, then that many bytes.
fn strings(reader: &mut Reader<'_>, elements: usize, input: usize) -> Result<Vec<u8>, ApiError> {
    let mut out = Vec::with_capacity(elements.saturating_mul(4).min(reader.rest().len()));
    walk(reader, DataType::Bytes, elements, input, |json, peek| {
        if peek != Peek::String {
            return Err(Fault::Value);
        }
        let text = json.known_str().map_err(Fault::Broken)?;
        let len = u32::try_from(text.len()).map_err(|_| Fault::Value)?;
        out.extend_from_slice(&len.to_le_bytes());
        out.extend_from_slice(text.as_bytes());
        Ok(())
    })?;
    Ok(out)
}

/// The text with each bare `Inf` as `Infinity`, which is what the parser knows; `None` if there is none.
#[cold]
pub(super) fn spelt_out(text: &[u8]) -> Option<Vec<u8>> {
    const SHORT: &[u8] = b"Inf";
    const REST: &[u8] = b"inity";
    let mut out = Vec::new();
    let mut copied = 0;
    let (mut quoted, mut escaped) = (false, false);
    for (at, &byte) in text.iter().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'I' if !quoted => {
                let end = at + SHORT.len();
                if text[at..].starts_with(SHORT) && !text[end..].starts_with(REST) {
                    out.extend_from_slice(&text[copied..end]);
                    out.extend_from_slice(REST);
                    copied = end;
                }
            }
            _ => {}
        }
    }
    out.extend_from_slice(&text[copied..]);
    (copied > 0).then_some(out)
}

pub(super) fn bool(json: &mut Jiter<'_>, peek: Peek) -> Result<bool, Fault> {
    match peek {
        Peek::True | Peek::False => json.known_bool(peek).map_err(Fault::Broken),
        _ => Err(Fault::Value),
    }
}

pub(super) fn number(json: &mut Jiter<'_>, peek: Peek) -> Result<f64, Fault> {
    if peek.is_num() { json.known_float(peek).map_err(Fault::Broken) } else { Err(Fault::Value) }
}

/// Why the walk over an array ended early.
enum Stop {
    Element(Fault),
    Deep,
    Many,
    NotArray,
}

/// Calls `element` for every scalar, whatever the nesting.
fn walk(
    reader: &mut Reader<'_>,
    datatype: DataType,
    elements: usize,
    input: usize,
    element: impl FnMut(&mut Jiter<'_>, Peek) -> Result<(), Fault>,
) -> Result<(), ApiError> {
    let mut count = 0;
    let stop = match scan(reader.json(), elements, &mut count, element) {
        Ok(()) if count == elements => return Ok(()),
        Ok(()) => {
            return Err(ApiError::invalid(format!(
                "inputs[{input}].data has {count} elements, but its shape needs {elements}"
            )));
        }
        Err(stop) => stop,
    };
    let at = format_args!("inputs[{input}].data[{count}]").to_string();
    Err(match stop {
        Stop::Element(Fault::Broken(error)) => reader.broken(&error, &at),
        Stop::Element(Fault::Value) => must_be(&at, &format!("{} ({datatype})", values_of(datatype))),
        Stop::Deep => ApiError::invalid(format!("{at} is nested deeper than {MAX_DEPTH} arrays; send a flat array")),
        Stop::Many => {
            ApiError::invalid(format!("inputs[{input}].data has more than the {elements} elements of its shape"))
        }
        Stop::NotArray => must_be(&format_args!("inputs[{input}].data"), "an array"),
    })
}

fn scan(
    json: &mut Jiter<'_>,
    elements: usize,
    count: &mut usize,
    mut element: impl FnMut(&mut Jiter<'_>, Peek) -> Result<(), Fault>,
) -> Result<(), Stop> {
    let broken = |error| Stop::Element(Fault::Broken(error));
    if json.peek().map_err(broken)? != Peek::Array {
        return Err(Stop::NotArray);
    }
    let mut depth = 1;
    let mut next = json.known_array().map_err(broken)?;
    loop {
        match next {
            Some(Peek::Array) => {
                depth += 1;
                if depth > MAX_DEPTH {
                    return Err(Stop::Deep);
                }
                next = json.known_array().map_err(broken)?;
            }
            Some(peek) => {
                if *count == elements {
                    return Err(Stop::Many);
                }
                element(json, peek).map_err(Stop::Element)?;
                *count += 1;
                next = json.array_step().map_err(broken)?;
            }
            None => {
                depth -= 1;
                if depth == 0 {
                    return Ok(());
                }
                next = json.array_step().map_err(broken)?;
            }
        }
    }
}

/// What an element may be, for the error.
pub(super) fn values_of(datatype: DataType) -> &'static str {
    match datatype {
        DataType::Bool => "true or false",
        DataType::Uint8 => "an integer from 0 to 255",
        DataType::Uint16 => "an integer from 0 to 65535",
        DataType::Uint32 => "an integer from 0 to 4294967295",
        DataType::Uint64 => "an integer from 0 to 18446744073709551615",
        DataType::Int8 => "an integer from -128 to 127",
        DataType::Int16 => "an integer from -32768 to 32767",
        DataType::Int32 => "an integer from -2147483648 to 2147483647",
        DataType::Int64 => "an integer from -9223372036854775808 to 9223372036854775807",
        DataType::Fp16 | DataType::Bf16 | DataType::Fp32 | DataType::Fp64 => "a number",
        DataType::Bytes => "a string",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bare_short_infinities_are_spelt_out() {
        let text = |text: &str| spelt_out(text.as_bytes()).map(|out| String::from_utf8(out).unwrap());
        assert_eq!(text("[Inf,-Inf, [Inf] ,Infinity]").unwrap(), "[Infinity,-Infinity, [Infinity] ,Infinity]");
        assert_eq!(text(r#"{"Inf":"\"Inf","x":Inf}"#).unwrap(), r#"{"Inf":"\"Inf","x":Infinity}"#);
        for none in ["", "In", "[Infinity,-Infinity]", r#"["Inf","a\\","Inf"]"#, "[1, I]"] {
            assert_eq!(text(none), None, "{none}");
        }
    }
}
