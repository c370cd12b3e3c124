//! Preparation in parts: what parts do together is what one job does, byte for byte.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::servers::{Faults, WebServer};
use crate::support::{World, fails, json_of, ok};

/// Number of parts of each job.
const N: usize = 3;

/// Runs `args` in parts and joins them.
pub(crate) fn in_parts(world: &World, args: &[&str]) -> Output {
    let n = N.to_string();
    let join = [args, &["--join", &n]].concat();
    for part in [2, 1, 3] {
        // Parts come in any order, and joining them too early says which are missing.
        let missing = fails(&world.ocelli(&join), 2);
        assert!(missing.contains("part(s) are missing") && missing.contains("--part"), "{missing}");
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

/// Compares two folders, but for what says how the job was divided.
pub(crate) fn assert_same(a: &Path, b: &Path) {
    let is_result =
        |name: &str| !name.contains("job.json") && !name.contains(".part-") && !name.contains("-of-");
    let a = files(a, is_result);
    let b = files(b, is_result);
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    a.iter().for_each(|(name, bytes)| assert!(*bytes == b[name], "{name}"));
}

/// Makes a folder of images in classes, two of which cannot be decoded.
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

#[test]
fn folders_are_packed() {
    let world = World::new(50);
    let images = folder(&world);
    let kb = fs::metadata(world.shard()).unwrap().len() / 9000;
    let bytes = (1000 * kb).to_string();
    for limit in [&["--samples-per-shard", "7"][..], &["--bytes-per-shard", &bytes]] {
        let name = limit[0].trim_start_matches('-');
        let whole = format!("whole-{name}");
        let parts = format!("parts-{name}");
        let whole_out = world.text(&whole);
        let parts_out = world.text(&parts);
        let flags = [&["shards", "pack", &images, "--json"][..], limit, &["--out"]].concat();
        let expected = world.ocelli(&[&flags[..], &[&whole_out]].concat());
        ok(&expected);
        let joined = in_parts(&world, &[&flags[..], &[&parts_out]].concat());
        assert_same(&world.path(&whole), &world.path(&parts));
        let expected = json_of(&expected);
        let joined = json_of(&joined);
        assert_eq!((&joined["samples"], &joined["failed"]), (&50.into(), &2.into()), "{joined}");
        for key in ["samples", "classes", "shards", "failed", "skipped"] {
            assert_eq!(joined[key], expected[key], "{key}");
        }
        assert!(joined["shards"].as_u64().unwrap() > 6, "{joined}");
    }
    // A part that lost a shard, as if it had been stopped, writes that one; other divisions are
    // other jobs.
    fs::remove_file(world.path("parts-samples-per-shard/train-000001.tar")).unwrap();
    let pack = |more: &[&str]| {
        let out = world.text("parts-samples-per-shard");
        let args = ["shards", "pack", &images, "--out", &out, "--samples-per-shard", "7"];
        world.ocelli(&[&args[..], more].concat())
    };
    let said = fails(&pack(&["--join", "3"]), 2);
    assert!(said.contains("1 part(s) are missing: run --part 1/3 first"), "{said}");
    let output = pack(&["--part", "1/3"]);
    ok(&output);
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 of them there already"), "{output:?}");
    ok(&pack(&["--join", "3"]));
    assert_same(&world.path("whole-samples-per-shard"), &world.path("parts-samples-per-shard"));
    for more in [&["--part", "1/4"][..], &["--join", "2"], &[]] {
        assert!(fails(&pack(more), 2).contains("of another job"), "{more:?}");
    }
    // The images of a name have changed since.
    let changed = world.path("images/emu").join(first_of(&world.path("images/emu")));
    let bytes = fs::read(&changed).unwrap();
    fs::write(&changed, [&bytes[..], &[0; 600]].concat()).unwrap();
    assert!(fails(&pack(&["--part", "1/3"]), 2).contains("of another job"));
    fs::write(&changed, &bytes).unwrap();
    ok(&pack(&["--part", "1/3"]));
    for bad in ["0/3", "4/3", "3", "a/b"] {
        assert_eq!(pack(&["--part", bad]).status.code(), Some(2), "{bad}");
    }
    assert_eq!(pack(&["--part", "1/3", "--join", "3"]).status.code(), Some(2));
    assert_eq!(pack(&["--join", "0"]).status.code(), Some(2));
}

#[test]
fn urls_are_packed() {
    let world = World::new(20);
    world.extract("www");
    let server = WebServer::start(&world.path("www/train-000000"), Faults::default());
    let urls = (0..22).map(|i| server.url(&format!("{i:08}.jpg")));
    fs::write(world.path("list.txt"), urls.collect::<Vec<_>>().join("\n")).unwrap();
    let list = world.text("list.txt");
    let args = ["shards", "pack", &list, "--urls", "--samples-per-shard", "4", "--connections", "1", "--out"];
    let whole = world.text("whole");
    let parts = world.text("parts");
    ok(&world.ocelli(&[&args[..], &[&whole]].concat()));
    in_parts(&world, &[&args[..], &[&parts]].concat());
    assert_same(&world.path("whole"), &world.path("parts"));
    for work in [["--part", "1/3"], ["--join", "3"]] {
        let overwrites = [&args[..], &[&parts, "--overwrite"], &work].concat();
        assert!(fails(&world.ocelli(&overwrites), 2).contains("delete the results of parts"));
    }
}

/// Puts samples into several shards, with a copy, a near copy and a bad image.
fn shards(world: &World) -> String {
    let images = folder(world);
    fs::copy(
        world.path("images/emu").join(first_of(&world.path("images/emu"))),
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

fn first_of(folder: &Path) -> String {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names.swap_remove(0)
}

#[test]
fn statistics_checks_and_copies_are_found() {
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
        // Again, a part says that it is done; of other shards, it is refused.
        let again = ok(&world.ocelli(&[&in_folder[..], &["--part", "2/3"]].concat()));
        assert!(again.contains("part 2/3 is done") && again.contains("remove the file"), "{again}");
        let others = ["shards", verb, &world.text("data"), "--out", &parts, "--part", "2/3"];
        assert!(fails(&world.ocelli(&others), 2).contains("is of another job"));
        assert!(fails(&world.ocelli(&in_folder), 2).contains("--part K/N"));
        assert!(fails(&world.ocelli(&[&args[..], &["--part", "1/2"]].concat()), 2).contains("need --out"));
        // A shard that has changed since is told, not passed over.
        let tar = world.path("shards/train-000001.tar");
        fs::write(&tar, fs::read(&tar).unwrap()).unwrap();
        for work in [["--part", "2/3"], ["--join", "3"]] {
            let said = fails(&world.ocelli(&[&in_folder[..], &work].concat()), 2);
            assert!(said.contains("its inputs have changed since"), "{said}");
        }
    }
    let whole = world.text("unique");
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
    ok(&world.ocelli(&[&args[..], &[&whole]].concat()));
    // Joined too early, by another number of parts, nothing is claimed.
    let early = fails(&world.ocelli(&[&args[..], &[&parts, "--join", "4"]].concat()), 2);
    assert!(early.contains("4 part(s) are missing"), "{early}");
    in_parts(&world, &[&args[..], &[&parts]].concat());
    assert_same(&world.path("unique"), &world.path("unique-parts"));
    assert!(fs::read_to_string(world.path("unique/copies.jsonl")).unwrap().lines().count() > 40);
}

#[test]
fn features_are_computed() {
    let world = World::new(40);
    ok(&world.pretrain("run", &[]));
    let shards = shards(&world);
    let run = world.text("run");
    for extension in ["npy", "parquet", "safetensors"] {
        let whole = format!("whole/x.{extension}");
        let parts = format!("parts/x.{extension}");
        let embed = |out: &str, more: &[&str]| {
            let out = world.text(out);
            let args = ["embed", "--checkpoint", &run, "--shards", &shards, "--json", "--out", &out];
            world.ocelli(&[&args[..], more].concat())
        };
        let expected = embed(&whole, &[]);
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
        let again = embed(&parts, &["--part", "2/3"]);
        assert!(String::from_utf8_lossy(&again.stdout).contains("is there already"), "{again:?}");
        assert!(fails(&embed(&parts, &["--part", "2/3", "--levels", "2"]), 2).contains("another kind"));
        assert!(
            !world
                .path("parts")
                .read_dir()
                .unwrap()
                .any(|entry| { entry.unwrap().file_name().to_string_lossy().ends_with(".lock") })
        );
        assert!(
            fails(&embed(&parts, &["--join", "3", "--overwrite", "--average"]), 2).contains("another kind")
        );
    }
}

/// The script for Slurm turns the number of its job in the array into a part.
#[test]
fn an_array_of_jobs_does_all_parts() {
    let world = World::new(20);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/slurm/parts.sbatch");
    let data = world.text("data");
    let found = world.text("found");
    let run = |variables: &[(&str, &str)], args: &[&str]| {
        let mut command = Command::new("bash");
        command.arg(script).args(args).env("OCELLI", env!("CARGO_BIN_EXE_ocelli-under-test"));
        command.envs(variables.iter().copied()).output().unwrap()
    };
    let args = ["shards", "stats", &data, "--out", &found];
    for part in ["1", "2"] {
        ok(&run(&[("SLURM_ARRAY_TASK_ID", part), ("SLURM_ARRAY_TASK_COUNT", "3")], &args));
    }
    assert!(fails(&run(&[("JOIN", "3")], &args), 2).contains("run --part 3/3 first"));
    ok(&run(&[("SLURM_ARRAY_TASK_ID", "3"), ("SLURM_ARRAY_TASK_COUNT", "1"), ("PARTS", "3")], &args));
    let joined = run(&[("JOIN", "3")], &args);
    ok(&joined);
    assert!(
        String::from_utf8_lossy(&joined.stdout).contains("samples          20 in 1 shard(s)"),
        "{joined:?}"
    );
    assert_eq!(run(&[], &[]).status.code(), Some(2));
    let said = run(&[], &args);
    assert!(String::from_utf8_lossy(&said.stderr).contains("--array=1-N"), "{said:?}");
}

/// Parts at the same time, one of them twice, do what one job does; a pack that wrote nothing may
/// begin anew.
#[test]
fn parts_run_side_by_side() {
    let world = World::new(50);
    let images = folder(&world);
    let whole = world.text("whole");
    let parts = world.text("parts");
    let args = ["shards", "pack", &images, "--samples-per-shard", "3", "--out"];
    ok(&world.ocelli(&[&args[..], &[&whole]].concat()));
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
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() || said.contains("another job is writing"), "{said}");
    }
    ok(&world.ocelli(&[&args[..], &[&parts, "--join", "4"]].concat()));
    assert_same(&world.path("whole"), &world.path("parts"));
    // Joined from the start, nothing is claimed.
    let said = fails(&world.ocelli(&[&args[..], &[&world.text("empty"), "--join", "4"]].concat()), 2);
    assert!(said.contains("4 part(s) are missing") && !world.path("empty/train.job.json").exists(), "{said}");
    // A job that was stopped before its first shard does not bind the next one.
    fs::create_dir(world.path("begun")).unwrap();
    fs::copy(world.path("parts/train.job.json"), world.path("begun/train.job.json")).unwrap();
    ok(&world.ocelli(&[&args[..], &[&world.text("begun")]].concat()));
    assert_same(&world.path("whole"), &world.path("begun"));
}
