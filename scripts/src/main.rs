//! The program `ocelli`.

use std::process::ExitCode;

fn main() -> ExitCode {
    scripts::main()
}
