//! Learning rates of a backbone, by depth (DINOv2, after BEiT: Bao et al. 2022).
//!
//! ```text
//! rate of unit u of n          = rate of the run · decay^(n - 1 - u)
//! rate of the patch projection = rate of its unit · patch_rate
//!
//! Unit 0 is the embedding, unit n - 1 the last norm.
//! ```
//!
//! Units before the last [`LayerRates::trained_units`] are never trained: a step computes no
//! gradient for them, and the optimizer passes over them.

use networks::adapter::takes_adapters;
use networks::unit::Unit;

use super::state::UnitShard;

/// Ratios of a backbone's learning rates to the run's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerRates {
    /// Ratio of a unit's rate to the rate of the unit after it.
    pub layer_decay: f64,
    /// Ratio of the rate of the projection of patches to the rate of its unit.
    pub patch_rate: f64,
    /// Steps at the beginning of a run during which the backbone is frozen.
    pub frozen_steps: u64,
    /// Number of units, counted from the last, that are trained; `None` for all.
    pub trained_units: Option<usize>,
}

impl Default for LayerRates {
    fn default() -> Self {
        Self { layer_decay: 1.0, patch_rate: 1.0, frozen_steps: 0, trained_units: None }
    }
}

impl LayerRates {
    /// Returns the number of units of a backbone, counted from the first, that are never trained.
    /// `undivided` has the index of the undivided unit of each unit.
    pub(crate) fn n_fixed(self, undivided: &[usize]) -> usize {
        let Some(n_trained) = self.trained_units else { return 0 };
        let n_undivided = undivided.last().map_or(0, |last| last + 1);
        let first_trained = n_undivided.saturating_sub(n_trained);
        undivided.iter().filter(|index| **index < first_trained).count()
    }

    /// Returns the number of units at the beginning of a backbone that are never trained: those
    /// before the trained ones, and, in a backbone with adapters, those before the first unit that
    /// takes some. `undivided` has the index of the undivided unit of each of `units`.
    pub(crate) fn n_fixed_at_start(
        self,
        units: &[Box<dyn Unit>],
        undivided: &[usize],
        has_adapters: bool,
    ) -> usize {
        let n_untrained = self.n_fixed(undivided);
        if !has_adapters {
            return n_untrained;
        }
        let n_without_adapters = units.iter().take_while(|unit| !takes_adapters(unit.as_ref())).count();
        n_untrained.max(n_without_adapters)
    }

    /// Scales the rates of a backbone's units, and freezes the units for the first steps, or for
    /// all of them. `undivided` has, in the order of `shards`, the index of the undivided unit of
    /// each.
    pub(crate) fn apply(self, shards: &mut [UnitShard], undivided: &[usize]) {
        let last = undivided.last().map_or(0, |last| *last);
        let n_fixed = self.n_fixed(undivided);
        for (position, (shard, index)) in shards.iter_mut().zip(undivided).enumerate() {
            let n_after = (last - index) as i32;
            let frozen_steps = if position < n_fixed { u64::MAX } else { self.frozen_steps };
            for slot in &mut shard.layout.params {
                let patch_rate = if slot.spec.projects_patches { self.patch_rate } else { 1.0 };
                slot.spec.lr_scale *= self.layer_decay.powi(n_after) * patch_rate;
                slot.spec.frozen_steps = slot.spec.frozen_steps.max(frozen_steps);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::Device;
    use networks::backbone::{ModelConfig, Readout};
    use ranks::topology::Topology;

    use super::*;

    /// The multipliers of `get_params_groups_with_decay` of facebookresearch/dinov2 for two blocks,
    /// decay 0.9 and 0.2.
    #[test]
    fn rates_decay_towards_the_embedding() {
        let model: ModelConfig = toml::from_str(
            "arch = 'vit'\nimage_px = 8\npatch_px = 4\nwidth = 8\ndepth = 2\nheads = 2\nregisters = 1",
        )
        .unwrap();
        let device = Device::flex();
        let mut shards = Vec::new();
        for unit in model.masked_units(Readout::All).unwrap() {
            shards.push(UnitShard::init(unit.as_ref(), 0, Topology::SINGLE_RANK, &[], &device));
        }
        let rates =
            LayerRates { layer_decay: 0.9, patch_rate: 0.2, frozen_steps: 7, ..LayerRates::default() };
        rates.apply(&mut shards, &[0, 1, 2, 3]);
        let expected = [
            ("patch_embed.proj.weight", 0.9f64.powi(3) * 0.2),
            ("patch_embed.proj.bias", 0.9f64.powi(3) * 0.2),
            ("pos_embed", 0.9f64.powi(3)),
            ("cls_token", 0.9f64.powi(3)),
            ("reg_token", 0.9f64.powi(3)),
            ("mask_token", 0.9f64.powi(3)),
            ("blocks.0.norm1.weight", 0.9f64.powi(2)),
            ("blocks.1.mlp.fc2.bias", 0.9),
            ("norm.weight", 1.0),
        ];
        for (name, rate) in expected {
            let mut slots =
                shards.iter().flat_map(|shard| shard.layout.params.iter().map(move |slot| (shard, slot)));
            let (_, slot) = slots.find(|(shard, slot)| shard.layout.full_name(slot) == name).unwrap();
            assert_eq!(slot.spec.frozen_steps, 7);
            assert!((slot.spec.lr_scale - rate).abs() < 1e-12, "{name}: {}", slot.spec.lr_scale);
        }
    }

    /// All parts of a unit are trained, or none is.
    #[test]
    fn the_last_units_are_trained() {
        let undivided = [0, 1, 1, 1, 2, 2, 3];
        let numbers = [(None, 0), (Some(0), 7), (Some(1), 6), (Some(2), 4), (Some(3), 1), (Some(4), 0)];
        for (trained_units, n_fixed) in numbers {
            let rates = LayerRates { trained_units, ..LayerRates::default() };
            assert_eq!(rates.n_fixed(&undivided), n_fixed, "{trained_units:?}");
        }
    }
}
