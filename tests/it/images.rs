//! Container images: they contain the commands that the jobs for Kubernetes and their scripts call.
//!
//! No image is built here: the lists of packages are read.

use std::collections::BTreeMap;
use std::path::Path;

/// Commands that jobs and scripts call, except those of the shell, and their Debian packages.
const PACKAGES: [(&str, &str); 5] = [
    ("mpirun", "openmpi-bin"),
    ("sshd", "openssh-server"),
    ("ssh", "openssh-client"),
    ("pkill", "procps"),
    ("pgrep", "procps"),
];

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the lines of each stage of the Dockerfile, by its name.
fn stages() -> BTreeMap<String, String> {
    let mut stages = BTreeMap::new();
    let mut name = String::new();
    for line in read("release/Dockerfile").lines().filter(|line| !line.starts_with('#')) {
        if let Some((_, stage)) = line.strip_prefix("FROM ").and_then(|line| line.split_once(" AS ")) {
            name = stage.to_string();
        }
        *stages.entry(name.clone()).or_insert_with(String::new) += &format!("{line}\n");
    }
    stages
}

/// Returns the stage of the Dockerfile that builds the image of a job.
fn image_stage(job: &str) -> &str {
    let image = job.lines().find_map(|line| line.trim().strip_prefix("image: ocelli:")).unwrap();
    if image == "latest" { "cpu" } else { image }
}

/// Returns `true` if `text` contains `word` as a separate word.
fn calls(text: &str, word: &str) -> bool {
    text.split(|c: char| !c.is_alphanumeric() && c != '-' && c != '_').any(|other| other == word)
}

#[test]
fn images_contain_the_commands_of_their_jobs() {
    let stages = stages();
    let mut n_checked = 0;
    for name in ["pretrain-job", "pretrain-mpijob", "pretrain-jobset", "watch-job"] {
        let job = read(&format!("kubernetes/{name}.yaml"));
        let code: String = job
            .lines()
            .filter(|line| !line.trim().starts_with('#'))
            .map(|line| format!("{line}\n"))
            .collect();
        let stage = &stages[image_stage(&job)];
        for (command, package) in PACKAGES.iter().filter(|(command, _)| calls(&code, command)) {
            assert!(calls(stage, package), "{name} calls {command}: {package} is not in its image");
            n_checked += 1;
        }
        // Scripts are at the paths at which jobs call them.
        for script in code.split('"').filter(|word| word.starts_with("/opt/ocelli/")) {
            let path = script.strip_prefix("/opt/ocelli/scripts/").unwrap();
            let (folder, _) = path.split_once('/').unwrap();
            assert!(
                stage.contains(&format!("COPY scripts/{folder} /opt/ocelli/scripts/{folder}")),
                "{script}"
            );
            read(path);
            n_checked += 1;
        }
    }
    assert!(n_checked >= 6, "{n_checked} commands");
    // mpirun starts ranks on other machines by ssh.
    assert!(calls(&stages["mpi"], "openssh-client"));
}

/// The features that a stage builds exist, and the libraries of the MPI build are installed.
#[test]
fn images_are_built_with_features_that_exist() {
    let stages = stages();
    let manifest = read("Cargo.toml");
    for (name, text) in &stages {
        for feature in text.lines().filter_map(|line| line.split_once("--features ")).map(|(_, f)| f.trim()) {
            assert!(
                manifest.lines().any(|line| line.starts_with(&format!("{feature} = "))),
                "{name}: {feature}"
            );
        }
    }
    assert!(calls(&stages["build-mpi"], "libopenmpi-dev") && calls(&stages["build-mpi"], "libclang-dev"));
    for stage in ["cpu", "mpi", "cuda"] {
        assert!(stages[stage].contains("ENTRYPOINT [\"ocelli\"]"), "{stage}");
    }
}
