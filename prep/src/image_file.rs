//! Reading of image files for shards.

use std::io::Cursor;
use std::path::Path;

use augment::bands;
use augment::decode::decode_native;
use augment::facts::facts;
use augment::{AugmentError, DecodeRules};
use image::{DynamicImage, ImageFormat};
use pipeline::shard::IMAGE_EXTENSIONS;

use crate::bands::Sample;
use crate::error::PrepError;
use crate::files::{CONVERTED, extension};

/// Reads the files of the image of `sample`: extension in the shard, and bytes.
pub(crate) fn read_files(sample: &Sample) -> Result<Vec<(String, Vec<u8>)>, PrepError> {
    let files: Vec<(String, Vec<u8>)> = sample
        .files
        .iter()
        .map(|file| match &file.extension {
            None => read_whole_image(&file.path),
            Some(extension) => Ok((extension.clone(), read_image(&file.path)?)),
        })
        .collect::<Result<_, PrepError>>()?;
    if files.len() > 1 {
        let all: Vec<&[u8]> = files.iter().map(|(_, bytes)| bytes.as_slice()).collect();
        bands::sample_header(&all, &DecodeRules::default())?;
    }
    Ok(files)
}

/// Reads the mask of `sample`, if it has one: extension in the shard, and bytes.
pub(crate) fn read_mask(sample: &Sample) -> Result<Option<(String, Vec<u8>)>, PrepError> {
    let Some(mask) = &sample.entry.mask else { return Ok(None) };
    Ok(Some((mask.extension.to_string(), read_image(&mask.path)?)))
}

/// Reads the file of an image, whose header must be readable: an extension may be wrong, and links
/// may lead anywhere.
fn read_image(path: &Path) -> Result<Vec<u8>, PrepError> {
    let bytes = std::fs::read(path).map_err(|error| PrepError::io("read", path, error))?;
    match facts(&bytes) {
        Ok(_) => Ok(bytes),
        Err(source) => Err(PrepError::NotReadable { path: path.to_path_buf(), source }),
    }
}

/// Reads the image at `path`: its extension in the shard, and its bytes. A format that few other
/// programs read in shards is converted to PNG, unless it is a TIFF that a PNG cannot hold.
fn read_whole_image(path: &Path) -> Result<(String, Vec<u8>), PrepError> {
    let extension = extension(path).unwrap_or_default();
    if !CONVERTED.contains(&extension.as_str()) {
        if !IMAGE_EXTENSIONS.contains(&extension.as_str()) {
            return Err(PrepError::NoImageExtension { path: path.to_path_buf() });
        }
        return Ok((extension, read_image(path)?));
    }
    let bytes = std::fs::read(path).map_err(|error| PrepError::io("read", path, error))?;
    let has_map = bands::map_data(&bytes).is_ok_and(|map| map.is_some());
    // A PNG would lose the orientation of the image.
    let is_turned = facts(&bytes).is_ok_and(|facts| facts.turned);
    if bands::format_of(&bytes).is_some() && (has_map || is_turned || bands::exceeds_rgb8(&bytes)) {
        return Ok((extension, bytes));
    }
    let image = match extension.as_str() {
        // Such a file has no signature.
        "tga" => {
            let image = image::load_from_memory_with_format(&bytes, ImageFormat::Tga);
            image.map_err(|error| AugmentError::Decode(error.to_string()))
        }
        _ => decode_native(&bytes),
    };
    let image = image.map_err(|source| PrepError::Undecodable { path: path.to_path_buf(), source })?;
    let image = match image {
        image @ (DynamicImage::ImageLuma8(_)
        | DynamicImage::ImageLumaA8(_)
        | DynamicImage::ImageRgb8(_)
        | DynamicImage::ImageRgba8(_)
        | DynamicImage::ImageLuma16(_)
        | DynamicImage::ImageLumaA16(_)
        | DynamicImage::ImageRgb16(_)
        | DynamicImage::ImageRgba16(_)) => image,
        image => DynamicImage::ImageRgb8(image.to_rgb8()),
    };
    let mut png = Cursor::new(Vec::new());
    image
        .write_to(&mut png, ImageFormat::Png)
        .map_err(|source| PrepError::Unencodable { path: path.to_path_buf(), source })?;
    Ok(("png".into(), png.into_inner()))
}
