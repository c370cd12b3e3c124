//! Batches of noise, which need no data path.

use augment::{Batch, MultiCrop, ViewRng, Views};

/// Creates a batch of noise for `multicrop`.
pub fn noise_batch(multicrop: &MultiCrop, n_samples: usize, seed: u64) -> Batch {
    let mut rng = ViewRng::from_words([seed, 0x6e6f_6973_6500_0000, 0, 0]);
    let mut views = || Views {
        groups: multicrop
            .groups()
            .iter()
            .map(|g| {
                (0..g.n_views * 3 * (g.size_px * g.size_px) as usize).map(|_| rng.below(256) as u8).collect()
            })
            .collect(),
    };
    Batch {
        index: 0,
        samples: (0..n_samples).map(|_| views()).collect(),
        labels: vec![None; n_samples],
        sample_ids: (0..n_samples as u64).collect(),
    }
}
