//! Quality of images, by which the best of several copies is chosen: pixels, then sharpness.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use augment::{DecodeRules, Image};
use pipeline::{Progress, file};
use ranks::communicator::Communicator;
use rayon::prelude::*;

use super::agreement::all_succeed;
use super::input::{Images, Input};
use crate::CurateError;

/// File of the qualities that have been measured, in an output folder.
pub(super) const FILE: &str = "quality.txt";

/// Quality of an image; of two, the larger one is better.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Quality {
    /// Number of pixels.
    pub n_pixels: u64,
    /// Variance of the Laplacian of the gray image: the larger, the sharper (Pech-Pacheco et al.
    /// 2000).
    pub sharpness: f64,
}

/// Number of images whose qualities are computed before they are saved.
const CHUNK: usize = 2048;

/// Returns the quality of each image of `input`, which the first rank measures; `None` without
/// images. Qualities are saved in `folder`, from which a call that was stopped continues. All ranks
/// call it.
///
/// # Errors
/// [`CurateError::Data`] if images cannot be read, [`CurateError::Io`], [`CurateError::Ranks`] and
/// [`CurateError::PeersFailed`].
pub fn qualities(
    input: &Input,
    folder: &Path,
    ranks: &Communicator,
    progress: &dyn Progress,
) -> Result<Option<Vec<Quality>>, CurateError> {
    let Some(images) = &input.images else { return Ok(None) };
    let measured = if ranks.topology().rank == 0 {
        measure_all(images, input.names.len(), &folder.join(FILE), progress)
    } else {
        Ok(Vec::new())
    };
    let measured = all_succeed(ranks, measured)?;
    let words: Vec<[u64; 2]> =
        measured.iter().map(|quality| [quality.n_pixels, quality.sharpness.to_bits()]).collect();
    let bytes = ranks.broadcast("qualities", bytemuck::cast_slice(&words).to_vec())?;
    let words: Vec<[u64; 2]> = bytemuck::pod_collect_to_vec(&bytes);
    let mut all = Vec::with_capacity(words.len());
    for [n_pixels, bits] in words {
        all.push(Quality { n_pixels, sharpness: f64::from_bits(bits) });
    }
    Ok(Some(all))
}

/// Returns the quality of the image of each of `n` rows; zero for one that cannot be read.
/// Qualities are saved at `path`, a line each, from which a call that was stopped continues.
fn measure_all(
    images: &Images,
    n: usize,
    path: &Path,
    progress: &dyn Progress,
) -> Result<Vec<Quality>, CurateError> {
    let mut all = read_saved(path);
    all.truncate(n);
    // Removes a line that was cut off.
    let text: String = all.iter().map(Quality::line).collect();
    file::replace(path, text.as_bytes()).map_err(|error| CurateError::io("write", path, error))?;
    let saved = OpenOptions::new().append(true).open(path);
    let mut saved = saved.map_err(|error| CurateError::io("write", path, error))?;
    progress.begin("sharpness", n as u64);
    progress.advance(all.len() as u64);
    while all.len() < n {
        let rows = all.len()..n.min(all.len() + CHUNK);
        let chunk: Vec<Result<Quality, CurateError>> = rows
            .into_par_iter()
            .map(|row| {
                progress.advance(1);
                Quality::measure(images, row)
            })
            .collect();
        let chunk = chunk.into_iter().collect::<Result<Vec<Quality>, CurateError>>()?;
        let text: String = chunk.iter().map(Quality::line).collect();
        saved.write_all(text.as_bytes()).map_err(|error| CurateError::io("write", path, error))?;
        all.extend(chunk);
    }
    Ok(all)
}

/// Reads the qualities at `path` up to the first line that is incomplete.
fn read_saved(path: &Path) -> Vec<Quality> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    complete
        .lines()
        .map_while(|line| {
            let (n_pixels, sharpness) = line.split_once(' ')?;
            Some(Quality { n_pixels: n_pixels.parse().ok()?, sharpness: sharpness.parse().ok()? })
        })
        .collect()
}

impl Quality {
    /// Measures the quality of the image of row `row`.
    fn measure(images: &Images, row: usize) -> Result<Self, CurateError> {
        let encoded = match images.encoded(row) {
            Err(error) if error.is_sample_error() => Default::default(),
            encoded => encoded?,
        };
        let Ok(image) = Image::decode_any(&encoded.files(), &DecodeRules::default()) else {
            return Ok(Self { n_pixels: 0, sharpness: 0.0 });
        };
        let image = image.picture();
        let width = image.width_px as usize;
        let height = image.height_px as usize;
        Ok(Self { n_pixels: (width * height) as u64, sharpness: sharpness(&image.data, width, height) })
    }

    /// Returns the line of a file, from which the same numbers are read.
    fn line(&self) -> String {
        format!("{} {:?}\n", self.n_pixels, self.sharpness)
    }
}

/// Returns the variance of the Laplacian (four neighbors) of the gray image of `pixels`, `[height,
/// width, 3]`.
fn sharpness(pixels: &[u8], width: usize, height: usize) -> f64 {
    if width < 3 || height < 3 {
        return 0.0;
    }
    let gray: Vec<i32> = pixels
        .chunks_exact(3)
        .map(|p| (299 * i32::from(p[0]) + 587 * i32::from(p[1]) + 114 * i32::from(p[2])) / 1000)
        .collect();
    let mut sum = 0i64;
    let mut squares = 0i64;
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
    fn saved_qualities_are_read_up_to_a_line_that_was_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("quality.txt");
        let all = [(900, 1.0 / 3.0), (4, 0.0), (25, 1e-9)]
            .map(|(n_pixels, sharpness)| Quality { n_pixels, sharpness });
        let text: String = all.iter().map(Quality::line).collect();
        std::fs::write(&path, &text).unwrap();
        assert_eq!(read_saved(&path), all);
        std::fs::write(&path, &text[..text.len() - 2]).unwrap();
        assert_eq!(read_saved(&path), all[..2]);
        assert_eq!(read_saved(&folder.path().join("none")), []);
    }

    /// Returns a gray image `[16, 16, 3]` with `value` in each column.
    fn image(value: impl Fn(usize) -> u8) -> Vec<u8> {
        (0..256).flat_map(|i| [value(i % 16); 3]).collect()
    }

    #[test]
    fn edges_are_sharper_than_ramps() {
        let edge = sharpness(&image(|x| if x < 8 { 0 } else { 200 }), 16, 16);
        let ramp = sharpness(&image(|x| (x * 12) as u8), 16, 16);
        assert!(edge > 100.0 * ramp.max(1.0), "{edge} {ramp}");
        assert_eq!(sharpness(&image(|_| 9), 16, 16), 0.0);
        assert_eq!(sharpness(&[1, 2, 3], 1, 1), 0.0);
    }
}
