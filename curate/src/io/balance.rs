//! Balance: an even choice of images over clusters or groups, or weights of all images by which
//! they are chosen so.

use std::path::PathBuf;

use kernels::rows::Rows;
use prep::parts::Work;
use ranks::communicator::Communicator;
use serde_json::json;

use super::clusters::{ClusterObserver, ClusterSettings};
use super::groups::groups;
use super::input::Input;
use super::job::{Job, content_identity};
use super::lists::{Columns, six_digits};
use super::output::OutputFolder;
use crate::CurateError;
use crate::clusters::{Hierarchy, Tree};
use crate::selection::{Order, sample, weights};

/// Settings of a balance.
#[derive(Debug, Clone)]
pub struct Balance {
    /// Number of images to choose.
    pub count: usize,
    /// Whether all images are kept, each with the probability that it would be chosen as its
    /// weight.
    pub has_weights: bool,
    /// Column by whose values images are grouped instead of by clusters: `class`, or one of `list`.
    pub column: Option<String>,
    /// List with the column.
    pub list: Option<PathBuf>,
    /// Whether the images nearest to the center of a cluster are chosen first instead of random
    /// ones. Groups have no centers.
    pub nearest_first: bool,
    /// Settings of clusters.
    pub clusters: ClusterSettings,
}

/// Division of the images over which they are balanced.
enum Division {
    /// Clusters of their features.
    Clusters(Hierarchy),
    /// Groups by a column.
    Groups {
        /// The groups, as a tree of one level.
        tree: Tree,
        /// Names of the groups.
        names: Vec<String>,
    },
}

impl Division {
    /// Returns the cluster or group of every image.
    fn tree(&self) -> &Tree {
        match self {
            Self::Clusters(clusters) => &clusters.tree,
            Self::Groups { tree, .. } => tree,
        }
    }
}

/// Images that were chosen evenly.
pub struct Balanced {
    /// Whether each image is kept.
    pub kept: Vec<bool>,
    division: Division,
    /// Probability with which each image is chosen.
    probabilities: Vec<f64>,
    has_weights: bool,
}

/// Sizes of the clusters of a level, in images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LevelSizes {
    /// Number of clusters.
    pub n_clusters: usize,
    /// Size of the smallest cluster.
    pub least: u64,
    /// Size of the largest cluster.
    pub most: u64,
    /// Median size.
    pub median: u64,
}

impl Balance {
    /// Returns the job of balancing `input`.
    pub fn job(&self, input: &Input) -> Job {
        let settings = json!({
            "count": self.count, "weights": self.has_weights, "by": self.column,
            "list": content_identity(self.list.as_deref()),
            "order": if self.nearest_first { "Nearest" } else { "Random" },
            "metric": format!("{:?}", input.rows.metric()),
            "clusters": self.clusters.identity(),
        });
        Job { verb: "balance", settings, work: Work::Whole }
    }

    /// Clusters or groups the images of `output`, and chooses among them. All ranks call it.
    ///
    /// # Errors
    /// [`CurateError`] if clusters cannot be computed or a column cannot be read.
    pub fn run(
        &self,
        output: &OutputFolder<'_>,
        ranks: &Communicator,
        observer: &dyn ClusterObserver,
    ) -> Result<Balanced, CurateError> {
        let input = output.input;
        let division = match &self.column {
            Some(column) => {
                let (tree, names) = groups(&input.names, column, self.list.as_deref())?;
                Division::Groups { tree, names }
            }
            None => Division::Clusters(self.clusters.run(&input.rows, output.folder(), ranks, observer)?),
        };
        let order = match &division {
            Division::Clusters(clusters) if self.nearest_first => Order::Nearest(&clusters.distances),
            // Groups have no centers.
            Division::Clusters(_) | Division::Groups { .. } => Order::Random,
        };
        let mut kept = vec![self.has_weights; input.rows.len()];
        for row in sample(division.tree(), self.count, order, self.clusters.kmeans.seed) {
            kept[row as usize] = true;
        }
        let probabilities = weights(division.tree(), self.count as f64);
        Ok(Balanced { kept, division, probabilities, has_weights: self.has_weights })
    }
}

impl Balanced {
    /// Returns the sizes of the clusters or groups of each level, the lowest first.
    pub fn level_sizes(&self) -> Vec<LevelSizes> {
        let mut levels = Vec::new();
        for mut sizes in self.division.tree().sizes() {
            sizes.sort_unstable();
            let last = sizes.len() - 1;
            let median = sizes[(last as f64 * 0.5) as usize];
            levels.push(LevelSizes { n_clusters: sizes.len(), least: sizes[0], most: sizes[last], median });
        }
        levels
    }

    /// Returns the least and the largest probability with which an image is chosen.
    pub fn probability_range(&self) -> [f64; 2] {
        let least = self.probabilities.iter().copied().fold(f64::INFINITY, f64::min);
        let most = self.probabilities.iter().copied().fold(0.0, f64::max);
        [least, most]
    }

    /// Returns the columns of a row of the list.
    pub fn columns(&self, row: usize) -> Columns {
        let mut columns = Vec::new();
        let numbers = self.division.tree().clusters_of(row);
        match &self.division {
            Division::Groups { names, .. } => columns.push(("group", json!(names[numbers[0] as usize]))),
            Division::Clusters(clusters) => {
                // The lowest level first.
                columns.push(("clusters", json!(numbers)));
                columns.push(("squared_distance", six_digits(clusters.distances[row])));
            }
        }
        if self.has_weights {
            columns.push(("weight", json!(self.probabilities[row])));
        }
        columns
    }
}
