//! Losses and targets.

use burn_tensor::Tensor;

use super::Golden;
use crate::comm::communicator::Comm;
use crate::comm::peers::Peers;
use crate::method::loss::center::batch_mean;
use crate::method::loss::cross_entropy::between_views;
use crate::method::loss::koleo::{Neighbors, directions};
use crate::method::loss::nt_xent::Contrast;
use crate::method::loss::sigreg::Sigreg;
use crate::method::loss::sinkhorn::targets;
use crate::ops::{softmax_rows, unit_rows};

const TOLERANCE: f32 = 1e-5;

#[test]
fn cross_entropy_and_center_equal_pytorch() {
    let golden = Golden::open("losses");
    let teacher = golden.tensor::<3>("teacher");
    let student: Vec<_> = ["student_0", "student_1"]
        .map(|name| golden.tensor::<3>(name).autodiff().require_grad())
        .into_iter()
        .collect();
    let probabilities = softmax_rows(teacher.clone(), Some(golden.tensor("center")), 0.04);
    let loss = between_views(&student, &probabilities, 0.1);
    assert!((loss.clone().into_scalar::<f32>() - golden.values("loss")[0]).abs() < TOLERANCE);
    let grads = loss.backward();
    golden.assert_tensor("grad_0", student[0].grad(&grads).unwrap(), TOLERANCE);
    golden.assert_tensor("grad_1", student[1].grad(&grads).unwrap(), TOLERANCE);
    let comm = Comm::solo();
    golden.assert_tensor("mean", batch_mean(&[teacher], Peers::new(&comm, 1)).unwrap(), TOLERANCE);
}

#[test]
fn sinkhorn_equals_pytorch() {
    let (golden, comm) = (Golden::open("losses"), Comm::solo());
    let logits: Tensor<3> = golden.tensor("teacher");
    let [b, v, _] = logits.dims();
    let given = targets(&[logits], b * v, 0.07, 3, Peers::new(&comm, 1)).unwrap().remove(0);
    golden.assert_tensor("sinkhorn", given, TOLERANCE);
}

#[test]
fn contrast_equals_pytorch() {
    let (golden, comm) = (Golden::open("objectives"), Comm::solo());
    let z = golden.tensor::<3>("contrast.z").autodiff().require_grad();
    let [b, v, d] = z.dims();
    let unit = |z: Tensor<3>| unit_rows(z.reshape([b * v, d]), 1e-12).reshape([b, v, d]);
    let contrast = Contrast::of(&[unit(z.clone().inner())], 0.2, Peers::new(&comm, 1)).unwrap();
    let loss = contrast.loss(unit(z.clone()), &(0..b).collect::<Vec<_>>());
    golden.assert_tensor("contrast.loss", loss.clone().inner(), TOLERANCE);
    golden.assert_tensor("contrast.grad", z.grad(&loss.backward()).unwrap(), TOLERANCE);
}

#[test]
fn the_regularizer_of_lejepa_equals_pytorch() {
    let (golden, comm) = (Golden::open("objectives"), Comm::solo());
    let z = golden.tensor::<3>("sigreg.z").autodiff().require_grad();
    let directions = golden.values("sigreg.directions");
    let sigreg = Sigreg::of(&[z.clone().inner()], directions, Peers::new(&comm, 1)).unwrap();
    let loss = sigreg.loss(z.clone());
    golden.assert_tensor("sigreg.loss", loss.clone().inner(), TOLERANCE);
    golden.assert_tensor("sigreg.grad", z.grad(&loss.backward()).unwrap(), TOLERANCE);
}

#[test]
fn koleo_equals_pytorch() {
    let golden = Golden::open("losses");
    let x = golden.tensor::<2>("embeddings").autodiff().require_grad();
    let [b, _] = x.dims();
    let neighbors = Neighbors::of(directions(x.clone().inner()), b).unwrap();
    let loss = neighbors.koleo(x.clone(), &(0..b).collect::<Vec<_>>());
    assert!((loss.clone().into_scalar::<f32>() - golden.values("koleo")[0]).abs() < TOLERANCE);
    golden.assert_tensor("koleo_grad", x.grad(&loss.backward()).unwrap(), TOLERANCE);
}
