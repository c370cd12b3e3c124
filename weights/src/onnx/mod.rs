//! A network as an ONNX graph.
//!
//! ```text
//! pixels [B, 3, H, W] f32, normalized  →  embedding [B, D]    patches [B, N, D], cells row by row
//! ```
//!
//! B is free; H and W are too, but for a transformer, whose position embedding is made for the size that is exported.
//! Operators are those of opset 17. Weights are stored as asked for and become f32 before they are used, so that every
//! precision computes in f32.

mod convnet;
mod graph;
mod message;
mod transformer;

use graph::Graph;
use message::{Entry, Model, OperatorSet};
use networks::ModelConfig;
use prost::Message;

use crate::export::Export;
use crate::metadata;

/// Version of the operators.
const OPSET: i64 = 17;

/// Version of the file format that came with them.
const IR_VERSION: i64 = 8;

/// A message may have no more bytes.
const MAX_BYTES: usize = 2_000_000_000;

/// `export` as the bytes of a file.
///
/// # Errors
/// In words, for a network that is too large.
pub(crate) fn bytes_of(export: &Export<'_>) -> Result<Vec<u8>, String> {
    let n_params: usize = export.tensors.iter().map(|tensor| tensor.values.len()).sum();
    let mut graph = Graph::new(export.tensors, export.precision);
    let px = export.preprocessing.size_px as usize;
    let stride_px = export.model.stride_px();
    if !px.is_multiple_of(stride_px) {
        return Err(format!("images of {px} px are no multiple of {stride_px} px"));
    }
    let (embedding, patches) = match export.model {
        ModelConfig::Vit(config) => transformer::draw(&mut graph, config, px)?,
        ModelConfig::Resnet(config) => convnet::resnet(&mut graph, config)?,
        ModelConfig::RegnetY(config) => convnet::regnet(&mut graph, config)?,
        #[allow(unreachable_patterns)]
        _ => return Err("there is no graph for it".into()),
    };
    // Only a position embedding ties a network to one size of images.
    let side = metadata::has_class_token(export).then_some(px);
    let cells = side.map(|px| (px / stride_px) * (px / stride_px));
    let graph = graph.finish(side, [&embedding, &patches], cells, export.model.width());
    let mut entries = metadata::of(export);
    entries.remove("format");
    let mut metadata: Vec<Entry> = entries.into_iter().map(|(key, value)| Entry { key, value }).collect();
    metadata.sort_by(|a, b| a.key.cmp(&b.key));
    let model = Model {
        ir_version: Some(IR_VERSION),
        producer_name: "ocelli".into(),
        producer_version: export.card.version.clone(),
        graph: Some(graph),
        opset_import: vec![OperatorSet { domain: String::new(), version: Some(OPSET) }],
        metadata_props: metadata,
    };
    match model.encoded_len() <= MAX_BYTES {
        true => Ok(model.encode_to_vec()),
        false => Err(format!(
            "{n_params} parameters do not fit into the two gigabytes of a file; store fewer bits"
        )),
    }
}
