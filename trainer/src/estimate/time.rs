//! Time of a step: its computation and its collectives, in the order in which a step has them.
//!
//! Collectives run one after another beside the computation. While a unit computes, the next one is
//! gathered and the gradient of the last one is reduced; the computation waits for the weights of
//! its unit, and for the sums of statistics over the batch. A collective takes a latency and, for
//! every byte, a share of the bandwidth ([`Fabric`]).

use std::collections::VecDeque;

use ranks::prefetch::MAX_REDUCTIONS_IN_FLIGHT;
use ranks::topology::Sharding;
use ranks::wire::Wire;

use super::fabric::{Fabric, Members};
use super::{ModelCost, NetworkCost, Placement, UnitCost};
use crate::method::Collective;
use crate::step::precision::Precision;

/// Seconds of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepTime {
    /// Seconds of the computation.
    pub compute_s: f64,
    /// Seconds of all collectives.
    pub moving_s: f64,
    /// Seconds that the computation waits for collectives.
    pub waiting_s: f64,
    /// Seconds of the step.
    pub step_s: f64,
}

/// Returns the floating-point operations of matrix products in a step of one rank: without
/// recomputation, and with that of units that keep no graph.
pub fn step_flops(model: &ModelCost, placement: &Placement) -> [f64; 2] {
    let images = placement.rank_batch as f64;
    let backbone = &model.trained.backbone;
    let segments = placement.segments(backbone);
    let flops = |network: &NetworkCost| network.units().map(|unit| unit.flops).sum::<f64>();
    let in_heads: f64 = model.run_twice().map(|unit| unit.flops).sum();
    let once = model.others.iter().map(flops).sum::<f64>() + 3.0 * flops(&model.trained) + in_heads;
    let again = segments.recomputed();
    let twice: f64 = again.map(|number| backbone[number].flops).sum();
    [images * once, images * (once + twice)]
}

/// Estimates the time of a step in which a rank computes for `compute_s`.
pub fn step_time(model: &ModelCost, placement: &Placement, fabric: &Fabric, compute_s: f64) -> StepTime {
    let collectives = Collectives::new(model, placement, fabric);
    let tasks = tasks(model, placement, &collectives);
    let all_flops: f64 = tasks.iter().map(|task| task.flops).sum();
    let mut timeline = Timeline::default();
    let mut ready_s = timeline.submit(tasks.first().map_or(0.0, |task| task.gather_s));
    let mut in_flight = VecDeque::new();
    let mut held_s: Vec<f64> = Vec::new();
    for (number, task) in tasks.iter().enumerate() {
        timeline.wait_until(ready_s);
        let unit_s = if all_flops > 0.0 { compute_s * task.flops / all_flops } else { 0.0 };
        let stage_s = unit_s / (task.waits_s.len() + 1) as f64;
        for wait_s in &task.waits_s {
            timeline.compute(stage_s);
            let end_s = timeline.submit(*wait_s);
            timeline.wait_until(end_s);
        }
        ready_s = timeline.submit(tasks.get(number + 1).map_or(0.0, |next| next.gather_s));
        for reduce_s in held_s.drain(..) {
            if in_flight.len() == MAX_REDUCTIONS_IN_FLIGHT {
                timeline.wait_until(in_flight.pop_front().unwrap_or_default());
            }
            in_flight.push_back(timeline.submit(reduce_s));
        }
        held_s.extend(&task.reduces_s);
        timeline.compute(stage_s);
    }
    // Norms and votes are agreed on once all gradients are there.
    let agreed_s = timeline.submit(held_s.iter().sum::<f64>() + collectives.everyone.small_sum_s(fabric));
    timeline.wait_until(agreed_s);
    let Timeline { now_s, moving_s, waiting_s, .. } = timeline;
    // Without products there is nothing to place on the timeline.
    StepTime { compute_s, moving_s, waiting_s, step_s: now_s.max(compute_s) }
}

/// Part of a step that waits for weights, computes, and may leave gradients to be reduced.
#[derive(Default)]
struct Task {
    /// Operations of one image.
    flops: f64,
    /// Seconds that the weights take to arrive; 0 if they are there.
    gather_s: f64,
    /// Seconds of the collectives that it waits for, between parts of its computation.
    waits_s: Vec<f64>,
    /// Seconds that the reductions of its gradients take, which begin with the next task.
    reduces_s: Vec<f64>,
}

/// Lists the tasks of a step in their order: networks without gradients, then the trained one
/// forwards, its heads with the collectives of the method before the loss, and the backbone
/// backwards.
fn tasks(model: &ModelCost, placement: &Placement, collectives: &Collectives<'_>) -> Vec<Task> {
    let Precision { gather, head_gather, head_reduce, .. } = placement.precision;
    let gather_s = |unit: &UnitCost, wire: Wire| {
        if placement.gathers() { collectives.gather_s(unit, wire) } else { 0.0 }
    };
    let forward = |units: &[UnitCost], is_frozen: bool| -> Vec<Task> {
        units
            .iter()
            .map(|unit| Task {
                flops: unit.flops,
                gather_s: gather_s(unit, gather),
                waits_s: collectives.sums_s(if is_frozen { 0 } else { unit.n_sums }),
                reduces_s: Vec::new(),
            })
            .collect()
    };
    // The weights of all heads arrive before the first of them computes.
    let heads =
        |network: &NetworkCost, times: usize, prepare: Option<Task>, reduces_s: Vec<f64>| -> Vec<Task> {
            let mut tasks: Vec<Task> = network
                .head
                .iter()
                .map(|unit| Task { gather_s: gather_s(unit, head_gather), ..Task::default() })
                .collect();
            tasks.push(Task { gather_s: collectives.columns_s(network, times > 1), ..Task::default() });
            tasks.extend(prepare);
            let n_sums: usize = network.head.iter().map(|unit| unit.n_sums).sum();
            // Forwards, and backwards where there are gradients.
            let n_passes = times.min(2);
            tasks.push(Task {
                flops: times as f64 * network.head.iter().map(|unit| unit.flops).sum::<f64>(),
                waits_s: collectives.sums_s(if network.is_frozen { 0 } else { n_passes * n_sums }),
                reduces_s,
                gather_s: 0.0,
            });
            tasks
        };
    let mut tasks = Vec::new();
    for network in model.others.iter().filter(|network| network.computes()) {
        tasks.extend(forward(&network.backbone, network.is_frozen));
        tasks.extend(heads(network, 1, None, Vec::new()));
    }
    let trained = &model.trained;
    tasks.extend(forward(&trained.backbone, false));
    let prepare = Task {
        flops: model.run_twice().map(|unit| unit.flops).sum(),
        waits_s: collectives.of_method_s(&model.collectives),
        ..Task::default()
    };
    let reduces_s = trained.head.iter().map(|unit| collectives.reduce_s(unit, head_reduce)).collect();
    tasks.extend(heads(trained, 3, Some(prepare), reduces_s));
    tasks.extend(backward(trained, placement, collectives));
    tasks
}

/// Lists the tasks of the backbone's backward pass, from its last unit.
fn backward(trained: &NetworkCost, placement: &Placement, collectives: &Collectives<'_>) -> Vec<Task> {
    let Precision { gather, reduce, .. } = placement.precision;
    let segments = placement.segments(&trained.backbone);
    let gather_s = |unit: &UnitCost| {
        if placement.gathers() && placement.sharding == Sharding::Full {
            collectives.gather_s(unit, gather)
        } else {
            0.0
        }
    };
    let repeated = |number: usize| {
        let unit = &trained.backbone[number];
        Task { flops: unit.flops, gather_s: gather_s(unit), ..Task::default() }
    };
    let backward = |number: usize| {
        let unit = &trained.backbone[number];
        let is_again = number < segments.n_units;
        Task {
            flops: if is_again { 3.0 } else { 2.0 } * unit.flops,
            gather_s: if is_again { gather_s(unit) } else { 0.0 },
            waits_s: collectives.sums_s(unit.n_sums),
            reduces_s: vec![collectives.reduce_s(unit, reduce)],
        }
    };
    let mut tasks: Vec<Task> = (segments.n_units..trained.backbone.len()).rev().map(backward).collect();
    for range in segments.ranges().rev() {
        tasks.extend((range.start..range.end - 1).map(repeated));
        tasks.extend(range.rev().map(backward));
    }
    tasks
}

/// Seconds of collectives.
struct Collectives<'a> {
    fabric: &'a Fabric,
    placement: &'a Placement,
    everyone: Members,
    /// Ranks that share a sharded copy.
    group: Members,
    /// Ranks that hold the same shard.
    replicas: Members,
    /// Number of ranks among which columns of heads are divided.
    n_parts: usize,
    /// Ranks with the same columns.
    column_peers: Members,
}

/// Exchanges of a few numbers within a column group for the targets that a divided head gives: of
/// rows, as with three iterations of Sinkhorn-Knopp, of means and of gauges.
const N_TARGET_SUMS: usize = 5;

impl<'a> Collectives<'a> {
    fn new(model: &ModelCost, placement: &'a Placement, fabric: &'a Fabric) -> Self {
        let members = |size, stride| Members::new(size, stride, placement, fabric);
        let n_parts = placement.n_parts(model);
        // Ranks with the same columns are neighbors in each shard group.
        let run = (placement.group_size / n_parts).max(1);
        let n_runs = placement.world_size / n_parts / run;
        Self {
            fabric,
            placement,
            everyone: members(placement.world_size, 1),
            group: members(placement.group_size, 1),
            replicas: members(placement.world_size / placement.group_size, placement.group_size),
            n_parts,
            column_peers: Members::of_runs([run, n_runs], placement.group_size, placement, fabric),
        }
    }

    /// Returns the seconds of `n` sums of a few numbers over all ranks.
    fn sums_s(&self, n: usize) -> Vec<f64> {
        vec![self.everyone.small_sum_s(self.fabric); n]
    }

    /// Returns the seconds of each collective in `list`.
    fn of_method_s(&self, list: &[Collective]) -> Vec<f64> {
        let bytes = |n_values: usize| (n_values * Wire::F32.bytes()) as f64;
        list.iter()
            .map(|collective| match *collective {
                Collective::Sum(n_values) => self.everyone.sum_s(bytes(n_values), self.fabric),
                Collective::ColumnSum(n_values) => {
                    self.column_peers.sum_s(bytes(n_values) / self.n_parts as f64, self.fabric)
                }
                Collective::SumOfShares(n_values) => self.column_peers.sum_s(bytes(n_values), self.fabric),
                Collective::Number => self.everyone.small_sum_s(self.fabric),
                Collective::Gather(n_values) => {
                    let n_images = self.placement.rank_batch * self.placement.world_size;
                    self.everyone.gather_s(bytes(n_values * n_images), self.fabric)
                }
            })
            .collect()
    }

    fn gather_s(&self, unit: &UnitCost, wire: Wire) -> f64 {
        self.sharers(unit).gather_s(unit.bytes_moved(wire, self.placement.group_size), self.fabric)
    }

    /// The ranks from which a rank gathers the unit: neighbors.
    fn sharers(&self, unit: &UnitCost) -> Members {
        match unit.n_shards(self.placement.group_size) {
            n_shards if n_shards == self.placement.group_size => self.group,
            n_shards => Members::new(n_shards, 1, self.placement, self.fabric),
        }
    }

    /// Returns the seconds of the exchanges within a column group for the divided heads of a
    /// network: their inputs, with a graph the gradients at them, and a few numbers of each row.
    fn columns_s(&self, network: &NetworkCost, has_graph: bool) -> f64 {
        // The scores of all heads of a micro-batch are completed together.
        let of_graph = |unit: &UnitCost| {
            let n_graphs = (unit.n_parts * self.placement.rank_micro_batches) as f64;
            n_graphs * self.column_group(unit).small_sum_s(self.fabric)
        };
        let divided = || {
            network.head.iter().filter(|unit| 1 < unit.n_parts && unit.n_parts <= self.placement.group_size)
        };
        let graphs_s = divided().next().filter(|_| has_graph).map_or(0.0, of_graph);
        graphs_s
            + divided()
                .map(|unit| {
                    let group = self.column_group(unit);
                    let images = (unit.n_parts * self.placement.rank_batch) as f64;
                    let input_bytes = unit.input.wide * Wire::F32.bytes() as f64 * images;
                    let gradients_s =
                        if has_graph { group.exchange_s(input_bytes, self.fabric) } else { 0.0 };
                    // The trained network gives no targets, unless its heads run a second time for
                    // that.
                    let n_sums = if !has_graph || unit.runs_twice { N_TARGET_SUMS } else { 0 };
                    group.gather_s(input_bytes, self.fabric)
                        + gradients_s
                        + n_sums as f64 * group.small_sum_s(self.fabric)
                })
                .sum::<f64>()
    }

    /// The ranks that divide the columns of `unit`.
    fn column_group(&self, unit: &UnitCost) -> Members {
        let stride = unit.n_shards(self.placement.group_size);
        Members::new(unit.n_parts, stride, self.placement, self.fabric)
    }

    /// Returns the seconds of a sum over the ranks of a group, then over replicas.
    fn reduce_s(&self, unit: &UnitCost, wire: Wire) -> f64 {
        let bytes_in = |wire: Wire| unit.bytes_moved(wire, self.placement.group_size);
        let bytes = bytes_in(wire);
        let sharers = self.sharers(unit);
        // Sums in a fixed order are exchanges; others are rings, which only f32 has.
        let in_group_s = if self.placement.exact_sums || wire != Wire::F32 {
            sharers.exchange_s(bytes, self.fabric)
        } else {
            sharers.gather_s(bytes, self.fabric)
        };
        let shard = unit.n_shards(self.placement.group_size) as f64;
        let exchange_s = self.replicas.exchange_s(bytes / shard, self.fabric);
        // The sum is sent back in f32.
        in_group_s + exchange_s + self.replicas.gather_s(bytes_in(Wire::F32) / shard, self.fabric)
    }
}

/// Computation and collectives side by side.
#[derive(Default)]
struct Timeline {
    now_s: f64,
    /// When the last collective ends.
    free_s: f64,
    moving_s: f64,
    waiting_s: f64,
}

impl Timeline {
    fn compute(&mut self, seconds: f64) {
        self.now_s += seconds;
    }

    /// Queues a collective that takes `seconds`; returns when it ends. With 0 seconds there is no
    /// collective: the end is now.
    fn submit(&mut self, seconds: f64) -> f64 {
        if seconds == 0.0 {
            return self.now_s;
        }
        self.free_s = self.free_s.max(self.now_s) + seconds;
        self.moving_s += seconds;
        self.free_s
    }

    fn wait_until(&mut self, end_s: f64) {
        self.waiting_s += (end_s - self.now_s).max(0.0);
        self.now_s = self.now_s.max(end_s);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::{Latency, preset};

    fn placement(world_size: usize, group_size: usize, keep: usize) -> Placement {
        Placement {
            world_size,
            group_size,
            sharding: if group_size > 1 { Sharding::Full } else { Sharding::None },
            keep,
            segment: 1,
            rank_batch: 16,
            rank_micro_batches: 1,
            workers: 1,
            precision: Precision::default(),
            exact_sums: true,
            offload: false,
        }
    }

    /// Fabric whose links all have `gb_s` and `latency_s`.
    fn fabric(ranks_per_node: usize, gb_s: f64, latency_s: f64) -> Fabric {
        Fabric {
            ranks_per_node,
            local_bytes_per_s: gb_s * 1e9,
            node_bytes_per_s: gb_s * 1e9,
            local_latency: Latency { short_s: latency_s, long_s: latency_s },
            node_latency: Latency { short_s: latency_s, long_s: latency_s },
        }
    }

    #[test]
    fn a_step_takes_at_least_its_longer_half_and_at_most_both() {
        for name in ["vit-s", "resnet50", "seer-rg32gf", "vit-7b"] {
            let model = preset(name, None).unwrap();
            for (world, group, keep) in [(2, 2, 0), (8, 8, 100), (16, 1, 0), (16, 4, 3)] {
                for gb_s in [0.1, 1.0, 100.0] {
                    let placement = placement(world, group, keep);
                    let time = step_time(&model, &placement, &fabric(4, gb_s, 1e-5), 0.5);
                    assert!(time.step_s >= time.moving_s.max(0.5) - 1e-9, "{name}: {time:?}");
                    assert!(time.step_s <= time.moving_s + 0.5 + 1e-9, "{name}: {time:?}");
                    assert!((time.step_s - time.waiting_s - 0.5).abs() < 1e-9, "{name}: {time:?}");
                }
            }
        }
    }

    /// One rank moves nothing, and waits for nothing.
    #[test]
    fn one_rank_only_computes() {
        let model = preset("seer-rg32gf", None).unwrap();
        let time = step_time(&model, &placement(1, 1, 0), &fabric(1, 1.0, 1e-3), 2.0);
        assert!((time.step_s - 2.0).abs() < 1e-9 && time.moving_s == 0.0, "{time:?}");
    }

    /// By hand: two units on two ranks of two nodes, where moving takes far longer than computing.
    #[test]
    fn moving_is_the_sum_of_all_collectives() {
        let unit = |numel: usize| UnitCost { numel, flops: 1.0, ..UnitCost::empty("unit") };
        let network = NetworkCost {
            name: "student".into(),
            is_frozen: false,
            backbone: vec![unit(1_000_000), unit(2_000_000)],
            head: Vec::new(),
        };
        let model = ModelCost {
            name: "by hand".into(),
            trained: network,
            others: Vec::new(),
            n_moments: 2,
            pixels: 0.0,
            collectives: vec![Collective::Number],
            masked: None,
        };
        let time = step_time(&model, &placement(2, 2, 0), &fabric(1, 0.001, 0.1), 0.0);
        // 12 MB are gathered twice and reduced once, and half of them move: 18 s; six collectives,
        // and two sums of two messages.
        assert!((time.moving_s - (18.0 + 6.0 * 0.1 + 4.0 * 0.1)).abs() < 1e-2, "{time:?}");
        assert!((time.step_s - time.moving_s).abs() < 1e-9, "{time:?}");
    }
}
