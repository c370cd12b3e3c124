//! Folders, archives and lists as other people have them: read as they mean them, or refused by
//! name.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Output;

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

/// Returns standard error of a check that has found something bad.
fn bad(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn world() -> World {
    World { folder: tempfile::tempdir().unwrap() }
}

fn stats(world: &World, what: &str) -> (String, serde_json::Value) {
    let output = world.ocelli(&["shards", "stats", &world.text(what), "--json"]);
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
    let said = ok(&world.ocelli(&["shards", "pack", &set, "--out", &world.text("packed")]));
    assert!(said.contains("skipped hidden folders: 1 .cache/, 1 .ipynb_checkpoints/"), "{said}");
    for what in ["set", "set.tar", "packed"] {
        let (_, json) = stats(&world, what);
        assert_eq!(json["samples"], 3, "{what}: {json}");
    }
    let listed = stdout(&world.ocelli(&["shards", "ls", &set]));
    assert_eq!(listed.lines().count(), 3, "{listed}");
    ok(&world.ocelli(&["shards", "verify", &set]));
    ok(&world.ocelli(&["shards", "verify", &tar]));
    ok(&world.ocelli(&["shards", "contact-sheet", &set, "--out", &world.text("sheet.png")]));
    assert_eq!(fs::read_to_string(world.path("packed/classes.txt")).unwrap(), "cat\ndog\n");
}

/// A sample as every reader has it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Read {
    image: Vec<u8>,
    classes: Vec<String>,
    key: String,
}

/// Returns the samples of a set in the order of their images. Classes that are numbers are named as
/// `classes.txt` of the set names them.
fn read(world: &World, what: &str) -> Vec<Read> {
    let dataset = crate::support::open(world, &world.text(what)).unwrap();
    let names = fs::read_to_string(world.path(what).join("classes.txt")).unwrap_or_default();
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
        all.push(Read { image: sample.image.bytes().to_vec(), classes, key: sample.key });
    }
    all.sort();
    all
}

/// The same files as a folder, a tar of it, one with `./`, shards packed from the folder, shards
/// written anew from the tar, under other keys as well, and Parquet: each has the samples of each
/// other, with their classes, and refuses the same image for the same reason.
#[test]
fn every_form_of_a_set_is_the_same_set() {
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
    let archive = |name: &str, what: &[&str]| {
        let tar = world.text(name);
        let made = std::process::Command::new("tar")
            .args(["cf", &tar, "-C", set.to_str().unwrap()])
            .args(what)
            .status();
        assert!(made.unwrap().success());
    };
    archive("dots.tar", &["."]);
    archive("set.tar", &["cat", "dog", "007", "root.png"]);
    ok(&world.ocelli(&["shards", "pack", &world.text("set"), "--out", &world.text("packed")]));
    let tar = world.text("set.tar");
    ok(&world.ocelli(&["shards", "reshard", &tar, "--out", &world.text("anew"), "--samples-per-shard", "1"]));
    let numbers = ["shards", "reshard", &tar, "--renumber", "--out", &world.text("numbers")];
    ok(&world.ocelli(&numbers));
    write_hub(&world.path("hub.parquet"), &set, &names);

    let forms = ["dots.tar", "set.tar", "packed", "anew", "numbers", "hub.parquet"];
    let all: Vec<Vec<Read>> = forms.iter().map(|form| read(&world, form)).collect();
    // Rows of a Parquet file have numbers, as samples have that were renumbered, and one class of
    // two names here.
    let is_renumbered = |form: &str| ["hub.parquet", "numbers"].contains(&form);
    let has_all_classes = |form: &str| form != "hub.parquet";
    for (number, form) in forms.iter().enumerate() {
        for (other, samples) in forms.iter().zip(&all).take(number) {
            let pair = format!("{form} and {other}");
            assert_eq!(all[number].len(), samples.len(), "{pair}");
            for ((a, b), named) in all[number].iter().zip(samples).zip(&all[0]) {
                let name = named.key.as_str();
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
    // The library reads archives; the program reads a folder as one.
    let listed = stdout(&world.ocelli(&["shards", "ls", &world.text("set")]));
    let mut listed: Vec<(&str, &str)> = listed
        .lines()
        .map(|line| {
            let [_, key, members] = line.split('\t').collect::<Vec<_>>().try_into().unwrap();
            (key, members.split(' ').next().unwrap())
        })
        .collect();
    listed.sort_unstable();
    let lengths: Vec<String> = all[0].iter().map(|sample| format!("png:{}", sample.image.len())).collect();
    let mut right: Vec<(&str, &str)> =
        all[0].iter().zip(&lengths).map(|(sample, length)| (sample.key.as_str(), length.as_str())).collect();
    right.sort_unstable();
    assert_eq!(listed, right);
    let key = |key: &str| all[0].iter().find(|sample| sample.key == key).unwrap();
    assert_eq!(key("cat/of a dog").classes, ["dog"]);
    assert_eq!(key("cat/of both").classes, ["dog", "bird"]);
    assert_eq!(key("007/x").classes, ["7"]);
    for none in ["cat/of none", "cat/of null", "root"] {
        assert!(key(none).classes.is_empty(), "{none}");
    }
    for form in forms.iter().chain(&["set"]) {
        let unlabeled = if has_all_classes(form) { 3 } else { 5 };
        let said = bad(&world.ocelli(&["shards", "verify", &world.text(form)]));
        assert!(said.contains("cannot decode: unexpected end of file"), "{form}: {said}");
        assert_eq!(said.matches("bad: ").count(), 1, "{form}: {said}");
        let (_, line) = stats(&world, form);
        assert_eq!(
            (&line["samples"], &line["bad"], &line["unlabeled"]),
            (&12.into(), &1.into(), &unlabeled.into()),
            "{form}"
        );
    }
}

/// Writes the images of `names` with the classes that their folder, and the files beside them,
/// give.
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

/// The key of a sample ends at the first dot, as in webdataset: a class is found behind further
/// dots, and several color images in one sample are told.
#[test]
fn names_with_dots_are_read_or_told() {
    let world = world();
    let image = png(1);
    write_tar(&world.path("one.tar"), &[("x.v1.0.png", &image), ("x.v1.0.cls", b"7")]);
    let dataset = crate::support::open(&world, &world.text("one.tar")).unwrap();
    assert_eq!(samples(&dataset), [("x".to_string(), image.clone(), Some(7))]);
    let names: Vec<String> = (1..5).map(|month| format!("scan.2024-{month:02}.png")).collect();
    let members: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), &image[..])).collect();
    write_tar(&world.path("scans.tar"), &members);
    let said = bad(&world.ocelli(&["shards", "verify", &world.text("scans.tar")]));
    assert!(said.contains("4 color images are in one sample") && said.contains("first dot"), "{said}");
}

/// A set that `pretrain` would refuse does not pass `verify`.
#[test]
fn verify_fails_where_there_is_no_image() {
    let world = world();
    let image = png(1);
    write_tar(&world.path("text.tar"), &[("a.txt", b"text"), ("b.txt", b"text")]);
    write_tar(&world.path("reserved.tar"), &[("__train__/a.png", &image)]);
    for what in ["text.tar", "reserved.tar"] {
        let said = fails(&world.ocelli(&["shards", "verify", &world.text(what)]), 3);
        assert!(said.contains("no samples"), "{what}: {said}");
    }
    fs::create_dir(world.path("mixed")).unwrap();
    write_tar(&world.path("mixed/a.tar"), &[("a.txt", b"text"), ("b.png", &image)]);
    let said = bad(&world.ocelli(&["shards", "verify", &world.text("mixed")]));
    assert!(said.contains("sample a: no member with extension"), "{said}");
}

/// Archives of GNU tar with other records, sparse members, members that stand apart or twice, and
/// names in Latin-1.
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
        let said = fails(&world.ocelli(&["shards", "ls", &out]), 3);
        assert!(said.contains("sparse"), "{said}");
    }
    write_tar(
        &world.path("apart.tar"),
        &[("a.png", &a), ("b.png", &b), ("a.cls", b"3"), ("b.cls", b"4"), ("b.cls", b"5")],
    );
    let dataset = crate::support::open(&world, &world.text("apart.tar")).unwrap();
    assert_eq!(samples(&dataset), [("a".into(), a.clone(), Some(3)), ("b".into(), b.clone(), Some(5))]);
    let said = ok(&world.ocelli(&["shards", "ls", &world.text("apart.tar")]));
    assert!(said.contains("1 member(s) are duplicated"), "{said}");
    let mut tar = tar::Builder::new(File::create(world.path("latin.tar")).unwrap());
    append(&mut tar, b"caf\xe9.png", &a);
    append(&mut tar, b"caf\xe8.png", &b);
    tar.finish().unwrap();
    let dataset = crate::support::open(&world, &world.text("latin.tar")).unwrap();
    let keys: Vec<String> = samples(&dataset).into_iter().map(|(key, ..)| key).collect();
    assert_eq!(keys, ["caf%E9", "caf%E8"]);
}

/// A file of another format is called by its name, with what to do.
#[test]
fn other_formats_are_named() {
    let world = world();
    let files: [(&str, &[u8], &str); 5] = [
        ("a.tar", b"\x28\xb5\x2f\xfd rest", "compressed with zstd"),
        ("b.tar", b"PK\x03\x04 rest", "a zip archive"),
        ("c.tar", b"<!DOCTYPE html><title>Login</title>", "a web page"),
        ("d.tar", b"\x1f\x8b rest", "compressed with gzip"),
        ("e.tar.zst", b"\x28\xb5\x2f\xfd rest", "compressed with zstd"),
    ];
    for (name, start, named) in files {
        fs::write(world.path(name), [start, &[b'x'; 2000]].concat()).unwrap();
        let said = fails(&world.ocelli(&["shards", "ls", &world.text(name)]), 3);
        assert!(said.contains(named) && said.contains("is not a tar file"), "{said}");
    }
}

/// Lists with the usual names of columns, with named ones, with classes behind a space, and with
/// files that are not there.
#[test]
fn lists_of_other_people_are_read() {
    let world = world();
    write_images(&world.path(""), &["images/a b.png", "images/c.png"]);
    let out = |name: &str| world.text(name);
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
        let folder = out(&format!("{name}-packed"));
        ok(&world.ocelli(&[&["shards", "pack", &out(name), "--out", &folder], more].concat()));
        let classes = fs::read_to_string(Path::new(&folder).join("classes.txt")).unwrap();
        assert_eq!(classes, "cat\ndog\n", "{name}");
    }
    fs::write(world.path("none.csv"), "where,what\nimages/c.png,cat\n").unwrap();
    let said = fails(&world.ocelli(&["shards", "pack", &out("none.csv"), "--out", &out("none")]), 2);
    assert!(said.contains("it has where, what; --image-column names another"), "{said}");
    // No class: below zero, wherever it stands.
    fs::write(world.path("less.csv"), "path,label\nimages/a b.png,-1\nimages/c.png,3\n").unwrap();
    ok(&world.ocelli(&["shards", "pack", &out("less.csv"), "--out", &out("less")]));
    let dataset = crate::support::open(&world, &out("less")).unwrap();
    let mut labels: Vec<Option<u32>> = samples(&dataset).into_iter().map(|(.., label)| label).collect();
    labels.sort();
    assert_eq!(labels, [None, Some(3)]);
}

/// An image that is missing, not readable, or too large is called what it is; and a large file
/// beside an image is left out.
#[test]
fn what_is_wrong_with_an_image_is_said() {
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
    let said = stdout(&output);
    assert!(
        said.contains("2 images cannot be used and have no row: images/gone.png (it is missing), images/text.png (cannot decode"),
        "{said}"
    );
    let mut json = File::create(world.path("images/a.json")).unwrap();
    json.write_all(format!("{{\"imageData\":\"{}\"}}", "A".repeat(100_000)).as_bytes()).unwrap();
    fs::write(world.path("images/b.json"), "{\"place\":\"here\"}").unwrap();
    fs::remove_file(world.path("images/text.png")).unwrap();
    let packed = world.text("packed");
    let said = ok(&world.ocelli(&["shards", "pack", &world.text("images"), "--out", &packed]));
    assert!(said.contains("1 .json of more than 64 KB"), "{said}");
    assert!(fs::metadata(world.path("packed/train-000000.tar")).unwrap().len() < 20_000);
}

/// A score needs as many neighbors as it names.
#[test]
fn neighbors_that_are_not_there_give_no_score() {
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
    let said = ok(&output);
    assert!(said.contains("k = 100, 200 is left out, k = 10, 20 is scored"), "{said}");
    let json = json_of(&output);
    let scores = json["networks"].as_object().unwrap().values().next().unwrap().as_object().unwrap();
    assert_eq!(scores.keys().collect::<Vec<_>>(), ["knn_10", "knn_20"]);
}

fn rows_of(path: &Path) -> Vec<f32> {
    npyz::NpyFile::new(&fs::read(path).unwrap()[..]).unwrap().into_vec().unwrap()
}

/// A network that goes out in DINOv3's layout and comes in again has its features, where what the
/// layout cannot say is told both ways; and a file with the name of a network of satellite images
/// has their constants.
#[test]
fn what_a_layout_cannot_say_is_told() {
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
    let said = ok(&world.ocelli(&["export", "--checkpoint", &run, "--format", "dinov3", "--out", &file]));
    assert!(said.contains("ε of its layer norms is 1e-6") && said.contains("--norm-epsilon 1e-6"), "{said}");
    fs::copy(&file, &satellite).unwrap();
    let embed = |weights: &str, out: &str, more: &[&str]| {
        let out = world.text(out);
        let args = [
            "embed",
            "--checkpoint",
            weights,
            "--shards",
            &data,
            "--image-px",
            "16",
            "--resize-px",
            "16",
            "--out",
            &out,
        ];
        let said = ok(&world.ocelli(&[&args[..], more].concat()));
        (said, rows_of(Path::new(&out)))
    };
    let (_, ours) = embed(&run, "run.npy", &[]);
    let (_, exact) = embed(&file, "exact.npy", &["--heads", "2", "--norm-epsilon", "1e-6"]);
    let largest = ours.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let gap = ours.iter().zip(&exact).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(gap <= 1e-5 * largest, "{gap} of {largest}");
    let (said, _) = embed(&file, "told.npy", &["--heads", "2"]);
    assert!(said.contains("does not say the ε of its layer norms: 1e-5 is taken"), "{said}");
    let (said, other) = embed(&satellite, "satellite.npy", &["--heads", "2", "--norm-epsilon", "1e-6"]);
    assert!(said.contains("satellite images, whose constants of colors are taken"), "{said}");
    assert_ne!(other, exact);
    // A folder of torch.distributed.
    fs::create_dir(world.path("dcp")).unwrap();
    fs::write(world.path("dcp/.metadata"), b"\x80\x04").unwrap();
    let args =
        ["embed", "--checkpoint", &world.text("dcp"), "--shards", &data, "--out", &world.text("x.npy")];
    let output = world.ocelli(&args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("dcp_to_torch"), "{said}");
}

/// Limits of the machine end the program with a message: threads that cannot be started, and files
/// that may not become longer.
#[test]
fn limits_of_the_machine_are_told() {
    let world = World::new(24);
    let program = env!("CARGO_BIN_EXE_ocelli-under-test");
    let limited = |limit: &str, args: &[&str]| {
        let script = format!("{limit}; exec \"$0\" \"$@\"");
        std::process::Command::new("sh").args(["-c", &script, program]).args(args).output().unwrap()
    };
    // Blocks of 512 bytes.
    let data = world.text("data");
    let out = world.text("again");
    let output = limited("ulimit -f 8", &["shards", "reshard", &data, "--out", &out]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("error: cannot write") && said.contains("File too large"), "{said}");
    // The limit of processes counts all of a user, and does not hold for root: another user, of
    // whom there are none.
    let others = ["--reuid=61234", "--clear-groups", program, "--version"];
    let id = std::process::Command::new("setpriv").args(others).output();
    if !id.is_ok_and(|output| output.status.success()) {
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
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("start no more threads"), "{said}");
    assert!(!said.contains("panicked"), "{said}");
}

/// A member whose name leads out of a folder passes no check and comes into no shard; links to
/// folders elsewhere are told.
#[test]
fn names_and_links_that_lead_elsewhere_are_told() {
    let world = world();
    let image = png(1);
    write_tar(&world.path("out.tar"), &[("../../evil.png", &image), ("fine.png", &image)]);
    let tar = world.text("out.tar");
    let said = bad(&world.ocelli(&["shards", "verify", &tar]));
    assert!(said.contains("sample ../../evil: its name leads out of a folder"), "{said}");
    let said = fails(&world.ocelli(&["shards", "reshard", &tar, "--out", &world.text("anew")]), 3);
    assert!(said.contains("member ../../evil.png: its name leads out of a folder"), "{said}");
    ok(&world.ocelli(&["shards", "reshard", &tar, "--renumber", "--out", &world.text("renumbered")]));
    ok(&world.ocelli(&["shards", "verify", &world.text("renumbered")]));

    write_images(&world.path(""), &["set/cat/a.png", "elsewhere/b.png", "set/dog/c.png"]);
    for (link, target) in [("set/linked", "elsewhere"), ("set/inside", "set/dog")] {
        std::os::unix::fs::symlink(world.path(target), world.path(link)).unwrap();
    }
    let said = ok(&world.ocelli(&["shards", "pack", &world.text("set"), "--out", &world.text("packed")]));
    assert!(said.contains("set/linked is a link to") && !said.contains("set/inside is"), "{said}");
}

/// Features that are all equal say nothing, and neither do their scores.
#[test]
fn features_that_are_all_equal_are_told() {
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
        let said = ok(&world.ocelli(args));
        assert!(said.contains("have the same features"), "{args:?}: {said}");
    }
}

/// Files of weights that contradict themselves are refused, with what does.
#[test]
fn weights_that_contradict_themselves_are_refused() {
    let world = World::new(40);
    ok(&world.pretrain("run", &["--set", "optim.length={steps=1}"]));
    let run = world.text("run");
    let shard = world.text("data/train-000000.tar");
    let refused = |weights: &str| {
        let args = ["embed", "--checkpoint", weights, "--shards", &shard, "--out", &world.text("f.npy")];
        fails(&world.ocelli(&args), 3)
    };
    // Metadata of fewer blocks than the file holds.
    let own = world.text("w.safetensors");
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &own]));
    let text = String::from_utf8_lossy(&fs::read(&own).unwrap()).into_owned();
    let at = text.find("\\\"depth\\\":").unwrap() + "\\\"depth\\\":".len();
    let mut bytes = fs::read(&own).unwrap();
    assert!(bytes[at] > b'1', "{}", &text[at..at + 2]);
    bytes[at] -= 1;
    fs::write(&own, bytes).unwrap();
    assert!(refused(&own).contains("is no parameter of the network that its metadata describe"));
    // A configuration of another network.
    let theirs = world.text("dinov2");
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &theirs, "--format", "transformers"]));
    let config = world.path("dinov2/config.json");
    let right = fs::read_to_string(&config).unwrap();
    let value: serde_json::Value = serde_json::from_str(&right).unwrap();
    for (key, wrong) in [("num_hidden_layers", "99"), ("hidden_size", "-8"), ("patch_size", "3")] {
        let right_entry = format!("\"{key}\": {}", value[key]);
        assert!(right.contains(&right_entry), "{right}");
        fs::write(&config, right.replace(&right_entry, &format!("\"{key}\": {wrong}"))).unwrap();
        let said = refused(&theirs);
        assert!(said.contains(&format!("{key} = {wrong}, and the weights have {}", value[key])), "{said}");
    }
    // An archive with two members of one name.
    let archive = world.text("w.pth");
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &archive, "--format", "dinov2"]));
    let mut bytes = fs::read(&archive).unwrap();
    let name = b"/data/1";
    let places: Vec<usize> =
        (0..bytes.len() - name.len()).filter(|at| bytes[*at..].starts_with(name)).collect();
    for at in &places {
        // Only the member of that name, before its bytes or the next entry of the directory.
        if !bytes[at + name.len()].is_ascii_digit() {
            bytes[at + name.len() - 1] = b'0';
        }
    }
    assert!(places.len() > 1, "{places:?}");
    fs::write(&archive, bytes).unwrap();
    assert!(refused(&archive).contains("two members of its archive have one name"));
}

/// Names that would steer a terminal, end a line or turn the direction of text are shown escaped,
/// and written so into lists.
#[test]
fn names_do_not_steer_a_terminal() {
    let world = world();
    let image = png(1);
    fs::create_dir(world.path("t")).unwrap();
    let names = ["a\nb.png", "a\tc.png", "e\u{1b}[2Jf.png", "g\u{202e}h.png"];
    let members: Vec<(&str, &[u8])> = names.iter().map(|name| (*name, &image[..])).collect();
    write_tar(&world.path("t/x.tar"), &members);
    let listed = stdout(&world.ocelli(&["shards", "ls", &world.text("t")]));
    assert_eq!(listed.lines().count(), 4, "{listed:?}");
    assert!(
        listed.contains("a%0Ab") && listed.contains("a%09c") && listed.contains("e%1B[2Jf"),
        "{listed:?}"
    );
    assert!(!listed.contains('\u{1b}') && !listed.contains('\u{202e}'), "{listed:?}");
    fs::create_dir_all(world.path("runs/bad\u{1b}[2J\u{202e}name")).unwrap();
    fs::write(world.path("runs/bad\u{1b}[2J\u{202e}name/plan.toml"), "x").unwrap();
    let output = world.ocelli(&["runs", &world.text("runs")]);
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(!said.contains('\u{1b}') && !said.contains('\u{202e}'), "{said:?}");
}
