//! One unit forwards and backwards on one slice of the batch.

use burn_tensor::Tensor;

use crate::model::features::Tokens;
use crate::model::layout::UnitLayout;
use crate::model::leaves::Leaves;
use crate::model::unit::{Draws, Unit};

/// What is left of a unit's forward pass for its backward pass.
pub enum Kept<'a> {
    /// The input alone; the unit runs again.
    Input(Vec<Tokens>),
    /// The graph from input and parameters to output.
    Graph {
        /// Leaves that want a gradient.
        input: Vec<Tokens>,
        /// The parameters.
        leaves: Leaves<'a>,
        /// Tracked outputs.
        output: Vec<Tokens>,
    },
}

/// A unit with its layout and its gathered parameters.
#[derive(Clone, Copy)]
pub struct Gathered<'a, 'f> {
    /// The computation.
    pub unit: &'a dyn Unit,
    /// Where its parameters sit.
    pub layout: &'a UnitLayout,
    /// All of its parameters, `[padded]`.
    pub flat: &'f Tensor<1>,
}

impl<'a> Gathered<'a, '_> {
    /// Output without a graph.
    pub fn infer(&self, input: Vec<Tokens>, draws: &Draws) -> Vec<Tokens> {
        self.unit.forward(&Leaves::new(self.layout, self.flat, false), input, draws)
    }

    /// Output, and what [`Gathered::backward`] needs: with `keep` the graph, else the input.
    pub fn forward(
        &self,
        input: Vec<Tokens>,
        draws: &Draws,
        keep: bool,
        wants_input: bool,
    ) -> (Vec<Tokens>, Kept<'a>) {
        if !keep {
            return (self.infer(input.clone(), draws), Kept::Input(input));
        }
        let kept = self.graph(input, draws, wants_input);
        let Kept::Graph { output, .. } = &kept else { unreachable!("graph() keeps a graph") };
        let plain = output.iter().map(|tokens| tokens.with(tokens.x.clone().inner())).collect();
        (plain, kept)
    }

    /// The vector-Jacobian product: gradients of the input, if wanted, and of the flat buffer,
    /// given those of the output.
    pub fn backward(
        &self,
        kept: Kept<'a>,
        grad_output: Vec<Tensor<3>>,
        draws: &Draws,
        wants_input: bool,
    ) -> (Vec<Tensor<3>>, Tensor<1>) {
        let kept = match kept {
            Kept::Input(input) => self.graph(input, draws, wants_input),
            graph => graph,
        };
        let Kept::Graph { input, leaves, output } = kept else { unreachable!("graph() keeps a graph") };
        // Backward starts from ones: the sum of y · g has g as the gradient of y.
        let seed = output
            .into_iter()
            .zip(grad_output)
            .map(|(tokens, grad)| {
                let grad = grad.cast(tokens.x.dtype());
                // A sum of many numbers in bf16 would be its own rounding; only its gradient counts.
                (tokens.x * grad.autodiff()).sum()
            })
            .reduce(|total, term| total + term)
            .expect("a unit has at least one group of tokens");
        let mut grads = seed.backward();
        let grad_input = match wants_input {
            true => input
                .iter()
                .map(|tokens| tokens.x.grad_remove(&mut grads).expect("the input is a leaf of the graph"))
                .collect(),
            false => Vec::new(),
        };
        (grad_input, leaves.gradient(&mut grads))
    }

    fn graph(&self, input: Vec<Tokens>, draws: &Draws, wants_input: bool) -> Kept<'a> {
        let leaf = |tokens: Tokens| {
            let x = tokens.x.clone().autodiff();
            tokens.with(if wants_input { x.require_grad() } else { x })
        };
        let input: Vec<Tokens> = input.into_iter().map(leaf).collect();
        let leaves = Leaves::new(self.layout, self.flat, true);
        let output = self.unit.forward(&leaves, input.clone(), draws);
        Kept::Graph { input, leaves, output }
    }
}
