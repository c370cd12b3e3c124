//! What methods share that compare two views of an image, each with statistics of its own.

use augment::MultiCrop;
use burn_tensor::Tensor;
use kernels::ops::{NORM_EPSILON, unit_rows};
use networks::head::projection::{Normalizes, Projection};
use networks::head::{Head, Reads};
use networks::outputs::Outputs;

/// Name of the head that reads the backbone.
pub(super) const PROJECTOR: &str = "projector";

/// Name of the head that reads the projector.
pub(super) const PREDICTOR: &str = "predictor";

/// Default of `method.projector_hidden` where the loss compares channels with one another.
pub(super) fn default_wide_hidden() -> Vec<usize> {
    vec![8192, 8192]
}

/// Default of `method.output` where the loss compares channels with one another.
pub(super) fn default_wide_output() -> usize {
    8192
}

/// Checks that no layer of a projector is empty, nor of its predictor if there is one. The
/// arguments are the keys of the same names under `method`.
///
/// # Errors
/// A message with the keys.
pub(super) fn check_projector(
    projector_hidden: &[usize],
    predictor_hidden: Option<&[usize]>,
    output: usize,
) -> Result<(), String> {
    let mut keys = "method.projector_hidden".to_string();
    let mut hidden = projector_hidden.to_vec();
    if let Some(predictor_hidden) = predictor_hidden {
        keys.push_str(" and method.predictor_hidden");
        hidden.extend(predictor_hidden);
    }
    if output == 0 || hidden.contains(&0) {
        return Err(format!("method.output and every number of {keys} must be at least 1"));
    }
    Ok(())
}

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

/// Returns the head [`PROJECTOR`] on a backbone of `width` channels: a [`perceptron`] with `hidden`
/// channels in its hidden layers.
pub(super) fn projector(width: usize, hidden: &[usize], output: usize, normalizes: Normalizes) -> Head {
    let widths = [&[width], hidden, &[output]].concat();
    perceptron(PROJECTOR, Reads::Pooled, widths, normalizes)
}

/// Returns the head [`PREDICTOR`] on a projector of `output` channels: a [`perceptron`] with as
/// many in its output, and `hidden` channels in its hidden layers.
pub(super) fn predictor(hidden: &[usize], output: usize, normalizes: Normalizes) -> Head {
    let widths = [&[output], hidden, &[output]].concat();
    perceptron(PREDICTOR, Reads::Head(PROJECTOR), widths, normalizes)
}

/// Returns a head that is a multi-layer perceptron without biases, whose hidden layers are
/// normalized. `widths` are its input channels, the channels of every hidden layer, and its output
/// channels.
fn perceptron(name: &'static str, reads: Reads, widths: Vec<usize>, normalizes: Normalizes) -> Head {
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
