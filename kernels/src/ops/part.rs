//! Parts of flat tensors.

use burn_tensor::Tensor;

/// Returns the elements `range` of a flat tensor. On an NVIDIA GPU they are not copied if
/// operations can read them in place.
pub fn part(flat: &Tensor<1>, range: std::ops::Range<usize>) -> Tensor<1> {
    #[cfg(feature = "cuda")]
    if let Some(part) = super::cube::part_in_place(flat, &range) {
        return part;
    }
    flat.clone().slice([range])
}
