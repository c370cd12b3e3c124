//! Retrieval of the other view: how often the nearest of all other images' views is the second view
//! of the same image.
//!
//! ```text
//! u_i, v_i  features of two views of image i, rows of unit length
//! retrieval = 100 · mean over i of ([argmax_j u_i · v_j = i] + [argmax_j v_i · u_j = i]) / 2
//! ```
//!
//! By chance it is 100 / n for n images. The views are the same for every recipe, so that runs of
//! different recipes can be compared: crops of 20 to 50 % of the area, whose overlap is small, with
//! flips, and with changes of color where images have colors, because colors alone would tell many
//! photographs apart.

use augment::MultiCrop;
use augment::color::Jitter;
use networks::Network;
use pipeline::Progress;
use rayon::prelude::*;

use super::alignment::unit_rows;
use super::view_rows;
use crate::EvalError;
use crate::images::ImageSet;

/// Name of the number in files.
pub const RETRIEVAL: &str = "retrieval";

/// Name of the network with random weights in the evaluations of a run.
pub const RANDOM_NETWORK: &str = "random weights";

/// Share of an image's area that a view shows, at least and at most.
const VIEW_SCALE: [f64; 2] = [0.2, 0.5];

/// Changes of color of a view: the usual ones of self-supervised methods.
const JITTER: Jitter = Jitter { brightness: 0.4, contrast: 0.4, saturation: 0.2, hue: 0.1, p: 0.8 };

/// How often a network finds the other view of an image.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Retrieval {
    /// Share of the views whose nearest view is of the same image, in percent.
    pub percent: f64,
    /// Number of images, each of which has two views.
    pub n_images: usize,
}

/// Measures the retrieval of `network` on `images`. Those that cannot be decoded are left out.
///
/// # Errors
/// [`EvalError::Data`] if a shard cannot be read, [`EvalError::NotFinite`].
pub fn retrieval(
    network: &Network,
    images: &ImageSet,
    progress: &dyn Progress,
) -> Result<Retrieval, EvalError> {
    let multicrop = views(images);
    let rows = view_rows(network, images, &multicrop, 2, progress)?;
    let d = network.model.width();
    Ok(Retrieval { percent: share_found(&rows, d), n_images: rows.len() / (2 * d) })
}

/// Returns the views of `images`: one kind of crop.
fn views(images: &ImageSet) -> MultiCrop {
    let size_px = images.transform.size_px;
    // A blur has a width in pixels: it would be stronger for small images.
    let mut multicrop = MultiCrop::single(size_px);
    for crop in &mut multicrop.crops {
        crop.scale = VIEW_SCALE;
        crop.jitter = JITTER;
        crop.gray_p = 0.2;
    }
    if images.format().is_rgb8() { multicrop } else { multicrop.into_multichannel(0.0, 0.0) }
}

/// Returns the share of the rows, `[n, 2, D]`, whose nearest row among the other views of all
/// images is of the same image, in percent. A tie is no hit, so that equal rows find nothing.
fn share_found(rows: &[f32], d: usize) -> f64 {
    let unit = unit_rows(rows, d);
    let views: Vec<&[f32]> = unit.chunks_exact(d).collect();
    let n_images = views.len() / 2;
    if n_images == 0 {
        return 0.0;
    }
    let n_found = (0..2 * n_images).into_par_iter().filter(|query| is_found(&views, *query)).count();
    100.0 * n_found as f64 / (2 * n_images) as f64
}

/// Returns whether the other view of the image of row `query` is nearer to it than those of all
/// other images.
fn is_found(views: &[&[f32]], query: usize) -> bool {
    let n_images = views.len() / 2;
    let other_view = 1 - query % 2;
    let own_similarity = dot(views[query], views[query - query % 2 + other_view]);
    for image in 0..n_images {
        if image != query / 2 && dot(views[query], views[2 * image + other_view]) >= own_similarity {
            return false;
        }
    }
    true
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_find_the_other_view_of_their_image() {
        // Three images along the axes of a space: each view finds its own.
        let apart =
            [1.0, 0.1, 0.0, 2.0, 0.0, 0.1, 0.0, 1.0, 0.1, 0.1, 3.0, 0.0, 0.1, 0.0, 1.0, 0.0, 0.1, 1.0];
        assert_eq!(share_found(&apart, 3), 100.0);
        // The second view of the first image looks like the second image: only the second view of
        // that one finds its own image.
        let [a, b, c] = [[1.0, 0.0], [0.0, 1.0], [0.0, 0.9]];
        let rows = [a, b, c, [0.1, 1.0]].concat();
        assert_eq!(share_found(&rows, 2), 25.0);
    }

    /// Features that are equal for all images, as after a collapse, find nothing.
    #[test]
    fn equal_features_find_nothing() {
        assert_eq!(share_found(&[1.0; 4 * 2 * 3], 3), 0.0);
        assert_eq!(share_found(&[0.0; 4 * 2 * 3], 3), 0.0);
        assert_eq!(share_found(&[], 3), 0.0);
    }
}
