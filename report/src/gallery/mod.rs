//! Pictures of a network's features of a few images, as sheets of tiles.

mod attention;
mod drawn;
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

/// The pictures of a network.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Gallery {
    /// Name of the set that the images are from.
    pub set: String,
    /// Description of the network, its step, and its transform of images.
    pub network_description: String,
    /// Number of images among which neighbors were searched.
    n_candidates: usize,
    /// The first three principal components of patch features as colors.
    patches: Sheet,
    /// Attention of class tokens; empty for a backbone without class token.
    attention: Sheet,
    /// Images with the images whose features are most similar.
    neighbors: Sheet,
    /// Images with their augmented views.
    views: Sheet,
}

/// Rules for drawing a [`Gallery`].
#[derive(Debug, Clone, Copy)]
pub struct GalleryOptions<'a> {
    /// Number of images of each sheet.
    pub n_images: usize,
    /// Views that the run draws; `None` for weights, which belong to no run.
    pub multicrop: Option<&'a MultiCrop>,
    /// Seed of the run's views.
    pub seed: u64,
}

impl Gallery {
    /// Draws the pictures of `network` on `images`, whose features are `table`; all of them are
    /// searched for neighbors.
    ///
    /// # Errors
    /// [`ReportError::Eval`] when images cannot be read or do not fit the network,
    /// [`ReportError::Encode`].
    pub fn new(
        network: &Network,
        images: &ImageSet,
        table: Arc<Table>,
        rules: GalleryOptions<'_>,
    ) -> Result<Self, ReportError> {
        let shown = images.spread(rules.n_images);
        let views = match rules.multicrop {
            Some(multicrop) => views::sheet(&shown, multicrop, rules.seed)?,
            None => Sheet::default(),
        };
        Ok(Self {
            set: images.name.clone(),
            network_description: String::new(),
            n_candidates: images.len(),
            patches: patches::sheet(network, &shown)?,
            attention: attention::sheet(network, &shown)?,
            neighbors: neighbors::sheet(images, table, rules.n_images)?,
            views,
        })
    }
}
