//! Near-duplicates: groups of images whose features are nearly the same, of which the best is kept.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use kernels::rows::Rows;
use prep::parts::Work;
use ranks::communicator::Communicator;
use serde_json::json;

use super::cells::CellSettings;
use super::clusters::ClusterObserver;
use super::input::Input;
use super::job::Job;
use super::lists::{Columns, six_digits};
use super::output::OutputFolder;
use super::pairs::{ImagePair, pairs_around};
use super::quality::Quality;
use crate::CurateError;
use crate::selection::{ComparedWith, Duplicates, NearestKept, Retrieved};

/// Lower bound of the product of two equal rows of unit length, which is 1 up to rounding.
const EQUAL: f32 = 1.0 - 1e-6;

/// Returns the smallest product of rows that are too similar, given the `threshold` of their cosine
/// similarity.
pub(super) fn least_product(threshold: f32) -> f32 {
    threshold.min(EQUAL)
}

/// Settings of a search for near-duplicates.
#[derive(Debug, Clone)]
pub struct NearDuplicates {
    /// Cosine similarity at or above which two images are too similar.
    pub threshold: f32,
    /// Images that an image is compared with.
    pub compared_with: ComparedWith,
    /// Settings of cells.
    pub cells: CellSettings,
}

/// Near-duplicates that were found.
pub struct FoundDuplicates {
    /// Whether each image is kept.
    pub kept: Vec<bool>,
    /// Number of images that are not kept.
    pub n_copies: usize,
    /// Number of kept images that others duplicate.
    pub n_originals: usize,
    duplicates: Duplicates,
    qualities: Option<Vec<Quality>>,
}

impl NearDuplicates {
    /// Returns the job of the search.
    pub fn job(&self) -> Job {
        let mut settings = json!({ "threshold": self.threshold.to_string(), "cells": self.cells.identity() });
        if self.compared_with == ComparedWith::All {
            settings["compare_with"] = json!("all");
        }
        Job { verb: "near-duplicates", settings, work: Work::Whole }
    }

    /// Finds the near-duplicates among the images of `output`, those with the best of `qualities`
    /// first. All ranks call it.
    ///
    /// # Errors
    /// [`CurateError`] if cells cannot be computed, or ranks cannot communicate.
    pub fn run(
        &self,
        output: &OutputFolder<'_>,
        qualities: Option<Vec<Quality>>,
        ranks: &Communicator,
        observer: &dyn ClusterObserver,
    ) -> Result<FoundDuplicates, CurateError> {
        let rows = &output.input.rows;
        let cells = self.cells.cells(rows, output.folder(), ranks, observer)?;
        let ranking = cells.ranked(|row| {
            let quality = qualities.as_ref().map(|qualities| qualities[row as usize]);
            // Sharpness is finite and not negative, so that its bits are in its order.
            Reverse(quality.map(|quality| (quality.n_pixels, quality.sharpness.max(0.0).to_bits())))
        });
        let threshold = least_product(self.threshold);
        let duplicates = Duplicates::find(rows, &ranking, threshold, self.compared_with, ranks, observer)?;
        let mut kept = Vec::with_capacity(rows.len());
        let mut originals = BTreeSet::new();
        for row in 0..rows.len() {
            let original = duplicates.kept_original(row);
            kept.push(original.is_none());
            originals.extend(original);
        }
        let n_copies = kept.iter().filter(|is_kept| !**is_kept).count();
        Ok(FoundDuplicates { kept, n_copies, n_originals: originals.len(), duplicates, qualities })
    }
}

impl FoundDuplicates {
    /// Returns the smallest product of features that are near-duplicates.
    pub fn threshold(&self) -> f32 {
        self.duplicates.threshold
    }

    /// Returns rows of pairs of an image and the most similar kept one, around the threshold; none
    /// without images.
    pub fn pairs(&self, input: &Input) -> Vec<Vec<ImagePair>> {
        if !input.has_images() {
            return Vec::new();
        }
        let mut matches = Vec::new();
        for (row, nearest) in self.duplicates.nearest.iter().enumerate() {
            if let Some(NearestKept { row: query, similarity }) = *nearest {
                matches.push(Retrieved { row: row as u32, query, similarity });
            }
        }
        pairs_around(self.threshold(), &matches, input, input)
    }

    /// Returns the columns of a row of the list.
    pub fn columns(&self, input: &Input, row: usize) -> Columns {
        let mut columns = Vec::new();
        // The group is named by the row of the image that is kept.
        let original = self.duplicates.kept_original(row);
        columns.push(("group", json!(original.unwrap_or(row as u32))));
        if let Some(NearestKept { row: nearest, similarity }) = self.duplicates.nearest[row] {
            let name = &input.names[nearest as usize];
            columns.push(("nearest_key", json!(name.key)));
            columns.extend(name.shard.as_ref().map(|shard| ("nearest_shard", json!(shard))));
            columns.push(("similarity", six_digits(similarity)));
        }
        if let Some(qualities) = &self.qualities {
            let Quality { n_pixels, sharpness } = qualities[row];
            columns.push(("pixels", json!(n_pixels)));
            columns.push(("sharpness", json!((sharpness * 100.0).round() / 100.0)));
        }
        columns
    }
}
