//! The number of threads that a matrix product may use.

use std::cell::Cell;

thread_local! {
    /// Whether the products of this thread run on it alone.
    static IS_ALONE: Cell<bool> = const { Cell::new(false) };
}

/// Returns the number of threads that a product may use: those of the current rayon pool, but one
/// inside a task that runs beside enough others ([`run_task`]).
pub(super) fn product_threads() -> usize {
    if IS_ALONE.get() { 1 } else { rayon::current_num_threads() }
}

/// Runs `task`, one of `n_tasks` of about the same size that run in parallel. If there is one for
/// every thread of the current rayon pool, its products run on the calling thread alone: to divide
/// them as well would take time, and what the other threads read is not in their caches. A task
/// starts no parallel work but products: a thread that waits for such work takes other tasks.
pub(super) fn run_task<R>(n_tasks: usize, task: impl FnOnce() -> R) -> R {
    let is_alone = n_tasks >= rayon::current_num_threads();
    let _restored = Restored(IS_ALONE.replace(is_alone));
    task()
}

/// Restores the previous value when a task ends or panics.
struct Restored(bool);

impl Drop for Restored {
    fn drop(&mut self) {
        IS_ALONE.set(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_divided_if_there_are_fewer_tasks_than_threads() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().expect("a pool");
        pool.install(|| {
            assert_eq!(run_task(3, product_threads), 1);
            assert_eq!(run_task(2, product_threads), 3);
            assert_eq!(product_threads(), 3);
        });
    }
}
