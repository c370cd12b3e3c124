//! AdamW (Loshchilov and Hutter 2019) and the moving-average teacher, in one pass over a flat shard.
//!
//! ```text
//! θ ← θ · (1 - η·λ)                                  λ = 0 where weight decay does not apply
//! m ← β₁ m + (1 - β₁) g      v ← β₂ v + (1 - β₂) g²   g after clipping
//! θ ← θ - η / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε)
//! θ_T ← d θ_T + (1 - d) θ
//! ```

use multiversion::multiversion;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::fixed::Fixed;
use crate::schedule::Knobs;
use crate::shard::layout::ALIGNMENT;
use crate::shard::store::{UnitShard, on_host, with_slice};

/// PyTorch's epsilon; Burn's default of 1e-5 is another optimizer.
const EPSILON: f32 = 1e-8;

/// Keeps the clip factor finite, as in DINO.
const CLIP_EPSILON: f64 = 1e-6;

/// What shares a clip norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClipRule {
    /// Every parameter tensor by itself: DINO.
    #[default]
    PerTensor,
    /// Backbone and head: DINOv2.
    PerModule,
}

/// AdamW's constants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay rates of the two moments.
    pub betas: [f64; 2],
    /// Largest norm of a clip group; zero for no clipping.
    pub clip_norm: f64,
    /// What a clip group is.
    pub clip: ClipRule,
}

/// Squared gradient norms by clip group. Groups are numbered over all units.
#[derive(Debug, Clone, PartialEq)]
pub struct ClipNorms<T = f64> {
    /// Sum of squares of each group.
    pub squares: Vec<T>,
    /// Group of each parameter, by unit.
    groups: Vec<Vec<usize>>,
}

impl ClipNorms<Fixed> {
    /// This rank's part of the norms. `n_backbone` units from the first on are the backbone.
    pub fn of(rule: ClipRule, shards: &[UnitShard], grads: &[Vec<f32>], n_backbone: usize) -> Self {
        let mut n_groups = 0;
        let groups: Vec<Vec<usize>> = shards
            .iter()
            .enumerate()
            .map(|(unit, shard)| {
                let group = |param: usize| match rule {
                    ClipRule::PerTensor => n_groups + param,
                    ClipRule::PerModule => usize::from(unit >= n_backbone),
                };
                let groups = (0..shard.layout.params.len()).map(group).collect();
                n_groups += shard.layout.params.len();
                groups
            })
            .collect();
        let n = groups.iter().flatten().max().map_or(0, |last| last + 1);
        let mut squares = vec![Fixed::default(); n];
        for ((shard, grad), groups) in shards.iter().zip(grads).zip(&groups) {
            for segment in shard.segments() {
                // The slot comes out of this very layout.
                let param = shard.layout.position(&segment.slot.spec.name).unwrap_or_default();
                let sum = &mut squares[groups[param]];
                blocks(segment.start, segment.end, |range| sum.add(sum_of_squares(&grad[range])));
            }
        }
        Self { squares, groups }
    }

    /// The norms of all ranks, whose squares are `squares`.
    pub fn agreed(self, squares: &[f64]) -> ClipNorms {
        ClipNorms { squares: squares.to_vec(), groups: self.groups }
    }
}

/// Cuts `start..end` at multiples of [`ALIGNMENT`], of which the ends of a shard are one: whatever the
/// number of ranks, the same elements are summed together.
fn blocks(mut start: usize, end: usize, mut f: impl FnMut(std::ops::Range<usize>)) {
    while start < end {
        let next = ((start / ALIGNMENT + 1) * ALIGNMENT).min(end);
        f(start..next);
        start = next;
    }
}

impl ClipNorms {
    /// Norm of all gradients together, before clipping.
    pub fn total(&self) -> f64 {
        self.squares.iter().sum::<f64>().sqrt()
    }

    fn factor(&self, unit: usize, param: usize, clip_norm: f64) -> f32 {
        if clip_norm == 0.0 {
            return 1.0;
        }
        let norm = self.squares[self.groups[unit][param]].sqrt();
        (clip_norm / (norm + CLIP_EPSILON)).min(1.0) as f32
    }
}

impl AdamW {
    /// Updates every shard and its teacher. `grads` are this rank's parts of the mean gradients.
    pub fn step(&self, shards: &mut [UnitShard], grads: Vec<Vec<f32>>, norms: &ClipNorms, knobs: &Knobs) {
        shards.par_iter_mut().zip(grads).enumerate().for_each(|(unit, (shard, grad))| {
            let frozen = knobs.freeze_last_layer && shard.layout.params.iter().any(|p| p.spec.last_layer);
            if !frozen {
                shard.adam_steps += 1;
                self.update(shard, &grad, unit, norms, knobs);
            }
            move_teacher(shard, knobs.teacher_decay);
        });
    }

    fn update(&self, shard: &mut UnitShard, grad: &[f32], unit: usize, norms: &ClipNorms, knobs: &Knobs) {
        let t = shard.adam_steps as i32;
        let [beta1, beta2] = self.betas;
        let segments: Vec<(std::ops::Range<usize>, Constants)> = shard
            .segments()
            .map(|segment| {
                let param = shard.layout.position(&segment.slot.spec.name).unwrap_or_default();
                let decay = if segment.slot.spec.decay { knobs.lr * knobs.weight_decay } else { 0.0 };
                let constants = Constants {
                    keep: (1.0 - decay) as f32,
                    clip: norms.factor(unit, param, self.clip_norm),
                    beta1: beta1 as f32,
                    beta2: beta2 as f32,
                    rate: (knobs.lr / (1.0 - beta1.powi(t))) as f32,
                    root: (1.0 / (1.0 - beta2.powi(t)).sqrt()) as f32,
                };
                (segment.start..segment.end, constants)
            })
            .collect();
        let UnitShard { student, exp_avg, exp_avg_sq, .. } = shard;
        on_host(student, |student| {
            on_host(exp_avg, |m| {
                on_host(exp_avg_sq, |v| {
                    for (range, constants) in segments {
                        let part = range.clone();
                        adam(
                            constants,
                            &mut student[part.clone()],
                            &mut m[part.clone()],
                            &mut v[part],
                            &grad[range],
                        );
                    }
                });
            });
        });
    }
}

fn move_teacher(shard: &mut UnitShard, decay: f64) {
    let UnitShard { student, teacher, .. } = shard;
    with_slice(student, |student| {
        on_host(teacher, |teacher| average(teacher, student, decay as f32, (1.0 - decay) as f32));
    });
}

#[derive(Clone, Copy)]
struct Constants {
    keep: f32,
    clip: f32,
    beta1: f32,
    beta2: f32,
    rate: f32,
    root: f32,
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn adam(c: Constants, param: &mut [f32], m: &mut [f32], v: &mut [f32], grad: &[f32]) {
    for (((param, m), v), grad) in param.iter_mut().zip(m).zip(v).zip(grad) {
        let g = grad * c.clip;
        *m = c.beta1 * *m + (1.0 - c.beta1) * g;
        *v = c.beta2 * *v + (1.0 - c.beta2) * g * g;
        *param = *param * c.keep - c.rate * *m / (v.sqrt() * c.root + EPSILON);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn average(teacher: &mut [f32], student: &[f32], decay: f32, rest: f32) {
    for (teacher, student) in teacher.iter_mut().zip(student) {
        *teacher = decay * *teacher + rest * student;
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn sum_of_squares(block: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    for chunk in block.chunks(8) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(*value) * f64::from(*value);
        }
    }
    lanes.iter().sum()
}
