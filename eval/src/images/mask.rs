//! Segmentation masks: PNGs of one channel or with a palette, whose values are classes.

use std::io::Cursor;

use augment::Transform;

/// Class that marks ignored pixels.
pub(crate) const IGNORED: u8 = 255;

/// Maximum number of pixels of a mask, checked before decoding.
const MAX_PIXELS: u64 = 89_478_485;

/// Classes of an image's pixels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mask {
    width_px: u32,
    height_px: u32,
    classes: Vec<u8>,
}

impl Mask {
    /// Decodes a PNG. Classes are the palette's indices, not its colors.
    ///
    /// # Errors
    /// A message if the bytes are not a PNG of one channel or with a palette.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut reader =
            png::Decoder::new(Cursor::new(bytes)).read_info().map_err(|error| error.to_string())?;
        let info = reader.info();
        let width_px = info.width;
        let height_px = info.height;
        let color = info.color_type;
        let bits = info.bit_depth as usize;
        if !matches!(color, png::ColorType::Grayscale | png::ColorType::Indexed) || bits > 8 {
            return Err(format!(
                "a mask has one channel of at most 8 bits or a palette, not {color:?} of {bits} bits"
            ));
        }
        if u64::from(width_px) * u64::from(height_px) > MAX_PIXELS {
            return Err(format!("{width_px} x {height_px} pixels exceed the limit"));
        }
        let mut raw = vec![0; reader.output_buffer_size().ok_or("it is too large")?];
        let frame = reader.next_frame(&mut raw).map_err(|error| error.to_string())?;
        let mut classes = Vec::with_capacity((width_px * height_px) as usize);
        for row in raw.chunks_exact(frame.line_size).take(height_px as usize) {
            classes.extend((0..width_px as usize).map(|x| {
                let byte = row[x * bits / 8];
                // Pixels of fewer than 8 bits are packed from the highest bit down.
                let shift = 8 - bits - (x * bits) % 8;
                (byte >> shift) & (0xff >> (8 - bits)) as u8
            }));
        }
        Ok(Self { width_px, height_px, classes })
    }

    /// Returns the width and height.
    pub(crate) fn size_px(&self) -> [u32; 2] {
        [self.width_px, self.height_px]
    }

    /// Returns the classes after `transform`, `[s, s]`, by nearest neighbor; pixels outside of the
    /// mask are [`IGNORED`].
    pub(crate) fn transformed(&self, transform: &Transform) -> Vec<u8> {
        let (resized_px, corner_px) = transform.placement([self.width_px, self.height_px]);
        let side = transform.size_px;
        let mut out = Vec::with_capacity((side * side) as usize);
        for y in 0..side {
            let row = source_px(y, corner_px[1], resized_px[1], self.height_px);
            for x in 0..side {
                let column = source_px(x, corner_px[0], resized_px[0], self.width_px);
                out.push(match (row, column) {
                    (Some(row), Some(column)) => self.classes[(row * self.width_px + column) as usize],
                    _ => IGNORED,
                });
            }
        }
        out
    }
}

/// Returns the pixel of the original nearest to pixel `px` of a crop that begins at `corner_px` of
/// the resized image, along one axis; `None` outside of the image.
fn source_px(px: u32, corner_px: i64, resized_px: u32, original_px: u32) -> Option<u32> {
    let px = u32::try_from(i64::from(px) + corner_px).ok()?;
    if px >= resized_px {
        return None;
    }
    // Pillow's nearest neighbor.
    Some(((f64::from(px) + 0.5) * f64::from(original_px) / f64::from(resized_px)) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(color: png::ColorType, depth: png::BitDepth, size: [u32; 2], data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, size[0], size[1]);
        encoder.set_color(color);
        encoder.set_depth(depth);
        if color == png::ColorType::Indexed {
            encoder.set_palette((0..=255u8).flat_map(|v| [v, 255 - v, 0]).take(3 * 16).collect::<Vec<u8>>());
        }
        encoder.write_header().unwrap().write_image_data(data).unwrap();
        bytes
    }

    #[test]
    fn classes_are_values_or_palette_indices() {
        let gray = encoded(png::ColorType::Grayscale, png::BitDepth::Eight, [2, 2], &[0, 7, 255, 3]);
        assert_eq!(Mask::decode(&gray).unwrap().classes, [0, 7, 255, 3]);
        let palette =
            encoded(png::ColorType::Indexed, png::BitDepth::Four, [3, 2], &[0x12, 0x30, 0x45, 0x60]);
        assert_eq!(Mask::decode(&palette).unwrap().classes, [1, 2, 3, 4, 5, 6]);
        let colors = encoded(png::ColorType::Rgb, png::BitDepth::Eight, [1, 1], &[1, 2, 3]);
        assert!(Mask::decode(&colors).unwrap_err().contains("Rgb of 8"));
        assert!(Mask::decode(b"no picture").is_err());
    }

    #[test]
    fn masks_are_resized_and_cropped_like_their_images() {
        let wide = Mask { width_px: 4, height_px: 2, classes: vec![0, 1, 2, 3, 4, 5, 6, 7] };
        assert_eq!(wide.transformed(&Transform::with_resize(2, 2).unwrap()), [1, 2, 5, 6]);
        let doubled = wide.transformed(&Transform::with_resize(4, 4).unwrap());
        assert_eq!(doubled[..4], [1, 1, 2, 2]);
        assert_eq!(doubled[12..], [5, 5, 6, 6]);
    }
}
