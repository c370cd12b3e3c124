//! A frozen network as teacher in place of the moving average.

use networks::backbone::ModelConfig;
use networks::patches::Normalization;

use super::heads::{HEAD, HeadSizes, PATCH_HEAD};
use crate::method::network::FrozenWeights;

/// A frozen network that computes the targets, with its own heads.
pub(in crate::method) struct FrozenTeacher {
    /// Backbone.
    pub(in crate::method) model: ModelConfig,
    /// Normalization of its pixels.
    pub(in crate::method) normalization: Normalization,
    /// Sizes of the head of views.
    pub(in crate::method) head: HeadSizes,
    /// Sizes of the head of masked patches, if they have a separate one.
    pub(in crate::method) patch_head: Option<HeadSizes>,
}

impl FrozenTeacher {
    /// Creates the teacher from the description of weights that have been read.
    ///
    /// # Errors
    /// A message with the key and the reason.
    pub(in crate::method) fn from_weights(weights: &FrozenWeights) -> Result<Self, String> {
        let FrozenWeights {
            model: Some(model), normalization: Some(normalization), heads, saw_masks, ..
        } = weights
        else {
            return Err("method.teacher.weights: the file has not been read".into());
        };
        model.validate().map_err(|reason| format!("method.teacher.{reason}"))?;
        normalization.validate().map_err(|reason| format!("method.teacher.normalization: {reason}"))?;
        let Some(head) = HeadSizes::from_shapes(HEAD, heads) else {
            return Err(
                "method.teacher.weights: its run has no prototype head: the method distills runs of \
                        ibot, dinov2 and dinov3"
                    .into(),
            );
        };
        if !saw_masks {
            return Err("method.teacher.weights: its run did not predict masked patches, so its heads \
                        cannot score them: the method distills runs of ibot, dinov2 and dinov3"
                .into());
        }
        let patch_head = HeadSizes::from_shapes(PATCH_HEAD, heads);
        for head in std::iter::once(&head).chain(&patch_head) {
            head.check("teacher.heads: ", "teacher.heads: ")?;
        }
        Ok(Self { model: model.clone(), normalization: normalization.clone(), head, patch_head })
    }
}
