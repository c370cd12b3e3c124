//! Standard output and standard error that cannot be written.

use std::fs::File;
use std::process::{Command, Stdio};

use crate::support::{World, metrics, ok};

/// Command of the program with `args`.
fn program(world: &World, args: &[String]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ocelli-under-test"));
    command.args(args).env("OCELLI_CACHE", world.path("cache"));
    command
}

/// Opens a pipe whose reader has ended.
fn closed_pipe() -> Stdio {
    let mut child = Command::new("true").stdin(Stdio::piped()).spawn().unwrap();
    let pipe = child.stdin.take().unwrap();
    child.wait().unwrap();
    pipe.into()
}

/// A run whose log cannot be written ends like any other, with the same numbers.
#[test]
fn a_run_goes_on_without_its_log() {
    let world = World::new(16);
    ok(&world.pretrain("told", &[]));
    for (name, log) in [("closed", closed_pipe()), ("full", File::create("/dev/full").unwrap().into())] {
        let status = program(&world, &world.pretrain_args(name, &[])).stderr(log).status().unwrap();
        assert_eq!(status.code(), Some(0), "{name}");
        assert_eq!(metrics(&world.path(name)), metrics(&world.path("told")), "{name}");
    }
}

/// A truncated list does not look complete.
#[test]
fn output_that_is_lost_has_an_exit_code() {
    let world = World::new(16);
    let args = ["shards", "ls", &world.text("data/train-000000.tar")].map(String::from);
    for (full, said) in [(true, true), (false, false)] {
        let out: Stdio = if full { File::create("/dev/full").unwrap().into() } else { closed_pipe() };
        let output = program(&world, &args).stdout(out).stderr(Stdio::piped()).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(74), "{told}");
        assert_eq!(told.contains("standard output cannot be written"), said, "{told}");
        assert!(!told.contains("panicked"), "{told}");
    }
}
