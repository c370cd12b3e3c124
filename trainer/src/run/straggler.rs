//! Detection of ranks that slow the others down.

use ranks::EngineError;
use ranks::communicator::Communicator;

/// Multiple of the median busy time above which a rank is late.
const LATE: f64 = 1.3;

/// Milliseconds above the median below which a difference is noise.
const LEAST_MS: f64 = 50.0;

/// Compares ranks at logged steps.
#[derive(Debug, Default)]
pub(crate) struct Stragglers {
    n_looks: u64,
}

/// Result of a comparison.
#[derive(Debug, Default)]
pub(crate) struct Lateness {
    /// Values for the metrics.
    pub(crate) row: Vec<(String, f64)>,
    /// Warnings for people.
    pub(crate) warnings: Vec<String>,
}

impl Stragglers {
    /// Compares how long ranks were busy in `step`, without waiting for others. All ranks call it.
    /// The first time is not judged: it includes one-time work.
    pub(crate) fn look(
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
        let mut times: Vec<(usize, f64, f64)> = order
            .iter()
            .zip(&parts)
            .map(|(rank, part)| (*rank, f64::from(part[0]), f64::from(part[1])))
            .collect();
        self.n_looks += 1;
        let mut lateness = judge(step, &mut times);
        if self.n_looks == 1 {
            lateness.warnings.clear();
        }
        Ok(lateness)
    }
}

fn judge(step: u64, times: &mut [(usize, f64, f64)]) -> Lateness {
    times.sort_by(|a, b| a.1.total_cmp(&b.1));
    // The lower of the two middle ones: of two ranks the faster sets the pace.
    let median = times[(times.len() - 1) / 2].1;
    let slowest = times[times.len() - 1];
    Lateness {
        row: vec![
            ("rank/slowest".into(), slowest.0 as f64),
            ("time/slowest_rank_ms".into(), slowest.1),
            ("time/median_rank_ms".into(), median),
        ],
        warnings: times.iter().filter(|(_, busy, _)| *busy > LATE * median && *busy > median + LEAST_MS).map(|(rank, busy, data)| {
        format!(
            "step {step}: rank {rank} slows the others down: busy for {busy:.0} ms, {data:.0} of them waiting for \
             data, where the median is {median:.0}"
        )
    }).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_rank_is_named_and_noise_is_not() {
        let said = judge(7, &mut [(0, 100.0, 0.0), (1, 250.0, 140.0), (2, 110.0, 0.0), (3, 105.0, 1.0)]);
        assert_eq!(said.warnings.len(), 1);
        assert!(said.warnings[0].contains("rank 1") && said.warnings[0].contains("140"), "{said:?}");
        assert!(judge(7, &mut [(0, 1.0, 0.0), (1, 2.0, 0.0)]).warnings.is_empty());
    }
}
