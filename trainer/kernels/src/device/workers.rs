//! Threads that each take a slice of the batch through a unit with single-threaded operations.
//!
//! On a CPU this beats threads inside operations: a slice stays in its core's cache, and there is
//! one barrier a unit instead of one an operation.

use std::num::NonZero;
use std::ops::Range;

use burn_tensor::Device;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Worker threads of a rank. Each is a rayon pool of one, so that operations inside it neither
/// split nor wait.
pub struct Workers {
    /// Empty where the thread that calls does the work.
    pools: Vec<ThreadPool>,
}

impl Workers {
    /// `n` workers for the CPU. What launches kernels on another device is the thread that calls: CubeCL has a queue
    /// for every thread, and one queue need not wait for another.
    pub fn on(device: &Device, n: usize) -> Self {
        match *device == Device::flex() {
            true => Self::new(n),
            false => Self { pools: Vec::new() },
        }
    }

    /// `n` workers, at least one.
    pub fn new(n: usize) -> Self {
        let pool = |i| {
            ThreadPoolBuilder::new()
                .num_threads(1)
                .thread_name(move |_| format!("worker-{i}"))
                .build()
                // Starting a thread fails only when the process is out of them.
                .expect("a thread can be started")
        };
        Self { pools: (0..n.max(1)).map(pool).collect() }
    }

    /// Number of workers, with the thread that calls where there is no other.
    pub fn len(&self) -> usize {
        self.pools.len().max(1)
    }

    /// Never true.
    pub fn is_empty(&self) -> bool {
        self.pools.is_empty()
    }

    /// The parts of `n` items, one for each worker that gets any. They differ by one item at most.
    pub fn slices(&self, n: usize) -> Vec<Range<usize>> {
        let parts = self.len().min(n);
        (0..parts).map(|i| i * n / parts..(i + 1) * n / parts).collect()
    }

    /// Gives each worker one of `inputs` and waits for all; results are in order.
    ///
    /// # Panics
    /// If `task` panics, or there are more inputs than workers.
    pub fn map<I: Send, R: Send>(&self, inputs: Vec<I>, task: impl Fn(usize, I) -> R + Sync) -> Vec<R> {
        assert!(inputs.len() <= self.len(), "one input a worker");
        if self.pools.is_empty() {
            return inputs.into_iter().enumerate().map(|(i, input)| task(i, input)).collect();
        }
        let mut results: Vec<Option<R>> = inputs.iter().map(|_| None).collect();
        let jobs: Vec<_> = inputs.into_iter().zip(results.iter_mut()).enumerate().collect();
        run_each(&self.pools, jobs, &|(i, (input, result))| *result = Some(task(i, input)));
        // Every job has run when run_each returns, and each fills its result.
        results.into_iter().map(|result| result.expect("the job has run")).collect()
    }
}

/// `n`, or the number of cores where it is 0.
pub fn or_cores(n: usize) -> usize {
    match n {
        0 => std::thread::available_parallelism().map_or(1, NonZero::get),
        n => n,
    }
}

/// Spawns one job on each pool and waits: every scope encloses the scopes after it.
fn run_each<J: Send>(pools: &[ThreadPool], mut jobs: Vec<J>, task: &(impl Fn(J) + Sync)) {
    let Some((pool, rest)) = pools.split_first() else { return };
    if jobs.is_empty() {
        return;
    }
    let job = jobs.remove(0);
    pool.in_place_scope(|scope| {
        scope.spawn(move |_| task(job));
        run_each(rest, jobs, task);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_and_results_are_in_order() {
        let workers = Workers::new(3);
        assert_eq!(workers.slices(8), [0..2, 2..5, 5..8]);
        assert_eq!(workers.slices(2), [0..1, 1..2], "nobody gets nothing");
        let doubled = workers.map(vec![1, 2, 3], |i, x| (i, 2 * x, rayon::current_num_threads()));
        assert_eq!(doubled, [(0, 2, 1), (1, 4, 1), (2, 6, 1)]);
        assert_eq!(workers.map(vec![5], |_, x| x), [5]);
    }
}
