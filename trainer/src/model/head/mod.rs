//! DINO's projection head (Caron et al. 2021, section 3.1 and appendix C).
//!
//! ```text
//! mlp:        z = W₃ gelu(W₂ gelu(W₁ x))          [M, D] → [M, bottleneck]
//! prototypes: logits = (z / |z|) · (V / |V|)ᵀ      rows of V are prototypes, [M, K]
//! ```
//!
//! The last layer is weight-normalised with its gain held at one, so that only directions of `V`
//! matter; `|V|` divides the logits, which is cheaper than dividing `V`.

use super::features::Tokens;
use super::leaves::Leaves;
use super::params::{Init, ParamSpec};
use super::unit::{Draws, Unit};
use crate::ops::{gelu, linear, matmul_transposed};

/// Keeps the norm of an embedding away from zero, as PyTorch's `normalize` in half precision.
const NORM_EPSILON: f64 = 1e-12;

/// Sizes of a head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadSizes {
    /// Channels of the backbone.
    pub input: usize,
    /// Hidden channels of the MLP.
    pub hidden: usize,
    /// Channels between MLP and prototypes.
    pub bottleneck: usize,
    /// Prototypes, K.
    pub prototypes: usize,
    /// Deviation of initial weights of the MLP.
    pub init_std: f32,
}

/// The two units of a head.
pub fn units(sizes: HeadSizes) -> Vec<Box<dyn Unit>> {
    vec![Box::new(Mlp { sizes }), Box::new(Prototypes { sizes })]
}

struct Mlp {
    sizes: HeadSizes,
}

impl Unit for Mlp {
    fn name(&self) -> &str {
        "head.mlp"
    }

    fn params(&self) -> Vec<ParamSpec> {
        let HeadSizes { input, hidden, bottleneck, init_std, .. } = self.sizes;
        [("0", hidden, input), ("2", hidden, hidden), ("4", bottleneck, hidden)]
            .into_iter()
            .flat_map(|(name, out, input)| {
                let init = Init::TruncNormal(init_std);
                [
                    ParamSpec::weight(format!("{name}.weight"), [out, input], init),
                    ParamSpec::vector(format!("{name}.bias"), out, 0.0),
                ]
            })
            .collect()
    }

    fn forward(&self, leaves: &Leaves<'_>, groups: Vec<Tokens>, _: &Draws) -> Vec<Tokens> {
        let layer =
            |x, i: &str| linear(x, leaves.get(&format!("{i}.weight")), leaves.get(&format!("{i}.bias")));
        let mlp = |tokens: &Tokens| {
            let x = gelu(layer(tokens.x.clone(), "0"));
            let x = gelu(layer(x, "2"));
            tokens.with(layer(x, "4"))
        };
        groups.iter().map(mlp).collect()
    }
}

struct Prototypes {
    sizes: HeadSizes,
}

impl Unit for Prototypes {
    fn name(&self) -> &str {
        "head.last_layer"
    }

    fn params(&self) -> Vec<ParamSpec> {
        let HeadSizes { bottleneck, prototypes, .. } = self.sizes;
        let init = Init::Uniform(1.0 / (bottleneck as f32).sqrt());
        let weight = ParamSpec::weight("weight_v", [prototypes, bottleneck], init);
        vec![ParamSpec { last_layer: true, ..weight }]
    }

    fn forward(&self, leaves: &Leaves<'_>, groups: Vec<Tokens>, _: &Draws) -> Vec<Tokens> {
        let directions = leaves.get::<2>("weight_v");
        let lengths = directions.clone().powi_scalar(2).sum_dim(1).sqrt();
        let inverse = lengths.recip().transpose();
        let project = |tokens: &Tokens| {
            let [b, n, d] = tokens.x.dims();
            let z = tokens.x.clone().reshape([b * n, d]);
            let norm = (z.clone().powi_scalar(2).sum_dim(1) + NORM_EPSILON).sqrt();
            let logits = matmul_transposed(z / norm, directions.clone()) * inverse.clone();
            tokens.with(logits.reshape([b, n, self.sizes.prototypes]))
        };
        groups.iter().map(project).collect()
    }
}
