//! What methods share that compare two views of an image, each with statistics of its own.

use augment::MultiCrop;
use burn_tensor::Tensor;
use kernels::ops::unit_rows;
use networks::head::projection::{Normalizes, Projection};
use networks::head::{Head, Reads};
use networks::outputs::Outputs;

/// Keeps a norm away from zero, as in PyTorch's `normalize`.
const NORM_EPSILON: f64 = 1e-12;

/// Checks that `views` are two, each with its own statistics. `title` is the name of the method.
///
/// # Errors
/// A message with the key and the reason.
pub(super) fn check_two_views(views: &MultiCrop, title: &str) -> Result<(), String> {
    match views.groups()[..] {
        [first, second] if [first.n_views, second.n_views] == [1, 1] => Ok(()),
        _ => Err(format!(
            "views: {title} compares two views, each with its own statistics: use preset = \"moco_v3\", or \
             two crops with own_statistics = true"
        )),
    }
}

/// Returns a head that is a multi-layer perceptron without biases, whose hidden layers are
/// normalized. `widths` are its input channels, the channels of every hidden layer, and its output
/// channels.
pub(super) fn perceptron(
    name: &'static str,
    reads: Reads,
    widths: Vec<usize>,
    normalizes: Normalizes,
) -> Head {
    let unit = Projection { name: format!("{name}.mlp"), widths, normalizes, has_biases: false };
    Head::new(name, reads, vec![Box::new(unit)])
}

/// Returns the output of the head `head` for view `view` of each image, `[B, D]`.
pub(super) fn view_output(outputs: &Outputs, head: &str, view: usize) -> Tensor<2> {
    let z = outputs.heads.on_views(head, view);
    let [b, v, d] = z.dims();
    z.reshape([b * v, d])
}

/// Returns [`view_output`], scaled to length one, `[B, D]`.
pub(super) fn unit_output(outputs: &Outputs, head: &str, view: usize) -> Tensor<2> {
    unit_rows(view_output(outputs, head, view), NORM_EPSILON)
}
