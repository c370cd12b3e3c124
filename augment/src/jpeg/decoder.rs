//! Decoding of a JPEG to RGB.

use image::metadata::Orientation;

use super::coefficients::{BlockRows, ScanReader};
use super::error::JpegError;
use super::header::{first_scan, orientation};
use super::idct;
use super::layout::Image;
use super::rows::{RowScratch, Window};
use super::segments::{Frame, Scan, Segments};
use crate::{AugmentError, DecodeRules, Rgb8};

/// Marker that ends an image.
const END_OF_IMAGE: [u8; 2] = [0xff, 0xd9];

/// Maximum number of scans. Encoders write about ten; each takes a dozen bytes and may cost as much
/// as an image.
const MAX_SCANS: usize = 100;

/// Maximum size of the coefficients of a whole image that are kept for the next one, in bytes.
const MAX_KEPT_BYTES: usize = 32 << 20;

/// A decoder that reuses its memory for every image.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    /// Coefficients by component: of one row of MCUs, or of the whole image if it is coded in
    /// several scans.
    coefficients: Vec<BlockRows>,
    /// Samples by component.
    windows: Vec<Window>,
    rows: RowScratch,
}

impl Decoder {
    /// Decodes any color space to RGB, and returns the orientation to apply according to `rules`.
    pub(crate) fn decode_into(
        &mut self,
        bytes: &[u8],
        rules: &DecodeRules,
        out: &mut Rgb8,
    ) -> Result<Orientation, AugmentError> {
        let mut segments = Segments::new(bytes)?;
        let scan = first_scan(&mut segments)?;
        let frame = segments.frame()?.clone();
        rules.check(frame.width_px, frame.height_px)?;
        if !has_end_marker(bytes, scan.data) {
            return Err(JpegError::CutOff.into());
        }
        out.width_px = frame.width_px;
        out.height_px = frame.height_px;
        out.data.resize(3 * frame.width_px as usize * frame.height_px as usize, 0);
        let image = Image::new(&frame, segments.color_space()?);
        image.resize_windows(&mut self.windows);
        if frame.progressive || scan.components.len() < frame.components.len() {
            self.decode_several_scans(bytes, &mut segments, scan, &image, &mut out.data)?;
        } else {
            self.decode_single_scan(bytes, &mut segments, &scan, &image, &mut out.data)?;
        }
        Ok(if rules.apply_exif { orientation(&segments) } else { Orientation::NoTransforms })
    }

    /// Decodes an image whose only scan contains all components, one row of MCUs at a time.
    fn decode_single_scan(
        &mut self,
        bytes: &[u8],
        segments: &mut Segments<'_>,
        scan: &Scan,
        image: &Image,
        pixels: &mut [u8],
    ) -> Result<(), JpegError> {
        segments.latch_quantization(scan)?;
        let mut reader = ScanReader::new(bytes, segments, scan)?;
        for mcu_row in 0..image.n_mcus[1] {
            image.clear_coefficients(&mut self.coefficients, 1);
            reader.read_row(0, &mut self.coefficients)?;
            self.write_pixels(segments.frame()?, image, mcu_row, 0, pixels);
        }
        match segments.next_scan_after(reader.end()) {
            // `CutOff` despite the end marker: a segment whose length is damaged extends past it.
            Ok(None) | Err(JpegError::CutOff) => Ok(()),
            Ok(Some(_)) => Err(JpegError::Damaged("a second scan")),
            Err(error) => Err(error),
        }
    }

    /// Decodes an image that is coded in several scans: first all coefficients, then the pixels.
    fn decode_several_scans(
        &mut self,
        bytes: &[u8],
        segments: &mut Segments<'_>,
        first: Scan,
        image: &Image,
        pixels: &mut [u8],
    ) -> Result<(), JpegError> {
        image.clear_coefficients(&mut self.coefficients, image.n_mcus[1]);
        let mut next = Some(first);
        let mut n_scans = 0;
        while let Some(scan) = next {
            n_scans += 1;
            if n_scans > MAX_SCANS {
                return Err(JpegError::Damaged("more scans than any encoder writes"));
            }
            segments.latch_quantization(&scan)?;
            let mut reader = ScanReader::new(bytes, segments, &scan)?;
            for mcu_row in 0..reader.n_mcus[1] {
                reader.read_row(mcu_row, &mut self.coefficients)?;
            }
            next = segments.next_scan_after(reader.end())?;
        }
        for mcu_row in 0..image.n_mcus[1] {
            self.write_pixels(segments.frame()?, image, mcu_row, mcu_row, pixels);
        }
        if self.coefficients.iter().map(BlockRows::n_bytes).sum::<usize>() > MAX_KEPT_BYTES {
            self.coefficients = Vec::new();
        }
        Ok(())
    }

    /// Transforms row `mcu_row` of MCUs, whose coefficients are in row `stored_row`, and writes the
    /// completed pixels.
    fn write_pixels(
        &mut self,
        frame: &Frame,
        image: &Image,
        mcu_row: usize,
        stored_row: usize,
        pixels: &mut [u8],
    ) {
        for ((component, window), coefficients) in
            frame.components.iter().zip(&mut self.windows).zip(&self.coefficients)
        {
            // A component without a scan has no table; its samples are gray.
            let quantization = component.quantization.unwrap_or([0; 64]);
            for (y, blocks) in coefficients.rows(stored_row * component.v, component.v).enumerate() {
                let top = 8 * (mcu_row * component.v + y);
                idct::transform_row(blocks, &quantization, window.rows_mut(top), coefficients.width * 8);
            }
        }
        let row_len = 3 * frame.width_px as usize;
        for y in image.complete_rows(mcu_row) {
            let out = &mut pixels[y * row_len..][..row_len];
            self.rows.write_row(&self.windows, &image.upsamplings, image.color_space, y, out);
        }
    }
}

/// Returns whether the bytes from `data` on contain an end marker. The headers before them may
/// contain the end marker of a thumbnail.
fn has_end_marker(bytes: &[u8], data: usize) -> bool {
    bytes.ends_with(&END_OF_IMAGE) || bytes[data..].windows(2).any(|pair| pair == END_OF_IMAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(marker: u8, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0xff, marker, 0, body.len() as u8 + 2];
        bytes.extend_from_slice(body);
        bytes
    }

    /// Returns a gray progressive JPEG of 16 x 16 pixels.
    fn jpeg_with_scans(n_scans: usize) -> Vec<u8> {
        let quantization = [&[0u8][..], &[1; 64]].concat();
        let frame = [8, 0, 16, 0, 16, 1, 1, 0x11, 0];
        // One code of one bit, for the symbol 0.
        let table = [&[0u8, 1][..], &[0; 15], &[0]].concat();
        let scan = [segment(0xda, &[1, 1, 0, 0, 0, 0]), vec![0b0000_1111]].concat();
        let mut bytes = crate::jpeg::MAGIC.to_vec();
        bytes.extend(segment(0xdb, &quantization));
        bytes.extend(segment(0xc2, &frame));
        bytes.extend(segment(0xc4, &table));
        bytes.extend(scan.repeat(n_scans));
        bytes.extend(END_OF_IMAGE);
        bytes
    }

    /// A scan of eleven bytes makes a decoder process the complete image.
    #[test]
    fn an_image_with_too_many_scans_is_an_error() {
        let mut decoder = Decoder::default();
        let mut out = Rgb8::default();
        let one = decoder.decode_into(&jpeg_with_scans(1), &DecodeRules::default(), &mut out);
        assert!(one.is_ok(), "{one:?}");
        let too_many = jpeg_with_scans(MAX_SCANS + 1);
        let error = decoder.decode_into(&too_many, &DecodeRules::default(), &mut out).expect_err("too many");
        assert!(
            matches!(&error, AugmentError::Decode(reason) if reason.contains("more scans than")),
            "{error}"
        );
    }
}
