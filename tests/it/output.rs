//! Standard output and standard error that cannot be written.

use std::fs::File;
use std::process::{Command, Stdio};

use crate::messages::check_message;
use crate::support::{World, metrics, ok};

/// Returns a command of the program with `args`.
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

/// A run whose log cannot be written ends successfully, with the same metrics.
#[test]
fn a_run_without_its_log_has_the_same_metrics() {
    let world = World::new(16);
    ok(&world.pretrain("logged", &[]));
    for (name, log) in [("closed", closed_pipe()), ("full", File::create("/dev/full").unwrap().into())] {
        let status = program(&world, &world.pretrain_args(name, &[])).stderr(log).status().unwrap();
        assert_eq!(status.code(), Some(0), "{name}");
        assert_eq!(metrics(&world.path(name)), metrics(&world.path("logged")), "{name}");
    }
}

/// The exit code shows that a list is truncated.
#[test]
fn lost_output_has_an_exit_code() {
    let world = World::new(16);
    let args = ["shards", "ls", &world.text("data/train-000000.tar")].map(String::from);
    // A full disk is reported; a reader that has ended is not.
    let full_disk: Stdio = File::create("/dev/full").unwrap().into();
    for (stdout, is_reported) in [(full_disk, true), (closed_pipe(), false)] {
        let output = program(&world, &args).stdout(stdout).stderr(Stdio::piped()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(74), "{stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
        if is_reported {
            check_message("output::lost_output_has_an_exit_code", &stderr);
        } else {
            assert!(!stderr.contains("error:"), "{stderr}");
        }
    }
}
