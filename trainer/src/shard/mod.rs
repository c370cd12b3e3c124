//! Parameters as flat buffers, cut over ranks; and how ranks talk.

pub mod comm;
pub mod engine;
pub mod flow;
pub mod layout;
pub mod mesh;
mod movement;
pub mod ordered;
pub mod patience;
pub mod recorder;
pub mod slots;
pub mod store;
pub mod wire;
