//! Transfer of weights and gradients between ranks, and computation in bf16.

use ranks::engine::{Local, LocalGroup};
use trainer::bench::compare::difference;

use crate::ranks::{STATISTICS, Trained, plan, train, train_on};

const BF16: &str = "optim.precision={ gather = \"bf16\", reduce = \"bf16\" }";

/// For every kind of transfer of weights and gradients, four ranks take the step of one rank: up to
/// rounding in f32 if the engine sums, and in bf16 if values are sent in bf16.
#[test]
fn every_order_of_sums_and_every_type_trains_like_one_rank() {
    let four_micro_batches = [&["optim.micro_batches=4"][..], &STATISTICS].concat();
    let one = train(&plan(1, &four_micro_batches), 1);
    for (more, tolerance) in [
        (&["run.exact_sums=false"][..], 1e-5),
        (&["run.shard_group=2", "run.exact_sums=false"], 1e-5),
        (&[BF16], 0.02),
        (&[BF16, "run.keep=0"], 0.02),
        (&[BF16, "run.shard=\"grad\""], 0.02),
        (&[BF16, "run.shard=\"none\""], 0.02),
        (&[BF16, "run.shard_group=2"], 0.02),
        (&[BF16, "run.shard_group=2", "run.exact_sums=false"], 0.02),
    ] {
        let four = train(&plan(4, &[&four_micro_batches[..], more].concat()), 1);
        let moment_difference = difference(&four.moments, &one.moments);
        assert!(moment_difference < tolerance, "{more:?}: {moment_difference}");
        assert!((four.losses[0] - one.losses[0]).abs() < tolerance * one.losses[0], "{more:?}");
    }
}

/// One rank can communicate with itself, which allows tests with a single GPU.
#[test]
fn one_rank_can_communicate_with_itself() {
    for more in [&[][..], &[BF16], &["run.exact_sums=false"]] {
        let plan = plan(1, more);
        let engines = LocalGroup::ranks(1).into_iter().map(Local::with_tensors).collect();
        assert!(train_on(&plan, engines, 2) == train(&plan, 2), "{more:?}");
    }
}

/// Setting of units that compute in bf16.
const COMPUTE_BF16: &str = "optim.precision={ compute = \"bf16\" }";

/// Units that compute in bf16 have nearly the gradients of f32, the same bits on any number of
/// ranks and for any number of kept graphs, and weights in f32.
#[test]
fn computation_in_bf16_is_close_to_f32() {
    check_bf16_computation(&[]);
    check_bf16_computation(&[
        "model.positions=rope",
        "model.registers=2",
        "model.mlp=swiglu",
        "model.qkv_bias=without_keys",
    ]);
}

/// Trains with two micro-batches.
fn train_model(world_size: usize, model: &[&str], more: &[&str], n_steps: u64) -> Trained {
    let overrides = [&["optim.micro_batches=2"][..], &STATISTICS, model, more].concat();
    train(&plan(world_size, &overrides), n_steps)
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn check_bf16_computation(model: &[&str]) {
    let f32s = train_model(1, model, &[], 1);
    let bf16s = train_model(1, model, &[COMPUTE_BF16], 1);
    assert_ne!(f32s.losses, bf16s.losses, "the setting has no effect");
    assert!(
        (f32s.losses[0] - bf16s.losses[0]).abs() < 2e-2 * f32s.losses[0],
        "{:?}",
        (f32s.losses, bf16s.losses)
    );
    let a = &f32s.moments;
    let b = &bf16s.moments;
    let cosine = dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
    assert!(cosine > 0.99, "{cosine}");
    // Weights that were rounded to bf16 would have no lower bits.
    assert!(bf16s.weights.iter().any(|w| w.to_bits() & 0xffff != 0));
    let expected = train_model(1, model, &[COMPUTE_BF16], 2);
    for (world_size, more) in
        [(1, &[COMPUTE_BF16, "run.keep=0"][..]), (2, &[COMPUTE_BF16]), (2, &[COMPUTE_BF16, "run.keep=0"])]
    {
        let trained = train_model(world_size, model, more, 2);
        assert!(trained == expected, "{world_size} ranks, {more:?}");
    }
}

/// Weights and gradients sent in bf16 change a run, but only slightly.
#[test]
fn transfers_in_bf16_train_nearly_like_f32() {
    let wire = ["optim.precision={gather=\"bf16\",reduce=\"bf16\"}"];
    let exact = train(&plan(2, &[]), 1);
    let rounded = train(&plan(2, &wire), 1);
    assert_ne!(rounded.losses, exact.losses);
    assert!((rounded.losses[1] - exact.losses[1]).abs() < 0.01 * exact.losses[1], "gradient norms");
    assert!(difference(&rounded.moments, &exact.moments) < 0.02);
    assert!(difference(&rounded.moments, &exact.moments) > 1e-5, "nothing was rounded");
    // Gathered weights are rounded identically for any number of ranks.
    let gather = ["optim.precision={gather=\"bf16\"}", "optim.micro_batches=2"];
    assert!(train(&plan(2, &gather), 3) == train(&plan(1, &gather), 3));
}
