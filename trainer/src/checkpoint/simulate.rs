//! Simulation of a checkpoint that one number of ranks writes and another reads. Layouts, manifest
//! and reads of thousands of ranks are made in one process, by the code that makes them in a run,
//! without a tensor.

use std::time::Instant;

use networks::layout::UnitLayout;
use networks::params::{Init, ParamSpec};

use super::{UnitEntry, pieces};

/// Cost of a change of the number of ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Simulation {
    /// Number of units.
    pub n_units: usize,
    /// Bytes of the manifest's table of units.
    pub manifest_bytes: usize,
    /// Largest number of byte ranges that one rank reads of each of the four buffers.
    pub max_reads: usize,
    /// Largest number of files that one rank opens.
    pub max_files: usize,
    /// Share of the elements that is padding.
    pub padding: f64,
    /// Seconds that the simulation took.
    pub seconds: f64,
}

/// Shards units of these names and numbers of elements over `from` ranks and reads them on `to`
/// ranks. Every element must be read exactly once.
///
/// # Errors
/// A message in words if an element is not read exactly once: a bug in ocelli.
pub fn simulate(units: &[(String, usize)], from: usize, to: usize) -> Result<Simulation, String> {
    let start = Instant::now();
    let written: Vec<UnitLayout> = units.iter().map(|(name, numel)| layout(name, *numel, from)).collect();
    let read: Vec<UnitLayout> = units.iter().map(|(name, numel)| layout(name, *numel, to)).collect();
    let entries: Vec<UnitEntry> =
        written.iter().map(|layout| UnitEntry::new("network", layout, &[])).collect();
    let manifest_bytes = serde_json::to_vec(&entries).map_err(|error| error.to_string())?.len();
    let mut max_reads = 0;
    let mut max_files = 0;
    let mut n_read = vec![0usize; entries.len()];
    let mut ends = vec![0usize; entries.len()];
    for rank in 0..to {
        let mut n_reads = 0;
        let mut files = std::collections::BTreeSet::new();
        for (index, (entry, layout)) in entries.iter().zip(&read).enumerate() {
            for piece in pieces(layout.shard(rank, to), entry.numel, entry.padded / from) {
                let first = piece.file * (entry.padded / from) + piece.source.start;
                if first != ends[index] || piece.source.len() != piece.target.len() {
                    return Err(format!("{}: element {first} is not the next one", entry.name));
                }
                ends[index] = first + piece.source.len();
                n_read[index] += piece.source.len();
                n_reads += 1;
                files.insert(piece.file);
            }
        }
        max_reads = max_reads.max(n_reads);
        max_files = max_files.max(files.len());
    }
    if let Some((entry, n)) = entries.iter().zip(&n_read).find(|(entry, n)| entry.numel != **n) {
        return Err(format!("{}: {n} of {} elements are read", entry.name, entry.numel));
    }
    let numel: usize = read.iter().map(|unit| unit.numel).sum();
    let padded: usize = read.iter().map(|unit| unit.padded).sum();
    Ok(Simulation {
        n_units: entries.len(),
        manifest_bytes,
        max_reads,
        max_files,
        padding: (padded - numel) as f64 / padded as f64,
        seconds: start.elapsed().as_secs_f64(),
    })
}

/// Returns the layout of a unit of one parameter on `world_size` ranks.
fn layout(name: &str, numel: usize, world_size: usize) -> UnitLayout {
    let spec = ParamSpec::weight("weight", [numel], Init::Constant(0.0));
    UnitLayout::new(name, vec![spec], world_size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_of_ranks_reshard() {
        for (numel, from, to) in
            [(1_774_464, 1024, 4096), (201_000_000, 4096, 1024), (331_000_000, 1000, 4096)]
        {
            let units: Vec<(String, usize)> =
                (0..40).map(|i| (format!("unit{i}"), numel + 100 * i)).collect();
            let simulation = simulate(&units, from, to).unwrap();
            assert!(simulation.n_units > 10 && simulation.padding < 0.3, "{simulation:?}");
        }
    }
}
