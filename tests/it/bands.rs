//! Images of many channels: decoding, and refusal of bad files.

use std::fs;

use augment::bands::{Bands, decode, sample_header};
use augment::facts::facts;
use augment::{AugmentError, DecodeRules, Depth, Image, PixelFormat, Transform};

/// Size and channels of the golden images (`scripts/golden/bands.py` made the files with tifffile,
/// Pillow and NumPy).
const SHAPE: [usize; 3] = [5, 14, 20];

pub(crate) fn golden(name: &str) -> Vec<u8> {
    fs::read(format!("{}/golden/bands/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

pub(crate) fn rules(n_channels: usize, depth: Depth) -> DecodeRules {
    DecodeRules { format: PixelFormat { n_channels, depth }, ..DecodeRules::default() }
}

/// Values of the golden image of 16 bits, or of 8 bits if `narrow`.
pub(crate) fn values(narrow: bool) -> Vec<f32> {
    if narrow {
        golden("narrow.bin").iter().map(|byte| f32::from(*byte)).collect()
    } else {
        let bytes = golden("wide.bin");
        bytes.as_chunks().0.iter().map(|pair| f32::from(u16::from_le_bytes(*pair))).collect()
    }
}

/// Asserts that `files` are an image of `rules`' format with these values.
pub(crate) fn check(files: &[&[u8]], rules: &DecodeRules, values: &[f32], name: &str) {
    let image = decode(files, rules).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!([image.height_px as usize, image.width_px as usize], SHAPE[1..], "{name}");
    assert!(image.values == values, "{name}");
    let stated = sample_header(files, rules).unwrap();
    assert_eq!((stated.n_channels, stated.width_px), (rules.format.n_channels, image.width_px), "{name}");
    assert!(rules.format.depth == Depth::Float || stated.depth == rules.format.depth, "{name}");
}

#[test]
fn every_layout_has_the_same_values() {
    let wide = values(false);
    for name in [
        "planes.tif",
        "planes_in_strips.tif",
        "pixels.tif",
        "tiles.tif",
        "tiled_planes.tif",
        "big.tif",
        "zstd.tif",
        "pages.tif",
        "overviews.tif",
        "color_and_more.tif",
        "color_and_more_planes.tif",
        "color_and_more_big.tif",
        "channels_first.npy",
        "channels_last.npy",
    ] {
        check(&[&golden(name)], &rules(5, Depth::Sixteen), &wide, name);
        check(&[&golden(name)], &rules(5, Depth::Float), &wide, name);
        assert_eq!(facts(&golden(name)).unwrap().width_px, 20, "{name}");
    }
    check(&[&golden("narrow.tif")], &rules(5, Depth::Eight), &values(true), "narrow.tif");
    check(&[&golden("gray.png")], &rules(1, Depth::Sixteen), &wide[..280], "gray.png");
    let signed: Vec<f32> = wide.iter().map(|value| value % 30_000.0 - 15_000.0).collect();
    check(&[&golden("signed.tif")], &rules(5, Depth::Float), &signed, "signed.tif");
    let floats: Vec<f32> = wide.iter().map(|value| (value - 30_000.0) / 16.0).collect();
    for name in ["floats.tif", "floats.npy"] {
        check(&[&golden(name)], &rules(5, Depth::Float), &floats, name);
    }
    let bands: Vec<Vec<u8>> = (0..5).map(|band| golden(&format!("band{band}.tif"))).collect();
    let bands: Vec<&[u8]> = bands.iter().map(Vec::as_slice).collect();
    check(&bands, &rules(5, Depth::Sixteen), &wide, "five files");
}

/// Three channels of 8 bits, the usual format, from arrays and from a file for each color.
#[test]
fn arrays_and_bands_of_colors_are_rgb() {
    let planes: Vec<u8> = (0..3 * 20 * 14u32).map(|i| (i * 37 % 251) as u8).collect();
    let expected =
        augment::Rgb8::from(&augment::Planes { width_px: 20, height_px: 14, data: planes.clone() });
    let channels_first = npy_u8([3, 14, 20], &planes);
    let channels_last = npy_u8([14, 20, 3], &expected.data);
    for file in [&channels_first, &channels_last] {
        assert_eq!(Image::decode(&[file], &DecodeRules::default()).unwrap(), expected.clone().into());
    }
    let colors: Vec<Vec<u8>> = planes.chunks(280).map(|plane| npy_u8([1, 14, 20], plane)).collect();
    let colors: Vec<&[u8]> = colors.iter().map(Vec::as_slice).collect();
    assert_eq!(Image::decode(&colors, &DecodeRules::default()).unwrap(), expected.into());
}

/// Pages, channels and the type of values decide whether a file fits into 8-bit RGB.
#[test]
fn headers_tell_files_that_exceed_8_bit_rgb() {
    use augment::bands::exceeds_rgb8;
    for name in ["three_pages.tif", "color_and_more.tif", "narrow.tif", "band0.tif", "gray.png", "floats.npy"]
    {
        assert!(exceeds_rgb8(&golden(name)), "{name}");
    }
    // Several arrays have one channel each, even if there are as many of them as rows.
    let square: Vec<Vec<u8>> = (0..4u16).map(|i| npy_u16([1, 4, 4], &[i; 16])).collect();
    let square: Vec<&[u8]> = square.iter().map(Vec::as_slice).collect();
    assert_eq!(decode(&square, &rules(4, Depth::Sixteen)).unwrap().values[16..18], [1.0, 1.0]);
    // The value that GDAL writes for pixels without data.
    let no_data = npy_f32([1, 1, 2], &[1.0, -f32::MAX]);
    let pixel = format!("a pixel is {}: not a number, or a marker of missing data", -f32::MAX);
    assert_undecodable(&[&no_data], &rules(1, Depth::Float), &pixel);
}

/// torchvision's resize and crop of floating-point tensors.
#[test]
fn the_transform_equals_torchvision() {
    let image = decode(&[&golden("planes.tif")], &rules(5, Depth::Sixteen)).unwrap();
    let square = Transform { resize_px: 12, size_px: 8 }.apply_to(&Image::from(image.clone())).unwrap();
    let ours = Bands::from_bytes(&square, image.format(), 8);
    let theirs = golden("small.bin");
    let theirs: Vec<f32> = theirs.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect();
    assert_eq!(ours.values.len(), theirs.len());
    let largest = ours.values.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest < 0.55, "{largest}: more than rounding");
}

/// Asserts that `files` are refused because of their format, `found`, which is not that of `rules`.
fn assert_other_format(files: &[&[u8]], rules: &DecodeRules, found: &str) {
    let error = decode(files, rules).unwrap_err();
    let expected = rules.format;
    assert!(matches!(error, AugmentError::Format { .. }), "{error}");
    assert_eq!(error.to_string(), format!("found {found}, expected {expected} (data.channels, data.bits)"));
}

/// Asserts that `files` are refused because they do not fit together, and that the reason names
/// `values`.
fn assert_do_not_fit(files: &[&[u8]], rules: &DecodeRules, values: &[&str]) {
    let error = decode(files, rules).unwrap_err();
    let AugmentError::Bands(reason) = &error else { panic!("{error}") };
    assert!(values.iter().all(|value| reason.contains(value)), "{error}");
}

/// Asserts that `files` cannot be decoded, for this reason.
fn assert_undecodable(files: &[&[u8]], rules: &DecodeRules, words: &str) {
    let error = decode(files, rules).unwrap_err();
    let AugmentError::Decode(reason) = &error else { panic!("{error}") };
    assert!(reason.contains(words), "{error}");
}

#[test]
fn files_that_do_not_fit_together_are_refused_with_the_cause() {
    let wide = golden("planes.tif");
    let narrow = golden("narrow.tif");
    let five = rules(5, Depth::Sixteen);
    assert_eq!(five.format.to_string(), "5 channels of 16 bits");
    assert_other_format(&[&wide], &rules(4, Depth::Sixteen), "5 channels");
    assert_other_format(&[&wide], &rules(13, Depth::Sixteen), "5 channels of 16 bits");
    assert_other_format(&[&narrow], &five, "5 channels of 8 bits");
    let signed = "5 channels of a type other than unsigned 8 or 16 bits";
    assert_other_format(&[&golden("signed.tif")], &five, signed);
    let one = golden("band0.tif");
    let two = golden("gray.png");
    let small = Image::decode(&[&one], &rules(1, Depth::Sixteen)).unwrap();
    assert_eq!(small.size_px(), [20, 14]);
    let ten = rules(10, Depth::Sixteen);
    assert_do_not_fit(&[&one, &narrow], &ten, &["file 2 has 8 bits", "file 1 has 16 bits"]);
    let pages = ["a page of the TIFF has 8 bits", "its first page has 16 bits"];
    assert_do_not_fit(&[&golden("mixed.tif")], &rules(2, Depth::Sixteen), &pages);
    let other_size = npy_u16([1, 3, 4], &[7; 12]);
    assert_do_not_fit(&[&one, &two, &other_size], &ten, &["file 3 has 4 x 3", "file 1 has 20 x 14"]);
    let holes = npy_f32([1, 1, 2], &[1.0, f32::NAN]);
    assert_undecodable(&[&holes], &rules(1, Depth::Float), "a pixel is NaN: not a number");
    // 8-bit RGB is requested, and the error gives the format in the header.
    let error = Image::decode(&[&wide], &DecodeRules::default()).unwrap_err();
    let AugmentError::Format { found, expected } = &error else { panic!("{error}") };
    assert_eq!((found.as_str(), *expected), ("5 channels of 16 bits", DecodeRules::default().format));
}

/// A header that states more pixels than the limit is refused before anything is allocated, for any
/// number of channels.
#[test]
fn headers_beyond_the_pixel_limit_are_refused() {
    let mut tiff = golden("planes.tif");
    // Width, length and rows of a strip, the tags 256, 257 and 278, as 32-bit numbers.
    for tag in [256u16, 257, 278] {
        let offset = tiff.windows(2).position(|bytes| bytes == tag.to_le_bytes()).unwrap();
        tiff[offset + 2..offset + 4].copy_from_slice(&4u16.to_le_bytes());
        tiff[offset + 8..offset + 12].copy_from_slice(&40_000u32.to_le_bytes());
    }
    let error = decode(&[&tiff], &rules(5, Depth::Sixteen)).unwrap_err();
    assert!(matches!(error, AugmentError::TooManyPixels { width_px: 40_000, .. }), "{error}");
    let error = decode(&[&npy_header([1, 60_000, 60_000], "<u2")], &rules(1, Depth::Sixteen)).unwrap_err();
    assert!(matches!(error, AugmentError::TooManyPixels { .. }), "{error}");
    // As many values as the largest photograph, in more channels.
    let wide = npy_header([1000, 1000, 1000], "<u2");
    let error = decode(&[&wide], &rules(1000, Depth::Sixteen)).unwrap_err();
    assert!(matches!(error, AugmentError::TooManyPixels { .. }), "{error}");
    // Several files together, each of which is small enough.
    let band = npy_header([1, 9000, 9000], "<u2");
    let error = decode(&[&band[..]; 4], &rules(4, Depth::Sixteen)).unwrap_err();
    assert!(matches!(error, AugmentError::TooManyPixels { .. }), "{error}");
    // Nested lists, which may take a parser exponential time; a stated length of 4 GiB; an axis
    // longer than any image.
    let nested = format!("{{'descr': '<u2', 'fortran_order': False, 'shape': {}}}\n", "[".repeat(60));
    let nested = [b"\x93NUMPY\x01\x00", &(nested.len() as u16).to_le_bytes()[..], nested.as_bytes()].concat();
    let long = [&b"\x93NUMPY\x02\x00\xff\xff\xff\xff"[..], b"{}"].concat();
    for odd in [nested, long, npy_header([1, usize::MAX, usize::MAX], "<u2")] {
        assert_undecodable(&[&odd], &rules(1, Depth::Sixteen), "its header is not one that NumPy writes");
    }
    let cut = npy_header([1, 100, 100], "<u2");
    assert_undecodable(&[&cut], &rules(1, Depth::Sixteen), "it ends before its last value");
}

/// Returns the next number below `bound` of a linear congruential generator.
fn next_below(state: &mut u64, bound: usize) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as usize % bound
}

/// Damaged files are errors: bytes are changed and files truncated, at pseudo-random offsets.
#[test]
fn damaged_files_never_panic() {
    let names = [
        "planes.tif",
        "tiles.tif",
        "tiled_planes.tif",
        "pages.tif",
        "overviews.tif",
        "big.tif",
        "floats.tif",
        "zstd.tif",
        "floats.npy",
        "channels_last.npy",
        "gray.png",
    ];
    let mut state = 7u64;
    let mut n_refused = 0;
    for name in names {
        let intact = golden(name);
        let n_bytes = intact.len();
        for _ in 0..400 {
            let mut bytes = intact.clone();
            // Most metadata of a TIFF is at one of its ends.
            let at_start = next_below(&mut state, 2) == 0;
            let distance = next_below(&mut state, n_bytes.min(400));
            let near_end = if at_start { distance } else { n_bytes - 1 - distance };
            for offset in [near_end, next_below(&mut state, n_bytes)] {
                bytes[offset] = next_below(&mut state, 256) as u8;
            }
            if next_below(&mut state, 4) == 0 {
                bytes.truncate(next_below(&mut state, n_bytes));
            }
            let limits = DecodeRules { max_pixels: 1 << 16, ..rules(5, Depth::Float) };
            let _ = sample_header(&[&bytes], &limits);
            let _ = facts(&bytes);
            let _ = augment::bands::map_data(&bytes);
            n_refused += usize::from(decode(&[&bytes], &limits).is_err());
        }
    }
    assert!(n_refused > 500, "{n_refused}");
}

/// Returns the header of a NumPy file of this shape.
fn npy_header(shape: [usize; 3], descr: &str) -> Vec<u8> {
    let [a, b, c] = shape;
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({a}, {b}, {c}), }}");
    let header = format!("{header:<117}\n");
    let len = (header.len() as u16).to_le_bytes();
    [b"\x93NUMPY\x01\x00", &len[..], header.as_bytes()].concat()
}

fn npy_u8(shape: [usize; 3], values: &[u8]) -> Vec<u8> {
    [&npy_header(shape, "|u1")[..], values].concat()
}

pub(crate) fn npy_u16(shape: [usize; 3], values: &[u16]) -> Vec<u8> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    [npy_header(shape, "<u2"), bytes].concat()
}

fn npy_f32(shape: [usize; 3], values: &[f32]) -> Vec<u8> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    [npy_header(shape, "<f4"), bytes].concat()
}
