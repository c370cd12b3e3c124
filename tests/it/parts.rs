//! Preparation in parts: the joined parts have the same bytes as the result of one job.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::messages::{check_message, lines_with};
use crate::servers::{Faults, WebServer};
use crate::support::{World, fails, json_of, ok};

/// Number of parts of each job.
const N: usize = 3;

/// Runs `args` in parts and joins them.
pub(crate) fn in_parts(world: &World, args: &[&str]) -> Output {
    let n = N.to_string();
    let join = [args, &["--join", &n]].concat();
    for part in [2, 1, 3] {
        // Parts may run in any order, and the error of an early join names the missing ones.
        check_message(&format!("parts::in_parts.before_{part}"), &fails(&world.ocelli(&join), 2));
        ok(&world.ocelli(&[args, &["--part", &format!("{part}/{N}")]].concat()));
    }
    let joined = world.ocelli(&join);
    assert!([Some(0), Some(3)].contains(&joined.status.code()), "{joined:?}");
    joined
}

/// Reads the files of a folder whose names satisfy `is_wanted`.
pub(crate) fn files(folder: &Path, is_wanted: impl Fn(&str) -> bool) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let named = entries.map(|entry| (entry.file_name().into_string().unwrap(), entry.path()));
    named.filter(|(name, _)| is_wanted(name)).map(|(name, path)| (name, fs::read(path).unwrap())).collect()
}

/// Returns `true` for files that do not depend on the division of a job into parts.
fn is_result(name: &str) -> bool {
    !name.contains("job.json") && !name.contains(".part-") && !name.contains("-of-")
}

/// Asserts that two folders have the same results.
pub(crate) fn assert_same(a: &Path, b: &Path) {
    let a = files(a, is_result);
    let b = files(b, is_result);
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (name, bytes) in &a {
        assert!(*bytes == b[name], "{name}");
    }
}

/// Writes a folder of images in classes, two of which cannot be decoded.
fn folder(world: &World) -> String {
    world.extract("files");
    for (number, entry) in fs::read_dir(world.path("files/train-000000")).unwrap().enumerate() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "jpg") {
            let class = world.path("images").join(["cat", "dog", "emu"][number % 3]);
            fs::create_dir_all(&class).unwrap();
            fs::copy(&path, class.join(path.file_name().unwrap())).unwrap();
        }
    }
    fs::write(world.path("images/cat/a.jpg"), b"no image").unwrap();
    fs::write(world.path("images/dog/z.png"), b"neither").unwrap();
    world.text("images")
}

/// Packs `images` into the folder `parts-samples-per-shard` with more flags.
fn pack(world: &World, images: &str, more: &[&str]) -> Output {
    let out = world.text("parts-samples-per-shard");
    let args = ["shards", "pack", images, "--out", &out, "--samples-per-shard", "7"];
    world.ocelli(&[&args[..], more].concat())
}

#[test]
fn folders_are_packed_in_parts() {
    let world = World::new(50);
    let images = folder(&world);
    let kb = fs::metadata(world.shard()).unwrap().len() / 9000;
    let bytes = (1000 * kb).to_string();
    for limit in [&["--samples-per-shard", "7"][..], &["--bytes-per-shard", &bytes]] {
        let name = limit[0].trim_start_matches('-');
        let single = format!("whole-{name}");
        let parts = format!("parts-{name}");
        let single_out = world.text(&single);
        let parts_out = world.text(&parts);
        let flags = [&["shards", "pack", &images, "--json"][..], limit, &["--out"]].concat();
        let expected = world.ocelli(&[&flags[..], &[&single_out]].concat());
        ok(&expected);
        let joined = in_parts(&world, &[&flags[..], &[&parts_out]].concat());
        assert_same(&world.path(&single), &world.path(&parts));
        let expected = json_of(&expected);
        let joined = json_of(&joined);
        assert_eq!((&joined["samples"], &joined["failed"]), (&50.into(), &2.into()), "{joined}");
        for key in ["samples", "classes", "shards", "failed", "skipped"] {
            assert_eq!(joined[key], expected[key], "{key}");
        }
        assert!(joined["shards"].as_u64().unwrap() > 6, "{joined}");
    }
    // A part whose shard was removed, as if the job had been stopped, writes that one; other
    // divisions are other jobs.
    fs::remove_file(world.path("parts-samples-per-shard/train-000001.tar")).unwrap();
    let output = pack(&world, &images, &["--join", "3"]);
    check_message("parts::folders_are_packed_in_parts.missing", &fails(&output, 2));
    let output = pack(&world, &images, &["--part", "1/3"]);
    ok(&output);
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 of them already done"), "{output:?}");
    ok(&pack(&world, &images, &["--join", "3"]));
    assert_same(&world.path("whole-samples-per-shard"), &world.path("parts-samples-per-shard"));
    for (work, more) in [("part", &["--part", "1/4"][..]), ("join", &["--join", "2"]), ("whole", &[])] {
        let name = format!("parts::folders_are_packed_in_parts.other_job.{work}");
        check_message(&name, &fails(&pack(&world, &images, more), 2));
    }
    // An image has changed since.
    let changed = world.path("images/emu").join(first_name(&world.path("images/emu")));
    let bytes = fs::read(&changed).unwrap();
    fs::write(&changed, [&bytes[..], &[0; 600]].concat()).unwrap();
    let output = pack(&world, &images, &["--part", "1/3"]);
    check_message("parts::folders_are_packed_in_parts.changed", &fails(&output, 2));
    fs::write(&changed, &bytes).unwrap();
    ok(&pack(&world, &images, &["--part", "1/3"]));
    for bad in ["0/3", "4/3", "3", "a/b"] {
        assert_eq!(pack(&world, &images, &["--part", bad]).status.code(), Some(2), "{bad}");
    }
    assert_eq!(pack(&world, &images, &["--part", "1/3", "--join", "3"]).status.code(), Some(2));
    assert_eq!(pack(&world, &images, &["--join", "0"]).status.code(), Some(2));
}

#[test]
fn urls_are_packed_in_parts() {
    let world = World::new(20);
    world.extract("www");
    let server = WebServer::start(&world.path("www/train-000000"), Faults::default());
    let urls = (0..22).map(|i| server.url(&format!("{i:08}.jpg")));
    fs::write(world.path("list.txt"), urls.collect::<Vec<_>>().join("\n")).unwrap();
    let list = world.text("list.txt");
    let args = ["shards", "pack", &list, "--urls", "--samples-per-shard", "4", "--connections", "1", "--out"];
    let single = world.text("whole");
    let parts = world.text("parts");
    ok(&world.ocelli(&[&args[..], &[&single]].concat()));
    in_parts(&world, &[&args[..], &[&parts]].concat());
    assert_same(&world.path("whole"), &world.path("parts"));
    for work in [["--part", "1/3"], ["--join", "3"]] {
        let overwrites = [&args[..], &[&parts, "--overwrite"], &work].concat();
        let name = format!("parts::urls_are_packed_in_parts.{}", work[0]);
        check_message(&name, &fails(&world.ocelli(&overwrites), 2));
    }
}

/// Writes samples into several shards, with a duplicate, a near duplicate and a bad image.
fn shards(world: &World) -> String {
    let images = folder(world);
    fs::copy(
        world.path("images/emu").join(first_name(&world.path("images/emu"))),
        world.path("images/emu/copy.jpg"),
    )
    .unwrap();
    let out = world.text("shards");
    ok(&world.ocelli(&["shards", "pack", &images, "--out", &out, "--samples-per-shard", "9"]));
    // A damaged image, which packing would have refused.
    let tar = world.path("shards/train-000002.tar");
    let mut bytes = fs::read(&tar).unwrap();
    bytes[512 + 40] ^= 0x55;
    fs::write(tar, bytes).unwrap();
    out
}

/// First name in a folder, in alphabetical order.
fn first_name(folder: &Path) -> String {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names.swap_remove(0)
}

#[test]
fn stats_verify_and_dedup_run_in_parts() {
    let world = World::new(50);
    let shards = shards(&world);
    let parts = world.text("found");
    for verb in ["stats", "verify"] {
        let args = ["shards", verb, &shards, "--json"];
        let expected = world.ocelli(&args);
        let in_folder = [&args[..], &["--out", &parts]].concat();
        let joined = in_parts(&world, &in_folder);
        assert_eq!(joined.status.code(), expected.status.code());
        let mut expected = json_of(&expected);
        let mut joined = json_of(&joined);
        for json in [&mut expected, &mut joined] {
            json.as_object_mut().unwrap().remove("predicted_images_per_s");
        }
        assert_eq!(joined, expected, "{verb}");
        assert_eq!(joined["bad"], 1, "{verb}");
        // A repeated part reports that it is done; a part of other shards is refused.
        let name = format!("parts::stats_verify_and_dedup_run_in_parts.{verb}");
        let repeated = ok(&world.ocelli(&[&in_folder[..], &["--part", "2/3"]].concat()));
        check_message(&format!("{name}.done"), &lines_with(&repeated, "2/3"));
        let others = ["shards", verb, &world.text("data"), "--out", &parts, "--part", "2/3"];
        check_message(&format!("{name}.other_job"), &fails(&world.ocelli(&others), 2));
        assert!(fails(&world.ocelli(&in_folder), 2).contains("--part K/N"));
        let without_folder = world.ocelli(&[&args[..], &["--part", "1/2"]].concat());
        check_message(&format!("{name}.no_folder"), &fails(&without_folder, 2));
        // A shard that has changed since is an error.
        let tar = world.path("shards/train-000001.tar");
        fs::write(&tar, fs::read(&tar).unwrap()).unwrap();
        for work in [["--part", "2/3"], ["--join", "3"]] {
            let output = world.ocelli(&[&in_folder[..], &work].concat());
            check_message(&format!("{name}.changed.{}", work[0]), &fails(&output, 2));
        }
    }
    let single = world.text("unique");
    let parts = world.text("unique-parts");
    let args = [
        "shards",
        "dedup",
        &shards,
        "--against",
        &world.text("data"),
        "--max-distance",
        "0",
        "--remove",
        "--out",
    ];
    ok(&world.ocelli(&[&args[..], &[&single]].concat()));
    // A join before the parts, with another number of them, does not fix the number of parts.
    let output = world.ocelli(&[&args[..], &[&parts, "--join", "4"]].concat());
    check_message("parts::stats_verify_and_dedup_run_in_parts.early", &fails(&output, 2));
    in_parts(&world, &[&args[..], &[&parts]].concat());
    assert_same(&world.path("unique"), &world.path("unique-parts"));
    assert!(fs::read_to_string(world.path("unique/copies.jsonl")).unwrap().lines().count() > 40);
}

/// Computes features of `shards` with the network of the run `run`.
fn embed(world: &World, shards: &str, out: &str, more: &[&str]) -> Output {
    let run = world.text("run");
    let out = world.text(out);
    let args = ["embed", "--checkpoint", &run, "--shards", shards, "--json", "--out", &out];
    world.ocelli(&[&args[..], more].concat())
}

#[test]
fn features_are_computed_in_parts() {
    let world = World::new(40);
    ok(&world.pretrain("run", &[]));
    let shards = shards(&world);
    let run = world.text("run");
    for extension in ["npy", "parquet", "safetensors"] {
        let single = format!("whole/x.{extension}");
        let parts = format!("parts/x.{extension}");
        let expected = embed(&world, &shards, &single, &[]);
        ok(&expected);
        let out = world.text(&parts);
        let args = ["embed", "--checkpoint", &run, "--shards", &shards, "--json", "--out", &out];
        let joined = in_parts(&world, &args);
        assert_same(&world.path("whole"), &world.path("parts"));
        let expected = json_of(&expected);
        let joined = json_of(&joined);
        for key in ["images", "undecodable", "left_out", "width"] {
            assert_eq!(joined[key], expected[key], "{key}");
        }
        assert_eq!(joined["undecodable"], 1);
        let repeated = embed(&world, &shards, &parts, &["--part", "2/3"]);
        assert!(String::from_utf8_lossy(&repeated.stdout).contains("already exists"), "{repeated:?}");
        let output = embed(&world, &shards, &parts, &["--part", "2/3", "--levels", "2"]);
        check_message(&format!("parts::features_are_computed_in_parts.{extension}"), &fails(&output, 2));
        let locks = files(&world.path("parts"), |name| name.ends_with(".lock"));
        assert!(locks.is_empty(), "{:?}", locks.keys());
        let output = embed(&world, &shards, &parts, &["--join", "3", "--overwrite", "--average"]);
        check_message(&format!("parts::features_are_computed_in_parts.{extension}.join"), &fails(&output, 2));
    }
}

/// Runs the script for an array of jobs with environment variables of Slurm.
fn run_script(variables: &[(&str, &str)], args: &[&str]) -> Output {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/slurm/parts.sbatch");
    let mut command = Command::new("bash");
    command.arg(script).args(args).env("OCELLI", env!("CARGO_BIN_EXE_ocelli-under-test"));
    command.envs(variables.iter().copied()).output().unwrap()
}

/// The script for Slurm turns the number of its job in the array into a part.
#[test]
fn an_array_of_jobs_computes_all_parts() {
    let world = World::new(20);
    let data = world.text("data");
    let out = world.text("found");
    let args = ["shards", "stats", &data, "--out", &out];
    for part in ["1", "2"] {
        ok(&run_script(&[("SLURM_ARRAY_TASK_ID", part), ("SLURM_ARRAY_TASK_COUNT", "3")], &args));
    }
    let output = run_script(&[("JOIN", "3")], &args);
    check_message("parts::an_array_of_jobs_computes_all_parts", &fails(&output, 2));
    ok(&run_script(&[("SLURM_ARRAY_TASK_ID", "3"), ("SLURM_ARRAY_TASK_COUNT", "1"), ("PARTS", "3")], &args));
    let joined = run_script(&[("JOIN", "3")], &args);
    ok(&joined);
    assert!(
        String::from_utf8_lossy(&joined.stdout).contains("samples          20 in 1 shard;"),
        "{joined:?}"
    );
    assert_eq!(run_script(&[], &[]).status.code(), Some(2));
    let output = run_script(&[], &args);
    assert!(String::from_utf8_lossy(&output.stderr).contains("--array=1-N"), "{output:?}");
}

/// Concurrent parts, one of them started twice, write the same files as one job; a job that wrote
/// no shard does not bind later ones.
#[test]
fn parts_run_concurrently() {
    let world = World::new(50);
    let images = folder(&world);
    let single = world.text("whole");
    let parts = world.text("parts");
    let args = ["shards", "pack", &images, "--samples-per-shard", "3", "--out"];
    ok(&world.ocelli(&[&args[..], &[&single]].concat()));
    let children: Vec<_> = ["1/4", "2/4", "2/4", "3/4", "4/4"]
        .map(|part| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_ocelli-under-test"));
            command.args(args).args([&parts, "--part", part]).stderr(Stdio::piped());
            command.stdout(Stdio::null()).spawn().unwrap()
        })
        .into_iter()
        .collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let is_busy = output.status.code() == Some(2) && stderr.contains("another job is writing to ");
        assert!(output.status.success() || is_busy, "{stderr}");
    }
    ok(&world.ocelli(&[&args[..], &[&parts, "--join", "4"]].concat()));
    assert_same(&world.path("whole"), &world.path("parts"));
    // A join before all parts leaves no job file.
    let stderr = fails(&world.ocelli(&[&args[..], &[&world.text("empty"), "--join", "4"]].concat()), 2);
    check_message("parts::parts_run_concurrently", &stderr);
    assert!(!world.path("empty/train.job.json").exists());
    // A job that was stopped before its first shard does not bind the next one.
    fs::create_dir(world.path("begun")).unwrap();
    fs::copy(world.path("parts/train.job.json"), world.path("begun/train.job.json")).unwrap();
    ok(&world.ocelli(&[&args[..], &[&world.text("begun")]].concat()));
    assert_same(&world.path("whole"), &world.path("begun"));
}
