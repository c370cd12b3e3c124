//! Sheets of images: views, thumbnails, nearest neighbors, classified images, groups of copies.

use std::path::Path;

use augment::image::picture_of_view;
use augment::{
    DecodeRules, GroupSpec, Image, MultiCrop, PixelFormat, Rgb8, SampleKey, Transform, ViewMaker, Views,
};
use eval::{ClassifiedImage, EvalError, FeatureSet, ImageSet, class_names, neighbors};
use pipeline::{Dataset, Sample, SampleId};

use super::tiles::{GREEN, RED, Tile, caption_lines, sheet};
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
    let groups = multicrop.groups();
    let mut rows = Vec::new();
    for id in dataset.spread(count) {
        let Some(sample) = readable(dataset, id)? else { continue };
        let key = SampleKey { seed, epoch: 0, sample: id.0, attempt: 0 };
        // A damaged image has no views to show; the run that follows reports it.
        let Ok(image) = Image::decode(&sample.image.files(), rules) else { continue };
        let Ok(views) = maker.make(&image, multicrop, key) else { continue };
        rows.push(view_tiles(&views, &groups, rules.format));
    }
    sheet(path, &rows, TILE_PX.max(groups.first().map_or(0, |g| g.size_px.min(128))), "")
}

/// Returns a tile for each view.
fn view_tiles(views: &Views, groups: &[GroupSpec], format: PixelFormat) -> Vec<Tile> {
    let mut tiles = Vec::new();
    for (bytes, GroupSpec { size_px, .. }) in views.groups.iter().zip(groups) {
        let len = format.bytes_per_pixel() * (size_px * size_px) as usize;
        for view in bytes.chunks_exact(len) {
            let planes = picture_of_view(view, format, *size_px).into_owned();
            tiles.push(Tile { planes, size_px: *size_px as usize, frame: None, caption: Vec::new() });
        }
    }
    tiles
}

/// Draws `images` after their transform, each with its key and, if it has one, its class as `named`
/// formats it. Images that cannot be decoded are left out.
///
/// # Errors
/// [`ReportError::Eval`] or [`ReportError::Picture`].
pub fn thumbnails(path: &Path, images: &ImageSet, named: impl Fn(&str) -> String) -> Result<(), ReportError> {
    let size_px = images.transform.size_px;
    let mut rows: Vec<Vec<Tile>> = Vec::new();
    for i in 0..images.len() {
        let planes = match images.picture(i) {
            Ok(Some(planes)) => planes,
            Ok(None) => continue,
            Err(EvalError::Data(error)) if error.is_sample_error() => continue,
            Err(error) => return Err(error.into()),
        };
        let (_, key) = images.describe(i);
        let class = images.label(i).map(|label| named(&images.classes()[label as usize]));
        let mut caption = vec![key];
        caption.extend(class);
        push(&mut rows, SHEET_COLUMNS, Tile { planes, size_px: size_px as usize, frame: None, caption });
    }
    sheet(path, &rows, size_px, "")
}

/// Adds a tile to the last of `rows`, or to a new one if that has `n_columns` tiles.
fn push(rows: &mut Vec<Vec<Tile>>, n_columns: usize, tile: Tile) {
    match rows.last_mut() {
        Some(row) if row.len() < n_columns => row.push(tile),
        _ => rows.push(vec![tile]),
    }
}

/// Reads a sample; `None` if the sample itself is bad.
fn readable(dataset: &Dataset, id: SampleId) -> Result<Option<Sample>, ReportError> {
    match dataset.read(id) {
        Err(error) if error.is_sample_error() => Ok(None),
        sample => Ok(Some(sample.map_err(EvalError::from)?)),
    }
}

/// Number of neighbors per query in a sheet.
const N_NEIGHBORS: usize = 8;

/// Maximum number of queries in a sheet of neighbors.
const N_QUERIES: usize = 10;

/// Images with their features.
#[derive(Clone, Copy)]
pub struct ImageFeatures<'a> {
    /// The images.
    pub images: &'a ImageSet,
    /// Rows of those of them that can be decoded.
    pub features: &'a FeatureSet,
}

/// Draws a few images of `queries`, or of `candidates` if there are none, each with the
/// `candidates` whose features are most similar. If classes are known, a green frame marks the
/// query's class and a red frame another class.
///
/// # Errors
/// [`ReportError::Picture`].
pub fn neighbor_sheet(
    path: &Path,
    candidates: ImageFeatures<'_>,
    queries: Option<ImageFeatures<'_>>,
) -> Result<(), ReportError> {
    let among_themselves = queries.is_none();
    let columns = candidates.features.layout().last(1);
    let images = candidates.images;
    let rows = candidates.features.columns(columns.clone());
    let queries = queries.unwrap_or(candidates);
    let query_images = queries.images;
    let n_queries = queries.features.len();
    let every = (n_queries / N_QUERIES).max(1);
    let shown = queries.features.columns(columns).select((0..n_queries).step_by(every).take(N_QUERIES));
    let nearest = neighbors(&rows, &shown, N_NEIGHBORS + usize::from(among_themselves), false);
    let mut has_frames = false;
    let mut drawn = Vec::with_capacity(nearest.len());
    for (row, near) in nearest.iter().enumerate() {
        let query = shown.image(row);
        let mut tiles = vec![image_tile(query_images, query, None, Vec::new())];
        let near = near.iter().map(|(i, _)| rows.image(*i as usize));
        // Without queries, each image is its own nearest neighbor.
        for image in near.filter(|image| !among_themselves || *image != query).take(N_NEIGHBORS) {
            let frame = match (query_images.label(query), images.label(image)) {
                (Some(a), Some(b)) => Some(if a == b { GREEN } else { RED }),
                _ => None,
            };
            has_frames |= frame.is_some();
            tiles.push(image_tile(images, image, frame, Vec::new()));
        }
        drawn.push(tiles);
    }
    let query = if among_themselves { "image" } else { "held-out image" };
    let frames = if has_frames { "; green frame: same class, red: another" } else { "" };
    sheet(path, &drawn, TILE_PX, &format!("left: {query}; right: its nearest neighbors{frames}"))
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
    let mut rows = Vec::new();
    for image in classified {
        let (_, key) = images.describe(image.image);
        let mut predicted = class_names(&image.predicted, classes);
        if image.predicted.len() == 1 {
            predicted += &format!(" {:.0} %", image.probability);
        }
        let caption = vec![key, class_names(&image.labels, classes), predicted];
        let frame = if image.is_right() { GREEN } else { RED };
        push(&mut rows, CLASSIFIED_COLUMNS, image_tile(images, image.image, Some(frame), caption));
    }
    let legend = format!(
        "{}, largest loss first; below each: key, class, predicted class with its probability; red: wrong",
        images.name
    );
    sheet(path, &rows, CLASSIFIED_PX, &legend)
}

/// Returns the tile of an image whose features exist; if it cannot be decoded now, a black tile is
/// all that is lost.
fn image_tile(images: &ImageSet, image: usize, frame: Option<[u8; 3]>, caption: Vec<String>) -> Tile {
    let size_px = images.transform.size_px as usize;
    let picture = images.picture(image).ok().flatten();
    let planes = picture.unwrap_or_else(|| vec![0; 3 * size_px * size_px]);
    Tile { planes, size_px, frame, caption }
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
    let mut rows = Vec::new();
    for Captioned { image, caption, is_marked } in images {
        push(&mut rows, SHEET_COLUMNS, marked_tile(path, image, caption, *is_marked)?);
    }
    sheet(path, &rows, MARKED_TILE_PX, legend)
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
    let mut drawn: Vec<Vec<Tile>> = Vec::with_capacity(rows.len());
    for row in rows {
        let mut tiles = Vec::with_capacity(2 * row.len());
        for pair in row {
            let [(key, first), (caption, second)] = &pair.images;
            tiles.push(marked_tile(path, first, key, false)?);
            tiles.push(marked_tile(path, second, caption, pair.is_marked)?);
        }
        drawn.push(tiles);
    }
    sheet(path, &drawn, MARKED_TILE_PX, legend)
}

/// Side of the tile of a scaled image in pixels.
const MARKED_TILE_PX: u32 = 112;

/// Returns the tile of an image, scaled, with a red frame if it is marked.
fn marked_tile(path: &Path, image: &Rgb8, caption: &str, is_marked: bool) -> Result<Tile, ReportError> {
    let planes = scaled(path, image, MARKED_TILE_PX)?;
    let frame = is_marked.then_some(RED);
    Ok(Tile { planes, size_px: MARKED_TILE_PX as usize, frame, caption: vec![caption.to_string()] })
}

/// Returns the planes of an image, scaled to a square of `side_px`. `path` is the picture that it
/// is for, which errors name.
fn scaled(path: &Path, image: &Rgb8, side_px: u32) -> Result<Vec<u8>, ReportError> {
    let square =
        Transform::with_resize(side_px, side_px).map_err(|reason| ReportError::picture(path, reason))?;
    square.apply(image).map_err(|error| ReportError::picture(path, error.to_string()))
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
    let mut drawn: Vec<Vec<Tile>> = Vec::with_capacity(rows.len());
    for row in rows {
        let mut tiles = Vec::with_capacity(row.len());
        for (index, GroupedImage { image, key, role }) in row.iter().enumerate() {
            let planes = scaled(path, image, TILE_PX)?;
            let frame = (index == 0).then_some(GREEN);
            let mut caption = caption_lines(key, TILE_PX);
            caption.push(role.clone());
            tiles.push(Tile { planes, size_px: TILE_PX as usize, frame, caption });
        }
        drawn.push(tiles);
    }
    sheet(path, &drawn, TILE_PX, legend)
}
