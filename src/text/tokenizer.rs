//! A tokenizer.json as Hugging Face writes it, and what is asked of it.

use std::fmt;
use std::path::Path;
use tokenizers::utils::truncation::{TruncationDirection, TruncationParams, TruncationStrategy, truncate_encodings};
use tokenizers::{EncodeInput, Encoding, PostProcessor as _};

/// A larger file is no tokenizer.
const MOST_BYTES: u64 = 256 << 20;

/// A tokenizer: no padding, and truncation only where a request allows it, whatever the file says of both.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    vocabulary: usize,
    limit: Option<usize>,
    pad: Option<u32>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("vocabulary", &self.vocabulary).finish_non_exhaustive()
    }
}

/// One text, or a pair of texts, as a model reads it: as many types as ids, at least one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Tokens, special ones included.
    pub ids: Vec<u32>,
    /// Which text of a pair each belongs to.
    pub types: Vec<u32>,
}

/// Which end of a text stays when it is cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keep {
    /// Its beginning.
    #[default]
    Start,
    /// Its end.
    End,
}

/// What becomes of texts with too many tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The most tokens, special ones included.
    pub most: usize,
    /// What stays of a longer text; `None`: it is refused.
    pub keep: Option<Keep>,
}

/// Why a text has no tokens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// There are too many, and they may not be cut.
    #[error("has {tokens} tokens, and the model takes at most {most}; shorten it, or ask for truncation")]
    TooLong {
        /// How many it has.
        tokens: usize,
        /// The most that there may be.
        most: usize,
    },
    /// There is not a single one.
    #[error("has no tokens; send a text that has some")]
    Empty,
    /// A token id that the tokenizer does not have.
    #[error("has the token id {id}, and the model's tokenizer has ids below {vocabulary}; send ids of that tokenizer")]
    Unknown {
        /// The id.
        id: u32,
        /// One more than the largest there is.
        vocabulary: usize,
    },
    /// The tokenizer itself fails.
    #[error("cannot be tokenized: {0}")]
    Failed(String),
}

/// One token of a text, for people to look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The token.
    pub id: u32,
    /// What it stands for: the part of the text, or the name of a special token.
    pub text: String,
    /// Whether the tokenizer has added it.
    pub special: bool,
    /// Where its part of the text begins and ends, in characters; `None` for a special token.
    pub place: Option<(usize, usize)>,
}

impl Tokenizer {
    /// Reads a tokenizer.json.
    ///
    /// # Errors
    /// Why that is none, without its path.
    pub fn load(file: &Path) -> Result<Self, String> {
        let cannot = |error: std::io::Error| format!("cannot be read: {error}");
        let length = std::fs::metadata(file).map_err(cannot)?.len();
        if length > MOST_BYTES {
            return Err(format!("larger than {MOST_BYTES} bytes"));
        }
        Self::from_bytes(&std::fs::read(file).map_err(cannot)?)
    }

    /// The same from its text.
    ///
    /// # Errors
    /// Why that is none.
    pub fn from_bytes(text: &[u8]) -> Result<Self, String> {
        let mut inner = tokenizers::Tokenizer::from_bytes(text).map_err(|error| format!("no tokenizer: {error}"))?;
        let limit = inner.get_truncation().map(|truncation| truncation.max_length);
        let pad = inner.get_padding().map(|padding| padding.pad_id);
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| error.to_string())?;
        // Ids may have gaps, and added tokens lie above the others.
        let vocabulary = inner.get_vocab(true).values().max().map_or(0, |most| *most as usize + 1);
        let pad =
            pad.or_else(|| ["[PAD]", "<pad>", "<|endoftext|>"].into_iter().find_map(|name| inner.token_to_id(name)));
        Ok(Self { inner, vocabulary, limit, pad })
    }

    /// The most tokens by the file's own words.
    #[must_use]
    pub fn limit(&self) -> Option<usize> {
        self.limit
    }

    /// The token that fills up.
    #[must_use]
    pub fn pad(&self) -> Option<u32> {
        self.pad
    }

    /// How many tokens come to a text, or to a pair of texts, on their own.
    #[must_use]
    pub fn added(&self, pair: bool) -> usize {
        self.inner.get_post_processor().map_or(0, |processor| processor.added_tokens(pair))
    }

    /// The tokens of a text, or of a pair of texts.
    ///
    /// # Errors
    /// See [`Fault`].
    pub fn encode(&self, text: &str, pair: Option<&str>, cut: Cut) -> Result<Tokens, Fault> {
        let input = match pair {
            None => EncodeInput::from(text),
            Some(pair) => EncodeInput::from((text, pair)),
        };
        let whole = self.inner.encode_fast(input, true).map_err(failed)?;
        let tokens = whole.len();
        let encoding = match cut.keep {
            _ if tokens <= cut.most => whole,
            None => return Err(Fault::TooLong { tokens, most: cut.most }),
            Some(keep) => self.shortened(text, pair, cut.most, keep)?,
        };
        if encoding.is_empty() {
            return Err(Fault::Empty);
        }
        Ok(Tokens { ids: encoding.get_ids().to_vec(), types: encoding.get_type_ids().to_vec() })
    }

    /// The tokens of texts that are cut before the special tokens come to them. Of a pair the longer one is cut first.
    fn shortened(&self, text: &str, pair: Option<&str>, most: usize, keep: Keep) -> Result<Encoding, Fault> {
        let bare = |text: &str| self.inner.encode_fast(text, false).map_err(failed);
        let params = TruncationParams {
            direction: direction(keep),
            max_length: most.saturating_sub(self.added(pair.is_some())),
            strategy: TruncationStrategy::LongestFirst,
            stride: 0,
        };
        let (text, pair) = truncate_encodings(bare(text)?, pair.map(bare).transpose()?, &params).map_err(failed)?;
        self.inner.post_process(text, pair, true).map_err(failed)
    }

    /// Token ids that a client has made itself, special ones included.
    ///
    /// # Errors
    /// See [`Fault`].
    pub fn take(&self, mut ids: Vec<u32>, cut: Cut) -> Result<Tokens, Fault> {
        if let Some(id) = ids.iter().copied().find(|id| *id as usize >= self.vocabulary) {
            return Err(Fault::Unknown { id, vocabulary: self.vocabulary });
        }
        let tokens = ids.len();
        match cut.keep {
            _ if tokens == 0 => return Err(Fault::Empty),
            _ if tokens <= cut.most => {}
            None => return Err(Fault::TooLong { tokens, most: cut.most }),
            Some(Keep::Start) => ids.truncate(cut.most),
            Some(Keep::End) => drop(ids.drain(..tokens - cut.most)),
        }
        Ok(Tokens { types: vec![0; ids.len()], ids })
    }

    /// The tokens of a text with what each stands for, however many they are.
    ///
    /// # Errors
    /// [`Fault::Failed`].
    pub fn pieces(&self, text: &str, add_special_tokens: bool) -> Result<Vec<Piece>, Fault> {
        let encoding = self.inner.encode_char_offsets(text, add_special_tokens).map_err(failed)?;
        // Where each character begins, and where the text ends.
        let starts: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        let part = |(start, stop): (usize, usize)| Some(&text[*starts.get(start)?..*starts.get(stop)?]);
        let (ids, tokens) = (encoding.get_ids(), encoding.get_tokens());
        let (places, special) = (encoding.get_offsets(), encoding.get_special_tokens_mask());
        let piece = |at: usize| {
            let place = Some(places[at]).filter(|_| special[at] == 0);
            let text = place.and_then(part).map_or_else(|| tokens[at].clone(), str::to_owned);
            Piece { id: ids[at], text, special: special[at] != 0, place }
        };
        Ok((0..encoding.len()).map(piece).collect())
    }

    /// The text that token ids stand for.
    ///
    /// # Errors
    /// [`Fault::Failed`].
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, Fault> {
        self.inner.decode(ids, skip_special_tokens).map_err(failed)
    }
}

fn direction(keep: Keep) -> TruncationDirection {
    match keep {
        Keep::Start => TruncationDirection::Right,
        Keep::End => TruncationDirection::Left,
    }
}

#[expect(clippy::needless_pass_by_value, reason = "it is what the library's results hold")]
fn failed(error: tokenizers::Error) -> Fault {
    Fault::Failed(error.to_string())
}

#[cfg(test)]
mod tests;
