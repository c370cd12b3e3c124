//! 8-bit RGB as three planes: the layout in which views are made and returned.
//!
//! Every operation of a view runs along complete planes, so that plain loops over bytes become
//! vector code. The interleaved pixels of a decoder are separated once, inside the resize.

use crate::Rgb8;

/// 8-bit RGB, `[3, H, W]`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Planes {
    /// Number of pixels per row.
    pub width_px: u32,
    /// Number of rows.
    pub height_px: u32,
    /// The red plane, then the green, then the blue one.
    pub data: Vec<u8>,
}

impl Planes {
    /// Changes the size. The contents of the pixels are then unspecified.
    pub(crate) fn set_size(&mut self, width_px: u32, height_px: u32) {
        self.width_px = width_px;
        self.height_px = height_px;
        self.data.resize(3 * width_px as usize * height_px as usize, 0);
    }

    /// Returns the number of pixels per plane.
    pub fn n_pixels(&self) -> usize {
        self.data.len() / 3
    }

    /// Returns the planes of red, green and blue.
    pub fn channels(&self) -> [&[u8]; 3] {
        let (r, rest) = self.data.split_at(self.n_pixels());
        let (g, b) = rest.split_at(r.len());
        [r, g, b]
    }

    /// Returns the planes of red, green and blue.
    pub fn channels_mut(&mut self) -> [&mut [u8]; 3] {
        let n = self.n_pixels();
        let (r, rest) = self.data.split_at_mut(n);
        let (g, b) = rest.split_at_mut(n);
        [r, g, b]
    }

    /// Mirrors each row.
    pub fn flip(&mut self) {
        self.data.chunks_exact_mut(self.width_px as usize).for_each(<[u8]>::reverse);
    }
}

impl From<&Rgb8> for Planes {
    fn from(image: &Rgb8) -> Self {
        let mut data = Vec::with_capacity(image.data.len());
        for channel in 0..3 {
            data.extend(image.data.chunks_exact(3).map(|pixel| pixel[channel]));
        }
        Self { width_px: image.width_px, height_px: image.height_px, data }
    }
}

impl From<&Planes> for Rgb8 {
    fn from(planes: &Planes) -> Self {
        let [r, g, b] = planes.channels();
        let data = r.iter().zip(g).zip(b).flat_map(|((r, g), b)| [*r, *g, *b]).collect();
        Self::new(planes.width_px, planes.height_px, data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn conversions_between_planes_and_pixels_are_inverse(w in 1u32..9, h in 1u32..9, seed: u8) {
            let data = (0..3 * w * h).map(|i| (i as u8).wrapping_mul(seed)).collect();
            let image = Rgb8::new(w, h, data);
            let planes = Planes::from(&image);
            prop_assert_eq!(planes.channels()[1][0], image.data[1]);
            prop_assert_eq!(Rgb8::from(&planes), image);
            let mut flipped = planes.clone();
            flipped.flip();
            prop_assert_eq!(flipped.data[w as usize - 1], planes.data[0]);
            flipped.flip();
            prop_assert_eq!(flipped, planes);
        }
    }
}
