//! The outputs of a network for a micro-batch, as methods read them.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_tensor::Tensor;
use kernels::ops::select_rows;

use crate::mask::MaskedCells;
use crate::tokens::{SequenceRole, Tokens};

/// Outputs of a network for a micro-batch.
#[derive(Debug, Clone)]
pub struct Outputs {
    /// Features of the backbone, by size of view.
    pub features: Vec<Tokens>,
    /// Tokens at the last levels of the backbone, by level and by size of view, as the unit that
    /// ends a level returns them. Empty unless the method asks for them.
    pub levels: Vec<Vec<Tokens>>,
    /// Outputs of its heads.
    pub heads: HeadOutputs,
    /// Normalized pixels of the views, by size: one vector `[C·p·p]` for each cell. Empty unless
    /// the method reads them.
    pub pixels: Vec<Tokens>,
}

/// Outputs of heads for a micro-batch.
#[derive(Debug, Clone, Default)]
pub struct HeadOutputs {
    /// Number of images, B.
    pub n_images: usize,
    /// Masked cells by size of view, where some were drawn.
    pub masked: Vec<Option<Arc<MaskedCells>>>,
    /// Outputs of each head, by size of view.
    pub by_name: BTreeMap<&'static str, Vec<HeadOutput>>,
}

/// Output of a head for the views of one size.
#[derive(Debug, Clone, Default)]
pub struct HeadOutput {
    /// Output for the views, `[B, V, K]`, or for all cells of their grids, `[B, V·N, K]`; absent
    /// where the head reads only masked cells.
    pub views: Option<Tensor<3>>,
    /// Output for the R masked cells, `[R, 1, K]`; absent where the head does not read masked
    /// cells, or no cell is masked.
    pub masked: Option<Tensor<3>>,
    /// Output for all cells, masked or not, `[B·V·N, 1, K]`; absent where the head does not read
    /// them.
    pub cells: Option<Tensor<3>>,
}

impl Outputs {
    /// Creates outputs without levels and pixels.
    pub fn new(features: Vec<Tokens>, heads: HeadOutputs) -> Self {
        Self { features, levels: Vec::new(), heads, pixels: Vec::new() }
    }

    /// Returns these outputs with the tokens at levels, as in [`Outputs::levels`].
    pub fn with_levels(self, levels: Vec<Vec<Tokens>>) -> Self {
        Self { levels, ..self }
    }

    /// Returns these outputs with the pixels of the views, as in [`Outputs::pixels`].
    pub fn with_pixels(self, pixels: Vec<Tokens>) -> Self {
        Self { pixels, ..self }
    }

    /// Returns the number of images, B.
    pub fn n_images(&self) -> usize {
        self.heads.n_images
    }

    /// Drops the outputs of the heads and the levels, but keeps features and masked cells.
    pub fn drop_heads_and_levels(&mut self) {
        self.heads.by_name.clear();
        self.levels.clear();
    }

    /// Returns one vector per view of size `group`, `[B, V, D]`.
    pub fn pooled(&self, group: usize) -> Tensor<3> {
        by_image(&self.features[group].pooled(), self.n_images())
    }

    /// Returns the embeddings of the first size of views, one row per image, `[B, V · D]`.
    pub fn image_rows(&self) -> Tensor<2> {
        let pooled = self.pooled(0);
        let [b, v, d] = pooled.dims();
        pooled.reshape([b, v * d])
    }
}

impl HeadOutputs {
    /// Wraps the outputs of heads for `n_images` images, whose masked cells are those of
    /// `features`.
    pub fn new(
        n_images: usize,
        features: &[Tokens],
        by_name: BTreeMap<&'static str, Vec<HeadOutput>>,
    ) -> Self {
        let mut masked_cells = Vec::with_capacity(features.len());
        for group in features {
            masked_cells.push(group.masked_cells().cloned());
        }
        Self { n_images, masked: masked_cells, by_name }
    }

    /// Returns the masked cells of the views of size `group`, the rows of the output of a head on
    /// masked cells.
    ///
    /// # Panics
    /// If no masks were drawn: a bug in the method.
    pub fn masked(&self, group: usize) -> &MaskedCells {
        self.masked[group].as_ref().expect("a method that reads masked cells has masks")
    }

    /// Returns the output of the head `name` for the views of size `group`, with the shape of
    /// [`HeadOutput::views`].
    ///
    /// # Panics
    /// If there is no such head, or it reads only masked cells: a bug in the method, which lists
    /// its heads itself.
    pub fn on_views(&self, name: &str, group: usize) -> Tensor<3> {
        let output = &self.outputs(name)[group];
        output.views.clone().unwrap_or_else(|| panic!("the head {name} reads masked cells alone"))
    }

    /// Returns the output of the head `name` for the views of each size, as
    /// [`HeadOutputs::on_views`] does.
    ///
    /// # Panics
    /// As [`HeadOutputs::on_views`].
    pub fn on_all_views(&self, name: &str) -> Vec<Tensor<3>> {
        (0..self.outputs(name).len()).map(|group| self.on_views(name, group)).collect()
    }

    /// Returns the output of the head `name`, which reads masked cells, for those of the views of
    /// size `group`, `[R, 1, K]`; `None` if no cell is masked.
    ///
    /// # Panics
    /// If there is no such head.
    pub fn on_masked(&self, name: &str, group: usize) -> Option<Tensor<3>> {
        self.outputs(name)[group].masked.clone()
    }

    /// Returns the output of the head `name`, which reads all cells, for those of the views of size
    /// `group`, `[B·V·N, 1, K]`.
    ///
    /// # Panics
    /// If there is no such head, or it does not read them: a bug in the method.
    pub fn on_cells(&self, name: &str, group: usize) -> Tensor<3> {
        let output = &self.outputs(name)[group];
        output.cells.clone().unwrap_or_else(|| panic!("the head {name} does not read all cells"))
    }

    /// Returns the outputs of the head `name`, by size of view.
    fn outputs(&self, name: &str) -> &[HeadOutput] {
        self.by_name.get(name).unwrap_or_else(|| panic!("the method has no head {name}"))
    }
}

impl HeadOutput {
    /// Wraps the output for views, `[B, V, K]`.
    pub fn from_views(x: Tensor<3>) -> Self {
        Self { views: Some(x), ..Self::default() }
    }

    /// Wraps the output of a head for `n_images` images. Each of `parts` is the output for views,
    /// for cells, or for both.
    pub fn from_parts(parts: &[Tokens], n_images: usize) -> Self {
        let mut output = Self::default();
        for part in parts.iter().flat_map(Tokens::split_groups) {
            let n_masked = part.masked_cells().map_or(0, |rows| rows.n());
            match part.only_group().role {
                // Without masked cells there is one row, which has no meaning.
                SequenceRole::MaskedCells => output.masked = (n_masked > 0).then(|| part.x.unsqueeze_dim(1)),
                SequenceRole::Cells => {
                    output.masked = (n_masked > 0).then(|| masked_among_cells(&part).unsqueeze_dim(1));
                    output.cells = Some(part.x.unsqueeze_dim(1));
                }
                SequenceRole::Views => output.views = Some(by_image(&part, n_images)),
            }
        }
        output
    }
}

/// Returns the masked cells, `[R, D]`, among all cells of all views.
fn masked_among_cells(cells: &Tokens) -> Tensor<2> {
    let [n, _] = cells.x.dims();
    let rows = cells.masked_cells().cloned().unwrap_or_default();
    let n_cells = n / rows.cells.len().max(1);
    let tokens: Vec<u32> = rows.tokens(0, n_cells).into_iter().map(|token| token as u32).collect();
    select_rows(cells.x.clone(), &tokens.into())
}

/// Reshapes one token per view, `[B·V, K]`, to `[B, V, K]`; several tokens are treated as views.
pub fn by_image(tokens: &Tokens, n_images: usize) -> Tensor<3> {
    let [n, k] = tokens.x.dims();
    tokens.x.clone().reshape([n_images, n / n_images, k])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::Masking;
    use crate::tokens::{Masked, Sequences};
    use burn_tensor::{Device, Int};

    /// Returns tokens of three views, with a class token and four cells each.
    fn tokens(cells: [&[usize]; 3]) -> Tokens {
        let x = Tensor::<1, Int>::arange(0..30, &Device::flex()).float().reshape([15, 2]);
        let rows = Arc::new(MaskedCells::new(cells.map(<[usize]>::to_vec).to_vec()));
        let masked = Some(Masked { rows, masking: Masking::Replaced });
        Tokens::new(x, vec![Sequences { n_prefix: 1, masked, ..Sequences::on_grid(3, [2, 2]) }])
    }

    fn output_values(x: Option<Tensor<3>>) -> Vec<f32> {
        x.expect("an output").into_data().try_to_vec().expect("f32")
    }

    /// The output of a head is the same for its parts, and for both together.
    #[test]
    fn head_outputs_separate_views_and_masked_cells() {
        let joint = tokens([&[0, 3], &[], &[2]]).pooled_and_masked();
        for parts in [joint.split_groups(), vec![joint]] {
            let HeadOutput { views, masked, .. } = HeadOutput::from_parts(&parts, 1);
            let dims = [views.expect("views").dims(), masked.expect("masked cells").dims()];
            assert_eq!(dims, [[1, 3, 2], [3, 1, 2]]);
        }
        // A head that reads all cells has the same views and masked cells.
        let some_masked = tokens([&[0, 3], &[], &[2]]);
        let with_masked = some_masked.pooled_and_masked();
        let with_cells = some_masked.pooled_and_cells();
        for parts in [with_cells.split_groups(), vec![with_cells]] {
            let cell_head = HeadOutput::from_parts(&parts, 1);
            let masked_head = HeadOutput::from_parts(std::slice::from_ref(&with_masked), 1);
            assert_eq!(output_values(cell_head.views), output_values(masked_head.views));
            assert_eq!(output_values(cell_head.masked), output_values(masked_head.masked));
            assert_eq!(cell_head.cells.expect("cells").dims(), [12, 1, 2]);
        }
        let none_masked = tokens([&[], &[], &[]]);
        let output = HeadOutput::from_parts(&[none_masked.pooled_and_masked()], 3);
        assert_eq!((output.views.expect("views").dims(), output.masked.is_none()), ([3, 1, 2], true));
        let output = HeadOutput::from_parts(&[none_masked.masked()], 3);
        assert!(output.views.is_none() && output.masked.is_none());
    }
}
