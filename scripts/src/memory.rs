//! Allocator of the program.

use trainer::bench::allocator::Counting;

/// Counts bytes for `bench`.
#[global_allocator]
pub(crate) static MEMORY: Counting = Counting::new();
