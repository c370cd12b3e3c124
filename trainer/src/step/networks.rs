//! The networks of a step with their shards, and what their running parameters make of a batch.

use burn_tensor::Tensor;
use networks::leaves::Leaves;
use networks::unit::{Context, Draws};

use super::net::Net;
use super::pass::Passes;
use super::tape::Gathered;
use crate::optim::state::UnitShard;

/// The networks and the shards of their units.
#[derive(Clone, Copy)]
pub(super) struct Networks<'a> {
    pub(super) net: &'a Net,
    pub(super) shards: &'a [UnitShard],
}

/// A new value of a parameter that no gradient gives.
pub(super) struct Observation {
    /// Name of the buffer, the student's or a follower's.
    pub(super) of: &'static str,
    /// Number of the unit.
    pub(super) unit: usize,
    /// Name of the parameter.
    pub(super) param: String,
    /// Its values.
    pub(super) values: Tensor<1>,
    /// What it was when they were computed: rounded, where weights travel in fewer bits than they have.
    pub(super) before: Tensor<1>,
}

impl<'a> Networks<'a> {
    /// Unit `number` with its gathered weights.
    pub(super) fn gathered<'f>(&self, number: usize, flat: &'f Tensor<1>) -> Gathered<'a, 'f> {
        Gathered { unit: self.net.unit(number), layout: &self.shards[number].layout, flat }
    }

    /// What unit `number` makes of the totals that its stages met.
    pub(super) fn observed(
        &self,
        number: usize,
        unit: Gathered<'_, '_>,
        totals: &[Vec<Tensor<1>>],
        passes: Passes<'_>,
        of: &'static str,
    ) -> Vec<Observation> {
        let leaves = Leaves::new(unit.layout, unit.flat, false);
        let draws = Draws::default();
        let Passes { sets, compute, .. } = passes;
        let cx = Context { leaves: &leaves, draws: &draws, totals: &[], sets, compute };
        let observed = unit.unit.observe(totals, &cx).into_iter();
        let before = |param: &str| {
            // A unit observes parameters that it lists.
            let at = unit.layout.position(param).expect("a parameter of the unit");
            unit.flat.clone().slice([unit.layout.params[at].range()])
        };
        let observation = |(param, values): (String, _)| Observation {
            of,
            unit: number,
            before: before(&param),
            param,
            values,
        };
        observed.map(observation).collect()
    }
}
