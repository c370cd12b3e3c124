//! A convolution that computes results at some of the cells of an output.

use std::borrow::Cow;

use super::plane::Place;
use crate::ops::conv::geometry::{Geometry, Lattice};

/// A convolution that computes results at some of the cells of an output, or all.
pub(in crate::ops) struct Part<'a, W: Clone> {
    /// Weights, `[G, T·C, O]`.
    pub packed: Cow<'a, [W]>,
    /// Windows over the input.
    pub geometry: Geometry,
    /// Places of the results.
    pub lattice: Lattice,
}

impl<W: Clone> Part<'_, W> {
    /// Returns the rows of results in the image `y`, each from its first result to its last, with
    /// the place of the group's channels among the results; `place` is their place in neighboring
    /// cells.
    pub(super) fn rows<'y, T>(
        &self,
        place: Place,
        y: &'y mut [T],
    ) -> impl Iterator<Item = (Place, &'y mut [T])> {
        let Lattice { start, window, row } = self.lattice;
        let [n_rows, n_columns] = self.geometry.output;
        let len = (n_columns - 1) * window + place.all;
        let place = Place { all: window, ..place };
        y[start..].chunks_mut(row).take(n_rows).map(move |y| (place, &mut y[..len]))
    }
}
