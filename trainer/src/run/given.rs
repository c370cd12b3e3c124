//! How many images each source of a mix has given.

use pipeline::{Dataset, Order};

use crate::recipe::plan::Plan;

/// Counts of the images that sources give.
#[derive(Debug)]
pub(super) struct Given {
    names: Vec<String>,
    order: Order,
    batch_size: u64,
}

impl Given {
    /// Creates the counts for the sources of `dataset`; there are none if it is not a mix.
    pub(super) fn of(dataset: &Dataset, plan: &Plan) -> Self {
        let names = dataset.sampling().sources.iter().map(|source| format!("data/{}", source.name)).collect();
        let recipe = &plan.recipe;
        let order = Order::of(dataset, recipe.seed, recipe.data.window_shards);
        Self { names, order, batch_size: recipe.optim.batch_size as u64 }
    }

    /// Returns the number of images that each source has given in the first `n_steps` steps.
    pub(super) fn at(&self, n_steps: u64) -> Vec<(String, f64)> {
        if self.names.is_empty() {
            return Vec::new();
        }
        let counts = self.order.n_given(n_steps * self.batch_size);
        self.names.iter().cloned().zip(counts.into_iter().map(|count| count as f64)).collect()
    }
}
