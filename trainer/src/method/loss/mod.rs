//! Losses: pure functions of tensors. Data of other micro-batches and ranks is exchanged through
//! [`Peers`](ranks::peers::Peers).

pub(crate) mod columns;
pub(crate) mod cross_entropy;
pub(crate) mod gram;
pub(crate) mod info_nce;
pub(crate) mod koleo;
pub(crate) mod mean;
pub(crate) mod nt_xent;
pub(crate) mod resample;
pub(crate) mod rows;
pub(crate) mod sigreg;
pub(crate) mod sinkhorn;
