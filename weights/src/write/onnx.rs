//! Networks as ONNX graphs.
//!
//! ```text
//! pixels [B, C, H, W] f32, normalized  →  embedding [B, D]    patches [B, N, D], cells row by row
//! of a classifier                      →  logits [B, classes], or probabilities: their softmax,
//!                                         or sigmoids if an image may have several classes
//! of a decoder that labels pixels      →  logits [B, classes, H, W]
//! ```
//!
//! B is free, and so are H and W, except in a transformer, whose position embedding is made for the
//! exported size. Operators are those of opset 17. Weights are stored in the chosen precision and
//! cast to f32 before use, so that every precision computes in f32.

use prost::Message;

use super::entries::entries;
use crate::backbone::{add_classifier, add_decoder, exchange_of};
use crate::export::{Export, ExportedClassifier};
use crate::onnx::{Graph, MetadataEntry, Model, OperatorSet, Setting};

/// Version of the operators.
const OPSET: i64 = 17;

/// Version of the file format that belongs to [`OPSET`].
const IR_VERSION: i64 = 8;

/// Largest size of a message, in bytes.
const MAX_BYTES: usize = 2_000_000_000;

/// Encodes `export` as an ONNX file.
///
/// # Errors
/// A message, if the network is too large or has no graph for images of this size.
pub(super) fn encode(export: &Export<'_>) -> Result<Vec<u8>, String> {
    check_size(export)?;
    let head = export.head_tensors();
    let mut graph = Graph::new(export.tensors.iter().chain(&head), export.precision);
    let px = export.preprocessing.transform.size_px as usize;
    let stride_px = export.model.stride_px();
    let outputs = exchange_of(export.model).build_graph(&mut graph, px)?;
    let side = outputs.has_fixed_size.then_some(px);
    let cells = side.map(|px| (px / stride_px) * (px / stride_px));
    let channels = export.model.n_channels();
    let graph = match (&export.classifier, export.decoder) {
        (Some(classifier), _) => {
            let mut scores = add_classifier(&mut graph, &outputs.embedding)?;
            if classifier.returns_probabilities {
                scores = if classifier.head.is_multi_label {
                    graph.node("Sigmoid", &[&scores], &[])
                } else {
                    graph.node("Softmax", &[&scores], &[Setting::Int("axis", -1)])
                };
            }
            let name = scores_name(classifier);
            graph.finish_classifier(&scores, name, channels, side, classifier.head.classes.len())
        }
        (None, Some(head)) => {
            let scores = add_decoder(&mut graph, head.decoder, &outputs.patches, stride_px, side)?;
            graph.finish_decoder(&scores, channels, side, head.classes.len())
        }
        (None, None) => {
            let width = export.model.width();
            graph.finish(&outputs.embedding, &outputs.patches, channels, side, cells, width)
        }
    };
    let mut entries = entries(export);
    entries.remove("format");
    let mut metadata: Vec<MetadataEntry> =
        entries.into_iter().map(|(key, value)| MetadataEntry { key, value }).collect();
    metadata.sort_by(|a, b| a.key.cmp(&b.key));
    let model = Model {
        ir_version: Some(IR_VERSION),
        producer_name: "ocelli".into(),
        producer_version: export.card.version.clone(),
        graph: Some(graph),
        opset_import: vec![OperatorSet { domain: String::new(), version: Some(OPSET) }],
        metadata_props: metadata,
    };
    if model.encoded_len() <= MAX_BYTES { Ok(model.encode_to_vec()) } else { Err(too_large(export)) }
}

/// Returns the name of a graph's output with the scores of the classes.
fn scores_name(classifier: &ExportedClassifier<'_>) -> &'static str {
    if classifier.returns_probabilities { "probabilities" } else { "logits" }
}

/// Checks that the network of `export` has a graph in f32, whatever its weights are.
///
/// # Errors
/// A message, like those of [`encode`].
pub(super) fn check(export: &Export<'_>) -> Result<(), String> {
    check_size(export)?;
    if export.model.n_params() * size_of::<f32>() <= MAX_BYTES { Ok(()) } else { Err(too_large(export)) }
}

/// Checks that images have a whole number of cells.
fn check_size(export: &Export<'_>) -> Result<(), String> {
    let px = export.preprocessing.transform.size_px as usize;
    let stride_px = export.model.stride_px();
    if px.is_multiple_of(stride_px) {
        Ok(())
    } else {
        Err(format!("images of {px} px are not a multiple of {stride_px} px"))
    }
}

fn too_large(export: &Export<'_>) -> String {
    format!(
        "{} parameters do not fit into one file (at most 2 GB); choose a smaller precision",
        export.model.n_params()
    )
}
