//! Worker threads that each compute a unit on a slice of the batch with single-threaded operations.
//!
//! On a CPU this is faster than threads inside operations: a slice stays in its core's cache, and
//! there is one barrier per unit instead of one per operation.

use std::num::NonZero;
use std::ops::Range;

use burn_tensor::Device;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Worker threads of a rank. Each is a rayon pool of one thread, so that operations inside it
/// neither split nor wait.
pub struct Workers {
    /// Pools of one thread each; none if the calling thread does the work.
    pools: Vec<ThreadPool>,
}

impl Workers {
    /// Starts `n` workers if `device` is the CPU. On any other device the calling thread launches
    /// all kernels: CubeCL has one queue per thread, and queues are not synchronized.
    pub fn for_device(device: &Device, n: usize) -> Self {
        if *device == Device::flex() { Self::new(n) } else { Self { pools: Vec::new() } }
    }

    /// Starts `n` workers, at least one.
    pub fn new(n: usize) -> Self {
        let mut pools = Vec::with_capacity(n.max(1));
        for i in 0..n.max(1) {
            let builder = ThreadPoolBuilder::new().num_threads(1).thread_name(move |_| format!("worker-{i}"));
            // Starting a thread fails only if the process has reached its limit of threads.
            pools.push(builder.build().expect("a thread can be started"));
        }
        Self { pools }
    }

    /// Returns the number of workers; the calling thread counts as one if there is no other.
    pub fn len(&self) -> usize {
        self.pools.len().max(1)
    }

    /// Returns whether there are no worker threads, so that the calling thread does the work.
    pub fn is_empty(&self) -> bool {
        self.pools.is_empty()
    }

    /// Splits `n` items into at most [`Workers::len`] ranges, none of which is empty. Their lengths
    /// differ by one at most.
    pub fn slices(&self, n: usize) -> Vec<Range<usize>> {
        let parts = self.len().min(n);
        (0..parts).map(|i| i * n / parts..(i + 1) * n / parts).collect()
    }

    /// Runs `task` on every input, each on its own worker, and waits for all; results are in the
    /// order of the inputs.
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
        // `run_each` returns after every job has run and stored its result.
        results.into_iter().map(|result| result.expect("the job has run")).collect()
    }
}

/// Returns `n`, or the number of cores if it is 0.
pub fn n_or_all_cores(n: usize) -> usize {
    match n {
        0 => std::thread::available_parallelism().map_or(1, NonZero::get),
        n => n,
    }
}

/// Spawns one job on each pool and waits for all: each scope encloses those of the remaining pools.
fn run_each<J: Send>(pools: &[ThreadPool], mut jobs: Vec<J>, task: &(impl Fn(J) + Sync)) {
    let Some((pool, remaining)) = pools.split_first() else { return };
    if jobs.is_empty() {
        return;
    }
    let job = jobs.remove(0);
    pool.in_place_scope(|scope| {
        scope.spawn(move |_| task(job));
        run_each(remaining, jobs, task);
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
