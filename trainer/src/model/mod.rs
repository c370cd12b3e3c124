//! Networks: units, their parameters, backbones and heads.

pub mod backbone;
pub(crate) mod drop_path;
pub mod features;
pub mod head;
pub mod init;
pub mod layout;
pub mod leaves;
pub mod params;
pub mod patches;
pub mod unit;
