//! Networks: units, their parameters, backbones and heads.

pub(crate) mod backbone;
pub(crate) mod batch_norm;
pub(crate) mod drop_path;
pub(crate) mod features;
pub(crate) mod head;
pub(crate) mod init;
pub(crate) mod layout;
pub(crate) mod leaves;
pub(crate) mod params;
pub(crate) mod patches;
pub(crate) mod tensor;
pub(crate) mod unit;
