//! Steps of a branch: columns of the output of one product each, down to a bound on the parameters
//! of a step.

use std::ops::Range;

use crate::backbone::convolution::Layer;
use crate::backbone::excitation::Excitation;
use crate::params::ParamSpec;

/// A residual branch.
pub(in crate::backbone) struct Branch {
    /// Name of the undivided unit.
    pub name: String,
    /// Layers in their order.
    pub layers: Vec<Layer>,
    /// Excitation before the last layer.
    pub excitation: Option<Excitation>,
    /// Layer on the skip connection, if input and output differ in grid or width.
    pub shortcut: Option<Layer>,
    /// Averages the cells of the output to one vector per view.
    pub pools: bool,
}

/// A product of a branch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Product {
    /// First layer of the excitation.
    Squeeze,
    /// Second layer of the excitation.
    Excite,
    /// Convolution on the skip connection.
    Shortcut,
    /// Convolution of a layer, by index.
    Layer(usize),
}

/// Columns of the output of a product.
#[derive(Debug, Clone)]
pub(super) struct ColumnStep {
    pub(super) product: Product,
    pub(super) columns: Range<usize>,
    /// Whether no column comes after these.
    pub(super) is_last: bool,
}

/// Divisor of the number of columns of a step, unless the largest power of two that divides the
/// number of columns of the product is smaller.
const MIN_COLUMNS: usize = 8;

/// Message of the panic if a step needs a module that its branch does not have.
pub(super) const NO_MODULE: &str = "a step of a module that the branch has";

impl Branch {
    pub(super) fn last(&self) -> usize {
        self.layers.len() - 1
    }

    /// Returns the products in the order in which they are computed.
    fn products(&self) -> Vec<Product> {
        let mut products: Vec<Product> = (0..self.last()).map(Product::Layer).collect();
        if self.excitation.is_some() {
            products.extend([Product::Squeeze, Product::Excite]);
        }
        if self.shortcut.is_some() {
            products.push(Product::Shortcut);
        }
        products.push(Product::Layer(self.last()));
        products
    }

    /// Returns the layer of a convolution.
    pub(super) fn layer(&self, product: Product) -> Option<&Layer> {
        match product {
            Product::Layer(index) => Some(&self.layers[index]),
            Product::Shortcut => self.shortcut.as_ref(),
            Product::Squeeze | Product::Excite => None,
        }
    }

    pub(super) fn excitation(&self) -> &Excitation {
        self.excitation.as_ref().expect(NO_MODULE)
    }

    /// Returns the parameters of a step.
    pub(super) fn params(&self, step: &ColumnStep) -> Vec<ParamSpec> {
        let columns = step.columns.clone();
        match step.product {
            Product::Squeeze => self.excitation().squeeze_params(columns),
            Product::Excite => self.excitation().excite_params(columns),
            Product::Shortcut | Product::Layer(_) => {
                let layer = self.layer(step.product).expect(NO_MODULE);
                let mut params = vec![layer.weight().rows(columns)];
                if step.is_last {
                    params.extend(layer.norm.params());
                }
                params
            }
        }
    }

    /// Returns the number of columns of the output of a product.
    fn n_columns(&self, product: Product) -> usize {
        match product {
            Product::Squeeze => self.excitation().squeezed,
            Product::Excite => self.excitation().width,
            Product::Shortcut | Product::Layer(_) => self.layer(product).expect(NO_MODULE).norm.width,
        }
    }

    pub(super) fn numel(&self, step: &ColumnStep) -> usize {
        self.params(step).iter().map(ParamSpec::numel).sum()
    }

    /// Returns all steps, each with at most `max_numel` elements of parameters where that is
    /// possible.
    pub(super) fn steps(&self, max_numel: usize) -> Vec<ColumnStep> {
        self.products().into_iter().flat_map(|product| self.product_steps(product, max_numel)).collect()
    }

    /// Returns the steps of one product.
    fn product_steps(&self, product: Product, max_numel: usize) -> Vec<ColumnStep> {
        let n_columns = self.n_columns(product);
        let n_groups = self.layer(product).map_or(1, |layer| layer.groups);
        // Columns of a group of channels are computed together, and a product of few columns would
        // be computed in another order.
        let grain = match n_groups {
            1 => (1 << n_columns.trailing_zeros()).min(MIN_COLUMNS),
            _ => n_columns / n_groups,
        };
        let full_step = ColumnStep { product, columns: 0..n_columns, is_last: true };
        let weight_numel = self.numel(&ColumnStep { is_last: false, ..full_step.clone() });
        // The last step has the parameters of the normalization, too.
        let max_weight_numel = max_numel.saturating_sub(self.numel(&full_step) - weight_numel);
        let grain_numel = weight_numel / n_columns * grain;
        let n_grains = n_columns / grain;
        let n_steps = n_grains.div_ceil((max_weight_numel / grain_numel).max(1));
        let mut steps = Vec::with_capacity(n_steps);
        for index in 0..n_steps {
            let start = index * n_grains / n_steps * grain;
            let end = (index + 1) * n_grains / n_steps * grain;
            steps.push(ColumnStep { product, columns: start..end, is_last: end == n_columns });
        }
        steps
    }
}
