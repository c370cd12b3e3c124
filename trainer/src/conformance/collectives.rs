//! Collectives of a step: the estimates of plans against measured traffic.
//!
//! The numbers of all collectives must match, except those of exchanges within column groups, and
//! so must their bytes, except those of statistics over the batch.

use std::collections::BTreeSet;

use ranks::fixed::N_LIMBS;

use super::columns::{divided, dividing};
use super::methods::on_ranks;
use super::{batch, pair, plans};
use crate::Plan;
use crate::bench::noise::rank_share;
use crate::cost::model_cost;
use crate::estimate::{Placement, traffic};
use crate::optim::state::UnitShard;

/// Votes on which ranks agree at the end of a step.
const N_VOTES: usize = 6;

/// Overrides that select a mode of sharding, and numbers of ranks.
const MODES: [(&[&str], usize); 5] =
    [(&[], 2), (&[], 4), (&["run.shard='grad'"], 4), (&["run.shard='none'"], 4), (&["run.shard_group=2"], 4)];

#[test]
fn estimates_equal_the_collectives_of_a_step() {
    for (overrides, world_size) in MODES {
        let mut n_exact = 0;
        for plan in plans(overrides) {
            n_exact += usize::from(check_estimate(&plan, world_size));
        }
        assert!(n_exact > 0, "a plan without statistics over the batch");
    }
}

/// Covers heads whose columns are divided, with shard groups of all ranks and of some.
#[test]
fn estimates_equal_the_collectives_of_divided_heads() {
    for (overrides, world_size) in [(&[][..], 2), (&[], 4), (&["run.shard_group=2"], 4)] {
        for plan in dividing(overrides) {
            check_estimate(&divided(&plan, 2).unwrap(), world_size);
        }
    }
}

/// Returns the number of parameters of a unit; slices of one parameter count once.
fn n_parameters(shard: &UnitShard) -> usize {
    let names: BTreeSet<String> =
        shard.layout.params.iter().map(|slot| shard.layout.full_name(slot)).collect();
    names.len()
}

/// Checks the estimate of `plan` against the traffic of a step. Returns whether the estimate
/// includes all bytes.
fn check_estimate(plan: &Plan, world_size: usize) -> bool {
    let model = model_cost(plan).unwrap();
    let ranks = on_ranks(plan, world_size, |plan, mut trainer| {
        let share = rank_share(batch(plan, 0), trainer.topology());
        let before = trainer.comm.traffic().unwrap();
        let report = trainer.step(&share, &plan.schedules().at(3)).unwrap();
        let counted = trainer.comm.traffic().unwrap().since(before);
        // The loss, gauges, and a norm for each parameter, in fixed point.
        let n_params: usize = trainer.trained().iter().map(n_parameters).sum();
        let n_fixed = 1 + report.gauges.len() + n_params;
        (Placement::from_plan(plan), counted, 8 * (N_LIMBS * n_fixed + N_VOTES))
    });
    let mut has_all = true;
    for (placement, counted, agreed_bytes) in ranks {
        let planned = traffic(&model, &placement);
        let context = format!("{world_size} ranks, {:?}: {}", placement.sharding, pair(plan));
        assert_eq!(counted.n_other, planned.n_other as u64, "{context}");
        assert_eq!(counted.n_gathers, planned.n_gathers as u64, "{context}");
        assert_eq!(counted.n_reduces, planned.n_reduces as u64, "{context}");
        // Estimates leave out numbers of rows, and use the expected number of masked cells.
        let has_masks = plan.method().unwrap().masks().is_some();
        assert!(counted.column_bytes >= planned.column_bytes as u64 || has_masks, "{}", pair(plan));
        assert_eq!(counted.n_column > 0, planned.column_bytes > 0.0, "{}", pair(plan));
        assert_eq!(counted.gather_bytes, planned.gather_bytes as u64, "{context}");
        assert_eq!(counted.reduce_bytes, (planned.reduce_bytes + planned.replica_bytes) as u64, "{context}");
        let other_bytes = (agreed_bytes + planned.other_bytes as usize) as u64;
        // Estimates leave out the bytes of statistics over the batch.
        has_all &= planned.n_statistics == 0;
        if has_all {
            assert_eq!(counted.other_bytes, other_bytes, "{context}");
        } else {
            assert!(counted.other_bytes > other_bytes, "{}", pair(plan));
        }
    }
    has_all
}
