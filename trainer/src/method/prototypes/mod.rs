//! Prototypes over ranks: targets and cross-entropy over scores of prototypes, and all that ranks
//! exchange for them.
//!
//! A rank scores all prototypes for its own micro-batches or, where ranks divide the prototypes,
//! some columns for the micro-batches of its column group. [`PrototypeExchange`] knows which, and
//! methods call the same functions in both cases. Softmax, Sinkhorn and cross-entropy of divided
//! prototypes are computed from this rank's columns and sums over the columns of other ranks:
//!
//! ```text
//! s = [s_p, e]      e = τ · log Σ exp(s_k / τ) over the columns k of other ranks
//! t = [t_p, o]      o = Σ t_k over the columns k of other ranks
//! softmax(s / τ)    has this rank's probabilities, and their sum over the other ranks in the last column
//! ∂H(t, softmax(s / τ)) / ∂s_p      is that of all columns
//! ```
//!
//! One additional column thus represents all columns of other ranks, and the kernels for full rows
//! are used. One number per row and rank is exchanged. All ranks sum over parts in the order of
//! parts, so that the sums are bit-identical.

mod columns;
mod exchange;
pub(crate) mod mean;
mod rows;
mod scores;
pub(crate) mod sinkhorn;
mod targets;

pub(crate) use exchange::PrototypeExchange;
pub(crate) use rows::Rows;
pub(crate) use scores::{CompletedScores, between_views, weighted_rows};
pub(crate) use targets::PrototypeTargets;
