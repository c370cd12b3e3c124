//! One stage of a unit forwards and backwards on one slice of a micro-batch.

use burn_tensor::{DType, Gradients, Tensor};
use kernels::ops::{add_seeds, seed};
use networks::adapter::UnitAdapters;
use networks::draws::Draws;
use networks::layout::UnitLayout;
use networks::leaves::{Leaves, ParamGrads};
use networks::tokens::Tokens;
use networks::unit::{Context, StageOutput, StatSets, Types, Unit};

use super::batch::{StreamGrads, Streams, TokenGrads};

/// Data kept from a forward pass for the backward pass.
pub(crate) enum StageRecord<'a> {
    /// Only the input: the stage runs again.
    Input(Streams),
    /// The graph from input, totals and parameters to output.
    Graph(Box<Graph<'a>>),
}

impl StageRecord<'_> {
    /// Returns the input; `None` if the graph was kept.
    pub(crate) fn input(&self) -> Option<Streams> {
        match self {
            Self::Input(input) => Some(input.clone()),
            Self::Graph(_) => None,
        }
    }
}

/// A stage's graph.
pub(crate) struct Graph<'a> {
    /// Input leaves, which track a gradient if the input needs one.
    input: Streams,
    /// Leaves of the totals.
    totals: Vec<Tensor<1>>,
    /// Leaves of the parameters.
    leaves: Leaves<'a>,
    /// Tracked output.
    output: StageOutput,
}

/// Arguments of a stage other than its input.
#[derive(Clone, Copy)]
pub(crate) struct StageArgs<'s> {
    /// Index of the stage.
    pub(crate) stage: usize,
    pub(crate) draws: &'s Draws,
    /// Totals of the previous stage.
    pub(crate) totals: &'s [Tensor<1>],
    pub(crate) sets: &'s StatSets,
    pub(crate) types: Types,
}

/// Gradients at the outputs of a stage.
pub(crate) struct OutputGrads<'g> {
    pub(crate) streams: StreamGrads,
    /// Gradients with respect to the sums: the same for all slices.
    pub(crate) sums: &'g [Tensor<1>],
}

/// Gradients at the inputs of a stage.
pub(crate) struct InputGrads {
    /// Gradient with respect to the input, if requested.
    pub(crate) streams: StreamGrads,
    /// Gradients with respect to the totals, by set.
    pub(crate) totals: Vec<Tensor<1>>,
    /// Gradients with respect to the parameters, or to the adapters of a unit that has some.
    pub(crate) params: ParamGrads,
}

/// A unit with its layout and its gathered parameters.
#[derive(Clone, Copy)]
pub(crate) struct Gathered<'a, 'f> {
    /// Computation of the unit.
    pub(crate) unit: &'a dyn Unit,
    /// Layout of the parameters in the buffer.
    pub(crate) layout: &'a UnitLayout,
    /// All parameters of the unit, `[padded]`.
    pub(crate) flat: &'f Tensor<1>,
    /// The same in bf16, if the update has written both.
    pub(crate) in_bf16: Option<&'f Tensor<1>>,
    /// Adapters, of which the backward pass computes the gradients in place of those of the
    /// parameters.
    pub(crate) adapters: Option<GatheredAdapters<'a, 'f>>,
}

/// The gathered adapters of a unit.
#[derive(Clone, Copy)]
pub(crate) struct GatheredAdapters<'a, 'f> {
    /// Layouts of adapters and base.
    pub(crate) buffers: UnitAdapters<'a>,
    /// All adapters of the unit, `[padded]`.
    pub(crate) flat: &'f Tensor<1>,
}

impl<'a> Gathered<'a, '_> {
    /// Returns the parameters for products in type `products`; with `track`, their gradients are
    /// tracked.
    fn leaves(&self, track: bool, products: DType) -> Leaves<'a> {
        let leaves = Leaves::for_products(self.layout, self.flat, track, products);
        match self.in_bf16 {
            Some(in_bf16) => leaves.with_copy(in_bf16),
            None => leaves,
        }
    }

    /// Computes the output without a graph.
    pub(crate) fn infer(&self, input: Streams, args: StageArgs<'_>) -> StageOutput {
        let leaves = self.leaves(false, args.types.products);
        self.unit.forward(args.stage, input, &context(&leaves, args, args.totals))
    }

    /// Computes the output with its graph, for [`Gathered::backward`]; with `wants_input`, the
    /// input tracks a gradient.
    pub(crate) fn forward(
        &self,
        input: Streams,
        args: StageArgs<'_>,
        wants_input: bool,
    ) -> (StageOutput, StageRecord<'a>) {
        let graph = self.graph(input, args, wants_input);
        let streams = graph.output.streams.iter().map(|tokens| tokens.map(|x| x.clone().inner())).collect();
        let sums = graph.output.sums.iter().map(|sum| sum.clone().inner()).collect();
        (StageOutput { streams, sums }, StageRecord::Graph(Box::new(graph)))
    }

    /// Computes the vector-Jacobian product: gradients at the stage's inputs, from those at its
    /// outputs.
    pub(crate) fn backward(
        &self,
        record: StageRecord<'a>,
        grads: OutputGrads<'_>,
        args: StageArgs<'_>,
        wants_input: bool,
    ) -> InputGrads {
        let Graph { input, totals, leaves, output } = match record {
            StageRecord::Input(input) => self.graph(input, args, wants_input),
            StageRecord::Graph(graph) => *graph,
        };
        let mut start = None;
        for (tokens, grad) in output.streams.into_iter().zip(grads.streams) {
            start = add_seed(start, seed_in_dtype(&tokens.x, grad.x));
            for (x, grad) in tokens.intermediates().zip(grad.intermediates) {
                start = add_seed(start, seed_in_dtype(x, grad));
            }
        }
        for (sum, grad) in output.sums.into_iter().zip(grads.sums) {
            start = add_seed(start, seed(sum, grad.clone()));
        }
        // A multi-crop without views was refused with the recipe.
        let mut grads = start.expect("a unit has at least one stream").backward();
        let mut streams = StreamGrads::new();
        if wants_input {
            for tokens in &input {
                let x = take_gradient(&tokens.x, &mut grads);
                let intermediates = tokens.intermediates().map(|x| take_gradient(x, &mut grads)).collect();
                streams.push(TokenGrads { x, intermediates });
            }
        }
        let totals = totals.iter().map(|total| take_gradient(total, &mut grads)).collect();
        let mut params = leaves.gradients(&mut grads);
        if let Some(GatheredAdapters { buffers, flat }) = self.adapters {
            // By slice: the sums over slices, micro-batches and ranks are those of the adapters.
            params = buffers.gradients(flat, params);
        }
        InputGrads { streams, totals, params }
    }

    /// Builds the graph of the stage; with `wants_input`, the input tracks a gradient.
    fn graph(&self, input: Streams, args: StageArgs<'_>, wants_input: bool) -> Graph<'a> {
        let mut input_leaves = Streams::with_capacity(input.len());
        for tokens in &input {
            input_leaves.push(tokens.map(|x| {
                let x = x.clone().autodiff();
                if wants_input { x.require_grad() } else { x }
            }));
        }
        let totals: Vec<Tensor<1>> =
            args.totals.iter().map(|total| total.clone().autodiff().require_grad()).collect();
        let leaves = self.leaves(true, args.types.products);
        let output = self.unit.forward(args.stage, input_leaves.clone(), &context(&leaves, args, &totals));
        Graph { input: input_leaves, totals, leaves, output }
    }
}

/// Adds `seed` to the start of a backward pass.
fn add_seed(start: Option<Tensor<1>>, seed: Tensor<1>) -> Option<Tensor<1>> {
    match start {
        Some(sum) => Some(add_seeds(sum, seed)),
        None => Some(seed),
    }
}

/// Computes [`seed`] with the gradient cast to the type of `x`.
fn seed_in_dtype(x: &Tensor<2>, grad: Tensor<2>) -> Tensor<1> {
    let dtype = x.dtype();
    seed(x.clone(), grad.cast(dtype))
}

/// Removes the gradient of the leaf `x` from `grads` and returns it; zeros if there is none.
pub(super) fn take_gradient<const D: usize>(x: &Tensor<D>, grads: &mut Gradients) -> Tensor<D> {
    x.grad_remove(grads).unwrap_or_else(|| x.clone().inner().zeros_like())
}

/// Returns `streams` as leaves of autodiff's graph that track a gradient.
pub(super) fn tracked_leaves(streams: &[Tokens]) -> Streams {
    streams.iter().map(|tokens| tokens.map(|x| x.clone().autodiff().require_grad())).collect()
}

fn context<'c>(leaves: &'c Leaves<'c>, args: StageArgs<'c>, totals: &'c [Tensor<1>]) -> Context<'c> {
    Context { leaves, draws: args.draws, totals, sets: args.sets, types: args.types }
}
