//! Levels of features for evaluation: the last level is the output of the whole network, and every
//! level is there.

use burn_tensor::Device;
use kernels::device::host::to_host;
use networks::Network;
use networks::backbone::ModelConfig;
use networks::features::Features;
use networks::patches::Normalization;

#[test]
fn the_last_level_is_what_the_network_gives() {
    for model in ModelConfig::examples() {
        let size_px = model.image_px();
        let levels = model.levels();
        let network = Network::random(&model, Normalization::half(model.n_channels()), 1, 2, &Device::flex());
        let images: Vec<Vec<u8>> = (0..3u32)
            .map(|i| {
                (0..model.n_channels() * size_px * size_px)
                    .map(|j| ((j as u32 * 37 + i * 91) % 251) as u8)
                    .collect()
            })
            .collect();
        let images: Vec<&[u8]> = images.iter().map(Vec::as_slice).collect();
        let values = |features: &Features| {
            let [b, n, d] = features.x.dims();
            to_host(features.x.clone().reshape([b * n * d]))
        };
        let all = network.levels(&images, size_px, usize::MAX);
        assert_eq!((all.len(), network.n_levels()), (levels.units.len(), levels.units.len()), "{model:?}");
        assert!(all.iter().all(|level| level.x.dims()[0] == 3), "{model:?}");
        assert!(levels.units.windows(2).all(|pair| pair[0] < pair[1]), "{model:?}");
        assert_eq!(values(all.last().unwrap()), values(&network.features(&images, size_px)), "{model:?}");
        let last = network.levels(&images, size_px, 1);
        assert_eq!(
            values(&last[0]),
            values(all.last().unwrap()),
            "{model:?}: fewer levels, the same last one"
        );
    }
}

/// Attention of the class token to the patches, where there is any, sums to at most 1 in each head,
/// and differs between two images.
#[test]
fn class_tokens_spread_their_attention_over_the_grid() {
    let mut attending = 0;
    for model in ModelConfig::examples() {
        let size_px = model.image_px();
        let network = Network::random(&model, Normalization::half(model.n_channels()), 1, 2, &Device::flex());
        let image = |i: usize| {
            (0..model.n_channels() * size_px * size_px).map(|j| (j * (37 + 2 * i) % 251) as u8).collect()
        };
        let images: [Vec<u8>; 2] = [image(0), image(1)];
        let images = images.each_ref().map(Vec::as_slice);
        let Some((weights, [rows, columns])) = network.class_attention(&images, size_px) else { continue };
        attending += 1;
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
    assert!(attending >= 2, "transformers attend");
}

/// Equal weights have equal fingerprints, and other weights have others.
#[test]
fn networks_are_named_by_their_weights() {
    for model in ModelConfig::examples() {
        let name = |seed| {
            let device = Device::flex();
            Network::random(&model, Normalization::half(model.n_channels()), seed, 1, &device).fingerprint()
        };
        assert_eq!(name(1), name(1), "{model:?}");
        assert_ne!(name(1), name(2), "{model:?}");
    }
}
