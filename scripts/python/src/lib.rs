//! The module `ocelli._ocelli`: commands of the program within a Python process.
//!
//! A command runs on a thread of its own and without Python's lock, so that other threads continue
//! and interrupts are noticed. Its messages are given to a function on the thread of the caller, as
//! which notebooks show them under the cell that called. An interrupt asks a run to stop with a
//! checkpoint, as in the program, and is raised as `KeyboardInterrupt` when it has. For any other
//! command it is raised at once, and the command ends in the background.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use scripts::Failure;

/// Time between two looks for messages, for interrupts and for the end of a command.
const INTERVAL: Duration = Duration::from_millis(10);

/// Runs the command of `args`, which follow the name of the program. Returns 0 and its output, or
/// the status with which the program would exit and the text of its error. `messages` is called
/// with each line of its messages.
///
/// # Errors
/// `KeyboardInterrupt` after an interrupt.
#[pyfunction]
fn run(py: Python<'_>, args: Vec<String>, messages: Py<PyAny>) -> PyResult<(u8, String)> {
    let (sender, lines) = channel::<String>();
    // A command that was given up has nobody to tell.
    let command = move || scripts::run_within(args, move |line| drop(sender.send(line.to_string())));
    let running = std::thread::Builder::new().name("ocelli".into()).spawn(command)?;
    let mut interrupt = None;
    while !running.is_finished() {
        py.detach(|| std::thread::sleep(INTERVAL));
        if let Err(error) = show(py, &lines, &messages).and_then(|()| py.check_signals()) {
            // Without Python's lock, which another thread may wait for.
            if !py.detach(scripts::interrupt) {
                return Err(error);
            }
            interrupt = Some(error);
        }
    }
    show(py, &lines, &messages)?;
    if let Some(error) = interrupt {
        return Err(error);
    }
    let result = running.join().unwrap_or_else(|_| Err(Failure::panic()));
    py.check_signals()?;
    match result {
        Ok(answer) if answer.is_stopped => Err(PyKeyboardInterrupt::new_err("stopped by a signal")),
        Ok(answer) => Ok((0, answer.output)),
        Err(failure) => Ok((failure.exit_code, failure.message)),
    }
}

/// Gives the lines that have arrived to the function `messages`. An error of that function is
/// printed by Python, unless it is an interrupt.
fn show(py: Python<'_>, lines: &Receiver<String>, messages: &Py<PyAny>) -> PyResult<()> {
    for line in lines.try_iter() {
        if let Err(error) = messages.call1(py, (line,)) {
            if error.is_instance_of::<PyKeyboardInterrupt>(py) {
                return Err(error);
            }
            error.print(py);
        }
    }
    Ok(())
}

/// Commands of the program within a Python process.
#[pymodule]
fn _ocelli(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(run, module)?)
}
