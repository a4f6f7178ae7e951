//! From the vectors of all tokens to one vector for a text. Pure.

/// How the vectors of a text's tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// That of the first token.
    Cls,
    /// That of the last token.
    Last,
    /// Nothing is to be done: the model gives one vector for a text.
    None,
}

impl Pooling {
    /// The words of model.toml.
    pub const WORDS: [(&str, Self); 4] =
        [("mean", Self::Mean), ("cls", Self::Cls), ("last", Self::Last), ("none", Self::None)];

    /// Its word.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Mean => "mean",
            Self::Cls => "cls",
            Self::Last => "last",
            Self::None => "none",
        }
    }

    /// One vector of `width` elements from those of the first `tokens` tokens; what stands behind them in `vectors` is
    /// padding.
    ///
    /// # Panics
    /// If there are fewer vectors than tokens, or no token.
    #[must_use]
    pub fn pool(self, vectors: &[f32], width: usize, tokens: usize) -> Vec<f32> {
        assert!(tokens > 0 && vectors.len() >= tokens * width, "{tokens} tokens in {} values", vectors.len());
        match self {
            Self::None | Self::Cls => vectors[..width].to_vec(),
            Self::Last => vectors[(tokens - 1) * width..tokens * width].to_vec(),
            Self::Mean => {
                // Sums of thousands of values keep their precision in twice the width.
                let mut sums = vec![0f64; width];
                for vector in vectors[..tokens * width].chunks_exact(width) {
                    sums.iter_mut().zip(vector).for_each(|(sum, value)| *sum += f64::from(*value));
                }
                sums.into_iter().map(|sum| (sum / tokens as f64) as f32).collect()
            }
        }
    }
}

/// Brings a vector to unit length; one without a length stays as it is.
pub fn normalise(vector: &mut [f32]) {
    let length = vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
}

/// The cosine of the angle between two vectors of equal width; 0 if one of them has no length.
#[must_use]
pub fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let lengths = dot(a, a).sqrt() * dot(b, b).sqrt();
    if lengths > 0.0 { (dot(a, b) / lengths) as f32 } else { 0.0 }
}

/// Scores as probabilities: of several that add up to 1, of a single one by the logistic function.
pub fn probabilities(scores: &mut [f32]) {
    if let [only] = scores {
        *only = (1.0 / (1.0 + (-f64::from(*only)).exp())) as f32;
        return;
    }
    // The largest is taken off first, so that nothing overflows.
    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f64> = scores.iter().map(|score| f64::from(score - most).exp()).collect();
    let sum: f64 = powers.iter().sum();
    scores.iter_mut().zip(powers).for_each(|(score, power)| *score = (power / sum) as f32);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pooling_is_what_a_naive_reading_says(
            width in 1usize..6,
            rows in proptest::collection::vec(proptest::collection::vec(-1e3f32..1e3, 6), 1..9),
            padding in 0usize..4,
        ) {
            let rows: Vec<Vec<f32>> = rows.into_iter().map(|row| row[..width].to_vec()).collect();
            let mut vectors = rows.concat();
            vectors.extend(vec![f32::NAN; padding * width]);
            prop_assert_eq!(&Pooling::Cls.pool(&vectors, width, rows.len()), &rows[0]);
            prop_assert_eq!(&Pooling::Last.pool(&vectors, width, rows.len()), &rows[rows.len() - 1]);
            let mean = Pooling::Mean.pool(&vectors, width, rows.len());
            for (column, got) in mean.into_iter().enumerate() {
                let column: Vec<f32> = rows.iter().map(|row| row[column]).collect();
                let wanted = column.iter().sum::<f32>() / column.len() as f32;
                prop_assert!((got - wanted).abs() <= 1e-3, "{} {}", got, wanted);
            }
        }

        #[test]
        fn what_is_normalised_has_unit_length_and_its_direction(vector in proptest::collection::vec(-1e3f32..1e3, 1..20)) {
            let mut unit = vector.clone();
            normalise(&mut unit);
            let length: f32 = unit.iter().map(|value| value * value).sum::<f32>().sqrt();
            if vector.iter().any(|value| value.abs() > 1e-6) {
                prop_assert!((length - 1.0).abs() < 1e-5);
                prop_assert!((cosine(&unit, &vector) - 1.0).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn nothing_stays_nothing() {
        let mut zeros = [0.0; 3];
        normalise(&mut zeros);
        assert_eq!(zeros, [0.0; 3]);
        assert!(cosine(&zeros, &[1.0, 2.0, 3.0]).abs() < f32::EPSILON);
    }

    #[test]
    fn scores_become_probabilities_whatever_their_size() {
        for (scores, expected) in [
            (vec![0.0], vec![0.5]),
            (vec![f32::MAX], vec![1.0]),
            (vec![-1e30], vec![0.0]),
            (vec![1.0, 1.0], vec![0.5, 0.5]),
            (vec![1e30, -1e30], vec![1.0, 0.0]),
            (vec![0.0, 3f32.ln()], vec![0.25, 0.75]),
        ] {
            let mut got = scores.clone();
            probabilities(&mut got);
            for (got, expected) in got.iter().zip(&expected) {
                assert!((got - expected).abs() < 1e-6, "{scores:?}: {got} {expected}");
            }
        }
    }
}
