//! Masks of images, PNGs of one channel or with a palette, whose values are classes of pixels.
//!
//! ```text
//! pixel x of n reads column ⌊(x + 0.5) · w / n⌋ of w         nearest neighbor, in the sums of Pillow
//! ```
//!
//! The mask of a view shows the same box of the image as the view, flipped and rotated like it.
//! Changes of color, blur and dropped channels leave it as it is. In a box that random erasing
//! fills with noise, no pixel counts.

use std::io::Cursor;

use crate::bands::rotate;
use crate::crop::CropBox;
use crate::multicrop::{Geometry, ViewSpec};
use crate::seed::Operation;
use crate::{MultiCrop, SampleKey, Transform};

/// Class of pixels that do not count.
pub const IGNORED_CLASS: u8 = 255;

/// Classes of an image's pixels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mask {
    width_px: u32,
    height_px: u32,
    classes: Vec<u8>,
}

impl Mask {
    /// Decodes a PNG of at most `max_pixels`. Classes are the palette's indices, not its colors.
    ///
    /// # Errors
    /// A message if the bytes are not a PNG of one channel or with a palette, or it has more
    /// pixels, which its header tells before anything is allocated.
    pub fn decode(bytes: &[u8], max_pixels: u64) -> Result<Self, String> {
        Self::read(bytes, max_pixels, None)
    }

    /// Decodes the mask of an image of `image_px`, as [`Mask::decode`] does. The size of the image
    /// is the limit.
    ///
    /// # Errors
    /// Those of [`Mask::decode`], and a message if the mask has another size by its header.
    pub(crate) fn decode_for(bytes: &[u8], image_px: [u32; 2]) -> Result<Self, String> {
        Self::read(bytes, u64::MAX, Some(image_px))
    }

    /// Decodes a PNG of at most `max_pixels`, and of the size `image_px` if that is given.
    fn read(bytes: &[u8], max_pixels: u64, image_px: Option<[u32; 2]>) -> Result<Self, String> {
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
        if let Some(image_px) = image_px {
            check_sizes([width_px, height_px], image_px)?;
        }
        if u64::from(width_px) * u64::from(height_px) > max_pixels {
            return Err(format!(
                "{width_px} x {height_px} pixels exceed the limit of {max_pixels}, data.max_pixels"
            ));
        }
        let mut raw = vec![0; reader.output_buffer_size().ok_or("it is too large")?];
        let frame = reader.next_frame(&mut raw).map_err(|error| error.to_string())?;
        let mut classes = Vec::with_capacity(width_px as usize * height_px as usize);
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
    pub fn size_px(&self) -> [u32; 2] {
        [self.width_px, self.height_px]
    }

    /// Returns the classes of the pixels, rows from the top.
    pub fn classes(&self) -> &[u8] {
        &self.classes
    }

    /// Returns the lowest and the highest class of the pixels that count; `None` if none does.
    pub fn class_range(&self) -> Option<[u8; 2]> {
        let counted = self.classes.iter().filter(|class| **class != IGNORED_CLASS);
        let highest = *counted.clone().max()?;
        let lowest = *counted.min()?;
        Some([lowest, highest])
    }

    /// Checks that the mask has the size of its image, `image_px`.
    ///
    /// # Errors
    /// A message with both sizes.
    pub fn check_size(&self, image_px: [u32; 2]) -> Result<(), String> {
        check_sizes(self.size_px(), image_px)
    }

    /// Checks that all pixels that count are of the first `n_classes` classes.
    ///
    /// # Errors
    /// A message with the highest class.
    pub fn check_classes(&self, n_classes: usize) -> Result<(), String> {
        match self.class_range() {
            Some([_, highest]) if usize::from(highest) >= n_classes => Err(format!(
                "it has pixels of class {highest}, but there are {n_classes} classes, counted from 0 \
                 ({IGNORED_CLASS} marks pixels that do not count)"
            )),
            _ => Ok(()),
        }
    }

    /// Resizes the box `region` to this width and height by nearest neighbor: rows from the top.
    ///
    /// # Panics
    /// If the box is not inside the mask.
    pub fn resized(&self, region: CropBox, [width_px, height_px]: [u32; 2]) -> Vec<u8> {
        let columns: Vec<usize> =
            nearest(region.width_px, width_px).map(|x| (region.left_px + x) as usize).collect();
        let row_len = self.width_px as usize;
        let mut out = Vec::with_capacity(columns.len() * height_px as usize);
        for y in nearest(region.height_px, height_px) {
            let row = &self.classes[(region.top_px + y) as usize * row_len..][..row_len];
            out.extend(columns.iter().map(|x| row[*x]));
        }
        out
    }

    /// Returns the classes after `transform`, `[s, s]`, by nearest neighbor; pixels outside of the
    /// mask are [`IGNORED_CLASS`].
    pub fn transformed(&self, transform: &Transform) -> Vec<u8> {
        let (resized_px, corner_px) = transform.placement(self.size_px());
        let side = transform.size_px as usize;
        let columns = nearest_part(self.width_px, resized_px[0], corner_px[0], side);
        let rows = nearest_part(self.height_px, resized_px[1], corner_px[1], side);
        let mut out = Vec::with_capacity(side * side);
        for row in rows {
            for column in &columns {
                out.push(match (row, column) {
                    (Some(row), Some(column)) => {
                        self.classes[row as usize * self.width_px as usize + *column as usize]
                    }
                    _ => IGNORED_CLASS,
                });
            }
        }
        out
    }

    /// Writes the masks of the views that `multicrop` makes of the image for `key` to `out`, one
    /// buffer per group, whose memory is reused.
    pub(crate) fn views_into(&self, multicrop: &MultiCrop, key: SampleKey, out: &mut Vec<Vec<u8>>) {
        let groups = multicrop.groups();
        out.resize_with(groups.len(), Vec::new);
        out.iter_mut().for_each(Vec::clear);
        let mut specs = multicrop.views();
        for (buffer, group) in out.iter_mut().zip(groups) {
            for spec in specs.by_ref().take(group.n_views) {
                buffer.extend(self.view(spec, key));
            }
        }
    }

    /// Returns the mask of the view `spec`, `[S, S]`.
    fn view(&self, spec: ViewSpec<'_>, key: SampleKey) -> Vec<u8> {
        let size_px = spec.crop.size_px;
        let side = size_px as usize;
        let Geometry { region, is_flipped, n_quarters } = spec.geometry(key, self.size_px());
        let mut view = self.resized(region, [size_px; 2]);
        if is_flipped {
            view.chunks_exact_mut(side).for_each(<[u8]>::reverse);
        }
        if let Some(n_quarters) = n_quarters {
            rotate(&mut view, side, n_quarters, &mut Vec::new());
        }
        if let Some(erase) = &spec.crop.erase
            && let Some(area) = erase.draw(&mut spec.rng(key, Operation::Erase), size_px)
        {
            area.rows_mut(&mut view, side).for_each(|row| row.fill(IGNORED_CLASS));
        }
        view
    }
}

/// Checks that a mask of `mask_px` has the size of its image, `image_px`.
fn check_sizes(mask_px: [u32; 2], image_px: [u32; 2]) -> Result<(), String> {
    if mask_px == image_px {
        return Ok(());
    }
    let [mask_width, mask_height] = mask_px;
    let [width, height] = image_px;
    Err(format!("it has {mask_width} x {mask_height} pixels, but its image has {width} x {height}"))
}

/// Returns the pixel among `n_from` that each of `n_to` pixels reads by nearest neighbor, along one
/// axis. Positions are sums of steps, as in Pillow, whose last bits differ from those of products.
fn nearest(n_from: u32, n_to: u32) -> impl Iterator<Item = u32> {
    let step = f64::from(n_from) / f64::from(n_to);
    let mut position = 0.5 * step;
    (0..n_to).map(move |_| {
        let pixel = (position as u32).min(n_from.saturating_sub(1));
        position += step;
        pixel
    })
}

/// Returns the pixel that each of `side` pixels reads which begin at `corner` of those of
/// [`nearest`]; `None` outside of them.
fn nearest_part(n_from: u32, n_to: u32, corner: i64, side: usize) -> Vec<Option<u32>> {
    let n_before = usize::try_from(-corner).unwrap_or_default().min(side);
    let n_skipped = usize::try_from(corner).unwrap_or_default();
    let mut part = vec![None; n_before];
    part.extend(nearest(n_from, n_to).skip(n_skipped).take(side - n_before).map(Some));
    part.resize(side, None);
    part
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Erase, Image, Rgb8, ViewMaker};

    fn encoded(color: png::ColorType, depth: png::BitDepth, size: [u32; 2], data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, size[0], size[1]);
        encoder.set_color(color);
        encoder.set_depth(depth);
        if color == png::ColorType::Indexed {
            encoder.set_palette((0..=255u8).flat_map(|v| [v, 255 - v, 0]).take(3 * 16).collect::<Vec<u8>>());
        }
        encoder.write_header().expect("a header").write_image_data(data).expect("pixels");
        bytes
    }

    #[test]
    fn classes_are_values_or_palette_indices() {
        let gray = encoded(png::ColorType::Grayscale, png::BitDepth::Eight, [2, 2], &[0, 7, 255, 3]);
        let gray = Mask::decode(&gray, 4).expect("a mask");
        assert_eq!((gray.classes(), gray.class_range()), (&[0, 7, 255, 3][..], Some([0, 7])));
        let palette =
            encoded(png::ColorType::Indexed, png::BitDepth::Four, [3, 2], &[0x12, 0x30, 0x45, 0x60]);
        assert_eq!(Mask::decode(&palette, 6).expect("a mask").classes, [1, 2, 3, 4, 5, 6]);
        let colors = encoded(png::ColorType::Rgb, png::BitDepth::Eight, [1, 1], &[1, 2, 3]);
        assert!(Mask::decode(&colors, 1).expect_err("colors").contains("Rgb of 8"));
        assert!(Mask::decode(b"no picture", 1).is_err());
    }

    /// The header alone is read: most of the pixels are missing.
    #[test]
    fn masks_of_other_sizes_are_refused_by_their_header() {
        let whole = encoded(png::ColorType::Grayscale, png::BitDepth::Eight, [2, 2], &[0, 7, 255, 3]);
        assert_eq!(Mask::decode_for(&whole, [2, 2]).expect("a mask").size_px(), [2, 2]);
        let n_bytes = whole.windows(4).position(|name| name == b"IDAT").expect("pixels") + 10;
        let cut = &whole[..n_bytes];
        let reason = Mask::decode(cut, 3).expect_err("a pixel too many");
        assert_eq!(reason, "2 x 2 pixels exceed the limit of 3, data.max_pixels");
        let reason = Mask::decode_for(cut, [2, 3]).expect_err("another size");
        assert_eq!(reason, "it has 2 x 2 pixels, but its image has 2 x 3");
        assert!(Mask::decode(cut, 4).is_err(), "no pixels");
    }

    #[test]
    fn masks_that_do_not_fit_are_refused() {
        let mask = Mask { width_px: 3, height_px: 1, classes: vec![0, 4, IGNORED_CLASS] };
        assert_eq!(mask.check_size([3, 1]), Ok(()));
        let sizes = mask.check_size([1, 3]).expect_err("another size");
        assert_eq!(sizes, "it has 3 x 1 pixels, but its image has 1 x 3");
        assert_eq!(mask.check_classes(5), Ok(()));
        let reason = mask.check_classes(4).expect_err("a class too many");
        assert!(reason.contains("class 4, but there are 4 classes"), "{reason}");
        let ignored = Mask { width_px: 1, height_px: 1, classes: vec![IGNORED_CLASS] };
        assert_eq!((ignored.class_range(), ignored.check_classes(2)), (None, Ok(())));
    }

    #[test]
    fn masks_are_resized_and_cropped_like_their_images() {
        let wide = Mask { width_px: 4, height_px: 2, classes: vec![0, 1, 2, 3, 4, 5, 6, 7] };
        assert_eq!(wide.transformed(&Transform::with_resize(2, 2).expect("sizes")), [1, 2, 5, 6]);
        let doubled = wide.transformed(&Transform::with_resize(4, 4).expect("sizes"));
        assert_eq!(doubled[..4], [1, 1, 2, 2]);
        assert_eq!(doubled[12..], [5, 5, 6, 6]);
        // A square larger than the image.
        let outside = wide.transformed(&Transform { resize_px: 2, size_px: 4 });
        assert_eq!(outside[..4], [IGNORED_CLASS; 4]);
        assert_eq!(outside[4..12], [0, 1, 2, 3, 4, 5, 6, 7]);
        let region = CropBox { left_px: 1, top_px: 0, width_px: 2, height_px: 2 };
        assert_eq!(wide.resized(region, [1, 4]), [2, 2, 6, 6]);
    }

    /// Class 1 is white, class 0 black.
    fn black_and_white() -> (Image, Mask) {
        let classes: Vec<u8> = (0..60 * 40).map(|i| u8::from(i % 60 < 20 || i / 60 < 10)).collect();
        let data = classes.iter().flat_map(|class| [255 * class; 3]).collect();
        (Rgb8::new(60, 40, data).into(), Mask { width_px: 60, height_px: 40, classes })
    }

    /// Pixels of a view are those of its mask, except at borders, where the resize mixes them.
    #[test]
    fn masks_of_views_show_what_the_views_show() {
        let (image, mask) = black_and_white();
        let mut multicrop = MultiCrop::single(24);
        multicrop.crops[0].rotate_p = 0.75;
        multicrop.crops[0].count = 2;
        let mut maker = ViewMaker::default();
        let mut masks = vec![vec![7; 3]; 5];
        for sample in 0..20 {
            let key = SampleKey { seed: 5, epoch: 0, sample, attempt: 0 };
            let views = maker.make(&image, &multicrop, key).expect("views");
            mask.views_into(&multicrop, key, &mut masks);
            assert_eq!((masks.len(), masks[0].len()), (1, 2 * 24 * 24));
            let planes = views.groups[0].chunks_exact(3 * 24 * 24);
            for (view, mask) in planes.zip(masks[0].chunks_exact(24 * 24)) {
                let n_equal = view.iter().zip(mask).filter(|(red, class)| (**red > 127) == (**class == 1));
                let n_equal = n_equal.count();
                assert!(n_equal > 24 * 24 * 93 / 100, "sample {sample}: {n_equal} of 576");
            }
        }
    }

    #[test]
    fn erased_boxes_do_not_count() {
        let (image, mask) = black_and_white();
        let mut multicrop = MultiCrop::single(24);
        let plain = multicrop.clone();
        multicrop.crops[0].erase = Some(Erase { p: 1.0, area: [0.1, 0.3], noise_mean: 0.45, noise_std: 0.0 });
        let mut maker = ViewMaker::default();
        let mut masks = Vec::new();
        let mut plain_masks = Vec::new();
        for sample in 0..20 {
            let key = SampleKey { seed: 5, epoch: 0, sample, attempt: 0 };
            let views = maker.make(&image, &multicrop, key).expect("views");
            mask.views_into(&multicrop, key, &mut masks);
            mask.views_into(&plain, key, &mut plain_masks);
            let n_erased = masks[0].iter().filter(|class| **class == IGNORED_CLASS).count();
            assert!((45..=200).contains(&n_erased), "{n_erased}");
            for i in 0..24 * 24 {
                if masks[0][i] == IGNORED_CLASS {
                    assert_eq!(views.groups[0][i], 115, "a constant color");
                } else {
                    assert_eq!(masks[0][i], plain_masks[0][i]);
                }
            }
        }
    }
}
