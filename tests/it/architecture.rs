//! Rules of ARCHITECTURE.md: dependencies between crates, folders and files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::graph::circle;
use crate::sources::Crate;

/// Members of the workspace, each with its folder and its allowed dependencies, as drawn in
/// ARCHITECTURE.md.
const ARROWS: [(&str, &str, &[&str]); 15] = [
    ("pipeline", "pipeline", &[]),
    ("augment", "augment", &[]),
    ("prep", "prep", &["pipeline", "augment"]),
    ("kernels", "kernels", &[]),
    ("ranks", "ranks", &["kernels"]),
    ("networks", "networks", &["augment", "kernels"]),
    ("trainer", "trainer", &["pipeline", "augment", "kernels", "ranks", "networks"]),
    ("eval", "eval", &["pipeline", "augment", "prep", "kernels", "networks"]),
    ("curate", "curate", &["augment", "prep", "pipeline", "eval", "kernels", "ranks"]),
    ("weights", "weights", &["pipeline", "augment", "networks"]),
    (
        "session",
        "session",
        &["pipeline", "augment", "prep", "kernels", "ranks", "networks", "trainer", "eval", "weights"],
    ),
    ("report", "report", &["pipeline", "augment", "kernels", "networks", "trainer", "eval"]),
    (
        "scripts",
        "scripts",
        &[
            "pipeline", "augment", "prep", "kernels", "ranks", "networks", "trainer", "eval", "curate",
            "weights", "session", "report",
        ],
    ),
    ("ocelli-python", "scripts/python", &["scripts"]),
    (
        "tests",
        "tests",
        &[
            "pipeline",
            "augment",
            "prep",
            "kernels",
            "ranks",
            "networks",
            "trainer",
            "eval",
            "curate",
            "weights",
            "session",
            "report",
            "scripts",
            "ocelli-python",
        ],
    ),
];

/// Folders of the trainer, each with the folders that it may use.
const FOLDERS: [(&str, &[&str]); 9] = [
    ("optim", &[]),
    ("method", &[]),
    ("step", &["optim", "method"]),
    ("recipe", &["optim", "method", "step"]),
    ("checkpoint", &["step", "recipe"]),
    ("cost", &["method", "recipe"]),
    ("estimate", &["method", "step", "recipe", "cost"]),
    ("run", &["method", "step", "recipe", "checkpoint"]),
    ("bench", &["optim", "step", "recipe", "cost", "estimate", "run"]),
];

/// Folders that are compiled only for tests, and may use everything.
const FOR_TESTS: [&str; 2] = ["conformance", "golden"];

/// File that may name methods and backbones: the published models that `ocelli plan` knows.
const PRESETS: &str = "cost/presets.rs";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn manifest(path: &Path) -> toml::Table {
    std::fs::read_to_string(path).unwrap().parse().unwrap()
}

fn dependencies(folder: &str) -> Vec<String> {
    let table = manifest(&root().join(folder).join("Cargo.toml"));
    ["dependencies", "dev-dependencies", "build-dependencies"]
        .iter()
        .filter_map(|section| table.get(*section)?.as_table())
        .flat_map(|section| section.keys().cloned())
        .collect()
}

/// Reads all crates but this one.
fn crates() -> Vec<Crate> {
    let libraries = ARROWS.iter().filter(|(member, ..)| *member != "tests");
    libraries.map(|(member, folder, _)| Crate::read(member, &root().join(folder).join("src"))).collect()
}

#[test]
fn members_are_as_drawn() {
    let workspace = manifest(&root().join("Cargo.toml"));
    let members: Vec<&str> =
        workspace["workspace"]["members"].as_array().unwrap().iter().map(|m| m.as_str().unwrap()).collect();
    assert_eq!(members, ARROWS.map(|(_, folder, _)| folder));
}

#[test]
fn arrows_between_crates_run_one_way() {
    let members = ARROWS.map(|(member, ..)| member);
    for (member, folder, targets) in ARROWS {
        // A crate names itself to have its tests' features.
        for dependency in
            dependencies(folder).iter().filter(|d| members.contains(&d.as_str()) && *d != member)
        {
            assert!(targets.contains(&dependency.as_str()), "{member} must not depend on {dependency}");
        }
    }
}

#[test]
fn the_data_path_knows_nothing_of_tensors() {
    for member in ["pipeline", "augment"] {
        assert!(dependencies(member).iter().all(|d| !d.starts_with("burn")), "{member} depends on burn");
    }
}

#[test]
fn no_file_uses_itself_by_way_of_others() {
    for krate in crates() {
        let edges = krate.uses_between_files();
        let n_edges: usize = edges.values().map(BTreeSet::len).sum();
        let is_single = krate.files.len() == 1;
        assert!(
            is_single || 2 * n_edges >= krate.files.len(),
            "only {n_edges} uses are found in {}",
            krate.name
        );
        assert_eq!(circle(&edges), None, "a circle of files in {}", krate.name);
    }
}

#[test]
fn no_folder_uses_itself_by_way_of_others() {
    for krate in crates() {
        let folder = |file: &str| file.split_once('/').map(|(folder, _)| folder.to_string());
        let mut edges = BTreeMap::<String, BTreeSet<String>>::new();
        for (from, targets) in krate.uses_between_files() {
            // A file at the root is a room of its own.
            let from_room = folder(&from).unwrap_or(from);
            for to in targets {
                let to_room = folder(&to).unwrap_or(to);
                if from_room != to_room {
                    edges.entry(from_room.clone()).or_default().insert(to_room);
                }
            }
        }
        assert_eq!(circle(&edges), None, "a circle of folders in {}", krate.name);
    }
}

/// Folders of the trainer depend on one another as drawn in ARCHITECTURE.md.
#[test]
fn arrows_between_the_trainers_folders_are_as_drawn() {
    let trainer = Crate::read("trainer", &root().join("trainer/src"));
    let allowed: BTreeMap<&str, &[&str]> = FOLDERS.into_iter().collect();
    let mut seen = BTreeSet::new();
    for (from, targets) in trainer.uses_between_files() {
        let Some((from, _)) = from.split_once('/').filter(|(from, _)| !FOR_TESTS.contains(from)) else {
            continue;
        };
        let may = allowed.get(from).unwrap_or_else(|| panic!("the folder {from} is not drawn"));
        for to in targets.iter().filter_map(|to| Some(to.split_once('/')?.0)).filter(|to| *to != from) {
            assert!(may.contains(&to), "{from} must not use {to}");
            seen.insert((from.to_string(), to.to_string()));
        }
    }
    for (from, targets) in FOLDERS {
        for to in targets {
            assert!(
                seen.contains(&(from.into(), (*to).into())),
                "{from} does not use {to}: take the arrow out"
            );
        }
    }
}

/// Only the program prints.
#[test]
fn libraries_do_not_print() {
    for krate in crates().iter().filter(|krate| krate.name != "scripts") {
        let for_tests =
            |path: &str| path.split_once('/').is_some_and(|(folder, _)| FOR_TESTS.contains(&folder));
        for file in krate.files.iter().filter(|file| !for_tests(&file.path)) {
            for word in ["println!", "eprintln!", "process::exit", "env::var"] {
                assert!(!file.text.contains(word), "{}: {} contains {word}", krate.name, file.path);
            }
        }
    }
}

/// Public modules are used by another crate.
#[test]
fn public_modules_are_used_elsewhere() {
    let tests = Crate::read("tests", &root().join("tests/it"));
    let all = crates();
    let mut unused = Vec::new();
    let mut n_public = 0;
    for krate in all.iter().filter(|krate| krate.name != "scripts") {
        let others = all.iter().chain([&tests]).filter(|other| other.name != krate.name);
        let paths: BTreeSet<&String> =
            others.flat_map(|other| &other.files).flat_map(|file| &file.paths).collect();
        let inside = |module: &String| {
            paths.iter().any(|path| format!("{path}::").starts_with(&format!("{module}::")))
        };
        n_public += krate.public_modules().count();
        unused.extend(krate.public_modules().filter(|module| !inside(module)).cloned());
    }
    assert!(n_public > 20, "only {n_public} public modules found");
    assert!(unused.is_empty(), "used by their own crate alone: {unused:#?}");
}

/// Methods and backbones are listed in a registry, and named only in their own folder.
#[test]
fn generic_code_names_no_method_and_no_backbone() {
    let listed = |registry: &str| -> Vec<String> {
        let text = std::fs::read_to_string(root().join(registry)).unwrap();
        let modules = text.lines().filter_map(|line| line.trim().split_once(" => ")?.1.strip_suffix(','));
        let names: Vec<String> =
            modules.filter(|name| !name.starts_with("toy")).map(str::to_string).collect();
        assert!(
            !names.is_empty() && names.iter().all(|name| name.chars().all(char::is_alphanumeric)),
            "{names:?}"
        );
        names
    };
    let rooms = [
        ("method/", listed("trainer/src/method/registry.rs")),
        ("backbone/", listed("networks/src/backbone/registry.rs")),
    ];
    for krate in crates().iter().filter(|krate| {
        ["kernels", "ranks", "networks", "trainer", "eval", "curate", "report"].contains(&krate.name.as_str())
    }) {
        for file in krate.files.iter().filter(|file| file.path != PRESETS) {
            // Published protocols have the names of their papers, whatever the method of what they
            // score.
            let protocol = krate.name == "eval" && file.path.starts_with("protocol/");
            if protocol || FOR_TESTS.iter().any(|folder| file.path.starts_with(folder)) {
                continue;
            }
            for (room, names) in rooms.iter().filter(|(room, _)| !file.path.starts_with(room)) {
                let named = file.words.iter().find(|word| names.iter().any(|name| word.starts_with(name)));
                assert_eq!(named, None, "{} is none of {room}", file.path);
            }
        }
    }
    assert!(
        rooms
            .iter()
            .all(|(room, _)| crates().iter().flat_map(|k| &k.files).any(|f| f.path.starts_with(room)))
    );
}
