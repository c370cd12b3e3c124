//! TIFF pages of 8-bit colors that the `image` crate refuses or converts otherwise: JPEG tiles, as
//! slide scanners write them, and CMYK.
//!
//! Each JPEG tile or strip becomes a separate file, with the tables that all of them share and a
//! marker of the color space, and is decoded to the pixels of libjpeg-turbo, as in Pillow.

use image::metadata::Orientation;
use tiff::ColorType;
use tiff::tags::{CompressionMethod, Tag};

use super::layer::Shape;
use super::tiff::{COPY_OR_MASK, Pages, broken, is_tiff, open, values};
use crate::AugmentError;
use crate::jpeg;
use crate::pixels::{DecodeRules, Rgb8};

/// Adobe's segment of a JPEG for the color space, up to the code of the color space.
const ADOBE: [u8; 15] = [0xff, 0xee, 0, 14, b'A', b'd', b'o', b'b', b'e', 0, 100, 0, 0, 0, 0];

/// Marker of the end of a JPEG.
const END: [u8; 2] = [0xff, 0xd9];

/// Largest number of tiles or strips of a page.
const MAX_TILES: usize = 1 << 20;

/// First page of a TIFF, if its colors are JPEG or CMYK.
pub(crate) struct ColorPage<'a> {
    bytes: &'a [u8],
    pages: Pages<'a>,
    layout: Layout,
    is_gray: bool,
    /// Number of pixels per row.
    pub(crate) width_px: u32,
    /// Number of rows.
    pub(crate) height_px: u32,
    /// Orientation that the page states.
    pub(crate) orientation: Orientation,
}

/// Storage of the colors.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// JPEG of RGB, or of YCbCr.
    Jpeg { is_ycc: bool },
    /// CMYK, in any of the library's compressions.
    Cmyk,
}

impl<'a> ColorPage<'a> {
    /// Opens the first page of `bytes`; `None` for other files and for pages with other colors.
    pub(crate) fn open(bytes: &'a [u8]) -> Option<Self> {
        if !is_tiff(bytes) {
            return None;
        }
        let mut pages = open(bytes).ok()?;
        let (width_px, height_px) = pages.dimensions().ok()?;
        let compression = pages.find_tag_unsigned::<u16>(Tag::Compression).ok()?;
        let is_jpeg = compression == Some(CompressionMethod::ModernJPEG.to_u16());
        let color = pages.colortype().ok()?;
        let layout = match color {
            ColorType::RGB(8) if is_jpeg => Layout::Jpeg { is_ycc: false },
            ColorType::YCbCr(8) if is_jpeg => Layout::Jpeg { is_ycc: true },
            ColorType::Gray(8) if is_jpeg => Layout::Jpeg { is_ycc: false },
            ColorType::CMYK(8) if !is_jpeg => Layout::Cmyk,
            _ => return None,
        };
        let code = pages.find_tag_unsigned::<u8>(Tag::Orientation).ok()?;
        let orientation = code.and_then(Orientation::from_exif).unwrap_or(Orientation::NoTransforms);
        let is_gray = color == ColorType::Gray(8);
        Some(Self { bytes, pages, layout, is_gray, width_px, height_px, orientation })
    }

    /// Returns whether all further pages are smaller copies or masks.
    pub(crate) fn is_only_image(&mut self) -> bool {
        while self.pages.more_images() {
            if self.pages.next_image().is_err() {
                return true;
            }
            let kind = self.pages.find_tag_unsigned::<u32>(Tag::NewSubfileType).ok().flatten().unwrap_or(0);
            if kind & COPY_OR_MASK == 0 {
                return false;
            }
        }
        true
    }

    /// Returns whether the pixels are gray.
    pub(crate) fn is_gray(&self) -> bool {
        self.is_gray
    }

    /// Returns whether the pixels are CMYK.
    pub(crate) fn is_cmyk(&self) -> bool {
        self.layout == Layout::Cmyk
    }

    /// Decodes the page to RGB.
    ///
    /// # Errors
    /// [`AugmentError::TooManyPixels`] by the header alone; [`AugmentError::Decode`] for damaged
    /// bytes.
    pub(crate) fn decode(
        &mut self,
        rules: &DecodeRules,
        decoder: &mut jpeg::Decoder,
    ) -> Result<Rgb8, AugmentError> {
        rules.check(self.width_px, self.height_px)?;
        match self.layout {
            Layout::Jpeg { is_ycc } => self.decode_jpeg(is_ycc, rules, decoder),
            Layout::Cmyk => self.decode_cmyk(rules),
        }
    }

    fn decode_cmyk(&mut self, rules: &DecodeRules) -> Result<Rgb8, AugmentError> {
        let shape = Shape { width_px: self.width_px, height_px: self.height_px, n_channels: 4 };
        let planes = values(&mut self.pages, shape, rules)?;
        let n = self.width_px as usize * self.height_px as usize;
        let mut data = Vec::with_capacity(3 * n);
        for pixel in 0..n {
            let white = 255 - planes[3 * n + pixel] as u8;
            for ink in 0..3 {
                data.push(jpeg::light(255 - planes[ink * n + pixel] as u8, white));
            }
        }
        Ok(Rgb8::new(self.width_px, self.height_px, data))
    }

    fn decode_jpeg(
        &mut self,
        is_ycc: bool,
        rules: &DecodeRules,
        decoder: &mut jpeg::Decoder,
    ) -> Result<Rgb8, AugmentError> {
        let tables = match self.pages.find_tag(Tag::JPEGTables).map_err(broken)? {
            Some(tables) => tables.into_u8_vec().map_err(broken)?,
            None => Vec::new(),
        };
        let tiles = self.tiles()?;
        let (tile_width, tile_height) = self.pages.chunk_dimensions();
        let width = self.width_px as usize;
        let n_columns = self.width_px.div_ceil(tile_width.max(1)) as usize;
        let n_rows = self.height_px.div_ceil(tile_height.max(1)) as usize;
        if tiles.len() != n_columns * n_rows {
            return Err(AugmentError::Decode(format!(
                "TIFF: {} tiles or strips instead of {n_columns} x {n_rows}",
                tiles.len()
            )));
        }
        let mut data = vec![0; 3 * width * self.height_px as usize];
        let mut tile = Rgb8::default();
        // A JPEG may state any size, whatever the tile is.
        let max_pixels = u64::from(tile_width) * u64::from(tile_height);
        let rules = &DecodeRules { max_pixels: max_pixels.min(rules.max_pixels), ..*rules };
        for (index, bytes) in tiles.into_iter().enumerate() {
            let left = index % n_columns * tile_width as usize;
            let top = index / n_columns * tile_height as usize;
            let columns = (tile_width as usize).min(width - left);
            let rows = (tile_height as usize).min(self.height_px as usize - top);
            decoder.decode_into(&to_jpeg_file(&tables, bytes, is_ycc), rules, &mut tile)?;
            let [stored_columns, stored_rows] = [tile.width_px, tile.height_px].map(|side| side as usize);
            if stored_columns < columns || stored_rows < rows {
                return Err(AugmentError::Decode("TIFF: a tile or strip has the wrong size".into()));
            }
            for (y, row) in tile.data.chunks_exact(3 * stored_columns).take(rows).enumerate() {
                let start = 3 * ((top + y) * width + left);
                data[start..start + 3 * columns].copy_from_slice(&row[..3 * columns]);
            }
        }
        Ok(Rgb8::new(self.width_px, self.height_px, data))
    }

    /// Returns the bytes of each tile or strip, in their order.
    fn tiles(&mut self) -> Result<Vec<&'a [u8]>, AugmentError> {
        let starts = self.tile_numbers(Tag::TileOffsets, Tag::StripOffsets)?;
        let lengths = self.tile_numbers(Tag::TileByteCounts, Tag::StripByteCounts)?;
        if starts.len() != lengths.len() || starts.len() > MAX_TILES {
            return Err(AugmentError::Decode(format!(
                "TIFF: invalid table of {} tiles or strips",
                starts.len()
            )));
        }
        let mut tiles = Vec::with_capacity(starts.len());
        for (start, length) in starts.into_iter().zip(lengths) {
            let start = usize::try_from(start).unwrap_or(usize::MAX);
            let end = start.saturating_add(usize::try_from(length).unwrap_or(usize::MAX));
            let tile = self.bytes.get(start..end);
            tiles.push(tile.ok_or_else(|| AugmentError::Decode("TIFF: a tile or strip is cut off".into()))?);
        }
        Ok(tiles)
    }

    /// Returns the numbers of a tag of tiles, or of the tag of strips if it is absent.
    fn tile_numbers(&mut self, tile_tag: Tag, strip_tag: Tag) -> Result<Vec<u64>, AugmentError> {
        if let Some(numbers) = self.pages.find_tag_unsigned_vec(tile_tag).map_err(broken)? {
            return Ok(numbers);
        }
        Ok(self.pages.find_tag_unsigned_vec(strip_tag).map_err(broken)?.unwrap_or_default())
    }
}

/// Returns the JPEG file of a tile, with the tables that all tiles share.
fn to_jpeg_file(tables: &[u8], tile: &[u8], is_ycc: bool) -> Vec<u8> {
    let tables = tables.strip_prefix(&jpeg::MAGIC).unwrap_or_default();
    let tables = tables.strip_suffix(&END).unwrap_or(tables);
    let tile = tile.strip_prefix(&jpeg::MAGIC).unwrap_or(tile);
    let mut file = Vec::with_capacity(jpeg::MAGIC.len() + ADOBE.len() + 1 + tables.len() + tile.len());
    file.extend(jpeg::MAGIC);
    file.extend(ADOBE);
    file.push(u8::from(is_ycc));
    file.extend(tables);
    file.extend(tile);
    file
}
