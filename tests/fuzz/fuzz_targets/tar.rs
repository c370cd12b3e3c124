//! Any bytes as a tar: members lie inside of it, or it is an error.

#![no_main]

use std::io::Cursor;
use std::path::Path;

use libfuzzer_sys::fuzz_target;
use pipeline::shard::tar::{list_members_of, split_key};

fuzz_target!(|data: &[u8]| {
    if let Ok(members) = list_members_of(Cursor::new(data), data.len() as u64, Path::new("fuzz")) {
        for member in members {
            assert!(member.offset_bytes + member.len_bytes <= data.len() as u64);
            let _ = split_key(&member.name);
        }
    }
});
