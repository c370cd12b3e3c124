//! Parallel work whose outcome does not depend on threads.

use rayon::prelude::*;

/// Collects results that are computed in parallel, in their order. If several are errors, it is the
/// first of them that is returned, whichever thread was the fastest.
///
/// # Errors
/// The first error in the order of the results.
pub(crate) fn try_collect<T: Send, E: Send>(
    results: impl ParallelIterator<Item = Result<T, E>>,
) -> Result<Vec<T>, E> {
    results.collect::<Vec<_>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// The first of two errors is returned, though the second one is there before it.
    #[test]
    fn the_first_error_is_returned_however_late_it_comes() {
        let item = |i: usize| match i {
            0 => Ok(0),
            _ => {
                if i == 1 {
                    std::thread::sleep(Duration::from_millis(50));
                }
                Err(i)
            }
        };
        assert_eq!(try_collect((0..4).into_par_iter().map(item)), Err(1));
        assert_eq!(try_collect((0..9).into_par_iter().map(Ok::<_, usize>)), Ok(Vec::from_iter(0..9)));
    }
}
