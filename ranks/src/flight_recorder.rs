//! Recorder of the last collectives of a rank's communication thread, for the diagnosis of hangs.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// Number of collectives that are kept.
const N_ENTRIES: usize = 512;

/// Record of one collective.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RecordedCall {
    /// Number since the start; the same collective has the same number on all ranks.
    pub number: u64,
    /// Kind of the collective.
    pub collective: &'static str,
    /// Name of the unit, or subject of a collective without a unit.
    pub unit: String,
    /// Time of the start, in seconds since 1970.
    pub began_s: f64,
    /// Duration in milliseconds; `null` while the collective has not ended.
    pub took_ms: Option<f64>,
}

/// Ring buffer of the last collectives.
#[derive(Debug, Default)]
pub struct FlightRecorder {
    entries: Mutex<VecDeque<RecordedCall>>,
}

impl FlightRecorder {
    /// Records the start of `collective` of `unit`.
    pub fn begin(&self, number: u64, collective: &'static str, unit: &str) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() == N_ENTRIES {
            entries.pop_front();
        }
        entries.push_back(RecordedCall {
            number,
            collective,
            unit: unit.to_string(),
            began_s: now_s(),
            took_ms: None,
        });
    }

    /// Records the end of the last collective.
    pub fn end(&self) {
        if let Some(entry) = self.entries.lock().unwrap_or_else(PoisonError::into_inner).back_mut() {
            entry.took_ms = Some((now_s() - entry.began_s) * 1e3);
        }
    }

    /// Returns all entries that are kept, the oldest first.
    #[cfg(feature = "testing")]
    pub fn entries(&self) -> Vec<RecordedCall> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    /// Returns the newest entry.
    pub fn newest(&self) -> Option<RecordedCall> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).back().cloned()
    }

    /// Formats all entries, the oldest first, one JSON object per line.
    pub fn dump(&self) -> String {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        // Every field of an entry can be written as JSON.
        entries.iter().filter_map(|entry| Some(serde_json::to_string(entry).ok()? + "\n")).collect()
    }
}

fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_collectives_are_kept_and_one_has_not_ended() {
        let recorder = FlightRecorder::default();
        for number in 0..600 {
            recorder.begin(number, "gather", "blocks.0");
            if number < 599 {
                recorder.end();
            }
        }
        let dump = recorder.dump();
        assert_eq!(dump.lines().count(), N_ENTRIES);
        assert!(dump.lines().last().unwrap().contains("\"took_ms\":null"), "{dump}");
        assert_eq!(recorder.newest().unwrap().number, 599);
    }
}
