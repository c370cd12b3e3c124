//! Losses and targets.

use std::sync::Arc;

use augment::{Mixed, MultiCrop, SoftLabel};
use burn_tensor::{Device, Tensor};
use kernels::device::host::to_host;
use kernels::ops::{softmax_rows, unit_rows};
use networks::mask::{MaskedCells, Masking};
use networks::outputs::{HeadOutput, HeadOutputs, Outputs};
use networks::tokens::{Masked, Sequences, Tokens};
use ranks::communicator::Communicator;
use ranks::peers::Peers;

use super::Golden;
use crate::method::loss::cross_entropy::between_weighted_views;
use crate::method::loss::koleo::{Neighbors, directions};
use crate::method::loss::nt_xent::Contrast;
use crate::method::loss::sigreg::Sigreg;
use crate::method::prototypes::mean::batch_means;
use crate::method::prototypes::sinkhorn::targets;
use crate::method::prototypes::{PrototypeExchange, Rows};
use crate::method::{BatchOutputs, Method, MethodConfig, MethodContext};
use crate::schedule::RunLength;

const TOLERANCE: f32 = 1e-5;

/// Builds a method from its recipe, with two global and `n_local` local views.
fn method(recipe: &str, n_local: usize, batch_size: usize) -> Box<dyn Method> {
    method_on("arch = 'toy'\nwidth = 4", recipe, n_local, batch_size)
}

/// Builds a method as [`method`] does, on the backbone `model`.
fn method_on(model: &str, recipe: &str, n_local: usize, batch_size: usize) -> Box<dyn Method> {
    let config: MethodConfig = toml::from_str(recipe).unwrap();
    let length = RunLength { n_samples: 100, batch_size, total_steps: 100 };
    let views = MultiCrop::dino(16, 8, n_local);
    let model = toml::from_str(model).unwrap();
    config.build(&MethodContext { views, model, length, seed: 0 }).unwrap()
}

/// Returns outputs whose head `name` has the values `x` of `[B, V, K]`, two global views first.
fn head_outputs(name: &'static str, x: Tensor<3>) -> Outputs {
    let [b, v, k] = x.dims();
    let global = HeadOutput::from_views(x.clone().slice([0..b, 0..2, 0..k]));
    let local = HeadOutput::from_views(x.slice([0..b, 2..v, 0..k]));
    let heads = HeadOutputs::new(b, &[], [(name, vec![global, local])].into());
    Outputs::new(Vec::new(), heads)
}

/// Returns loss and gradient of one micro-batch whose head `name` outputs `x` of `[B, V, K]`, two
/// global views first.
fn loss_and_gradient(
    method: &dyn Method,
    name: &'static str,
    x: Tensor<3>,
    score: &dyn Fn(&str, Tensor<3>) -> Tensor<3>,
) -> [Tensor<1>; 2] {
    let [b, v, k] = x.dims();
    let comm = Communicator::solo();
    let tracked = x.clone().autodiff().require_grad();
    let detached = [head_outputs(name, x)];
    let batch =
        BatchOutputs { trained: &detached, others: &[], labels: &[], masks: &[], columns: None, score };
    let prepared = method.prepare(&batch, 0, Peers::new(&comm, 1)).unwrap();
    let loss = prepared.micro_batch_loss(0, &head_outputs(name, tracked.clone())).loss;
    let gradient = tracked.grad(&loss.backward()).unwrap();
    [loss.inner(), gradient.reshape([b * v * k])]
}

#[test]
fn cross_entropy_and_center_equal_pytorch() {
    let golden = Golden::open("losses");
    let teacher = golden.tensor::<3>("teacher");
    let student: Vec<_> = ["student_0", "student_1"]
        .map(|name| golden.tensor::<3>(name).autodiff().require_grad())
        .into_iter()
        .collect();
    let probabilities = softmax_rows(teacher.clone(), Some(golden.tensor("center")), 0.04);
    let loss = between_weighted_views(&student, &probabilities, 0.1, 1.0);
    assert!((loss.clone().into_scalar::<f32>() - golden.values("loss")[0]).abs() < TOLERANCE);
    let grads = loss.backward();
    golden.assert_tensor("grad_0", student[0].grad(&grads).unwrap(), TOLERANCE);
    golden.assert_tensor("grad_1", student[1].grad(&grads).unwrap(), TOLERANCE);
    let comm = Communicator::solo();
    let exchange = PrototypeExchange::new(Peers::new(&comm, 1), None);
    let [mean] = batch_means("center", [&Rows::new(vec![teacher], 1)], exchange).unwrap();
    golden.assert_tensor("mean", mean, TOLERANCE);
}

#[test]
fn sinkhorn_equals_pytorch() {
    let golden = Golden::open("losses");
    let comm = Communicator::solo();
    let logits: Tensor<3> = golden.tensor("teacher");
    let exchange = PrototypeExchange::new(Peers::new(&comm, 1), None);
    let balanced = targets(&Rows::new(vec![logits], 1), 0.07, 3, exchange).unwrap();
    golden.assert_tensor("sinkhorn", balanced.rows().batch(0).clone(), TOLERANCE);
}

/// Scales the vectors of `z`, `[B, V, D]`, to unit length.
fn unit_vectors(z: Tensor<3>) -> Tensor<3> {
    let [b, v, d] = z.dims();
    unit_rows(z.reshape([b * v, d]), 1e-12).reshape([b, v, d])
}

#[test]
fn contrast_equals_pytorch() {
    let golden = Golden::open("objectives");
    let comm = Communicator::solo();
    let z = golden.tensor::<3>("contrast.z").autodiff().require_grad();
    let [b, _, _] = z.dims();
    let embeddings = unit_vectors(z.clone().inner());
    let contrast = Contrast::new(&[embeddings], 0.2, Peers::new(&comm, 1)).unwrap();
    let loss = contrast.loss(unit_vectors(z.clone()), &(0..b).collect::<Vec<_>>());
    golden.assert_tensor("contrast.loss", loss.clone().inner(), TOLERANCE);
    golden.assert_tensor("contrast.grad", z.grad(&loss.backward()).unwrap(), TOLERANCE);
}

#[test]
fn the_regularizer_of_lejepa_equals_pytorch() {
    let golden = Golden::open("objectives");
    let comm = Communicator::solo();
    let z = golden.tensor::<3>("sigreg.z").autodiff().require_grad();
    let directions = golden.values("sigreg.directions");
    let sigreg = Sigreg::new(&[z.clone().inner()], directions, Peers::new(&comm, 1)).unwrap();
    let loss = sigreg.loss(z.clone());
    golden.assert_tensor("sigreg.loss", loss.clone().inner(), TOLERANCE);
    golden.assert_tensor("sigreg.grad", z.grad(&loss.backward()).unwrap(), TOLERANCE);
}

/// The regularizer is compared in the test above.
#[test]
fn the_invariance_loss_of_lejepa_equals_pytorch() {
    let golden = Golden::open("objectives");
    for center in ["global", "all"] {
        let recipe = format!("name = 'lejepa'\nsigreg_weight = 0.0\nhead_output = 6\ncenter = '{center}'");
        let lejepa = method(&recipe, 1, 12);
        let [loss, gradient] = loss_and_gradient(&*lejepa, "head", golden.tensor("sigreg.z"), &|_, x| x);
        golden.assert_values(&format!("agreement.{center}.loss"), loss, TOLERANCE);
        golden.assert_values(&format!("agreement.{center}.grad"), gradient, TOLERANCE);
    }
}

#[test]
fn swav_equals_pytorch_with_a_queue_and_without() {
    let golden = Golden::open("objectives");
    let prototypes: Tensor<2> = golden.tensor("swav.prototypes");
    for (name, queue) in [("alone", 0), ("queued", 8)] {
        let recipe = format!(
            "name = 'swav'\nprototypes = 7\nhead_output = 5\nqueue = {queue}\nqueue_start = {{ steps = 9 }}"
        );
        let mut swav = method(&recipe, 2, 6);
        if queue > 0 {
            swav.load_state(&[("queue".into(), golden.values("swav.queue"))]).unwrap();
        }
        let [loss, gradient] =
            loss_and_gradient(&*swav, "scores", golden.tensor("swav.scores"), &|_: &str, z: Tensor<3>| {
                z.matmul(prototypes.clone().transpose().unsqueeze())
            });
        golden.assert_values(&format!("swav.{name}.loss"), loss, TOLERANCE);
        golden.assert_values(&format!("swav.{name}.grad"), gradient, TOLERANCE);
    }
}

#[test]
fn koleo_equals_pytorch() {
    let golden = Golden::open("losses");
    let x = golden.tensor::<2>("embeddings").autodiff().require_grad();
    let [b, _] = x.dims();
    let neighbors = Neighbors::new(directions(x.clone().inner()), b).unwrap();
    let loss = neighbors.koleo(x.clone(), &(0..b).collect::<Vec<_>>());
    assert!((loss.clone().into_scalar::<f32>() - golden.values("koleo")[0]).abs() < TOLERANCE);
    golden.assert_tensor("koleo_grad", x.grad(&loss.backward()).unwrap(), TOLERANCE);
}

/// Returns outputs of a network with one head, which has scored the views, `[B, V, K]` for each
/// size, and the cells of the first size, `[B, V, N, K]`, some of which are masked.
fn masked_outputs(views: &[Tensor<3>], cells: Tensor<4>, masked: &Arc<MaskedCells>) -> Outputs {
    let [b, v, n, k] = cells.dims();
    let tokens: Vec<i32> = masked.tokens(0, n).into_iter().map(|token| token as i32).collect();
    let all_cells = cells.reshape([b * v * n, k]);
    let masked_rows = all_cells.clone().select(0, Tensor::from_data(&tokens[..], &Device::flex()));
    let first = HeadOutput {
        views: Some(views[0].clone()),
        masked: Some(masked_rows.unsqueeze_dim(1)),
        cells: Some(all_cells.unsqueeze_dim(1)),
    };
    let side = n.isqrt();
    let masked = Some(Masked { rows: Arc::clone(masked), masking: Masking::Replaced });
    let group = Sequences { n_prefix: 1, masked, ..Sequences::on_grid(b * v, [side, side]) };
    let features = Tokens::new(Tensor::zeros([b * v * (1 + n), 4], &Device::flex()), vec![group]);
    let others = views[1..].iter().cloned().map(HeadOutput::from_views);
    let sizes = std::iter::once(first).chain(others).collect();
    let features = vec![features];
    let heads = HeadOutputs::new(b, &features, [("head", sizes)].into());
    Outputs::new(features, heads)
}

/// `iBOTLoss` of the official code, with centers, and views of which some are not masked.
#[test]
fn ibot_equals_the_official_loss() {
    let golden = Golden::open_in("official", "ibot_loss");
    let comm = Communicator::solo();
    let recipe = "name = 'ibot'\nprototypes = 10\nhead_hidden = 4\nhead_bottleneck = 4\nteacher_temp = [0.04, 0.04]\n\
                  teacher_patch_temp = [0.05, 0.05]\nteacher_temp_warmup = { steps = 0 }\n\
                  patch_center = 'all_patches'";
    let mut ibot =
        method_on("arch = 'vit'\nimage_px = 16\npatch_px = 4\nwidth = 4\ndepth = 1\nheads = 1", recipe, 3, 4);
    let centers = ["center", "patch_center"].map(|name| (name.to_string(), golden.values(name)));
    ibot.load_state(&centers).unwrap();
    let masks = golden.values("masks");
    let mut masked_cells = Vec::new();
    for view in masks.chunks(9) {
        masked_cells.push((0..view.len()).filter(|cell| view[*cell] > 0.0).collect());
    }
    let masked = Arc::new(MaskedCells::new(masked_cells));
    let names = ["student", "student_local"];
    let student = names.map(|name| golden.tensor::<3>(name).autodiff().require_grad());
    let student_cells = golden.tensor::<4>("student_cells").autodiff().require_grad();
    let detached =
        [masked_outputs(&student.clone().map(Tensor::inner), student_cells.clone().inner(), &masked)];
    let teacher = vec![masked_outputs(&[golden.tensor("teacher")], golden.tensor("teacher_cells"), &masked)];
    let others = [("teacher", teacher)];
    let batch = BatchOutputs {
        trained: &detached,
        others: &others,
        labels: &[],
        masks: &[],
        columns: None,
        score: &|_, x| x,
    };
    let prepared = ibot.prepare(&batch, 0, Peers::new(&comm, 1)).unwrap();
    let loss = prepared.micro_batch_loss(0, &masked_outputs(&student, student_cells.clone(), &masked)).loss;
    golden.assert_values("loss", loss.clone().inner(), TOLERANCE);
    let grads = loss.backward();
    for (name, student) in names.into_iter().zip(student) {
        golden.assert_tensor(&format!("{name}.grad"), student.grad(&grads).unwrap(), TOLERANCE);
    }
    golden.assert_tensor("student_cells.grad", student_cells.grad(&grads).unwrap(), TOLERANCE);
    let observed: Vec<_> =
        prepared.observed().into_iter().map(|(name, mean)| (name, to_host(mean))).collect();
    ibot.after_step(&observed);
    for (name, center) in ibot.state() {
        let center = Tensor::from_floats(&center[..], &Device::flex());
        golden.assert_values(&format!("{name}_after"), center, TOLERANCE);
    }
}

/// Returns outputs whose head has scored the views of one size, `[B, V, K]`.
fn view_outputs(scores: Tensor<3>) -> Outputs {
    let [b, v, _] = scores.dims();
    let features = vec![Tokens::vectors(Tensor::zeros([b * v, 4], &Device::flex()))];
    let heads = HeadOutputs::new(b, &features, [("head", vec![HeadOutput::from_views(scores)])].into());
    Outputs::new(features, heads)
}

/// `mixup_target` and `SoftTargetCrossEntropy`: labels that are mixed and smoothed.
#[test]
fn classification_of_mixed_images_equals_timm() {
    let golden = Golden::open("mixing");
    let recipe = "name = 'classification'\nclasses = ['a', 'b', 'c', 'd', 'e']\nsmoothing = 0.1";
    let classification = method(recipe, 0, 4);
    let mixed = Mixed::Blend { share: f64::from(golden.values("share")[0]) };
    let mut labels: Vec<SoftLabel> = Vec::new();
    for class in golden.bytes("classes") {
        labels.push(vec![(u32::from(class), 1.0)]);
    }
    let (first, second) = labels.split_at_mut(2);
    for (first, second) in first.iter_mut().zip(second) {
        mixed.mix_labels(first, second);
    }
    let scores = golden.tensor::<3>("scores").autodiff().require_grad();
    let comm = Communicator::solo();
    let detached = [view_outputs(scores.clone().inner())];
    let labels = [labels];
    let batch = BatchOutputs {
        trained: &detached,
        others: &[],
        labels: &labels,
        masks: &[],
        columns: None,
        score: &|_, x| x,
    };
    let prepared = classification.prepare(&batch, 0, Peers::new(&comm, 1)).unwrap();
    let loss = prepared.micro_batch_loss(0, &view_outputs(scores.clone())).loss;
    golden.assert_values("loss", loss.clone().inner(), TOLERANCE);
    let gradient = scores.grad(&loss.backward()).unwrap();
    golden.assert_values("grad", gradient.reshape([-1]), TOLERANCE);
}
