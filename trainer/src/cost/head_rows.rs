//! Rows of heads: pooled views, patches and masked cells.

use networks::head::Reads;
use networks::unit::{Elements, GroupShape};

/// Input or output of a head for the views of one size of an image.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadRows {
    /// Shape.
    pub(super) shape: GroupShape,
    /// Share of the rows that are masked cells.
    pub(super) masked_share: f64,
}

/// Part of the output of a head's last unit, for one image.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OutputPart {
    /// Elements of the part.
    pub elements: Elements,
    /// Share of its rows that are masked cells, whose number differs from batch to batch.
    pub masked_share: f64,
}

impl HeadRows {
    /// Returns the rows that a head reads of a backbone's features.
    pub(super) fn from_features(reads: Reads, features: &GroupShape) -> Self {
        let shape = reads.shape(features);
        let n_masked = match reads {
            // All cells of the grid, in place of some.
            Reads::PooledAndCells => shape.n_rows() - features.n_views,
            _ if reads.has_masked() => features.n_masked,
            _ => 0,
        };
        Self { shape, masked_share: n_masked as f64 / shape.n_rows().max(1) as f64 }
    }

    /// Returns the parts of these rows as the output of a head that `reads` its input so: views and
    /// masked cells apart if both are read of a backbone.
    pub(super) fn parts(&self, reads: Reads) -> Vec<OutputPart> {
        let elements = self.shape.elements();
        let masked_share = self.masked_share;
        if !reads.has_masked() || masked_share == 0.0 || masked_share == 1.0 {
            return vec![OutputPart { elements, masked_share }];
        }
        let views = OutputPart { elements: elements * (1.0 - masked_share), masked_share: 0.0 };
        let masked = OutputPart { elements: elements * masked_share, masked_share: 1.0 };
        vec![views, masked]
    }
}

/// Returns the share of masked cells among the rows of all sizes.
pub(super) fn masked_share(rows: &[HeadRows]) -> f64 {
    let mut n_masked = 0.0;
    let mut n_all = 0.0;
    for rows in rows {
        let n_rows = rows.shape.n_rows() as f64;
        n_masked += rows.masked_share * n_rows;
        n_all += n_rows;
    }
    n_masked / f64::max(n_all, 1.0)
}
