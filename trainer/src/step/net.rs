//! The networks of a step. The units of each are in one list: those of the backbone, then those of
//! the heads.

use std::collections::BTreeMap;

use burn_tensor::Tensor;
use networks::adapter::{Adapter, base_layout, takes_adapters};
use networks::backbone::ModelConfig;
use networks::divided::divided;
use networks::head::{Head, staged_units};
use networks::layout::UnitLayout;
use networks::patches::PixelInput;
use networks::unit::Unit;

use super::events::NetworkUnits;
use super::state::NetworkState;
use crate::method::network::{Backbone, NetworkSpec, SeenViews, UpdateRule};
use crate::optim::follow::{Follower, follow};
use crate::optim::{Clip, Optimizer};
use crate::schedule::ScheduledValues;

/// All networks of a step.
pub(crate) struct Nets {
    /// Networks in the order of their shards.
    pub(crate) list: Vec<Net>,
    /// Index of the trained network.
    pub(crate) trained: usize,
    /// Distinct pixel inputs of the networks.
    pub(crate) inputs: Vec<PixelInput>,
}

/// Division of units.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Division {
    /// Largest number of elements of a backbone unit's parameters that is not divided; `None` to
    /// divide no unit.
    pub(crate) max_numel: Option<usize>,
    /// Number of parts of the columns of divided heads.
    pub(crate) n_column_parts: usize,
    /// Index of the part that this rank computes.
    pub(crate) column: usize,
}

/// A network.
pub(crate) struct Net {
    /// Name of the network.
    pub(crate) name: &'static str,
    /// Rule by which the weights change.
    pub(crate) update_rule: UpdateRule,
    /// Views that the network sees.
    pub(crate) seen_views: Vec<SeenViews>,
    /// Index of the network's pixel input in [`Nets::inputs`].
    pub(crate) input: usize,
    /// Whether the backbone is the recipe's.
    pub(crate) has_recipe_backbone: bool,
    /// Units of the backbone, of which large ones are divided.
    pub(crate) backbone: Vec<Box<dyn Unit>>,
    /// Index of the undivided unit of each unit of the backbone.
    pub(crate) undivided: Vec<usize>,
    /// Indices of the units of the backbone that end the levels of the network's outputs.
    pub(crate) level_ends: Vec<usize>,
    /// Adapters that change in place of the backbone's weights.
    pub(crate) adapter: Option<Adapter>,
    /// Heads of the network.
    heads: Vec<PlacedHead>,
    /// Parts of the last units of divided heads that a rank computes, by index of the unit.
    parts: BTreeMap<usize, ColumnPart>,
    /// Number of parts into which the columns of a divided head are divided.
    n_column_parts: usize,
}

/// Layouts of the buffers of a unit.
pub(crate) struct UnitBuffers {
    /// Layout of the parameters that change: the adapters of a unit that has some. Of another unit,
    /// that of all parameters.
    pub(crate) layout: UnitLayout,
    /// Layout of the weights to which the adapters are added, and of the unit's other parameters.
    pub(crate) base: Option<UnitLayout>,
}

/// The part of a unit that a rank computes.
pub(crate) struct ColumnPart {
    /// Computation of the part.
    pub(crate) unit: Box<dyn Unit>,
    /// Layout of the part's buffer.
    pub(crate) layout: UnitLayout,
    /// Index of the part.
    pub(crate) index: usize,
}

/// A unit of a network, and the module that it belongs to.
#[derive(Clone, Copy)]
pub(crate) struct ListedUnit<'a> {
    /// The unit.
    pub(crate) unit: &'a dyn Unit,
    /// Index of its module: the backbone is 0, heads follow.
    pub(crate) module: usize,
}

/// A head, and the indices of its units in the list of its network.
pub(crate) struct PlacedHead {
    /// The head.
    pub(crate) head: Head,
    /// Index of its first unit.
    first: usize,
    /// Number of units that run in the passes of a step.
    n_staged: usize,
    /// Whether ranks compute different columns of the last unit's output.
    is_divided: bool,
}

impl PlacedHead {
    /// Returns whether ranks compute different columns of the last unit's output.
    pub(crate) fn is_divided(&self) -> bool {
        self.is_divided
    }

    /// Returns whether some of the units run in the passes of a step, or the last one is divided.
    pub(crate) fn has_passes(&self) -> bool {
        self.is_divided || !self.staged().is_empty()
    }

    /// Returns the indices of the units that run in the passes of a step.
    pub(crate) fn staged(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.n_staged
    }

    /// Returns the indices of the units in the graph of the loss.
    pub(crate) fn in_graph(&self) -> std::ops::Range<usize> {
        self.staged().end..self.first + self.head.units.len()
    }
}

impl Nets {
    /// Creates the networks of `specs`, which were checked; `model`, `input` and `adapter` are
    /// those of the recipe.
    pub(crate) fn new(
        specs: Vec<NetworkSpec>,
        model: &ModelConfig,
        input: PixelInput,
        division: Division,
        adapter: Option<Adapter>,
    ) -> Self {
        let mut inputs: Vec<PixelInput> = Vec::new();
        let mut list = Vec::with_capacity(specs.len());
        for spec in specs {
            let pixel_input = spec.input(input.clone());
            let index = inputs.iter().position(|known| *known == pixel_input).unwrap_or(inputs.len());
            if index == inputs.len() {
                inputs.push(pixel_input);
            }
            list.push(Net::new(spec, model, index, division, adapter));
        }
        let trained = list.iter().position(|net| net.update_rule == UpdateRule::Gradient);
        // Every method's list was checked with the plan.
        let trained = trained.expect("a network that moves by gradient");
        Self { list, trained, inputs }
    }

    /// Returns the trained network.
    pub(crate) fn trained(&self) -> &Net {
        &self.list[self.trained]
    }

    /// Returns the other networks, with their indices.
    pub(crate) fn others(&self) -> impl Iterator<Item = (usize, &Net)> {
        self.list.iter().enumerate().filter(|(index, _)| *index != self.trained)
    }

    /// Returns the indices of the other networks that see views.
    pub(crate) fn others_with_views(&self) -> impl Iterator<Item = usize> {
        self.others().filter(|(_, net)| !net.seen_views.is_empty()).map(|(index, _)| index)
    }

    /// Returns whether a device that skips an update skips all of it: at most one network follows
    /// the trained one, as an average, and none follows another.
    pub(super) fn can_skip_update(&self, next_step: u64) -> bool {
        let trained = self.trained().name;
        let sources: Vec<(&str, f64)> = self
            .list
            .iter()
            .filter_map(|net| net.update_rule.source_and_decay(next_step))
            .filter(|(_, decay)| *decay != 1.0)
            .collect();
        match sources.as_slice() {
            [] => true,
            [(source, decay)] => *source == trained && *decay > 0.0,
            _ => false,
        }
    }

    /// Updates the trained network together with its followers, and then the other followers, in
    /// their order.
    pub(super) fn update(
        &self,
        networks: &mut [NetworkState],
        optimizer: &Optimizer,
        grads: Vec<Tensor<1>>,
        clip: Clip<'_>,
        scheduled_values: &ScheduledValues,
    ) {
        let next_step = scheduled_values.step + 1;
        let trained = self.trained().name;
        let mut shards = std::mem::take(&mut networks[self.trained].shards);
        let mut followers: Vec<Vec<Follower<'_>>> = shards.iter().map(|_| Vec::new()).collect();
        for (net, network) in self.list.iter().zip(networks.iter_mut()) {
            let Some((source, decay)) = net.update_rule.source_and_decay(next_step) else { continue };
            // With a decay of 1 the weights do not change.
            if source != trained || decay == 1.0 {
                continue;
            }
            for shard in &mut network.shards {
                let unit = shards.iter().position(|leader| leader.layout.name == shard.layout.name);
                // The units of a follower are a subset of those of its source, which was checked.
                let unit = unit.expect("a unit of the network that is followed");
                let is_rounded = shard.is_rounded;
                followers[unit].push(Follower { weights: &mut shard.weights, decay, is_rounded });
            }
        }
        optimizer.step(&mut shards, grads, clip, scheduled_values, followers);
        networks[self.trained].shards = shards;
        for (index, net) in self.list.iter().enumerate() {
            let Some((source, decay)) = net.update_rule.source_and_decay(next_step) else { continue };
            if source == trained {
                continue;
            }
            let Some(leader) = self.position(source) else { continue };
            let leaders = networks[leader].shards.clone();
            for (unit, shard) in networks[index].shards.iter_mut().enumerate() {
                let leader = leaders.iter().find(|leader| leader.layout.name == shard.layout.name);
                // An average of equal weights would round them.
                if let Some(leader) = leader.filter(|_| !net.is_fixed(unit)) {
                    let is_rounded = shard.is_rounded;
                    follow(Follower { weights: &mut shard.weights, decay, is_rounded }, &leader.weights);
                }
            }
        }
    }

    /// Returns the index of the network `name`.
    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        self.list.iter().position(|net| net.name == name)
    }
}

impl Net {
    fn new(
        spec: NetworkSpec,
        model: &ModelConfig,
        input: usize,
        division: Division,
        adapter: Option<Adapter>,
    ) -> Self {
        let n_parts = division.n_column_parts;
        let adapter = spec.adapter(adapter);
        let mut backbone = Vec::new();
        let mut undivided = Vec::new();
        for part in divided(spec.units(model), division.max_numel) {
            backbone.push(part.unit);
            undivided.push(part.index);
        }
        let mut level_ends = Vec::new();
        for level in spec.level_units(model) {
            // Of a divided unit, the last part ends the level.
            level_ends.extend(undivided.iter().rposition(|unit| *unit == level));
        }
        let has_recipe_backbone = spec.backbone == Backbone::Recipe;
        let NetworkSpec { name, heads, sees, update_rule, .. } = spec;
        let n_staged_by_head = staged_units(&heads, n_parts);
        let mut placed_heads = Vec::with_capacity(heads.len());
        let mut parts = BTreeMap::new();
        let mut first = backbone.len();
        for (head, n_staged) in heads.into_iter().zip(n_staged_by_head) {
            let end = first + head.units.len();
            let is_divided = head.is_divided(n_parts);
            if is_divided {
                let part = head.units.last().and_then(|unit| unit.column_part(n_parts));
                // The plan was checked with the method's heads.
                let unit = part.expect("a unit whose columns can be divided");
                let layout = unit.layout(1);
                parts.insert(end - 1, ColumnPart { unit, layout, index: division.column });
            }
            placed_heads.push(PlacedHead { head, first, n_staged, is_divided });
            first = end;
        }
        Self {
            name,
            update_rule,
            seen_views: sees,
            input,
            has_recipe_backbone,
            backbone,
            undivided,
            level_ends,
            adapter,
            heads: placed_heads,
            parts,
            n_column_parts: n_parts,
        }
    }

    /// Returns the part of unit `index` that a rank computes; `None` if it computes all of it.
    pub(crate) fn part(&self, index: usize) -> Option<&ColumnPart> {
        self.parts.get(&index)
    }

    /// Returns the layouts of the buffers of all units, over shard groups of `group_size` ranks.
    pub(crate) fn buffers(&self, group_size: usize) -> Vec<UnitBuffers> {
        let mut buffers = Vec::new();
        for (index, ListedUnit { unit, .. }) in self.units().enumerate() {
            let adapter = self.adapter.filter(|_| self.is_backbone(index));
            buffers.push(match (self.part(index), adapter) {
                (Some(_), _) => {
                    let layout = unit.layout_by_columns(self.n_column_parts, group_size);
                    UnitBuffers { layout, base: None }
                }
                (None, None) => UnitBuffers { layout: unit.layout(group_size), base: None },
                (None, Some(adapter)) => {
                    let base = base_layout(unit, group_size);
                    match adapter.layout(unit, group_size) {
                        Some(layout) => UnitBuffers { layout, base: Some(base) },
                        None => UnitBuffers { layout: base, base: None },
                    }
                }
            });
        }
        buffers
    }

    /// Returns whether no parameter of unit `index` ever changes: a unit without adapters, of a
    /// backbone that has some.
    pub(crate) fn is_fixed(&self, index: usize) -> bool {
        let unit = self.backbone.get(index).filter(|_| self.adapter.is_some());
        unit.is_some_and(|unit| !takes_adapters(unit.as_ref()))
    }

    /// Returns the indices of the units whose parameters never change.
    pub(crate) fn fixed_units(&self) -> Vec<usize> {
        (0..self.backbone.len()).filter(|index| self.is_fixed(*index)).collect()
    }

    /// Returns the numbers of units of the backbone and of the heads.
    pub(crate) fn n_units(&self) -> NetworkUnits {
        NetworkUnits {
            n_backbone: self.backbone.len(),
            n_heads: self.heads.iter().map(|placed| placed.head.units.len()).sum(),
        }
    }

    /// Returns whether some heads are divided.
    pub(crate) fn has_parts(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Returns the indices of the view sizes that the network sees.
    pub(crate) fn sizes(&self) -> Vec<usize> {
        self.seen_views.iter().map(|views| views.size).collect()
    }

    /// Returns all units, in the order of the shards.
    pub(crate) fn units(&self) -> impl Iterator<Item = ListedUnit<'_>> {
        let backbone = self.backbone.iter().map(|unit| (unit, 0));
        let heads = self.heads.iter().enumerate();
        let heads = heads.flat_map(|(i, placed)| placed.head.units.iter().map(move |unit| (unit, i + 1)));
        backbone.chain(heads).map(|(unit, module)| ListedUnit { unit: unit.as_ref(), module })
    }

    /// Returns unit `index` of the list.
    pub(crate) fn unit(&self, index: usize) -> &dyn Unit {
        self.units().nth(index).expect("numbers come from the list").unit
    }

    /// Returns whether unit `index` belongs to the backbone.
    pub(crate) fn is_backbone(&self, index: usize) -> bool {
        index < self.backbone.len()
    }

    /// Returns the heads with the indices of their units.
    pub(crate) fn heads(&self) -> impl Iterator<Item = &PlacedHead> {
        self.heads.iter()
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
        let mut units: Vec<Box<dyn Unit>> = Vec::new();
        for (i, normalizes) in normalizes.iter().enumerate() {
            units.push(Box::new(Projection {
                name: format!("{name}.{i}"),
                widths: vec![6, 6, 6],
                normalizes: *normalizes,
                has_biases: true,
            }));
        }
        Head::new(name, reads, units)
    }

    fn nets(specs: Vec<NetworkSpec>) -> Nets {
        let model = ModelConfig::examples().remove(0);
        let input = PixelInput { cell_px: model.cell_px(), pixels: Pixels::default() };
        Nets::new(specs, &model, input, Division { max_numel: None, n_column_parts: 1, column: 0 }, None)
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
            for UnitBuffers { layout, .. } in net.buffers(1) {
                let moments = optimizer.moments();
                let topology = Topology::SINGLE_RANK;
                shards.push(UnitShard::with_layout(layout, seed as u64, topology, moments, &Device::flex()));
            }
            states.push(NetworkState {
                name: net.name,
                is_frozen: false,
                copies: None,
                n_backbone: net.backbone.len(),
                shards,
                bases: BTreeMap::new(),
            });
        }
        states
    }

    /// If the device skips an update, the host restores the weights that observations have
    /// overwritten.
    #[test]
    fn overwritten_weights_are_restored_bit_for_bit() {
        let nets = nets(vec![NetworkSpec::trained("a", Vec::new(), 1)]);
        let mut networks = states(&nets, &sgd());
        let precision = Precision { gather: Wire::Bf16, ..Precision::default() };
        let unit = 1;
        let shard = &networks[0].shards[unit];
        let slot = &shard.layout.params[2];
        let param = slot.spec.name.clone();
        let numel = slot.spec.numel();
        let range = slot.range();
        let before = to_host(shard.weights.values().clone());
        for value in [0.7, f32::NAN] {
            let observation = Observation {
                network: "a",
                unit,
                param: param.clone(),
                values: Tensor::full([numel], value, &Device::flex()),
                before: Tensor::full([numel], 0.3, &Device::flex()),
                first: 0,
            };
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

    /// The units of a head up to the last one with statistics run in the passes; all of them if
    /// such a head reads it.
    #[test]
    fn units_that_statistics_depend_on_are_staged() {
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

    /// Returns a network that copies the weights of `source` after every step.
    fn follower(name: &'static str, source: &'static str) -> NetworkSpec {
        NetworkSpec {
            update_rule: UpdateRule::Copy { source, every_steps: 1, from_step: 0, max_updates: None },
            ..NetworkSpec::trained(name, Vec::new(), 1)
        }
    }

    /// Returns the weights of the first unit of each network.
    fn first_weights(networks: &[NetworkState]) -> Vec<Vec<f32>> {
        networks.iter().map(|network| to_host(network.shards[0].weights.values().clone())).collect()
    }

    /// The second follower gets the weights that the same step has given the first one.
    #[test]
    fn a_follower_of_a_follower_is_updated_after_it() {
        let trained = NetworkSpec::trained("trained", Vec::new(), 1);
        let nets = nets(vec![follower("first", "trained"), follower("second", "first"), trained]);
        let optimizer = sgd();
        let mut networks = states(&nets, &optimizer);
        let before = first_weights(&networks);
        assert!(before[0] != before[1] && before[1] != before[2] && before[0] != before[2]);
        let grads: Vec<Tensor<1>> =
            networks[2].shards.iter().map(|shard| shard.weights.values().ones_like()).collect();
        let values = ScheduledValues { step: 0, lr: 0.1, weight_decay: 0.0 };
        let norms = optimizer.norms(&networks[2].shards, &grads, &vec![0; grads.len()], &values).unwrap();
        let squares: Vec<f64> =
            norms.squares().iter().map(|square| FixedPoint::from_limbs(&square.limbs())).collect();
        nets.update(&mut networks, &optimizer, grads, Clip::Norms(&norms.with_squares(&squares)), &values);
        let after = first_weights(&networks);
        assert_ne!(after[2], before[2], "the step has changed the trained network");
        assert_eq!((&after[0], &after[1]), (&after[2], &after[2]));
    }
}
