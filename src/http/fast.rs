//! The fast path for `data` of numbers. What it accepts, it reads exactly as the general reader does; whatever it does not
//! know, faults above all, it leaves to that reader by answering `None`.

use super::data::MAX_DEPTH;
use jiter::NumberFloat;
use std::str::FromStr;

/// The largest number of decimal digits that always fit in a `u64`.
const DIGITS: usize = 19;

/// The powers of ten that a double holds exactly.
const POWERS: [f64; 23] = [
    1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20,
    1e21, 1e22,
];

/// Reads an array of `elements` scalars, flat or nested, from the front of `text`: their bytes, and the length of the text.
/// `element` reads one scalar and says how long its text is.
pub(super) fn array<const N: usize>(
    text: &[u8],
    elements: usize,
    element: impl Fn(&[u8]) -> Option<([u8; N], usize)>,
) -> Option<(Vec<u8>, usize)> {
    // A shape alone must not make the server allocate: there is room for what the text can hold, and where that is much, for
    // what it holds.
    let mut room = elements.min(text.len() / 2 + 1);
    if room > text.len() / 8 {
        room = room.min(text.iter().filter(|&&byte| byte == b',').count() + 1);
    }
    let mut out = Vec::with_capacity(room * N);
    let mut left = elements;
    let mut depth = 0;
    let mut at = space(text, 0);
    if *text.get(at)? != b'[' {
        return None;
    }
    loop {
        if text[at] == b'[' {
            depth += 1;
            at = space(text, at + 1);
            if depth > MAX_DEPTH {
                return None;
            }
            if *text.get(at)? != b']' {
                continue;
            }
        } else {
            let (bytes, len) = element(&text[at..])?;
            left = left.checked_sub(1)?;
            out.extend_from_slice(&bytes);
            at = space(text, at + len);
        }
        // Behind a value, or in an empty array.
        while *text.get(at)? == b']' {
            at += 1;
            depth -= 1;
            if depth == 0 {
                return (left == 0).then_some((out, at));
            }
            at = space(text, at);
        }
        if text[at] != b',' {
            return None;
        }
        at = space(text, at + 1);
        if at == text.len() {
            return None;
        }
    }
}

/// Where the white space that begins at `at` ends.
fn space(text: &[u8], mut at: usize) -> usize {
    while matches!(text.get(at), Some(b' ' | b'\n' | b'\r' | b'\t')) {
        at += 1;
    }
    at
}

/// `true` or `false`.
pub(super) fn bool(text: &[u8]) -> Option<(bool, usize)> {
    match text {
        [b't', b'r', b'u', b'e', ..] => Some((true, 4)),
        [b'f', b'a', b'l', b's', b'e', ..] => Some((false, 5)),
        _ => None,
    }
}

/// An integer within the range of `T`.
pub(super) fn integer<T: TryFrom<i64> + FromStr>(text: &[u8]) -> Option<(T, usize)> {
    let negative = text.first() == Some(&b'-');
    let start = usize::from(negative);
    let (end, value) = digits(text, start, 0);
    match end - start {
        0 => None,
        2.. if text[start] == b'0' => None,
        len if len < DIGITS => {
            let value = value as i64;
            Some((T::try_from(if negative { -value } else { value }).ok()?, end))
        }
        _ => Some((std::str::from_utf8(&text[..end]).ok()?.parse().ok()?, end)),
    }
}

/// A number as a double, rounded once.
pub(super) fn float64(text: &[u8]) -> Option<(f64, usize)> {
    match Decimal::read(text) {
        Some(decimal) if decimal.is_exact() => Some((decimal.product()?, decimal.len)),
        _ => any_float(text),
    }
}

/// A number as a double that is then rounded to a float.
pub(super) fn float32(text: &[u8]) -> Option<(f32, usize)> {
    if let Some(decimal) = Decimal::read(text)
        && let Some(product) = decimal.product()
        && (decimal.is_exact() || rounds_alike(product))
    {
        return Some((product as f32, decimal.len));
    }
    any_float(text).map(|(value, len)| (value as f32, len))
}

/// Whether every double within a few units in the last place of this one is rounded to the same float. Between two floats
/// there are 2^29 doubles, and only near their middle does the direction change.
fn rounds_alike(value: f64) -> bool {
    const BETWEEN: u64 = 1 << 29;
    let normal = f64::from(f32::MIN_POSITIVE) * 2.0..f64::from(f32::MAX) / 2.0;
    normal.contains(&value.abs()) && (value.to_bits() % BETWEEN).abs_diff(BETWEEN / 2) > 8
}

/// All that [`Decimal`] does not cover, `NaN` and `Infinity` among it.
#[cold]
fn any_float(text: &[u8]) -> Option<(f64, usize)> {
    let len = text.iter().position(|byte| matches!(byte, b',' | b']' | b' ' | b'\n' | b'\r' | b'\t'))?;
    NumberFloat::from_bytes(&text[..len], true).ok().map(|number| (number.0, len))
}

/// `digits` times ten to the power of `exponent`, with a sign.
struct Decimal {
    negative: bool,
    digits: u64,
    exponent: i32,
    len: usize,
}

impl Decimal {
    /// A JSON number of at most 19 significant digits.
    fn read(text: &[u8]) -> Option<Self> {
        let negative = text.first() == Some(&b'-');
        let start = usize::from(negative);
        let (mut at, mut value) = digits(text, start, 0);
        let mut count = at - start;
        if count == 0 || (count > 1 && text[start] == b'0') {
            return None;
        }
        let mut exponent = 0;
        if text.get(at) == Some(&b'.') {
            let point = at + 1;
            (at, value) = digits(text, point, value);
            if at == point {
                return None;
            }
            count += at - point;
            exponent = -i32::try_from(at - point).ok()?;
        }
        if count > DIGITS {
            // Zeros in front do not count; without them nothing has overflowed.
            count -=
                text[start..at].iter().take_while(|byte| matches!(byte, b'0' | b'.')).filter(|&&b| b == b'0').count();
            if count > DIGITS {
                return None;
            }
        }
        if matches!(text.get(at), Some(b'e' | b'E')) {
            let sign = text.get(at + 1).copied();
            let power = at + 1 + usize::from(matches!(sign, Some(b'+' | b'-')));
            let (end, size) = digits(text, power, 0);
            if !(1..=4).contains(&(end - power)) {
                return None;
            }
            exponent += if sign == Some(b'-') { -(size as i32) } else { size as i32 };
            at = end;
        }
        Some(Self { negative, digits: value, exponent, len: at })
    }

    /// Whether [`Decimal::product`] rounds only once.
    fn is_exact(&self) -> bool {
        self.digits <= 1 << f64::MANTISSA_DIGITS && self.exponent.unsigned_abs() < POWERS.len() as u32
    }

    /// The value, rounded once if [`Decimal::is_exact`], and twice otherwise.
    fn product(&self) -> Option<f64> {
        let power = *POWERS.get(self.exponent.unsigned_abs() as usize)?;
        let digits = self.digits as f64;
        let value = if self.exponent < 0 { digits / power } else { digits * power };
        Some(if self.negative { -value } else { value })
    }
}

/// Reads decimal digits: where they end, and `value` with them appended (wrapping around).
fn digits(text: &[u8], mut at: usize, mut value: u64) -> (usize, u64) {
    while let Some(chunk) = text.get(at..).and_then(|rest| rest.first_chunk::<8>())
        && let Some(eight) = eight_digits(u64::from_le_bytes(*chunk))
    {
        value = value.wrapping_mul(100_000_000).wrapping_add(eight);
        at += 8;
    }
    while let Some(&byte) = text.get(at)
        && byte.is_ascii_digit()
    {
        value = value.wrapping_mul(10).wrapping_add(u64::from(byte - b'0'));
        at += 1;
    }
    (at, value)
}

/// The number that eight ASCII digits stand for, the first in the lowest byte; all eight at once.
fn eight_digits(chunk: u64) -> Option<u64> {
    const HIGH: u64 = 0xf0f0_f0f0_f0f0_f0f0;
    // Digits are 0x30 to 0x39: the high half is 3, and still is after adding 6.
    let is_digits = (chunk & HIGH) | ((chunk.wrapping_add(0x0606_0606_0606_0606) & HIGH) >> 4) == 0x3333_3333_3333_3333;
    if !is_digits {
        return None;
    }
    // Neighbours are joined: 8 times 1 digit, 4 times 2, 2 times 4, 1 times 8.
    let ones = chunk & 0x0f0f_0f0f_0f0f_0f0f;
    let pairs = (ones.wrapping_mul(10 * 256 + 1) >> 8) & 0x00ff_00ff_00ff_00ff;
    let fours = (pairs.wrapping_mul(100 * 65536 + 1) >> 16) & 0x0000_ffff_0000_ffff;
    Some(fours.wrapping_mul(10000 * (1 << 32) + 1) >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What the standard library makes of it, if it is JSON.
    fn expected(token: &str) -> Option<f64> {
        NumberFloat::from_bytes(token.as_bytes(), true).ok().map(|number| number.0)
    }

    fn check(token: &str) {
        let text = format!("{token},");
        let same = |a: f64, b: f64| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        // A token of which only the front is a number is refused by the comma that must follow.
        let whole = |len: usize| len == token.len();
        let double = float64(text.as_bytes()).filter(|(_, len)| whole(*len)).map(|(value, _)| value);
        let single = float32(text.as_bytes()).filter(|(_, len)| whole(*len)).map(|(value, _)| value);
        match expected(token) {
            Some(value) => {
                assert!(same(double.unwrap(), value), "{token}: {double:?}, not {value:?}");
                assert!(same(f64::from(single.unwrap()), f64::from(value as f32)), "{token}: {single:?}");
                assert!(value.is_nan() || token.contains('I') || token.parse::<f64>().unwrap() == value);
            }
            None => assert_eq!((double, single), (None, None), "{token}"),
        }
    }

    #[test]
    fn special_numbers() {
        for token in [
            "0",
            "-0",
            "-0.0",
            "0.0e5",
            "1",
            "9007199254740993",
            "9007199254740992.5",
            "123456789012345678",
            "1e22",
            "1e23",
            "1e-22",
            "1e-23",
            "1e400",
            "-1e-400",
            "1.7976931348623157e308",
            "5e-324",
            "2.2250738585072014e-308",
            "NaN",
            "Infinity",
            "-Infinity",
            "16777217",
            "16777219.0000000001",
            "1.00000005960464477",
            "1.000000059604644775390625",
            "0.0000000000000000000000000000000000000117549435",
            "1.1754943508222875e-38",
            "1.401298464324817e-45",
            "3.4028235677973366e38",
            "3.4028234663852886e38",
            "0.00000000000000000001234567890123456789",
            "18446744073709551616",
            "99999999999999999999",
            "1E+5",
            "1e+0005",
            "1e00005",
            "",
            "-",
            "01",
            "-01",
            "00",
            "1.",
            ".5",
            "1e",
            "1e+",
            "+1",
            "Nan",
            "-NaN",
            "1x",
            "12345678x",
            "1.5.5",
            "0x10",
            "1_0",
            "--1",
        ] {
            check(token);
        }
    }

    #[test]
    fn nesting_and_separators() {
        let read =
            |text: &str, elements| array(text.as_bytes(), elements, |text| integer::<u8>(text).map(|(x, n)| ([x], n)));
        for (text, numbers) in [
            ("[]", &[][..]),
            (" [ ] ,", &[]),
            ("[[],[[]]]", &[]),
            ("[1]", &[1]),
            ("\t[ 1 ,\n[ 2,[],3 ] \r]}", &[1, 2, 3]),
        ] {
            let (out, len) = read(text, numbers.len()).unwrap();
            assert_eq!((out.as_slice(), text.as_bytes()[len - 1]), (numbers, b']'), "{text}");
            assert!(read(text, numbers.len() + 1).is_none());
        }
        for text in
            ["", "1", "[", "[1", "[1,", "[1,]", "[,1]", "[1 1]", "[1,,1]", "[[1]", "[1]]", "[256]", "[1.0]", "[a]"]
        {
            for elements in 0..3 {
                assert!(text == "[1]]" || read(text, elements).is_none(), "{text}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn numbers_are_read_as_the_general_reader_does(
            float in any::<f32>(),
            double in any::<f64>(),
            unit in 0.0f32..1.0,
            digits in "-?[0-9]{1,24}(\\.[0-9]{1,24})?([eE][+-]?[0-9]{1,3})?",
        ) {
            check(&format!("{}", f64::from(float)));
            check(&format!("{float:e}"));
            check(&format!("{double:e}"));
            check(&format!("{unit}"));
            check(&format!("{}", f64::from(unit)));
            check(&digits);
        }

        #[test]
        fn numbers_near_the_middle_of_two_floats(bits in 0x0080_0000u32..0x7f00_0000, ulps in -20i64..20) {
            let middle = f64::from(f32::from_bits(bits)).to_bits() + (1 << 28);
            let near = f64::from_bits(middle.wrapping_add_signed(ulps));
            check(&format!("{near:e}"));
            check(&format!("{near}"));
        }

        #[test]
        fn integers_are_read_as_the_standard_library_does(digits in "-?(0|[1-9][0-9]{0,21})") {
            macro_rules! check {
                ($($type:ty)*) => {$(
                    let got = integer::<$type>(format!("{digits}]").as_bytes());
                    // The standard library takes no "-0" for unsigned types; JSON knows only one zero.
                    let expected = if digits == "-0" { Some(0) } else { digits.parse::<$type>().ok() };
                    prop_assert_eq!(got, expected.map(|value| (value, digits.len())));
                )*};
            }
            check!(u8 u16 u32 u64 i8 i16 i32 i64);
        }
    }
}
