//! The end of a run: its scores, and the commands that may come next. Also what a resumed run has
//! lost since its earlier starts.

use std::path::{Path, PathBuf};

use pipeline::Dataset;
use pipeline::secrets::redact_list;
use prep::open::is_folder_of_images;
use report::{Overview, Run, Start, shell_quote};
use session::{check_export, trained_head};
use trainer::Plan;
use weights::{Format, HeadKind};

use crate::console::{command_line, say};

/// Formats that are suggested, the best known first. The last can hold every network.
const SUGGESTED: [Format; 4] = [Format::Timm, Format::Transformers, Format::Torchvision, Format::Safetensors];

/// Largest number of lists of shards that are typed out.
const MAX_SPECS: usize = 4;

/// Number of images whose classes are looked up.
const N_CLASSES_READ: u64 = 64;

/// Largest number of images for which scores by neighbors among themselves are suggested.
const MAX_LEFT_OUT: u64 = 100_000;

/// Prints whether the run in `workdir` learns, and its first, best and last score, as far as that
/// has been measured.
pub(crate) fn print_scores(workdir: &Path) {
    // A file that cannot be read is reported where the page is written.
    let Ok(run) = Run::open(workdir) else { return };
    let overview = Overview::from_run(&run);
    if let Some(learning) = overview.learning {
        say(format!("without labels: the run is {}", learning.words));
    }
    if let Some(best) = overview.best {
        say(format!("scores: {}", best.words));
    }
}

/// Warns if an earlier start of the run in `workdir` had probes: a start without them does not go
/// on scoring the run.
pub(crate) fn warn_of_missing_probes(workdir: &Path) {
    // Without a list of starts, nothing is known of earlier ones.
    let Ok(starts) = Start::read_all(workdir) else { return };
    for start in starts.iter().rev() {
        let flags = probe_flags(&start.command);
        if !flags.is_empty() {
            let here = std::env::current_dir().unwrap_or_default();
            let folder = if start.folder == here {
                String::new()
            } else {
                format!(" (paths are relative to {})", start.folder.display())
            };
            say(format!(
                "warning: an earlier start of this run scored it, and this one does not: to continue that, \
                 add {}{folder}",
                flags.join(" ")
            ));
            return;
        }
    }
}

/// Returns the flags of probes in a command, and their values, for a shell.
fn probe_flags(command: &[String]) -> Vec<String> {
    let mut flags = Vec::new();
    let mut is_probe = false;
    for word in command {
        if word.starts_with('-') {
            is_probe = word.starts_with("--probe-");
        }
        if is_probe {
            flags.push(shell_quote(word));
        }
    }
    flags
}

/// Returns the file or folder within the work directory of a run for its backbone, or for its
/// network with `head`, in `format`.
pub(crate) fn path_in_run(workdir: &Path, format: Format, head: Option<HeadKind>) -> PathBuf {
    let name = match head {
        Some(HeadKind::Classifier) => "classifier",
        Some(HeadKind::Decoder) => "segmenter",
        None => "backbone",
    };
    let folder = workdir.join(format!("export-{}", format.name()));
    match format {
        Format::Timm | Format::Transformers => folder,
        Format::Safetensors => folder.join(format!("{name}.safetensors")),
        Format::Onnx => folder.join(format!("{name}.onnx")),
        Format::Torchvision | Format::Dinov2 | Format::Dinov3 => folder.join(format!("{name}.pth")),
    }
}

/// A run that has taken all of its steps.
pub(crate) struct EndedRun<'a> {
    /// Work directory, as it was given.
    pub(crate) workdir: &'a Path,
    /// Plan of the run.
    pub(crate) plan: &'a Plan,
    /// Images that it was trained on.
    pub(crate) dataset: &'a Dataset,
    /// Labeled shards that its probe was fitted on; none without a probe.
    pub(crate) probe_train: &'a [String],
    /// Labeled shards that its probe was tested on.
    pub(crate) probe_test: &'a [String],
    /// Whether its network has been exported.
    pub(crate) is_exported: bool,
}

impl EndedRun<'_> {
    /// Prints the commands that may come next, with the paths of the run.
    pub(crate) fn print_next(&self) {
        let program = command_line().first().map_or_else(|| "ocelli".into(), |word| shell_quote(word));
        let mut lines = vec!["next:".to_string()];
        for command in self.next_commands() {
            lines.push(format!("  {program} {command}"));
        }
        say(lines.join("\n"));
    }

    /// Returns the commands that may come next, without the name of the program.
    fn next_commands(&self) -> Vec<String> {
        let workdir = shell_quote(&self.workdir.display().to_string());
        let mut commands = vec![format!("report {workdir}")];
        if !self.is_exported {
            let recipe = &self.plan.recipe;
            let held = SUGGESTED.into_iter().find(|format| check_export(recipe, *format).is_ok());
            let format = held.unwrap_or(Format::Safetensors);
            let path = path_in_run(self.workdir, format, trained_head(recipe));
            let out = shell_quote(&path.display().to_string());
            let overwrite = overwrite_flag(&path);
            let name = format.name();
            commands.push(format!("export --checkpoint {workdir} --format {name} --out {out}{overwrite}"));
        }
        let head = trained_head(&self.plan.recipe);
        if head == Some(HeadKind::Classifier) && check_export(&self.plan.recipe, Format::Onnx).is_ok() {
            // The card beside the file has a program that prints the class of an image.
            let path = self.workdir.join("probabilities.onnx");
            let out = shell_quote(&path.display().to_string());
            let overwrite = overwrite_flag(&path);
            commands.push(format!("export --checkpoint {workdir} --out {out} --probabilities{overwrite}"));
        }
        let specs = self.plan.recipe.data.shard_lists();
        let shards = typed(&specs);
        let images = match &shards {
            Some(words) if is_one_folder(&specs) => format!("--images {words}"),
            Some(words) => format!("--shards {words}"),
            None => "--images FOLDER".into(),
        };
        let features = self.workdir.join("features.npy");
        let overwrite = overwrite_flag(&features);
        let features = shell_quote(&features.display().to_string());
        commands.push(format!("embed --checkpoint {workdir} {images} --out {features}{overwrite}"));
        if let (Some(train), Some(test)) = (typed(self.probe_train), typed(self.probe_test)) {
            // Other protocols take one class per image.
            let protocol = if self.plan.recipe.method.is_multi_label() { " --protocol knn" } else { "" };
            commands.push(format!(
                "probe --checkpoint {workdir} --train {train} --test {test}{protocol} --baseline"
            ));
        } else if let Some(words) = shards
            // Features that have learned the classes of these images tell nothing about others.
            && head.is_none()
            && self.dataset.n_samples() <= MAX_LEFT_OUT
            && has_classes(self.dataset)
        {
            commands.push(format!(
                "probe --checkpoint {workdir} --test {words} --protocol knn --leave-one-out --baseline"
            ));
        }
        commands
    }
}

/// Returns the flag, after a space, that lets a command replace `out`; nothing if it does not
/// exist.
fn overwrite_flag(out: &Path) -> &'static str {
    if out.exists() { " --overwrite" } else { "" }
}

/// Returns lists of shards as words for a shell; `None` if there are none or many, or if an address
/// has secrets, which are never printed.
fn typed(specs: &[String]) -> Option<String> {
    if specs.is_empty() || specs.len() > MAX_SPECS || specs.iter().any(|spec| redact_list(spec) != *spec) {
        return None;
    }
    let words: Vec<String> = specs.iter().map(|spec| shell_quote(spec)).collect();
    Some(words.join(" "))
}

/// Returns whether `specs` are one folder of images.
fn is_one_folder(specs: &[String]) -> bool {
    specs.len() == 1 && is_folder_of_images(&specs[0]).unwrap_or(false)
}

/// Returns whether a few images have at least two classes. Shards on a server are not fetched for
/// this.
fn has_classes(dataset: &Dataset) -> bool {
    if !dataset.is_local() {
        return false;
    }
    let mut first: Option<Vec<String>> = None;
    for id in dataset.spread(N_CLASSES_READ) {
        let Ok(classes) = dataset.classes(id) else { continue };
        if classes.is_empty() {
            continue;
        }
        match &first {
            None => first = Some(classes),
            Some(first) if *first == classes => {}
            Some(_) => return true,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_string).collect()
    }

    #[test]
    fn flags_of_probes_are_found_with_their_values() {
        let command = words("ocelli pretrain --probe-train a.tar b.tar --set x=1 --probe-test=c.tar --json");
        assert_eq!(probe_flags(&command), ["--probe-train", "a.tar", "b.tar", "--probe-test=c.tar"]);
        assert!(probe_flags(&words("ocelli pretrain --set run.probe_every_steps=5")).is_empty());
    }

    #[test]
    fn lists_of_shards_are_typed_unless_they_are_many_or_secret() {
        assert_eq!(typed(&words("my.tar")), Some("my.tar".into()));
        assert_eq!(typed(&["a b/train-*.tar".into()]), Some("'a b/train-*.tar'".into()));
        assert_eq!(typed(&[]), None);
        assert_eq!(typed(&words("1.tar 2.tar 3.tar 4.tar 5.tar")), None);
        assert_eq!(typed(&["https://user:PW@host/a.tar".into()]), None);
    }
}
