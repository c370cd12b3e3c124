//! Tokens that units pass to one another: those of many sequences, one after another.
//!
//! ```text
//! x [T, D]      sequence 0: prefix tokens, then cells · sequence 1 · …       groups: sequences of one size of views
//! ```
//!
//! A transformer packs the views of all sizes into one stream, so that its norms and products run
//! once over all tokens, and only attention and positions depend on the sequences. A convolutional
//! network has one stream for each size of views, whose tokens are the cells of feature maps. What
//! a method does with tokens, such as dropping masked cells, pooling and selecting, is a selection
//! of rows.

use std::ops::Range;
use std::sync::Arc;

use burn_tensor::Tensor;
use kernels::ops::{Lengths, Run, grid_mean, in_f32, select_rows};

use crate::mask::{MaskedCells, Masking};

/// Tokens of many sequences.
#[derive(Debug, Clone)]
pub struct Tokens {
    /// Values, `[T, D]`.
    pub x: Tensor<2>,
    /// Sequences, in the order of their tokens: a group for each size of views, or for each role.
    pub groups: Vec<Sequences>,
    /// Tensors that a branch passes from stage to stage; absent between undivided units.
    pub branch: Option<BranchState>,
}

/// Sequences of the views of one size, or of other rows of one role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequences {
    /// Number of sequences: B·V for views, of which those of an image are adjacent.
    pub n: usize,
    /// Number of prefix tokens of each sequence, such as a class token, P.
    pub n_prefix: usize,
    /// Rows and columns of the grid of cells.
    pub grid: [usize; 2],
    /// Cells whose tokens each sequence has after its prefix tokens; absent if it has those of all
    /// cells, row by row.
    pub cells: Option<Arc<Vec<Vec<usize>>>>,
    /// Masked cells, where a method masks some.
    pub masked: Option<Masked>,
    /// What the sequences are.
    pub role: SequenceRole,
}

/// What sequences are to the heads and the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SequenceRole {
    /// Views.
    #[default]
    Views,
    /// One masked cell each, in the order of [`MaskedCells::tokens`].
    MaskedCells,
    /// One cell each: all cells of all views.
    Cells,
}

/// Masked cells of sequences.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Masked {
    /// Cells of each sequence.
    pub rows: Arc<MaskedCells>,
    /// What the network sees of them.
    pub masking: Masking,
}

/// Tensors that a branch passes beside its values, between its stages and between its parts.
#[derive(Debug, Clone)]
pub struct BranchState {
    /// Input of the skip connection, `[T, D]`.
    pub skip: Tensor<2>,
    /// Rows and columns of the grid of the skip connection.
    pub skip_grid: [usize; 2],
    /// Columns of the output of a product that earlier parts have computed, `[T', D']` each.
    pub columns: Vec<Tensor<2>>,
}

impl Sequences {
    /// Creates `n` sequences of all cells of `grid`, without prefix tokens.
    pub fn on_grid(n: usize, grid: [usize; 2]) -> Self {
        Self { n, n_prefix: 0, grid, cells: None, masked: None, role: SequenceRole::Views }
    }

    /// Creates `n` sequences of one token each, which has no position.
    pub fn vectors(n: usize) -> Self {
        Self { n_prefix: 1, ..Self::on_grid(n, [0, 0]) }
    }

    /// Returns the number of cells of the grid, N.
    pub fn n_grid_cells(&self) -> usize {
        self.grid[0] * self.grid[1]
    }

    /// Returns the lengths of the sequences, in runs.
    pub fn runs(&self) -> Vec<Run> {
        match &self.cells {
            None => vec![Run { n_sequences: self.n, length: self.n_prefix + self.n_grid_cells() }],
            Some(cells) => cells
                .iter()
                .map(|cells| Run { n_sequences: 1, length: self.n_prefix + cells.len() })
                .collect(),
        }
    }

    /// Returns the number of tokens of all sequences.
    pub fn n_tokens(&self) -> usize {
        self.runs().iter().map(|run| run.n_sequences * run.length).sum()
    }

    /// Calls `f` with the cell of each token in order, `None` for prefix tokens.
    pub fn for_each_cell(&self, mut f: impl FnMut(Option<usize>)) {
        for sequence in 0..self.n {
            for _ in 0..self.n_prefix {
                f(None);
            }
            match &self.cells {
                None => (0..self.n_grid_cells()).for_each(|cell| f(Some(cell))),
                Some(cells) => cells[sequence].iter().for_each(|cell| f(Some(*cell))),
            }
        }
    }

    /// Returns the group that has the sequences of all `parts`, which differ in nothing else.
    fn concat(parts: &[&Self]) -> Self {
        let first = parts[0];
        let mut cells = first.cells.clone();
        if cells.is_some() {
            let lists = parts.iter().filter_map(|part| part.cells.as_deref()).flatten();
            cells = Some(Arc::new(lists.cloned().collect()));
        }
        let mut masked = first.masked.clone();
        if let Some(masked) = &mut masked {
            let rows = parts.iter().filter_map(|part| part.masked.as_ref()).map(|masked| &*masked.rows);
            masked.rows = Arc::new(MaskedCells::concat(rows));
        }
        Self { n: parts.iter().map(|part| part.n).sum(), cells, masked, ..first.clone() }
    }
}

impl Tokens {
    /// Creates tokens of `groups` with the values `x`, `[T, D]`.
    pub fn new(x: Tensor<2>, groups: Vec<Sequences>) -> Self {
        Self { x, groups, branch: None }
    }

    /// Creates the cells of maps `x`, `[B·V, N, D]`, on `grid`.
    pub fn on_grid(x: Tensor<3>, grid: [usize; 2]) -> Self {
        let [n, n_cells, d] = x.dims();
        Self::new(x.reshape([n * n_cells, d]), vec![Sequences::on_grid(n, grid)])
    }

    /// Creates sequences of one token each, `x` of `[S, D]`.
    pub fn vectors(x: Tensor<2>) -> Self {
        let [n, _] = x.dims();
        Self::new(x, vec![Sequences::vectors(n)])
    }

    /// Packs streams into one that has the groups of all of them, in their order.
    pub fn pack(mut streams: Vec<Self>) -> Self {
        if streams.len() == 1 {
            return streams.remove(0);
        }
        let mut values = Vec::with_capacity(streams.len());
        let mut groups = Vec::new();
        for stream in streams {
            values.push(stream.x);
            groups.extend(stream.groups);
        }
        Self::new(Tensor::cat(values, 0), groups)
    }

    /// Concatenates the sequences of `parts`, which have equal groups, group by group.
    pub fn concat(parts: &[Self]) -> Self {
        if parts.len() == 1 {
            return Self { branch: None, ..parts[0].clone() };
        }
        let mut values = Vec::with_capacity(parts.len());
        let mut groups = Vec::with_capacity(parts[0].groups.len());
        for index in 0..parts[0].groups.len() {
            let sequences: Vec<&Sequences> = parts.iter().map(|part| &part.groups[index]).collect();
            groups.push(Sequences::concat(&sequences));
            values.extend(parts.iter().map(|part| part.group_values(index)));
        }
        Self::new(Tensor::cat(values, 0), groups)
    }

    /// Returns tokens of the same sequences with the values `x`, without intermediate tensors.
    pub fn with(&self, x: Tensor<2>) -> Self {
        Self::new(x, self.groups.clone())
    }

    /// Applies `f` to every tensor, including intermediate tensors.
    pub fn map(&self, mut f: impl FnMut(&Tensor<2>) -> Tensor<2>) -> Self {
        let branch = self.branch.as_ref().map(|branch| BranchState {
            skip: f(&branch.skip),
            skip_grid: branch.skip_grid,
            columns: branch.columns.iter().map(&mut f).collect(),
        });
        Self { branch, ..self.with(f(&self.x)) }
    }

    /// Returns the intermediate tensors, which exist only within a unit and between the parts of a
    /// divided unit.
    pub fn intermediates(&self) -> impl Iterator<Item = &Tensor<2>> {
        let branches = self.branch.iter();
        branches.flat_map(|branch| std::iter::once(&branch.skip).chain(&branch.columns))
    }

    /// Returns the number of sequences of all groups.
    pub fn n_sequences(&self) -> usize {
        self.groups.iter().map(|group| group.n).sum()
    }

    /// Returns the lengths of all sequences.
    pub fn lengths(&self) -> Lengths {
        Lengths::new(self.groups.iter().flat_map(Sequences::runs))
    }

    /// Returns the only group of sequences.
    ///
    /// # Panics
    /// If there are several: a bug in a unit that does not take packed streams.
    pub fn only_group(&self) -> &Sequences {
        assert_eq!(self.groups.len(), 1, "a stream of one group");
        &self.groups[0]
    }

    /// Returns the grid of the only group.
    ///
    /// # Panics
    /// As [`Tokens::only_group`].
    pub fn grid(&self) -> [usize; 2] {
        self.only_group().grid
    }

    /// Returns the values of sequences that have equal lengths, `[S, P + N, D]`.
    ///
    /// # Panics
    /// If lengths differ: a bug in a unit that does not take packed streams.
    pub fn by_sequence(&self) -> Tensor<3> {
        let [n_tokens, d] = self.x.dims();
        let lengths = self.lengths();
        assert!(lengths.runs().len() <= 1, "sequences of equal lengths");
        let n = lengths.n_sequences();
        self.x.clone().reshape([n, n_tokens / n.max(1), d])
    }

    /// Returns the range of the rows of group `index`.
    fn group_range(&self, index: usize) -> Range<usize> {
        let start = self.groups[..index].iter().map(Sequences::n_tokens).sum();
        start..start + self.groups[index].n_tokens()
    }

    /// Returns the values of group `index`.
    fn group_values(&self, index: usize) -> Tensor<2> {
        if self.groups.len() == 1 {
            return self.x.clone();
        }
        let [_, d] = self.x.dims();
        self.x.clone().slice([self.group_range(index), 0..d])
    }

    /// Splits the stream into one for each group.
    pub fn split_groups(&self) -> Vec<Self> {
        if self.groups.len() == 1 {
            return vec![self.clone()];
        }
        let mut streams = Vec::with_capacity(self.groups.len());
        for (index, group) in self.groups.iter().enumerate() {
            streams.push(Self::new(self.group_values(index), vec![group.clone()]));
        }
        streams
    }

    /// Splits the stream into one for each size of views. Groups of other roles belong to the views
    /// before them.
    pub fn split_sizes(&self) -> Vec<Self> {
        let mut starts: Vec<usize> =
            (1..self.groups.len()).filter(|index| self.groups[*index].role == SequenceRole::Views).collect();
        if starts.is_empty() {
            return vec![self.clone()];
        }
        starts.insert(0, 0);
        starts.push(self.groups.len());
        let [_, d] = self.x.dims();
        let mut streams = Vec::with_capacity(starts.len() - 1);
        for bounds in starts.windows(2) {
            let rows = self.group_range(bounds[0]).start..self.group_range(bounds[1] - 1).end;
            let groups = self.groups[bounds[0]..bounds[1]].to_vec();
            streams.push(Self::new(self.x.clone().slice([rows, 0..d]), groups));
        }
        streams
    }

    /// Returns one vector per sequence, `[S, D]`: its first prefix token, or without one the mean
    /// of its cells.
    ///
    /// # Panics
    /// If sequences without prefix tokens have different lengths within a group.
    pub fn pooled(&self) -> Self {
        let groups = self.groups.iter().map(|group| Sequences::vectors(group.n)).collect();
        if self.lengths().runs().iter().all(|run| run.length == 1) {
            return Self::new(self.x.clone(), groups);
        }
        if self.groups.iter().all(|group| group.n_prefix > 0) {
            let first: Vec<u32> = self.lengths().ranges().map(|range| range.start as u32).collect();
            return Self::new(select_rows(self.x.clone(), &first.into()), groups);
        }
        let mut vectors = Vec::with_capacity(self.groups.len());
        for group in self.split_groups() {
            let mean = grid_mean(group.by_sequence());
            vectors.push(Self::vectors(mean.squeeze_dim(1)));
        }
        Self::pack(vectors)
    }

    /// Returns the cells of all sequences, without prefix tokens.
    pub fn patches(&self) -> Self {
        let groups = self.groups.iter().map(|group| Sequences { n_prefix: 0, ..group.clone() }).collect();
        if self.groups.iter().all(|group| group.n_prefix == 0) {
            return Self::new(self.x.clone(), groups);
        }
        let mut rows = Vec::new();
        let mut row = 0;
        for group in &self.groups {
            group.for_each_cell(|cell| {
                if cell.is_some() {
                    rows.push(row);
                }
                row += 1;
            });
        }
        Self::new(select_rows(self.x.clone(), &rows.into()), groups)
    }

    /// Returns the masked cells of the only group, one sequence each; one row without meaning if no
    /// cell is masked.
    ///
    /// # Panics
    /// As [`Tokens::only_group`].
    pub fn masked(&self) -> Self {
        let group = self.only_group();
        let masked = group.masked.clone().unwrap_or_default();
        let tokens = masked.rows.tokens(group.n_prefix, group.n_grid_cells());
        let rows: Vec<u32> = tokens.into_iter().map(|token| token as u32).collect();
        let sequences = Sequences {
            masked: Some(masked),
            role: SequenceRole::MaskedCells,
            ..Sequences::vectors(rows.len())
        };
        Self::new(select_rows(self.x.clone(), &rows.into()), vec![sequences])
    }

    /// Returns one vector per view and then the masked cells, in two groups; only the vectors if no
    /// cell is masked.
    ///
    /// # Panics
    /// As [`Tokens::only_group`].
    pub fn pooled_and_masked(&self) -> Self {
        let mut pooled = self.pooled();
        let Some(masked) = self.only_group().masked.clone() else { return pooled };
        let has_masked = masked.rows.n() > 0;
        pooled.groups[0].masked = Some(masked);
        if has_masked { Self::pack(vec![pooled, self.masked()]) } else { pooled }
    }

    /// Returns one vector per view and then all cells, in two groups; only the vectors where no
    /// masks were drawn.
    ///
    /// # Panics
    /// As [`Tokens::only_group`].
    pub fn pooled_and_cells(&self) -> Self {
        let mut pooled = self.pooled();
        let Some(masked) = self.only_group().masked.clone() else { return pooled };
        pooled.groups[0].masked = Some(masked.clone());
        let cells = self.patches().x;
        let [n, _] = cells.dims();
        let sequences =
            Sequences { masked: Some(masked), role: SequenceRole::Cells, ..Sequences::vectors(n) };
        Self::pack(vec![pooled, Self::new(cells, vec![sequences])])
    }

    /// Returns the masked cells, where some were drawn.
    pub fn masked_cells(&self) -> Option<&Arc<MaskedCells>> {
        let masked = self.groups.iter().find_map(|group| group.masked.as_ref());
        masked.map(|masked| &masked.rows)
    }

    /// Returns whether the number of tokens depends on which cells are masked.
    pub fn is_ragged(&self) -> bool {
        self.groups.iter().any(|group| group.role == SequenceRole::MaskedCells || group.cells.is_some())
    }

    /// Casts values of fewer bits to f32, and drops intermediate tensors.
    pub fn in_f32(&self) -> Self {
        self.with(in_f32(self.x.clone()))
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::{Device, Int};

    use super::*;

    fn masked(cells: &[&[usize]]) -> Masked {
        let cells = cells.iter().map(|cells| cells.to_vec()).collect();
        Masked { rows: Arc::new(MaskedCells::new(cells)), masking: Masking::Replaced }
    }

    /// Returns tokens of three views, with a class token and four cells each, whose values count.
    fn tokens(cells: [&[usize]; 3]) -> Tokens {
        let x = Tensor::<1, Int>::arange(0..30, &Device::flex()).float().reshape([15, 2]);
        let sequences =
            Sequences { n_prefix: 1, masked: Some(masked(&cells)), ..Sequences::on_grid(3, [2, 2]) };
        Tokens::new(x, vec![sequences])
    }

    fn values(tokens: &Tokens) -> Vec<f32> {
        tokens.x.clone().into_data().try_to_vec().expect("f32")
    }

    #[test]
    fn views_and_masked_cells_are_groups() {
        let some_masked = tokens([&[0, 3], &[], &[2]]);
        let parts = some_masked.pooled_and_masked().split_groups();
        let [views, cells] = &parts[..] else { panic!("two groups") };
        assert_eq!(values(views), values(&some_masked.pooled()));
        assert_eq!(values(cells), [2., 3., 8., 9., 26., 27.]);
        assert_eq!((views.is_ragged(), cells.is_ragged(), cells.groups[0].n), (false, true, 3));
        let none_masked = tokens([&[], &[], &[]]);
        let parts = none_masked.pooled_and_masked().split_groups();
        let [views] = &parts[..] else { panic!("one group") };
        assert_eq!((values(views), views.is_ragged()), (values(&none_masked.pooled()), false));
    }

    /// Streams of sequences of different sizes are packed and split, pooled and concatenated.
    #[test]
    fn groups_of_a_packed_stream_keep_their_tokens() {
        let large = tokens([&[], &[], &[]]);
        let x = Tensor::<1, Int>::arange(100..112, &Device::flex()).float().reshape([6, 2]);
        let small_group = Sequences { n_prefix: 1, ..Sequences::on_grid(3, [1, 1]) };
        let small = Tokens::new(x, vec![small_group]);
        let packed = Tokens::pack(vec![large.clone(), small.clone()]);
        assert_eq!(packed.lengths().runs().len(), 2);
        assert_eq!(values(&packed), [values(&large), values(&small)].concat());
        let parts = packed.split_groups();
        assert_eq!((values(&parts[0]), values(&parts[1])), (values(&large), values(&small)));
        assert_eq!(
            values(&packed.pooled()),
            [0., 1., 10., 11., 20., 21., 100., 101., 104., 105., 108., 109.]
        );
        assert_eq!(values(&packed.patches())[24..], [102., 103., 106., 107., 110., 111.]);
        let twice = Tokens::concat(&[packed.clone(), packed]);
        assert_eq!(twice.groups.iter().map(|group| group.n).collect::<Vec<_>>(), [6, 6]);
        let parts = twice.split_groups();
        assert_eq!(values(&parts[0]), [values(&large), values(&large)].concat());
        assert_eq!(values(&parts[1]), [values(&small), values(&small)].concat());
    }

    /// Masked cells belong to the size of the views before them.
    #[test]
    fn sizes_keep_their_masked_cells() {
        let first = tokens([&[0, 3], &[], &[2]]).pooled_and_masked();
        let second = tokens([&[], &[], &[]]).pooled();
        let packed = Tokens::pack(vec![first.clone(), second.clone()]);
        let sizes = packed.split_sizes();
        assert_eq!(sizes.iter().map(|size| size.groups.len()).collect::<Vec<_>>(), [2, 1]);
        assert_eq!((values(&sizes[0]), values(&sizes[1])), (values(&first), values(&second)));
        assert_eq!(packed.split_groups().len(), 3);
    }

    /// Sequences that have tokens of some cells are pooled and stripped of their prefix.
    #[test]
    fn sequences_may_have_some_of_their_cells() {
        let cells = Arc::new(vec![vec![1, 3], vec![2]]);
        let group = Sequences { n_prefix: 1, cells: Some(cells), ..Sequences::on_grid(2, [2, 2]) };
        let x = Tensor::<1, Int>::arange(0..5, &Device::flex()).float().reshape([5, 1]);
        let ragged = Tokens::new(x, vec![group]);
        assert_eq!(ragged.lengths().ranges().collect::<Vec<_>>(), [0..3, 3..5]);
        let mut seen = Vec::new();
        ragged.groups[0].for_each_cell(|cell| seen.push(cell));
        assert_eq!(seen, [None, Some(1), Some(3), None, Some(2)]);
        assert_eq!(values(&ragged.pooled()), [0., 3.]);
        assert_eq!(values(&ragged.patches()), [1., 2., 4.]);
        assert_eq!(values(&Tokens::concat(&[ragged.clone(), ragged])).len(), 10);
    }

    #[test]
    fn tokens_without_a_prefix_are_averaged() {
        let x = Tensor::<1, Int>::arange(0..8, &Device::flex()).float().reshape([2, 4, 1]);
        assert_eq!(values(&Tokens::on_grid(x, [2, 2]).pooled()), [1.5, 5.5]);
    }
}
