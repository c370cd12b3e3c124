//! Signals that ask a run to stop with a checkpoint.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR2};
use signal_hook::iterator::{Handle, Signals as Received};

use crate::console::is_hosted;

/// Signals that ask a run to stop, from a scheduler, a closing terminal or its keyboard.
const ASKING: [i32; 4] = [SIGTERM, SIGUSR2, SIGHUP, SIGINT];

/// Status of a program that an interrupt has ended.
const INTERRUPTED: i32 = 130;

/// Signal handlers of a run.
///
/// Within another process, interrupts belong to that process: its own handler is called as well, no
/// interrupt ends the process, and after the run no handler of the program is left for them.
pub(crate) struct Signals {
    /// Handlers of interrupts to be removed after the run.
    interrupts: Vec<SigId>,
    /// Thread that answers interrupts.
    thread: Option<Handle>,
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
        let is_hosted = is_hosted();
        let idle = Arc::new(AtomicBool::new(true));
        let mut interrupts = Vec::new();
        let mut thread = None;
        for signal in ASKING.into_iter().filter(|signal| !is_ignored(*signal)) {
            let is_hosts = is_hosted && signal == SIGINT;
            if !is_hosts {
                signal_hook::flag::register_conditional_default(signal, Arc::clone(&idle))?;
            }
            let registered = signal_hook::flag::register(signal, Arc::clone(&stop))?;
            if is_hosts {
                interrupts.push(registered);
            }
        }
        if !is_ignored(SIGINT) {
            // A handler may not print: a thread does, which is idle until an interrupt.
            let mut received = Received::new([SIGINT])?;
            thread = is_hosted.then(|| received.handle());
            std::thread::Builder::new().name("signals".into()).spawn(move || {
                for (number, _) in received.forever().enumerate() {
                    if number == 0 || !is_hosted {
                        answer(number == 0);
                    }
                    if number > 0 && !is_hosted {
                        signal_hook::low_level::exit(INTERRUPTED);
                    }
                }
            })?;
        }
        Ok(Self { interrupts, thread, idle })
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

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.interrupts.drain(..) {
            signal_hook::low_level::unregister(id);
        }
        if let Some(thread) = self.thread.take() {
            thread.close();
        }
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
