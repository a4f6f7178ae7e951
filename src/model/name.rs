//! What a model may be called.

/// The longest name, in characters.
const MOST_CHARS: usize = 128;

/// Whether a model may have this name. Names are part of URLs, of metric labels and of file names.
///
/// # Errors
/// What is allowed.
pub fn check_name(name: &str) -> Result<(), String> {
    let allowed_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name == "stats" {
        return Err("a name other than \"stats\", which the protocol keeps for statistics".to_owned());
    }
    let fits = (1..=MOST_CHARS).contains(&name.len()) && name.chars().all(allowed_char) && !name.starts_with('.');
    fits.then_some(()).ok_or_else(|| {
        format!("a name of 1 to {MOST_CHARS} letters, digits, '_', '-' and '.', which does not begin with '.'")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_urls_labels_and_files() {
        for good in ["a", "bge-small_en.v1.5", "0", &"x".repeat(MOST_CHARS)] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        for bad in ["", ".hidden", "..", "a/b", "a b", "ä", "a:b", "stats", &"x".repeat(MOST_CHARS + 1)] {
            assert!(check_name(bad).is_err_and(|allowed| allowed.starts_with("a name")), "{bad}");
        }
    }
}
