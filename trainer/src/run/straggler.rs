//! Detection of ranks that slow the others down.

use ranks::EngineError;
use ranks::communicator::Communicator;

use super::duration::format_time;
use super::health::{Alert, Concern};

/// Multiple of the median busy time above which a rank is slow.
const LATE: f64 = 1.3;

/// Difference from the median in milliseconds below which a rank is not considered slow.
const LEAST_MS: f64 = 50.0;

/// Comparison of ranks at logged steps.
#[derive(Debug, Default)]
pub(crate) struct Stragglers {
    n_comparisons: u64,
}

/// Time that a rank was busy in a step.
#[derive(Debug, Clone, Copy)]
struct BusyTime {
    rank: usize,
    busy_ms: f64,
    data_wait_ms: f64,
}

/// Result of a comparison.
#[derive(Debug, Default)]
pub(crate) struct Lateness {
    /// Values for the metrics.
    pub(crate) row: Vec<(String, f64)>,
    /// Alerts about slow ranks.
    pub(crate) alerts: Vec<Alert>,
}

impl Stragglers {
    /// Compares how long ranks were busy in `step`, without waiting for others. All ranks call it.
    /// The first comparison gives no alerts, because its step includes one-time work.
    pub(crate) fn compare(
        &mut self,
        comm: &Communicator,
        step: u64,
        busy_ms: f64,
        data_wait_ms: f64,
    ) -> Result<Lateness, EngineError> {
        if comm.topology().world_size == 1 {
            return Ok(Lateness::default());
        }
        let parts = comm.gather_parts("step times", vec![busy_ms as f32, data_wait_ms as f32])?;
        let order = comm.topology().by_data_rank();
        let mut times = Vec::with_capacity(parts.len());
        for (rank, part) in order.iter().zip(&parts) {
            times.push(BusyTime {
                rank: *rank,
                busy_ms: f64::from(part[0]),
                data_wait_ms: f64::from(part[1]),
            });
        }
        self.n_comparisons += 1;
        let mut lateness = judge(step, &mut times);
        if self.n_comparisons == 1 {
            lateness.alerts.clear();
        }
        Ok(lateness)
    }
}

/// Compares the times of `step`, which are sorted in place.
fn judge(step: u64, times: &mut [BusyTime]) -> Lateness {
    times.sort_by(|a, b| a.busy_ms.total_cmp(&b.busy_ms));
    // The lower of the two middle ones, so that of two ranks the slower one can be slow.
    let median = times[(times.len() - 1) / 2].busy_ms;
    let slowest = times[times.len() - 1];
    let row = vec![
        ("rank/slowest".into(), slowest.rank as f64),
        ("time/slowest_rank_ms".into(), slowest.busy_ms),
        ("time/median_rank_ms".into(), median),
    ];
    let mut alerts = Vec::new();
    for BusyTime { rank, busy_ms, data_wait_ms } in times.iter() {
        if *busy_ms > LATE * median && *busy_ms > median + LEAST_MS {
            let text = format!(
                "step {step}: rank {rank} slows the others down: busy for {}, {} of that waiting for data; \
                 the median is {}",
                format_time(1e-3 * busy_ms),
                format_time(1e-3 * data_wait_ms),
                format_time(1e-3 * median)
            );
            alerts.push(Alert { concern: Concern::SlowRank, subject: format!("rank {rank}"), text });
        }
    }
    Lateness { row, alerts }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn busy(rank: usize, busy_ms: f64, data_wait_ms: f64) -> BusyTime {
        BusyTime { rank, busy_ms, data_wait_ms }
    }

    #[test]
    fn slow_ranks_are_named_and_small_differences_ignored() {
        let mut times =
            [busy(0, 100.0, 0.0), busy(1, 250.0, 140.0), busy(2, 110.0, 0.0), busy(3, 105.0, 1.0)];
        let lateness = judge(7, &mut times);
        assert_eq!(lateness.alerts.len(), 1);
        let alert = &lateness.alerts[0];
        assert_eq!((alert.concern, alert.subject.as_str()), (Concern::SlowRank, "rank 1"));
        assert!(alert.text.contains("rank 1") && alert.text.contains("140"), "{lateness:?}");
        assert!(judge(7, &mut [busy(0, 1.0, 0.0), busy(1, 2.0, 0.0)]).alerts.is_empty());
    }
}
