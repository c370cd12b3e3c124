//! Where weights come from: the library that made them, their license, and the weights that they
//! began with.

use std::path::Path;

use networks::{NamedTensor, Origin};
use trainer::Plan;
use trainer::checkpoint::Manifest;

/// Name of this program among the libraries that make weights.
const OCELLI: &str = "ocelli";

/// Where weights come from.
#[derive(Debug, Clone)]
pub struct Provenance {
    /// Name of the library that made them, or `ocelli`.
    pub library: &'static str,
    /// License that their file states.
    pub license: Option<String>,
    /// Number of steps that their run had taken; absent for weights that belong to no run.
    pub step: Option<u64>,
    /// Weights that they began with, the latest first.
    pub began_with: Vec<Origin>,
}

impl Provenance {
    /// Returns the provenance of the weights in a checkpoint with `manifest`.
    pub(crate) fn from_checkpoint(manifest: &Manifest) -> Self {
        Self {
            library: OCELLI,
            license: None,
            step: Some(manifest.step),
            began_with: manifest.plan.began_with(),
        }
    }

    /// Returns the origins of a network that begins with these weights, the backbone `tensors` in
    /// `path`: these weights, and then those that they began with.
    pub fn origins(&self, path: &Path, tensors: &[NamedTensor]) -> Vec<Origin> {
        let named = match self.step {
            Some(_) => find_workdir(path).unwrap_or(path),
            None => path,
        };
        let mut origins = vec![Origin {
            name: last_name(named),
            step: self.step,
            library: self.library.to_string(),
            fingerprint: format!("{:016x}", weights::fingerprint(tensors)),
            license: self.license.clone(),
        }];
        origins.extend(self.began_with.iter().cloned());
        origins
    }
}

/// Returns the work directory that `checkpoint` is in, if any.
pub fn find_workdir(checkpoint: &Path) -> Option<&Path> {
    checkpoint.ancestors().find(|folder| Plan::path_in(folder).exists())
}

/// Returns the last name in `path`, such as `mine` of `runs/mine/`.
fn last_name(path: &Path) -> String {
    if let Some(name) = path.file_name() {
        return name.to_string_lossy().into_owned();
    }
    // The path is `.` or ends with `..`.
    let absolute = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    absolute
        .file_name()
        .map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(step: Option<u64>, path: &Path) -> Vec<String> {
        let began_with = vec![Origin {
            name: "first.pth".into(),
            step: None,
            library: "timm".into(),
            fingerprint: "0".into(),
            license: Some("mit".into()),
        }];
        let provenance = Provenance { library: OCELLI, license: None, step, began_with };
        provenance.origins(path, &[]).into_iter().map(|origin| origin.name).collect()
    }

    /// A run is named by its work directory, whichever of its checkpoints is given.
    #[test]
    fn origins_are_named_by_the_file_or_the_work_directory() {
        let folder = tempfile::tempdir().unwrap();
        let workdir = folder.path().join("mine");
        let checkpoint = workdir.join("checkpoints/step-0000000004");
        std::fs::create_dir_all(&checkpoint).unwrap();
        std::fs::write(workdir.join("plan.toml"), "").unwrap();
        assert_eq!(names(Some(4), &checkpoint), ["mine", "first.pth"]);
        assert_eq!(names(Some(4), &workdir), ["mine", "first.pth"]);
        assert_eq!(names(None, Path::new("weights/second.pth")), ["second.pth", "first.pth"]);
    }
}
