//! Shapes of features within a branch, and the costs of steps.

use super::steps::{Branch, Product, Step};
use crate::unit::{Cost, Elements, GroupShape, ShapeBeside};

/// Shapes within a branch, and the elements that steps have computed so far.
pub(super) struct Shapes {
    pub(super) x: GroupShape,
    skip: GroupShape,
    /// Elements of values that steps of this part have replaced.
    of_x: Elements,
    of_skip: Elements,
    /// Elements of columns of a product that is not complete, which this part has computed.
    of_columns: Elements,
    /// Elements of all columns of that product so far.
    columns: Elements,
}

impl Shapes {
    pub(super) fn of(x: GroupShape) -> Self {
        let skip = match x.beside {
            Some(ShapeBeside { skip_grid, skip_width, .. }) => {
                GroupShape { grid: skip_grid, width: skip_width, ..x }
            }
            None => x,
        };
        let nothing = Elements::default();
        let columns = x.beside.map_or(nothing, |beside| beside.columns);
        Self { x, skip, of_x: nothing, of_skip: nothing, of_columns: nothing, columns }
    }

    /// Returns the shape that a part leaves for the next one.
    pub(super) fn between_parts(&self) -> GroupShape {
        let computed = self.of_x + self.of_skip + self.of_columns;
        let beside = ShapeBeside {
            skip_grid: self.skip.grid,
            skip_width: self.skip.width,
            columns: self.columns,
            computed,
        };
        GroupShape { beside: Some(beside), ..self.x }
    }

    /// Adds columns to those that wait for the last of their product, or removes all of them with
    /// it.
    fn add_columns(&mut self, columns: Elements, is_last: bool) {
        let nothing = Elements::default();
        (self.of_columns, self.columns) =
            if is_last { (nothing, nothing) } else { (self.of_columns + columns, self.columns + columns) };
    }

    /// Returns the cost of a step, and applies it.
    pub(super) fn cost(&mut self, branch: &Branch, step: &Step) -> Cost {
        let n_columns = step.columns.len() as f64;
        match (step.product, branch.layer(step.product)) {
            (product, Some(layer)) => {
                let input = if product == Product::Shortcut { self.skip } else { self.x };
                let whole = match product {
                    Product::Shortcut => layer.cost_around(input),
                    _ => layer.cost(input),
                };
                let output = layer.output(input);
                let share = n_columns / layer.norm.width as f64;
                let columns = Elements::products(output.n_rows() as f64 * n_columns);
                let of_input = Elements { rounded_maps: whole.graph.rounded_maps, ..Elements::default() };
                let graph = match (step.is_last, share == 1.0) {
                    (true, true) => whole.graph,
                    (true, false) => whole.graph + columns,
                    (false, _) => columns + of_input,
                };
                self.add_columns(columns, step.is_last);
                match (step.is_last, product) {
                    (true, Product::Shortcut) => (self.skip, self.of_skip) = (output, output.elements()),
                    (true, _) => (self.x, self.of_x) = (output, output.elements()),
                    (false, _) => {}
                }
                Cost { flops: share * whole.flops, graph }
            }
            (product, None) => {
                let excitation = branch.excitation();
                let input = if product == Product::Squeeze { excitation.width } else { excitation.squeezed };
                let columns = Elements::wide(self.x.n_views as f64 * n_columns);
                let mut graph = columns;
                let is_scaled = product == Product::Excite && step.is_last;
                self.add_columns(columns, is_scaled);
                if is_scaled {
                    let scaled = GroupShape { is_map: true, ..self.x }.elements();
                    (graph, self.of_x) = (graph + scaled, scaled);
                }
                Cost { flops: 2.0 * input as f64 * n_columns * self.x.n_views as f64, graph }
            }
        }
    }
}
