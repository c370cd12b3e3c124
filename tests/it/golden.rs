use augment::Interpolation;
use augment::blur::Blur;
use augment::color;
use augment::crop::{CropBox, candidate, centered_fallback};
use augment::hue::hue;
use augment::resize::BoxResizer;
use augment::solarize::solarize;
use augment::{Depth, Erase, Mask, Mixed, Planes, Rgb8, Transform, Views};

fn golden(name: &str) -> Vec<u8> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/augment");
    std::fs::read(format!("{folder}/{name}.bin")).unwrap()
}

fn input() -> Rgb8 {
    Rgb8::new(37, 29, golden("input"))
}

/// Returns the pixels of the input image after an operation.
fn apply(operation: impl FnOnce(&mut Planes)) -> Vec<u8> {
    let mut image = Planes::from(&input());
    operation(&mut image);
    Rgb8::from(&image).data
}

/// Results equal Pillow 12 bit for bit (`scripts/golden/augment.py` made the files).
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
        assert_eq!(ours.len(), theirs.len(), "{name}");
        let n_different = ours.iter().zip(&theirs).filter(|(a, b)| a != b).count();
        assert_eq!(n_different, 0, "{name}: {n_different} of {} bytes differ", theirs.len());
    }
}

/// Parses a field of a row of a CSV file.
fn parse_u32(fields: &[&str], column: usize) -> u32 {
    fields[column].parse().unwrap()
}

/// Returns the fields of the rows of a CSV file, without the names of the columns.
fn golden_rows(name: &str) -> Vec<Vec<String>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/augment");
    let text = std::fs::read_to_string(format!("{folder}/{name}.csv")).unwrap();
    text.lines().skip(1).map(|line| line.split(',').map(String::from).collect()).collect()
}

/// Images after mixup and cutmix equal those of timm's `FastCollateMixup` byte for byte, for the
/// same share and box, and so do the shares that they keep (`scripts/golden/mixing.py`).
#[test]
fn mixed_images_equal_timm() {
    let mut images = Vec::new();
    for bytes in golden("mixing_input").chunks_exact(3 * 12 * 12) {
        images.push(Views { groups: vec![bytes.to_vec()], ..Views::default() });
    }
    let rows = golden_rows("mixing");
    assert_eq!(rows.len(), 6);
    for row in rows {
        let drawn = row[1].parse().unwrap();
        let center = [row[2].parse().unwrap(), row[3].parse().unwrap()];
        let mixed = if row[0].starts_with("mixup") {
            Mixed::Blend { share: drawn }
        } else {
            Mixed::cut(drawn, center, 12).unwrap()
        };
        let share: f64 = row[4].parse().unwrap();
        assert!((mixed.share() - share).abs() < 1e-12, "{row:?}");
        let mut ours = images.clone();
        let (first, second) = ours.split_at_mut(2);
        for (first, second) in first.iter_mut().zip(second) {
            mixed.mix_views(first, second, Depth::Eight);
        }
        let bytes: Vec<u8> = ours.into_iter().flat_map(|views| views.groups.concat()).collect();
        assert!(bytes == golden(&format!("mixing_{}", row[0])), "{row:?}");
    }
}

/// Boxes equal those of timm's `RandomErasing` for the same random numbers: of the first try that
/// fits into the view (`scripts/golden/mixing.py`).
#[test]
fn erased_boxes_equal_timm() {
    let rows = golden_rows("erased_boxes");
    let mut n_retries = 0;
    for row in &rows {
        let size_px = row[0].parse().unwrap();
        let drawn: Vec<f64> = row[1].split(' ').map(|number| number.parse().unwrap()).collect();
        let mut tries = drawn.chunks_exact(2);
        let sides = tries.find_map(|pair| Erase::sides(pair[0], pair[1], size_px));
        assert_eq!(tries.len(), 0, "the same try is accepted: {row:?}");
        assert_eq!(sides, Some([row[4].parse().unwrap(), row[5].parse().unwrap()]), "{row:?}");
        n_retries += usize::from(drawn.len() > 2);
    }
    assert!(rows.len() > 150 && n_retries > 20, "{} boxes, {n_retries} retries", rows.len());
}

/// Boxes equal those of torchvision's `RandomResizedCrop.get_params` for the same random numbers:
/// sizes of accepted tries, tries that do not fit, and the centered fallback
/// (`scripts/golden/crop.py`).
#[test]
fn crop_boxes_equal_torchvision() {
    let text = String::from_utf8(
        std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/golden/augment/crop_boxes.csv")).unwrap(),
    )
    .unwrap();
    let mut n_fallbacks = 0;
    let mut n_retries = 0;
    for line in text.lines().skip(1) {
        let fields: Vec<&str> = line.split(',').collect();
        let width = parse_u32(&fields, 0);
        let height = parse_u32(&fields, 1);
        let scale = [fields[2].parse().unwrap(), fields[3].parse().unwrap()];
        let uniforms: Vec<f32> = fields[4].split(' ').map(|u| u.parse().unwrap()).collect();
        let mut tries = uniforms.chunks_exact(2);
        let accepted = tries.find_map(|pair| candidate(pair[0], pair[1], width, height, scale, RATIO));
        assert_eq!(tries.len(), 0, "the same try is accepted: {line}");
        n_retries += usize::from(uniforms.len() > 2);
        let size = if let Some(size) = accepted {
            size
        } else {
            n_fallbacks += 1;
            let fallback = centered_fallback(width, height, RATIO);
            assert_eq!(fallback.top_px, parse_u32(&fields, 6), "{line}");
            assert_eq!(fallback.left_px, parse_u32(&fields, 7), "{line}");
            (fallback.width_px, fallback.height_px)
        };
        assert_eq!(size, (parse_u32(&fields, 9), parse_u32(&fields, 8)), "{line}");
    }
    assert!(n_fallbacks > 20 && n_retries > 50, "{n_fallbacks} fallbacks, {n_retries} retries");
}

/// The square of an evaluation equals that of torchvision's `Resize` and `CenterCrop`, bit for bit.
#[test]
fn evaluation_squares_equal_torchvision() {
    for (shape, image) in [("wide", input()), ("tall", Rgb8::new(29, 37, golden("tall")))] {
        for (resize_px, size_px) in [(32, 28), (33, 28), (20, 20), (61, 50)] {
            let planes = Transform::with_resize(resize_px, size_px).unwrap().apply(&image).unwrap();
            let square = Planes { width_px: size_px, height_px: size_px, data: planes };
            let name = format!("{shape}_{resize_px}_{size_px}");
            assert!(Rgb8::from(&square).data == golden(&name), "{name}");
        }
    }
}

const RATIO: [f64; 2] = [3.0 / 4.0, 4.0 / 3.0];

fn largest_difference(ours: &[u8], theirs: &[u8]) -> u8 {
    assert_eq!(ours.len(), theirs.len());
    ours.iter().zip(theirs).map(|(a, b)| a.abs_diff(*b)).max().unwrap()
}

/// Taps and deviations of the blur goldens: `TORCHVISION_BLURS` of `scripts/golden/augment.py`.
const TORCHVISION_BLURS: [(usize, &str); 8] =
    [(9, "0.1"), (9, "0.4"), (9, "1.0"), (9, "1.7"), (9, "2.0"), (7, "1.3"), (23, "0.8"), (23, "2.0")];

/// Radii of the blur goldens: `PILLOW_BLURS` of `scripts/golden/augment.py`.
const PILLOW_BLURS: [&str; 11] =
    ["0.1", "0.25", "0.5", "1.0", "1.4", "1.45", "1.7", "2.0", "2.6", "7.5", "40.0"];

/// At most 3 bytes may differ, by one level, where f32 sums are so close to a half that their order
/// matters.
#[test]
fn torchvision_blur_equals_torchvision() {
    let mut n_different = 0;
    for (n_taps, sigma) in TORCHVISION_BLURS {
        let ours = apply(|i| Blur::default().torchvision(i, n_taps, sigma.parse().unwrap()));
        let theirs = golden(&format!("blur_{n_taps}_{sigma}"));
        assert!(largest_difference(&ours, &theirs) <= 1, "{n_taps} taps, {sigma}");
        n_different += ours.iter().zip(&theirs).filter(|(a, b)| a != b).count();
    }
    assert!(n_different <= 3, "{n_different} bytes differ");
}

#[test]
fn pillow_blur_equals_pillow() {
    for radius in PILLOW_BLURS {
        let ours = apply(|i| Blur::default().pillow(i, radius.parse().unwrap()));
        assert!(ours == golden(&format!("pillow_blur_{radius}")), "{radius}");
        let mut small = Planes::from(&Rgb8::new(3, 2, golden("small")));
        Blur::default().pillow(&mut small, radius.parse().unwrap());
        assert!(Rgb8::from(&small).data == golden(&format!("pillow_blur_small_{radius}")), "{radius}, small");
    }
}

/// Sizes of the resize goldens: `SIZES` of `scripts/golden/augment.py`.
const SIZES: [[u32; 2]; 10] =
    [[16, 12], [40, 40], [1, 1], [3, 50], [27, 22], [27, 9], [13, 22], [70, 5], [65, 67], [9, 7]];

/// Results equal Pillow 12 bit for bit, which crops first and then resizes rows before columns.
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

/// Sizes of the crops of the mask goldens: `SIZES` of `scripts/golden/masks.py`.
const MASK_SIZES: [[u32; 2]; 12] = [
    [16, 12],
    [40, 40],
    [1, 1],
    [3, 50],
    [27, 22],
    [27, 9],
    [13, 22],
    [70, 5],
    [65, 67],
    [9, 7],
    [33, 33],
    [9, 55],
];

/// Masks equal those of Pillow and torchvision bit for bit: crops and whole masks resized by
/// nearest neighbor, and the square of an evaluation (`scripts/golden/masks.py`).
#[test]
fn masks_equal_pillow() {
    let pixels = image::GrayImage::from_raw(37, 29, golden("mask_input")).unwrap();
    let mut png = std::io::Cursor::new(Vec::new());
    pixels.write_to(&mut png, image::ImageFormat::Png).unwrap();
    let mask = Mask::decode(png.get_ref(), 37 * 29).unwrap();
    assert!(mask.classes() == golden("mask_input"));
    let crop = CropBox { left_px: 5, top_px: 3, width_px: 27, height_px: 22 };
    for [w, h] in MASK_SIZES {
        assert!(mask.resized(crop, [w, h]) == golden(&format!("mask_{w}x{h}")), "{w}x{h}");
    }
    let whole = CropBox { left_px: 0, top_px: 0, width_px: 37, height_px: 29 };
    for [w, h] in [[32, 32], [98, 112], [640, 3]] {
        assert!(mask.resized(whole, [w, h]) == golden(&format!("mask_whole_{w}x{h}")), "whole {w}x{h}");
    }
    for (resize_px, size_px) in [(32, 28), (33, 28), (20, 20), (61, 50)] {
        let square = mask.transformed(&Transform::with_resize(resize_px, size_px).unwrap());
        assert!(square == golden(&format!("mask_{resize_px}_{size_px}")), "{resize_px}, {size_px}");
    }
}
