//! Where the time of a step goes.

use std::time::Instant;

use burn_tensor::Device;

/// Where a step's time went, in milliseconds of the host: a GPU works behind it, and is waited for where numbers
/// come back: in the update, and in the head where ranks exchange them or KoLeo looks for neighbors.
/// [`Trainer::time_phases`](crate::step::Trainer::time_phases) makes them the device's.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Phases {
    /// Bytes to patch vectors.
    pub input_ms: f64,
    /// Networks without gradients, such as an EMA teacher, forwards.
    pub targets_ms: f64,
    /// The trained network's backbone, forwards.
    pub forward_ms: f64,
    /// Heads and loss, forwards and backwards.
    pub head_ms: f64,
    /// The trained network's backbone, backwards.
    pub backward_ms: f64,
    /// Norms, optimizer, and the networks that follow.
    pub update_ms: f64,
    /// Time of all phases spent waiting for other ranks.
    pub wait_ms: f64,
}

impl Phases {
    /// The whole step.
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
    /// Starts now; with `device` every phase ends when it has done what it was asked.
    pub(crate) fn start(device: Option<Device>) -> Self {
        Self { last: Instant::now(), device }
    }

    /// Milliseconds since the last call, or the start.
    pub(crate) fn lap_ms(&mut self) -> f64 {
        if let Some(device) = &self.device {
            // What has gone wrong on the device is said by what next asks it for numbers.
            let _ = device.sync();
        }
        let now = Instant::now();
        let elapsed = now - self.last;
        self.last = now;
        elapsed.as_secs_f64() * 1e3
    }
}
