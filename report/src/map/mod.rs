//! Clusters of a data set on one self-contained HTML page: their images, their sizes, and the
//! number of images that are kept.

use augment::Rgb8;
use image::RgbImage;
use serde::Serialize;
use serde_json::json;

use crate::ReportError;
use crate::gallery::tile::Tile;
use crate::template::Page;

/// A map of clusters.
#[derive(Debug, Serialize)]
pub struct ClusterMap {
    /// Name of the data set.
    pub name: String,
    /// Number of images.
    pub n_images: usize,
    /// Number of images that are kept; `None` if nothing has been chosen.
    pub n_kept: Option<usize>,
    /// Number of clusters of each level, the lowest first.
    pub n_clusters: Vec<usize>,
    /// Sizes of clusters of the drawn level, spread evenly over all, the largest first, before and
    /// after the choice.
    pub sizes: Vec<[usize; 2]>,
    /// The level whose clusters are drawn, counted from 1 at the bottom.
    pub level: usize,
    /// The drawn clusters, the largest first.
    pub clusters: Vec<DrawnCluster>,
    /// Description of the clustering, in words.
    pub about: String,
}

/// A cluster with some of its images.
#[derive(Debug, Serialize)]
pub struct DrawnCluster {
    /// Index of the cluster in its level.
    #[serde(rename = "number")]
    pub index: u32,
    /// Number of its images.
    pub n_images: usize,
    /// Number of its images that are kept.
    pub n_kept: Option<usize>,
    /// The most frequent classes of its images, with their numbers of images.
    pub classes: Vec<(String, usize)>,
    /// Some of its images.
    pub tiles: Vec<MapTile>,
}

/// An image of a cluster.
#[derive(Debug, Serialize)]
pub struct MapTile {
    tile: Tile,
    /// Whether the image is kept.
    is_kept: Option<bool>,
}

impl MapTile {
    /// Creates the tile of `image`.
    ///
    /// # Errors
    /// [`ReportError::Encode`].
    pub fn new(image: Rgb8, caption: String, is_kept: Option<bool>) -> Result<Self, ReportError> {
        let pixels = RgbImage::from_raw(image.width_px, image.height_px, image.data)
            .ok_or_else(|| ReportError::Encode("an image has fewer pixels than its size says".into()))?;
        Ok(Self { tile: Tile::from_image(&pixels, caption)?, is_kept })
    }
}

/// Renders the page of `map`.
pub fn map_html(map: &ClusterMap) -> String {
    let data = json!({ "version": env!("CARGO_PKG_VERSION"), "map": map });
    let page = Page {
        title: "Ocelli clusters",
        style: include_str!("map.css"),
        tools: "",
        scripts: &[include_str!("map.js")],
    };
    page.render(&data)
}
