//! The module `ocelli._ocelli`: commands of the program within a Python process.
//!
//! A command runs without Python's lock, so that other threads go on; its messages are given to a
//! function. An interrupt asks a run to stop with a checkpoint, as in the program, and is raised as
//! `KeyboardInterrupt` when it has.

use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError};
use pyo3::prelude::*;

/// Runs the command of `args`, which follow the name of the program, and returns its output.
/// `messages` is called with each line of its messages.
///
/// # Errors
/// `RuntimeError` with the text of the program's error; `KeyboardInterrupt` if a signal has stopped
/// the command.
#[pyfunction]
#[pyo3(signature = (args, messages=None))]
fn run(py: Python<'_>, args: Vec<String>, messages: Option<Py<PyAny>>) -> PyResult<String> {
    let result = py.detach(|| scripts::run_within(args, move |line| show(messages.as_ref(), line)));
    // Python's own handler of interrupts was called, too.
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
