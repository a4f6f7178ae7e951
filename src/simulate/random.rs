//! Random numbers that only depend on a seed.

/// Means up to which a Poisson number is drawn at once: the product of uniform numbers stays far from what a float can hold.
const AT_ONCE: f64 = 16.0;

/// Splitmix64.
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    /// Streams of one seed are independent of each other.
    pub(super) fn new(seed: u64, stream: u64) -> Self {
        let mut random = Self(seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95));
        random.next();
        random
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Over 0, at most 1.
    pub(super) fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// The time to the next of events that come at this rate; infinite if none do.
    pub(super) fn exponential(&mut self, rate: f64) -> f64 {
        if rate > 0.0 { -self.unit().ln() / rate } else { f64::INFINITY }
    }

    /// How many events there are where `mean` are to be expected.
    pub(super) fn poisson(&mut self, mean: f64) -> u32 {
        let (mut left, mut count) = (mean, 0);
        while left > 0.0 {
            let end = (-left.min(AT_ONCE)).exp();
            let mut product = self.unit();
            while product > end {
                count += 1;
                product *= self.unit();
            }
            left -= AT_ONCE;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poisson_numbers_have_their_mean_as_variance() {
        for mean in [0.0, 0.3, 4.0, 16.0, 40.0, 250.0] {
            let mut random = Random::new(7, 1);
            let drawn: Vec<f64> = (0..20_000).map(|_| f64::from(random.poisson(mean))).collect();
            let average = drawn.iter().sum::<f64>() / drawn.len() as f64;
            let variance = drawn.iter().map(|value| (value - average).powi(2)).sum::<f64>() / drawn.len() as f64;
            assert!((average - mean).abs() <= 0.03 * mean, "mean of {mean}: {average}");
            assert!((variance - mean).abs() <= 0.05 * mean, "variance of {mean}: {variance}");
        }
    }

    #[test]
    fn gaps_have_the_mean_of_their_rate_and_nothing_comes_at_rate_zero() {
        let mut random = Random::new(7, 2);
        let mean = (0..50_000).map(|_| random.exponential(20.0)).sum::<f64>() / 50_000.0;
        assert!((mean - 0.05).abs() < 0.001, "{mean}");
        assert!(random.exponential(0.0).is_infinite());
    }
}
