//! Speed of a machine in the sizes of a run: the one measurement from which `ocelli plan` and the
//! note at the start of a run estimate the time of a step.
//!
//! Measured are the largest product of the unit in which most operations are spent, and the GELU of
//! its result, which stands for all operations that pass over activations. All workers compute at
//! the same time, as in a step. The best of several measurements counts, because other programs can
//! only slow one down.

use std::hint::black_box;
use std::time::Instant;

use burn_tensor::{Device, Tensor};
use kernels::device::workers::Workers;
use kernels::ops::tally::Product;
use kernels::ops::{ProductLimits, gelu, matmul};

use super::products::one_ms;
use super::step::random_matrix;
use crate::cost::ModelCost;
use crate::estimate::MachineSpeed;
use crate::step::precision::Arithmetic;

/// Number of measurements of each operation.
const ROUNDS: usize = 5;

/// Number of operations that are launched together on a device other than the CPU.
const LAUNCHES: usize = 4;

/// Largest number of rows of a product on a CPU: more take longer and do not change its rate.
const MAX_ROWS: usize = 2048;

/// Largest number of rows of a product on another device.
const MAX_DEVICE_ROWS: usize = 16_384;

/// Largest side of a matrix of weights. With this and [`MAX_ROWS`], a measurement on slow cores
/// takes a few seconds, and less than one with the sizes of small networks.
const MAX_SIDE: usize = 4096;

/// Images that a rank computes at the same time, and how.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// Number of workers that compute at the same time.
    pub n_workers: usize,
    /// Number of images of a micro-batch on each of them.
    pub worker_images: usize,
    /// Type of the numbers that products multiply.
    pub arithmetic: Arithmetic,
}

impl Load {
    /// Returns the load of a rank with `rank_batch` images a step, in `n_micro_batches`.
    pub fn new(rank_batch: usize, n_micro_batches: usize, n_workers: usize, arithmetic: Arithmetic) -> Self {
        let n_workers = n_workers.clamp(1, rank_batch.max(1));
        let worker_images = rank_batch.div_ceil(n_micro_batches.max(1)).div_ceil(n_workers).max(1);
        Self { n_workers, worker_images, arithmetic }
    }
}

/// Measures `device` in the sizes of `model` under `load`.
pub fn machine_speed(model: &ModelCost, load: Load, device: &Device) -> MachineSpeed {
    let is_cpu = *device == Device::flex();
    let sizes = largest_product(model, load, if is_cpu { MAX_ROWS } else { MAX_DEVICE_ROWS });
    let best = if is_cpu { on_workers(sizes, load) } else { on_device(sizes, load.arithmetic, device) };
    let [m, k, n] = sizes.map(|side| side as f64);
    let copies = if is_cpu { load.n_workers as f64 } else { 1.0 };
    // The pass reads and writes the f32 of every worker once.
    let passed_bytes = 2.0 * size_of::<f32>() as f64 * m * n * copies;
    MachineSpeed { flops_per_s: 2.0 * m * k * n / best.product_s, bytes_per_s: passed_bytes / best.pass_s }
}

/// Returns the sizes `[m, k, n]` of the product of a worker's rows, at most `max_rows`, with the
/// largest weights of the unit of the trained backbone in which most operations are spent.
fn largest_product(model: &ModelCost, load: Load, max_rows: usize) -> [usize; 3] {
    let units = &model.trained.backbone;
    let busiest = units.iter().max_by(|a, b| a.flops.total_cmp(&b.flops));
    let ProductLimits { n_rows, widest, n_weights } = busiest.map(|unit| unit.products).unwrap_or_default();
    let m = (n_rows * load.worker_images).clamp(1, max_rows);
    let k = (n_weights / widest.max(1)).clamp(1, MAX_SIDE);
    let n = widest.clamp(1, MAX_SIDE);
    [m, k, n]
}

/// Shortest times of both operations.
struct BestTimes {
    /// Seconds of a product: on several workers, the time between the ends of two.
    product_s: f64,
    /// Seconds of a pass over the result on every worker.
    pass_s: f64,
}

impl BestTimes {
    /// Returns the times of operations that have not been measured.
    fn none() -> Self {
        Self { product_s: f64::INFINITY, pass_s: f64::INFINITY }
    }

    /// Takes the times of one more measurement into account.
    fn update(&mut self, product_s: f64, pass_s: f64) {
        self.product_s = self.product_s.min(product_s);
        self.pass_s = self.pass_s.min(pass_s);
    }
}

/// Measures the workers of a CPU.
fn on_workers([m, k, n]: [usize; 3], load: Load) -> BestTimes {
    let workers = Workers::new(load.n_workers);
    let bf16 = load.arithmetic == Arithmetic::Bf16;
    let product = Product { mkn: [m, k, n], transposed: [false, false], adds: false, bf16, n_threads: 1 };
    // Each worker reads memory of its own.
    let mut inputs = Vec::with_capacity(workers.len());
    for _ in 0..workers.len() {
        inputs.push(Tensor::<2>::full([m, n], 0.5, &Device::flex()));
    }
    let mut best = BestTimes::none();
    for _ in 0..ROUNDS {
        let product_s = 1e-3 * one_ms(&product, &workers);
        let seconds = workers.map(inputs.clone(), |_, x| {
            let start = Instant::now();
            drop(black_box(gelu(x)));
            start.elapsed().as_secs_f64()
        });
        best.update(product_s, seconds.iter().sum::<f64>() / seconds.len() as f64);
    }
    best
}

/// Measures a device other than the CPU.
fn on_device([m, k, n]: [usize; 3], arithmetic: Arithmetic, device: &Device) -> BestTimes {
    let a = random_matrix(device, [m, k], arithmetic, 1);
    let b = random_matrix(device, [k, n], arithmetic, 2);
    let x = random_matrix(device, [m, n], Arithmetic::F32, 3);
    let mut best = BestTimes::none();
    for _ in 0..ROUNDS {
        let product_s = launched_s(device, || matmul(a.clone(), b.clone()));
        let pass_s = launched_s(device, || gelu(x.clone()));
        best.update(product_s, pass_s);
    }
    best
}

/// Returns the seconds of one of a few operations that are launched together.
fn launched_s(device: &Device, operation: impl Fn() -> Tensor<2>) -> f64 {
    let start = Instant::now();
    // Results are kept until all are computed, so that none can be skipped.
    let mut results = Vec::with_capacity(LAUNCHES);
    for _ in 0..LAUNCHES {
        results.push(operation());
    }
    let _ = device.sync();
    start.elapsed().as_secs_f64() / LAUNCHES as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::preset;

    /// A block of ViT-S multiplies its 2 · 197 rows of an image by 384 x 1,536 weights.
    #[test]
    fn the_product_is_that_of_the_run() {
        let model = preset("vit-s", None).unwrap();
        let load = Load::new(4, 1, 2, Arithmetic::F32);
        assert_eq!((load.n_workers, load.worker_images), (2, 2));
        assert_eq!(largest_product(&model, load, MAX_ROWS), [2 * 2 * 197, 384, 1536]);
        assert_eq!(largest_product(&model, Load { worker_images: 99, ..load }, MAX_ROWS)[0], MAX_ROWS);
        let large = largest_product(&preset("vit-7b", None).unwrap(), load, MAX_ROWS);
        assert!(large.iter().all(|side| *side <= MAX_SIDE), "{large:?}");
        // More workers than images, and more micro-batches than images.
        assert_eq!(Load::new(3, 1, 8, Arithmetic::F32), Load { n_workers: 3, worker_images: 1, ..load });
        assert_eq!(Load::new(2, 8, 1, Arithmetic::F32).worker_images, 1);
    }

    #[test]
    fn every_type_has_a_speed() {
        let model = preset("vit-s", None).unwrap();
        for arithmetic in [Arithmetic::F32, Arithmetic::Bf16] {
            let load = Load { n_workers: 2, worker_images: 1, arithmetic };
            let speed = machine_speed(&model, load, &Device::flex());
            let rates = [speed.flops_per_s, speed.bytes_per_s];
            assert!(rates.iter().all(|rate| rate.is_finite() && *rate > 1e6), "{speed:?}");
        }
    }
}
