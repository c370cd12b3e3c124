//! The head of self-distillation: a projection of three layers and a layer of prototypes.

use std::collections::BTreeMap;

use networks::head::mlp::Mlp;
use networks::head::prototypes::{Lengths, Prototypes};
use networks::unit::Unit;

use crate::method::bounds::check_bounds;

/// Name of the head of views.
pub(super) const HEAD: &str = "head";

/// Name of the head of masked patches, where they have a separate one.
pub(super) const PATCH_HEAD: &str = "patch_head";

/// Sizes and initial values of a head.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::method) struct HeadSizes {
    /// Number of prototypes, K.
    pub(in crate::method) prototypes: usize,
    /// Channels of the hidden layers.
    pub(in crate::method) hidden: usize,
    /// Channels between the projection and the prototypes.
    pub(in crate::method) bottleneck: usize,
    /// Standard deviation of the projection's initial weights.
    pub(in crate::method) init_std: f32,
    /// Parametrization of the lengths of prototypes.
    pub(in crate::method) lengths: Lengths,
    /// Number of steps at the beginning of a run during which the prototypes are not updated.
    pub(in crate::method) frozen_steps: u64,
    /// Whether the optimizer's moments of the prototypes are updated while the prototypes are
    /// frozen.
    pub(in crate::method) warms_moments: bool,
}

impl HeadSizes {
    /// Returns the sizes of the trained head `name` from the shapes of parameters, by name; `None`
    /// if there is no such head.
    pub(super) fn from_shapes(name: &str, shapes: &BTreeMap<String, Vec<usize>>) -> Option<Self> {
        let [hidden, _] = matrix_shape(shapes, &format!("{name}.mlp.0.weight"))?;
        let matrix = matrix_shape(shapes, &format!("{name}.last_layer.weight"));
        let directions = matrix_shape(shapes, &format!("{name}.last_layer.weight_v"));
        let has_gains = matrix_shape(shapes, &format!("{name}.last_layer.weight_g")).is_some();
        let lengths = if matrix.is_some() {
            Lengths::Free
        } else if has_gains {
            Lengths::Gain
        } else {
            Lengths::One
        };
        let [prototypes, bottleneck] = matrix.or(directions)?;
        let init_std = 0.0;
        let frozen_steps = 0;
        let warms_moments = false;
        Some(Self { prototypes, hidden, bottleneck, init_std, lengths, frozen_steps, warms_moments })
    }

    /// Checks the sizes. `layer_prefix` precedes the keys of layers, `prototype_prefix` that of
    /// prototypes.
    ///
    /// # Errors
    /// A message with the key.
    pub(super) fn check(&self, layer_prefix: &str, prototype_prefix: &str) -> Result<(), String> {
        let sizes = [
            (format!("{prototype_prefix}prototypes"), self.prototypes),
            (format!("{layer_prefix}hidden"), self.hidden),
            (format!("{layer_prefix}bottleneck"), self.bottleneck),
        ];
        if let Some((key, value)) = sizes.iter().find(|(_, value)| *value < 2) {
            return Err(format!("method.{key} is {value}, must be at least 2"));
        }
        check_bounds(&[("head_init_std", f64::from(self.init_std), [0.0, 1.0])])
    }

    /// Returns the units of the head `name` on features of `width` channels.
    pub(super) fn units(&self, name: &str, width: usize) -> Vec<Box<dyn Unit>> {
        let projection = Mlp {
            name: format!("{name}.mlp"),
            input: width,
            hidden: self.hidden,
            output: self.bottleneck,
            init_std: self.init_std,
        };
        let prototypes = Prototypes {
            name: format!("{name}.last_layer"),
            input: self.bottleneck,
            count: self.prototypes,
            lengths: self.lengths,
            frozen_steps: self.frozen_steps,
            warms_moments: self.warms_moments,
        };
        vec![Box::new(projection), Box::new(prototypes)]
    }
}

/// Returns the shape of the matrix `name`, if there is one.
fn matrix_shape(shapes: &BTreeMap<String, Vec<usize>>, name: &str) -> Option<[usize; 2]> {
    shapes.get(name)?.as_slice().try_into().ok()
}
