//! Ways to distribute a model over ranks, and those that fit into memory.

use ranks::topology::Sharding;
use trainer::Recipe;
use trainer::cost::ModelCost;
use trainer::estimate::{Memory, Placement, least_memory, memory, retention};

use super::flags::Args;
use super::hardware::{GB, Hardware};

/// Number of ranks over which the shards of a model are small compared with the weights that each
/// rank gathers.
const MANY_RANKS: usize = 1 << 12;

/// Largest group of ranks that divide prototypes which is considered: larger ones save little more.
pub(super) const LARGEST_GROUP: usize = 64;

/// Number of parameters above which a unit is divided, where that is considered.
const MAX_UNIT_PARAMETERS: usize = 100_000_000;

/// A model with divided units.
pub(super) struct DividedModel {
    pub(super) model: ModelCost,
    /// Largest number of parameters of a unit.
    pub(super) max_unit_parameters: usize,
}

impl DividedModel {
    /// Divides units of more than [`MAX_UNIT_PARAMETERS`], or of more than the largest part that
    /// cannot be divided, rounded up to two digits; `None` if no unit of `model` is as large.
    /// `divide` returns the model with a bound.
    pub(super) fn from_model(model: &ModelCost, divide: impl Fn(usize) -> Option<ModelCost>) -> Option<Self> {
        let largest = divide(MAX_UNIT_PARAMETERS)?.largest_unit();
        let round = 10_usize.pow(largest.max(1).ilog10().saturating_sub(1));
        let bound = MAX_UNIT_PARAMETERS.max(largest.next_multiple_of(round));
        if model.largest_unit() <= bound {
            return None;
        }
        Some(Self { model: divide(bound)?, max_unit_parameters: bound })
    }
}

/// One way to distribute a model over some ranks.
pub(super) struct PlanRow {
    pub(super) mode: &'static str,
    pub(super) placement: Placement,
    pub(super) fits: bool,
}

/// Returns a row for each mode with `world_size` ranks. Other settings are those of `args`, or else
/// of `recipe`.
pub(super) fn rows(
    args: &Args,
    model: &ModelCost,
    recipe: Option<&Recipe>,
    world_size: usize,
    rank_batch: usize,
    hardware: &Hardware,
) -> Vec<PlanRow> {
    let set_group = recipe.map(|recipe| recipe.run.shard_group).filter(|group| *group > 0);
    let group = args.group.or(set_group).unwrap_or(hardware.ranks_per_node);
    let set_micro_batches = recipe.map_or(1, |recipe| recipe.optim.micro_batches / world_size);
    let rank_micro_batches = args.rank_micro_batches.unwrap_or(set_micro_batches).clamp(1, rank_batch);
    let set_keep = args.keep.or(recipe.and_then(|recipe| recipe.run.keep));
    let set_segment = recipe.and_then(|recipe| recipe.run.segment);
    let mut modes = vec![("none", Sharding::None, 1)];
    if world_size > 1 {
        modes.push(("grad", Sharding::Grad, world_size));
        modes.push(("full", Sharding::Full, world_size));
        if group > 1 && group < world_size && world_size.is_multiple_of(group) {
            modes.push(("group", Sharding::Full, group));
        }
    }
    // Shard groups must be multiples of the groups that divide prototypes.
    let n_parts = model.n_parts();
    modes.retain(|(.., group_size)| n_parts == 1 || model.divides(n_parts, *group_size));
    let mut rows = Vec::new();
    for (mode, sharding, group_size) in modes {
        let workers = args.workers.min(rank_batch);
        let placement = Placement {
            world_size,
            group_size,
            sharding,
            keep: 0,
            segment: 1,
            rank_batch,
            rank_micro_batches,
            workers,
            precision: hardware.precision,
            exact_sums: recipe.is_none_or(|recipe| recipe.run.exact_sums),
            offload: false,
        };
        let (keep, segment) = retention(model, &placement, hardware.memory_bytes, set_keep, set_segment);
        let placement = Placement { keep: keep.min(model.trained.backbone.len()), segment, ..placement };
        let fits = memory(model, &placement).needed_bytes() <= hardware.memory_bytes;
        rows.push(PlanRow { mode, placement, fits });
    }
    rows
}

/// Returns whether a mode fits with `world_size` ranks and `rank_batch` images on each.
fn any_mode_fits(
    args: &Args,
    model: &ModelCost,
    recipe: Option<&Recipe>,
    world_size: usize,
    rank_batch: usize,
    hardware: &Hardware,
) -> bool {
    rows(args, model, recipe, world_size, rank_batch, hardware).iter().any(|row| row.fits)
}

/// Describes the changes with which a mode would fit.
pub(super) fn what_would_fit(
    args: &Args,
    model: &ModelCost,
    divided: Option<&DividedModel>,
    recipe: Option<&Recipe>,
    batch: usize,
    hardware: &Hardware,
) -> String {
    let mut text = format!("nothing fits into {:.1} GB per rank.", hardware.memory_bytes / GB);
    let largest = hardware.ranks.iter().copied().max().unwrap_or(1);
    for world_size in (0..14).map(|log| 1usize << log) {
        let rank_batch = args.images_per_rank(batch, world_size);
        if any_mode_fits(args, model, recipe, world_size, rank_batch, hardware) {
            text += &format!(" {world_size} ranks would fit.");
            break;
        }
    }
    for rank_batch in (1..args.images_per_rank(batch, largest)).rev() {
        if any_mode_fits(args, model, recipe, largest, rank_batch, hardware) {
            text += &format!(" {largest} ranks with {rank_batch} images each would fit.");
            break;
        }
    }
    let with_one_image = rows(args, model, recipe, largest, 1, hardware);
    let least = with_one_image.iter().map(|row| least_memory(model, &row.placement).needed_bytes());
    if let Some(least) = least.min_by(f64::total_cmp) {
        text += &format!(" With one image per rank, {largest} ranks take {:.1} GB each.", least / GB);
    }
    text + &describe_unsharded_memory(args, model, divided, recipe, hardware)
}

/// Returns the least memory of a rank over many ranks, with one image on each.
fn least_sharded_memory(
    args: &Args,
    model: &ModelCost,
    recipe: Option<&Recipe>,
    hardware: &Hardware,
) -> Option<Memory> {
    rows(args, model, recipe, MANY_RANKS, 1, hardware)
        .iter()
        .map(|row| least_memory(model, &row.placement))
        .min_by(|a, b| a.needed_bytes().total_cmp(&b.needed_bytes()))
}

/// Returns whether `model` fits over many ranks, with one image on each.
fn fits_when_sharded(args: &Args, model: &ModelCost, recipe: Option<&Recipe>, hardware: &Hardware) -> bool {
    let least = least_sharded_memory(args, model, recipe, hardware);
    least.is_some_and(|least| least.needed_bytes() <= hardware.memory_bytes)
}

/// Describes the memory that more ranks do not reduce, if that alone does not fit; empty if it
/// fits. `divided` is the model with divided units, if those of `model` are not and some are large.
fn describe_unsharded_memory(
    args: &Args,
    model: &ModelCost,
    divided: Option<&DividedModel>,
    recipe: Option<&Recipe>,
    hardware: &Hardware,
) -> String {
    let Some(least) = least_sharded_memory(args, model, recipe, hardware) else { return String::new() };
    if least.needed_bytes() <= hardware.memory_bytes {
        return String::new();
    }
    if let Some(divided) = divided
        && fits_when_sharded(args, &divided.model, recipe, hardware)
    {
        return format!(
            " No number of ranks is enough unless large units are split: set run.max_unit_parameters = {}.",
            divided.max_unit_parameters
        );
    }
    if model.n_parts() == 1
        && let Some(grouped) = model.divided(LARGEST_GROUP, MANY_RANKS)
        && fits_when_sharded(args, &grouped, recipe, hardware)
    {
        return format!(
            " No number of ranks is enough unless the prototypes are divided among them: see \
             method.prototype_group, up to {LARGEST_GROUP} here."
        );
    }
    format!(
        " No number of ranks is enough: even with sharded weights, each rank gathers whole units ({:.1} \
         GB at a time) and holds their gradients and activations ({:.1} GB for one image). Splitting \
         backbone units over ranks (tensor parallelism, over {:.0} ranks or more here) is not supported.",
        least.gathered_bytes / GB,
        least.pass_bytes() / GB,
        (least.needed_bytes() / hardware.memory_bytes).ceil()
    )
}
