//! One training step, unit by unit.
//!
//! ```text
//! teacher, no graph    for each unit: gather → forward the global views → drop
//! student, forwards    for each unit: gather → forward all views → keep input (or graph) → drop
//! heads and loss       ordinary autodiff on the whole batch → gradient at the backbone's output
//! student, backwards   for each unit from the last: gather → vector-Jacobian product → reduce
//! one small reduce     squared norms by clip group, loss, finite flag
//! local                clip, AdamW on the flat shards, teacher moves
//! ```

use std::ops::Range;
use std::time::Instant;

use augment::{Batch, ViewRng};
use burn::tensor::{Device, Tensor};

use crate::head::rows;
use crate::method::{Gauges, Method, Outputs};
use crate::optim::{AdamW, ClipNorms};
use crate::schedule::Knobs;
use crate::shard::engine::Engine;
use crate::shard::store::{UnitShard, to_host};
use crate::slices::{Slices, by_image, join, split, tokens_of};
use crate::tape::{Gathered, Kept};
use crate::unit::{Draws, Leaves, Tokens, Unit};
use crate::workers::Workers;

/// Everything that changes while a run trains.
pub struct TrainState {
    /// Steps taken; the number of the next one.
    pub step: u64,
    /// Steps in a row whose loss or gradient was not finite.
    pub bad_steps: u32,
    /// Backbone units, then head units.
    pub shards: Vec<UnitShard>,
    /// The method, which owns what moves without gradients.
    pub method: Box<dyn Method>,
}

/// A network under training on one rank.
pub struct Trainer {
    /// What changes.
    pub state: TrainState,
    backbone: Vec<Box<dyn Unit>>,
    head: Vec<Box<dyn Unit>>,
    engine: Box<dyn Engine>,
    workers: Workers,
    optimizer: AdamW,
    config: StepConfig,
    device: Device,
}

/// How steps are taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepConfig {
    /// Seed of the run, for initial weights and drop-path.
    pub seed: u64,
    /// Side of a patch.
    pub patch_px: usize,
    /// Backbone units, from the last on, that keep their graph.
    pub keep: usize,
    /// Worker threads.
    pub n_workers: usize,
}

/// Where a step's time went, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Phases {
    /// Bytes to patch vectors.
    pub input_ms: f64,
    /// Teacher forward.
    pub teacher_ms: f64,
    /// Student forward.
    pub forward_ms: f64,
    /// Heads and loss, forwards and backwards.
    pub head_ms: f64,
    /// Student backward.
    pub backward_ms: f64,
    /// Norms, optimizer and teacher update.
    pub update_ms: f64,
}

impl Phases {
    /// The whole step.
    pub fn total_ms(&self) -> f64 {
        self.input_ms + self.teacher_ms + self.forward_ms + self.head_ms + self.backward_ms + self.update_ms
    }
}

/// What a step says of itself.
#[derive(Debug, Clone)]
pub struct StepReport {
    /// Mean loss of the batch.
    pub loss: f64,
    /// Norm of all gradients, before clipping.
    pub grad_norm: f64,
    /// False if the step was skipped because loss or gradient was not finite.
    pub finite: bool,
    /// Where the time went.
    pub phases: Phases,
    /// The method's own numbers.
    pub gauges: Gauges,
    /// Teacher embeddings of the global views, `[B·V_t, D]`.
    pub embeddings: Tensor<2>,
}

/// What heads and loss leave.
struct Scored {
    loss: f64,
    grad_output: Vec<Tensor<3>>,
    head_grads: Vec<Tensor<1>>,
    observed: Vec<f32>,
    gauges: Gauges,
}

impl Trainer {
    /// A fresh network.
    pub fn new(
        backbone: Vec<Box<dyn Unit>>,
        method: Box<dyn Method>,
        engine: Box<dyn Engine>,
        optimizer: AdamW,
        config: StepConfig,
    ) -> Self {
        let device = Device::flex();
        let head = method.head();
        let shards = backbone
            .iter()
            .chain(&head)
            .map(|unit| UnitShard::init(unit.as_ref(), config.seed, engine.as_ref(), &device))
            .collect();
        let workers = Workers::new(config.n_workers);
        let state = TrainState { step: 0, bad_steps: 0, shards, method };
        Self { state, backbone, head, engine, workers, optimizer, config, device }
    }

    /// Takes one step on this rank's part of a batch.
    pub fn step(&mut self, batch: &Batch, knobs: &Knobs) -> StepReport {
        let mut clock = Clock::start();
        let mut phases = Phases::default();
        let slices = self.slices(batch);
        phases.input_ms = clock.lap_ms();

        let n_teacher_groups = self.state.method.n_teacher_groups();
        let teacher_input = slices.iter().map(|groups| groups[..n_teacher_groups].to_vec()).collect();
        let teacher = join(self.infer_backbone(teacher_input, |shard| &shard.teacher));
        let teacher_outputs = self.infer_head(&teacher, batch.samples.len());
        phases.teacher_ms = clock.lap_ms();

        let draws = self.draw(batch.samples.len());
        let (outputs, tape) = self.forward(slices, &draws);
        phases.forward_ms = clock.lap_ms();

        let student = join(outputs.clone());
        let scored = self.heads_and_loss(&student, &teacher_outputs, batch.samples.len(), knobs);
        phases.head_ms = clock.lap_ms();

        let mut grads = self.backward(tape, split(&outputs, scored.grad_output), &draws);
        grads.extend(scored.head_grads);
        phases.backward_ms = clock.lap_ms();

        let (loss, grad_norm, finite) = self.update(scored.loss, &scored.observed, grads, knobs);
        phases.update_ms = clock.lap_ms();
        let embeddings = rows(&teacher[0]);
        StepReport { loss, grad_norm, finite, phases, gauges: scored.gauges, embeddings }
    }

    /// Each worker's images as patch vectors.
    fn slices(&self, batch: &Batch) -> Slices {
        let groups = self.state.method.multicrop().groups();
        self.workers.map(self.workers.slices(batch.samples.len()), |_, range| {
            let samples = &batch.samples[range];
            groups
                .iter()
                .enumerate()
                .map(|(i, group)| {
                    let views: Vec<&[u8]> = samples.iter().map(|views| views.groups[i].as_slice()).collect();
                    tokens_of(&views, group.size_px as usize, self.config.patch_px, &self.device)
                })
                .collect()
        })
    }

    /// Backbone outputs of every slice with the weights that `of` chooses, without a graph.
    fn infer_backbone(&self, mut slices: Slices, of: fn(&UnitShard) -> &Tensor<1>) -> Slices {
        for (unit, shard) in self.backbone.iter().zip(&self.state.shards) {
            let flat = self.engine.all_gather(of(shard));
            let gathered = Gathered { unit: unit.as_ref(), layout: &shard.layout, flat: &flat };
            slices = self.workers.map(slices, |_, input| gathered.infer(input, &Draws::default()));
        }
        slices
    }

    /// The teacher's outputs for whole-batch groups of its embeddings.
    fn infer_head(&self, embeddings: &[Tokens], n_images: usize) -> Outputs {
        let mut groups = embeddings.to_vec();
        for (unit, shard) in self.head.iter().zip(&self.state.shards[self.backbone.len()..]) {
            let flat = self.engine.all_gather(&shard.teacher);
            let gathered = Gathered { unit: unit.as_ref(), layout: &shard.layout, flat: &flat };
            groups = gathered.infer(groups, &Draws::default());
        }
        Outputs { embeddings: by_image(embeddings, n_images), logits: by_image(&groups, n_images) }
    }

    /// Drop-path factors of every unit and slice: a pure function of (seed, step, unit, image).
    fn draw(&self, n_images: usize) -> Vec<Vec<Draws>> {
        let groups = self.state.method.multicrop().groups();
        let (rank, world) = (self.engine.rank(), self.engine.world_size());
        let address = |unit: usize, image: usize| {
            let slot = (image * world + rank) as u64;
            [self.config.seed, DROP_PATH_DOMAIN ^ self.state.step, slot, unit as u64]
        };
        let draw_unit = |(number, p): (usize, f32)| {
            let draw_slice = |images: Range<usize>| {
                let mut draws = Draws::default();
                if p == 0.0 {
                    return draws;
                }
                draws.drop_path = vec![[Vec::new(), Vec::new()]; groups.len()];
                for image in images {
                    let mut rng = ViewRng::from_words(address(number, image));
                    for (group, branches) in groups.iter().zip(&mut draws.drop_path) {
                        for factors in branches {
                            let factor = |_| if rng.chance(p) { 0.0 } else { 1.0 / (1.0 - p) };
                            factors.extend((0..group.n_views).map(factor));
                        }
                    }
                }
                draws
            };
            self.workers.slices(n_images).into_iter().map(draw_slice).collect()
        };
        self.backbone.iter().map(|unit| unit.drop_path()).enumerate().map(draw_unit).collect()
    }

    /// The student's outputs by slice, and the tape by unit and slice.
    fn forward(&self, mut slices: Slices, draws: &[Vec<Draws>]) -> (Slices, Vec<Vec<Kept<'_>>>) {
        let mut tape = Vec::with_capacity(self.backbone.len());
        let first_kept = self.backbone.len().saturating_sub(self.config.keep);
        for (number, (unit, shard)) in self.backbone.iter().zip(&self.state.shards).enumerate() {
            let flat = self.engine.all_gather(&shard.student);
            let gathered = Gathered { unit: unit.as_ref(), layout: &shard.layout, flat: &flat };
            let keep = number >= first_kept;
            let results = self
                .workers
                .map(slices, |i, input| gathered.forward(input, &draws[number][i], keep, number > 0));
            let (outputs, kept) = results.into_iter().unzip();
            slices = outputs;
            tape.push(kept);
        }
        (slices, tape)
    }

    /// Loss, its gradient at the backbone's outputs, and those of the head's flat buffers.
    fn heads_and_loss(
        &self,
        student: &[Tokens],
        teacher: &Outputs,
        n_images: usize,
        knobs: &Knobs,
    ) -> Scored {
        let shards = &self.state.shards[self.backbone.len()..];
        let flats: Vec<Tensor<1>> = shards.iter().map(|s| self.engine.all_gather(&s.student)).collect();
        let leaves: Vec<Leaves<'_>> =
            shards.iter().zip(&flats).map(|(s, flat)| Leaves::new(&s.layout, flat, true)).collect();
        let inputs: Vec<Tokens> =
            student.iter().map(|t| t.with(t.x.clone().autodiff().require_grad())).collect();
        let mut groups = inputs.clone();
        for (unit, leaves) in self.head.iter().zip(&leaves) {
            groups = unit.forward(leaves, groups, &Draws::default());
        }
        let student =
            Outputs { embeddings: by_image(&inputs, n_images), logits: by_image(&groups, n_images) };
        let of_batch = self.state.method.loss(&student, teacher, knobs);
        let loss = f64::from(of_batch.loss.clone().inner().into_scalar::<f32>());
        let mut grads = of_batch.loss.backward();
        let of_input = |t: &Tokens| t.x.grad_remove(&mut grads).expect("every group of views has a loss");
        let grad_output = inputs.iter().map(of_input).collect();
        let head_grads = leaves.iter().map(|leaves| leaves.gradient(&mut grads)).collect();
        Scored { loss, grad_output, head_grads, observed: of_batch.observed, gauges: of_batch.gauges }
    }

    /// Flat gradients of the backbone's units, summed over slices in order and over ranks.
    fn backward(
        &self,
        mut tape: Vec<Vec<Kept<'_>>>,
        mut grads: Vec<Vec<Tensor<3>>>,
        draws: &[Vec<Draws>],
    ) -> Vec<Tensor<1>> {
        let mut flat_grads = Vec::with_capacity(tape.len());
        for number in (0..self.backbone.len()).rev() {
            let (unit, shard) = (&self.backbone[number], &self.state.shards[number]);
            let flat = self.engine.all_gather(&shard.student);
            let gathered = Gathered { unit: unit.as_ref(), layout: &shard.layout, flat: &flat };
            let kept = tape.pop().unwrap_or_default();
            let inputs = kept.into_iter().zip(grads).collect();
            let results = self
                .workers
                .map(inputs, |i, (kept, grad)| gathered.backward(kept, grad, &draws[number][i], number > 0));
            let (grad_inputs, flats): (Vec<_>, Vec<_>) = results.into_iter().unzip();
            grads = grad_inputs;
            let sum = flats.into_iter().reduce(|sum, flat| sum + flat);
            flat_grads.push(sum.expect("a batch has at least one slice"));
        }
        flat_grads.reverse();
        flat_grads
    }

    /// Agrees on loss, norms and finiteness, then updates or skips.
    fn update(
        &mut self,
        loss: f64,
        observed: &[f32],
        grads: Vec<Tensor<1>>,
        knobs: &Knobs,
    ) -> (f64, f64, bool) {
        let world = self.engine.world_size() as f64;
        let grads: Vec<Vec<f32>> =
            grads.into_iter().map(|grad| to_host(self.engine.reduce_scatter(grad))).collect();
        let mut norms = ClipNorms::of(self.optimizer.clip, &self.state.shards, &grads, self.backbone.len());
        let mut shared = norms.squares.clone();
        shared.push(loss / world);
        self.engine.all_reduce(&mut shared);
        // The sum of squares is finite only if every gradient is, on every rank.
        let finite = shared.iter().all(|value| value.is_finite());
        let loss = shared.pop().unwrap_or(f64::NAN);
        norms.squares = shared;
        if finite {
            self.optimizer.step(&mut self.state.shards, grads, &norms, knobs);
            self.state.method.after_step(observed);
            self.state.bad_steps = 0;
        } else {
            self.state.bad_steps += 1;
        }
        self.state.step += 1;
        (loss, norms.total(), finite)
    }
}

/// Keeps drop-path streams apart from all others.
const DROP_PATH_DOMAIN: u64 = 0x6472_6f70_0000_0000;

struct Clock(Instant);

impl Clock {
    fn start() -> Self {
        Self(Instant::now())
    }

    fn lap_ms(&mut self) -> f64 {
        let now = Instant::now();
        let elapsed = now - self.0;
        self.0 = now;
        elapsed.as_secs_f64() * 1e3
    }
}
