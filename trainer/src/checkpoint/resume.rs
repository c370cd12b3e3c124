//! The newest checkpoint that every rank can read.

use std::path::Path;

use burn_tensor::Device;
use ranks::communicator::Communicator;
use ranks::engine::Reduction;

use super::{Checkpoint, folder, read_error};
use crate::error::TrainError;
use crate::step::TrainState;

/// Fills `state` from the newest checkpoint under `folder`, of step `newest` or before, of which
/// every rank can read its part; checkpoints that one rank cannot read are skipped by all, with a
/// warning on rank 0. Returns the step of the checkpoint. All ranks call it.
///
/// # Errors
/// [`TrainError::CheckpointRead`] when there are checkpoints and none is intact;
/// [`TrainError::Ranks`].
pub fn resume(
    folder: &Path,
    newest: u64,
    state: &mut TrainState,
    comm: &Communicator,
    device: &Device,
    warn: &mut dyn FnMut(&str),
) -> Result<Option<u64>, TrainError> {
    // The list of rank 0 is used by all: others may see a folder a moment later.
    let last = folder::step_folder(folder, newest);
    let names: Vec<String> = folder::steps_in(folder)
        .iter()
        .filter(|path| newest == u64::MAX || **path <= last)
        .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        .collect();
    let names = comm.broadcast("checkpoints", names.join("\n").into_bytes())?;
    let names = String::from_utf8_lossy(&names).into_owned();
    let mut last_error = None;
    for name in names.lines().rev() {
        let path = folder.join(name);
        let result = Checkpoint::read(&path).and_then(|found| found.restore(state, device));
        let error = result.err().map(error_reason).unwrap_or_default();
        let has_failed = f64::from(u8::from(!error.is_empty()));
        let has_failed = comm.all_reduce("checkpoint", vec![has_failed], Reduction::Max)?;
        if has_failed[0] == 0.0 {
            return Ok(Some(state.step));
        }
        let errors = comm.gather_bytes("checkpoint", error.into_bytes())?;
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
