//! Speed of a machine in the sizes of a run: the one measurement from which `ocelli plan` and the
//! note at the start of a run estimate the time of a step.
//!
//! Measured are the largest product of the unit in which most operations are spent, and the GELU of
//! as many elements as its result has, which stands for all operations that pass over activations.
//! All workers compute at the same time, as in a step. The best of several measurements counts,
//! because other programs can only slow one down.

use std::hint::black_box;
use std::time::Instant;

use burn_tensor::{Device, Tensor};
use kernels::device::workers::Workers;
use kernels::ops::tally::Product;
use kernels::ops::{gelu, matmul};

use super::products::one_ms;
use super::step::random_matrix;
use crate::cost::ModelCost;
use crate::estimate::MachineSpeed;
use crate::step::precision::Arithmetic;

/// Number of measurements of each operation.
const ROUNDS: usize = 5;

/// Number of operations that are launched together on a device other than the CPU.
const LAUNCHES: usize = 4;

/// Limits of the sizes that are measured on a CPU: larger products take longer at the same rate,
/// and the elements of two workers exceed its caches. A measurement takes about a second at most.
const CPU_LIMITS: Limits = Limits { n_rows: 1024, side: 2048, n_elements: 4 << 20 };

/// Limits of the sizes that are measured on another device.
const DEVICE_LIMITS: Limits = Limits { n_rows: 16_384, side: 4096, n_elements: 16 << 20 };

/// Largest sizes that are measured.
struct Limits {
    /// Rows of a product.
    n_rows: usize,
    /// Sides of a matrix of weights.
    side: usize,
    /// Elements of a pass.
    n_elements: usize,
}

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
    if *device == Device::flex() {
        speed_of_workers(Sizes::new(model, load, &CPU_LIMITS), load)
    } else {
        speed_of_device(Sizes::new(model, load, &DEVICE_LIMITS), load.arithmetic, device)
    }
}

/// Sizes that are measured.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Sizes {
    /// Sizes of a product, `[m, k] · [k, n]`: a worker's rows, and the largest weights of the unit
    /// of the trained backbone in which most operations are spent.
    mkn: [usize; 3],
    /// Number of elements of a pass.
    n_elements: usize,
}

impl Sizes {
    fn new(model: &ModelCost, load: Load, limits: &Limits) -> Self {
        let units = &model.trained.backbone;
        let busiest = units.iter().max_by(|a, b| a.flops.total_cmp(&b.flops));
        let product = busiest.map(|unit| unit.products).unwrap_or_default();
        let n_rows = (product.n_rows * load.worker_images).max(1);
        let k = (product.n_weights / product.widest.max(1)).clamp(1, limits.side);
        let n = product.widest.clamp(1, limits.side);
        Self {
            mkn: [n_rows.min(limits.n_rows), k, n],
            n_elements: n_rows.saturating_mul(n).min(limits.n_elements),
        }
    }

    /// Returns the rates of `n_copies` workers, of whose operations these are the shortest times:
    /// of a product, the time between the ends of two of any workers.
    fn speed(self, product_s: f64, pass_s: f64, n_copies: usize) -> MachineSpeed {
        let n_multiplications: f64 = self.mkn.iter().map(|side| *side as f64).product();
        // A pass reads and writes every element.
        let passed_bytes = (2 * size_of::<f32>() * self.n_elements * n_copies) as f64;
        MachineSpeed { flops_per_s: 2.0 * n_multiplications / product_s, bytes_per_s: passed_bytes / pass_s }
    }
}

/// Measures the workers of a CPU.
fn speed_of_workers(sizes: Sizes, load: Load) -> MachineSpeed {
    let workers = Workers::new(load.n_workers);
    let bf16 = load.arithmetic == Arithmetic::Bf16;
    let product = Product { mkn: sizes.mkn, transposed: [false, false], adds: false, bf16, n_threads: 1 };
    // Each worker reads memory of its own.
    let mut inputs = Vec::with_capacity(workers.len());
    for _ in 0..workers.len() {
        inputs.push(Tensor::<1>::full([sizes.n_elements], 0.5, &Device::flex()));
    }
    let mut product_s = f64::INFINITY;
    let mut pass_s = f64::INFINITY;
    for _ in 0..ROUNDS {
        product_s = product_s.min(1e-3 * one_ms(&product, &workers));
        let seconds = workers.map(inputs.clone(), |_, x| {
            let start = Instant::now();
            drop(black_box(gelu(x)));
            start.elapsed().as_secs_f64()
        });
        pass_s = pass_s.min(seconds.iter().sum::<f64>() / seconds.len() as f64);
    }
    sizes.speed(product_s, pass_s, workers.len())
}

/// Measures a device other than the CPU.
fn speed_of_device(sizes: Sizes, arithmetic: Arithmetic, device: &Device) -> MachineSpeed {
    let [m, k, n] = sizes.mkn;
    let a = random_matrix(device, [m, k], arithmetic, 1);
    let b = random_matrix(device, [k, n], arithmetic, 2);
    let x = random_matrix(device, [1, sizes.n_elements], Arithmetic::F32, 3);
    let mut product_s = f64::INFINITY;
    let mut pass_s = f64::INFINITY;
    for _ in 0..ROUNDS {
        product_s = product_s.min(launched_s(device, || matmul(a.clone(), b.clone())));
        pass_s = pass_s.min(launched_s(device, || gelu(x.clone())));
    }
    sizes.speed(product_s, pass_s, 1)
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
    fn sizes_are_those_of_the_run() {
        let model = preset("vit-s", None).unwrap();
        let load = Load::new(4, 1, 2, Arithmetic::F32);
        assert_eq!((load.n_workers, load.worker_images), (2, 2));
        let sizes = Sizes::new(&model, load, &CPU_LIMITS);
        assert_eq!(sizes, Sizes { mkn: [2 * 2 * 197, 384, 1536], n_elements: 2 * 2 * 197 * 1536 });
        let many = Sizes::new(&model, Load { worker_images: 99, ..load }, &CPU_LIMITS);
        assert_eq!(many, Sizes { mkn: [1024, 384, 1536], n_elements: 4 << 20 });
        let large = Sizes::new(&preset("vit-7b", None).unwrap(), load, &CPU_LIMITS);
        assert!(large.mkn.iter().all(|side| *side <= 2048), "{large:?}");
        // More workers than images, and more micro-batches than images.
        assert_eq!(Load::new(3, 1, 8, Arithmetic::F32), Load { n_workers: 3, worker_images: 1, ..load });
        assert_eq!(Load::new(2, 8, 1, Arithmetic::F32).worker_images, 1);
    }

    /// By hand: two workers multiply 2 · 3 · 5 numbers of which a product ends every second, and
    /// pass over 7 numbers each in two.
    #[test]
    fn rates_are_those_of_all_workers() {
        let speed = Sizes { mkn: [2, 3, 5], n_elements: 7 }.speed(1.0, 2.0, 2);
        assert_eq!(speed, MachineSpeed { flops_per_s: 60.0, bytes_per_s: 56.0 });
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
