//! Any bytes as a sidecar: what is accepted can be walked, and points inside of the shard.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pipeline::shard::sidecar;
use pipeline::shard::index::ShardIndex;

fuzz_target!(|data: &[u8]| {
    if let Ok(index) = sidecar::parse(data) {
        for i in 0..index.len() {
            let _ = index.key(i);
            for member in index.members(i) {
                assert!(member.offset_bytes + member.len_bytes <= index.shard_bytes);
                assert_eq!(index.member(i, &[member.extension]), Some(member));
            }
        }
    }
});
