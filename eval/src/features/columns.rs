//! What a row of features holds.
//!
//! ```text
//! [ level L-n+1 | … | level L-1 | level L | average ]
//! ```
//!
//! A level is the class token behind a block of a transformer, or the mean of the map behind a stage of a convolutional
//! network; the average is that of the last level's patch tokens, where there is a class token beside them. Whatever a
//! protocol concatenates then lies side by side.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Which features are made of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Wanted {
    /// One vector of the last levels, and the average if that is another one.
    Vectors {
        /// Levels, or all where the network has fewer.
        n_levels: usize,
        /// Whether the average follows.
        average: bool,
    },
    /// All patch tokens of the last level, row by row of the grid.
    Patches,
}

/// The columns of a row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Columns {
    /// Channels of each level, the last level last.
    pub levels: Vec<usize>,
    /// Channels of the average; 0 without one.
    pub average: usize,
}

impl Columns {
    /// Columns of a row.
    pub fn width(&self) -> usize {
        self.levels.iter().sum::<usize>() + self.average
    }

    /// The last `n` levels, or all where there are fewer.
    pub fn last(&self, n: usize) -> Range<usize> {
        let end = self.width() - self.average;
        let levels = &self.levels[self.levels.len().saturating_sub(n)..];
        end - levels.iter().sum::<usize>()..end
    }

    /// The last `n` levels and the average.
    pub fn last_and_average(&self, n: usize) -> Range<usize> {
        self.last(n).start..self.width()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_protocols_concatenate_lies_side_by_side() {
        let columns = Columns { levels: vec![2, 3, 4], average: 5 };
        assert_eq!((columns.width(), columns.last(1), columns.last(2)), (14, 5..9, 2..9));
        assert_eq!((columns.last(9), columns.last_and_average(1)), (0..9, 5..14));
    }
}
