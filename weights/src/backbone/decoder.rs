//! Nodes of the decoders of [`PixelDecoder`], from the features of cells to the scores of pixels.

use networks::head::pixels::{EPSILON, HIDDEN, PixelDecoder, SCORES};

use super::layers::{gelu, linear, norm};
use crate::onnx::{Graph, PIXELS, Setting, Value};

/// Cells of the images that a graph takes.
struct Grid {
    /// Side of a cell in pixels.
    stride_px: usize,
    /// Rows and columns of cells of images of one size; `None` for images of any size.
    side: Option<usize>,
}

/// Adds a decoder to `graph`, whose parameters have the names of a network with its heads; returns
/// the scores of pixels, `[B, C, H, W]`, for the features `patches`, `[B, N, D]`, of cells of
/// `stride_px`. Images have sides of `size_px` pixels, or of any multiple of `stride_px` if it is
/// `None`.
///
/// # Errors
/// A message, if a parameter is missing.
pub(crate) fn add_decoder(
    graph: &mut Graph<'_>,
    decoder: PixelDecoder,
    patches: &Value,
    stride_px: usize,
    size_px: Option<usize>,
) -> Result<Value, String> {
    let grid = Grid { stride_px, side: size_px.map(|px| px / stride_px) };
    let mut features = patches.clone();
    if let PixelDecoder::Conv { .. } = decoder {
        features = hidden(graph, &grid, patches)?;
    }
    let cells = linear(graph, SCORES, &features)?;
    let n_classes = graph.tensor(&format!("{SCORES}.weight"))?.shape[0];
    let map = grid.to_map(graph, &cells, n_classes);
    let scales = graph.floats("logits.scales", &[1.0, 1.0, stride_px as f32, stride_px as f32]);
    // The region of interest is not used.
    let none = Value::new();
    // The operator's own centers of pixels are those of PyTorch without aligned corners.
    Ok(graph.node("Resize", &[&map, &none, &scales], &[Setting::Text("mode", "linear")]))
}

/// Adds the convolution, the norm and the GELU of a decoder.
fn hidden(graph: &mut Graph<'_>, grid: &Grid, patches: &Value) -> Result<Value, String> {
    let name = format!("{HIDDEN}.conv.weight");
    let shape = &graph.tensor(&name)?.shape;
    let [width, n_in, kernel, _] = shape[..] else {
        return Err(format!("{name} has shape {shape:?}, not [out, in, k, k]"));
    };
    let map = grid.to_map(graph, patches, n_in);
    let weight = graph.weight(&name)?;
    let settings = [Setting::Ints("kernel_shape", &[kernel; 2]), Setting::Ints("pads", &[kernel / 2; 4])];
    let map = graph.node("Conv", &[&map, &weight], &settings);
    let flat = graph.integers(&[0, width as i64, -1]);
    let cells = graph.node("Reshape", &[&map, &flat], &[]);
    let cells = graph.node("Transpose", &[&cells], &[Setting::Ints("perm", &[0, 2, 1])]);
    let cells = norm(graph, &format!("{HIDDEN}.norm"), &cells, EPSILON)?;
    Ok(gelu(graph, &cells))
}

impl Grid {
    /// Adds the map `[B, width, rows, columns]` of `cells`, `[B, N, width]`.
    fn to_map(&self, graph: &mut Graph<'_>, cells: &Value, width: usize) -> Value {
        let channels = graph.node("Transpose", &[cells], &[Setting::Ints("perm", &[0, 2, 1])]);
        let shape = match self.side {
            // A 0 keeps the number of images.
            Some(side) => graph.integers(&[0, width as i64, side as i64, side as i64]),
            None => {
                let pixels = PIXELS.to_string();
                let ends = [Setting::Int("start", 2), Setting::Int("end", 4)];
                let sides_px = graph.node("Shape", &[&pixels], &ends);
                let stride_px = graph.integers(&[self.stride_px as i64]);
                let sides = graph.node("Div", &[&sides_px, &stride_px], &[]);
                let first = graph.integers(&[0, width as i64]);
                graph.node("Concat", &[&first, &sides], &[Setting::Int("axis", 0)])
            }
        };
        graph.node("Reshape", &[&channels, &shape], &[])
    }
}
