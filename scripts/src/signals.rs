//! Signals that ask a run to stop with a checkpoint.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR2};
use signal_hook::iterator::Signals as Received;

use crate::console::is_hosted;

/// Signals that ask a run to stop, from a scheduler, a closing terminal or its keyboard.
const ASKING: [i32; 4] = [SIGTERM, SIGUSR2, SIGHUP, SIGINT];

/// Interrupts of a command that runs within another process.
static WITHIN: Mutex<Within> = Mutex::new(Within { is_interrupted: false, run: None });

struct Within {
    /// Whether the process has been interrupted during the command.
    is_interrupted: bool,
    /// Run that trains.
    run: Option<RunWithin>,
}

struct RunWithin {
    /// Flag that stops the run.
    stop: Arc<AtomicBool>,
    /// Answer to the first interrupt.
    answer: Box<dyn Fn(bool) + Send>,
}

/// Forgets the interrupts of the command before.
pub(crate) fn begin_command() {
    *within() = Within { is_interrupted: false, run: None };
}

/// Tells the command that [`run_within`](crate::run_within) runs, on another thread, that the
/// process was interrupted. Returns `true` if a run trains, which saves a checkpoint after its step
/// and stops. Other commands continue to their end; if they begin to train later, they stop then.
pub fn interrupt() -> bool {
    let mut within = within();
    within.is_interrupted = true;
    let Some(run) = &within.run else { return false };
    if !run.stop.swap(true, Ordering::SeqCst) {
        (run.answer)(true);
    }
    true
}

fn within() -> MutexGuard<'static, Within> {
    WITHIN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Status of a program that an interrupt has ended.
const INTERRUPTED: i32 = 130;

/// Signal handlers of a run.
///
/// Within another process, interrupts are that process's, which tells of them ([`interrupt`]).
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
        let is_hosted = is_hosted();
        let idle = Arc::new(AtomicBool::new(true));
        for signal in ASKING {
            if is_ignored(signal) || (is_hosted && signal == SIGINT) {
                continue;
            }
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&idle))?;
            signal_hook::flag::register(signal, Arc::clone(&stop))?;
        }
        if is_hosted {
            let mut within = within();
            stop.fetch_or(within.is_interrupted, Ordering::SeqCst);
            within.run = Some(RunWithin { stop, answer: Box::new(answer) });
        } else if !is_ignored(SIGINT) {
            // A handler may not print: a thread does, which is idle until an interrupt.
            let mut received = Received::new([SIGINT])?;
            std::thread::Builder::new().name("signals".into()).spawn(move || {
                for (index, _) in received.forever().enumerate() {
                    answer(index == 0);
                    if index > 0 {
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

impl Drop for Signals {
    fn drop(&mut self) {
        within().run = None;
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
