//! The program `ocelli` again, under a name that these tests can find.

use std::process::ExitCode;

fn main() -> ExitCode {
    scripts::main()
}
