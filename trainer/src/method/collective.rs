//! Collectives that the loss of a batch waits for, as the estimates of plans count them.

/// A collective in [`Method::prepare`](super::Method::prepare), over all ranks or over all ranks
/// with the same columns. Values are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collective {
    /// Sum of this many values.
    Sum(usize),
    /// Sum of this many values, one for each column of a head. Where ranks divide the columns, each
    /// rank sums its own.
    ColumnSum(usize),
    /// Sum of this many values, of which each of the ranks that divide columns has a share: only
    /// ranks with the same columns sum them.
    SumOfShares(usize),
    /// Sum or maximum of one number.
    Number,
    /// Gather of this many values for each image of the batch.
    Gather(usize),
}
