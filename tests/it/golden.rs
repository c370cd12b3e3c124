use augment::blur::GaussianBlur;
use augment::color;
use augment::crop::CropBox;
use augment::resize::{BoxResizer, Interpolation};
use augment::solarize::solarize;
use augment::{Rgb8, color::grayscale};

fn golden(name: &str) -> Vec<u8> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/augment");
    std::fs::read(format!("{folder}/{name}.bin")).unwrap()
}

fn input() -> Rgb8 {
    Rgb8::new(37, 29, golden("input"))
}

fn apply(f: impl FnOnce(&mut Rgb8)) -> Vec<u8> {
    let mut image = input();
    f(&mut image);
    image.data
}

/// Bit for bit Pillow 12 (see `scripts/golden/augment.py` for how the files were made).
#[test]
fn color_operations_equal_pillow() {
    let cases: [(&str, Vec<u8>); 11] = [
        ("brightness_0.7", apply(|i| color::brightness(i, 0.7))),
        ("brightness_1.35", apply(|i| color::brightness(i, 1.35))),
        ("contrast_0.6", apply(|i| color::contrast(i, 0.6))),
        ("contrast_1.4", apply(|i| color::contrast(i, 1.4))),
        ("saturation_0.8", apply(|i| color::saturation(i, 0.8))),
        ("saturation_1.2", apply(|i| color::saturation(i, 1.2))),
        ("hue_0.1", apply(|i| color::hue(i, 0.1))),
        ("hue_-0.07", apply(|i| color::hue(i, -0.07))),
        ("hue_0.37", apply(|i| color::hue(i, 0.37))),
        ("gray", apply(grayscale)),
        ("solarize", apply(solarize)),
    ];
    for (name, ours) in cases {
        let theirs = golden(name);
        let n_different = ours.iter().zip(&theirs).filter(|(a, b)| a != b).count();
        assert_eq!(n_different, 0, "{name}: {n_different} of {} bytes differ", theirs.len());
    }
}

fn largest_difference(ours: &[u8], theirs: &[u8]) -> u8 {
    assert_eq!(ours.len(), theirs.len());
    ours.iter().zip(theirs).map(|(a, b)| a.abs_diff(*b)).max().unwrap()
}

#[test]
fn blur_is_within_one_level_of_torchvision() {
    for (name, sigma) in [("blur_0.4", 0.4), ("blur_1.7", 1.7)] {
        let ours = apply(|i| GaussianBlur::default().apply(i, sigma));
        assert!(largest_difference(&ours, &golden(name)) <= 1, "{name}");
    }
}

/// `fast_image_resize` rounds its coefficients more coarsely than Pillow and takes the passes the
/// other way round. On this noise, harsher than any photograph, that is 13 levels at the most.
#[test]
fn resize_stays_close_to_pillow() {
    let crop = CropBox { left_px: 5, top_px: 3, width_px: 27, height_px: 22 };
    for (name, size) in [("resize_16x12", [16, 12]), ("resize_40x40", [40, 40])] {
        let mut out = Rgb8::default();
        BoxResizer::default().resize(&input(), crop, size, Interpolation::Bicubic, &mut out).unwrap();
        let theirs = golden(name);
        let mean = out.data.iter().zip(&theirs).map(|(a, b)| f64::from(a.abs_diff(*b))).sum::<f64>()
            / theirs.len() as f64;
        let largest = largest_difference(&out.data, &theirs);
        assert!(largest <= 14 && mean < 0.5, "{name}: largest {largest}, mean {mean}");
    }
}
