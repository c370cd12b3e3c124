//! Signals that ask a run to stop with a checkpoint.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR2};

/// Those that ask: of a scheduler, of a terminal that closes, and of its keyboard.
const ASKING: [i32; 4] = [SIGTERM, SIGUSR2, SIGHUP, SIGINT];

/// Listens until it is told to stop.
pub(crate) struct Listening {
    /// Set by the first signal.
    pub(crate) stop: Arc<AtomicBool>,
    hooks: Vec<SigId>,
}

impl Listening {
    /// From now on, signals set `stop`.
    pub(crate) fn start() -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut hooks = Vec::new();
        for signal in ASKING {
            // A second interrupt from the keyboard ends the program at once.
            if signal == SIGINT {
                hooks.push(signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&stop))?);
            }
            hooks.push(signal_hook::flag::register(signal, Arc::clone(&stop))?);
        }
        Ok(Self { stop, hooks })
    }

    /// What comes after training has nothing to save: from now on, a signal does what it always does.
    pub(crate) fn end(self) -> std::io::Result<()> {
        for hook in self.hooks {
            signal_hook::low_level::unregister(hook);
        }
        for signal in ASKING {
            signal_hook::flag::register_conditional_default(signal, Arc::new(AtomicBool::new(true)))?;
        }
        Ok(())
    }
}
