//! The networks of a step: the units of each in one list, backbone first, then the heads.

use std::collections::BTreeMap;

use burn_tensor::Tensor;
use networks::backbone::ModelConfig;
use networks::divided::divided;
use networks::head::{Head, staged_units};
use networks::layout::UnitLayout;
use networks::patches::PixelInput;
use networks::unit::Unit;

use super::state::NetworkState;
use crate::method::network::{Backbone, NetworkSpec, SeenViews, UpdateRule};
use crate::optim::follow::{Follower, follow};
use crate::optim::{Clip, Optimizer};
use crate::schedule::ScheduledValues;

/// All networks of a step.
pub(crate) struct Nets {
    /// Networks in the order of their shards.
    pub(crate) list: Vec<Net>,
    /// Number of the trained network.
    pub(crate) trained: usize,
    /// Pixel inputs of the networks, each different one once.
    pub(crate) inputs: Vec<PixelInput>,
}

/// Division of units.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Division {
    /// Largest number of elements of a backbone unit's parameters that is not divided; absent to
    /// divide none.
    pub(crate) max_numel: Option<usize>,
    /// Number of parts of the columns of divided heads.
    pub(crate) n_column_parts: usize,
}

/// A network.
pub(crate) struct Net {
    /// Name of the network.
    pub(crate) name: &'static str,
    /// Rule by which the weights change.
    pub(crate) update_rule: UpdateRule,
    /// Views that the network sees.
    pub(crate) sees: Vec<SeenViews>,
    /// Number of the network's pixel input in [`Nets::inputs`].
    pub(crate) input: usize,
    /// Whether the backbone is the recipe's.
    pub(crate) is_of_recipe: bool,
    /// Units of the backbone, of which large ones are divided.
    pub(crate) backbone: Vec<Box<dyn Unit>>,
    /// Number of the undivided unit of each.
    pub(crate) undivided: Vec<usize>,
    heads: Vec<Head>,
    /// Units of each head that go through the passes of a step.
    n_staged: Vec<usize>,
    /// Parts of the last units of divided heads that a rank computes, by number of the unit.
    parts: BTreeMap<usize, ColumnPart>,
    /// Number of parts into which the columns of a divided head fall.
    n_column_parts: usize,
}

/// The part of a unit that a rank computes.
pub(crate) struct ColumnPart {
    pub(crate) unit: Box<dyn Unit>,
    /// Layout of the part's buffer.
    pub(crate) layout: UnitLayout,
}

/// A unit of a network, and the module that it belongs to.
#[derive(Clone, Copy)]
pub(crate) struct Listed<'a> {
    pub(crate) unit: &'a dyn Unit,
    /// Number of its module: the backbone is 0, heads follow.
    pub(crate) module: usize,
}

/// A head, and the place of its units in the list of its network.
#[derive(Clone, Copy)]
pub(crate) struct Placed<'a> {
    pub(crate) head: &'a Head,
    /// Number of its first unit.
    first: usize,
    n_staged: usize,
    is_divided: bool,
}

impl Placed<'_> {
    /// Whether ranks compute different columns of the last unit's output.
    pub(crate) fn is_divided(&self) -> bool {
        self.is_divided
    }

    /// Whether some of the units go through the passes of a step, or only the columns of the last
    /// one are left for the graph.
    pub(crate) fn has_passes(&self) -> bool {
        self.is_divided || !self.staged().is_empty()
    }

    /// Numbers of the units that go through the passes of a step.
    pub(crate) fn staged(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.n_staged
    }

    /// Numbers of the units in the graph of the loss.
    pub(crate) fn in_graph(&self) -> std::ops::Range<usize> {
        self.staged().end..self.first + self.head.units.len()
    }
}

impl Nets {
    /// Creates the networks of `specs`, which were checked; `model` and `input` are the recipe's.
    pub(crate) fn new(
        specs: Vec<NetworkSpec>,
        model: &ModelConfig,
        input: PixelInput,
        division: Division,
    ) -> Self {
        let mut inputs = Vec::new();
        let list: Vec<Net> = specs
            .into_iter()
            .map(|spec| {
                let own = spec.input(input.clone());
                let number = inputs.iter().position(|known| *known == own).unwrap_or(inputs.len());
                if number == inputs.len() {
                    inputs.push(own);
                }
                Net::new(spec, model, number, division)
            })
            .collect();
        let trained = list.iter().position(|net| net.update_rule == UpdateRule::Gradient);
        // Every method's list was checked with the plan.
        let trained = trained.expect("a network that moves by gradient");
        Self { list, trained, inputs }
    }

    /// The trained network.
    pub(crate) fn trained(&self) -> &Net {
        &self.list[self.trained]
    }

    /// The other networks, with their numbers.
    pub(crate) fn others(&self) -> impl Iterator<Item = (usize, &Net)> {
        self.list.iter().enumerate().filter(|(number, _)| *number != self.trained)
    }

    /// Numbers of the other networks that see views.
    pub(crate) fn seeing(&self) -> impl Iterator<Item = usize> {
        self.others().filter(|(_, net)| !net.sees.is_empty()).map(|(number, _)| number)
    }

    /// Returns whether a device that leaves out an update leaves out all of it: at most one network
    /// follows the trained one, as an average, and none follows another.
    pub(super) fn may_leave_out(&self, next_step: u64) -> bool {
        let trained = self.trained().name;
        let moving: Vec<(&str, f64)> = self
            .list
            .iter()
            .filter_map(|net| net.update_rule.source_and_decay(next_step))
            .filter(|(_, decay)| *decay != 1.0)
            .collect();
        match moving.as_slice() {
            [] => true,
            [(of, decay)] => *of == trained && *decay > 0.0,
            _ => false,
        }
    }

    /// Updates the trained network, its followers, and then the followers of these, in their order.
    pub(super) fn update(
        &self,
        networks: &mut [NetworkState],
        optimizer: &Optimizer,
        grads: Vec<Tensor<1>>,
        clip: Clip<'_>,
        scheduled_values: &ScheduledValues,
    ) {
        let number = self.trained;
        let next_step = scheduled_values.step + 1;
        let trained = self.trained().name;
        let follows = |other: usize| self.list[other].update_rule.source_and_decay(next_step);
        let mut shards = std::mem::take(&mut networks[number].shards);
        let mut direct: Vec<Vec<Follower<'_>>> = shards.iter().map(|_| Vec::new()).collect();
        for (other, network) in networks.iter_mut().enumerate() {
            // One whose old weights stay whole does not move.
            let Some((_, decay)) = follows(other).filter(|(of, decay)| *of == trained && *decay != 1.0)
            else {
                continue;
            };
            for shard in &mut network.shards {
                let unit = shards.iter().position(|leader| leader.layout.name == shard.layout.name);
                // A follower's units are a subset of those of the network that it follows: the list
                // was checked.
                let unit = unit.expect("a unit of the network that is followed");
                let is_rounded = shard.is_rounded;
                direct[unit].push(Follower { weights: &mut shard.weights, decay, is_rounded });
            }
        }
        optimizer.step(&mut shards, grads, clip, scheduled_values, direct);
        networks[number].shards = shards;
        for other in 0..self.list.len() {
            let Some((of, decay)) = follows(other).filter(|(of, _)| *of != trained) else { continue };
            let Some(leader) = self.position(of) else { continue };
            let leaders = networks[leader].shards.clone();
            for shard in &mut networks[other].shards {
                let leader = leaders.iter().find(|leader| leader.layout.name == shard.layout.name);
                leader.into_iter().for_each(|leader| {
                    let is_rounded = shard.is_rounded;
                    follow(Follower { weights: &mut shard.weights, decay, is_rounded }, &leader.weights);
                });
            }
        }
    }

    /// Number of the network `name`.
    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        self.list.iter().position(|net| net.name == name)
    }
}

impl Net {
    fn new(spec: NetworkSpec, model: &ModelConfig, input: usize, division: Division) -> Self {
        let n_parts = division.n_column_parts;
        let divided = divided(spec.units(model), division.max_numel).into_iter();
        let (backbone, undivided): (Vec<_>, Vec<_>) = divided.map(|part| (part.unit, part.number)).unzip();
        let is_of_recipe = spec.backbone == Backbone::Recipe;
        let NetworkSpec { name, heads, sees, update_rule, .. } = spec;
        let is_divided = |head: &Head| head.may_divide && n_parts > 1;
        let n_staged = staged_units(&heads, n_parts);
        let mut last = backbone.len();
        let mut parts = BTreeMap::new();
        for head in &heads {
            last += head.units.len();
            if is_divided(head) {
                let part = head.units.last().and_then(|unit| unit.column_part(n_parts));
                // The plan was checked with the method's heads.
                let unit = part.expect("a unit whose columns can be divided");
                let layout = unit.layout(1);
                parts.insert(last - 1, ColumnPart { unit, layout });
            }
        }
        Self {
            name,
            update_rule,
            sees,
            input,
            is_of_recipe,
            backbone,
            undivided,
            heads,
            n_staged,
            parts,
            n_column_parts: n_parts,
        }
    }

    /// The part of unit `number` that a rank computes; `None` if it computes all of it.
    pub(crate) fn part(&self, number: usize) -> Option<&ColumnPart> {
        self.parts.get(&number)
    }

    /// Returns the layouts of the buffers of all units, over shard groups of `group_size` ranks.
    pub(crate) fn layouts(&self, group_size: usize) -> impl Iterator<Item = UnitLayout> {
        self.units().enumerate().map(move |(number, listed)| match self.part(number) {
            Some(_) => listed.unit.layout_by_columns(self.n_column_parts, group_size),
            None => listed.unit.layout(group_size),
        })
    }

    /// Whether some heads are divided.
    pub(crate) fn has_parts(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Numbers of the view sizes that the network sees.
    pub(crate) fn sizes(&self) -> Vec<usize> {
        self.sees.iter().map(|sight| sight.size).collect()
    }

    /// All units, in the order of the shards.
    pub(crate) fn units(&self) -> impl Iterator<Item = Listed<'_>> {
        let backbone = self.backbone.iter().map(|unit| (unit, 0));
        let heads = self.heads.iter().enumerate();
        let heads = heads.flat_map(|(i, head)| head.units.iter().map(move |unit| (unit, i + 1)));
        backbone.chain(heads).map(|(unit, module)| Listed { unit: unit.as_ref(), module })
    }

    /// Unit `number` of the list.
    pub(crate) fn unit(&self, number: usize) -> &dyn Unit {
        self.units().nth(number).expect("numbers come from the list").unit
    }

    /// Returns whether unit `number` belongs to the backbone.
    pub(crate) fn is_backbone(&self, number: usize) -> bool {
        number < self.backbone.len()
    }

    /// The heads with the places of their units.
    pub(crate) fn heads(&self) -> impl Iterator<Item = Placed<'_>> {
        let with_staged = self.heads.iter().zip(&self.n_staged);
        with_staged.scan(self.backbone.len(), |next, (head, n_staged)| {
            let first = *next;
            *next += head.units.len();
            let last = first + head.units.len();
            let is_divided = head.may_divide && self.parts.contains_key(&(last - 1));
            Some(Placed { head, first, n_staged: *n_staged, is_divided })
        })
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::Device;
    use kernels::device::host::to_host;
    use networks::head::Reads;
    use networks::head::projection::{Normalizes, Projection};
    use networks::patches::Pixels;
    use ranks::fixed::FixedPoint;
    use ranks::topology::Topology;
    use ranks::wire::Wire;

    use super::*;
    use crate::optim::state::UnitShard;
    use crate::optim::{ClipRule, Rule, Sgd};
    use crate::step::precision::Precision;
    use crate::step::sharded::Observation;

    fn head(name: &'static str, reads: Reads, normalizes: &[Normalizes]) -> Head {
        let unit = |(i, normalizes): (usize, &Normalizes)| {
            let widths = vec![6, 6, 6];
            let unit =
                Projection { name: format!("{name}.{i}"), widths, normalizes: *normalizes, has_biases: true };
            Box::new(unit) as Box<dyn Unit>
        };
        Head::new(name, reads, normalizes.iter().enumerate().map(unit).collect())
    }

    fn nets(specs: Vec<NetworkSpec>) -> Nets {
        let model = ModelConfig::examples().remove(0);
        let input = PixelInput { cell_px: model.cell_px(), pixels: Pixels::default() };
        Nets::new(specs, &model, input, Division { max_numel: None, n_column_parts: 1 })
    }

    fn sgd() -> Optimizer {
        let rule = Rule::Sgd(Sgd { momentum: 0.9, nesterov: false, adaptation: None });
        Optimizer { rule, clip_norm: 0.0, clip: ClipRule::PerTensor, decays_vectors: false }
    }

    /// Creates the networks with different weights, on one rank.
    fn states(nets: &Nets, optimizer: &Optimizer) -> Vec<NetworkState> {
        let mut states = Vec::new();
        for (seed, net) in nets.list.iter().enumerate() {
            let mut shards = Vec::new();
            for layout in net.layouts(1) {
                let moments = optimizer.moments();
                let topology = Topology::SINGLE_RANK;
                shards.push(UnitShard::laid_out(layout, seed as u64, topology, moments, &Device::flex()));
            }
            let n_backbone = net.backbone.len();
            states.push(NetworkState { name: net.name, is_frozen: false, copies: None, n_backbone, shards });
        }
        states
    }

    /// What the device leaves out, the host takes back: weights are bit for bit those of before.
    #[test]
    fn observations_are_taken_back() {
        let nets = nets(vec![NetworkSpec::trained("a", Vec::new(), 1)]);
        let mut networks = states(&nets, &sgd());
        let precision = Precision { gather: Wire::Bf16, ..Precision::default() };
        let unit = 1;
        let shard = &networks[0].shards[unit];
        let slot = &shard.layout.params[2];
        let observation = |start: f32| Observation {
            of: "a",
            unit,
            param: slot.spec.name.clone(),
            values: Tensor::full([slot.spec.numel()], start, &Device::flex()),
            before: Tensor::full([slot.spec.numel()], 0.3, &Device::flex()),
            first: 0,
        };
        let written = [observation(0.7), observation(f32::NAN)];
        let range = slot.range();
        let before = to_host(shard.weights.values().clone());
        for observation in written {
            let overwritten = observation.overwritten(&nets, &networks).unwrap();
            observation.write(&nets, &mut networks, precision, &Device::flex());
            let during = to_host(networks[0].shards[unit].weights.values().clone());
            for (element, (before, during)) in before.iter().zip(&during).enumerate() {
                assert_eq!(before != during, range.contains(&element), "element {element}");
            }
            overwritten.restore(&mut networks);
            assert_eq!(to_host(networks[0].shards[unit].weights.values().clone()), before);
        }
    }

    /// A head goes through the passes up to its last unit with statistics, and as a whole if such a
    /// head reads it.
    #[test]
    fn what_statistics_depend_on_goes_through_the_passes() {
        use Normalizes::{Hidden, Nothing};
        let heads = vec![
            head("read", Reads::Pooled, &[Nothing, Nothing]),
            head("by_itself", Reads::Pooled, &[Nothing]),
            head("reader", Reads::Head("read"), &[Nothing, Hidden, Nothing]),
        ];
        let nets = nets(vec![NetworkSpec::trained("a", heads, 1)]);
        let n_backbone = nets.trained().backbone.len();
        let splits: Vec<_> = nets
            .trained()
            .heads()
            .map(|placed| {
                let start = placed.staged().start - n_backbone;
                (placed.head.name, start, placed.staged().len(), placed.in_graph().len())
            })
            .collect();
        assert_eq!(splits, [("read", 0, 2, 0), ("by_itself", 2, 0, 1), ("reader", 3, 2, 1)]);
    }

    /// A copy of a network that follows the trained one is made of the weights that the step has
    /// given it.
    #[test]
    fn a_follower_of_a_follower_is_updated_after_it() {
        let follower = |name, source| NetworkSpec {
            update_rule: UpdateRule::Copy { source, every_steps: 1, from_step: 0, max_updates: u64::MAX },
            ..NetworkSpec::trained(name, Vec::new(), 1)
        };
        let trained = NetworkSpec::trained("trained", Vec::new(), 1);
        let nets = nets(vec![follower("first", "trained"), follower("second", "first"), trained]);
        let optimizer = sgd();
        let mut networks = states(&nets, &optimizer);
        let weights = |network: &NetworkState| to_host(network.shards[0].weights.values().clone());
        let before: Vec<_> = networks.iter().map(weights).collect();
        assert!(before[0] != before[1] && before[1] != before[2] && before[0] != before[2]);
        let grads: Vec<Tensor<1>> =
            networks[2].shards.iter().map(|shard| shard.weights.values().ones_like()).collect();
        let values = ScheduledValues { step: 0, lr: 0.1, weight_decay: 0.0 };
        let norms = optimizer.norms(&networks[2].shards, &grads, &vec![0; grads.len()], &values).unwrap();
        let squares: Vec<f64> =
            norms.squares().iter().map(|square| FixedPoint::from_limbs(&square.limbs())).collect();
        nets.update(&mut networks, &optimizer, grads, Clip::Norms(&norms.agreed(&squares)), &values);
        let after: Vec<_> = networks.iter().map(weights).collect();
        assert_ne!(after[2], before[2], "the step has changed the trained network");
        assert_eq!((&after[0], &after[1]), (&after[2], &after[2]));
    }
}
