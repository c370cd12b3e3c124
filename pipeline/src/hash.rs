//! Hashes of files, digests as text, and the mixing of integers.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use md5::{Digest, Md5};
use xxhash_rust::xxh3::Xxh3;

/// Mixes the bits of an integer: the finalizer of SplitMix64 (Steele, Lea and Flood 2014).
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Formats a digest in hexadecimal digits.
pub(crate) fn hex(md5: Md5) -> String {
    md5.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Computes the XXH3-64 of a file, and its MD5 if `wants_md5`.
pub(crate) fn hash_file(file: &File, wants_md5: bool) -> io::Result<(u64, Option<String>)> {
    let mut xxh3 = Xxh3::new();
    let mut md5 = wants_md5.then(Md5::new);
    let mut buffer = vec![0; 1 << 20];
    let mut at_bytes = 0;
    loop {
        let n = file.read_at(&mut buffer, at_bytes)?;
        if n == 0 {
            return Ok((xxh3.digest(), md5.map(hex)));
        }
        xxh3.update(&buffer[..n]);
        if let Some(md5) = &mut md5 {
            md5.update(&buffer[..n]);
        }
        at_bytes += n as u64;
    }
}
