//! Commands of the README and its pages: those that take seconds are run, and the flags of all
//! others are checked.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use image::{DynamicImage, ImageBuffer, Rgb};

use crate::support::{World, encode_png, ok, program, shard_writer};

/// Subcommands whose flags are checked without running them: they measure, or need other machines.
const TOO_LONG: [&str; 3] = ["bench", "quickstart", "track"];

/// Settings with which a run of a page takes seconds, of keys that all recipes have.
const SMALL: [&str; 2] = ["optim.batch_size=4", "optim.length.steps=2"];

/// Settings with which a classifier of a page is trained in seconds.
const SMALL_CLASSIFIER: [&str; 4] =
    ["optim.batch_size=4", "optim.length.steps=2", "optim.warmup={steps=0}", "views.crops.0.size_px=28"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// Texts of the README and of the pages, by name.
fn pages() -> Vec<(String, String)> {
    let mut paths = vec![root().join("README.md")];
    for entry in std::fs::read_dir(root().join("docs")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            paths.push(path);
        }
    }
    paths.sort();
    let mut pages = Vec::new();
    for path in paths {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        pages.push((name, std::fs::read_to_string(path).unwrap()));
    }
    pages
}

/// Commands in the shell blocks of `text`, one a line, without comments.
fn commands(text: &str) -> Vec<String> {
    let mut commands = Vec::new();
    for rest in text.split("```sh\n").skip(1) {
        let block = rest.split("```").next().unwrap().replace("\\\n", " ");
        for line in block.lines() {
            let command = line.split(" #").next().unwrap().trim();
            if is_command(command) {
                commands.push(command.to_string());
            }
        }
    }
    commands
}

fn is_command(line: &str) -> bool {
    !line.is_empty() && !line.starts_with('#')
}

/// Splits a command into words as a shell does.
fn words(command: &str) -> Vec<String> {
    let command = command.replace("...", "…");
    // Patterns are not expanded.
    let script = format!("set -f; for word in {command}; do printf '%s\\n' \"$word\"; done");
    let output = Command::new("bash").args(["+B", "-c", &script]).output().unwrap();
    assert!(output.status.success(), "{command}");
    let mut words: Vec<String> =
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_string).collect();
    // A placeholder may stand for the value of a flag, or for further flags.
    for at in (1..words.len()).rev() {
        if words[at] == "…" && !words[at - 1].starts_with("--") {
            words.remove(at);
        }
    }
    words
}

/// Checks that the flags of `words`, a command of ocelli, exist.
fn check_flags(words: &[String]) {
    let output = program().args(&words[1..]).arg("--help").output().unwrap();
    assert!(output.status.success(), "{words:?}\n{}", String::from_utf8_lossy(&output.stderr));
}

/// Checks a command of another program: its files exist, and a script of this repository has its
/// flags.
fn check_other(words: &[String]) {
    let scripts: Vec<&String> = words.iter().filter(|word| word.starts_with("scripts/")).collect();
    for script in &scripts {
        assert!(root().join(script).exists(), "{words:?}");
    }
    let features = std::fs::read_to_string(root().join("scripts/Cargo.toml")).unwrap();
    match words[0].as_str() {
        "cargo" => {
            if let Some(at) = words.iter().position(|word| word == "--features") {
                let feature = &words[at + 1];
                assert!(features.lines().any(|line| line.starts_with(&format!("{feature} = "))), "{words:?}");
            }
        }
        "python" => {
            let text = std::fs::read_to_string(root().join(scripts[0])).unwrap();
            for flag in words.iter().filter(|word| word.starts_with("--")) {
                assert!(text.contains(&format!("\"{flag}\"")), "{words:?}: {flag}");
            }
        }
        "mpirun" => {
            let at = words.iter().position(|word| word == "ocelli").unwrap();
            check_flags(&words[at..]);
        }
        other => panic!("no test knows what to do with {other}: {words:?}"),
    }
}

/// A folder that the pages assume: images, shards with and without parts, runs, and weights.
struct Desk {
    world: World,
}

impl Desk {
    fn new() -> Self {
        let desk = Self { world: World::new(12) };
        for i in 0..24u32 {
            let path = desk.world.path(&format!("photos/{}/{i}.png", ["cat", "dog"][i as usize % 2]));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            let image =
                ImageBuffer::from_fn(60, 50, |x, y| Rgb([(x * i) as u8, (y * (i + 3)) as u8, (i * 9) as u8]));
            image.save(path).unwrap();
        }
        desk.make_tiles();
        desk.make_masks();
        desk.run("ocelli shards pack photos --out shards --prefix all");
        desk.run("ocelli shards split shards --part train=0.5 --part test=0.5 --out parts");
        desk.make_set("cifar");
        // The commands of the README create them.
        std::fs::remove_dir_all(desk.world.path("shards")).unwrap();
        std::fs::remove_dir_all(desk.world.path("parts")).unwrap();
        std::os::unix::fs::symlink(root().join("scripts"), desk.world.path("scripts")).unwrap();
        desk.run("ocelli pretrain --recipe dinov2_cifar --shards cifar/train-000000.tar --workdir made");
        for run in ["first", "a", "b"] {
            desk.copy("made", &format!("runs/{run}"));
        }
        // Weights that the pages continue: with the names of DINOv2 and patches of 14 px.
        desk.run(
            "ocelli pretrain --recipe dinov2_cifar --shards cifar/train-000000.tar --workdir runs/patches \
             --set model.width=64 --set model.depth=1 --set model.heads=1 --set model.patch_px=14 --set \
             model.image_px=28 --set views.crops.0.size_px=28 --set views.crops.1.size_px=14",
        );
        desk.run("ocelli export --checkpoint runs/patches --out dinov2_vits14_pretrain.pth --format dinov2");
        desk.run("ocelli export --checkpoint runs/first --out shapes.pth --format dinov2");
        desk
    }

    /// Removes all files and folders whose paths begin with `prefix`.
    fn clear(&self, prefix: &str) {
        let pattern = format!("{}*", self.world.text(prefix));
        for path in glob::glob(&pattern).unwrap().flatten() {
            std::fs::remove_dir_all(&path).or_else(|_| std::fs::remove_file(&path)).unwrap();
        }
    }

    /// Makes a folder of tiles of four bands, each band a file of 16 bits.
    fn make_tiles(&self) {
        std::fs::create_dir(self.world.path("tiles")).unwrap();
        for i in 0..24u32 {
            let image = ImageBuffer::<image::Luma<u16>, Vec<u16>>::from_fn(36, 36, |x: u32, y: u32| {
                image::Luma([(x * (900 + i) + y * 500 + i * 40) as u16])
            });
            for band in ["b02", "b03", "b04", "b08"] {
                image.save(self.world.path(&format!("tiles/tile_{i}.{band}.png"))).unwrap();
            }
        }
    }

    /// Makes shards of images with masks of two classes, to train on and to score on.
    fn make_masks(&self) {
        for part in ["train", "val"] {
            let mut writer = shard_writer(&self.world.path("masks"), part);
            for i in 0..8u32 {
                let image = ImageBuffer::from_fn(40, 30, |x, y| Rgb([(x * i) as u8, (y * i) as u8, 90]));
                let mask = ImageBuffer::from_fn(40, 30, |x, _| image::Luma([u8::from(x > 4 * i)]));
                let image = encode_png(&DynamicImage::ImageRgb8(image));
                let mask = encode_png(&DynamicImage::ImageLuma8(mask));
                writer
                    .add(&format!("{i:04}"), &[("png", image.as_slice()), ("seg.png", mask.as_slice())])
                    .unwrap();
            }
            writer.finish().unwrap();
        }
    }

    /// Copies a folder.
    fn copy(&self, from: &str, to: &str) {
        std::fs::create_dir_all(self.world.path(to).parent().unwrap()).unwrap();
        let paths = [self.world.text(from), self.world.text(to)];
        assert!(Command::new("cp").arg("-r").args(paths).status().unwrap().success());
    }

    /// Makes a folder of thirteen shards to train on and one to test on.
    fn make_set(&self, name: &str) {
        let _ = std::fs::remove_dir_all(self.world.path(name));
        std::fs::create_dir_all(self.world.path(name)).unwrap();
        let folder = self.world.path(name);
        for number in 0..13 {
            let shard = folder.join(format!("train-{number:06}.tar"));
            std::fs::copy(self.world.path("parts/train-000000.tar"), shard).unwrap();
        }
        std::fs::copy(self.world.path("parts/test-000000.tar"), folder.join("test-000000.tar")).unwrap();
    }

    /// Runs a command of ocelli in the folder.
    fn output(&self, command: &str) -> Output {
        let mut words = words(command);
        let hours = words.iter().position(|word| word == "--hours");
        if let Some(at) = hours {
            words[at + 1] = "0.001".into();
        }
        match words[1].as_str() {
            // The small settings have a length of their own.
            "pretrain" if hours.is_some() => {}
            "pretrain" => words.extend(small_settings(&words)),
            "finetune" => {
                for setting in SMALL_CLASSIFIER {
                    words.extend(["--set".to_string(), setting.to_string()]);
                }
            }
            _ => {}
        }
        let mut command = program();
        command.args(&words[1..]).current_dir(self.world.path("."));
        command.env("OCELLI_CACHE", self.world.path("cache")).output().unwrap()
    }

    fn run(&self, command: &str) {
        let output = self.output(command);
        assert!(output.status.success(), "{command}\n{}", String::from_utf8_lossy(&output.stderr));
        ok(&output);
    }
}

/// Returns `true` if a command sets `key`.
fn is_set(words: &[String], key: &str) -> bool {
    words.iter().any(|word| word.starts_with(&format!("{key}=")))
}

/// Flags that make a run small: a narrow network unless the weights determine it, and small heads
/// if the method has any.
fn small_settings(words: &[String]) -> Vec<String> {
    let at = words.iter().position(|word| word == "--recipe").unwrap();
    let recipe = &words[at + 1];
    let mut settings = SMALL.to_vec();
    // The recipes that continue take the backbone from the weights.
    if !recipe.ends_with("_continue") {
        for (key, setting) in [
            ("model.width", "model.width=32"),
            ("model.depth", "model.depth=1"),
            ("model.heads", "model.heads=4"),
        ] {
            if !is_set(words, key) {
                settings.push(setting);
            }
        }
    }
    if recipe == "dinov2_continue" && !is_set(words, "views.global_px") {
        settings.extend(["views.global_px=28", "views.local_px=14"]);
    }
    if recipe.starts_with("lejepa") {
        settings.push("method.head_hidden=[16]");
    } else {
        settings.extend(["method.prototypes=16", "method.head_hidden=16", "method.head_bottleneck=8"]);
    }
    settings.push("optim.warmup={steps=0}");
    settings.into_iter().flat_map(|setting| ["--set".to_string(), setting.to_string()]).collect()
}

/// Commands in shell blocks: those of ocelli that take seconds are run in the folder that the pages
/// assume, in order.
#[test]
fn commands_of_pages_run() {
    let desk = Desk::new();
    let mut n_run = 0;
    let mut n_checked = 0;
    for (page, text) in pages() {
        // Each page starts with the folder that it describes, without the results of earlier pages.
        for name in ["runs/mine", "runs/more", "runs/short", "backbone", "features", "first.pth"] {
            desk.clear(name);
        }
        if page != "README.md" {
            desk.make_set("shards");
            desk.copy("made", "runs/mine");
        }
        for command in commands(&text) {
            let words = words(&command);
            let needs_other_machine =
                command.contains("://") || command.contains('…') || command.contains("--device");
            let takes_hours = command.contains(" --hours ");
            if words[0] != "ocelli" {
                check_other(&words);
                n_checked += 1;
            } else if needs_other_machine || TOO_LONG.contains(&words[1].as_str()) {
                check_flags(&words);
                n_checked += 1;
            } else {
                // Two commands of a page may write to the same folder: a reader chooses one.
                let has_init = words[1] == "pretrain" && words.iter().any(|word| word == "--init");
                let workdir =
                    words.iter().position(|word| word == "--workdir").map(|at| words[at + 1].as_str());
                match words[1].as_str() {
                    "embed" => desk.clear("features"),
                    "export" if command.contains("--out backbone") => desk.clear("backbone"),
                    "pretrain" if has_init || takes_hours => desk.clear(workdir.unwrap()),
                    _ => {}
                }
                let output = desk.output(&command);
                let stderr = String::from_utf8_lossy(&output.stderr);
                let exists = stderr.contains("exists") && words[1] == "shards";
                assert!(output.status.success() || exists, "{page}: {command}\n{stderr}");
                n_run += 1;
            }
        }
    }
    assert!(n_run >= 25 && n_checked >= 20, "{n_run} run, {n_checked} checked");
}

/// The flags of commands within sentences exist.
#[test]
fn flags_in_sentences_exist() {
    let mut seen = BTreeSet::new();
    for (page, text) in pages() {
        let prose: String = text.split("```").step_by(2).collect();
        for code in prose.split('`').skip(1).step_by(2).filter(|code| code.starts_with("ocelli ")) {
            let code = code.replace('\n', " ");
            if code.contains('|') || code.contains('[') || !seen.insert(code.clone()) {
                continue;
            }
            let words = words(&code);
            let output = program().args(&words[1..]).arg("--help").output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            // A sentence may name a flag without a value.
            let names_flag = stderr.contains("a value is required for");
            assert!(output.status.success() || names_flag, "{page}: {code}\n{stderr}");
        }
    }
    assert!(seen.len() >= 15, "{seen:?}");
}
