//! Collectives of a step, as plans count them and as they are counted.

use std::collections::BTreeSet;

use ranks::fixed::N_LIMBS;

use super::columns::{divided, dividing};
use super::methods::on_ranks;
use super::{batch, pair, plans};
use crate::Plan;
use crate::bench::shard::rank_share;
use crate::estimate::{Placement, n_statistics, of_plan, traffic};
use crate::optim::state::UnitShard;

/// Votes on which ranks agree at the end of a step.
const N_VOTES: usize = 6;

/// Modes of sharding, and numbers of ranks.
const MODES: [(&[&str], usize); 5] =
    [(&[], 2), (&[], 4), (&["run.shard='grad'"], 4), (&["run.shard='none'"], 4), (&["run.shard_group=2"], 4)];

#[test]
fn plans_count_the_collectives_of_a_step() {
    for (overrides, world_size) in MODES {
        let n_exact: usize =
            plans(overrides).iter().map(|plan| usize::from(is_exact(plan, world_size))).sum();
        assert!(n_exact > 0, "a plan without statistics over the batch");
    }
}

/// Heads whose columns are divided, with shard groups of all ranks and of some.
#[test]
fn plans_count_the_collectives_of_divided_heads() {
    for (overrides, world_size) in [(&[][..], 2), (&[], 4), (&["run.shard_group=2"], 4)] {
        for plan in dividing(overrides) {
            is_exact(&divided(&plan, 2).unwrap(), world_size);
        }
    }
}

/// Compares a step of `plan` with its estimate; returns whether that has all bytes.
fn is_exact(plan: &Plan, world_size: usize) -> bool {
    let model = of_plan(plan).unwrap();
    let ranks = on_ranks(plan, world_size, |plan, mut trainer| {
        let share = rank_share(batch(plan, 0), trainer.topology());
        let before = trainer.comm.traffic().unwrap();
        let report = trainer.step(&share, &plan.schedules().at(3)).unwrap();
        let counted = trainer.comm.traffic().unwrap().since(before);
        // The loss, gauges, and a norm for each parameter, in fixed point.
        let names = |shard: &UnitShard| -> BTreeSet<String> {
            shard.layout.params.iter().map(|slot| shard.layout.full_name(slot)).collect()
        };
        let n_params: usize = trainer.trained().iter().map(|shard| names(shard).len()).sum();
        let n_fixed = 1 + report.gauges.len() + n_params;
        (Placement::of(plan), counted, 8 * (N_LIMBS * n_fixed + N_VOTES))
    });
    let mut has_all = true;
    for (placement, counted, agreed_bytes) in ranks {
        let planned = traffic(&model, &placement);
        let equal = |n: u64, planned: usize| {
            assert_eq!(n, planned as u64, "{world_size} ranks, {:?}: {}", placement.sharding, pair(plan))
        };
        equal(counted.n_other, planned.n_other);
        equal(counted.n_gathers, planned.n_gathers);
        equal(counted.n_reduces, planned.n_reduces);
        // Estimates leave out numbers of rows, and know the expected number of masked cells.
        let has_masks = plan.method().unwrap().masks().is_some();
        assert!(counted.column_bytes >= planned.column_bytes as u64 || has_masks, "{}", pair(plan));
        assert_eq!(counted.n_column > 0, planned.column_bytes > 0.0, "{}", pair(plan));
        equal(counted.gather_bytes, planned.gather_bytes as usize);
        equal(counted.reduce_bytes, (planned.reduce_bytes + planned.replica_bytes) as usize);
        let other_bytes = agreed_bytes + planned.other_bytes as usize;
        // Estimates leave out the bytes of statistics over the batch.
        has_all &= n_statistics(&model) == 0;
        if has_all {
            equal(counted.other_bytes, other_bytes)
        } else {
            assert!(counted.other_bytes > other_bytes as u64, "{}", pair(plan))
        }
    }
    has_all
}
