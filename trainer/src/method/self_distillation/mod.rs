//! Self-distillation over prototypes, as in DINO, iBOT, DINOv2 and DINOv3: a network predicts the
//! balanced scores of its own moving average for other views, and for patches that are hidden from
//! it.
//!
//! ```text
//! S, T   scores of the student on all views and of the teacher on those of the first size, [B, V, K]
//! P      softmax((T - c) / τ_t), or Sinkhorn(T / τ_t), over the whole batch
//! loss = mean over views v of the teacher, views u ≠ v of the student, of H(P_v, softmax(S_u / τ_s))
//!      + w_p · 1/(B V) Σ_views mean over the view's masked cells of H(P_cell, softmax(S_cell / τ_s))
//!      + w_k · Σ_views of the first size koleo(student(x_v))
//!      + w_g · gram(patches of the student, patches of an earlier teacher)
//! after the step: c ← m · c + (1 - m) · mean(T);   teacher ← λ · teacher + (1 - λ) · student
//! ```
//!
//! Cells are scored by the head of views or by a separate one. Cells and views have separate
//! centers and are balanced separately. The teacher may be a frozen network instead; the moving
//! average is then computed for evaluation only. A method is a configuration that builds
//! [`SelfDistillation`].

mod frozen;
pub(super) mod heads;
mod loss;
mod method;
pub(super) mod patches;
pub(super) mod settings;
pub(super) mod targets;

pub(super) use frozen::FrozenTeacher;
pub(super) use method::SelfDistillation;
pub(super) use settings::GramAnchor;
