use std::sync::Arc;

use pipeline::{Cursor, Share};
use trainer::run::data::batches;
use trainer::{Plan, Recipe};

use crate::support::{TINY, World};
use pipeline::shard::sidecar;

fn plan(threads: usize, n_samples: u64) -> Plan {
    let settings = [format!("run.data_threads={threads}"), "data.max_bad_rate=0.5".into()];
    let recipe = Recipe::parse(TINY, "tiny", &settings).unwrap();
    trainer::resolve(recipe, n_samples).unwrap()
}

/// Address of a sample, by which a run finds its label, and its views by group.
type Sample = (u64, Vec<Vec<u8>>);

/// Returns the samples of global batches `first..first + n`, gathered from all ranks in the order
/// of positions.
fn samples(world: &World, ranks: usize, threads: usize, first: u64, n: u64) -> Vec<Sample> {
    let dataset = world.dataset();
    let plan = plan(threads, dataset.n_samples());
    let mut global = vec![(0, Vec::new()); (n * 8) as usize];
    for rank in 0..ranks {
        let share = Share::new(rank, ranks, 8).unwrap();
        let ledger = world.path(&format!("ledger-{rank}"));
        let mut pool = batches(Arc::clone(&dataset), &plan, share, Cursor(first), &ledger).unwrap();
        for g in 0..n {
            let batch = pool.next_batch().unwrap().unwrap();
            assert_eq!(batch.index, first + g);
            let samples = batch.sample_ids.into_iter().zip(batch.samples);
            for (slot, (sample_id, views)) in samples.enumerate() {
                global[(g * 8) as usize + slot * ranks + rank] = (sample_id, views.groups);
            }
        }
    }
    global
}

#[test]
fn batches_are_equal_for_any_ranks_threads_and_restarts() {
    let world = World::new(50);
    let reference = samples(&world, 1, 1, 0, 64);
    assert!(reference.windows(2).all(|pair| pair[0].1 != pair[1].1), "samples differ from one another");
    for ranks in [1, 2, 4] {
        for threads in [1, 3, 8] {
            assert_eq!(samples(&world, ranks, threads, 0, 64), reference, "{ranks} ranks, {threads} threads");
        }
    }
    for first in 1..63 {
        let resumed = samples(&world, 2, 2, first, 2);
        assert_eq!(resumed, reference[first as usize * 8..][..16], "resumed at {first}");
    }
}

/// If every fifth image is damaged, each of them is recorded in the ledger once, and substitutes
/// are equal for any number of ranks and threads.
#[test]
fn substitutes_of_bad_samples_do_not_depend_on_ranks_and_threads() {
    let world = World::new(40);
    let mut bytes = std::fs::read(world.shard()).unwrap();
    let index = sidecar::build(&world.shard()).unwrap();
    for i in (0..40).step_by(5) {
        let start = index.member(i, &["jpg"]).unwrap().offset_bytes as usize;
        bytes[start..start + 64].fill(0);
    }
    std::fs::write(world.shard(), bytes).unwrap();
    let reference = samples(&world, 1, 1, 0, 10);
    let ledger = std::fs::read_to_string(world.path("ledger-0")).unwrap();
    assert_eq!(ledger.lines().count(), 8, "{ledger}");
    assert_eq!(samples(&world, 2, 3, 0, 10), reference);
    let distinct: std::collections::HashSet<_> = reference.iter().map(|(_, views)| views).collect();
    assert_eq!(distinct.len(), reference.len(), "substitutes have their own views");
}
