//! Waits after failures, and the limits of failures.

use std::time::Duration;

use crate::hash::mix;

/// Policy for retries after temporary failures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Limit of consecutive failures without progress.
    pub max_failures: u32,
    /// Limit of consecutive failures until any server has responded: a mistyped host is not an
    /// outage.
    pub max_first_failures: u32,
    /// Longest wait after the first failure, on average three quarters of it; doubled with each
    /// further one.
    pub first_wait: Duration,
    /// Limit of the wait after any failure.
    pub max_wait: Duration,
    /// Time after which a server has failed that sends nothing, or less than
    /// [`min_bytes_per_s`](Self::min_bytes_per_s) on average.
    pub stall: Duration,
    /// Lowest rate that counts as progress, in bytes per second.
    pub min_bytes_per_s: u64,
    /// Seed that differs between processes, so that those that failed together do not retry
    /// together.
    pub jitter_seed: u64,
    /// `true` if each failure is logged as a warning. A job that records failures itself does not
    /// need it.
    pub warns: bool,
}

impl RetryPolicy {
    /// Returns whether `n_bytes` in `time` are too few.
    pub(super) fn is_too_slow(&self, n_bytes: u64, time: Duration) -> bool {
        (n_bytes as f64) < self.min_bytes_per_s as f64 * time.as_secs_f64()
    }

    /// Returns the wait after failure number `failures`, counted from 1: between half and all of
    /// `first_wait · 2^(failures - 1)`, at most `max_wait`.
    pub fn wait(&self, failures: u32) -> Duration {
        let doubled = self.first_wait.saturating_mul(1 << failures.saturating_sub(1).min(20));
        let longest = doubled.min(self.max_wait);
        let random = mix(self.jitter_seed ^ mix(u64::from(failures))) as f64 / u64::MAX as f64;
        longest.mul_f64(0.5 + 0.5 * random)
    }
}

impl Default for RetryPolicy {
    /// Returns a policy by which an outage ends the run after about three minutes.
    fn default() -> Self {
        Self {
            max_failures: 12,
            max_first_failures: 3,
            first_wait: Duration::from_millis(500),
            max_wait: Duration::from_secs(30),
            stall: Duration::from_secs(30),
            min_bytes_per_s: 1024,
            jitter_seed: 0,
            warns: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn waits_grow_to_the_limit_and_depend_on_the_seed(seed: u64, failures in 1u32..100) {
            let policy = RetryPolicy { jitter_seed: seed, ..RetryPolicy::default() };
            let longest = policy.first_wait.saturating_mul(1 << (failures - 1).min(20)).min(policy.max_wait);
            let wait = policy.wait(failures);
            prop_assert!(wait >= longest / 2 && wait <= longest, "{wait:?}");
            let other = RetryPolicy { jitter_seed: seed ^ 1, ..policy };
            prop_assert_ne!(other.wait(failures), wait);
        }
    }
}
