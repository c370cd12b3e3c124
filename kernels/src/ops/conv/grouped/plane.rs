//! Channels of a group of one image with the padding around it.

use multiversion::multiversion;

use crate::ops::conv::channels::Channels;
use crate::ops::conv::geometry::Geometry;
use crate::ops::number::Number;

/// Channels in a vector of AVX2, in f32. A group's channels are a multiple of it, at most four
/// times as many.
pub(super) const LANES: usize = 8;

/// Channels of a group of one image with its padding, `[rows, columns, C]`.
pub(super) struct Plane<E> {
    /// Columns, including those of the padding.
    columns: usize,
    /// Channels.
    width: usize,
    /// Columns of the image.
    image_columns: usize,
    /// Rows above and columns to the left of the image.
    padding: [usize; 2],
    /// Numbers by row, column and channel.
    pub values: Vec<E>,
}

/// Place of a group's channels among those of a cell.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// Distance between cells: the channels of all groups, or more if cells lie between them.
    pub all: usize,
    /// Index of the group's first channel.
    pub first: usize,
    /// Channels of the group.
    pub len: usize,
}

/// Distances between taps and windows in a plane.
#[derive(Debug, Clone, Copy)]
pub(super) struct Steps {
    /// Elements between windows of a row.
    pub window: usize,
    /// Elements between rows of the plane.
    pub row: usize,
    /// Channels of the plane.
    pub width: usize,
    /// Rows and columns of the kernel.
    pub kernel: [usize; 2],
}

impl Place {
    /// Returns the place of a group's input channels.
    pub(super) fn input(channels: Channels, group: usize) -> Self {
        let [c, _] = channels.per_group();
        Self { all: channels.input, first: group * c, len: c }
    }

    /// Returns the place of a group's output channels.
    pub(super) fn output(channels: Channels, group: usize) -> Self {
        let [_, o] = channels.per_group();
        Self { all: channels.output, first: group * o, len: o }
    }

    /// Returns the number of cells that start in `len` elements.
    pub(super) fn n_cells(self, len: usize) -> usize {
        len.div_ceil(self.all)
    }
}

impl<E: Number> Plane<E> {
    /// Creates a plane of zeros that covers the windows of all `geometries`, which have the same
    /// input.
    pub(super) fn new<'a>(geometries: impl Iterator<Item = &'a Geometry>, width: usize) -> Self {
        let mut padding = [0; 2];
        let mut rest = [0; 2];
        let mut image_columns = 0;
        for geometry in geometries {
            image_columns = geometry.input[1];
            for (axis, padded) in geometry.padded().into_iter().enumerate() {
                padding[axis] = padding[axis].max(geometry.padding[axis]);
                rest[axis] = rest[axis].max(padded - geometry.padding[axis]);
            }
        }
        let rows = padding[0] + rest[0];
        let columns = padding[1] + rest[1];
        Self { columns, width, image_columns, padding, values: vec![E::default(); rows * columns * width] }
    }

    /// Returns the distances between taps and windows of a convolution.
    pub(super) fn steps(&self, geometry: &Geometry) -> Steps {
        let width = self.width;
        Steps { window: geometry.stride * width, row: self.columns * width, width, kernel: geometry.kernel }
    }

    /// Returns the plane starting at the first tap of row `row` of the windows of a `geometry`.
    pub(super) fn row_start(&self, row: usize, geometry: &Geometry) -> &[E] {
        let top = self.padding[0] - geometry.padding[0];
        let left = self.padding[1] - geometry.padding[1];
        &self.values[((row * geometry.stride + top) * self.columns + left) * self.width..]
    }

    /// Copies a group's channels of an image into the plane.
    pub(super) fn fill(&mut self, image: &[E], place: Place) {
        let [top, left] = self.padding;
        let rows = image.chunks_exact(self.image_columns * place.all);
        let rows = rows.zip(self.values.chunks_exact_mut(self.columns * self.width).skip(top));
        for (from, to) in rows {
            fill_row(from, &mut to[left * self.width..], place);
        }
    }
}

/// Copies a group's channels of a row of cells, one after another.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn fill_row<E: Number>(from: &[E], to: &mut [E], place: Place) {
    match place.len {
        8 => copy_cells::<E, 8>(from, to, place),
        16 => copy_cells::<E, 16>(from, to, place),
        24 => copy_cells::<E, 24>(from, to, place),
        n => {
            debug_assert_eq!(n, 32, "groups that suit have no other width");
            copy_cells::<E, 32>(from, to, place);
        }
    }
}

/// [`fill_row`] for groups of `N` channels. Arrays are copied by vector moves, slices by a call.
#[inline(always)]
fn copy_cells<E: Number, const N: usize>(from: &[E], to: &mut [E], place: Place) {
    for (from, to) in from.chunks_exact(place.all).zip(to.as_chunks_mut::<N>().0) {
        if let Some(from) = from[place.first..].first_chunk() {
            *to = *from;
        }
    }
}
