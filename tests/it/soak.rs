//! A long run of the data path. Slow: run it with `-- --ignored`.

use std::io::Cursor as Bytes;
use std::sync::Arc;

use augment::{DecodeRules, MultiCrop};
use image::codecs::jpeg::JpegEncoder;
use image::{ImageBuffer, Rgb};
use pipeline::shard::write::{ShardLimits, ShardWriter};
use pipeline::{Cursor, Dataset, LoaderConfig, Quarantine, Shard, Share};
use trainer::run::data::{StreamConfig, stream};

const N_SAMPLES: u64 = 100_000;
const BATCH: usize = 100;

/// Returns the resident memory of this process, in MB.
fn resident_mb() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: f64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * 4096.0 / 1e6
}

/// 100,000 samples, one in a hundred corrupt: memory does not grow, and each bad sample is listed
/// in the ledger once, even after a second pass.
#[test]
#[ignore = "minutes"]
fn memory_stays_constant_over_a_long_stream_with_bad_samples() {
    let folder = tempfile::tempdir().unwrap();
    let limits = ShardLimits { max_samples: 5_000, max_bytes: None };
    let mut writer = ShardWriter::new(&folder.path().join("data"), "t", limits).unwrap();
    let images: Vec<Vec<u8>> = (1..17)
        .map(|seed: u32| {
            let image =
                ImageBuffer::from_fn(40, 30, |x, y| Rgb([(x * seed) as u8, (y * seed) as u8, seed as u8]));
            let mut bytes = Bytes::new(Vec::new());
            JpegEncoder::new_with_quality(&mut bytes, 80).encode_image(&image).unwrap();
            bytes.into_inner()
        })
        .collect();
    for i in 0..N_SAMPLES {
        let image = &images[i as usize % images.len()];
        let bytes = if i % 100 == 7 { &image[..image.len() / 2] } else { image.as_slice() };
        writer.add(&format!("{i:08}"), &[("jpg", bytes)]).unwrap();
    }
    let shards: Vec<_> = writer.finish().unwrap().iter().map(|path| Shard::open(path).unwrap()).collect();
    let dataset = Arc::new(Dataset::new(shards).unwrap());
    let ledger = folder.path().join("quarantine.jsonl");
    let quarantine = Arc::new(Quarantine::open(&ledger, 0.02).unwrap());
    let config = StreamConfig {
        views: MultiCrop::dino(32, 16, 2).into(),
        seed: 3,
        window_shards: 4,
        n_threads: 2,
        rules: DecodeRules::default(),
        n_pixel_classes: None,
        loader: LoaderConfig { max_bytes: 4 << 20, ..LoaderConfig::default() },
    };
    let share = Share::solo(BATCH).unwrap();
    let mut pool = stream(dataset, config, share, Cursor(0), quarantine);
    let n_batches = N_SAMPLES / BATCH as u64;
    let mut early_mb = 0.0;
    for batch in 0..n_batches + n_batches / 5 {
        let views = pool.next_batch().unwrap().unwrap();
        assert_eq!(views.samples.len(), BATCH);
        pool.recycle(views);
        if batch == n_batches / 10 {
            early_mb = resident_mb();
        }
        if batch + 1 == n_batches {
            let lines = std::fs::read_to_string(&ledger).unwrap().lines().count() as u64;
            assert_eq!(lines, N_SAMPLES / 100, "each bad sample once");
        }
    }
    let late_mb = resident_mb();
    let lines = std::fs::read_to_string(&ledger).unwrap().lines().count() as u64;
    assert_eq!(lines, N_SAMPLES / 100, "a second pass adds nothing");
    assert!(late_mb < early_mb + 8.0, "{early_mb:.1} MB after a tenth, {late_mb:.1} MB at the end");
}
