//! What a value of a key may be. Each parser answers with what is allowed where the value is not.
//!
//! Numbers may also be written as text, since flags and the environment know nothing else.

use crate::units::ByteSize;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;
use toml::Value;

/// An integer of a range.
pub fn integer<T>(range: RangeInclusive<T>) -> impl Fn(&Value) -> Result<T, String>
where
    T: TryFrom<i64> + PartialOrd + Display,
{
    move |value| {
        let number = match value {
            Value::Integer(number) => Some(*number),
            Value::String(text) => text.parse().ok(),
            _ => None,
        };
        number
            .and_then(|number| T::try_from(number).ok())
            .filter(|number| range.contains(number))
            .ok_or_else(|| format!("an integer from {} to {}", range.start(), range.end()))
    }
}

/// A count of at least one, as one of the `NonZero` types.
pub fn count<N, T>(most: T) -> impl Fn(&Value) -> Result<N, String>
where
    T: TryFrom<i64> + From<u8> + PartialOrd + Display + Copy,
    N: TryFrom<T>,
{
    let parse = integer(T::from(1)..=most);
    move |value| parse(value).and_then(|count| N::try_from(count).map_err(|_| format!("an integer from 1 to {most}")))
}

/// A number of a range.
pub fn number(range: RangeInclusive<f64>) -> impl Fn(&Value) -> Result<f64, String> {
    move |value| {
        let number = match value {
            Value::Integer(number) => Some(*number as f64),
            Value::Float(number) => Some(*number),
            Value::String(text) => text.parse().ok(),
            _ => None,
        };
        number
            .filter(|number| range.contains(number))
            .ok_or_else(|| format!("a number from {} to {}", range.start(), range.end()))
    }
}

/// What another parser takes, or `"auto"`, which is `None`.
pub fn auto_or<T>(parse: impl Fn(&Value) -> Result<T, String>) -> impl Fn(&Value) -> Result<Option<T>, String> {
    move |value| match value.as_str() {
        Some("auto") => Ok(None),
        _ => parse(value).map(Some).map_err(|allowed| format!("\"auto\" or {allowed}")),
    }
}

/// A text.
///
/// # Errors
/// If the value is something else.
pub fn text(value: &Value) -> Result<String, String> {
    value.as_str().map(str::to_owned).ok_or_else(|| "a text in quotes".to_owned())
}

/// A text, `None` if it is empty.
///
/// # Errors
/// If the value is something else.
pub fn text_or_empty(value: &Value) -> Result<Option<String>, String> {
    text(value).map(|text| Some(text).filter(|text| !text.is_empty()))
}

/// One of these names.
pub fn choice<T: Copy>(choices: &[(&str, T)]) -> impl Fn(&Value) -> Result<T, String> {
    move |value| {
        let found = choices.iter().find(|(name, _)| value.as_str() == Some(name));
        found.map(|(_, meaning)| *meaning).ok_or_else(|| {
            let names: Vec<String> = choices.iter().map(|(name, _)| format!("\"{name}\"")).collect();
            format!("one of {}", names.join(", "))
        })
    }
}

/// A duration of a range, written with a unit.
pub fn duration(range: RangeInclusive<Duration>) -> impl Fn(&Value) -> Result<Duration, String> {
    move |value| {
        let duration = value.as_str().and_then(|text| humantime::parse_duration(text.trim()).ok());
        duration.filter(|duration| range.contains(duration)).ok_or_else(|| {
            let [least, most] =
                [range.start(), range.end()].map(|bound| humantime::format_duration(*bound).to_string());
            format!("a duration such as \"250ms\" or \"2s\", from {least} to {most}")
        })
    }
}

/// A size of a range: text with a unit, or a plain number of bytes.
pub fn bytes(range: RangeInclusive<ByteSize>) -> impl Fn(&Value) -> Result<ByteSize, String> {
    move |value| {
        let size = match value {
            Value::Integer(number) => u64::try_from(*number).ok().map(ByteSize),
            Value::String(text) => parse_bytes(text),
            _ => None,
        };
        size.filter(|size| range.contains(size)).ok_or_else(|| {
            format!("a size such as \"64MiB\" or a number of bytes, from {} to {}", range.start(), range.end())
        })
    }
}

/// `1.5GiB`, `64 MiB`, `10MB`, `4096`; `None` if it is not a whole number of bytes that fits.
fn parse_bytes(text: &str) -> Option<ByteSize> {
    const UNITS: [(&str, u64); 10] = [
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
        ("kB", 1_000),
        ("KB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("TB", 1_000_000_000_000),
        ("B", 1),
    ];
    let text = text.trim();
    let (number, unit) =
        UNITS.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit))).unwrap_or((text, 1));
    let number = number.trim_end();
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(unit).map(ByteSize);
    }
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let (before, after) = number.split_once('.')?;
    let size = (digits(before) && digits(after)).then(|| number.parse::<f64>().ok())?? * unit as f64;
    // Above this, not every whole number is a float.
    (size.fract() == 0.0 && size < (1u64 << 53) as f64).then_some(ByteSize(size as u64))
}

/// A list of integers of a range, each once, returned in ascending order; from a flag or the environment with commas between.
pub fn integers<T>(range: RangeInclusive<T>) -> impl Fn(&Value) -> Result<Vec<T>, String>
where
    T: TryFrom<i64> + Ord + Display,
{
    move |value| {
        let allowed = || format!("a list of different integers from {} to {}", range.start(), range.end());
        let items: Vec<Option<i64>> = match value {
            Value::Array(items) => items.iter().map(Value::as_integer).collect(),
            Value::String(text) => text.split(',').map(|item| item.trim().parse().ok()).collect(),
            _ => return Err(allowed()),
        };
        let number = |item: Option<i64>| item.and_then(|number| T::try_from(number).ok());
        let numbers = items.into_iter().map(|item| number(item).filter(|number| range.contains(number)));
        let mut numbers: Vec<T> = numbers.collect::<Option<_>>().ok_or_else(allowed)?;
        numbers.sort_unstable();
        let distinct = numbers.windows(2).all(|pair| pair[0] < pair[1]);
        distinct.then_some(numbers).ok_or_else(allowed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, size) in [
            ("0", Some(0)),
            ("4096", Some(4096)),
            ("7B", Some(7)),
            ("64MiB", Some(64 << 20)),
            ("64 MiB", Some(64 << 20)),
            ("1.5GiB", Some(3 << 29)),
            ("10MB", Some(10_000_000)),
            ("2kB", Some(2000)),
            ("", None),
            ("MiB", None),
            ("-1", None),
            ("1e3", None),
            ("infMiB", None),
            ("0.3B", None),
            ("64mib", None),
            ("64M", None),
            ("99999999TiB", None),
        ] {
            assert_eq!(parse_bytes(text), size.map(ByteSize), "{text}");
        }
    }

    #[test]
    fn durations_need_a_unit() {
        let parse = duration(Duration::ZERO..=Duration::from_secs(60));
        assert_eq!(parse(&Value::from("250ms")), Ok(Duration::from_millis(250)));
        assert_eq!(parse(&Value::from("0s")), Ok(Duration::ZERO));
        for bad in [Value::from("2"), Value::from(2), Value::from("2m"), Value::from("-1s"), Value::from("")] {
            assert!(parse(&bad).is_err_and(|allowed| allowed.ends_with("from 0s to 1m")), "{bad}");
        }
    }

    #[test]
    fn numbers_may_be_text_and_stay_in_their_range() {
        assert_eq!(integer(1..=8u32)(&Value::from("8")), Ok(8));
        assert_eq!(auto_or(integer(1..=8u32))(&Value::from("auto")), Ok(None));
        assert!(
            auto_or(integer(1..=8u32))(&Value::from(9)).is_err_and(|allowed| allowed.starts_with("\"auto\" or an"))
        );
        assert!(integer(1..=8u32)(&Value::from(1.0)).is_err());
        assert_eq!(number(0.0..=0.5)(&Value::from(0)), Ok(0.0));
        assert!(number(0.0..=0.5)(&Value::from(f64::NAN)).is_err());
    }

    #[test]
    fn lists_are_sorted_and_have_no_doubles() {
        let list = |numbers: &[i64]| Value::from(numbers.to_vec());
        assert_eq!(integers(1..=9u64)(&list(&[3, 1])), Ok(vec![1, 3]));
        assert!(integers(1..=9u64)(&list(&[1, 1])).is_err());
        assert!(integers(1..=9u64)(&list(&[0])).is_err());
        assert_eq!(integers(0..=9u64)(&Value::from("1, 0")), Ok(vec![0, 1]));
        for bad in ["", "0,", "[0]", "0 1", "0,0", "10"] {
            assert!(integers(0..=9u64)(&Value::from(bad)).is_err(), "{bad}");
        }
    }
}
