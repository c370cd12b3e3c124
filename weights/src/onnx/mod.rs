//! ONNX graphs: their construction, and their messages.

mod graph;
mod message;
mod read;

pub(crate) use graph::{Graph, PIXELS, Setting, Value};
pub(crate) use message::{MetadataEntry, Model, OperatorSet};
pub(crate) use read::read;
