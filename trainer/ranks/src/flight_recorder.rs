//! What a rank's communication thread did last, for the day it hangs.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// Collectives that are remembered.
const N_ENTRIES: usize = 512;

/// One collective.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Entry {
    /// Number since the start; the same collective has the same number on all ranks.
    pub number: u64,
    /// What it is.
    pub collective: &'static str,
    /// The unit, or what it is about.
    pub unit: String,
    /// When it began, in seconds since 1970.
    pub began_s: f64,
    /// How long it took; `null` while it has not ended.
    pub took_ms: Option<f64>,
}

/// A ring of the last collectives.
#[derive(Debug, Default)]
pub struct FlightRecorder {
    entries: Mutex<VecDeque<Entry>>,
}

impl FlightRecorder {
    /// Notes that `collective` of `unit` begins.
    pub fn begin(&self, number: u64, collective: &'static str, unit: &str) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() == N_ENTRIES {
            entries.pop_front();
        }
        entries.push_back(Entry {
            number,
            collective,
            unit: unit.to_string(),
            began_s: now_s(),
            took_ms: None,
        });
    }

    /// Notes that the last one has ended.
    pub fn end(&self) {
        if let Some(entry) = self.entries.lock().unwrap_or_else(PoisonError::into_inner).back_mut() {
            entry.took_ms = Some((now_s() - entry.began_s) * 1e3);
        }
    }

    /// All that are remembered, the oldest first.
    #[cfg(feature = "testing")]
    pub fn entries(&self) -> Vec<Entry> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    /// The newest entry.
    pub fn newest(&self) -> Option<Entry> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).back().cloned()
    }

    /// All entries, oldest first, one JSON object a line.
    pub fn dump(&self) -> String {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        // An entry has nothing that JSON cannot say.
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
    fn it_remembers_the_last_and_what_has_not_ended() {
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
