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

/// Hashes of a file.
pub(crate) struct FileHashes {
    pub(crate) xxh3: u64,
    /// In hexadecimal digits.
    pub(crate) md5: String,
}

/// Computes the XXH3-64 of a file.
pub(crate) fn xxh3_of_file(file: &File) -> io::Result<u64> {
    let mut xxh3 = Xxh3::new();
    for_each_piece(file, |bytes| xxh3.update(bytes))?;
    Ok(xxh3.digest())
}

/// Computes the XXH3-64 and the MD5 of a file, which is read once.
pub(crate) fn hashes_of_file(file: &File) -> io::Result<FileHashes> {
    let mut xxh3 = Xxh3::new();
    let mut md5 = Md5::new();
    for_each_piece(file, |bytes| {
        xxh3.update(bytes);
        md5.update(bytes);
    })?;
    Ok(FileHashes { xxh3: xxh3.digest(), md5: hex(md5) })
}

/// Calls `f` with the bytes of a file, piece by piece.
fn for_each_piece(file: &File, mut f: impl FnMut(&[u8])) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 20];
    let mut at_bytes = 0;
    loop {
        let n = file.read_at(&mut buffer, at_bytes)?;
        if n == 0 {
            return Ok(());
        }
        f(&buffer[..n]);
        at_bytes += n as u64;
    }
}
