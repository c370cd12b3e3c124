//! Output of shell commands, `pipe:COMMAND`.

use std::io;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::body::{Failure, Sink};

/// Number of bytes from the end of the command's standard error that an error quotes.
const MESSAGE_BYTES: usize = 500;

fn shell_failure(error: io::Error) -> Failure {
    Failure::Permanent(format!("cannot start the shell: {error}"))
}

/// Runs `command` and sends its output to `sink`. Commands come from the user only: lists of shards
/// cannot name any.
pub(crate) fn run(command: &str, sink: &mut dyn Sink) -> Result<(), Failure> {
    let mut child = Command::new("sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(shell_failure)?;
    let (Some(mut stdout), Some(mut stderr)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(Failure::Permanent("the command has no output".into()));
    };
    let (sender, messages) = crossbeam::channel::bounded(1);
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        let mut buffer = [0; 4096];
        while let Ok(n @ 1..) = stderr.read(&mut buffer) {
            kept.extend_from_slice(&buffer[..n]);
            kept.drain(..kept.len().saturating_sub(MESSAGE_BYTES));
        }
        sender.send(String::from_utf8_lossy(&kept).trim().to_string())
    });
    let copied = sink.restart(None).and_then(|()| io::copy(&mut stdout, sink));
    // A command that still writes to its closed output ends by itself.
    drop(stdout);
    let status = child.wait().map_err(shell_failure)?;
    // Processes that the command left running in the background may keep its standard error open.
    let messages = messages.recv_timeout(Duration::from_secs(1)).unwrap_or_default();
    copied.map_err(Failure::Sink)?;
    if status.success() {
        Ok(())
    } else {
        let separator = if messages.is_empty() { "" } else { ": " };
        Err(Failure::Temporary(format!("the command ended with {status}{separator}{messages}")))
    }
}
