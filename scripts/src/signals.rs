//! Signals that ask a run to stop with a checkpoint.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR2};
use signal_hook::iterator::Signals as Received;

/// Signals that ask a run to stop, from a scheduler, a closing terminal or its keyboard.
const ASKING: [i32; 4] = [SIGTERM, SIGUSR2, SIGHUP, SIGINT];

/// Status of a program that an interrupt has ended.
const INTERRUPTED: i32 = 130;

/// Signal handlers of a run.
pub(crate) struct Signals {
    /// Flag that is set while there is nothing to save: then a signal ends the program at once, as
    /// by default.
    idle: Arc<AtomicBool>,
}

impl Signals {
    /// Registers the handlers, which set `stop`; there is nothing to save yet. `answer` is called
    /// at the first interrupt from the keyboard with `true`, and at the second, which ends the
    /// program at once, with `false`.
    pub(crate) fn listen(
        stop: Arc<AtomicBool>,
        answer: impl Fn(bool) + Send + 'static,
    ) -> std::io::Result<Self> {
        let idle = Arc::new(AtomicBool::new(true));
        for signal in ASKING.into_iter().filter(|signal| !is_ignored(*signal)) {
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&idle))?;
            signal_hook::flag::register(signal, Arc::clone(&stop))?;
        }
        if !is_ignored(SIGINT) {
            // A handler may not print: a thread does, which is idle until an interrupt.
            let mut received = Received::new([SIGINT])?;
            std::thread::Builder::new().name("signals".into()).spawn(move || {
                for (number, _) in received.forever().enumerate() {
                    answer(number == 0);
                    if number > 0 {
                        signal_hook::low_level::exit(INTERRUPTED);
                    }
                }
            })?;
        }
        Ok(Self { idle })
    }

    /// Returns a function to call when training begins, after which there is something to save.
    pub(crate) fn training(&self) -> impl FnOnce() + 'static {
        let idle = Arc::clone(&self.idle);
        move || idle.store(false, Ordering::Relaxed)
    }

    /// Marks that training is over and its result is saved.
    pub(crate) fn idle(&self) {
        self.idle.store(true, Ordering::Relaxed);
    }
}

/// Returns `true` if the parent process set `signal` to be ignored, as `nohup` does with HUP: it
/// stays ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & (1 << (signal - 1)) != 0
}
