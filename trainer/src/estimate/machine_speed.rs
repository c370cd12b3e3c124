//! Time of a step by the measured rates of a machine.
//!
//! ```text
//! t = F / products + (b · A + U) / passes     F: operations of matrix products; A: elements of activations that
//!                                             are moved, as for GPUs; b: bytes of an element
//! U = 4 · ((7 + 2 m) · P + 3 · Q)             P: trained parameters, m: moments of the optimizer;
//!                                             Q: parameters that follow them
//! ```
//!
//! Of a parameter, a step writes the gradient, collects it in the unit's buffer, measures its norm
//! and reads it once more; weight and moments are read and written. A moving average reads both
//! networks and writes one. Decoding, waiting and transfers between ranks are left out.

use super::Placement;
use super::placed::{F32, PlacedModel};
use crate::cost::ModelCost;

/// Rates of a machine in operations of the sizes of a run, over all workers of a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MachineSpeed {
    /// Floating-point operations per second of matrix products.
    pub flops_per_s: f64,
    /// Bytes per second that an operation on every element of a tensor reads and writes.
    pub bytes_per_s: f64,
}

impl MachineSpeed {
    /// Estimates the seconds that a rank computes in a step.
    pub fn compute_s(&self, model: &ModelCost, placement: &Placement) -> f64 {
        let placed = PlacedModel { model, placement };
        let work = placed.work(&placed.events());
        let element_bytes = placement.precision.compute.dtype().size() as f64;
        let activation_bytes = element_bytes * placed.n_images() * work.moved_elements;
        let moved_bytes = activation_bytes + update_bytes(placed);
        placed.n_images() * work.flops / self.flops_per_s + moved_bytes / self.bytes_per_s
    }
}

/// Returns the bytes that the update of all weights on a rank reads and writes.
fn update_bytes(placed: PlacedModel<'_>) -> f64 {
    let model = placed.model;
    let trained = placed.trained_shards(&model.trained);
    let mut followers = 0.0;
    for network in model.others.iter().filter(|network| !network.is_frozen) {
        followers += placed.trained_shards(network);
    }
    F32 * ((7.0 + 2.0 * model.n_moments as f64) * trained + 3.0 * followers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::{UnitCost, preset};

    const SPEED: MachineSpeed = MachineSpeed { flops_per_s: 1e11, bytes_per_s: 1e10 };

    /// By hand: a unit of 64,000 parameters and one moment, whose products take 3 s, and whose
    /// activations none.
    #[test]
    fn products_and_updates_take_their_time() {
        let unit = UnitCost { numel: 64_000, flops: 1e11, ..UnitCost::empty("unit") };
        let model = ModelCost::with_backbone(vec![unit]);
        let placement = Placement { keep: 1, ..Placement::one_image_each(1) };
        let expected = 3.0 + 4.0 * 9.0 * 64_000.0 / 1e10;
        let seconds = SPEED.compute_s(&model, &placement);
        assert!((seconds - expected).abs() < 1e-6, "{seconds}");
    }

    /// A ViT-S/16 with DINO's views, on a machine that moves a byte in the time of ten operations.
    #[test]
    fn activations_add_to_products() {
        let model = preset("vit-s", None).unwrap();
        let placement =
            Placement { keep: model.trained.backbone.len(), rank_batch: 4, ..Placement::one_image_each(1) };
        let products_s = MachineSpeed { bytes_per_s: f64::INFINITY, ..SPEED }.compute_s(&model, &placement);
        let moving_s = MachineSpeed { flops_per_s: f64::INFINITY, ..SPEED }.compute_s(&model, &placement);
        let both_s = SPEED.compute_s(&model, &placement);
        assert!((both_s - products_s - moving_s).abs() < 1e-9, "{both_s}");
        assert!(moving_s > 0.1 * products_s && moving_s < products_s, "{moving_s} beside {products_s}");
    }
}
