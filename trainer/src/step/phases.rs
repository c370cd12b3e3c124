//! Time of a step, by phase.

use std::time::Instant;

use burn_tensor::Device;

/// Time of a step by phase, in milliseconds of the host. A GPU runs asynchronously, and the host
/// waits for it where it reads values: in the update, and in the head where ranks exchange values
/// or neighbors are searched. With [`Trainer::time_phases`](crate::step::Trainer::time_phases) they
/// are times of the device.
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
    /// Returns the phases of the step in order, each with its name.
    pub fn named(&self) -> [(&'static str, f64); 6] {
        [
            ("input", self.input_ms),
            ("targets", self.targets_ms),
            ("forward", self.forward_ms),
            ("heads and loss", self.head_ms),
            ("backward", self.backward_ms),
            ("update", self.update_ms),
        ]
    }

    /// Returns the time of the whole step.
    pub fn total_ms(&self) -> f64 {
        self.input_ms + self.targets_ms + self.forward_ms + self.head_ms + self.backward_ms + self.update_ms
    }
}

/// Clock that times phases.
pub(crate) struct Clock {
    /// Time of the last call of [`Clock::lap_ms`], or of the start.
    last: Instant,
    /// Device to wait for at the end of every phase.
    device: Option<Device>,
}

impl Clock {
    /// Starts the clock; with `device`, every phase ends when the device has finished its work.
    pub(crate) fn start(device: Option<Device>) -> Self {
        Self { last: Instant::now(), device }
    }

    /// Returns the milliseconds since the last call, or since the start.
    pub(crate) fn lap_ms(&mut self) -> f64 {
        if let Some(device) = &self.device {
            // The next read of values from the device reports its error.
            let _ = device.sync();
        }
        let now = Instant::now();
        let elapsed = now - self.last;
        self.last = now;
        elapsed.as_secs_f64() * 1e3
    }
}
