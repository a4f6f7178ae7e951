//! A pull parser for JSON whose errors name the field.

use super::error::ApiError;
use jiter::{Jiter, JiterError, JiterErrorType, JsonErrorType, NumberInt, Peek};
use std::fmt::Display;

/// Reads JSON from front to back; every method takes the name of the field that it reads, for the error.
pub(super) struct Reader<'j> {
    text: &'j [u8],
    /// The parser, which sees the text from `base` on.
    json: Jiter<'j>,
    base: usize,
}

impl<'j> Reader<'j> {
    /// A reader that takes the bare words `NaN`, `Infinity` and `-Infinity` for numbers.
    pub(super) fn new(text: &'j [u8]) -> Self {
        Self::from(text, 0)
    }

    /// The same, of the text from `base` on.
    pub(super) fn from(text: &'j [u8], base: usize) -> Self {
        Self { text, json: Jiter::new(&text[base..]).with_allow_inf_nan(), base }
    }

    /// The parser itself, for loops in which every instruction counts.
    pub(super) fn json(&mut self) -> &mut Jiter<'j> {
        &mut self.json
    }

    /// Where in the text the reader is.
    fn position(&self) -> usize {
        self.base + self.json.current_index()
    }

    /// What has not been read.
    pub(super) fn rest(&self) -> &'j [u8] {
        &self.text[self.position()..]
    }

    /// Goes on `len` bytes later, behind a value that somebody else has read. The parser keeps no state but its position.
    pub(super) fn advance(&mut self, len: usize) {
        *self = Self::from(self.text, self.position() + len);
    }

    /// A fault of the JSON itself while `field` was read.
    pub(super) fn broken(&self, error: &JiterError, field: &dyn Display) -> ApiError {
        let what = match &error.error_type {
            JiterErrorType::JsonError(kind) => kind.to_string(),
            JiterErrorType::WrongType { expected, actual } => format!("expected {expected} but found {actual}"),
        };
        let before = &self.text[..(self.base + error.index).min(self.text.len())];
        let line = before.iter().filter(|&&byte| byte == b'\n').count() + 1;
        let column = before.iter().rev().take_while(|&&byte| byte != b'\n').count() + 1;
        ApiError::invalid(format!("{field}: malformed JSON at line {line} column {column}: {what}"))
    }

    /// What comes next.
    pub(super) fn peek(&mut self, field: &dyn Display) -> Result<Peek, ApiError> {
        self.json.peek().map_err(|error| self.broken(&error, field))
    }

    /// Whether the next value is `null`, which is then read: absent, in other words.
    pub(super) fn null(&mut self, field: &dyn Display) -> Result<bool, ApiError> {
        if self.peek(field)? != Peek::Null {
            return Ok(false);
        }
        self.json.known_null().map(|()| true).map_err(|error| self.broken(&error, field))
    }

    /// Reads over a value of any type.
    pub(super) fn skip(&mut self, field: &dyn Display) -> Result<(), ApiError> {
        self.json.next_skip().map_err(|error| self.broken(&error, field))
    }

    /// Reads over a value and says where in the text it begins.
    pub(super) fn skip_over(&mut self, field: &dyn Display) -> Result<usize, ApiError> {
        self.peek(field)?; // past the white space
        let start = self.position();
        self.skip(field)?;
        Ok(start)
    }

    /// A string.
    pub(super) fn string(&mut self, field: &dyn Display) -> Result<String, ApiError> {
        self.expect(Peek::String, field, "a string")?;
        let text = self.json.known_str().map(str::to_owned);
        text.map_err(|error| self.broken(&error, field))
    }

    /// `true` or `false`.
    pub(super) fn bool(&mut self, field: &dyn Display) -> Result<bool, ApiError> {
        match self.peek(field)? {
            peek @ (Peek::True | Peek::False) => self.json.known_bool(peek).map_err(|error| self.broken(&error, field)),
            _ => Err(must_be(field, "true or false")),
        }
    }

    /// An integer that is not negative.
    pub(super) fn uint(&mut self, field: &dyn Display) -> Result<u64, ApiError> {
        const WHAT: &str = "an integer from 0 to 18446744073709551615, without fraction or exponent";
        let peek = self.peek(field)?;
        integer::<u64>(&mut self.json, peek).map_err(|fault| match fault {
            Fault::Broken(error) => self.broken(&error, field),
            Fault::Value => must_be(field, WHAT),
        })
    }

    /// The first value of an array, `None` if the array is empty.
    pub(super) fn array(&mut self, field: &dyn Display) -> Result<Option<Peek>, ApiError> {
        self.expect(Peek::Array, field, "an array")?;
        self.json.known_array().map_err(|error| self.broken(&error, field))
    }

    /// The next value of an array, `None` at its end.
    pub(super) fn array_step(&mut self, field: &dyn Display) -> Result<Option<Peek>, ApiError> {
        self.json.array_step().map_err(|error| self.broken(&error, field))
    }

    /// Reads an object: `each` is called with every key and reads its value.
    pub(super) fn object<K>(
        &mut self,
        field: &dyn Display,
        key: impl Fn(&str) -> K,
        mut each: impl FnMut(&mut Self, K) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        self.expect(Peek::Object, field, "an object")?;
        let mut next = self.json.known_object().map(|name| name.map(&key));
        loop {
            match next {
                Ok(Some(name)) => each(self, name)?,
                Ok(None) => return Ok(()),
                Err(error) => return Err(self.broken(&error, field)),
            }
            next = self.json.next_key().map(|name| name.map(&key));
        }
    }

    /// Nothing but white space may follow.
    pub(super) fn finish(&mut self) -> Result<(), ApiError> {
        self.json.finish().map_err(|error| self.broken(&error, &"the request"))
    }

    fn expect(&mut self, kind: Peek, field: &dyn Display, what: &str) -> Result<(), ApiError> {
        if self.peek(field)? == kind { Ok(()) } else { Err(must_be(field, what)) }
    }
}

/// A value that is of the wrong type or out of range.
pub(super) fn must_be(field: &dyn Display, what: &str) -> ApiError {
    ApiError::invalid(format!("{field} must be {what}"))
}

/// Why a number could not be read.
pub(super) enum Fault {
    /// It is not JSON.
    Broken(JiterError),
    /// It is JSON, but not a value of the wanted type.
    Value,
}

/// An integer, exactly: no fraction, no exponent, no wrapping.
pub(super) fn integer<T: TryFrom<i64> + std::str::FromStr>(json: &mut Jiter<'_>, peek: Peek) -> Result<T, Fault> {
    match json.known_int(peek) {
        Ok(NumberInt::Int(value)) => T::try_from(value).map_err(|_| Fault::Value),
        Err(error) => long_integer(json, peek, error),
    }
}

/// Integers that the fast path does not take: about 18 digits and more.
#[cold]
fn long_integer<T: std::str::FromStr>(json: &mut Jiter<'_>, peek: Peek, error: JiterError) -> Result<T, Fault> {
    match error.error_type {
        JiterErrorType::JsonError(JsonErrorType::NumberOutOfRange) => {
            let digits = json.known_number_bytes(peek).map_err(Fault::Broken)?;
            std::str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok()).ok_or(Fault::Value)
        }
        JiterErrorType::WrongType { .. } => Err(Fault::Value),
        JiterErrorType::JsonError(JsonErrorType::FloatExpectingInt) => Err(Fault::Value),
        JiterErrorType::JsonError(_) => Err(Fault::Broken(error)),
    }
}
