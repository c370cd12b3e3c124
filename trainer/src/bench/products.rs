//! Times of the matrix products of a step without its other operations: the same shapes, on as many
//! workers at once, one product directly after another.

use std::collections::BTreeMap;
use std::time::Instant;

use half::bf16;
use kernels::device::workers::Workers;
use kernels::ops::gemm::Mat;
use kernels::ops::tally::Product;
use kernels::ops::{Number, Start, product_into};

use super::Times;

/// Least number of milliseconds for which each shape is multiplied, so that clocks are exact
/// enough.
const MIN_MEASURED_MS: f64 = 1.0;

/// Number of rounds, whose median is the result.
const ROUNDS: usize = 3;

/// Returns the milliseconds that `products`, each as often as its count, take on `n_workers`
/// workers. Matrices are in the caches, as far as they fit there.
pub(super) fn alone_ms(products: &BTreeMap<Product, u64>, n_workers: usize) -> f64 {
    let workers = Workers::new(n_workers);
    let mut rounds: Vec<f64> = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        rounds.push(products.iter().map(|(product, count)| *count as f64 * one_ms(product, &workers)).sum());
    }
    Times::new(rounds).median_ms
}

/// Returns the number of floating-point operations of `products`.
pub(super) fn flops(products: &BTreeMap<Product, u64>) -> f64 {
    let mut flops = 0.0;
    for (product, count) in products {
        let n_multiplications: f64 = product.mkn.iter().map(|side| *side as f64).product();
        flops += 2.0 * *count as f64 * n_multiplications;
    }
    flops
}

/// Returns the mean time of one product of two square matrices of side `n`, on all threads of the
/// calling pool.
pub(super) fn square_ms(n: usize, bf16: bool) -> f64 {
    let n_threads = rayon::current_num_threads();
    repeated_ms(&Product { mkn: [n; 3], transposed: [false, false], adds: false, bf16, n_threads })
}

/// Returns the time in milliseconds that `product` adds to a step. If it runs on one thread, the
/// workers compute several at the same time.
pub(super) fn one_ms(product: &Product, workers: &Workers) -> f64 {
    if product.n_threads > 1 {
        return repeated_ms(product);
    }
    let each = workers.map(vec![(); workers.len()], |_, ()| repeated_ms(product));
    each.iter().sum::<f64>() / (each.len() * each.len()) as f64
}

/// Returns the mean time of `product` in milliseconds, on the calling thread and the threads that
/// it uses.
fn repeated_ms(product: &Product) -> f64 {
    if product.bf16 { mean_ms::<bf16>(product) } else { mean_ms::<f32>(product) }
}

/// Returns the mean time of `product` in milliseconds, with matrices of `T`. With bf16 all three
/// are bf16, even where the step packs f32.
fn mean_ms<T: Number>(product: &Product) -> f64 {
    let [m, k, n] = product.mkn;
    let a = vec![T::nearest(0.5); m * k];
    let b = vec![T::nearest(0.25); k * n];
    let mut out = vec![T::default(); m * n];
    let [a_by_columns, b_by_columns] = product.transposed;
    let a = if a_by_columns { Mat::rows(&a, m).t() } else { Mat::rows(&a, k) };
    let b = if b_by_columns { Mat::rows(&b, k).t() } else { Mat::rows(&b, n) };
    let start = if product.adds { Start::Output } else { Start::Zero };
    let mut multiply = || product_into(product.mkn, 1.0, a, b, start, &mut out, n);
    multiply();
    let start = Instant::now();
    let mut repeats = 0;
    loop {
        multiply();
        repeats += 1;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        if ms >= MIN_MEASURED_MS {
            return ms / f64::from(repeats);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::ops::tally::products_of;

    #[test]
    fn recorded_products_are_those_computed() {
        for bf16 in [false, true] {
            let product = Product {
                mkn: [3, 4, 5],
                transposed: [true, false],
                adds: true,
                bf16,
                n_threads: rayon::current_num_threads(),
            };
            let (_, recorded) = products_of(|| repeated_ms(&product));
            // Other tests multiply at the same time.
            assert!(recorded.get(&product).is_some_and(|n| *n > 1), "{recorded:?}");
            assert_eq!(flops(&BTreeMap::from([(product, 2)])), 240.0);
            assert!(alone_ms(&BTreeMap::from([(product, 2)]), 2) > 0.0);
        }
    }
}
