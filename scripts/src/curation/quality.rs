//! Quality of images, by which the best of several copies is chosen: pixels, then sharpness.

use augment::DecodeRules;
use augment::decode::decode;
use rayon::prelude::*;

use super::input::Images;
use crate::progress::bar;

/// Quality of an image; of two, the larger one is better.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub(crate) struct Quality {
    /// Number of pixels.
    pub(crate) n_pixels: u64,
    /// Variance of the Laplacian of the gray image: the larger, the sharper (Pech-Pacheco et al. 2000).
    pub(crate) sharpness: f64,
}

/// Returns the quality of the image of each of `n` rows; zero for one that cannot be read.
pub(crate) fn qualities(images: &Images, n: usize) -> anyhow::Result<Vec<Quality>> {
    let progress = bar(n as u64, "sharpness");
    let one = |row: usize| {
        let bytes = match images.bytes(row) {
            Err(error) if error.is_sample_error() => Vec::new(),
            bytes => bytes?,
        };
        progress.inc(1);
        let image = decode(&bytes, &DecodeRules::default()).ok();
        let none = Quality { n_pixels: 0, sharpness: 0.0 };
        Ok(image.map_or(none, |image| {
            let (width, height) = (image.width_px as usize, image.height_px as usize);
            let sharpness = sharpness(&image.data, width, height);
            Quality { n_pixels: (width * height) as u64, sharpness }
        }))
    };
    let all: Vec<anyhow::Result<Quality>> = (0..n).into_par_iter().map(one).collect();
    progress.finish_and_clear();
    all.into_iter().collect()
}

/// Returns the variance of the Laplacian (four neighbors) of the gray image of `pixels`, `[height, width, 3]`.
fn sharpness(pixels: &[u8], width: usize, height: usize) -> f64 {
    if width < 3 || height < 3 {
        return 0.0;
    }
    let gray: Vec<i32> = pixels
        .chunks_exact(3)
        .map(|p| (299 * i32::from(p[0]) + 587 * i32::from(p[1]) + 114 * i32::from(p[2])) / 1000)
        .collect();
    let (mut sum, mut squares) = (0i64, 0i64);
    for y in 1..height - 1 {
        for x in 1..width - 1 {
            let at = y * width + x;
            let value = gray[at - 1] + gray[at + 1] + gray[at - width] + gray[at + width] - 4 * gray[at];
            sum += i64::from(value);
            squares += i64::from(value) * i64::from(value);
        }
    }
    let n = ((width - 2) * (height - 2)) as f64;
    let mean = sum as f64 / n;
    squares as f64 / n - mean * mean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edges_are_sharper_than_ramps() {
        let image =
            |value: &dyn Fn(usize) -> u8| -> Vec<u8> { (0..256).flat_map(|i| [value(i % 16); 3]).collect() };
        let edge = sharpness(&image(&|x| if x < 8 { 0 } else { 200 }), 16, 16);
        let ramp = sharpness(&image(&|x| (x * 12) as u8), 16, 16);
        assert!(edge > 100.0 * ramp.max(1.0), "{edge} {ramp}");
        assert_eq!(sharpness(&image(&|_| 9), 16, 16), 0.0);
        assert_eq!(sharpness(&[1, 2, 3], 1, 1), 0.0);
    }
}
