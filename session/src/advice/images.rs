//! Number and size of the images that a recipe is chosen for.

use augment::facts::facts;
use pipeline::{Dataset, SampleId};

/// Number of images whose headers are read.
const N_INSPECTED: u64 = 64;

/// Number and size of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Images {
    /// Number of all.
    pub(super) n: u64,
    /// Median of the short sides of those that were inspected, in pixels; `None` if shards would
    /// have to be fetched for it, or no header can be read.
    pub(super) side_px: Option<u32>,
}

impl Images {
    /// Inspects a few images of `dataset`, evenly spread.
    pub(super) fn inspect(dataset: &Dataset) -> Self {
        let n = dataset.n_samples();
        let mut sides_px = Vec::new();
        if dataset.is_local() {
            for id in dataset.spread(N_INSPECTED) {
                sides_px.extend(short_side(dataset, id));
            }
        }
        sides_px.sort_unstable();
        Self { n, side_px: sides_px.get(sides_px.len() / 2).copied() }
    }
}

/// Returns the short side of an image, by its header.
fn short_side(dataset: &Dataset, id: SampleId) -> Option<u32> {
    let sample = dataset.read(id).ok()?;
    let facts = facts(sample.image.files().first()?).ok()?;
    Some(facts.width_px.min(facts.height_px))
}
