//! The order of a step on a rank: which weights arrive, what is computed, which gradients leave.
//!
//! ```text
//! networks without gradients   gather u → infer u, for each unit;  gather all heads → infer heads
//! the trained network          gather u → forward u, for each unit;  gather all heads → loss → reduce all heads
//! each segment, from the last  gather u → repeat u, for each unit but its last;
//!                              gather u → backward u → reduce u, from its last unit to its first
//! ```
//!
//! Units at the beginning of the trained backbone that are never trained run forward, and have no
//! part in the rest. Others whose parameters are fixed run backward for the units before them, and
//! have no gradient to reduce.
//!
//! The step runs these events one after another ([`super::execution`]), and estimates follow them
//! ([`crate::estimate`]): a change of the order is a change of both. Weights that a unit keeps from
//! its forward to its backward pass are gathered once. A gather is submitted while the unit before
//! it computes, and a reduction while the next one does ([`ranks::in_flight`]).

use ranks::topology::Sharding;

use super::segments::Segments;

/// A network of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepNetwork {
    /// Network without gradients, by its index among those that see views.
    Other(usize),
    /// The trained network.
    Trained,
}

/// One part of a step. Units are numbered within their network: those of the backbone, then those
/// of the heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// The weights of a unit arrive. They are released after the computation that follows, unless
    /// the unit keeps them.
    Gather { network: StepNetwork, unit: usize, is_kept: bool },
    /// A unit of the backbone of a network without gradients runs.
    Infer { network: usize, unit: usize },
    /// The heads of a network without gradients run.
    InferHeads { network: usize },
    /// A unit of the trained backbone runs forward.
    Forward { unit: usize, retention: Retention },
    /// The heads of the trained network and the loss run forward and backward.
    Loss,
    /// A unit without graph runs forward again, because later units of its segment need its output.
    Repeat { unit: usize },
    /// A unit of the trained backbone runs backward, and forward before that if it kept no graph.
    Backward { unit: usize, recomputes: bool },
    /// The gradient of a unit of the trained network is ready to be sent.
    Reduce { unit: usize },
}

/// What a unit of the trained backbone keeps of its forward pass for its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activations {
    /// Its graph.
    Graph,
    /// Its input, from which it runs again.
    Input,
    /// Nothing: the previous units of its segment run again first, or the unit is never trained.
    Nothing,
}

/// Data that a unit of the trained backbone keeps from its forward to its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Retention {
    /// What it keeps of its forward pass.
    pub(crate) activations: Activations,
    /// Whether it keeps its gathered weights.
    pub(crate) weights: bool,
}

/// Numbers of units of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NetworkUnits {
    /// Number of units of the backbone.
    pub(crate) n_backbone: usize,
    /// Number of units of the heads.
    pub(crate) n_heads: usize,
}

/// The events of a step, by phase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Schedule {
    /// Networks without gradients.
    pub(crate) targets: Vec<Event>,
    /// Forward pass of the trained backbone.
    pub(crate) forward: Vec<Event>,
    /// Heads of the trained network, and the loss.
    pub(crate) head: Vec<Event>,
    /// Backward pass of the trained backbone.
    pub(crate) backward: Vec<Event>,
}

impl Schedule {
    /// Creates the schedule of a step with the networks `others`, which see views and have no
    /// gradients, and with `trained`, whose units without graph and without training are those of
    /// `segments`.
    pub(crate) fn new(
        others: &[NetworkUnits],
        trained: NetworkUnits,
        segments: Segments,
        sharding: Sharding,
    ) -> Self {
        let mut targets = Vec::new();
        for (network, units) in others.iter().enumerate() {
            for unit in 0..units.n_backbone {
                targets.push(Event::Gather { network: StepNetwork::Other(network), unit, is_kept: false });
                targets.push(Event::Infer { network, unit });
            }
            push_head_gathers(&mut targets, StepNetwork::Other(network), *units);
            targets.push(Event::InferHeads { network });
        }
        let mut forward = Vec::new();
        for unit in 0..trained.n_backbone {
            let retention = retention(unit, segments, sharding);
            forward.push(Event::Gather { network: StepNetwork::Trained, unit, is_kept: retention.weights });
            forward.push(Event::Forward { unit, retention });
        }
        let mut head = Vec::new();
        push_head_gathers(&mut head, StepNetwork::Trained, trained);
        head.push(Event::Loss);
        for unit in trained.head_units() {
            head.push(Event::Reduce { unit });
        }
        let mut backward = Vec::new();
        for unit in (segments.n_units..trained.n_backbone).rev() {
            backward.push(Event::Backward { unit, recomputes: false });
            backward.push(Event::Reduce { unit });
        }
        for range in segments.ranges().rev() {
            for unit in range.start..range.end - 1 {
                push_repeated_gather(&mut backward, unit, segments, sharding);
                backward.push(Event::Repeat { unit });
            }
            for unit in range.rev() {
                push_repeated_gather(&mut backward, unit, segments, sharding);
                backward.push(Event::Backward { unit, recomputes: true });
                backward.push(Event::Reduce { unit });
            }
        }
        Self { targets, forward, head, backward }
    }

    /// Removes the reductions of the units `fixed` of the trained backbone, whose parameters never
    /// change.
    pub(crate) fn without_gradients(mut self, fixed: &[usize]) -> Self {
        self.backward.retain(|event| match event {
            Event::Reduce { unit } => !fixed.contains(unit),
            _ => true,
        });
        self
    }

    /// Returns all events of the step, in order.
    pub(crate) fn events(&self) -> impl Iterator<Item = Event> {
        let phases = [&self.targets, &self.forward, &self.head, &self.backward];
        phases.into_iter().flatten().copied()
    }
}

impl NetworkUnits {
    /// Returns the indices of the units of the heads.
    fn head_units(self) -> std::ops::Range<usize> {
        self.n_backbone..self.n_backbone + self.n_heads
    }
}

/// Adds the gathers of all units of a network's heads.
fn push_head_gathers(events: &mut Vec<Event>, network: StepNetwork, units: NetworkUnits) {
    for unit in units.head_units() {
        events.push(Event::Gather { network, unit, is_kept: false });
    }
}

/// Adds the gather of a unit that runs again, unless it has kept its weights.
fn push_repeated_gather(events: &mut Vec<Event>, unit: usize, segments: Segments, sharding: Sharding) {
    if !retention(unit, segments, sharding).weights {
        events.push(Event::Gather { network: StepNetwork::Trained, unit, is_kept: false });
    }
}

/// Returns what unit `unit` of the trained backbone keeps.
fn retention(unit: usize, segments: Segments, sharding: Sharding) -> Retention {
    let activations = if unit >= segments.n_units {
        Activations::Graph
    } else if segments.keeps_input(unit) {
        Activations::Input
    } else {
        Activations::Nothing
    };
    let keeps_graph = activations == Activations::Graph;
    let weights = keeps_graph || (sharding == Sharding::Grad && segments.is_trained(unit));
    Retention { activations, weights }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNITS: NetworkUnits = NetworkUnits { n_backbone: 3, n_heads: 2 };

    fn gathers(schedule: &Schedule) -> Vec<(StepNetwork, usize)> {
        let mut units = Vec::new();
        for event in schedule.events() {
            if let Event::Gather { network, unit, .. } = event {
                units.push((network, unit));
            }
        }
        units
    }

    #[test]
    fn weights_without_graph_are_gathered_twice() {
        let schedule = Schedule::new(&[UNITS], UNITS, Segments::new(3, 1, 1), Sharding::Full);
        let other: Vec<_> = (0..5).map(|unit| (StepNetwork::Other(0), unit)).collect();
        let trained = [0, 1, 2, 3, 4, 1, 0].map(|unit| (StepNetwork::Trained, unit));
        assert_eq!(gathers(&schedule), [&other[..], &trained].concat());
        let schedule = Schedule::new(&[], UNITS, Segments::new(3, 1, 1), Sharding::Grad);
        assert_eq!(gathers(&schedule), [0, 1, 2, 3, 4].map(|unit| (StepNetwork::Trained, unit)));
    }

    #[test]
    fn segments_run_again_before_their_gradients() {
        let units = NetworkUnits { n_backbone: 4, n_heads: 0 };
        let schedule = Schedule::new(&[], units, Segments::new(4, 1, 2), Sharding::Grad);
        let backward = |unit, recomputes| [Event::Backward { unit, recomputes }, Event::Reduce { unit }];
        let expected = [
            &backward(3, false)[..],
            &backward(2, true),
            &[Event::Repeat { unit: 0 }],
            &backward(1, true),
            &backward(0, true),
        ];
        assert_eq!(schedule.backward, expected.concat());
    }

    #[test]
    fn every_unit_of_the_trained_network_has_one_gradient() {
        let schedule = Schedule::new(&[UNITS], UNITS, Segments::new(3, 0, 2), Sharding::Full);
        let mut reduced = Vec::new();
        for event in schedule.events() {
            if let Event::Reduce { unit } = event {
                reduced.push(unit);
            }
        }
        reduced.sort_unstable();
        assert_eq!(reduced, [0, 1, 2, 3, 4]);
    }

    /// Units that are never trained are gathered once, keep nothing, and send no gradient.
    #[test]
    fn fixed_units_only_run_forward() {
        let units = NetworkUnits { n_backbone: 5, n_heads: 1 };
        for sharding in [Sharding::Full, Sharding::Grad] {
            let segments = Segments::new(5, 1, 2).after_fixed(2);
            let schedule = Schedule::new(&[], units, segments, sharding);
            let nothing = Retention { activations: Activations::Nothing, weights: false };
            for unit in 0..2 {
                assert!(schedule.forward.contains(&Event::Forward { unit, retention: nothing }));
            }
            let mut seen = Vec::new();
            for event in &schedule.backward {
                match *event {
                    Event::Repeat { unit } | Event::Backward { unit, .. } => seen.push(unit),
                    Event::Reduce { .. } | Event::Gather { .. } => {}
                    _ => panic!("{event:?} in the backward pass"),
                }
            }
            assert_eq!(seen, [4, 2, 3, 2]);
            assert_eq!(gathers(&schedule).iter().filter(|(_, unit)| *unit < 2).count(), 2);
        }
        let linear = Segments::new(5, 5, 1).after_fixed(5);
        assert!(Schedule::new(&[], units, linear, Sharding::Full).backward.is_empty());
    }
    /// A unit whose parameters are fixed passes gradients on, and sends none.
    #[test]
    fn fixed_units_between_others_send_no_gradient() {
        let units = NetworkUnits { n_backbone: 4, n_heads: 1 };
        let segments = Segments::new(4, 2, 1).after_fixed(1);
        let schedule = Schedule::new(&[], units, segments, Sharding::Full).without_gradients(&[0, 3]);
        let mut passed = Vec::new();
        let mut reduced = Vec::new();
        for event in schedule.events() {
            match event {
                Event::Backward { unit, .. } => passed.push(unit),
                Event::Reduce { unit } => reduced.push(unit),
                _ => {}
            }
        }
        assert_eq!((passed, reduced), (vec![3, 2, 1], vec![4, 2, 1]));
    }
}
