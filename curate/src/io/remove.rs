//! Decontamination: removal of images that are too similar to images of an evaluation set, which
//! would invalidate its scores.

use pipeline::Progress;
use prep::parts::{Share, Work};
use ranks::communicator::Communicator;
use serde_json::json;

use super::comparison::Comparison;
use super::input::Input;
use super::job::Job;
use super::lists::{Columns, six_digits};
use super::near_duplicates::least_product;
use super::pairs::{ImagePair, pairs_around};
use crate::CurateError;
use crate::selection::{Retrieved, most_similar, most_similar_in_blocks};

/// Settings of a removal.
#[derive(Debug, Clone)]
pub struct Removal {
    /// Cosine similarity at or above which two images are too similar.
    pub threshold: f32,
}

impl Removal {
    /// Returns the job of removing images that are similar to `like`.
    pub fn job(&self, like: &Input, work: Work) -> Job {
        let settings = json!({ "like": like.identity, "threshold": self.threshold.to_string() });
        Job { verb: "remove", settings, work }
    }

    /// Finds the most similar other image of each image, or joins the results of parts; a part
    /// saves its result. All ranks call it.
    ///
    /// # Errors
    /// [`CurateError::NotFinite`], [`CurateError::Ranks`], and [`CurateError::Prep`] if results
    /// cannot be saved or joined.
    pub fn run(
        &self,
        comparison: &Comparison<'_>,
        ranks: &Communicator,
        progress: &dyn Progress,
    ) -> Result<Share<Vec<Retrieved>>, CurateError> {
        comparison.check_rows(ranks)?;
        let rows = &comparison.input.rows;
        let others = &comparison.like.rows;
        if comparison.work == Work::Whole {
            return Ok(Share::All(most_similar(rows, others, ranks, progress)?));
        }
        comparison.compare_in_parts(
            |n_rows| n_rows,
            |blocks| most_similar_in_blocks(rows, blocks, others, progress),
        )
    }

    /// Returns whether each image is kept, given the most similar other image of each.
    pub fn kept(&self, nearest: &[Retrieved]) -> Vec<bool> {
        let least = least_product(self.threshold);
        nearest.iter().map(|image| image.similarity < least).collect()
    }

    /// Returns rows of pairs of an image and the most similar one of `like`, around the threshold;
    /// none without images.
    pub fn pairs(&self, input: &Input, like: &Input, nearest: &[Retrieved]) -> Vec<Vec<ImagePair>> {
        pairs_around(self.threshold, nearest, input, like)
    }
}

/// Returns the columns of a row of the list, given the image of `like` that is most similar to it.
pub fn removal_columns(like: &Input, nearest: &Retrieved) -> Columns {
    let name = &like.names[nearest.query as usize];
    let mut columns = vec![("like_key", json!(name.key)), ("similarity", six_digits(nearest.similarity))];
    columns.extend(name.shard.as_ref().map(|shard| ("like_shard", json!(shard))));
    columns
}
