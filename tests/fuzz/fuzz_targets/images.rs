//! Any bytes as an image: what is decoded has the size that its header says, and no more pixels
//! than allowed.

#![no_main]

use augment::DecodeRules;
use augment::decode::decode;
use augment::facts::facts;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let rules = DecodeRules { max_pixels: 1 << 20, apply_exif: data.len() % 2 == 0, ..DecodeRules::default() };
    let _ = facts(data);
    if let Ok(image) = decode(data, &rules) {
        let n_pixels = u64::from(image.width_px) * u64::from(image.height_px);
        assert!(n_pixels <= rules.max_pixels && image.data.len() as u64 == 3 * n_pixels);
    }
});
