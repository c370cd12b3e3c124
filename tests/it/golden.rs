use augment::blur::GaussianBlur;
use augment::color;
use augment::crop::CropBox;
use augment::hue::hue;
use augment::resize::{BoxResizer, Interpolation};
use augment::solarize::solarize;
use augment::{Planes, Rgb8};

fn golden(name: &str) -> Vec<u8> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/augment");
    std::fs::read(format!("{folder}/{name}.bin")).unwrap()
}

fn input() -> Rgb8 {
    Rgb8::new(37, 29, golden("input"))
}

fn apply(f: impl FnOnce(&mut Planes)) -> Vec<u8> {
    let mut image = Planes::from(&input());
    f(&mut image);
    Rgb8::from(&image).data
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
        ("hue_0.1", apply(|i| hue(i, 0.1))),
        ("hue_-0.07", apply(|i| hue(i, -0.07))),
        ("hue_0.37", apply(|i| hue(i, 0.37))),
        ("gray", apply(color::grayscale)),
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

/// Sizes of the resize goldens: `SIZES` of `scripts/golden/augment.py`.
const SIZES: [[u32; 2]; 10] =
    [[16, 12], [40, 40], [1, 1], [3, 50], [27, 22], [27, 9], [13, 22], [70, 5], [65, 67], [9, 7]];

/// Bit for bit Pillow 12, which crops first and then resizes rows before columns.
#[test]
fn resize_equals_pillow() {
    let crop = CropBox { left_px: 5, top_px: 3, width_px: 27, height_px: 22 };
    let mut resizer = BoxResizer::default();
    for (filter, interpolation) in
        [("bicubic", Interpolation::Bicubic), ("bilinear", Interpolation::Bilinear)]
    {
        for [w, h] in SIZES {
            let mut out = Planes::default();
            resizer.resize(&input(), crop, [w, h], interpolation, &mut out).unwrap();
            let theirs = golden(&format!("{filter}_{w}x{h}"));
            assert_eq!(largest_difference(&Rgb8::from(&out).data, &theirs), 0, "{filter} {w}x{h}");
        }
    }
}
