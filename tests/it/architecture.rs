use std::collections::BTreeMap;
use std::path::Path;

/// Which members each member may depend on, as ARCHITECTURE.md draws it.
const ARROWS: [(&str, &[&str]); 6] = [
    ("pipeline", &[]),
    ("augment", &[]),
    ("trainer", &["pipeline", "augment"]),
    ("eval", &["pipeline", "augment", "trainer"]),
    ("scripts", &["pipeline", "augment", "trainer", "eval"]),
    ("tests", &["pipeline", "augment", "trainer", "eval", "scripts"]),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn manifest(path: &Path) -> toml::Table {
    std::fs::read_to_string(path).unwrap().parse().unwrap()
}

fn dependencies(member: &str) -> Vec<String> {
    let table = manifest(&root().join(member).join("Cargo.toml"));
    ["dependencies", "dev-dependencies", "build-dependencies"]
        .iter()
        .filter_map(|section| table.get(*section)?.as_table())
        .flat_map(|section| section.keys().cloned())
        .collect()
}

#[test]
fn members_are_as_drawn() {
    let workspace = manifest(&root().join("Cargo.toml"));
    let members: Vec<&str> =
        workspace["workspace"]["members"].as_array().unwrap().iter().map(|m| m.as_str().unwrap()).collect();
    assert_eq!(members, ARROWS.map(|(member, _)| member));
}

#[test]
fn arrows_run_one_way() {
    let allowed: BTreeMap<&str, &[&str]> = ARROWS.into_iter().collect();
    for (member, targets) in &allowed {
        for dependency in dependencies(member).iter().filter(|d| allowed.contains_key(d.as_str())) {
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

/// Lines of a file that are not in its test module, which stands last.
fn lines_without_tests(text: &str) -> usize {
    text.split("#[cfg(test)]\nmod ").next().unwrap().lines().count()
}

#[test]
fn files_have_at_most_400_lines_without_tests() {
    let mut checked = 0;
    for (member, _) in ARROWS {
        let mut folders = vec![root().join(member)];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|e| e == "rs") {
                    let n = lines_without_tests(&std::fs::read_to_string(&path).unwrap());
                    assert!(n <= 400, "{} has {n} lines", path.display());
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 50, "only {checked} files found");
}

/// Only the program prints.
#[test]
fn libraries_do_not_print() {
    for member in ["pipeline", "augment", "trainer", "eval"] {
        let mut folders = vec![root().join(member).join("src")];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let text = std::fs::read_to_string(&path).unwrap();
                for word in ["println!", "eprintln!", "process::exit", "env::var"] {
                    assert!(!text.contains(word), "{} contains {word}", path.display());
                }
            }
        }
    }
}
