//! Levels of features for evaluation: every level is returned, and the last one is the output of
//! the whole network.

use burn_tensor::Device;
use kernels::device::host::to_host;
use networks::Network;
use networks::backbone::ModelConfig;
use networks::patches::Normalization;
use networks::tokens::Tokens;

/// Reads all elements of tokens.
fn values(tokens: &Tokens) -> Vec<f32> {
    let [n, d] = tokens.x.dims();
    to_host(tokens.x.clone().reshape([n * d]))
}

/// Creates a network for `model` with random weights.
fn random_network(model: &ModelConfig, seed: u64, n_workers: usize) -> Network {
    Network::random(model, Normalization::half(model.n_channels()), seed, n_workers, &Device::flex())
}

#[test]
fn last_level_equals_the_network_output() {
    for model in ModelConfig::examples() {
        let size_px = model.image_px();
        let levels = model.levels();
        let network = random_network(&model, 1, 2);
        let n_bytes = model.n_channels() * size_px * size_px;
        let mut images: Vec<Vec<u8>> = Vec::new();
        for i in 0..3u32 {
            images.push((0..n_bytes).map(|j| ((j as u32 * 37 + i * 91) % 251) as u8).collect());
        }
        let images: Vec<&[u8]> = images.iter().map(Vec::as_slice).collect();
        let all = network.levels(&images, size_px, usize::MAX);
        assert_eq!((all.len(), network.n_levels()), (levels.units.len(), levels.units.len()), "{model:?}");
        assert!(all.iter().all(|level| level.n_sequences() == 3), "{model:?}");
        assert!(levels.units.windows(2).all(|pair| pair[0] < pair[1]), "{model:?}");
        assert_eq!(values(all.last().unwrap()), values(&network.tokens(&images, size_px)), "{model:?}");
        let last = network.levels(&images, size_px, 1);
        assert_eq!(
            values(&last[0]),
            values(all.last().unwrap()),
            "{model:?}: fewer levels, the same last one"
        );
    }
}

/// The attention of the class token to the patches, if the model has a class token, sums to less
/// than 1 in each head, and differs between two images.
#[test]
fn class_attention_covers_the_grid() {
    let mut n_attending = 0;
    for model in ModelConfig::examples() {
        let size_px = model.image_px();
        let network = random_network(&model, 1, 2);
        let n_bytes = model.n_channels() * size_px * size_px;
        let images: [Vec<u8>; 2] =
            [0, 1].map(|i: usize| (0..n_bytes).map(|j| (j * (37 + 2 * i) % 251) as u8).collect());
        let images = images.each_ref().map(Vec::as_slice);
        let Some((weights, [rows, columns])) = network.class_attention(&images, size_px) else { continue };
        n_attending += 1;
        let [b, heads, n] = weights.dims();
        assert_eq!((b, n), (2, rows * columns), "{model:?}");
        let weights = to_host(weights.reshape([b * heads * n]));
        assert!(weights.iter().all(|weight| *weight > 0.0), "{model:?}");
        let sums: Vec<f32> = weights.chunks_exact(n).map(|row| row.iter().sum()).collect();
        assert!(
            sums.iter().all(|sum| *sum < 1.0 && *sum > 0.5),
            "the class token has a share itself: {sums:?}"
        );
        assert_ne!(weights[..heads * n], weights[heads * n..], "{model:?}");
    }
    assert!(n_attending >= 2, "transformers attend");
}

#[test]
fn fingerprints_are_equal_only_for_equal_weights() {
    for model in ModelConfig::examples() {
        let fingerprint = random_network(&model, 1, 1).fingerprint();
        assert_eq!(fingerprint, random_network(&model, 1, 1).fingerprint(), "{model:?}");
        assert_ne!(fingerprint, random_network(&model, 2, 1).fingerprint(), "{model:?}");
    }
}
