//! The module `ocelli._ocelli`: commands of the program within a Python process.
//!
//! A command runs on a thread of its own and without Python's lock, so that other threads continue
//! and interrupts are noticed; its messages are given to a function. An interrupt asks a run to
//! stop with a checkpoint, as in the program, and is raised as `KeyboardInterrupt` when it has. For
//! any other command it is raised at once, and the command ends in the background.

use std::time::Duration;

use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError};
use pyo3::prelude::*;

/// Time between two looks for interrupts and for the end of a command.
const INTERVAL: Duration = Duration::from_millis(10);

/// Runs the command of `args`, which follow the name of the program, and returns its output.
/// `messages` is called with each line of its messages.
///
/// # Errors
/// `RuntimeError` with the text of the program's error; `KeyboardInterrupt` after an interrupt.
#[pyfunction]
#[pyo3(signature = (args, messages=None))]
fn run(py: Python<'_>, args: Vec<String>, messages: Option<Py<PyAny>>) -> PyResult<String> {
    let command = move || scripts::run_within(args, move |line| show(messages.as_ref(), line));
    let running = std::thread::Builder::new().name("ocelli".into()).spawn(command)?;
    let mut interrupt = None;
    while !running.is_finished() {
        py.detach(|| std::thread::sleep(INTERVAL));
        if let Err(error) = py.check_signals() {
            // Without Python's lock, which a message of the command may wait for.
            if !py.detach(scripts::interrupt) {
                return Err(error);
            }
            interrupt = Some(error);
        }
    }
    if let Some(error) = interrupt {
        return Err(error);
    }
    let result = running.join().unwrap_or_else(|_| Err("the command has panicked".into()));
    py.check_signals()?;
    match result {
        Ok(answer) if answer.is_stopped => Err(PyKeyboardInterrupt::new_err("stopped by a signal")),
        Ok(answer) => Ok(answer.output),
        Err(message) => Err(PyRuntimeError::new_err(message)),
    }
}

/// Gives a line to the function `messages`; an error of that function is printed by Python.
fn show(messages: Option<&Py<PyAny>>, line: &str) {
    let Some(messages) = messages else { return };
    Python::attach(|py| {
        if let Err(error) = messages.call1(py, (line,)) {
            error.print(py);
        }
    });
}

/// Commands of the program within a Python process.
#[pymodule]
fn _ocelli(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(run, module)?)
}
