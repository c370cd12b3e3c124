//! A hash that identifies weights.

use networks::NamedTensor;
use xxhash_rust::xxh3::Xxh3;

/// Hashes `tensors`: equal names, shapes and values have equal hashes, in any file.
pub fn fingerprint(tensors: &[NamedTensor]) -> u64 {
    let mut hash = Xxh3::new();
    for tensor in tensors {
        hash.update(format!("{} {:?}", tensor.name, tensor.shape).as_bytes());
        for value in &tensor.values {
            hash.update(&value.to_le_bytes());
        }
    }
    hash.digest()
}
