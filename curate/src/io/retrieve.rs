//! Retrieval: the images that are most similar to given ones.

use std::collections::HashMap;

use kernels::rows::Rows;
use prep::parts::{Share, Work};
use ranks::communicator::Communicator;
use serde_json::json;

use super::clusters::{ClusterObserver, ClusterSettings};
use super::comparison::Comparison;
use super::input::Input;
use super::job::Job;
use super::lists::{Columns, six_digits};
use super::output::OutputFolder;
use crate::CurateError;
use crate::selection::{Retrieved, from_clusters, join_nearest, nearest_images, nearest_in_blocks};

/// Settings of a retrieval.
#[derive(Debug, Clone)]
pub struct Retrieval {
    /// Number of images to retrieve per given image.
    pub count: usize,
    /// Whether random images of the cluster of a given image are retrieved instead of the nearest
    /// ones. Such a retrieval cannot be done in parts.
    pub by_cluster: bool,
    /// Settings of clusters.
    pub clusters: ClusterSettings,
}

/// Images that were retrieved.
pub struct RetrievedImages {
    /// Whether each image is kept.
    pub kept: Vec<bool>,
    by_row: HashMap<u32, Retrieved>,
}

impl Retrieval {
    /// Returns the job of retrieving images that are similar to `like`.
    pub fn job(&self, like: &Input, work: Work) -> Job {
        let settings = json!({
            "like": like.identity, "count": self.count,
            "by": if self.by_cluster { "Cluster" } else { "Image" },
            "clusters": self.clusters.identity(),
        });
        Job { verb: "retrieve", settings, work }
    }

    /// Retrieves the images, or joins the results of parts; a part saves its result. All ranks call
    /// it.
    ///
    /// # Errors
    /// [`CurateError`] if clusters cannot be computed, rows are not finite, or results cannot be
    /// saved or joined.
    pub fn run(
        &self,
        comparison: &Comparison<'_>,
        output: &OutputFolder<'_>,
        ranks: &Communicator,
        observer: &dyn ClusterObserver,
    ) -> Result<Share<Vec<Retrieved>>, CurateError> {
        comparison.check_rows(ranks)?;
        let rows = &comparison.input.rows;
        let others = &comparison.like.rows;
        let count = self.count;
        if self.by_cluster {
            let clusters = self.clusters.run(rows, output.folder(), ranks, observer)?;
            let parents = clusters.tree.parents(0);
            let seed = self.clusters.kmeans.seed;
            let retrieved = from_clusters(rows, others, &clusters.centers[0], parents, count, seed)?;
            return Ok(Share::All(retrieved));
        }
        if comparison.work == Work::Whole {
            return Ok(Share::All(nearest_images(rows, others, count, ranks, observer)?));
        }
        let share = comparison.compare_in_parts(
            |n_rows| others.len() * count.min(n_rows),
            |blocks| nearest_in_blocks(rows, blocks, others, count, observer),
        )?;
        Ok(match share {
            Share::All(retrieved) => Share::All(join_nearest(retrieved, count)),
            saved => saved,
        })
    }
}

impl RetrievedImages {
    /// Returns the images that are kept of `n_rows`: those that were retrieved.
    pub fn new(retrieved: &[Retrieved], n_rows: usize) -> Self {
        let by_row: HashMap<u32, Retrieved> = retrieved.iter().map(|image| (image.row, *image)).collect();
        let kept = (0..n_rows as u32).map(|row| by_row.contains_key(&row)).collect();
        Self { kept, by_row }
    }

    /// Returns the columns of a row of the list; `like` are the given images.
    pub fn columns(&self, like: &Input, row: usize) -> Columns {
        match self.by_row.get(&(row as u32)) {
            Some(image) => vec![
                ("query", json!(like.names[image.query as usize].key)),
                ("similarity", six_digits(image.similarity)),
            ],
            None => Vec::new(),
        }
    }
}
