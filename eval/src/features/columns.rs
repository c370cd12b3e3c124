//! Layout of a row of features.
//!
//! ```text
//! [ level L-n+1 | … | level L-1 | level L | average ]
//! ```
//!
//! A level is the class token after a block of a transformer, or the spatial mean after a stage of
//! a convolutional network; the average is the mean patch token of the last level, present only if
//! the network has a class token. The columns that a protocol concatenates are therefore
//! contiguous. One extraction serves all protocols.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Features to extract from an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum FeatureKind {
    /// One vector per level, and the mean patch token if the network has a class token.
    Vectors {
        /// Number of last levels, or all if the network has fewer.
        n_levels: usize,
        /// Includes the mean patch token.
        average: bool,
    },
    /// All patch tokens of the last level, in row-major order of the grid.
    Patches,
}

impl FeatureKind {
    /// The vector of the last level.
    pub const LAST_LEVEL: Self = Self::Vectors { n_levels: 1, average: false };
}

/// Columns of a row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Columns {
    /// Channels of each level, from the earliest to the last.
    pub levels: Vec<usize>,
    /// Channels of the mean patch token; 0 if it is absent.
    pub average: usize,
}

impl Columns {
    /// Returns the number of columns.
    pub fn width(&self) -> usize {
        self.levels.iter().sum::<usize>() + self.average
    }

    /// Returns the columns of the last `n` levels, or of all if there are fewer.
    pub fn last(&self, n: usize) -> Range<usize> {
        let end = self.width() - self.average;
        let levels = &self.levels[self.levels.len().saturating_sub(n)..];
        end - levels.iter().sum::<usize>()..end
    }

    /// Returns the columns of the last `n` levels and the mean patch token.
    pub fn last_and_average(&self, n: usize) -> Range<usize> {
        self.last(n).start..self.width()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concatenated_columns_are_contiguous() {
        let columns = Columns { levels: vec![2, 3, 4], average: 5 };
        assert_eq!((columns.width(), columns.last(1), columns.last(2)), (14, 5..9, 2..9));
        assert_eq!((columns.last(9), columns.last_and_average(1)), (0..9, 5..14));
    }
}
