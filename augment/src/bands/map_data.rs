//! Place of a GeoTIFF's pixels on the map (OGC 19-008r4), from its tags.
//!
//! ```text
//! x = x₀ + w · column,   y = y₀ - h · row        from the tie point and the scale of a pixel, or from the affine transformation
//! ```

use tiff::tags::Tag;

use super::tiff::{broken, is_tiff, open};
use crate::AugmentError;

/// Key of the coordinate system of projected coordinates.
const PROJECTED: u16 = 3072;

/// Key of the coordinate system of longitude and latitude.
const GEOGRAPHIC: u16 = 2048;

/// Code of a coordinate system that the file defines itself.
const USER_DEFINED: u16 = 32_767;

/// Map data of a GeoTIFF. A part that the file does not state, or states in a form that is not
/// read, is absent.
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
    let mut numbers = |tag: Tag| -> Result<Option<Vec<f64>>, AugmentError> {
        let value = pages.find_tag(tag).map_err(broken)?;
        value.map(|value| value.into_f64_vec().map_err(broken)).transpose()
    };
    let scale = numbers(Tag::ModelPixelScaleTag)?.filter(|scale| scale.len() >= 2);
    let tie = numbers(Tag::ModelTiepointTag)?.filter(|tie| tie.len() >= 6);
    let affine = numbers(Tag::ModelTransformationTag)?.filter(|affine| affine.len() == 16);
    let mut found = MapData::default();
    match (scale, tie, affine) {
        (Some(scale), Some(tie), _) => {
            found.pixel_size = Some([scale[0], scale[1]]);
            found.corner = Some([tie[3] - tie[0] * scale[0], tie[4] + tie[1] * scale[1]]);
        }
        // Rows and columns along the axes of the map: the other terms turn the image.
        (_, _, Some(affine)) if affine[1] == 0.0 && affine[4] == 0.0 => {
            found.pixel_size = Some([affine[0], -affine[5]]);
            found.corner = Some([affine[3], affine[7]]);
        }
        _ => {}
    }
    let keys =
        pages.find_tag_unsigned_vec::<u16>(Tag::GeoKeyDirectoryTag).map_err(broken)?.unwrap_or_default();
    found.epsg = epsg(&keys);
    let no_data = pages.find_tag(Tag::GdalNodata).map_err(broken)?;
    found.no_data = no_data.and_then(|value| value.into_string().ok()).map(|text| text.trim().to_string());
    Ok((found != MapData::default()).then_some(found))
}

/// Finds the coordinate system among the keys of a directory: four numbers of header, then key,
/// location, count and value of each.
fn epsg(directory: &[u16]) -> Option<u16> {
    let value = |wanted: u16| {
        let mut keys = directory.as_chunks::<4>().0.iter().skip(1);
        let found = keys.find(|[key, location, count, _]| *key == wanted && *location == 0 && *count == 1);
        found.map(|key| key[3]).filter(|code| *code != 0 && *code != USER_DEFINED)
    };
    value(PROJECTED).or_else(|| value(GEOGRAPHIC))
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use tiff::encoder::{TiffEncoder, colortype};

    use super::*;

    #[test]
    fn the_place_of_a_geotiff_is_read() {
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
        let found = map_data(&bytes).expect("a TIFF").expect("map data");
        assert_eq!((found.epsg, found.no_data.as_deref()), (Some(32_632), Some("0")));
        assert_eq!((found.corner, found.pixel_size), (Some([600_000.0, 5_000_000.0]), Some([10.0, 10.0])));
        assert_eq!(map_data(b"\x89PNG").expect("no TIFF"), None);
    }
}
