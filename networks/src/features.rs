//! Features that units pass to one another, and the outputs of a network.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use burn_tensor::{Int, Tensor};
use kernels::ops::{grid_mean, in_f32};

use crate::mask::MaskedCells;

/// Features of the views of one size.
#[derive(Debug, Clone)]
pub struct Features {
    /// Values, `[B·V, P + N, D]`: views of an image are adjacent. P prefix tokens, such as a class
    /// token, come first, then the N patch tokens of the grid, row by row.
    pub x: Tensor<3>,
    /// Number of prefix tokens, P.
    pub n_prefix: usize,
    /// Rows and columns of the grid.
    pub grid: [usize; 2],
    /// Tensors that a branch passes from stage to stage; absent between undivided units.
    pub branch: Option<BranchState>,
    /// Masked cells, where a method masks some.
    pub masked: Option<Masked>,
}

/// Masked cells of sequences.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Masked {
    /// Cells of each sequence.
    pub rows: Arc<MaskedCells>,
    /// Shows the network a mask token in place of each masked cell.
    pub hides: bool,
    /// Tokens that the features hold.
    pub selection: Selection,
}

/// Tokens that features with masked cells hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Selection {
    /// All tokens.
    #[default]
    All,
    /// Only the masked cells, `[R, 1, D]`, in the order of [`MaskedCells::tokens`].
    Masked,
    /// One token per view, then the masked cells if there are any, `[B·V + R, 1, D]`.
    PooledAndMasked,
    /// One token per view, then all cells, `[B·V + B·V·N, 1, D]`.
    PooledAndCells,
    /// All cells, `[B·V·N, 1, D]`.
    Cells,
}

/// Tensors that a branch passes beside its features, between its stages and between its parts.
#[derive(Debug, Clone)]
pub struct BranchState {
    /// Input of the skip connection, `[B·V, N, D]`.
    pub skip: Tensor<3>,
    /// Rows and columns of the grid of the skip connection.
    pub skip_grid: [usize; 2],
    /// Columns of the output of a product that earlier parts have computed, `[B·V, N', D']` each.
    pub columns: Vec<Tensor<3>>,
}

/// Outputs of a network for a micro-batch.
#[derive(Debug, Clone)]
pub struct Outputs {
    /// Features of the backbone, by size of view.
    pub features: Vec<Features>,
    /// Outputs of its heads.
    pub heads: HeadOutputs,
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

impl Features {
    /// Creates features of the cells of `grid`, `[B·V, N, D]`, without prefix tokens.
    pub fn on_grid(x: Tensor<3>, grid: [usize; 2]) -> Self {
        Self { x, n_prefix: 0, grid, branch: None, masked: None }
    }

    /// Creates features of one vector per view, `[B·V, 1, D]`.
    pub fn vectors(x: Tensor<3>) -> Self {
        Self { x, n_prefix: 1, grid: [0, 0], branch: None, masked: None }
    }

    /// Returns features with the values `x`, and with the same grid and masks, but without
    /// intermediate tensors.
    pub fn with(&self, x: Tensor<3>) -> Self {
        let masked = self.masked.clone();
        Self { x, n_prefix: self.n_prefix, grid: self.grid, branch: None, masked }
    }

    /// Applies `f` to every tensor, including intermediate tensors.
    pub fn map(&self, mut f: impl FnMut(&Tensor<3>) -> Tensor<3>) -> Self {
        let branch = self.branch.as_ref().map(|branch| BranchState {
            skip: f(&branch.skip),
            skip_grid: branch.skip_grid,
            columns: branch.columns.iter().map(&mut f).collect(),
        });
        Self { branch, ..self.with(f(&self.x)) }
    }

    /// Returns the intermediate tensors, which exist only within a unit and between the parts of a
    /// divided unit.
    pub fn intermediates(&self) -> impl Iterator<Item = &Tensor<3>> {
        let branches = self.branch.iter();
        branches.flat_map(|branch| std::iter::once(&branch.skip).chain(&branch.columns))
    }

    /// Returns one vector per view, `[B·V, 1, D]`: the first prefix token, or without one the mean
    /// of the patch tokens.
    pub fn pooled(&self) -> Self {
        let [b, n, d] = self.x.dims();
        Self::vectors(match (self.n_prefix, n) {
            (_, 1) => self.x.clone(),
            (0, _) => grid_mean(self.x.clone()),
            _ => self.x.clone().slice([0..b, 0..1, 0..d]),
        })
    }

    /// Returns the cells of the grid, `[B·V, N, D]`.
    pub fn patches(&self) -> Self {
        let [b, n, d] = self.x.dims();
        Self::on_grid(self.x.clone().slice([0..b, self.n_prefix..n, 0..d]), self.grid)
    }

    /// Returns the masked cells, `[R, 1, D]`; one row without meaning if no cell is masked.
    pub fn masked(&self) -> Self {
        let masked = self.masked.clone().unwrap_or_default();
        let [b, n, d] = self.x.dims();
        let tokens = masked.rows.tokens(self.n_prefix, n - self.n_prefix);
        let tokens: Vec<i32> = tokens.into_iter().map(|token| token as i32).collect();
        let tokens = Tensor::<1, Int>::from_data(&tokens[..], &self.x.device().inner());
        let rows = self.x.clone().reshape([b * n, d]).select(0, tokens);
        let [r, _] = rows.dims();
        let masked = Some(Masked { selection: Selection::Masked, ..masked });
        Self { masked, ..Self::vectors(rows.reshape([r, 1, d])) }
    }

    /// Returns one vector per view and then the masked cells, `[B·V + R, 1, D]`;
    /// [`Features::pooled`] where no masks were drawn.
    pub fn pooled_and_masked(&self) -> Self {
        let pooled = self.pooled();
        let Some(masked) = self.masked.clone() else { return pooled };
        let mut parts = vec![pooled.x];
        if masked.rows.n() > 0 {
            parts.push(self.masked().x);
        }
        let masked = Some(Masked { selection: Selection::PooledAndMasked, ..masked });
        Self { masked, ..Self::vectors(Tensor::cat(parts, 0)) }
    }

    /// Returns one vector per view and then all cells, `[B·V + B·V·N, 1, D]`; [`Features::pooled`]
    /// where no masks were drawn.
    pub fn pooled_and_cells(&self) -> Self {
        let pooled = self.pooled();
        let Some(masked) = self.masked.clone() else { return pooled };
        let cells = self.patches().x;
        let [b, n, d] = cells.dims();
        let masked = Some(Masked { selection: Selection::PooledAndCells, ..masked });
        Self { masked, ..Self::vectors(Tensor::cat(vec![pooled.x, cells.reshape([b * n, 1, d])], 0)) }
    }

    /// Splits features that hold one token per view and then cells into the tokens of views and the
    /// cells; returns the tokens of views only if the features hold masked cells and none is
    /// masked. Other features are returned unchanged.
    pub fn split_selection(&self) -> Vec<Self> {
        let Some(masked) = &self.masked else { return vec![self.clone()] };
        let [n_rows, _, _] = self.x.dims();
        let (n_views, selection) = match masked.selection {
            Selection::PooledAndMasked => (n_rows - masked.rows.n(), Selection::Masked),
            Selection::PooledAndCells => (masked.rows.cells.len(), Selection::Cells),
            Selection::All | Selection::Masked | Selection::Cells => return vec![self.clone()],
        };
        if selection == Selection::Masked && masked.rows.n() == 0 {
            return vec![Self::vectors(self.x.clone())];
        }
        let masked = Some(Masked { selection, ..masked.clone() });
        let cells = Self { masked, ..self.row_range(n_views..n_rows) };
        vec![self.row_range(0..n_views), cells]
    }

    /// Returns the rows of `range` as features of one vector per view.
    fn row_range(&self, range: Range<usize>) -> Self {
        let [_, n, d] = self.x.dims();
        Self::vectors(self.x.clone().slice([range, 0..n, 0..d]))
    }

    /// Returns the masked cells, `[R, 1, D]`, of features that hold all cells.
    fn masked_of_cells(&self) -> Tensor<3> {
        let [b, n, d] = self.x.dims();
        let rows = self.masked.clone().unwrap_or_default().rows;
        let n_cells = b * n / rows.cells.len().max(1);
        let tokens: Vec<i32> = rows.tokens(0, n_cells).into_iter().map(|token| token as i32).collect();
        let tokens = Tensor::<1, Int>::from_data(&tokens[..], &self.x.device().inner());
        self.x.clone().reshape([b * n, d]).select(0, tokens).unsqueeze_dim(1)
    }

    /// Returns whether the number of rows depends on how many cells are masked.
    pub fn is_ragged(&self) -> bool {
        let selection = self.masked.as_ref().map_or(Selection::All, |masked| masked.selection);
        matches!(selection, Selection::Masked | Selection::PooledAndMasked)
    }

    /// Returns the number of masked cells.
    fn n_masked(&self) -> usize {
        self.masked.as_ref().map_or(0, |masked| masked.rows.n())
    }

    /// Returns the shape that these features would have with the masked cells `rows`, and the
    /// description of these cells; the own shape and description where the features have no masked
    /// cells.
    pub fn shape_with(&self, rows: &Arc<MaskedCells>) -> ([usize; 3], Option<Masked>) {
        let [b, n, d] = self.x.dims();
        let Some(masked) = self.masked.as_ref().filter(|masked| !masked.rows.cells.is_empty()) else {
            return ([b, n, d], self.masked.clone());
        };
        let n_rows = match masked.selection {
            Selection::All | Selection::PooledAndCells | Selection::Cells => b,
            // Without masked cells there is one row, which has no meaning.
            Selection::Masked => rows.n().max(1),
            Selection::PooledAndMasked => b - masked.rows.n() + rows.n(),
        };
        ([n_rows, n, d], Some(Masked { rows: rows.clone(), ..masked.clone() }))
    }

    /// Casts values of fewer bits to f32, and drops intermediate tensors.
    pub fn in_f32(&self) -> Self {
        self.with(in_f32(self.x.clone()))
    }
}

impl Outputs {
    /// Returns the number of images, B.
    pub fn n_images(&self) -> usize {
        self.heads.n_images
    }

    /// Drops the outputs of the heads, but keeps the masked cells.
    pub fn drop_heads(&mut self) {
        self.heads.by_name.clear();
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
        features: &[Features],
        by_name: BTreeMap<&'static str, Vec<HeadOutput>>,
    ) -> Self {
        let mut masked_cells = Vec::with_capacity(features.len());
        for group in features {
            masked_cells.push(group.masked.as_ref().map(|masked| masked.rows.clone()));
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
    /// for masked cells, or for both.
    pub fn from_parts(parts: &[Features], n_images: usize) -> Self {
        let mut output = Self::default();
        for part in parts.iter().flat_map(Features::split_selection) {
            let selection = part.masked.as_ref().map_or(Selection::All, |masked| masked.selection);
            match selection {
                // Without masked cells there is one row, which has no meaning.
                Selection::Masked | Selection::PooledAndMasked => {
                    output.masked = (part.n_masked() > 0).then_some(part.x);
                }
                Selection::Cells | Selection::PooledAndCells => {
                    output.masked = (part.n_masked() > 0).then(|| part.masked_of_cells());
                    output.cells = Some(part.x);
                }
                Selection::All => output.views = Some(by_image(&part, n_images)),
            }
        }
        output
    }
}

/// Reshapes one token per view, `[B·V, 1, K]`, to `[B, V, K]`; several tokens are treated as views.
pub fn by_image(features: &Features, n_images: usize) -> Tensor<3> {
    let [rows, n, k] = features.x.dims();
    features.x.clone().reshape([n_images, rows * n / n_images, k])
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_tensor::Device;

    /// Features of three views, with a class token and four cells each.
    fn features(cells: [&[usize]; 3]) -> Features {
        let x = Tensor::<1, Int>::arange(0..30, &Device::flex()).float().reshape([3, 5, 2]);
        let rows = Arc::new(MaskedCells { cells: cells.map(<[usize]>::to_vec).to_vec() });
        let masked = Some(Masked { rows, hides: true, selection: Selection::All });
        Features { n_prefix: 1, masked, ..Features::on_grid(x, [2, 2]) }
    }

    fn values(features: &Features) -> Vec<f32> {
        features.x.clone().into_data().try_to_vec().expect("f32")
    }

    fn output_values(x: Option<Tensor<3>>) -> Vec<f32> {
        x.expect("an output").into_data().try_to_vec().expect("f32")
    }

    #[test]
    fn pooled_views_and_masked_cells_are_split_again() {
        let some_masked = features([&[0, 3], &[], &[2]]);
        let parts = some_masked.pooled_and_masked().split_selection();
        let [views, cells] = &parts[..] else { panic!("two parts") };
        assert_eq!(values(views), values(&some_masked.pooled()));
        assert_eq!(values(cells), [2., 3., 8., 9., 26., 27.]);
        assert_eq!((views.is_ragged(), cells.is_ragged(), cells.n_masked()), (false, true, 3));
        let none_masked = features([&[], &[], &[]]);
        let parts = none_masked.pooled_and_masked().split_selection();
        let [views] = &parts[..] else { panic!("one part") };
        assert_eq!((values(views), views.is_ragged()), (values(&none_masked.pooled()), false));
    }

    /// The output of a head is the same for its parts, and for both together.
    #[test]
    fn head_outputs_separate_views_and_masked_cells() {
        let joint = features([&[0, 3], &[], &[2]]).pooled_and_masked();
        for parts in [joint.split_selection(), vec![joint]] {
            let HeadOutput { views, masked, .. } = HeadOutput::from_parts(&parts, 1);
            let dims = [views.expect("views").dims(), masked.expect("masked cells").dims()];
            assert_eq!(dims, [[1, 3, 2], [3, 1, 2]]);
        }
        // A head that reads all cells has the same views and masked cells.
        let some_masked = features([&[0, 3], &[], &[2]]);
        let with_masked = some_masked.pooled_and_masked();
        let with_cells = some_masked.pooled_and_cells();
        for parts in [with_cells.split_selection(), vec![with_cells]] {
            let cell_head = HeadOutput::from_parts(&parts, 1);
            let masked_head = HeadOutput::from_parts(std::slice::from_ref(&with_masked), 1);
            assert_eq!(output_values(cell_head.views), output_values(masked_head.views));
            assert_eq!(output_values(cell_head.masked), output_values(masked_head.masked));
            assert_eq!(cell_head.cells.expect("cells").dims(), [12, 1, 2]);
        }
        let none_masked = features([&[], &[], &[]]);
        let output = HeadOutput::from_parts(&[none_masked.pooled_and_masked()], 3);
        assert_eq!((output.views.expect("views").dims(), output.masked.is_none()), ([3, 1, 2], true));
        let output = HeadOutput::from_parts(&[none_masked.masked()], 3);
        assert!(output.views.is_none() && output.masked.is_none());
    }
}
