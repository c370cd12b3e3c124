//! Sheets of images: views, thumbnails, nearest neighbors, classified images, groups of copies.

use std::borrow::Cow;
use std::path::Path;

use augment::image::picture_of_view;
use augment::{
    DecodeRules, GroupSpec, Image, MultiCrop, PixelFormat, Rgb8, SampleKey, Transform, ViewMaker, Views,
};
use eval::{ClassifiedImage, EvalError, FeatureSet, ImageSet, class_names, neighbors};
use pipeline::{Dataset, Sample, SampleId};

use super::tiles::{Tile, caption_lines, sheet};
use crate::ReportError;

/// Number of columns of a sheet of thumbnails.
const SHEET_COLUMNS: usize = 12;

/// Side of a tile in a sheet.
const TILE_PX: u32 = 72;

/// Draws `count` images, spread evenly over `dataset`, each with all of its views in a row.
///
/// # Errors
/// [`ReportError::Eval`] or [`ReportError::Picture`].
pub fn contact_sheet(
    path: &Path,
    dataset: &Dataset,
    multicrop: &MultiCrop,
    rules: &DecodeRules,
    seed: u64,
    count: u64,
) -> Result<(), ReportError> {
    let mut maker = ViewMaker::default();
    let mut made = Vec::new();
    for id in spread(dataset, count) {
        let Some(sample) = readable(dataset, SampleId(id))? else { continue };
        let key = SampleKey { seed, epoch: 0, sample: id, attempt: 0 };
        // A damaged image has no views to show; the run that follows reports it.
        let Ok(image) = Image::decode(&sample.image.files(), rules) else { continue };
        let Ok(views) = maker.make(&image, multicrop, key) else { continue };
        made.push(views);
    }
    let groups = multicrop.groups();
    let pictures: Vec<Vec<(Cow<'_, [u8]>, u32)>> =
        made.iter().map(|views| view_pictures(views, &groups, rules.format)).collect();
    let rows: Vec<Vec<Tile<'_>>> = pictures.iter().map(|row| row.iter().map(view_tile).collect()).collect();
    sheet(path, &rows, TILE_PX.max(groups.first().map_or(0, |g| g.size_px.min(128))), "")
}

/// Returns a picture of each view, with the side of the view.
fn view_pictures<'a>(
    views: &'a Views,
    groups: &[GroupSpec],
    format: PixelFormat,
) -> Vec<(Cow<'a, [u8]>, u32)> {
    let mut pictures = Vec::new();
    for (bytes, GroupSpec { size_px, .. }) in views.groups.iter().zip(groups) {
        let len = format.bytes_per_pixel() * (size_px * size_px) as usize;
        for view in bytes.chunks_exact(len) {
            pictures.push((picture_of_view(view, format, *size_px), *size_px));
        }
    }
    pictures
}

fn view_tile<'a>((planes, size_px): &'a (Cow<'_, [u8]>, u32)) -> Tile<'a> {
    Tile { planes, size_px: *size_px as usize, frame: None, caption: &[] }
}

/// Draws `images` after their transform, each with its key and, if it has one, its class as `named`
/// formats it. Images that cannot be decoded are left out.
///
/// # Errors
/// [`ReportError::Eval`] or [`ReportError::Picture`].
pub fn thumbnails(path: &Path, images: &ImageSet, named: impl Fn(&str) -> String) -> Result<(), ReportError> {
    let mut made: Vec<(Vec<u8>, Vec<String>)> = Vec::new();
    for i in 0..images.len() {
        let planes = match images.picture(i) {
            Ok(Some(planes)) => planes,
            Ok(None) => continue,
            Err(EvalError::Data(error)) if error.is_sample_error() => continue,
            Err(error) => return Err(error.into()),
        };
        let (_, key) = images.describe(i);
        let class = images.label(i).map(|label| named(&images.classes()[label as usize]));
        made.push((planes, Vec::from_iter(std::iter::once(key).chain(class))));
    }
    let size_px = images.transform.size_px;
    let mut rows: Vec<Vec<Tile<'_>>> = Vec::with_capacity(made.len().div_ceil(SHEET_COLUMNS));
    for row in made.chunks(SHEET_COLUMNS) {
        let mut tiles = Vec::with_capacity(row.len());
        for (planes, caption) in row {
            tiles.push(Tile { planes, size_px: size_px as usize, frame: None, caption });
        }
        rows.push(tiles);
    }
    sheet(path, &rows, size_px, "")
}

/// Reads a sample; `None` if the sample itself is bad.
fn readable(dataset: &Dataset, id: SampleId) -> Result<Option<Sample>, ReportError> {
    match dataset.read(id) {
        Err(error) if error.is_sample_error() => Ok(None),
        sample => Ok(Some(sample.map_err(EvalError::from)?)),
    }
}

/// Returns `count` sample numbers that are evenly spread over `dataset`, or all if there are fewer.
fn spread(dataset: &Dataset, count: u64) -> impl Iterator<Item = u64> {
    let n = dataset.n_samples();
    let count = count.min(n).max(1);
    (0..count).map(move |i| i * n / count)
}

/// Number of neighbors per query in a sheet.
const N_NEIGHBORS: usize = 8;

/// Maximum number of queries in a sheet of neighbors.
const N_QUERIES: usize = 10;

/// Draws a few images of `queries`, or of `candidates` if there are none, each with the
/// `candidates` whose features are most similar. If classes are known, a green frame marks the
/// query's class and a red frame another class.
///
/// # Errors
/// [`ReportError::Picture`].
pub fn neighbor_sheet(
    path: &Path,
    candidates: (&ImageSet, &FeatureSet),
    queries: Option<(&ImageSet, &FeatureSet)>,
) -> Result<(), ReportError> {
    let among_themselves = queries.is_none();
    let columns = candidates.1.layout().last(1);
    let images = candidates.0;
    let rows = candidates.1.columns(columns.clone());
    let (query_images, all) = queries.unwrap_or(candidates);
    let every = (all.len() / N_QUERIES).max(1);
    let shown = all.columns(columns).select((0..all.len()).step_by(every).take(N_QUERIES));
    let nearest = neighbors(&rows, &shown, N_NEIGHBORS + usize::from(among_themselves), false);
    let mut has_frames = false;
    let mut made = Vec::with_capacity(nearest.len());
    for (row, near) in nearest.iter().enumerate() {
        let query = shown.image(row);
        let mut tiles = vec![(picture_or_black(query_images, query), query_images.transform.size_px, None)];
        let near = near.iter().map(|(i, _)| rows.image(*i as usize));
        // Without queries, each image is its own nearest neighbor.
        for image in near.filter(|image| !among_themselves || *image != query).take(N_NEIGHBORS) {
            let frame = match (query_images.label(query), images.label(image)) {
                (Some(a), Some(b)) => Some(if a == b { [40, 160, 70] } else { [200, 50, 50] }),
                _ => None,
            };
            has_frames |= frame.is_some();
            tiles.push((picture_or_black(images, image), images.transform.size_px, frame));
        }
        made.push(tiles);
    }
    let mut rows: Vec<Vec<Tile<'_>>> = Vec::with_capacity(made.len());
    for row in &made {
        let mut tiles = Vec::with_capacity(row.len());
        for (planes, size_px, frame) in row {
            tiles.push(Tile { planes, size_px: *size_px as usize, frame: *frame, caption: &[] });
        }
        rows.push(tiles);
    }
    let query = if among_themselves { "image" } else { "held-out image" };
    let frames = if has_frames { "; green frame: same class, red: another" } else { "" };
    sheet(path, &rows, TILE_PX, &format!("left: {query}; right: its nearest neighbors{frames}"))
}

/// Number of columns of a sheet of classified images.
const CLASSIFIED_COLUMNS: usize = 8;

/// Side of a tile in a sheet of classified images.
const CLASSIFIED_PX: u32 = 112;

/// Draws `classified`, images of `images`, each with its key, its classes, and the predicted class
/// with its probability, or all predicted classes if there are several or none. Wrong predictions
/// have a red frame, right ones a green one.
///
/// # Errors
/// [`ReportError::Picture`].
pub fn classified_sheet(
    path: &Path,
    images: &ImageSet,
    classified: &[ClassifiedImage],
) -> Result<(), ReportError> {
    let classes = images.classes();
    let mut made: Vec<(Vec<u8>, [u8; 3], [String; 3])> = Vec::with_capacity(classified.len());
    for image in classified {
        let (_, key) = images.describe(image.image);
        let mut predicted = class_names(&image.predicted, classes);
        if image.predicted.len() == 1 {
            predicted += &format!(" {:.0} %", image.probability);
        }
        let caption = [key, class_names(&image.labels, classes), predicted];
        let frame = if image.is_right() { [40, 160, 70] } else { [200, 50, 50] };
        made.push((picture_or_black(images, image.image), frame, caption));
    }
    let size_px = images.transform.size_px as usize;
    let mut rows: Vec<Vec<Tile<'_>>> = Vec::new();
    for row in made.chunks(CLASSIFIED_COLUMNS) {
        let mut tiles = Vec::with_capacity(row.len());
        for (planes, frame, caption) in row {
            tiles.push(Tile { planes, size_px, frame: Some(*frame), caption });
        }
        rows.push(tiles);
    }
    let legend = format!(
        "{}, largest loss first; below each: key, class, predicted class with its probability; red: wrong",
        images.name
    );
    sheet(path, &rows, CLASSIFIED_PX, &legend)
}

/// Returns the picture of an image whose features exist; if it cannot be decoded now, a black tile
/// is all that is lost.
fn picture_or_black(images: &ImageSet, image: usize) -> Vec<u8> {
    let size_px = images.transform.size_px as usize;
    images.picture(image).ok().flatten().unwrap_or_else(|| vec![0; 3 * size_px * size_px])
}

/// An image in a sheet, with its caption.
pub struct Captioned {
    /// The image.
    pub image: Rgb8,
    /// Text below the image.
    pub caption: String,
    /// Whether the image is marked, by a red frame.
    pub is_marked: bool,
}

/// Writes images, each with its caption, as a PNG, with `legend` below them.
///
/// # Errors
/// [`ReportError::Picture`].
pub fn image_sheet(path: &Path, images: &[Captioned], legend: &str) -> Result<(), ReportError> {
    let mut tiles = Vec::with_capacity(images.len());
    for Captioned { image, caption, is_marked } in images {
        tiles.push(MarkedTile::new(path, image, caption, *is_marked)?);
    }
    let rows: Vec<&[MarkedTile]> = tiles.chunks(SHEET_COLUMNS).collect();
    marked_sheet(path, &rows, legend)
}

/// Two images in a sheet of pairs.
pub struct Pair {
    /// The images, each with its caption.
    pub images: [(String, Rgb8); 2],
    /// Whether the pair is marked, by a red frame around its second image.
    pub is_marked: bool,
}

/// Writes rows of pairs of images as a PNG, with `legend` below them.
///
/// # Errors
/// [`ReportError::Picture`].
pub fn image_pairs(path: &Path, rows: &[Vec<Pair>], legend: &str) -> Result<(), ReportError> {
    let mut made: Vec<Vec<MarkedTile>> = Vec::with_capacity(rows.len());
    for row in rows {
        let mut tiles = Vec::with_capacity(2 * row.len());
        for pair in row {
            let [(key, first), (caption, second)] = &pair.images;
            tiles.push(MarkedTile::new(path, first, key, false)?);
            tiles.push(MarkedTile::new(path, second, caption, pair.is_marked)?);
        }
        made.push(tiles);
    }
    let rows: Vec<&[MarkedTile]> = made.iter().map(Vec::as_slice).collect();
    marked_sheet(path, &rows, legend)
}

/// A scaled image with its caption, marked or not.
struct MarkedTile {
    planes: Vec<u8>,
    caption: [String; 1],
    is_marked: bool,
}

/// Side of a [`MarkedTile`] in pixels.
const MARKED_TILE_PX: u32 = 112;

impl MarkedTile {
    fn new(path: &Path, image: &Rgb8, caption: &str, is_marked: bool) -> Result<Self, ReportError> {
        let square = Transform::with_resize(MARKED_TILE_PX, MARKED_TILE_PX)
            .map_err(|reason| ReportError::picture(path, reason))?;
        let planes = square.apply(image).map_err(|error| ReportError::picture(path, error.to_string()))?;
        Ok(Self { planes, caption: [caption.to_string()], is_marked })
    }
}

fn marked_sheet(path: &Path, rows: &[&[MarkedTile]], legend: &str) -> Result<(), ReportError> {
    let mut tiles: Vec<Vec<Tile<'_>>> = Vec::with_capacity(rows.len());
    for row in rows {
        let tiles_of_row = row.iter().map(|tile| Tile {
            planes: &tile.planes,
            size_px: MARKED_TILE_PX as usize,
            frame: tile.is_marked.then_some([200, 50, 40]),
            caption: &tile.caption,
        });
        tiles.push(tiles_of_row.collect());
    }
    sheet(path, &tiles, MARKED_TILE_PX, legend)
}

/// An image of a group.
pub struct GroupedImage {
    /// The image.
    pub image: Rgb8,
    /// Its key, which is shown below it over as many lines as it needs.
    pub key: String,
    /// What it is in the group, in a few words below the key.
    pub role: String,
}

/// Writes rows of images as a PNG, the first of each row in a green frame, with `legend` below
/// them.
///
/// # Errors
/// [`ReportError::Picture`].
pub fn image_groups(path: &Path, rows: &[Vec<GroupedImage>], legend: &str) -> Result<(), ReportError> {
    const TILE_PX: u32 = 128;
    let square =
        Transform::with_resize(TILE_PX, TILE_PX).map_err(|reason| ReportError::picture(path, reason))?;
    let mut made: Vec<Vec<(Vec<u8>, Vec<String>)>> = Vec::with_capacity(rows.len());
    for row in rows {
        let mut pictures = Vec::with_capacity(row.len());
        for GroupedImage { image, key, role } in row {
            let planes =
                square.apply(image).map_err(|error| ReportError::picture(path, error.to_string()))?;
            let mut caption = caption_lines(key, TILE_PX);
            caption.push(role.clone());
            pictures.push((planes, caption));
        }
        made.push(pictures);
    }
    let size_px = TILE_PX as usize;
    let green = Some([40, 160, 60]);
    let mut tiles: Vec<Vec<Tile<'_>>> = Vec::with_capacity(made.len());
    for row in &made {
        let tiles_of_row = row.iter().enumerate().map(|(i, (planes, caption))| Tile {
            planes,
            size_px,
            frame: green.filter(|_| i == 0),
            caption,
        });
        tiles.push(tiles_of_row.collect());
    }
    sheet(path, &tiles, TILE_PX, legend)
}
