//! Solarization, as by Pillow's `ImageOps.solarize`.

use multiversion::multiversion;

use crate::Planes;

/// Inverts all values of at least 128.
pub fn solarize(image: &mut Planes) {
    invert_bright(&mut image.data);
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn invert_bright(data: &mut [u8]) {
    for value in data {
        // 255 - v is smaller than v exactly from 128 on.
        *value = (*value).min(255 - *value);
    }
}
