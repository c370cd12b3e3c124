//! Changes with which a run would fit into the memory of its ranks.

use super::advice::LARGEST_GROUP;
use super::divided::DividedModel;
use super::planner::Planner;
use super::{Memory, least_memory};

/// Bytes of a gigabyte.
const GB: f64 = 1e9;

/// Number of ranks over which the shards of a model are small compared with the weights that each
/// rank gathers.
const MANY_RANKS: usize = 1 << 12;

impl Planner<'_> {
    /// Describes the changes with which a mode would fit, where none does with any of `ranks`:
    /// sentences of an error. `divided` is the model with divided units, if those of the model are
    /// not and some are large.
    pub fn what_would_fit(&self, ranks: &[usize], divided: Option<&DividedModel>) -> String {
        let mut text = format!("nothing fits into {:.1} GB per rank.", self.hardware.memory_bytes / GB);
        let largest = ranks.iter().copied().max().unwrap_or(1);
        for world_size in (0..14).map(|log| 1usize << log) {
            if self.any_mode_fits(world_size, self.settings.images_per_rank(world_size)) {
                text += &format!(" {world_size} ranks would fit.");
                break;
            }
        }
        for rank_batch in (1..self.settings.images_per_rank(largest)).rev() {
            if self.any_mode_fits(largest, rank_batch) {
                text += &format!(" {largest} ranks with {rank_batch} images each would fit.");
                break;
            }
        }
        let with_one_image = self.candidates(largest, 1);
        let least = with_one_image
            .iter()
            .map(|candidate| least_memory(self.model, &candidate.placement).needed_bytes());
        if let Some(least) = least.min_by(f64::total_cmp) {
            text += &format!(" With one image per rank, {largest} ranks take {:.1} GB each.", least / GB);
        }
        text + &self.describe_unsharded_memory(divided)
    }

    /// Returns whether a mode fits with `world_size` ranks and `rank_batch` images on each.
    fn any_mode_fits(&self, world_size: usize, rank_batch: usize) -> bool {
        self.candidates(world_size, rank_batch).iter().any(|candidate| candidate.fits)
    }

    /// Returns the least memory of a rank over many ranks, with one image on each.
    fn least_sharded_memory(&self) -> Option<Memory> {
        self.candidates(MANY_RANKS, 1)
            .iter()
            .map(|candidate| least_memory(self.model, &candidate.placement))
            .min_by(|a, b| a.needed_bytes().total_cmp(&b.needed_bytes()))
    }

    /// Returns whether the model fits over many ranks, with one image on each.
    fn fits_when_sharded(&self) -> bool {
        let least = self.least_sharded_memory();
        least.is_some_and(|least| least.needed_bytes() <= self.hardware.memory_bytes)
    }

    /// Describes the memory that more ranks do not reduce, if that alone does not fit; empty if it
    /// fits.
    fn describe_unsharded_memory(&self, divided: Option<&DividedModel>) -> String {
        let Some(least) = self.least_sharded_memory() else { return String::new() };
        if least.needed_bytes() <= self.hardware.memory_bytes {
            return String::new();
        }
        if let Some(divided) = divided
            && (Planner { model: &divided.model, ..*self }).fits_when_sharded()
        {
            return format!(
                " No number of ranks is enough unless large units are split: set run.max_unit_parameters = \
                 {}.",
                divided.max_unit_parameters
            );
        }
        if self.model.n_parts() == 1
            && let Some(grouped) = self.model.divided(LARGEST_GROUP, MANY_RANKS)
            && (Planner { model: &grouped, ..*self }).fits_when_sharded()
        {
            return format!(
                " No number of ranks is enough unless the prototypes are divided among them: see \
                 method.prototype_group, up to {LARGEST_GROUP} here."
            );
        }
        format!(
            " No number of ranks is enough: even with sharded weights, each rank gathers whole units \
             ({:.1} GB at a time) and holds their gradients and activations ({:.1} GB for one image). \
             Splitting backbone units over ranks (tensor parallelism, over {:.0} ranks or more here) is not \
             supported.",
            least.gathered_bytes / GB,
            least.pass_bytes() / GB,
            (least.needed_bytes() / self.hardware.memory_bytes).ceil()
        )
    }
}
