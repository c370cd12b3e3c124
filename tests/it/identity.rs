//! Identity of data: caches of features and indices, resumed runs, parts and curation never confuse
//! different images, even if their names, lengths and times are equal.

use std::fs::{self, File};
use std::path::Path;
use std::process::Output;

use pipeline::{Dataset, Storage};
use proptest::prelude::*;

use crate::messages::{check_message, lines_with};
use crate::support::{World, fails, json_of, metrics, ok, program};

/// Writes a tar without an index, as other tools do: `images` as `.npy` of `[side, side, 3]` bytes
/// with classes.
fn write_npy_tar(path: &Path, images: &[Vec<u8>], side: usize) {
    let mut tar = tar::Builder::new(File::create(path).unwrap());
    for (number, image) in images.iter().enumerate() {
        let header = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({side}, {side}, 3), }}");
        let mut npy = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
        npy.extend_from_slice(format!("{header:117}\n").as_bytes());
        npy.extend_from_slice(image);
        append(&mut tar, &format!("{number:06}.npy"), &npy);
        append(&mut tar, &format!("{number:06}.cls"), (number % 2).to_string().as_bytes());
    }
    tar.finish().unwrap();
}

fn append(tar: &mut tar::Builder<File>, name: &str, bytes: &[u8]) {
    let mut header = tar::Header::new_ustar();
    header.set_size(bytes.len() as u64);
    header.set_mode(0o644);
    tar.append_data(&mut header, name, bytes).unwrap();
}

/// Returns images of noise, `[side, side, 3]` each, that depend on the seed.
fn noise(seed: u64, n: usize, side: usize) -> Vec<Vec<u8>> {
    let mut rng = augment::ViewRng::from_words([seed, 1, 2, 3]);
    (0..n).map(|_| (0..side * side * 3).map(|_| rng.below(256) as u8).collect()).collect()
}

fn fingerprint(path: &Path, storage: &Storage) -> u64 {
    Dataset::open(&[path.display().to_string()], storage).unwrap().fingerprint().unwrap()
}

/// Writes `bytes` over the file at `path`, which keeps its inode and modification time.
fn overwrite_in_place(path: &Path, bytes: &[u8]) {
    let before = fs::metadata(path).unwrap().modified().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    fs::write(path, bytes).unwrap();
    File::options().append(true).open(path).unwrap().set_modified(before).unwrap();
    assert_eq!(fs::metadata(path).unwrap().modified().unwrap(), before);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Sets that differ in one byte never share a key, and equal sets have one key at any path:
    /// with an index that this program wrote, with an outdated index, and without one.
    #[test]
    fn one_changed_byte_changes_the_key(seed: u64, image in 0usize..4, at in 0usize..75, change in 1u8..) {
        let world = World { folder: tempfile::tempdir().unwrap() };
        let storage = world.storage();
        let mut images = noise(seed, 4, 5);
        let [path, copy, moved] = ["a.tar", "b.tar", "c.tar"].map(|name| world.path(name));
        write_npy_tar(&path, &images, 5);
        let first = fingerprint(&path, &storage);
        fs::copy(&path, &copy).unwrap();
        prop_assert_eq!(first, fingerprint(&copy, &storage));

        let sidecar = pipeline::shard::sidecar::path_of;
        let index = pipeline::shard::sidecar::build_checked(&path).unwrap();
        pipeline::shard::sidecar::save(&index, &path).unwrap();
        prop_assert_eq!(first, fingerprint(&path, &storage));
        // The index is copied before the shard, so that it is older.
        fs::copy(sidecar(&path), sidecar(&moved)).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        fs::copy(&path, &moved).unwrap();
        prop_assert_eq!(first, fingerprint(&moved, &storage));

        images[image][at] = images[image][at].wrapping_add(change);
        let other = world.path("other.tar");
        write_npy_tar(&other, &images, 5);
        let other_key = fingerprint(&other, &storage);
        prop_assert_ne!(first, other_key);
        // The same names, lengths and times, without an index and with an outdated one.
        for path in [&copy, &path] {
            overwrite_in_place(path, &fs::read(&other).unwrap());
            prop_assert_eq!(other_key, fingerprint(path, &storage));
        }
    }
}

/// Runs the program with a cache in the world's folder that holds features.
fn ocelli_with_cache(world: &World, args: &[&str]) -> Output {
    let mut command = program();
    command.env("OCELLI_CACHE", world.path("cache")).env("OCELLI_FEATURES_GB", "1");
    command.args(args).output().unwrap()
}

/// For two sets of noise with equal names and lengths, neighbors in the other set are no better
/// than chance.
#[test]
fn equal_names_do_not_make_noise_its_own_neighbor() {
    let world = World::new(8);
    ok(&world.pretrain("run", &["--set", "optim.length={steps=1}", "--set", "optim.warmup={steps=0}"]));
    let [w1, w2] = ["w1.tar", "w2.tar"].map(|name| world.text(name));
    write_npy_tar(Path::new(&w1), &noise(1, 40, 32), 32);
    write_npy_tar(Path::new(&w2), &noise(2, 40, 32), 32);
    let run = world.text("run");
    let probe = ["probe", "--checkpoint", &run, "--train", &w1, "--test", &w2, "--protocol", "knn", "--json"];
    let computed = ocelli_with_cache(&world, &probe);
    ok(&computed);
    let scores = json_of(&computed);
    let accuracy = scores["networks"]["teacher"]["knn_10"]["accuracy"].as_f64().unwrap();
    assert!(accuracy < 90.0, "noise has no neighbors of its class in other noise: {accuracy}");
    let cached = ocelli_with_cache(&world, &probe);
    ok(&cached);
    assert_eq!(json_of(&cached), scores, "from the cache");
}

/// Reads the values of a NumPy file.
fn read_npy(path: &Path) -> Vec<f32> {
    npyz::NpyFile::new(&fs::read(path).unwrap()[..]).unwrap().into_vec().unwrap()
}

/// Embeds the shard `s.tar` with a cache; returns standard error and the features.
fn embed_with_cache(world: &World, out: &str) -> (String, Vec<f32>) {
    let run = world.text("run");
    let shard = world.text("s.tar");
    let out = world.text(out);
    let args = ["embed", "--checkpoint", &run, "--shards", &shard, "--out", &out, "--overwrite"];
    let stderr = ok(&ocelli_with_cache(world, &args));
    (stderr, read_npy(Path::new(&out)))
}

/// A rewritten tar has its own features, with and without the cache, and an index of the previous
/// tar is reported.
#[test]
fn a_rewritten_tar_has_its_own_features_and_keys() {
    let world = World::new(8);
    ok(&world.pretrain("run", &["--set", "optim.length={steps=1}", "--set", "optim.warmup={steps=0}"]));
    let tar = world.path("s.tar");
    let shard = tar.display().to_string();
    write_npy_tar(&tar, &noise(1, 12, 16), 16);
    let (_, first) = embed_with_cache(&world, "a.npy");
    write_npy_tar(&world.path("other.tar"), &noise(2, 12, 16), 16);
    overwrite_in_place(&tar, &fs::read(world.path("other.tar")).unwrap());
    let (_, second) = embed_with_cache(&world, "b.npy");
    assert_ne!(first, second);
    assert_eq!(embed_with_cache(&world, "c.npy").1, second, "from the cache");

    ok(&world.ocelli(&["shards", "index", &shard, "--checksums"]));
    assert_eq!(embed_with_cache(&world, "d.npy").1, second);
    // Other images of the same lengths under the same keys.
    std::thread::sleep(std::time::Duration::from_millis(20));
    write_npy_tar(&tar, &noise(1, 12, 16), 16);
    let (stderr, third) = embed_with_cache(&world, "e.npy");
    assert_eq!(third, first);
    check_message("identity::a_rewritten_tar_has_its_own_features_and_keys", &lines_with(&stderr, "s.tar"));
    // Other keys.
    let mut renamed = tar::Builder::new(File::create(&tar).unwrap());
    for number in 0..12 {
        append(&mut renamed, &format!("new{number:03}.npy"), &[0; 896]);
        append(&mut renamed, &format!("new{number:03}.cls"), b"1");
    }
    renamed.finish().unwrap();
    let listed = world.ocelli(&["shards", "ls", &shard]);
    ok(&listed);
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.contains("new011") && !listed.contains("000011"), "{listed}");
}

/// Trains the run `run` on `shards` up to `steps` steps.
fn lengthen_run(world: &World, shards: &str, steps: u32) -> Output {
    let recipe = world.text("tiny.toml");
    let run = world.text("run");
    let length = format!("optim.length={{steps={steps}}}");
    let args = ["pretrain", "--recipe", &recipe, "--shards", shards, "--workdir", &run];
    world.ocelli(&[&args[..], &["--set", &length, "--lengthen"]].concat())
}

/// A run resumes with its images at any path, and not with others of the same keys and lengths.
#[test]
fn a_run_resumes_with_its_images_and_no_others() {
    let world = World::new(8);
    let images = noise(5, 24, 16);
    write_npy_tar(&world.path("noise.tar"), &images, 16);
    ok(&lengthen_run(&world, &world.text("noise.tar"), 4));
    // Copied elsewhere, under a path with `..` in it.
    fs::create_dir(world.path("elsewhere")).unwrap();
    fs::copy(world.path("noise.tar"), world.path("elsewhere/noise.tar")).unwrap();
    ok(&lengthen_run(&world, &world.text("elsewhere/../elsewhere/noise.tar"), 6));
    let before = metrics(&world.path("run"));
    assert_eq!(before.len(), 6);
    // Other images of the same lengths.
    write_npy_tar(&world.path("noise.tar"), &noise(6, 24, 16), 16);
    let output = lengthen_run(&world, &world.text("noise.tar"), 8);
    check_message("identity::a_run_resumes_with_its_images_and_no_others.other_bytes", &fails(&output, 2));
    // One image more.
    let more = [&images[..], &noise(7, 1, 16)].concat();
    write_npy_tar(&world.path("noise.tar"), &more, 16);
    let output = lengthen_run(&world, &world.text("noise.tar"), 8);
    check_message("identity::a_run_resumes_with_its_images_and_no_others.more", &fails(&output, 2));
    assert_eq!(metrics(&world.path("run")), before);
}

/// Features of parts are of the same images, not only of images with the same names.
#[test]
fn parts_of_other_images_are_refused() {
    let world = World::new(8);
    ok(&world.pretrain("run", &["--set", "optim.length={steps=1}", "--set", "optim.warmup={steps=0}"]));
    let run = world.text("run");
    let out = world.text("all.npy");
    let shard = world.text("s.tar");
    let embed = ["embed", "--checkpoint", &run, "--shards", &shard, "--out", &out];
    let first_part = [&embed[..], &["--part", "1/2"]].concat();
    let second_part = [&embed[..], &["--part", "2/2"]].concat();
    let join = [&embed[..], &["--join", "2"]].concat();
    write_npy_tar(Path::new(&shard), &noise(1, 12, 16), 16);
    ok(&world.ocelli(&first_part));
    write_npy_tar(Path::new(&shard), &noise(2, 12, 16), 16);
    ok(&world.ocelli(&second_part));
    for (name, args) in [("join", join), ("part", first_part)] {
        check_message(
            &format!("identity::parts_of_other_images_are_refused.{name}"),
            &fails(&world.ocelli(&args), 2),
        );
    }
}

/// Runs the program with a limit of 100 open files.
fn run_with_file_limit(world: &World, args: &[&str]) -> Output {
    let mut command = assert_cmd::Command::new("sh");
    command.args(["-c", "ulimit -n 100 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_ocelli-under-test")]);
    command.args(args).env("OCELLI_CACHE", world.path("cache")).env("OCELLI_FEATURES_GB", "0");
    command.output().unwrap()
}

/// More shards than files that a process may open, read in place and from the cache.
#[test]
fn shards_are_not_all_open_at_once() {
    let world = World::new(24);
    fs::create_dir(world.path("many")).unwrap();
    for (number, image) in noise(3, 300, 16).into_iter().enumerate() {
        let path = world.path(&format!("many/{number:04}.tar"));
        write_npy_tar(&path, &[image], 16);
        if number % 2 == 1 {
            let bytes = fs::read(&path).unwrap();
            let mut packed = flate2::write::GzEncoder::new(
                File::create(path.with_extension("tar.gz")).unwrap(),
                flate2::Compression::fast(),
            );
            std::io::Write::write_all(&mut packed, &bytes).unwrap();
            packed.finish().unwrap();
            fs::remove_file(&path).unwrap();
        }
    }
    let many = world.text("many");
    let fewer = world.text("fewer");
    let recipe = world.text("tiny.toml");
    let run = world.text("run");
    let out = world.text("rows.npy");
    for args in [
        &["shards", "verify", &many][..],
        &["shards", "ls", &many],
        &["shards", "stats", &many],
        &["shards", "reshard", &many, "--out", &fewer, "--renumber"],
        &["pretrain", "--recipe", &recipe, "--shards", &many, "--workdir", &run],
        &["embed", "--checkpoint", &run, "--shards", &many, "--out", &out],
    ] {
        ok(&run_with_file_limit(&world, args));
    }
    assert_eq!(read_npy(Path::new(&out)).len() % 300, 0);
}
