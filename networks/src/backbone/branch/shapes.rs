//! Shapes of features within a branch, and the costs of steps.

use super::steps::{Branch, ColumnStep, Product};
use crate::backbone::convolution::Layer;
use crate::backbone::excitation::Excitation;
use crate::unit::{Cost, Elements, GroupShape, Intermediates};

/// Shapes within a branch, and the elements that steps have computed so far.
pub(super) struct Shapes {
    pub(super) x: GroupShape,
    skip: GroupShape,
    /// Elements of values that steps of this part have computed; zero if they are still those of
    /// the input.
    computed_x: Elements,
    /// Elements of the skip connection that steps of this part have computed.
    computed_skip: Elements,
    /// Elements of columns of an incomplete product that this part has computed.
    computed_columns: Elements,
    /// Elements of all columns of an incomplete product so far.
    columns: Elements,
}

impl Shapes {
    pub(super) fn new(x: GroupShape) -> Self {
        let mut skip = x;
        let mut columns = Elements::default();
        if let Some(intermediates) = x.intermediates {
            skip.grid = intermediates.skip_grid;
            skip.width = intermediates.skip_width;
            columns = intermediates.columns;
        }
        Self {
            x,
            skip,
            computed_x: Elements::default(),
            computed_skip: Elements::default(),
            computed_columns: Elements::default(),
            columns,
        }
    }

    /// Returns the shape that a part passes to the next one.
    pub(super) fn between_parts(&self) -> GroupShape {
        let intermediates = Intermediates {
            skip_grid: self.skip.grid,
            skip_width: self.skip.width,
            columns: self.columns,
            computed: self.computed_x + self.computed_skip + self.computed_columns,
        };
        GroupShape { intermediates: Some(intermediates), ..self.x }
    }

    /// Adds columns to those of the incomplete product, or removes all of them if these complete
    /// it.
    fn add_columns(&mut self, columns: Elements, is_last: bool) {
        if is_last {
            self.computed_columns = Elements::default();
            self.columns = Elements::default();
        } else {
            self.computed_columns = self.computed_columns + columns;
            self.columns = self.columns + columns;
        }
    }

    /// Advances the shapes past `step` and returns its cost.
    pub(super) fn apply_step(&mut self, branch: &Branch, step: &ColumnStep) -> Cost {
        match branch.layer(step.product) {
            Some(layer) => self.apply_layer_step(layer, step),
            None => self.apply_excitation_step(branch.excitation(), step),
        }
    }

    /// Advances the shapes past a step of a convolution and returns its cost.
    fn apply_layer_step(&mut self, layer: &Layer, step: &ColumnStep) -> Cost {
        let is_shortcut = step.product == Product::Shortcut;
        let input = if is_shortcut { self.skip } else { self.x };
        let output = layer.output(input);
        let full = if is_shortcut { layer.shortcut_cost(input) } else { layer.cost(input) };
        let n_columns = step.columns.len() as f64;
        let share = n_columns / layer.norm.width as f64;
        let columns = Elements::products(output.n_rows() as f64 * n_columns);
        let graph = if !step.is_last {
            columns + Elements { rounded_maps: full.graph.rounded_maps, ..Elements::default() }
        } else if share == 1.0 {
            full.graph
        } else {
            full.graph + columns
        };
        self.add_columns(columns, step.is_last);
        if step.is_last && is_shortcut {
            self.skip = output;
            self.computed_skip = output.elements();
        } else if step.is_last {
            self.x = output;
            self.computed_x = output.elements();
        }
        Cost::new(share * full.flops, graph)
    }

    /// Advances the shapes past a step of the excitation and returns its cost.
    fn apply_excitation_step(&mut self, excitation: &Excitation, step: &ColumnStep) -> Cost {
        let is_squeeze = step.product == Product::Squeeze;
        let input = if is_squeeze { excitation.width } else { excitation.squeezed };
        let n_columns = step.columns.len() as f64;
        let columns = Elements::wide(self.x.n_views as f64 * n_columns);
        let mut graph = columns;
        let is_scaled = step.product == Product::Excite && step.is_last;
        self.add_columns(columns, is_scaled);
        if is_scaled {
            let scaled = GroupShape { is_map: true, ..self.x }.elements();
            graph = graph + scaled;
            self.computed_x = scaled;
        }
        Cost::new(2.0 * input as f64 * n_columns * self.x.n_views as f64, graph)
    }
}
