//! Pillow's `ImageOps.solarize`.

use crate::Rgb8;

/// Inverts what is at or above 128.
pub fn solarize(image: &mut Rgb8) {
    for value in &mut image.data {
        if *value >= 128 {
            *value = 255 - *value;
        }
    }
}
