//! TIFF and GIF files of other programs, decoded to Pillow's bytes.

use augment::bands::exceeds_rgb8;
use augment::decode::decode;
use augment::facts::{ColorKind, facts};
use augment::{AugmentError, DecodeRules};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/pictures");

/// A file of `scripts/golden/pictures.py`, with the size and the CRC-32 of the pixels that Pillow
/// decodes.
struct Golden {
    name: String,
    bytes: Vec<u8>,
    size_px: [u32; 2],
    crc32: u32,
}

fn goldens() -> Vec<Golden> {
    let table = std::fs::read_to_string(format!("{FOLDER}/pixels.csv")).unwrap();
    let mut goldens = Vec::new();
    for line in table.lines().skip(1) {
        let [name, width, height, crc32] = line.split(',').collect::<Vec<_>>().try_into().unwrap();
        goldens.push(Golden {
            name: name.to_string(),
            bytes: std::fs::read(format!("{FOLDER}/{name}")).unwrap(),
            size_px: [width.parse().unwrap(), height.parse().unwrap()],
            crc32: crc32.parse().unwrap(),
        });
    }
    goldens
}

#[test]
fn pixels_equal_those_of_pillow() {
    let goldens = goldens();
    assert!(goldens.len() > 15, "{} files", goldens.len());
    for Golden { name, bytes, size_px, crc32 } in goldens {
        let image = decode(&bytes, &DecodeRules::default()).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!([image.width_px, image.height_px], size_px, "{name}");
        let mut crc = flate2::Crc::new();
        crc.update(&image.data);
        assert_eq!(crc.sum(), crc32, "{name}");
        // Facts that statistics and checks of data sets report.
        let facts = facts(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        let color = if name.starts_with("inks") {
            ColorKind::Cmyk
        } else if name.starts_with("gray") {
            ColorKind::Gray
        } else if name.contains("transparent") {
            ColorKind::Rgba
        } else {
            ColorKind::Rgb
        };
        assert_eq!(facts.color, color, "{name}");
        let format = name.rsplit_once('.').unwrap().1.replace("tif", "tiff");
        assert_eq!(facts.format, format, "{name}");
        assert_eq!([facts.width_px, facts.height_px], size_px, "{name}");
    }
}

/// A file of several pages exceeds a PNG of RGB, so that packing does not convert it.
#[test]
fn several_pages_exceed_an_rgb_image() {
    let one = std::fs::read(format!("{FOLDER}/strips_rgb.tif")).unwrap();
    assert!(!exceeds_rgb8(&one));
    // The offset of the next directory, at the end of the first, now points to a copy of it.
    let directory = u32::from_le_bytes(one[4..8].try_into().unwrap()) as usize;
    let n_entries = usize::from(u16::from_le_bytes(one[directory..directory + 2].try_into().unwrap()));
    let next = directory + 2 + 12 * n_entries;
    let mut two = one.clone();
    let copy = two.len();
    two.extend_from_within(directory..next + 4);
    two[next..next + 4].copy_from_slice(&(copy as u32).to_le_bytes());
    assert!(exceeds_rgb8(&two));
}

/// A tile whose JPEG states more pixels than the tile has is not decoded.
#[test]
fn tiles_larger_than_their_page_are_refused() {
    let mut bytes = std::fs::read(format!("{FOLDER}/tiles_rgb.tif")).unwrap();
    let frame = bytes.windows(4).position(|window| window == [0xff, 0xc0, 0, 17]).unwrap();
    bytes[frame + 5..frame + 9].copy_from_slice(&[0x20, 0, 0x20, 0]);
    let error = decode(&bytes, &DecodeRules::default()).unwrap_err();
    assert!(matches!(error, AugmentError::TooManyPixels { width_px: 8192, .. }), "{error}");
}

/// A canvas around the image is transparent where the image has a transparent color, and only
/// there.
#[test]
fn the_background_is_visible_through_a_transparent_canvas() {
    let rules = DecodeRules { background: Some([1, 2, 3]), ..DecodeRules::default() };
    for (name, is_visible) in [("offset_transparent.gif", true), ("offset.gif", false)] {
        let image = decode(&std::fs::read(format!("{FOLDER}/{name}")).unwrap(), &rules).unwrap();
        assert_eq!(image.data[..3] == [1, 2, 3], is_visible, "{name}");
    }
}

/// A file with a changed byte, or without its end, gives an image within the limit of pixels or an
/// error.
#[test]
fn damaged_files_give_an_image_or_an_error() {
    let rules = DecodeRules { max_pixels: 1 << 16, apply_exif: true, ..DecodeRules::default() };
    let mut n_errors = 0;
    for Golden { name, bytes, .. } in goldens() {
        assert!(decode(&bytes[..bytes.len() / 2], &rules).is_err(), "{name}");
        for at in 0..bytes.len().min(600) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0xff;
            match decode(&damaged, &rules) {
                Ok(image) => assert!(image.data.len() <= 3 << 16, "{name}, byte {at}"),
                Err(AugmentError::TooManyPixels { .. } | AugmentError::Decode(_) | AugmentError::Empty) => {
                    n_errors += 1;
                }
                Err(error) => panic!("{name}, byte {at}: {error}"),
            }
            let _ = facts(&damaged);
        }
    }
    assert!(n_errors > 100, "{n_errors} errors");
}
