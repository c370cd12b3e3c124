//! Batches of noise, for measurements without a data path.

use augment::{Batch, Depth, GroupSpec, IGNORED_CLASS, MultiCrop, PixelFormat, SoftLabel, ViewRng, Views};
use ranks::topology::Topology;

/// Domain of the random streams of noise.
pub(super) const DOMAIN: u64 = 0x6e6f_6973_6500_0000;

/// Creates a batch of noise for `multicrop`, of pixels of `format`. Its images are of two classes
/// in turn, for methods that learn from labels, and every fifth has equal shares of both. So are
/// squares of its pixels, for methods that learn from masks.
pub fn noise_batch(multicrop: &MultiCrop, format: PixelFormat, n_samples: usize, seed: u64) -> Batch {
    let mut rng = ViewRng::from_words([seed, DOMAIN, 0, 0]);
    let mut samples = Vec::with_capacity(n_samples);
    let mut labels: Vec<SoftLabel> = Vec::with_capacity(n_samples);
    for index in 0..n_samples {
        let mut groups = Vec::new();
        let mut masks = Vec::new();
        for group in multicrop.groups() {
            let n_pixels = group.n_views * (group.size_px * group.size_px) as usize;
            groups.push(noise(&mut rng, format, n_pixels));
            masks.push(squares(index, group));
        }
        samples.push(Views { groups, masks });
        labels.push(match index % 5 {
            4 => vec![(0, 0.5), (1, 0.5)],
            _ => vec![(index as u32 % 2, 1.0)],
        });
    }
    Batch { index: 0, samples, labels, sample_ids: (0..n_samples as u64).collect() }
}

/// Draws squares of two classes, a third as large as the views, for the views of image `index`, and
/// a line of pixels that do not count, which is longer in later images.
fn squares(index: usize, group: GroupSpec) -> Vec<u8> {
    let side = group.size_px as usize;
    let mut mask = Vec::with_capacity(group.n_views * side * side);
    for view in 0..group.n_views {
        for y in 0..side {
            for x in 0..side {
                let square = 3 * x / side + 3 * y / side + index + view;
                mask.push(if y == 0 && x <= index % side { IGNORED_CLASS } else { (square % 2) as u8 });
            }
        }
    }
    mask
}

/// Selects the images of a global batch of noise that belong to a rank, with their labels.
pub fn rank_share(batch: Batch, topology: Topology) -> Batch {
    let mut samples = Vec::new();
    let mut labels = Vec::new();
    let mut sample_ids = Vec::new();
    for (i, (sample, label)) in batch.samples.into_iter().zip(batch.labels).enumerate() {
        if i % topology.world_size == topology.data_rank() {
            samples.push(sample);
            labels.push(label);
            sample_ids.push(i as u64);
        }
    }
    Batch { index: batch.index, samples, labels, sample_ids }
}

/// Draws `n_pixels` pixels of `format`: integers from their full range, or floating-point values in
/// `[0, 1)`.
pub(super) fn noise(rng: &mut ViewRng, format: PixelFormat, n_pixels: usize) -> Vec<u8> {
    let n_values = n_pixels * format.n_channels;
    match format.depth {
        Depth::Float => (0..n_values).flat_map(|_| rng.uniform().to_le_bytes()).collect(),
        depth => (0..n_values * depth.bytes()).map(|_| rng.below(256) as u8).collect(),
    }
}
