//! Choice of the units that keep their graphs, so that a step fits into a rank's memory.

use super::{Memory, Placement, memory};
use crate::cost::{ModelCost, model_cost};
use crate::error::TrainError;
use crate::recipe::plan::{Plan, RankResources};

/// Returns `plan` with as many units that keep their graph as fit into `room`, where its recipe
/// leaves that open.
///
/// # Errors
/// [`TrainError::Recipe`] when the method cannot be built, or when far more memory is needed than
/// there is.
pub fn fit(mut plan: Plan, room: RankResources) -> Result<Plan, TrainError> {
    let model = model_cost(&plan)?;
    let placement = Placement { is_gpu: room.is_gpu, ..Placement::from_plan(&plan) };
    let run = &plan.recipe.run;
    (plan.keep, plan.segment) = retention(&model, &placement, room.bytes, run.keep, run.segment);
    let placement = Placement { keep: plan.keep, segment: plan.segment, ..placement };
    let peak_bytes = memory(&model, &placement).peak_bytes();
    if peak_bytes > MAX_OVERCOMMIT * room.bytes {
        let reason = format!(
            "not enough memory: a rank needs about {:.1} GB and has {:.1} GB; use fewer images per step \
             (optim.batch_size), a smaller model, more \
             ranks, or optim.micro_batches; `ocelli plan` shows what fits",
            peak_bytes / 1e9,
            room.bytes / 1e9
        );
        return Err(TrainError::Recipe { recipe: plan.recipe.name.clone(), reason });
    }
    Ok(plan)
}

/// Lengths of segments from which one is chosen.
const SEGMENTS: [usize; 9] = [1, 2, 3, 4, 6, 8, 12, 16, 24];

/// Number of kept graphs up to which every number is tried: among the last, large units fewer kept
/// graphs may take more memory, because the weights of a unit that keeps its graph need no buffer
/// of the pool.
const MAX_TRIED: usize = 64;

/// Multiple of the rank's memory above which a plan is refused. The margin allows for memory that
/// other processes free, and for errors of the estimate.
const MAX_OVERCOMMIT: f64 = 1.5;

/// Returns how many units keep their graph, and how many of the others are computed again together,
/// so that a step fits into `bytes` of a rank's memory: the shortest segments with which it fits at
/// all, because longer ones take more time, and then as many graphs as fit. `keep` and `segment`
/// are not to be chosen if they are given.
pub fn retention(
    model: &ModelCost,
    placement: &Placement,
    bytes: f64,
    keep: Option<usize>,
    segment: Option<usize>,
) -> (usize, usize) {
    let n_units = model.trained.backbone.len();
    let lengths: Vec<usize> = match segment {
        Some(segment) => vec![segment],
        // Beyond the root of the number of units, inputs within a segment are more than those of
        // all segments.
        None => SEGMENTS.into_iter().filter(|length| *length == 1 || length * length <= n_units).collect(),
    };
    for length in &lengths {
        let placement = Placement { segment: *length, ..*placement };
        let fitting = match keep {
            Some(keep) => (needed_bytes(model, &placement, keep) <= bytes).then_some(keep),
            None => max_kept_graphs(model, &placement, bytes),
        };
        if let Some(keep) = fitting {
            return (keep, *length);
        }
    }
    // Nothing fits: what needs the least.
    let mut least_bytes = f64::INFINITY;
    let mut least = (keep.unwrap_or(0), 1);
    for length in lengths {
        let placement = Placement { segment: length, ..*placement };
        let n_kept = keep.unwrap_or_else(|| least_kept_graphs(model, &placement));
        let bytes = needed_bytes(model, &placement, n_kept);
        if bytes < least_bytes {
            least_bytes = bytes;
            least = (n_kept, length);
        }
    }
    least
}

/// Returns the memory of a rank with as many kept graphs as take the least.
pub fn least_memory(model: &ModelCost, placement: &Placement) -> Memory {
    memory(model, &Placement { keep: least_kept_graphs(model, placement), ..*placement })
}

fn least_kept_graphs(model: &ModelCost, placement: &Placement) -> usize {
    (0..=n_tried(model))
        .min_by(|a, b| needed_bytes(model, placement, *a).total_cmp(&needed_bytes(model, placement, *b)))
        .unwrap_or(0)
}

fn needed_bytes(model: &ModelCost, placement: &Placement, keep: usize) -> f64 {
    memory(model, &Placement { keep, ..*placement }).needed_bytes()
}

/// Returns the largest number of kept graphs up to which every number is tried.
fn n_tried(model: &ModelCost) -> usize {
    model.trained.backbone.len().min(MAX_TRIED)
}

/// Returns the largest number of units that can keep their graph within `bytes` of a rank's memory;
/// `None` if no number fits.
fn max_kept_graphs(model: &ModelCost, placement: &Placement, bytes: f64) -> Option<usize> {
    let n_units = model.trained.backbone.len();
    if needed_bytes(model, placement, n_units) <= bytes {
        return Some(n_units);
    }
    let n_tried = n_tried(model);
    let most = (0..=n_tried).rev().find(|keep| needed_bytes(model, placement, *keep) <= bytes)?;
    if most < n_tried {
        return Some(most);
    }
    let more: Vec<usize> = (most + 1..n_units).collect();
    Some(most + more.partition_point(|keep| needed_bytes(model, placement, *keep) <= bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::UnitCost;

    /// Fewer kept graphs may take more memory, because weights of kept units need no buffers of the
    /// pool.
    #[test]
    fn the_number_with_which_a_step_fits_is_found() {
        let mut units = Vec::new();
        for numel in [128_000, 128_000, 5_120_000, 5_120_000, 5_120_000] {
            units.push(UnitCost { numel, ..UnitCost::empty("unit") });
        }
        let model = ModelCost::with_backbone(units);
        let placement = Placement::one_image_each(2);
        let needed: Vec<f64> = (0..=5).map(|keep| needed_bytes(&model, &placement, keep)).collect();
        assert!(needed[2] < needed[0] && needed[2] < needed[1], "{needed:?}");
        let least = needed.iter().copied().fold(f64::INFINITY, f64::min);
        assert_eq!(least_memory(&model, &placement).needed_bytes(), least);
        for bytes in &needed {
            let (keep, _) = retention(&model, &placement, *bytes, None, Some(1));
            let most = (0..=5).rev().find(|keep| needed[*keep] <= *bytes);
            assert_eq!(Some(keep), most, "{bytes} of {needed:?}");
        }
        let (keep, _) = retention(&model, &placement, 0.9 * least, None, Some(1));
        assert_eq!(needed[keep], least, "where nothing fits");
    }
}
