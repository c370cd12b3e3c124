//! What a run's network makes of a few images, as sheets of tiles.

mod attention;
mod neighbors;
mod patches;
mod principal;
pub(crate) mod quarantine;
mod sheet;
pub(crate) mod tile;
mod views;

use std::sync::Arc;

use augment::MultiCrop;
use eval::{ImageSet, Table};
use networks::Network;
use serde::Serialize;
use sheet::Sheet;

use crate::ReportError;

/// The pictures of a run.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Gallery {
    /// The set that the images are from.
    pub set: String,
    /// The network, its step, and how it sees images.
    pub seen_by: String,
    /// Images among which neighbors were looked for.
    n_candidates: usize,
    /// The first three principal components of patch features as colors.
    patches: Sheet,
    /// What class tokens attend to; empty for a backbone without.
    attention: Sheet,
    /// Images with those whose features are most similar.
    neighbors: Sheet,
    /// Images with their augmented views.
    views: Sheet,
}

/// What is drawn.
#[derive(Debug, Clone, Copy)]
pub struct GalleryRules<'a> {
    /// Images of each sheet.
    pub n_images: usize,
    /// The views that the run makes.
    pub multicrop: &'a MultiCrop,
    /// The run's seed.
    pub seed: u64,
}

impl Gallery {
    /// Draws what `network` makes of `images`, whose features are `table`; neighbors are sought among all of them.
    ///
    /// # Errors
    /// [`ReportError::Eval`] when images cannot be read or do not fit the network, [`ReportError::Encode`].
    pub fn of(
        network: &Network,
        images: &ImageSet,
        table: Arc<Table>,
        rules: GalleryRules<'_>,
    ) -> Result<Self, ReportError> {
        let shown = images.spread(rules.n_images);
        Ok(Self {
            set: images.name.clone(),
            seen_by: String::new(),
            n_candidates: images.len(),
            patches: patches::sheet(network, &shown)?,
            attention: attention::sheet(network, &shown)?,
            neighbors: neighbors::sheet(images, table, rules.n_images)?,
            views: views::sheet(&shown, rules.multicrop, rules.seed)?,
        })
    }
}
