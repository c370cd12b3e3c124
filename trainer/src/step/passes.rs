//! The passes of a step: teacher, student forwards, heads and loss, student backwards.

use augment::Batch;
use burn_tensor::Tensor;

use super::Trainer;
use super::batch::{Slices, by_image, in_f32, join, split, tokens_of};
use super::scalars::Numbers;
use super::tape::{Gathered, Kept};
use super::upload::Uplink;
use crate::comm::engine::EngineError;
use crate::comm::ordered;
use crate::comm::peers::Peers;
use crate::comm::prefetch::{Gathers, Reductions};
use crate::method::Outputs;
use crate::model::drop_path;
use crate::model::features::Tokens;
use crate::model::leaves::Leaves;
use crate::model::unit::Draws;
use crate::schedule::Knobs;

/// What the teacher makes of a part of the batch.
pub(crate) struct Taught {
    /// What its backbone gives.
    pub(crate) tokens: Vec<Tokens>,
    /// By image.
    outputs: Outputs,
}

/// What heads and loss leave.
pub(crate) struct Scored {
    /// This rank's part of loss and gauges.
    pub(crate) numbers: Numbers,
    /// Gradients at the backbone's outputs, by part and slice.
    pub(crate) grad_outputs: Vec<Vec<Vec<Tensor<3>>>>,
    pub(crate) observed: Tensor<1>,
}

/// Draws by unit, part and slice.
pub(crate) type AllDraws = Vec<Vec<Vec<Draws>>>;

/// What is kept by unit, part and slice.
pub(crate) type Tape<'a> = Vec<UnitTape<'a>>;

/// What a unit's backward pass needs.
pub(crate) struct UnitTape<'a> {
    kept: Vec<Vec<Kept<'a>>>,
    /// The gathered weights, where they stay.
    flat: Option<Tensor<1>>,
}

impl Trainer {
    /// Images of this rank's part `part` among `n_images`: every n-th, so that the parts of all ranks
    /// together are every N-th of the global batch.
    pub(crate) fn images_of(&self, part: usize, n_images: usize) -> Vec<usize> {
        (part..n_images).step_by(self.n_parts_here()).collect()
    }

    /// The workers' slices of each part: lists of images.
    pub(crate) fn slices_of(&self, n_images: usize) -> Vec<Vec<Vec<usize>>> {
        let of_part = |part| {
            let images = self.images_of(part, n_images);
            let ranges = self.workers.slices(images.len());
            ranges.into_iter().map(|range| images[range].to_vec()).collect()
        };
        (0..self.n_parts_here()).map(of_part).collect()
    }

    /// How this rank's shares of batches get to its device.
    pub fn uplink(&self) -> Uplink {
        let groups = self.state.method.multicrop().groups();
        Uplink {
            sizes_px: groups.iter().map(|group| group.size_px as usize).collect(),
            patch_px: self.config.patch_px,
            n_parts: self.n_parts_here(),
            device: self.device.clone(),
        }
    }

    /// Patch vectors of every part and slice.
    pub(crate) fn parts(&self, batch: &Batch) -> Vec<Slices> {
        let sizes = self.uplink().sizes_px;
        let of_slice = |images: Vec<usize>| {
            let of_group = |(i, size_px): (usize, &usize)| {
                let views: Vec<&[u8]> =
                    images.iter().map(|image| batch.samples[*image].groups[i].as_slice()).collect();
                let dtype = self.config.precision.compute.dtype();
                tokens_of(&views, *size_px, self.config.patch_px, &self.device, dtype)
            };
            sizes.iter().enumerate().map(of_group).collect()
        };
        let slices = self.slices_of(batch.samples.len());
        slices.into_iter().map(|slices| self.workers.map(slices, |_, images| of_slice(images))).collect()
    }

    /// Drop-path factors of every unit, part and slice.
    pub(crate) fn draw(&self, n_images: usize) -> AllDraws {
        let groups = self.state.method.multicrop().groups();
        let place = self.place();
        let drawing = drop_path::Drawing {
            seed: self.config.seed,
            step: self.state.step,
            n_views: groups.iter().map(|group| group.n_views).collect(),
        };
        let slices = self.slices_of(n_images);
        let position = |image: &usize| (image * place.world_size + place.part()) as u64;
        let of_unit = |(number, p): (usize, f32)| {
            let of_slice = |images: &Vec<usize>| drawing.draw(number, p, images.iter().map(position));
            slices.iter().map(|slices| slices.iter().map(of_slice).collect()).collect()
        };
        self.backbone.iter().map(|unit| unit.drop_path()).enumerate().map(of_unit).collect()
    }

    /// The teacher's tokens and outputs for the groups of views that it sees, by part.
    pub(crate) fn teacher(
        &self,
        parts: &[Slices],
        gathers: &mut Gathers<'_>,
    ) -> Result<Vec<Taught>, EngineError> {
        let n_groups = self.state.method.n_teacher_groups();
        let seen = |part: &Slices| part.iter().map(|groups| groups[..n_groups].to_vec()).collect();
        let mut parts: Vec<Slices> = parts.iter().map(seen).collect();
        for (unit, shard) in self.backbone.iter().zip(&self.state.shards) {
            let flat = gathers.next_flat()?;
            let gathered = Gathered { unit: unit.as_ref(), layout: &shard.layout, flat: &flat };
            for slices in &mut parts {
                let inputs = std::mem::take(slices);
                *slices = self.workers.map(inputs, |_, input| gathered.infer(input, &Draws::default()));
            }
        }
        let tokens: Vec<Vec<Tokens>> = parts.into_iter().map(|part| in_f32(join(part))).collect();
        let mut heads = tokens.clone();
        for (unit, shard) in self.head.iter().zip(&self.state.shards[self.backbone.len()..]) {
            let flat = gathers.next_flat()?;
            let gathered = Gathered { unit: unit.as_ref(), layout: &shard.layout, flat: &flat };
            heads = heads.into_iter().map(|groups| gathered.infer(groups, &Draws::default())).collect();
        }
        let taught = |(tokens, logits): (Vec<Tokens>, Vec<Tokens>)| {
            let n_images = self.n_images_of(&tokens);
            let outputs =
                Outputs { embeddings: by_image(&tokens, n_images), logits: by_image(&logits, n_images) };
            Taught { tokens, outputs }
        };
        Ok(tokens.into_iter().zip(heads).map(taught).collect())
    }

    /// Images of a part whose first group of views is that of `tokens`.
    fn n_images_of(&self, tokens: &[Tokens]) -> usize {
        let [rows, _, _] = tokens[0].x.dims();
        // A multi-crop without views was refused with the recipe.
        rows / self.state.method.multicrop().groups()[0].n_views
    }

    /// The student's outputs by part and slice, and the tape by unit.
    pub(crate) fn forward(
        &self,
        mut parts: Vec<Slices>,
        draws: &AllDraws,
        gathers: &mut Gathers<'_>,
    ) -> Result<(Vec<Slices>, Tape<'_>), EngineError> {
        let mut tape = Vec::with_capacity(self.backbone.len());
        for (number, (unit, shard)) in self.backbone.iter().zip(&self.state.shards).enumerate() {
            let flat = gathers.next_flat()?;
            let gathered = Gathered { unit: unit.as_ref(), layout: &shard.layout, flat: &flat };
            let keep = self.keeps_graph(number);
            let mut kept = Vec::with_capacity(parts.len());
            for (part, slices) in parts.iter_mut().enumerate() {
                let inputs = std::mem::take(slices);
                let draws = &draws[number][part];
                let results =
                    self.workers.map(inputs, |i, input| gathered.forward(input, &draws[i], keep, number > 0));
                let (outputs, of_part) = results.into_iter().unzip();
                *slices = outputs;
                kept.push(of_part);
            }
            tape.push(UnitTape { kept, flat: self.keeps_flat(number).then_some(flat) });
        }
        Ok((parts, tape))
    }

    /// Loss and its gradient at the backbone's outputs; gradients of the head are on their way.
    pub(crate) fn heads_and_loss(
        &self,
        parts: &[Slices],
        teacher: &[Taught],
        knobs: &Knobs,
        gathers: &mut Gathers<'_>,
        reductions: &mut Reductions<'_>,
    ) -> Result<Scored, EngineError> {
        let shards = &self.state.shards[self.backbone.len()..];
        let mut flats = Vec::with_capacity(shards.len());
        for _ in shards {
            flats.push(gathers.next_flat()?);
        }
        let students: Vec<Vec<Tokens>> = parts.iter().map(|slices| in_f32(join(slices.clone()))).collect();
        let n_images = self.n_images_of(&students[0]);
        let embeddings: Vec<_> = students.iter().map(|student| by_image(student, n_images)).collect();
        let taught: Vec<Outputs> = teacher.iter().map(|part| part.outputs.clone()).collect();
        let peers = Peers::new(&self.comm, parts.len());
        let scoring = self.state.method.score(&taught, &embeddings, knobs, peers)?;
        let mut grad_outputs: Vec<_> = parts.iter().map(|_| Vec::new()).collect();
        let mut numbers = Numbers::new(peers.n_parts());
        let mut score = |part: usize| {
            let leaves: Vec<Leaves<'_>> =
                shards.iter().zip(&flats).map(|(s, flat)| Leaves::new(&s.layout, flat, true)).collect();
            let inputs: Vec<Tokens> =
                students[part].iter().map(|t| t.with(t.x.clone().autodiff().require_grad())).collect();
            let mut groups = inputs.clone();
            for (unit, leaves) in self.head.iter().zip(&leaves) {
                groups = unit.forward(leaves, groups, &Draws::default());
            }
            let student =
                Outputs { embeddings: by_image(&inputs, n_images), logits: by_image(&groups, n_images) };
            let of_part = scoring.loss(part, &student);
            numbers.add(of_part.loss.clone().inner(), of_part.gauges);
            let mut grads = of_part.loss.backward();
            let of_input = |t: &Tokens| t.x.grad_remove(&mut grads).expect("every group of views has a loss");
            grad_outputs[part] = split(&parts[part], inputs.iter().map(of_input).collect());
            leaves.iter().map(|leaves| leaves.gradient(&mut grads)).collect()
        };
        let add = |a: Vec<Tensor<1>>, b: Vec<Tensor<1>>| a.into_iter().zip(b).map(|(a, b)| a + b).collect();
        let grads = ordered::fold(parts.len(), &mut score, &add);
        for (shard, grad) in shards.iter().zip(grads) {
            reductions.push(&shard.layout.name, grad, self.config.precision.head_reduce)?;
        }
        Ok(Scored { numbers, grad_outputs, observed: scoring.observed() })
    }

    /// Sends the flat gradients of the backbone's units on their way, from the last unit on: summed over
    /// slices in sequence and over parts in the order of the tree.
    pub(crate) fn backward(
        &self,
        mut tape: Tape<'_>,
        mut grads: Vec<Vec<Vec<Tensor<3>>>>,
        draws: &AllDraws,
        gathers: &mut Gathers<'_>,
        reductions: &mut Reductions<'_>,
    ) -> Result<(), EngineError> {
        for number in (0..self.backbone.len()).rev() {
            let (unit, shard) = (&self.backbone[number], &self.state.shards[number]);
            // forward() has pushed one for every unit.
            let UnitTape { mut kept, flat } = tape.pop().expect("a tape for every unit");
            let flat = match flat {
                Some(flat) => flat,
                None => gathers.next_flat()?,
            };
            let gathered = Gathered { unit: unit.as_ref(), layout: &shard.layout, flat: &flat };
            let mut run = |part: usize| {
                let kept = std::mem::take(&mut kept[part]);
                let inputs = kept.into_iter().zip(std::mem::take(&mut grads[part])).collect();
                let draws = &draws[number][part];
                let results = self
                    .workers
                    .map(inputs, |i, (kept, grad)| gathered.backward(kept, grad, &draws[i], number > 0));
                let (grad_inputs, flats): (Vec<_>, Vec<_>) = results.into_iter().unzip();
                grads[part] = grad_inputs;
                let sum = flats.into_iter().reduce(|sum, flat| sum + flat);
                sum.expect("a part has at least one slice")
            };
            let sum = ordered::fold(self.n_parts_here(), &mut run, &|a: Tensor<1>, b| a + b);
            reductions.push(&shard.layout.name, sum, self.config.precision.reduce)?;
        }
        Ok(())
    }
}
