//! Any bytes as a shard on a disk, plain and compressed, and as a list of shards: every sample that
//! is indexed can be read.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use pipeline::{Storage, StorageConfig};
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| {
    let shared = std::path::Path::new("/dev/shm");
    if shared.exists() { TempDir::new_in(shared) } else { TempDir::new() }.expect("temporary folder")
});

fuzz_target!(|data: &[u8]| {
    let config = StorageConfig { cache_bytes: 1 << 22, ..StorageConfig::new(FOLDER.path().join("cache")) };
    let storage = Storage::new(config);
    for name in ["a.tar", "a.tar.gz", "a.json"] {
        let path = FOLDER.path().join(name);
        std::fs::write(&path, data).expect("written");
        let Ok(sources) = storage.sources(&[path.display().to_string()]) else { continue };
        for source in &sources {
            if let Ok(shard) = storage.open(source) {
                for i in 0..shard.len() {
                    shard.members(i).expect("it was indexed");
                    let _ = shard.label(i);
                }
            }
            let _ = storage.forget(source);
        }
    }
});
