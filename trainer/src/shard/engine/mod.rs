//! Collectives over flat buffers. An engine is all that the trainer knows of other ranks.

mod solo;

pub use solo::Solo;

use burn::tensor::Tensor;

/// A rank's view of the others. Buffers are one-dimensional; shards are equal in length.
pub trait Engine: Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Every rank's `shard` of `[n]`, one after another, `[W·n]`.
    fn all_gather(&self, shard: &Tensor<1>) -> Tensor<1>;

    /// This rank's part `[n]` of the sum over ranks of `full` of `[W·n]`.
    fn reduce_scatter(&self, full: Tensor<1>) -> Tensor<1>;

    /// Replaces each element by its sum over ranks.
    fn all_reduce(&self, values: &mut [f64]);
}

/// What every engine must do; each implementation's tests call this on every rank.
#[cfg(test)]
pub(crate) fn conformance(engine: &dyn Engine) {
    use burn::tensor::Device;
    let (rank, world) = (engine.rank(), engine.world_size());
    for n in [1, 63, 64, 1000] {
        let value = |r: usize, i: usize| (r * 10_000 + i) as f32;
        let shard: Vec<f32> = (0..n).map(|i| value(rank, i)).collect();
        let full = engine.all_gather(&Tensor::from_floats(shard.as_slice(), &Device::flex()));
        let expected: Vec<f32> = (0..world).flat_map(|r| (0..n).map(move |i| value(r, i))).collect();
        assert_eq!(full.clone().into_data().try_to_vec::<f32>().expect("f32"), expected);
        let part = engine.reduce_scatter(full).into_data().try_to_vec::<f32>().expect("f32");
        let expected: Vec<f32> = (0..n).map(|i| world as f32 * value(rank, i)).collect();
        assert_eq!(part, expected);
    }
    let mut values = [rank as f64, 1.0];
    engine.all_reduce(&mut values);
    assert_eq!(values, [(0..world).sum::<usize>() as f64, world as f64]);
}
