//! Choice of the units that keep their graphs, so that a step fits into a rank's memory.

use super::{ModelCost, Placement, memory, of_plan};
use crate::error::TrainError;
use crate::recipe::plan::{Plan, RankResources};

/// Returns `plan` with as many units that keep their graph as fit into `room`, where its recipe leaves that open.
///
/// # Errors
/// [`TrainError::Recipe`] when the method cannot be built, or when far more memory is needed than there is.
pub fn fit(mut plan: Plan, room: RankResources) -> Result<Plan, TrainError> {
    let (model, placement) = (of_plan(&plan)?, Placement::of(&plan));
    let set = [plan.recipe.run.keep, plan.recipe.run.segment];
    (plan.keep, plan.segment) = retention(&model, &placement, room.bytes, set);
    let keep = plan.keep.min(model.trained.backbone.len());
    let peak_bytes = memory(&model, &Placement { keep, segment: plan.segment, ..placement }).peak_bytes();
    if peak_bytes > MAX_OVERCOMMIT * room.bytes {
        let reason = format!(
            "a rank would need about {:.1} GB and has {:.1} GB: fewer images a step (optim.batch_size), a smaller model, more \
             ranks, or optim.micro_batches; `ocelli plan` says what would fit",
            peak_bytes / 1e9,
            room.bytes / 1e9
        );
        return Err(TrainError::Recipe { recipe: plan.recipe.name.clone(), reason });
    }
    Ok(plan)
}

/// Lengths of segments from which one is chosen.
const SEGMENTS: [usize; 9] = [1, 2, 3, 4, 6, 8, 12, 16, 24];

/// Multiple of the rank's memory above which a plan is refused. The margin allows for memory that other processes
/// free, and for errors of the estimate.
const MAX_OVERCOMMIT: f64 = 1.5;

/// Returns how many units keep their graph, and how many of the others are computed again together, so that a step fits into `bytes` of a
/// rank's memory: the shortest segments with which it fits at all, because longer ones take more time, and then as many graphs as fit. `set`
/// has the numbers that are not to be chosen.
pub fn retention(
    model: &ModelCost,
    placement: &Placement,
    bytes: f64,
    [keep, segment]: [Option<usize>; 2],
) -> (usize, usize) {
    let n_units = model.trained.backbone.len();
    let graphs = |segment: usize| {
        let placement = Placement { segment, ..*placement };
        match keep {
            Some(keep) => {
                let placement = Placement { keep: keep.min(n_units), ..placement };
                (memory(model, &placement).needed_bytes() <= bytes).then_some(keep)
            }
            None => max_kept_graphs(model, &placement, bytes),
        }
    };
    let lengths: Vec<usize> = match segment {
        Some(segment) => vec![segment],
        // Beyond the root of the number of units, inputs within a segment are more than those of all segments.
        None => SEGMENTS.into_iter().filter(|length| *length == 1 || length * length <= n_units).collect(),
    };
    let fitting = lengths.iter().find_map(|length| Some((graphs(*length)?, *length)));
    fitting.unwrap_or_else(|| {
        let peak = |length: &usize| {
            let placement =
                Placement { keep: keep.unwrap_or(0).min(n_units), segment: *length, ..*placement };
            memory(model, &placement).needed_bytes()
        };
        let least = lengths.iter().min_by(|a, b| peak(a).total_cmp(&peak(b)));
        (keep.unwrap_or(0), least.copied().unwrap_or(1))
    })
}

/// Returns the largest number of units that can keep their graph within `bytes` of a rank's memory; `None` if even 0
/// does not fit.
fn max_kept_graphs(model: &ModelCost, placement: &Placement, bytes: f64) -> Option<usize> {
    let fits = |keep: usize| memory(model, &Placement { keep, ..*placement }).needed_bytes() <= bytes;
    let n_units = model.trained.backbone.len();
    if fits(n_units) {
        return Some(n_units);
    }
    // None may take more than one: weights of a unit that keeps its graph need no buffer of the pool. Beyond that, more graphs take
    // more memory; there may be thousands of units.
    let least = [0, 1].into_iter().find(|keep| fits(*keep))?;
    let (mut most, mut too_many) = (least, n_units);
    while most + 1 < too_many {
        let keep = usize::midpoint(most, too_many);
        if fits(keep) { most = keep } else { too_many = keep }
    }
    Some(most)
}
