//! One copy of a model's weights on a GPU, for all sessions of the model: the large initializers of its file, uploaded once,
//! and handed to each session in place of its own.
//!
//! ONNX's files are protocol buffers. Of the hundred or so kinds of fields seven are needed here, so they are read by hand.
//!
//! `unsafe`: the copies to the device.
#![allow(unsafe_code)]

use super::bound::{DeviceTensor, Place};
use super::{allocator, external, lanes};
use crate::memory::cuda::{Pinned, Stream};
use crate::memory::{Arena, ArenaKind, ArenaOptions, Block, Device};
use crate::tensor::{DataType, Shape};
use ort::memory::MemoryInfo;
use ort::value::DynValue;
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

/// Smaller initializers stay with each session: shapes and constants, some of which ONNX Runtime wants on the host.
const LEAST: usize = 16 << 10;
/// Weights are copied through pinned memory of at most so many bytes at a time.
const CHUNK: usize = 16 << 20;

/// The weights of one model on one device.
pub struct Weights {
    // Before the blocks that they point into.
    values: Vec<(String, Arc<DynValue>)>,
    blocks: Vec<Block>,
}

impl std::fmt::Debug for Weights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Weights({} tensors, {} bytes)", self.values.len(), self.bytes())
    }
}

impl Weights {
    /// Uploads the large weights of a model file.
    ///
    /// # Errors
    /// If the file cannot be read, or if the device has no room.
    pub fn upload(device: &Device, file: &Path, (label, priority): (&str, u32)) -> Result<Self, String> {
        let gpu = device.gpu().ok_or_else(|| "weights are shared on GPUs only".to_owned())?;
        let text = |error: crate::memory::cuda::CudaError| error.to_string();
        let model = fs::read(file).map_err(|error| error.to_string())?;
        let (info, stream) = (allocator::memory_info(Some(gpu))?, Stream::new(gpu).map_err(text)?);
        let options = ArenaOptions {
            label: format!("{label}/shared"),
            kind: ArenaKind::Weights,
            priority,
            address_space: device.address_space(),
        };
        let arena = device.arena(options).map_err(|error| error.to_string())?;
        let mut upload = Upload { pinned: Pinned::new(gpu, CHUNK).map_err(text)?, stream, arena, info };
        let (mut values, mut blocks) = (Vec::new(), Vec::new());
        for initializer in initializers(&model) {
            let (value, block) = upload.one(&initializer, file)?;
            values.push((initializer.name.to_owned(), Arc::new(value)));
            blocks.push(block);
        }
        Ok(Self { values, blocks })
    }

    /// Each tensor by its name in the graph.
    pub(super) fn values(&self) -> impl Iterator<Item = (&str, &Arc<DynValue>)> {
        self.values.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// The bytes of all of them.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.blocks.iter().map(Block::len).sum()
    }
}

struct Upload {
    pinned: Pinned,
    stream: Stream,
    arena: Arena,
    info: MemoryInfo<'static>,
}

impl Upload {
    fn one(&mut self, initializer: &Initializer<'_>, model: &Path) -> Result<(DynValue, Block), String> {
        let bytes = initializer.shape.iter().product::<usize>() * initializer.datatype.size().unwrap_or(1);
        let block = self.arena.block(bytes).map_err(|denied| denied.to_string())?;
        let mut source = initializer.open(model)?;
        for at in (0..bytes).step_by(CHUNK) {
            let len = CHUNK.min(bytes - at);
            let chunk = &mut self.pinned.as_mut_slice()[..len];
            source.read_exact(chunk).map_err(|error| format!("{}: {error}", initializer.name))?;
            // SAFETY: a block that nobody else has seen, and pinned memory that is written again only after the wait.
            let copied = unsafe { self.stream.copy_in_at((&self.pinned, len), (&block, at)) };
            let copied = copied.and_then(|()| self.stream.synchronize());
            copied.map_err(|error| lanes::device_error(&error).to_string())?;
        }
        let place = Place { info: &self.info, address: block.pointer().addr().get(), bytes };
        let tensor = DeviceTensor::over(place, initializer.datatype, &initializer.shape)?;
        Ok((tensor.into_value(), block))
    }
}

/// A large tensor of a model file.
#[derive(Debug, PartialEq)]
struct Initializer<'a> {
    name: &'a str,
    datatype: DataType,
    shape: Shape,
    data: Data<'a>,
}

#[derive(Debug, PartialEq)]
enum Data<'a> {
    Inside(&'a [u8]),
    /// In another file of the same folder, from this offset.
    Beside(&'a str, u64),
}

impl<'a> Initializer<'a> {
    fn open(&self, model: &Path) -> Result<Box<dyn Read + 'a>, String> {
        Ok(match self.data {
            Data::Inside(bytes) => Box::new(bytes),
            Data::Beside(name, offset) => {
                let mut file = external::open(model, name)?;
                file.seek(SeekFrom::Start(offset)).map_err(|error| format!("{name}: {error}"))?;
                Box::new(std::io::BufReader::with_capacity(1 << 20, file))
            }
        })
    }
}

/// The initializers of a model that are worth sharing. What is not understood is left to ONNX Runtime.
fn initializers(model: &[u8]) -> Vec<Initializer<'_>> {
    let graphs = Fields(model).filter_map(|field| field.bytes(7));
    let tensors = graphs.flat_map(|graph| Fields(graph).filter_map(|field| field.bytes(5)));
    tensors.filter_map(initializer).collect()
}

fn initializer(tensor: &[u8]) -> Option<Initializer<'_>> {
    let (mut shape, mut element, mut name, mut raw) = (Shape::new(), 0, "", None);
    let (mut location, mut offset, mut is_external) = (None, 0, false);
    for field in Fields(tensor) {
        match (field.number, field.value) {
            (1, Value::Number(dim)) => shape.push(usize::try_from(dim).ok()?),
            (1, Value::Bytes(mut packed)) => {
                while !packed.is_empty() {
                    shape.push(usize::try_from(varint(&mut packed)?).ok()?);
                }
            }
            (2, Value::Number(number)) => element = number,
            (8, Value::Bytes(bytes)) => name = std::str::from_utf8(bytes).ok()?,
            (9, Value::Bytes(bytes)) => raw = Some(bytes),
            (14, Value::Number(place)) => is_external = place == 1,
            (13, Value::Bytes(entry)) => {
                let text = |number| Fields(entry).find_map(|field| field.bytes(number)).map(std::str::from_utf8);
                match (text(1)?.ok()?, text(2)?.ok()?) {
                    ("location", value) => location = Some(value),
                    ("offset", value) => offset = value.parse().ok()?,
                    _ => {}
                }
            }
            _ => {}
        }
    }
    let datatype = datatype(element)?;
    let bytes = shape.iter().try_fold(datatype.size()?, |product, dim| product.checked_mul(*dim))?;
    let data = match (raw, location.filter(|_| is_external)) {
        (_, Some(location)) => Data::Beside(location, offset),
        (Some(raw), None) if !is_external && raw.len() == bytes => Data::Inside(raw),
        _ => return None,
    };
    (bytes >= LEAST && !name.is_empty()).then_some(Initializer { name, datatype, shape, data })
}

/// ONNX's numbers of the element types that weights have.
fn datatype(number: u64) -> Option<DataType> {
    Some(match number {
        1 => DataType::Fp32,
        2 => DataType::Uint8,
        3 => DataType::Int8,
        10 => DataType::Fp16,
        11 => DataType::Fp64,
        16 => DataType::Bf16,
        _ => return None,
    })
}

/// The fields of a message, as far as they make sense.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

pub(super) struct Field<'a> {
    number: u64,
    value: Value<'a>,
}

enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    Other,
}

impl<'a> Field<'a> {
    pub(super) fn bytes(&self, number: u64) -> Option<&'a [u8]> {
        match self.value {
            Value::Bytes(bytes) if self.number == number => Some(bytes),
            _ => None,
        }
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Field<'a>;

    fn next(&mut self) -> Option<Field<'a>> {
        let key = varint(&mut self.0)?;
        let mut take = |count: usize| {
            let (head, rest) = self.0.split_at_checked(count)?;
            self.0 = rest;
            Some(head)
        };
        let value = match key & 7 {
            0 => Value::Number(varint(&mut self.0)?),
            1 => take(8).map(|_| Value::Other)?,
            2 => {
                let length = usize::try_from(varint(&mut self.0)?).ok()?;
                let (bytes, rest) = self.0.split_at_checked(length)?;
                self.0 = rest;
                Value::Bytes(bytes)
            }
            5 => take(4).map(|_| Value::Other)?,
            _ => return None,
        };
        Some(Field { number: key >> 3, value })
    }
}

/// A number as protocol buffers write it.
pub(super) fn varint(input: &mut impl Read) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let mut byte = [0];
        input.read_exact(&mut byte).ok()?;
        number |= u64::from(byte[0] & 0x7f) << shift;
        if byte[0] < 0x80 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One field: a number, or bytes.
    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        let mut out = vec![number << 3 | 2];
        let mut length = bytes.len();
        while length >= 0x80 {
            out.push(length as u8 | 0x80);
            length >>= 7;
        }
        out.push(length as u8);
        out.extend(bytes);
        out
    }

    fn number(field: u8, value: u8) -> Vec<u8> {
        vec![field << 3, value]
    }

    #[test]
    fn large_initializers_are_found_wherever_their_bytes_are() {
        let large = vec![7u8; 64 * 64 * 4];
        let entry =
            |key: &str, value: &str| field(13, &[field(1, key.as_bytes()), field(2, value.as_bytes())].concat());
        // Dims packed, and one by one; the name of a file in which it is no more does not matter.
        let stale = entry("location", "stale.bin");
        let inside = [field(1, &[64, 64]), number(2, 1), field(8, b"w"), stale, field(9, &large)].concat();
        let beside = [
            number(1, 127),
            number(1, 127),
            number(2, 10),
            field(8, b"b"),
            entry("location", "w.bin"),
            entry("offset", "4096"),
            number(14, 1),
        ];
        let small = [number(1, 2), number(2, 1), field(8, b"s"), field(9, &[0; 8])].concat();
        let strange = [number(1, 64), number(2, 8), field(8, b"t"), field(9, &large)].concat();
        let graph = [field(5, &inside), field(5, &beside.concat()), field(5, &small), field(5, &strange)].concat();
        let model = [number(1, 8), field(7, &graph)].concat();
        let found = initializers(&model);
        let shape = |dims: &[usize]| dims.iter().copied().collect::<Shape>();
        assert_eq!(
            found,
            [
                Initializer {
                    name: "w",
                    datatype: DataType::Fp32,
                    shape: shape(&[64, 64]),
                    data: Data::Inside(&large)
                },
                Initializer {
                    name: "b",
                    datatype: DataType::Fp16,
                    shape: shape(&[127, 127]),
                    data: Data::Beside("w.bin", 4096)
                },
            ]
        );
        // Whatever is cut off is not there, and nothing panics.
        for end in 0..model.len().min(200) {
            assert!(initializers(&model[..end]).is_empty());
        }
    }
}
