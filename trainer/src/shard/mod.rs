//! Parameters as flat buffers, cut over ranks.

pub mod engine;
pub mod layout;
pub mod store;
