//! A group's channels of one image with the padding around it.

use multiversion::multiversion;

use crate::ops::conv::channels::Channels;
use crate::ops::conv::geometry::Geometry;
use crate::ops::number::Number;

/// Channels in a vector of AVX2, in f32. A group's channels are a multiple of it.
pub(super) const LANES: usize = 8;

/// A group's channels of one image with its padding, `[rows, columns, C]`.
pub(super) struct Plane<E> {
    /// Columns, those of the padding among them.
    pub columns: usize,
    /// Channels.
    pub width: usize,
    /// Numbers by row, column and channel.
    pub values: Vec<E>,
}

/// The place of a group's channels among those of a cell.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// Channels of all groups.
    pub all: usize,
    /// Number of the group's first channel.
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
    /// Returns the places of a group's input and output channels.
    pub(super) fn each(channels: Channels, group: usize) -> [Self; 2] {
        let [c, o] = channels.each();
        [(channels.input, c), (channels.output, o)].map(|(all, len)| Self { all, first: group * len, len })
    }
}

impl<E: Number> Plane<E> {
    /// Creates a plane of zeros.
    pub(super) fn new(geometry: &Geometry, width: usize) -> Self {
        let [rows, columns] = [0, 1].map(|axis| geometry.input[axis] + 2 * geometry.padding[axis]);
        Self { columns, width, values: vec![E::default(); rows * columns * width] }
    }

    /// Returns the distances between taps and windows of a convolution.
    pub(super) fn steps(&self, geometry: &Geometry) -> Steps {
        let width = self.width;
        Steps { window: geometry.stride * width, row: self.columns * width, width, kernel: geometry.kernel }
    }

    /// Copies a group's channels of an image into the plane.
    pub(super) fn fill<T: Number>(&mut self, image: &[T], geometry: &Geometry, place: Place) {
        fill(&mut self.values, self.columns, image, geometry, place);
    }

    /// Copies the plane into a group's channels of an image.
    pub(super) fn read<T: Number>(&self, image: &mut [T], geometry: &Geometry, place: Place) {
        read(&self.values, self.columns, image, geometry, place);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn fill<T: Number, E: Number>(
    values: &mut [E],
    columns: usize,
    image: &[T],
    geometry: &Geometry,
    place: Place,
) {
    for_each_cell(columns, geometry, place, |to, from| {
        copy_cell(&image[from..from + place.len], &mut values[to..to + place.len]);
    });
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn read<T: Number, E: Number>(
    values: &[E],
    columns: usize,
    image: &mut [T],
    geometry: &Geometry,
    place: Place,
) {
    for_each_cell(columns, geometry, place, |from, to| {
        copy_cell(&values[from..from + place.len], &mut image[to..to + place.len]);
    });
}

/// Calls `f` for every cell of the image with its offset in the plane and its offset in the image.
#[inline(always)]
fn for_each_cell(columns: usize, geometry: &Geometry, place: Place, mut f: impl FnMut(usize, usize)) {
    let [top, left] = geometry.padding;
    for y in 0..geometry.input[0] {
        for x in 0..geometry.input[1] {
            let to = ((y + top) * columns + x + left) * place.len;
            f(to, (y * geometry.input[1] + x) * place.all + place.first);
        }
    }
}

/// Copies the channels of a cell. The branches for each width have a constant length, so that the compiler emits vector moves instead of
/// a loop.
#[inline(always)]
pub(super) fn copy_cell<A: Number, B: Number>(from: &[A], to: &mut [B]) {
    #[inline(always)]
    fn copy<A: Number, B: Number>(from: &[A], to: &mut [B]) {
        to.iter_mut().zip(from).for_each(|(to, from)| {
            *to = if A::DTYPE == B::DTYPE { bytemuck::cast(*from) } else { B::nearest(from.wide()) };
        });
    }
    match to.len() {
        8 => copy(&from[..8], &mut to[..8]),
        16 => copy(&from[..16], &mut to[..16]),
        24 => copy(&from[..24], &mut to[..24]),
        32 => copy(&from[..32], &mut to[..32]),
        _ => copy(from, to),
    }
}
