//! Shards that other tools wrote: see `scripts/golden/shards.py`.

use augment::decode::decode;
use pipeline::{Dataset, SampleId, Storage, StorageConfig};

use crate::support::{World, ok};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/shards");

fn open(name: &str) -> Dataset {
    let folder = tempfile::tempdir().unwrap();
    let storage = Storage::new(StorageConfig::new(folder.path().join("cache")));
    Dataset::open(&[format!("{FOLDER}/{name}")], &storage).unwrap()
}

/// The ShardWriter of webdataset writes keys with folders, several images per sample and sorted
/// members.
#[test]
fn shards_of_webdataset_are_read() {
    let dataset = open("webdataset-000000.tar");
    assert_eq!(dataset.n_samples(), 3);
    for i in 0..3u32 {
        let sample = dataset.read(SampleId(u64::from(i))).unwrap();
        assert_eq!((sample.key.as_str(), sample.label), (format!("train/n0{i}/img_{i}").as_str(), Some(i)));
        let image = decode(sample.image.bytes(), &Default::default()).unwrap();
        assert_eq!((image.width_px, image.height_px), (24, 16));
        assert!(image.data[0].abs_diff(40 * i as u8) < 8, "the jpg, not the mask");
    }
}

/// img2dataset writes captions and metadata with the image, and omits failed downloads.
#[test]
fn shards_of_img2dataset_are_read() {
    let dataset = open("00000.tar");
    assert_eq!(dataset.n_samples(), 3);
    let sample = dataset.read(SampleId(2)).unwrap();
    assert_eq!((sample.key.as_str(), sample.label), ("000000002", None));
    assert!(decode(sample.image.bytes(), &Default::default()).is_ok());
}

/// An index of wids lists both shards, relative to its path.
#[test]
fn an_index_of_wids_is_a_shard_list() {
    let dataset = open("wids.json");
    assert_eq!(dataset.shard_sizes(), [3, 3]);
    let world = World::new(1);
    let list = world.ocelli(&["shards", "ls", &format!("{FOLDER}/wids.json")]);
    ok(&list);
    assert_eq!(String::from_utf8_lossy(&list.stdout).lines().count(), 6);
}
