//! Map coordinates of the pixels of a GeoTIFF (OGC 19-008r4), from its tags.
//!
//! ```text
//! x = x₀ + w · column,   y = y₀ - h · row        from the tie point and the scale of a pixel, or from the affine transformation
//! ```

use tiff::tags::Tag;

use super::tiff::{Pages, broken, is_tiff, open};
use crate::AugmentError;

/// Key of the coordinate system of projected coordinates.
const PROJECTED: u16 = 3072;

/// Key of the coordinate system of longitude and latitude.
const GEOGRAPHIC: u16 = 2048;

/// Code of a coordinate system that the file defines itself.
const USER_DEFINED: u16 = 32_767;

/// Map data of a GeoTIFF. Values that the file does not state, or states in an unsupported form,
/// are absent.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MapData {
    /// Number of the coordinate system in the EPSG registry.
    pub epsg: Option<u16>,
    /// Coordinates of the upper left corner of the image.
    pub corner: Option<[f64; 2]>,
    /// Width and height of a pixel, in the units of the coordinates.
    pub pixel_size: Option<[f64; 2]>,
    /// Value of pixels without data, as text.
    pub no_data: Option<String>,
}

/// Reads the map data of `bytes`; `None` for files of other formats and for a TIFF without any.
///
/// # Errors
/// [`AugmentError::Decode`] for a TIFF whose tags are damaged.
pub fn map_data(bytes: &[u8]) -> Result<Option<MapData>, AugmentError> {
    if !is_tiff(bytes) {
        return Ok(None);
    }
    let mut pages = open(bytes)?;
    let scale = numbers(&mut pages, Tag::ModelPixelScaleTag)?.filter(|scale| scale.len() >= 2);
    let tie = numbers(&mut pages, Tag::ModelTiepointTag)?.filter(|tie| tie.len() >= 6);
    let affine = numbers(&mut pages, Tag::ModelTransformationTag)?.filter(|affine| affine.len() == 16);
    let mut data = MapData::default();
    if let (Some(scale), Some(tie)) = (scale, tie) {
        data.pixel_size = Some([scale[0], scale[1]]);
        data.corner = Some([tie[3] - tie[0] * scale[0], tie[4] + tie[1] * scale[1]]);
    } else if let Some(affine) = affine
        && affine[1] == 0.0
        && affine[4] == 0.0
    {
        // Rows and columns are parallel to the axes of the map: the other terms rotate the image.
        data.pixel_size = Some([affine[0], -affine[5]]);
        data.corner = Some([affine[3], affine[7]]);
    }
    let keys =
        pages.find_tag_unsigned_vec::<u16>(Tag::GeoKeyDirectoryTag).map_err(broken)?.unwrap_or_default();
    data.epsg = coordinate_system(&keys, PROJECTED).or_else(|| coordinate_system(&keys, GEOGRAPHIC));
    let no_data = pages.find_tag(Tag::GdalNodata).map_err(broken)?;
    data.no_data = no_data.and_then(|value| value.into_string().ok()).map(|text| text.trim().to_string());
    Ok((data != MapData::default()).then_some(data))
}

/// Returns the values of a tag of the current page.
fn numbers(pages: &mut Pages<'_>, tag: Tag) -> Result<Option<Vec<f64>>, AugmentError> {
    match pages.find_tag(tag).map_err(broken)? {
        Some(value) => Ok(Some(value.into_f64_vec().map_err(broken)?)),
        None => Ok(None),
    }
}

/// Returns the code of a coordinate system by its key in a directory: four numbers of header, then
/// key, location, count and value of each entry.
fn coordinate_system(directory: &[u16], key: u16) -> Option<u16> {
    let mut entries = directory.as_chunks::<4>().0.iter().skip(1);
    let entry = entries.find(|entry| entry[..3] == [key, 0, 1])?;
    let code = entry[3];
    (code != 0 && code != USER_DEFINED).then_some(code)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use tiff::encoder::{TiffEncoder, colortype};

    use super::*;

    #[test]
    fn map_data_of_a_geotiff_is_read() {
        let mut bytes = Vec::new();
        let mut encoder = TiffEncoder::new(Cursor::new(&mut bytes)).expect("in memory");
        let mut image = encoder.new_image::<colortype::Gray16>(2, 2).expect("a page");
        let tags = image.encoder();
        tags.write_tag(Tag::ModelPixelScaleTag, &[10.0, 10.0, 0.0][..]).expect("a tag");
        tags.write_tag(Tag::ModelTiepointTag, &[1.0, 2.0, 0.0, 600_010.0, 4_999_980.0, 0.0][..])
            .expect("a tag");
        let keys = [1u16, 1, 0, 2, 1024, 0, 1, 1, 3072, 0, 1, 32_632];
        tags.write_tag(Tag::GeoKeyDirectoryTag, &keys[..]).expect("a tag");
        tags.write_tag(Tag::GdalNodata, "0").expect("a tag");
        image.write_data(&[1, 2, 3, 4]).expect("pixels");
        let data = map_data(&bytes).expect("a TIFF").expect("map data");
        assert_eq!((data.epsg, data.no_data.as_deref()), (Some(32_632), Some("0")));
        assert_eq!((data.corner, data.pixel_size), (Some([600_000.0, 5_000_000.0]), Some([10.0, 10.0])));
        assert_eq!(map_data(b"\x89PNG").expect("no TIFF"), None);
    }
}
