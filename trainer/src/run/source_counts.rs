//! Number of images that each source of a mix has contributed.

use pipeline::{Dataset, Order};

use crate::recipe::plan::Plan;

/// Counter of the images that each source contributes.
#[derive(Debug)]
pub(super) struct SourceCounts {
    names: Vec<String>,
    order: Order,
    batch_size: u64,
}

impl SourceCounts {
    /// Creates a counter for the sources of `dataset`; a data set that is not a mix has none.
    pub(super) fn new(dataset: &Dataset, plan: &Plan) -> Self {
        let names = dataset.sampling().sources.iter().map(|source| format!("data/{}", source.name)).collect();
        let recipe = &plan.recipe;
        let order = Order::for_dataset(dataset, recipe.seed, recipe.data.window_shards);
        Self { names, order, batch_size: recipe.optim.batch_size as u64 }
    }

    /// Returns the number of images that each source has contributed in the first `n_steps` steps.
    pub(super) fn after(&self, n_steps: u64) -> Vec<(String, f64)> {
        if self.names.is_empty() {
            return Vec::new();
        }
        let counts = self.order.n_given(n_steps * self.batch_size);
        self.names.iter().cloned().zip(counts.into_iter().map(|count| count as f64)).collect()
    }
}
