//! The newest checkpoint that every rank can read.

use std::path::Path;

use burn_tensor::Device;
use ranks::communicator::Communicator;

use super::{Checkpoint, folder, read_error};
use crate::error::TrainError;
use crate::step::TrainState;

/// Fills `state` from the newest checkpoint under `folder`, of step `newest` or before if that is
/// given, of which every rank can read its part; checkpoints that one rank cannot read are skipped
/// by all, with a warning on rank 0. Returns the step of the checkpoint. All ranks call it.
///
/// # Errors
/// [`TrainError::CheckpointRead`] when there are checkpoints and none is intact;
/// [`TrainError::Ranks`].
pub fn resume(
    folder: &Path,
    newest: Option<u64>,
    state: &mut TrainState,
    comm: &Communicator,
    device: &Device,
    warn: &mut dyn FnMut(&str),
) -> Result<Option<u64>, TrainError> {
    // The list of rank 0 is used by all: others may see a folder a moment later.
    let mut names: Vec<String> = Vec::new();
    for path in folder::steps_in(folder) {
        if newest.is_some_and(|step| path > folder::step_folder(folder, step)) {
            continue;
        }
        if let Some(name) = path.file_name() {
            names.push(name.to_string_lossy().into_owned());
        }
    }
    let names = comm.broadcast("checkpoints", names.join("\n").into_bytes())?;
    let names = String::from_utf8_lossy(&names).into_owned();
    let mut last_error = None;
    for name in names.lines().rev() {
        let path = folder.join(name);
        let restored = Checkpoint::read(&path).and_then(|found| found.restore(state, device));
        if comm.count("checkpoint", restored.is_err())? == 0 {
            return Ok(Some(state.step));
        }
        // A rank that could read its part sends nothing.
        let own_reason = match restored {
            Ok(()) => String::new(),
            Err(error) => error_reason(error),
        };
        let errors = comm.gather_bytes("checkpoint", own_reason.into_bytes())?;
        let mut reason = String::new();
        if let Some((rank, error)) = errors.iter().enumerate().find(|(_, error)| !error.is_empty()) {
            let error = String::from_utf8_lossy(error);
            reason = if errors.len() == 1 { error.into_owned() } else { format!("rank {rank}: {error}") };
        }
        let error = read_error(&path, reason);
        warn(&format!("{error}; trying the previous checkpoint"));
        last_error = Some(error);
    }
    last_error.map_or(Ok(None), Err)
}

/// Returns the reason of an error, without the name of the checkpoint.
fn error_reason(error: TrainError) -> String {
    match error {
        TrainError::CheckpointRead { reason, .. } => reason,
        other => other.to_string(),
    }
}
