//! How long to wait after a failure, and when to give up.

use std::time::Duration;

use crate::hash::mix;

/// What is done about failures that may pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Failures in a row, without a byte gained, that are borne.
    pub max_failures: u32,
    /// The same until anything from anywhere has answered: a mistyped host is no outage.
    pub max_first_failures: u32,
    /// Wait after the first failure, on average three quarters of it; doubled with each further one.
    pub first_wait: Duration,
    /// The longest wait.
    pub longest_wait: Duration,
    /// A server that sends nothing for this long has failed, and so has one that is slower than
    /// [`least_bytes_per_s`](Self::least_bytes_per_s) all the while.
    pub stall: Duration,
    /// A server that sends less than this gains nothing, however long it is listened to.
    pub least_bytes_per_s: u64,
    /// Differs between processes, so that those that failed together do not come back together.
    pub jitter_seed: u64,
    /// Whether each failure is told as a warning. A job that keeps a list of failures need not.
    pub warns: bool,
}

impl RetryPolicy {
    /// Whether `n_bytes` in `time` are too few.
    pub(super) fn is_too_slow(&self, n_bytes: u64, time: Duration) -> bool {
        (n_bytes as f64) < self.least_bytes_per_s as f64 * time.as_secs_f64()
    }

    /// The wait after failure number `failures`, counted from 1: between half and all of
    /// `first_wait · 2^(failures - 1)`, at most `longest_wait`.
    pub fn wait(&self, failures: u32) -> Duration {
        let doubled = self.first_wait.saturating_mul(1 << failures.saturating_sub(1).min(20));
        let longest = doubled.min(self.longest_wait);
        let random = mix(self.jitter_seed ^ mix(u64::from(failures))) as f64 / u64::MAX as f64;
        longest.mul_f64(0.5 + 0.5 * random)
    }
}

impl Default for RetryPolicy {
    /// About three minutes until an outage ends the run.
    fn default() -> Self {
        Self {
            max_failures: 12,
            max_first_failures: 3,
            first_wait: Duration::from_millis(500),
            longest_wait: Duration::from_secs(30),
            stall: Duration::from_secs(30),
            least_bytes_per_s: 1024,
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
        fn waits_grow_to_the_longest_and_differ(seed: u64, failures in 1u32..100) {
            let policy = RetryPolicy { jitter_seed: seed, ..RetryPolicy::default() };
            let whole = policy.first_wait.saturating_mul(1 << (failures - 1).min(20)).min(policy.longest_wait);
            let wait = policy.wait(failures);
            prop_assert!(wait >= whole / 2 && wait <= whole, "{wait:?}");
            let other = RetryPolicy { jitter_seed: seed ^ 1, ..policy };
            prop_assert_ne!(other.wait(failures), wait);
        }
    }
}
