//! Share of the time that failures leave (Young 1974; Kokolis et al. 2024).
//!
//! ```text
//! MTTF of the job = MTTF of a node / nodes        interval = √(2 · write · MTTF)
//! goodput = 1 - write / interval - (interval / 2 + restart) / MTTF
//! ```

/// Cost of checkpoints and failures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Goodput {
    /// Mean time to a failure of the job.
    pub mttf_s: f64,
    /// Time to write a checkpoint to disk.
    pub write_s: f64,
    /// Optimal interval between checkpoints.
    pub interval_s: f64,
    /// Share of the time that goes into steps that are kept, at that interval.
    pub fraction: f64,
}

/// Returns the goodput of `n_nodes` nodes, each of which fails once per `node_mttf_s` on average; a
/// rank writes `rank_bytes` at `write_bytes_per_s`, and a restart takes `restart_s`.
pub fn goodput(
    n_nodes: usize,
    node_mttf_s: f64,
    rank_bytes: f64,
    write_bytes_per_s: f64,
    restart_s: f64,
) -> Goodput {
    let mttf_s = node_mttf_s / n_nodes.max(1) as f64;
    let write_s = (rank_bytes / write_bytes_per_s).max(1e-3);
    let interval_s = (2.0 * write_s * mttf_s).sqrt();
    let lost = write_s / interval_s + (interval_s / 2.0 + restart_s) / mttf_s;
    Goodput { mttf_s, write_s, interval_s, fraction: (1.0 - lost).max(0.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_other_interval_is_better() {
        let best = goodput(128, 3e7, 2e9, 1e9, 120.0);
        let at = |interval: f64| 1.0 - best.write_s / interval - (interval / 2.0 + 120.0) / best.mttf_s;
        assert!((best.fraction - at(best.interval_s)).abs() < 1e-12);
        for factor in [0.5, 0.9, 1.1, 2.0] {
            assert!(at(best.interval_s * factor) < best.fraction);
        }
    }
}
