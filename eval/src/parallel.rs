//! Parallel work whose outcome does not depend on threads.

use rayon::prelude::*;

/// Collects results that are computed in parallel, in their order. If several are errors, the first
/// of them is returned, whichever thread was the fastest.
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

    /// Returns the item 0, and errors for the others, of which the first comes last.
    fn slow_first_error(i: usize) -> Result<usize, usize> {
        if i == 0 {
            return Ok(0);
        }
        if i == 1 {
            std::thread::sleep(Duration::from_millis(50));
        }
        Err(i)
    }

    #[test]
    fn the_first_error_is_returned_even_if_it_occurs_last() {
        assert_eq!(try_collect((0..4).into_par_iter().map(slow_first_error)), Err(1));
        assert_eq!(try_collect((0..9).into_par_iter().map(Ok::<_, usize>)), Ok(Vec::from_iter(0..9)));
    }
}
