//! TIFF and GIF files of other programs, decoded to Pillow's bytes.

use augment::bands::exceeds_rgb8;
use augment::decode::decode;
use augment::facts::{ColorKind, facts};
use augment::{AugmentError, DecodeRules};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/pictures");

/// A file of `scripts/golden/pictures.py`, and what Pillow decodes it to.
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
fn pixels_are_pillows() {
    let goldens = goldens();
    assert!(goldens.len() > 15, "{} files", goldens.len());
    for Golden { name, bytes, size_px, crc32 } in goldens {
        let image = decode(&bytes, &DecodeRules::default()).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!([image.width_px, image.height_px], size_px, "{name}");
        let mut crc = flate2::Crc::new();
        crc.update(&image.data);
        assert_eq!(crc.sum(), crc32, "{name}");
        // What statistics and checks of data sets say of them.
        let stated = facts(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        let color = match () {
            () if name.starts_with("inks") => ColorKind::Cmyk,
            () if name.starts_with("gray") => ColorKind::Gray,
            () if name.contains("transparent") => ColorKind::Rgba,
            () => ColorKind::Rgb,
        };
        assert_eq!(stated.color, color, "{name}");
        let format = name.rsplit_once('.').unwrap().1.replace("tif", "tiff");
        assert_eq!(stated.format, format, "{name}");
        assert_eq!([stated.width_px, stated.height_px], size_px, "{name}");
    }
}

/// Pages and turns that a PNG has no place for are not lost: such a file is more than a picture.
#[test]
fn pages_of_colors_are_told_from_copies_of_them() {
    let one = std::fs::read(format!("{FOLDER}/strips_rgb.tif")).unwrap();
    assert!(!exceeds_rgb8(&one));
    // The directory's end, where the next one would be named, now leads to the same page again.
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
fn a_tile_is_no_larger_than_the_page_says() {
    let mut bytes = std::fs::read(format!("{FOLDER}/tiles_rgb.tif")).unwrap();
    let frame = bytes.windows(4).position(|window| window == [0xff, 0xc0, 0, 17]).unwrap();
    bytes[frame + 5..frame + 9].copy_from_slice(&[0x20, 0, 0x20, 0]);
    let error = decode(&bytes, &DecodeRules::default()).unwrap_err();
    assert!(matches!(error, AugmentError::TooManyPixels { width_px: 8192, .. }), "{error}");
}

/// A canvas around the image is transparent where the image has a transparent color, and only
/// there.
#[test]
fn a_background_is_seen_through_a_canvas() {
    let rules = DecodeRules { background: Some([1, 2, 3]), ..DecodeRules::default() };
    for (name, is_seen) in [("offset_transparent.gif", true), ("offset.gif", false)] {
        let image = decode(&std::fs::read(format!("{FOLDER}/{name}")).unwrap(), &rules).unwrap();
        assert_eq!(image.data[..3] == [1, 2, 3], is_seen, "{name}");
    }
}

/// Files with a byte changed or without their end: an image or an error, within the limit of
/// pixels.
#[test]
fn damaged_files_are_an_image_or_an_error() {
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
