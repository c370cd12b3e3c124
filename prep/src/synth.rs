//! A procedural, labeled image set: ten shapes, drawn so that only the shape depends on the class.
//!
//! Each image holds two to six stamps of its class's shape, each with a position, size, rotation
//! and color of its own, on a background of gradient, ripple and noise: all drawn independently of
//! the class. Pixels are a pure function of (seed, number).

use std::path::PathBuf;

use augment::{Rgb8, ViewRng};
use pipeline::shard::write::{ShardLimits, ShardWriter};
use rayon::prelude::*;

use crate::classes::write_classes;
use crate::encode::jpeg;
use crate::error::PrepError;
use crate::folder_lock::lock_folder;
use pipeline::Progress;

/// JPEG quality of the images.
const JPEG_QUALITY: u8 = 92;

/// Number of images that are drawn, on all cores, before they are written.
const CHUNK: u64 = 256;

/// Names of the ten classes.
const CLASSES: [&str; 10] =
    ["disc", "ring", "square", "frame", "triangle", "cross", "star", "bars", "dots", "crescent"];

/// Distinguishes these random streams from all others.
const DOMAIN: u64 = 0x7379_6e74_6800_0000;

/// A procedural image set.
#[derive(Debug, Clone)]
pub struct SynthSet {
    /// Folder of the shards.
    pub out: PathBuf,
    /// Number of images.
    pub count: u64,
    /// Seed of the set.
    pub seed: u64,
    /// Side of the images, in pixels.
    pub size_px: u32,
    /// Prefix of the shards' names.
    pub prefix: String,
}

/// Writes the shards of `set`, and the list of its classes; images are drawn on all cores and
/// written in order. Returns the paths of the shards.
///
/// # Errors
/// [`PrepError`] when the folder is in use, has such shards, or cannot be written.
pub fn synthesize(set: &SynthSet, progress: &dyn Progress) -> Result<Vec<PathBuf>, PrepError> {
    let limits = ShardLimits { max_samples: 1000, max_bytes: None };
    let _lock = lock_folder(&set.out)?;
    let mut writer = ShardWriter::new(&set.out, &set.prefix, limits)?;
    progress.begin("synth", set.count);
    for start in (0..set.count).step_by(CHUNK as usize) {
        let drawn: Result<Vec<_>, PrepError> = (start..set.count.min(start + CHUNK))
            .into_par_iter()
            .map(|index| {
                let (class, pixels) = image(set.seed, index, set.size_px);
                let image = Rgb8::new(set.size_px, set.size_px, pixels);
                Ok((index, class, jpeg(&image, JPEG_QUALITY, false)?))
            })
            .collect();
        for (index, class, bytes) in drawn? {
            writer.add(&format!("{index:08}"), &[("jpg", &bytes), ("cls", class.to_string().as_bytes())])?;
            progress.advance(1);
        }
    }
    write_classes(&set.out, &CLASSES.map(String::from))?;
    Ok(writer.finish()?)
}

/// Draws image `index` of the set `seed`: its class and its RGB pixels, `size_px` per side.
fn image(seed: u64, index: u64, size_px: u32) -> (u32, Vec<u8>) {
    let mut rng = ViewRng::from_words([seed, DOMAIN, index, 0]);
    let class = rng.below(CLASSES.len() as u32);
    let scene = Scene::draw(&mut rng);
    let mut pixels = Vec::with_capacity(3 * (size_px * size_px) as usize);
    let mut grain = ViewRng::from_words([seed, DOMAIN, index, 1]);
    for y in 0..size_px {
        for x in 0..size_px {
            // Four samples a pixel soften the edges.
            let mut sum = [0.0f64; 3];
            for (dx, dy) in [(0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)] {
                let point =
                    [(f64::from(x) + dx) / f64::from(size_px), (f64::from(y) + dy) / f64::from(size_px)];
                let color = scene.color(class, point);
                for (sum, c) in sum.iter_mut().zip(color) {
                    *sum += c / 4.0;
                }
            }
            let noise = f64::from(grain.normal()) * scene.noise;
            pixels.extend(sum.map(|v| ((v + noise) * 255.0).clamp(0.0, 255.0) as u8));
        }
    }
    (class, pixels)
}

/// One drawn shape: position, size, rotation and color.
struct Stamp {
    center: [f64; 2],
    radius: f64,
    rotation: [f64; 2],
    color: [f64; 3],
}

struct Scene {
    stamps: Vec<Stamp>,
    background: [[f64; 3]; 2],
    gradient: [f64; 2],
    texture: [f64; 4],
    noise: f64,
}

impl Scene {
    fn draw(rng: &mut ViewRng) -> Self {
        let background = draw_color(rng, 0.1, 0.9);
        // The two ends of the gradient are neighbors in color.
        let background = [background, background.map(|c| (c + 0.4 * rng.between(-0.5, 0.5)).clamp(0.0, 1.0))];
        let background_luma = (luma(background[0]) + luma(background[1])) / 2.0;
        let direction = rng.between(0.0, std::f64::consts::TAU);
        let wave = rng.between(0.0, std::f64::consts::TAU);
        let frequency = rng.between(5.0, 40.0);
        Self {
            stamps: draw_stamps(rng, background_luma),
            background,
            gradient: [direction.cos(), direction.sin()],
            texture: [
                wave.cos() * frequency,
                wave.sin() * frequency,
                rng.between(0.0, 0.06),
                rng.between(0.0, 6.0),
            ],
            noise: rng.between(0.0, 0.04),
        }
    }

    /// Returns the color at a point of the unit square.
    fn color(&self, class: u32, [x, y]: [f64; 2]) -> [f64; 3] {
        for stamp in &self.stamps {
            let dx = (x - stamp.center[0]) / stamp.radius;
            let dy = (y - stamp.center[1]) / stamp.radius;
            let [cos, sin] = stamp.rotation;
            if inside(class, [dx * cos + dy * sin, dy * cos - dx * sin]) {
                return stamp.color;
            }
        }
        let along = (x - 0.5) * self.gradient[0] + (y - 0.5) * self.gradient[1] + 0.5;
        let [fx, fy, depth, phase] = self.texture;
        let ripple = depth * (x * fx + y * fy + phase).sin();
        std::array::from_fn(|c| {
            self.background[0][c] * (1.0 - along) + self.background[1][c] * along + ripple
        })
    }
}

/// Number of attempts to place the stamps of an image.
const TRIES: usize = 40;

/// Draws shapes that do not touch, on a background of luma `background_luma`.
fn draw_stamps(rng: &mut ViewRng, background_luma: f64) -> Vec<Stamp> {
    let n_stamps = 2 + rng.below(5) as usize;
    let mut stamps: Vec<Stamp> = Vec::with_capacity(n_stamps);
    let typical = rng.between(0.14, 0.24);
    for _ in 0..TRIES {
        if stamps.len() == n_stamps {
            break;
        }
        let radius = typical * rng.between(0.8, 1.25);
        let center = [rng.between(0.05, 0.95), rng.between(0.05, 0.95)];
        let is_free = stamps.iter().all(|other| {
            (center[0] - other.center[0]).hypot(center[1] - other.center[1]) > radius + other.radius
        });
        if !is_free {
            continue;
        }
        let angle = rng.between(0.0, std::f64::consts::TAU);
        let mut color = draw_color(rng, 0.0, 1.0);
        // An invisible shape has no class: its luma must differ from the background's.
        if (luma(color) - background_luma).abs() < 0.3 {
            let shift = if background_luma > 0.5 { -0.45 } else { 0.45 };
            color = color.map(|c| (0.5 * c + 0.5 * background_luma + shift).clamp(0.0, 1.0));
        }
        stamps.push(Stamp { center, radius, rotation: [angle.cos(), angle.sin()], color });
    }
    stamps
}

fn draw_color(rng: &mut ViewRng, low: f64, high: f64) -> [f64; 3] {
    [(); 3].map(|()| rng.between(low, high))
}

fn luma(color: [f64; 3]) -> f64 {
    color.iter().sum::<f64>() / 3.0
}

/// Returns `true` if a point, in units of the shape's radius, is inside the shape.
fn inside(class: u32, [x, y]: [f64; 2]) -> bool {
    let r = x.hypot(y);
    let box_distance = x.abs().max(y.abs());
    match class {
        0 => r < 0.85,
        1 => (0.55..0.95).contains(&r),
        2 => box_distance < 0.75,
        3 => (0.5..0.85).contains(&box_distance),
        4 => y < 0.7 && y > 1.9 * x.abs() - 0.95,
        5 => box_distance < 0.95 && x.abs().min(y.abs()) < 0.24,
        6 => {
            let angle = y.atan2(x);
            r < 0.65 + 0.32 * (5.0 * angle).cos()
        }
        7 => box_distance < 0.9 && ((y + 0.9) / 0.36).floor() as i32 % 2 == 0,
        8 => {
            let [x, y] = [x, y].map(|v| (v + 0.9).rem_euclid(0.6) - 0.3);
            box_distance < 0.9 && x.hypot(y) < 0.22
        }
        _ => r < 0.9 && (x - 0.42).hypot(y) > 0.72,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_reproducible_and_classes_are_equally_frequent() {
        assert_eq!(image(1, 5, 16), image(1, 5, 16));
        assert_ne!(image(1, 5, 16).1, image(2, 5, 16).1);
        let mut counts = [0; 10];
        (0..2000).for_each(|i| counts[image(1, i, 1).0 as usize] += 1);
        assert!(counts.iter().all(|n| (140..260).contains(n)), "{counts:?}");
    }

    /// Mean color and mean brightness hardly depend on the class: over many images the class
    /// means of each channel lie within a few levels of one another.
    #[test]
    fn mean_color_does_not_depend_on_the_class() {
        let mut sums = [[0.0f64; 3]; 10];
        let mut counts = [0.0f64; 10];
        for i in 0..4000 {
            let (class, pixels) = image(3, i, 8);
            counts[class as usize] += 1.0;
            for pixel in pixels.chunks_exact(3) {
                for (sum, value) in sums[class as usize].iter_mut().zip(pixel) {
                    *sum += f64::from(*value) / 64.0;
                }
            }
        }
        for channel in 0..3 {
            let means: Vec<f64> = sums.iter().zip(counts).map(|(sum, n)| sum[channel] / n).collect();
            let (low, high) = means.iter().fold((f64::MAX, f64::MIN), |(l, h), m| (l.min(*m), h.max(*m)));
            assert!(high - low < 25.0, "channel {channel}: {means:?}");
        }
    }
}
