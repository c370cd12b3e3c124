//! Sums over the pixels of images, from which the constants of each channel come.

use augment::Image;
use serde::{Deserialize, Serialize};

/// Sums of the values of each channel and of their squares, in units of the largest value of 8 or
/// 16 bits, or of 1.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct ChannelSums {
    sums: Vec<f64>,
    squares: Vec<f64>,
    /// Number of pixels of each channel that hold data.
    n_pixels: Vec<f64>,
}

impl ChannelSums {
    /// Computes the sums of `image`.
    pub(crate) fn from_image(image: &Image) -> Self {
        let image = match image {
            Image::Rgb(image) => {
                let mut sum = [0u64; 3];
                let mut squares = [0u64; 3];
                for pixel in image.data.as_chunks::<3>().0 {
                    for c in 0..3 {
                        sum[c] += u64::from(pixel[c]);
                        squares[c] += u64::from(pixel[c]) * u64::from(pixel[c]);
                    }
                }
                return Self {
                    sums: sum.map(|sum| sum as f64 / 255.0).to_vec(),
                    squares: squares.map(|sum| sum as f64 / (255.0 * 255.0)).to_vec(),
                    n_pixels: vec![image.data.len() as f64 / 3.0; 3],
                };
            }
            Image::Bands(bands) => bands,
        };
        let unit = f64::from(image.depth.unit());
        let mut all = Self::default();
        for channel in image.channels() {
            let mut sum = 0.0;
            let mut squares = 0.0;
            let mut n_pixels = 0.0;
            // A pixel without data is NaN.
            for value in channel.iter().filter(|value| !value.is_nan()) {
                let value = f64::from(*value) / unit;
                sum += value;
                squares += value * value;
                n_pixels += 1.0;
            }
            all.sums.push(sum);
            all.squares.push(squares);
            all.n_pixels.push(n_pixels);
        }
        all
    }

    /// Returns whether each channel has a pixel that holds data.
    pub(crate) fn has_data(&self) -> bool {
        self.n_pixels.iter().all(|n| *n > 0.0)
    }

    /// Adds the sums of further pixels of the same channels.
    pub(crate) fn add(&mut self, other: &Self) {
        add_elementwise(&mut self.sums, &other.sums);
        add_elementwise(&mut self.squares, &other.squares);
        add_elementwise(&mut self.n_pixels, &other.n_pixels);
    }

    /// Returns the mean and the standard deviation of each channel.
    pub(crate) fn constants(&self) -> (Vec<f64>, Vec<f64>) {
        let mut means = Vec::with_capacity(self.sums.len());
        let mut deviations = Vec::with_capacity(self.sums.len());
        for ((sum, squares), n_pixels) in self.sums.iter().zip(&self.squares).zip(&self.n_pixels) {
            let n = n_pixels.max(1.0);
            let mean = sum / n;
            means.push(mean);
            deviations.push((squares / n - mean * mean).max(0.0).sqrt());
        }
        (means, deviations)
    }
}

/// Adds `other` to `sums`, which has as many elements or none.
fn add_elementwise(sums: &mut Vec<f64>, other: &[f64]) {
    sums.resize(other.len(), 0.0);
    for (sum, other) in sums.iter_mut().zip(other) {
        *sum += other;
    }
}

#[cfg(test)]
mod tests {
    use augment::bands::Bands;
    use augment::{Depth, Rgb8};

    use super::*;

    fn are_close(a: &[f64], b: &[f64]) -> bool {
        a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-7)
    }

    #[test]
    fn constants_are_those_of_all_pixels() {
        let values = vec![0.0, 65_535.0, 13_107.0, 13_107.0];
        let image = Image::from(Bands { width_px: 2, height_px: 1, depth: Depth::Sixteen, values });
        let mut sums = ChannelSums::from_image(&image);
        sums.add(&ChannelSums::from_image(&image));
        let (mean, deviation) = sums.constants();
        assert!(
            are_close(&mean, &[0.5, 0.2]) && are_close(&deviation, &[0.5, 0.0]),
            "{mean:?} {deviation:?}"
        );
        let rgb = ChannelSums::from_image(&Rgb8::new(2, 1, vec![0, 51, 255, 255, 51, 255]).into());
        let (mean, deviation) = rgb.constants();
        assert!(
            are_close(&mean, &[0.5, 0.2, 1.0]) && are_close(&deviation, &[0.5, 0.0, 0.0]),
            "{mean:?} {deviation:?}"
        );
    }
}
