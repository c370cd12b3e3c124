//! Losses: pure functions of tensors. Data of other micro-batches and ranks is exchanged through
//! [`Peers`](ranks::peers::Peers).
//!
//! Where a term has images of several micro-batches, as in KoLeo, SimCLR and LeJEPA, the value of a
//! micro-batch's loss is its own, but its gradient is that of all terms of the batch in which it
//! takes part. This needs no further communication: `Method::prepare` has given every rank what it
//! needs of the others.

pub(crate) mod cross_covariance;
pub(crate) mod cross_entropy;
pub(crate) mod gram;
pub(crate) mod info_nce;
pub(crate) mod koleo;
pub(crate) mod nt_xent;
pub(crate) mod resample;
pub(crate) mod sigreg;
