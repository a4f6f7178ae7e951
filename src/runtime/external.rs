//! The files of weights that lie beside an ONNX file: which ones it names, and opening them.
//!
//! Tensors that are too many for one file lie in others, each named by an entry `location`, relative to the folder of the ONNX
//! file. This is the one place that says which files belong to a model. What the ONNX file itself holds is skipped, so that a
//! large one costs little more than a small one.

use super::weights::{Fields, varint};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Component, Path, PathBuf};

/// Graphs within graphs deeper than this are not looked into.
const MOST_DEPTH: usize = 64;
/// The most bytes of an entry; a name of a file is shorter.
const MOST_ENTRY: u64 = 8192;

/// The files of weights that an ONNX file names, as it names them, each once. Of a broken file, those that come before the fault.
///
/// # Errors
/// If the file cannot be opened.
pub fn names(model: &Path) -> io::Result<BTreeSet<String>> {
    let file = File::open(model)?;
    let end = file.metadata()?.len();
    let mut reader = Reader { input: BufReader::new(file), at: 0, names: BTreeSet::new() };
    let _broken = reader.message(Message::Model, end, 0);
    Ok(reader.names)
}

/// Where these files lie, as far as they may be opened; none of a file that cannot be read, which loading it will say.
#[must_use]
pub fn files(model: &Path) -> Vec<PathBuf> {
    let names = names(model).unwrap_or_default();
    names.iter().filter_map(|name| place(model, name).ok()).collect()
}

/// Opens one of them.
///
/// # Errors
/// If it lies outside of the model's folder, is not there, or is no regular file, with what to do. Clients may read it.
pub fn open(model: &Path, name: &str) -> Result<File, String> {
    let path = place(model, name)?;
    let what = |fault: &str| format!("'{name}', which the model names as a file of its weights, {fault}");
    // Whoever opens a pipe to read would wait for somebody to write.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = file.map_err(|error| what(&format!("cannot be opened: {error}; put it beside the model")))?;
    match file.metadata() {
        Ok(data) if data.is_file() => Ok(file),
        _ => Err(what("is not a regular file: put the weights themselves in its place")),
    }
}

fn place(model: &Path, name: &str) -> Result<PathBuf, String> {
    let mut parts = Path::new(name).components();
    if name.is_empty() || !parts.all(|part| matches!(part, Component::Normal(_) | Component::CurDir)) {
        return Err(format!(
            "'{name}', which the model names as a file of its weights, is not in the model's folder: save the model anew, \
             with its weights beside it"
        ));
    }
    Ok(model.parent().unwrap_or(Path::new("")).join(name))
}

/// What of ONNX leads to a tensor.
#[derive(Clone, Copy, PartialEq)]
enum Message {
    Model,
    Graph,
    Node,
    Attribute,
    Function,
    Sparse,
    Tensor,
}

impl Message {
    /// The message in a field.
    fn inner(self, field: u64) -> Option<Self> {
        Some(match (self, field) {
            (Self::Model, 7) | (Self::Attribute, 6 | 11) => Self::Graph,
            (Self::Model, 25) => Self::Function,
            (Self::Graph, 1) | (Self::Function, 7) => Self::Node,
            (Self::Graph, 15) | (Self::Attribute, 22 | 23) => Self::Sparse,
            (Self::Graph, 5) | (Self::Attribute, 5 | 10) | (Self::Sparse, 1 | 2) => Self::Tensor,
            (Self::Node, 5) => Self::Attribute,
            _ => return None,
        })
    }
}

/// Reads protocol buffers, and skips what does not matter.
struct Reader<R> {
    input: BufReader<R>,
    at: u64,
    names: BTreeSet<String>,
}

impl<R: Read + Seek> Reader<R> {
    /// Reads a message up to its end. `None`: it is broken.
    fn message(&mut self, message: Message, end: u64, depth: usize) -> Option<()> {
        let (mut location, mut is_external) = (None, false);
        while self.at < end {
            let key = varint(self)?;
            match (key >> 3, key & 7) {
                (0, _) => return None,
                (field, 0) => {
                    let number = varint(self)?;
                    if (message, field) == (Message::Tensor, 14) {
                        is_external = number == 1;
                    }
                }
                (_, 1) => self.skip(8)?,
                (_, 5) => self.skip(4)?,
                (field, 2) => {
                    let length = varint(self)?;
                    let inner_end = self.at.checked_add(length).filter(|inner| *inner <= end)?;
                    match message.inner(field) {
                        Some(inner) if depth < MOST_DEPTH => self.message(inner, inner_end, depth + 1)?,
                        None if (message, field) == (Message::Tensor, 13) && length <= MOST_ENTRY => {
                            location = self.location(length)?.or(location);
                        }
                        _ => {}
                    }
                    self.skip(inner_end.checked_sub(self.at)?)?;
                }
                _ => return None,
            }
        }
        if is_external {
            self.names.extend(location);
        }
        Some(())
    }

    /// The name of a file, if that is what an entry holds.
    fn location(&mut self, length: u64) -> Option<Option<String>> {
        let mut entry = vec![0; usize::try_from(length).ok()?];
        self.read_exact(&mut entry).ok()?;
        let text = |number| Fields(&entry).find_map(|field| field.bytes(number));
        let value = text(2).filter(|_| text(1) == Some(b"location"));
        Some(value.and_then(|name| String::from_utf8(name.to_owned()).ok()))
    }

    fn skip(&mut self, count: u64) -> Option<()> {
        self.input.seek_relative(i64::try_from(count).ok()?).ok()?;
        self.at += count;
        Some(())
    }
}

impl<R: Read> Read for Reader<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(into)?;
        self.at += count as u64;
        Ok(count)
    }
}

/// An ONNX file whose tensors lie in these files.
#[cfg(test)]
pub(crate) fn naming(names: &[&str]) -> Vec<u8> {
    names.iter().flat_map(|name| tests::field(7, &tests::field(5, &tests::tensor(name)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// One field with bytes in it; of a number above 15 the key has two bytes.
    pub(super) fn field(number: u16, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        for mut value in [usize::from(number << 3 | 2), bytes.len()] {
            while value >= 0x80 {
                out.push(value as u8 | 0x80);
                value >>= 7;
            }
            out.push(value as u8);
        }
        out.extend(bytes);
        out
    }

    fn entry(key: &str, value: &str) -> Vec<u8> {
        field(13, &[field(1, key.as_bytes()), field(2, value.as_bytes())].concat())
    }

    /// A tensor of floats whose values lie in this file.
    pub(super) fn tensor(location: &str) -> Vec<u8> {
        [
            vec![1 << 3, 4, 2 << 3, 1],
            field(8, b"w"),
            entry("location", location),
            entry("offset", "0"),
            vec![14 << 3, 1],
        ]
        .concat()
    }

    fn found(model: &[u8]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.onnx");
        fs::write(&file, model).unwrap();
        names(&file).unwrap().into_iter().collect()
    }

    #[test]
    fn files_are_found_wherever_tensors_may_be() {
        let attribute =
            |number, bytes: &[u8]| field(1, &field(5, &[field(1, b"value"), field(number, bytes)].concat()));
        let inside = [field(8, b"w"), field(9, &vec![13 << 3 | 2; 10_000])].concat();
        // A tensor that has come home keeps the name, and says that it is not there any more.
        let stale = [field(9, &[0; 16]), entry("location", "stale"), vec![14 << 3, 0]].concat();
        let graph = [
            attribute(5, &tensor("constant")),
            attribute(10, &tensor("constants")),
            attribute(6, &field(5, &tensor("branch"))),
            attribute(22, &field(1, &tensor("values"))),
            field(5, &inside),
            field(5, &stale),
            field(5, &tensor("folder/weights.bin")),
            field(5, &tensor("folder/weights.bin")),
            field(15, &field(2, &tensor("indices"))),
        ];
        let node = field(5, &field(5, &tensor("function")));
        let function = field(25, &field(7, &node));
        let model = [vec![1 << 3, 8], field(2, b"exporter"), field(7, &graph.concat()), function].concat();
        let all = ["branch", "constant", "constants", "folder/weights.bin", "function", "indices", "values"]
            .map(str::to_owned);
        assert_eq!(found(&model), all);
        // Whatever is cut off is not there, and nothing panics; what stands before it is.
        for end in (0..model.len()).step_by(61) {
            assert!(found(&model[..end]).iter().all(|name| all.contains(name)));
        }
        assert_eq!(found(&[0; 1000]), [""; 0]);
        assert_eq!(found(&naming(&["b", "a"])), ["a", "b"]);
    }

    #[test]
    fn only_regular_files_below_the_models_folder_are_opened() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("m");
        fs::create_dir_all(folder.join("inner")).unwrap();
        let outside = root.path().join("outside");
        for path in [&outside, &folder.join("w.bin"), &folder.join("inner/w.bin")] {
            fs::write(path, "weights").unwrap();
        }
        std::os::unix::fs::symlink(&outside, folder.join("link")).unwrap();
        let made = std::process::Command::new("mkfifo").arg(folder.join("pipe")).status().unwrap();
        assert!(made.success());
        let model = folder.join("model.onnx");
        for name in ["w.bin", "./w.bin", "inner/w.bin", "link"] {
            assert!(open(&model, name).is_ok(), "{name}");
        }
        for (name, part) in [
            ("", "is not in the model's folder"),
            ("../outside", "is not in the model's folder"),
            ("inner/../../outside", "is not in the model's folder"),
            (outside.to_str().unwrap(), "is not in the model's folder"),
            ("missing", "put it beside the model"),
            ("inner", "is not a regular file"),
            ("pipe", "is not a regular file"),
        ] {
            let fault = open(&model, name).unwrap_err();
            assert!(fault.starts_with(&format!("'{name}'")) && fault.contains(part), "{name}: {fault}");
        }
        fs::write(&model, naming(&["w.bin", "../outside"])).unwrap();
        assert_eq!(files(&model), [folder.join("w.bin")]);
    }
}
