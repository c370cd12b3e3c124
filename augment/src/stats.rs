//! Times of the stages of an image, available while the pool runs.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

/// Longest time that a histogram resolves, in nanoseconds; longer times are recorded as this value.
const MAX_NS: u64 = 60_000_000_000;

/// Number of significant digits of a percentile.
const DIGITS: u8 = 2;

/// Stages of a thread's work on an image, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Wait for encoded bytes.
    Wait,
    /// Decoding of the bytes.
    Decode,
    /// Crop and resize, all views.
    Resize,
    /// Jitter and grayscale, all views.
    Color,
    /// Blur, all views.
    Blur,
    /// Random draws, flip, solarize, and the copy into the batch.
    Other,
}

/// All stages with their names.
pub const STAGES: [(Stage, &str); 6] = [
    (Stage::Wait, "wait for bytes"),
    (Stage::Decode, "decode"),
    (Stage::Resize, "crop and resize"),
    (Stage::Color, "color"),
    (Stage::Blur, "blur"),
    (Stage::Other, "other"),
];

/// Times of one image by stage.
#[derive(Debug, Clone, Copy, Default)]
pub struct StageTimes([Duration; STAGES.len()]);

/// Clock that adds the time since its last lap to a stage.
pub(crate) struct Clock<'a> {
    last: Instant,
    times: &'a mut StageTimes,
}

impl<'a> Clock<'a> {
    /// Starts the clock.
    pub(crate) fn start(times: &'a mut StageTimes) -> Self {
        Self { last: Instant::now(), times }
    }

    /// Adds the time since the last lap to `stage`.
    pub(crate) fn lap(&mut self, stage: Stage) {
        let now = Instant::now();
        self.times.add(stage, now - self.last);
        self.last = now;
    }
}

/// Times of all images since the last reset.
#[derive(Debug)]
pub struct StageStats(Mutex<StageTotals>);

#[derive(Debug)]
struct StageTotals {
    images: u64,
    bytes: u64,
    total: StageTimes,
    histograms: Vec<Histogram<u64>>,
}

/// A snapshot of [`StageStats`].
#[derive(Debug, Clone, PartialEq)]
pub struct StageSnapshot {
    /// Number of finished images.
    pub images: u64,
    /// Number of their encoded bytes.
    pub bytes: u64,
    /// Every stage, in order.
    pub stages: Vec<StageReading>,
}

/// One stage of a [`StageSnapshot`].
#[derive(Debug, Clone, PartialEq)]
pub struct StageReading {
    /// Name of the stage.
    pub name: &'static str,
    /// Sum of the times of all images, over all threads.
    pub total: Duration,
    /// Median time of an image.
    pub p50: Duration,
    /// 99th percentile of the times of an image.
    pub p99: Duration,
}

impl StageTimes {
    /// Adds `time` to a stage.
    pub fn add(&mut self, stage: Stage, time: Duration) {
        self.0[stage as usize] += time;
    }
}

impl Default for StageStats {
    fn default() -> Self {
        Self(Mutex::new(StageTotals::new()))
    }
}

impl StageTotals {
    fn new() -> Self {
        let empty = Histogram::new_with_bounds(1, MAX_NS, DIGITS).expect("bounds and digits are valid");
        Self { images: 0, bytes: 0, total: StageTimes::default(), histograms: vec![empty; STAGES.len()] }
    }
}

impl StageStats {
    /// Counts an image of `bytes` encoded bytes.
    pub fn record(&self, times: &StageTimes, bytes: usize) {
        let mut totals = self.lock();
        totals.images += 1;
        totals.bytes += bytes as u64;
        for ((stage, _), time) in STAGES.iter().zip(times.0) {
            totals.total.add(*stage, time);
            totals.histograms[*stage as usize].saturating_record(time.as_nanos() as u64);
        }
    }

    /// Resets all counters, so that a measurement excludes the warm-up.
    pub fn reset(&self) {
        *self.lock() = StageTotals::new();
    }

    /// Returns the times and counts since the last reset.
    pub fn snapshot(&self) -> StageSnapshot {
        let totals = self.lock();
        let mut stages = Vec::with_capacity(STAGES.len());
        for (stage, name) in STAGES {
            let histogram = &totals.histograms[stage as usize];
            stages.push(StageReading {
                name,
                total: totals.total.0[stage as usize],
                p50: quantile(histogram, 0.5),
                p99: quantile(histogram, 0.99),
            });
        }
        StageSnapshot { images: totals.images, bytes: totals.bytes, stages }
    }

    fn lock(&self) -> MutexGuard<'_, StageTotals> {
        // Numbers stay valid if a holder panics.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Returns the time that a share `q` of the recorded times do not exceed.
fn quantile(histogram: &Histogram<u64>, q: f64) -> Duration {
    Duration::from_nanos(histogram.value_at_quantile(q))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode_times(ms: u64) -> StageTimes {
        let mut times = StageTimes::default();
        times.add(Stage::Decode, Duration::from_millis(ms));
        times
    }

    #[test]
    fn snapshot_has_percentiles_and_totals_since_the_reset() {
        let stats = StageStats::default();
        stats.record(&decode_times(1000), 7);
        stats.reset();
        for ms in 1..=100 {
            stats.record(&decode_times(ms), 10);
        }
        let snapshot = stats.snapshot();
        assert_eq!((snapshot.images, snapshot.bytes), (100, 1000));
        let decode = &snapshot.stages[Stage::Decode as usize];
        assert_eq!(decode.total, Duration::from_millis(5050));
        assert!(
            decode.p50.as_millis().abs_diff(50) <= 1 && decode.p99.as_millis().abs_diff(99) <= 1,
            "{decode:?}"
        );
        assert!(snapshot.stages[Stage::Blur as usize].total.is_zero());
    }
}
