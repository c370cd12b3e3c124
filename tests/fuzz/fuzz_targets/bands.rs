//! Any bytes as an image of many channels: what is decoded has the channels that were asked for,
//! and no more pixels than allowed.

#![no_main]

use augment::bands::{decode, found, map_data};
use augment::{DecodeRules, Depth, PixelFormat};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let format = PixelFormat { n_channels: 1 + data.len() % 5, depth: Depth::Float };
    let rules = DecodeRules { max_pixels: 1 << 20, format, ..DecodeRules::default() };
    let _ = (found(&[data], &rules), map_data(data));
    if let Ok(image) = decode(&[data], &rules) {
        assert!(image.format() == format && image.n_pixels() as u64 <= rules.max_pixels);
    }
});
