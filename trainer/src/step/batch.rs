//! Between the whole batch and the workers' slices of it.

use burn_tensor::{DType, Device, Tensor};

use super::upload::SentViews;
use crate::model::features::Tokens;

/// Slices of a batch, one a worker: groups of patch vectors, later of tokens.
pub(crate) type Slices = Vec<Vec<Tokens>>;

/// Views as bytes, `[n, 3, size, size]`, into a group of normalised patch vectors of `dtype`.
pub(crate) fn tokens_of(
    views: &[&[u8]],
    size_px: usize,
    patch_px: usize,
    device: &Device,
    dtype: DType,
) -> Tokens {
    SentViews::new(views, size_px, patch_px, device).tokens(size_px, patch_px, dtype)
}

/// The same tokens in f32.
pub(crate) fn in_f32(groups: Vec<Tokens>) -> Vec<Tokens> {
    groups.iter().map(|tokens| tokens.with(tokens.x.clone().cast(DType::F32))).collect()
}

/// Slices of groups into groups of the whole batch.
pub(crate) fn join(slices: Slices) -> Vec<Tokens> {
    let n_groups = slices.first().map_or(0, Vec::len);
    (0..n_groups)
        .map(|group| {
            let parts = slices.iter().map(|slice| slice[group].x.clone()).collect();
            slices[0][group].with(Tensor::cat(parts, 0))
        })
        .collect()
}

/// Whole-batch gradients into slices shaped like `slices`.
pub(crate) fn split(slices: &Slices, groups: Vec<Tensor<3>>) -> Vec<Vec<Tensor<3>>> {
    let mut starts = vec![0; groups.len()];
    slices
        .iter()
        .map(|slice| {
            slice
                .iter()
                .zip(&groups)
                .zip(&mut starts)
                .map(|((tokens, grad), start)| {
                    let [b, _, _] = tokens.x.dims();
                    let range = *start..*start + b;
                    *start += b;
                    grad.clone().slice([range])
                })
                .collect()
        })
        .collect()
}

/// Groups of one token a view, `[B·V, 1, K]`, into `[B, V, K]`.
pub(crate) fn by_image(groups: &[Tokens], n_images: usize) -> Vec<Tensor<3>> {
    let one = |tokens: &Tokens| {
        let [rows, _, k] = tokens.x.dims();
        tokens.x.clone().reshape([n_images, rows / n_images, k])
    };
    groups.iter().map(one).collect()
}
