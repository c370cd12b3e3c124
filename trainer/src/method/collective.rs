//! Collectives for which the loss of a batch waits, as plans count them.

/// A collective in [`Method::prepare`](super::Method::prepare), of all ranks or of all with the
/// same columns. Values are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collective {
    /// Sum of this many values.
    Sum(usize),
    /// Sum of this many values, one for each column of a head: where ranks divide the columns, each
    /// adds up its own.
    ColumnSum(usize),
    /// Sum of this many values, of which ranks that divide columns have a share each: only ranks
    /// with the same columns add them up.
    SumOfShares(usize),
    /// Sum or maximum of one number.
    Number,
    /// Gather of this many values for each image of the batch.
    Gather(usize),
}
