//! Time of a step, by phase.

use std::time::Instant;

use burn_tensor::Device;

/// Time of a step by phase, in milliseconds of the host. A GPU runs asynchronously, and the host
/// waits for it where numbers come back: in the update, and in the head where ranks exchange them
/// or neighbors are searched. [`Trainer::time_phases`](crate::step::Trainer::time_phases) makes
/// them times of the device.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Phases {
    /// Conversion of bytes to patch vectors.
    pub input_ms: f64,
    /// Forward passes of the networks without gradients, such as moving averages.
    pub targets_ms: f64,
    /// Forward pass of the trained network's backbone.
    pub forward_ms: f64,
    /// Forward and backward pass of heads and loss.
    pub head_ms: f64,
    /// Backward pass of the trained network's backbone.
    pub backward_ms: f64,
    /// Norms, optimizer and followers.
    pub update_ms: f64,
    /// Time of all phases spent waiting for other ranks.
    pub wait_ms: f64,
}

impl Phases {
    /// Time of the whole step.
    pub fn total_ms(&self) -> f64 {
        self.input_ms + self.targets_ms + self.forward_ms + self.head_ms + self.backward_ms + self.update_ms
    }
}

/// Times phases.
pub(crate) struct Clock {
    last: Instant,
    device: Option<Device>,
}

impl Clock {
    /// Starts the clock; with `device` every phase ends when the device has finished its work.
    pub(crate) fn start(device: Option<Device>) -> Self {
        Self { last: Instant::now(), device }
    }

    /// Milliseconds since the last call, or the start.
    pub(crate) fn lap_ms(&mut self) -> f64 {
        if let Some(device) = &self.device {
            // An error of the device is reported by the next read of numbers from it.
            let _ = device.sync();
        }
        let now = Instant::now();
        let elapsed = now - self.last;
        self.last = now;
        elapsed.as_secs_f64() * 1e3
    }
}
