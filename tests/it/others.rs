//! Folders, archives and lists in the layouts that other people use: read as intended, or refused
//! with a message that names the file.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Output;

use crate::messages::{check_message, lines_with};
use crate::support::{World, fails, json_of, left_out, ok, samples};

fn png(seed: u8) -> Vec<u8> {
    let mut bytes = std::io::Cursor::new(Vec::new());
    image::RgbImage::from_fn(18, 18, |x: u32, y: u32| {
        image::Rgb([seed.wrapping_mul(37), (x * 9) as u8, (y * 11) as u8])
    })
    .write_to(&mut bytes, image::ImageFormat::Png)
    .unwrap();
    bytes.into_inner()
}

fn write_images(folder: &Path, names: &[&str]) {
    for (number, name) in names.iter().enumerate() {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, png(number as u8)).unwrap();
    }
}

/// Writes a tar of `members`, in their order.
fn write_tar(path: &Path, members: &[(&str, &[u8])]) {
    let mut tar = tar::Builder::new(File::create(path).unwrap());
    for (name, bytes) in members {
        append(&mut tar, name.as_bytes(), bytes);
    }
    tar.finish().unwrap();
}

fn append(tar: &mut tar::Builder<File>, name: &[u8], bytes: &[u8]) {
    let mut header = tar::Header::new_gnu();
    header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name);
    header.set_size(bytes.len() as u64);
    header.set_mode(0o644);
    header.set_cksum();
    tar.append(&header, bytes).unwrap();
}

fn stdout(output: &Output) -> String {
    ok(output);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns standard error of a check that found bad samples.
fn bad(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn world() -> World {
    World { folder: tempfile::tempdir().unwrap() }
}

fn stats(world: &World, set: &str) -> (String, serde_json::Value) {
    let output = world.ocelli(&["shards", "stats", &world.text(set), "--json"]);
    (ok(&output), json_of(&output))
}

/// A folder, a tar of it and shards packed from it hold the same samples: no hidden files or
/// folders, and the same classes.
#[test]
fn a_folder_and_its_tar_are_the_same() {
    let world = world();
    let names = [
        "set/cat/a.png",
        "set/cat/b.png",
        "set/dog/c.png",
        "set/dog/._c.png",
        "set/.ipynb_checkpoints/a.png",
        "set/dog/.cache/deep/x.png",
    ];
    write_images(&world.path(""), &names);
    let archived = std::process::Command::new("tar")
        .args(["cf", &world.text("set.tar"), "-C", &world.text("set"), "."])
        .status()
        .unwrap();
    assert!(archived.success());
    let set = world.text("set");
    let tar = world.text("set.tar");
    let stderr = ok(&world.ocelli(&["shards", "pack", &set, "--out", &world.text("packed")]));
    check_message("others::a_folder_and_its_tar_are_the_same", &lines_with(&stderr, "1 .cache/"));
    for set in ["set", "set.tar", "packed"] {
        let (_, json) = stats(&world, set);
        assert_eq!(json["samples"], 3, "{set}: {json}");
    }
    let listing = stdout(&world.ocelli(&["shards", "ls", &set]));
    assert_eq!(listing.lines().count(), 3, "{listing}");
    ok(&world.ocelli(&["shards", "verify", &set]));
    ok(&world.ocelli(&["shards", "verify", &tar]));
    ok(&world.ocelli(&["shards", "contact-sheet", &set, "--out", &world.text("sheet.png")]));
    assert_eq!(fs::read_to_string(world.path("packed/classes.txt")).unwrap(), "cat\ndog\n");
}

/// Content of a sample that does not depend on the form of its set.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Sample {
    image: Vec<u8>,
    classes: Vec<String>,
    key: String,
}

/// Returns the samples of a set in the order of their images. Classes that are numbers are named as
/// `classes.txt` of the set names them.
fn read_samples(world: &World, set: &str) -> Vec<Sample> {
    let dataset = crate::support::open(world, &world.text(set)).unwrap();
    let names = fs::read_to_string(world.path(set).join("classes.txt")).unwrap_or_default();
    let names: Vec<&str> = names.lines().collect();
    let mut all = Vec::new();
    for id in 0..dataset.n_samples() {
        let id = pipeline::SampleId(id);
        let sample = dataset.read(id).unwrap();
        let classes = dataset
            .classes(id)
            .unwrap()
            .into_iter()
            .map(|class| {
                let number = class.parse::<usize>().ok();
                number.and_then(|number| names.get(number)).map_or(class.clone(), |name| name.to_string())
            })
            .collect();
        all.push(Sample { image: sample.image.bytes().to_vec(), classes, key: sample.key });
    }
    all.sort();
    all
}

/// Writes the `members` of the folder `set` into the tar file `name`.
fn archive(world: &World, name: &str, members: &[&str]) {
    let status = std::process::Command::new("tar")
        .args(["cf", &world.text(name), "-C", &world.text("set")])
        .args(members)
        .status();
    assert!(status.unwrap().success());
}

/// Returns `true` if the samples of a form have numbers for keys, as the rows of a Parquet file do.
fn is_renumbered(form: &str) -> bool {
    ["hub.parquet", "numbers"].contains(&form)
}

/// Returns `true` if a form holds all classes: the Parquet file of this test has two of them.
fn has_all_classes(form: &str) -> bool {
    form != "hub.parquet"
}

fn with_key<'s>(samples: &'s [Sample], key: &str) -> &'s Sample {
    samples.iter().find(|sample| sample.key == key).unwrap()
}

/// The same files as a folder, a tar of it, one with `./`, shards packed from the folder, shards
/// rewritten from the tar, with other keys as well, and Parquet: all have the same samples and
/// classes, and refuse the same image for the same reason.
#[test]
fn every_form_of_a_set_has_the_same_samples() {
    let world = world();
    let names = [
        "set/cat/a.png",
        "set/cat/b.png",
        "set/cat/of a dog.png",
        "set/cat/of none.png",
        "set/dog/c.png",
        "set/dog/deep/d.png",
        "set/dog/e.png",
        "set/dog/broken.png",
        "set/cat/of both.png",
        "set/cat/of null.png",
        "set/007/x.png",
        "set/root.png",
    ];
    write_images(&world.path(""), &names);
    let set = world.path("set");
    fs::write(set.join("cat/of a dog.json"), "{\"label\": \"dog\", \"n\": 3}").unwrap();
    fs::write(set.join("cat/of none.cls"), "-1").unwrap();
    fs::write(set.join("cat/of both.cls"), "dog\nbird\n").unwrap();
    fs::write(set.join("cat/of null.json"), "{\"label\": null}").unwrap();
    fs::write(set.join("dog/c.txt"), "a caption").unwrap();
    fs::write(set.join("dog/broken.png"), &png(7)[..60]).unwrap();
    archive(&world, "dots.tar", &["."]);
    archive(&world, "set.tar", &["cat", "dog", "007", "root.png"]);
    ok(&world.ocelli(&["shards", "pack", &world.text("set"), "--out", &world.text("packed")]));
    let tar = world.text("set.tar");
    ok(&world.ocelli(&["shards", "reshard", &tar, "--out", &world.text("anew"), "--samples-per-shard", "1"]));
    let numbers = ["shards", "reshard", &tar, "--renumber", "--out", &world.text("numbers")];
    ok(&world.ocelli(&numbers));
    write_hub(&world.path("hub.parquet"), &set, &names);

    let forms = ["dots.tar", "set.tar", "packed", "anew", "numbers", "hub.parquet"];
    let all: Vec<Vec<Sample>> = forms.iter().map(|form| read_samples(&world, form)).collect();
    for (number, form) in forms.iter().enumerate() {
        for (other, samples) in forms.iter().zip(&all).take(number) {
            let pair = format!("{form} and {other}");
            assert_eq!(all[number].len(), samples.len(), "{pair}");
            for (index, b) in samples.iter().enumerate() {
                let a = &all[number][index];
                let name = all[0][index].key.as_str();
                assert!(a.image == b.image, "{pair}: {name}");
                if has_all_classes(form) || !["cat/of both", "007/x"].contains(&name) {
                    assert_eq!(a.classes, b.classes, "{pair}: {name}");
                }
                if !is_renumbered(form) && !is_renumbered(other) {
                    assert_eq!(a.key, b.key, "{pair}");
                }
            }
        }
    }
    // The library opens archives; the program opens folders, too.
    let listing = stdout(&world.ocelli(&["shards", "ls", &world.text("set")]));
    let mut listing: Vec<(&str, &str)> = listing
        .lines()
        .map(|line| {
            let [_, key, members] = line.split('\t').collect::<Vec<_>>().try_into().unwrap();
            (key, members.split(' ').next().unwrap())
        })
        .collect();
    listing.sort_unstable();
    let lengths: Vec<String> = all[0].iter().map(|sample| format!("png:{}", sample.image.len())).collect();
    let mut expected: Vec<(&str, &str)> =
        all[0].iter().zip(&lengths).map(|(sample, length)| (sample.key.as_str(), length.as_str())).collect();
    expected.sort_unstable();
    assert_eq!(listing, expected);
    assert_eq!(with_key(&all[0], "cat/of a dog").classes, ["dog"]);
    assert_eq!(with_key(&all[0], "cat/of both").classes, ["dog", "bird"]);
    assert_eq!(with_key(&all[0], "007/x").classes, ["7"]);
    for key in ["cat/of none", "cat/of null", "root"] {
        assert!(with_key(&all[0], key).classes.is_empty(), "{key}");
    }
    for form in forms.iter().chain(&["set"]) {
        let unlabeled = if has_all_classes(form) { 3 } else { 5 };
        let stderr = bad(&world.ocelli(&["shards", "verify", &world.text(form)]));
        check_message(
            &format!("others::every_form_of_a_set_has_the_same_samples.{form}"),
            &lines_with(&stderr, "bad: "),
        );
        assert_eq!(stderr.matches("bad: ").count(), 1, "{form}: {stderr}");
        let (_, line) = stats(&world, form);
        assert_eq!(
            (&line["samples"], &line["bad"], &line["unlabeled"]),
            (&12.into(), &1.into(), &unlabeled.into()),
            "{form}"
        );
    }
}

/// Writes the images of `names` into a Parquet file, with the classes that their folders and their
/// sidecar files give.
fn write_hub(path: &Path, set: &Path, names: &[&str]) {
    let mut images = Vec::new();
    let mut labels = Vec::new();
    for name in names {
        let below = name.strip_prefix("set/").unwrap();
        images.push(fs::read(set.join(below)).unwrap());
        labels.push(match below {
            "cat/of none.png" | "cat/of null.png" | "cat/of both.png" | "root.png" | "007/x.png" => -1,
            "cat/of a dog.png" => 1,
            _ => i64::from(below.starts_with("dog")),
        });
    }
    crate::parquet_sets::write_labeled(path, &images, &labels);
}

/// The key of a sample ends at the first dot, as in webdataset: a class is read after further dots,
/// and several color images in one sample are reported.
#[test]
fn names_with_dots_are_read_or_reported() {
    let world = world();
    let image = png(1);
    write_tar(&world.path("one.tar"), &[("x.v1.0.png", &image), ("x.v1.0.cls", b"7")]);
    let dataset = crate::support::open(&world, &world.text("one.tar")).unwrap();
    assert_eq!(samples(&dataset), [("x".to_string(), image.clone(), Some(7))]);
    let names: Vec<String> = (1..5).map(|month| format!("scan.2024-{month:02}.png")).collect();
    let members: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), &image[..])).collect();
    write_tar(&world.path("scans.tar"), &members);
    let stderr = bad(&world.ocelli(&["shards", "verify", &world.text("scans.tar")]));
    check_message("others::names_with_dots_are_read_or_reported", &lines_with(&stderr, "bad: "));
}

/// A set that `pretrain` would refuse does not pass `verify`.
#[test]
fn verify_fails_without_images() {
    let world = world();
    let image = png(1);
    write_tar(&world.path("text.tar"), &[("a.txt", b"text"), ("b.txt", b"text")]);
    write_tar(&world.path("reserved.tar"), &[("__train__/a.png", &image)]);
    for set in ["text.tar", "reserved.tar"] {
        let output = world.ocelli(&["shards", "verify", &world.text(set)]);
        check_message(&format!("others::verify_fails_without_images.{set}"), &fails(&output, 3));
    }
    fs::create_dir(world.path("mixed")).unwrap();
    write_tar(&world.path("mixed/a.tar"), &[("a.txt", b"text"), ("b.png", &image)]);
    let stderr = bad(&world.ocelli(&["shards", "verify", &world.text("mixed")]));
    check_message("others::verify_fails_without_images.mixed", &lines_with(&stderr, "bad: "));
}

/// Archives of GNU tar with other record sizes, sparse members, members that are not adjacent or
/// occur twice, and names in Latin-1.
#[test]
fn archives_of_other_tools_are_read() {
    let world = world();
    let [a, b] = [png(1), png(2)];
    write_images(&world.path(""), &["a.png", "b.png"]);
    for records in ["1", "7", "64", "2048"] {
        let out = world.text("records.tar");
        let status = std::process::Command::new("tar")
            .args(["-b", records, "-cf", &out, "-C", &world.text(""), "a.png", "b.png"])
            .status()
            .unwrap();
        assert!(status.success());
        ok(&world.ocelli(&["shards", "verify", &out]));
        let _ = fs::remove_file(pipeline::shard::sidecar::path_of(&world.path("records.tar")));
    }
    let sparse = File::create(world.path("hole.npy")).unwrap();
    sparse.set_len(1 << 20).unwrap();
    for format in ["pax", "gnu"] {
        let out = world.text(&format!("sparse-{format}.tar"));
        let status = std::process::Command::new("tar")
            .args(["-S", &format!("--format={format}"), "-cf", &out, "-C", &world.text(""), "hole.npy"])
            .status()
            .unwrap();
        assert!(status.success());
        check_message(
            &format!("others::archives_of_other_tools_are_read.{format}"),
            &fails(&world.ocelli(&["shards", "ls", &out]), 3),
        );
    }
    write_tar(
        &world.path("apart.tar"),
        &[("a.png", &a), ("b.png", &b), ("a.cls", b"3"), ("b.cls", b"4"), ("b.cls", b"5")],
    );
    let dataset = crate::support::open(&world, &world.text("apart.tar")).unwrap();
    assert_eq!(samples(&dataset), [("a".into(), a.clone(), Some(3)), ("b".into(), b.clone(), Some(5))]);
    let stderr = ok(&world.ocelli(&["shards", "ls", &world.text("apart.tar")]));
    check_message("others::archives_of_other_tools_are_read.duplicate", &lines_with(&stderr, "apart.tar"));
    let mut tar = tar::Builder::new(File::create(world.path("latin.tar")).unwrap());
    append(&mut tar, b"caf\xe9.png", &a);
    append(&mut tar, b"caf\xe8.png", &b);
    tar.finish().unwrap();
    let dataset = crate::support::open(&world, &world.text("latin.tar")).unwrap();
    let keys: Vec<String> = samples(&dataset).into_iter().map(|(key, ..)| key).collect();
    assert_eq!(keys, ["caf%E9", "caf%E8"]);
}

/// The message about a file of another format names that format.
#[test]
fn messages_name_other_formats() {
    let world = world();
    let files: [(&str, &[u8]); 5] = [
        ("zstd.tar", b"\x28\xb5\x2f\xfd rest"),
        ("zip.tar", b"PK\x03\x04 rest"),
        ("html.tar", b"<!DOCTYPE html><title>Login</title>"),
        ("gzip.tar", b"\x1f\x8b rest"),
        ("a.tar.zst", b"\x28\xb5\x2f\xfd rest"),
    ];
    for (name, start) in files {
        fs::write(world.path(name), [start, &[b'x'; 2000]].concat()).unwrap();
        let output = world.ocelli(&["shards", "ls", &world.text(name)]);
        check_message(&format!("others::messages_name_other_formats.{name}"), &fails(&output, 3));
    }
}

/// Lists with common column names, with other columns given by flags, and with classes after a
/// space.
#[test]
fn lists_of_common_layouts_are_read() {
    let world = world();
    write_images(&world.path(""), &["images/a b.png", "images/c.png"]);
    let lists: [(&str, &str, &[&str]); 5] = [
        ("one.csv", "file_name,class\nimages/a b.png,cat\nimages/c.png,dog\n", &[]),
        ("two.csv", "id,IMAGE,category\n1,images/a b.png,cat\n2,images/c.png,dog\n", &[]),
        (
            "three.csv",
            "where,what\nimages/a b.png,cat\nimages/c.png,dog\n",
            &["--image-column", "where", "--label-column", "what"],
        ),
        ("four.txt", "images/a b.png cat\nimages/c.png dog\n", &[]),
        (
            "five.jsonl",
            "{\"filename\":\"images/a b.png\",\"label\":\"cat\"}\n{\"filename\":\"images/c.png\",\"label\":\"dog\"}\n",
            &[],
        ),
    ];
    for (name, text, more) in lists {
        fs::write(world.path(name), text).unwrap();
        let folder = world.text(&format!("{name}-packed"));
        ok(&world.ocelli(&[&["shards", "pack", &world.text(name), "--out", &folder], more].concat()));
        let classes = fs::read_to_string(Path::new(&folder).join("classes.txt")).unwrap();
        assert_eq!(classes, "cat\ndog\n", "{name}");
    }
    fs::write(world.path("none.csv"), "where,what\nimages/c.png,cat\n").unwrap();
    let output = world.ocelli(&["shards", "pack", &world.text("none.csv"), "--out", &world.text("none")]);
    check_message("others::lists_of_common_layouts_are_read", &fails(&output, 2));
    // A negative number means no class.
    fs::write(world.path("less.csv"), "path,label\nimages/a b.png,-1\nimages/c.png,3\n").unwrap();
    ok(&world.ocelli(&["shards", "pack", &world.text("less.csv"), "--out", &world.text("less")]));
    let dataset = crate::support::open(&world, &world.text("less")).unwrap();
    let mut labels: Vec<Option<u32>> = samples(&dataset).into_iter().map(|(.., label)| label).collect();
    labels.sort();
    assert_eq!(labels, [None, Some(3)]);
}

/// The reason is reported for an image that is missing or not readable, and a large sidecar file is
/// left out.
#[test]
fn unusable_images_are_reported_with_the_reason() {
    let world = World::new(8);
    ok(&world.pretrain("run", &["--set", "optim.length={steps=1}", "--set", "optim.warmup={steps=0}"]));
    write_images(&world.path(""), &["images/a.png", "images/b.png"]);
    fs::write(world.path("images/text.png"), "no image").unwrap();
    fs::write(world.path("list.txt"), "images/a.png\nimages/gone.png\nimages/text.png\nimages/b.png\n")
        .unwrap();
    let run = world.text("run");
    let out = world.text("x.npy");
    let output =
        world.ocelli(&["embed", "--checkpoint", &run, "--images", &world.text("list.txt"), "--out", &out]);
    let stdout = stdout(&output);
    assert!(
        stdout.contains(
            "2 unusable images without a row: images/gone.png (it is missing), images/text.png (cannot decode"
        ),
        "{stdout}"
    );
    let mut json = File::create(world.path("images/a.json")).unwrap();
    json.write_all(format!("{{\"imageData\":\"{}\"}}", "A".repeat(100_000)).as_bytes()).unwrap();
    fs::write(world.path("images/b.json"), "{\"place\":\"here\"}").unwrap();
    fs::remove_file(world.path("images/text.png")).unwrap();
    let packed = world.text("packed");
    let stderr = ok(&world.ocelli(&["shards", "pack", &world.text("images"), "--out", &packed]));
    check_message("others::unusable_images_are_reported_with_the_reason", &lines_with(&stderr, "1 .json"));
    assert!(fs::metadata(world.path("packed/train-000000.tar")).unwrap().len() < 20_000);
}

/// k-NN is scored only for a k that is smaller than the number of images.
#[test]
fn knn_is_not_scored_for_a_k_above_the_number_of_images() {
    let world = World::new(48);
    ok(&world.pretrain("run", &["--set", "optim.length={steps=1}", "--set", "optim.warmup={steps=0}"]));
    let run = world.text("run");
    let data = world.text("data");
    let output = world.ocelli(&[
        "probe",
        "--checkpoint",
        &run,
        "--train",
        &data,
        "--test",
        &data,
        "--protocol",
        "knn",
        "--json",
    ]);
    let stderr = ok(&output);
    check_message(
        "others::knn_is_not_scored_for_a_k_above_the_number_of_images",
        &lines_with(&stderr, "k = 100"),
    );
    let json = json_of(&output);
    let scores = json["networks"].as_object().unwrap().values().next().unwrap().as_object().unwrap();
    assert_eq!(scores.keys().collect::<Vec<_>>(), ["knn_10", "knn_20"]);
}

fn read_npy(path: &str) -> Vec<f32> {
    npyz::NpyFile::new(&fs::read(path).unwrap()[..]).unwrap().into_vec().unwrap()
}

/// Computes features with `weights` and writes them to `out`; returns standard error and the
/// features.
fn embed(world: &World, weights: &str, out: &str, more: &[&str]) -> (String, Vec<f32>) {
    let out = world.text(out);
    let args = [
        "embed",
        "--checkpoint",
        weights,
        "--shards",
        &world.text("data"),
        "--image-px",
        "16",
        "--resize-px",
        "16",
        "--out",
        &out,
    ];
    let stderr = ok(&world.ocelli(&[&args[..], more].concat()));
    (stderr, read_npy(&out))
}

/// A network that is exported in DINOv3's layout and loaded again gives the same features. Settings
/// that the layout cannot hold are reported at both ends. A file with the name of a network for
/// satellite images gets their color constants.
#[test]
fn settings_that_a_layout_cannot_hold_are_reported() {
    let world = World::new(16);
    let more = [
        "--set",
        "model.positions=rope",
        "--set",
        "optim.length={steps=1}",
        "--set",
        "optim.warmup={steps=0}",
    ];
    ok(&world.pretrain("run", &more));
    let run = world.text("run");
    let data = world.text("data");
    let file = world.text("mine.pth");
    let satellite = world.text("dinov3_tiny_pretrain_sat493m.pth");
    let stderr = ok(&world.ocelli(&["export", "--checkpoint", &run, "--format", "dinov3", "--out", &file]));
    check_message(
        "others::settings_that_a_layout_cannot_hold_are_reported.export",
        &lines_with(&stderr, "--norm-epsilon 1e-6"),
    );
    fs::copy(&file, &satellite).unwrap();
    let (_, expected) = embed(&world, &run, "run.npy", &[]);
    let exact_flags = ["--heads", "2", "--norm-epsilon", "1e-6"];
    let (_, exact) = embed(&world, &file, "exact.npy", &exact_flags);
    let largest = expected.iter().fold(0.0f32, |max, value| max.max(value.abs()));
    let gap = expected.iter().zip(&exact).fold(0.0f32, |max, (a, b)| max.max((a - b).abs()));
    assert!(gap <= 1e-5 * largest, "{gap} of {largest}");
    let (stderr, _) = embed(&world, &file, "told.npy", &["--heads", "2"]);
    check_message(
        "others::settings_that_a_layout_cannot_hold_are_reported.import",
        &lines_with(&stderr, "1e-5"),
    );
    let (stderr, other) = embed(&world, &satellite, "satellite.npy", &exact_flags);
    check_message(
        "others::settings_that_a_layout_cannot_hold_are_reported.satellite",
        &lines_with(&stderr, "satellite network"),
    );
    assert_ne!(other, exact);
    // A folder of torch.distributed.
    fs::create_dir(world.path("dcp")).unwrap();
    fs::write(world.path("dcp/.metadata"), b"\x80\x04").unwrap();
    let args =
        ["embed", "--checkpoint", &world.text("dcp"), "--shards", &data, "--out", &world.text("x.npy")];
    let output = world.ocelli(&args);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && stderr.contains("dcp_to_torch"), "{stderr}");
}

/// Limits of the machine end the program with a message: threads that cannot be started, and files
/// that cannot grow.
#[test]
fn limits_of_the_machine_are_reported() {
    let world = World::new(24);
    let program = env!("CARGO_BIN_EXE_ocelli-under-test");
    let data = world.text("data");
    let out = world.text("again");
    // Blocks of 512 bytes.
    let output = std::process::Command::new("sh")
        .args(["-c", "ulimit -f 8; exec \"$0\" \"$@\"", program])
        .args(["shards", "reshard", &data, "--out", &out])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("error: cannot write") && stderr.contains("File too large"), "{stderr}");
    // The limit of processes counts all processes of a user, and does not apply to root: the
    // program runs as a user who has no other processes.
    let setpriv_args = ["--reuid=61234", "--clear-groups", program, "--version"];
    let version = std::process::Command::new("setpriv").args(setpriv_args).output();
    if !version.is_ok_and(|output| output.status.success()) {
        left_out("no other user can be taken on, or none may read the program");
        return;
    }
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(world.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let script = "ulimit -u 1; exec setpriv --reuid=61234 --clear-groups \"$0\" \"$@\"";
    let output = std::process::Command::new("bash")
        .args(["-c", script, program, "shards", "verify", &data])
        .env("OCELLI_CACHE", world.text("cache"))
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("error: cannot start more threads") && stderr.contains("ulimit -u"), "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
}

/// A member whose name points outside the folder fails `verify` and is not copied into a shard;
/// links to other folders are reported.
#[test]
fn names_and_links_out_of_the_folder_are_reported() {
    let world = world();
    let image = png(1);
    write_tar(&world.path("out.tar"), &[("../../evil.png", &image), ("fine.png", &image)]);
    let tar = world.text("out.tar");
    let stderr = bad(&world.ocelli(&["shards", "verify", &tar]));
    check_message(
        "others::names_and_links_out_of_the_folder_are_reported.verify",
        &lines_with(&stderr, "bad: "),
    );
    let output = world.ocelli(&["shards", "reshard", &tar, "--out", &world.text("anew")]);
    check_message("others::names_and_links_out_of_the_folder_are_reported.reshard", &fails(&output, 3));
    ok(&world.ocelli(&["shards", "reshard", &tar, "--renumber", "--out", &world.text("renumbered")]));
    ok(&world.ocelli(&["shards", "verify", &world.text("renumbered")]));

    write_images(&world.path(""), &["set/cat/a.png", "elsewhere/b.png", "set/dog/c.png"]);
    for (link, target) in [("set/linked", "elsewhere"), ("set/inside", "set/dog")] {
        std::os::unix::fs::symlink(world.path(target), world.path(link)).unwrap();
    }
    let stderr = ok(&world.ocelli(&["shards", "pack", &world.text("set"), "--out", &world.text("packed")]));
    let link = lines_with(&stderr, "set/linked");
    check_message("others::names_and_links_out_of_the_folder_are_reported.link", &link);
    assert!(!stderr.contains("set/inside"), "{stderr}");
}

/// Features that are equal for all images are reported, because their scores mean nothing.
#[test]
fn features_that_are_all_equal_are_reported() {
    let world = World::new(40);
    ok(&world.pretrain("run", &["--set", "optim.length={steps=1}"]));
    let weights = world.text("w.safetensors");
    ok(&world.ocelli(&["export", "--checkpoint", &world.text("run"), "--out", &weights]));
    let mut bytes = fs::read(&weights).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8 + header..].fill(0);
    fs::write(&weights, bytes).unwrap();
    let shard = world.text("data/train-000000.tar");
    let embed = ["embed", "--checkpoint", &weights, "--shards", &shard, "--out", &world.text("f.npy")];
    let probe = [
        "probe",
        "--checkpoint",
        &weights,
        "--train",
        &shard,
        "--test",
        &shard,
        "--protocol",
        "knn",
        "--no-record",
    ];
    for args in [&embed[..], &probe] {
        let stderr = ok(&world.ocelli(args));
        check_message(
            &format!("others::features_that_are_all_equal_are_reported.{}", args[0]),
            &lines_with(&stderr, "warning:"),
        );
    }
}

/// Computes features with `weights`, which fails; returns standard error.
fn embed_error(world: &World, weights: &str) -> String {
    let shard = world.text("data/train-000000.tar");
    let args = ["embed", "--checkpoint", weights, "--shards", &shard, "--out", &world.text("f.npy")];
    fails(&world.ocelli(&args), 3)
}

/// Weights files that contradict themselves are refused, with the contradiction.
#[test]
fn inconsistent_weights_are_refused() {
    let world = World::new(40);
    ok(&world.pretrain("run", &["--set", "optim.length={steps=1}"]));
    let run = world.text("run");
    // Metadata of fewer blocks than the file holds.
    let weights = world.text("w.safetensors");
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &weights]));
    let text = String::from_utf8_lossy(&fs::read(&weights).unwrap()).into_owned();
    let at = text.find("\\\"depth\\\":").unwrap() + "\\\"depth\\\":".len();
    let mut bytes = fs::read(&weights).unwrap();
    assert!(bytes[at] > b'1', "{}", &text[at..at + 2]);
    bytes[at] -= 1;
    fs::write(&weights, bytes).unwrap();
    check_message("others::inconsistent_weights_are_refused.depth", &embed_error(&world, &weights));
    // A configuration of another network.
    let exported = world.text("dinov2");
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &exported, "--format", "transformers"]));
    let config = world.path("dinov2/config.json");
    let original = fs::read_to_string(&config).unwrap();
    let value: serde_json::Value = serde_json::from_str(&original).unwrap();
    for (key, wrong) in [("num_hidden_layers", "99"), ("hidden_size", "-8"), ("patch_size", "3")] {
        let entry = format!("\"{key}\": {}", value[key]);
        assert!(original.contains(&entry), "{original}");
        fs::write(&config, original.replace(&entry, &format!("\"{key}\": {wrong}"))).unwrap();
        check_message(
            &format!("others::inconsistent_weights_are_refused.{key}"),
            &embed_error(&world, &exported),
        );
    }
    // An archive with two members of one name.
    let archive = world.text("w.pth");
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &archive, "--format", "dinov2"]));
    let mut bytes = fs::read(&archive).unwrap();
    let name = b"/data/1";
    let offsets: Vec<usize> =
        (0..bytes.len() - name.len()).filter(|at| bytes[*at..].starts_with(name)).collect();
    for at in &offsets {
        // Only the member of that name, before its bytes or the next entry of the directory.
        if !bytes[at + name.len()].is_ascii_digit() {
            bytes[at + name.len() - 1] = b'0';
        }
    }
    assert!(offsets.len() > 1, "{offsets:?}");
    fs::write(&archive, bytes).unwrap();
    check_message("others::inconsistent_weights_are_refused.archive", &embed_error(&world, &archive));
}

/// Writes a safetensors file with a number for each of `names`.
fn write_numbers(path: &Path, names: &[&str]) {
    let mut header = serde_json::Map::new();
    for (index, name) in names.iter().enumerate() {
        let offsets = [4 * index, 4 * index + 4];
        let entry = serde_json::json!({ "dtype": "F32", "shape": [1], "data_offsets": offsets });
        header.insert(name.to_string(), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + 4 * names.len(), 0);
    fs::write(path, bytes).unwrap();
}

/// A CLIP is named in the formats of four libraries, with what can be done instead.
#[test]
fn weights_of_clip_are_refused_by_name() {
    const NAME: &str = "others::weights_of_clip_are_refused_by_name";
    let world = World::new(1);
    let files: [(&str, &[&str]); 4] = [
        ("openai", &["visual.class_embedding", "visual.ln_pre.weight", "token_embedding.weight"]),
        ("tower", &["class_embedding", "ln_pre.weight", "transformer.resblocks.0.ln_1.weight"]),
        ("transformers", &["vision_model.embeddings.class_embedding", "text_projection.weight"]),
        ("timm", &["cls_token", "norm_pre.weight", "patch_embed.proj.weight"]),
    ];
    for (library, names) in files {
        let weights = format!("{library}.safetensors");
        write_numbers(&world.path(&weights), names);
        let stderr = embed_error(&world, &world.text(&weights));
        assert!(stderr.contains("CLIP") && stderr.contains("docs/weights.md"), "{stderr}");
        check_message(&format!("{NAME}.{library}"), &stderr);
    }
}

/// Control characters in names, which would move the cursor, end a line or reverse the direction of
/// text, are escaped in output and in lists.
#[test]
fn control_characters_in_names_are_escaped() {
    let world = world();
    let image = png(1);
    fs::create_dir(world.path("t")).unwrap();
    let names = ["a\nb.png", "a\tc.png", "e\u{1b}[2Jf.png", "g\u{202e}h.png"];
    let members: Vec<(&str, &[u8])> = names.iter().map(|name| (*name, &image[..])).collect();
    write_tar(&world.path("t/x.tar"), &members);
    let listing = stdout(&world.ocelli(&["shards", "ls", &world.text("t")]));
    assert_eq!(listing.lines().count(), 4, "{listing:?}");
    assert!(
        listing.contains("a%0Ab") && listing.contains("a%09c") && listing.contains("e%1B[2Jf"),
        "{listing:?}"
    );
    assert!(!listing.contains('\u{1b}') && !listing.contains('\u{202e}'), "{listing:?}");
    fs::create_dir_all(world.path("runs/bad\u{1b}[2J\u{202e}name")).unwrap();
    fs::write(world.path("runs/bad\u{1b}[2J\u{202e}name/plan.toml"), "x").unwrap();
    let output = world.ocelli(&["runs", &world.text("runs")]);
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'), "{text:?}");
}
