//! Data preparation as a user runs it.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::Path;

use image::codecs::jpeg::JpegEncoder;
use image::{DynamicImage, ImageBuffer, ImageFormat, Rgb};
use pipeline::Shard;
use pipeline::shard::sidecar;
use pipeline::shard::write::ShardFile;
use serde_json::Value;

use crate::messages::{check_message, lines_with};
use crate::support::{World, fails, ok};

fn json_of(output: &std::process::Output) -> Value {
    ok(output);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

/// Value of a sine wave at `x`, in 7..=247.
fn wave(x: f32, phase: u32) -> u8 {
    (127.0 + 120.0 * (x * 6.0 + phase as f32).sin()) as u8
}

/// Draws a picture whose large shapes, not its fine texture, depend on `seed`.
fn picture(width: u32, height: u32, seed: u32) -> DynamicImage {
    ImageBuffer::from_fn(width, height, |x, y| {
        let u = x as f32 / width as f32;
        let v = y as f32 / height as f32;
        let red = wave(u * (1.0 + seed as f32), 3 * seed);
        let green = wave(v * (2.0 + seed as f32), 5 * seed);
        Rgb([red, green, wave(u + v, 7 * seed)])
    })
    .into()
}

fn jpeg(image: &DynamicImage, quality: u8) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    JpegEncoder::new_with_quality(&mut bytes, quality).encode_image(image).unwrap();
    bytes.into_inner()
}

fn png(image: &DynamicImage) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    image.write_to(&mut bytes, ImageFormat::Png).unwrap();
    bytes.into_inner()
}

fn write_shard(path: &Path, samples: &[(&str, &str, Vec<u8>)]) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut file = ShardFile::create(path).unwrap();
    for (i, (key, extension, bytes)) in samples.iter().enumerate() {
        let label = (i % 3).to_string();
        file.add(key, &[(extension, bytes), ("cls", label.as_bytes())]).unwrap();
    }
    file.finish().unwrap();
}

fn keys(path: &Path) -> Vec<String> {
    let shard = Shard::open(path).unwrap();
    (0..shard.len()).map(|i| shard.key(i).to_string()).collect()
}

/// Packs two shards: two large images, a small one, a long one, a blank one and a corrupt one.
fn mixed(world: &World) -> String {
    let blank = DynamicImage::from(ImageBuffer::from_pixel(80, 80, Rgb([90u8, 90, 90])));
    write_shard(
        &world.path("in/a-000000.tar"),
        &[
            ("large", "jpg", jpeg(&picture(200, 120, 1), 90)),
            ("small", "png", png(&picture(30, 20, 2))),
            ("long", "jpg", jpeg(&picture(240, 40, 3), 90)),
        ],
    );
    let mut corrupt = jpeg(&picture(90, 90, 4), 90);
    corrupt.truncate(corrupt.len() * 3 / 4);
    write_shard(
        &world.path("in/a-000001.tar"),
        &[
            ("blank", "png", png(&blank)),
            ("corrupt", "jpg", corrupt),
            ("tall", "png", png(&picture(100, 300, 5))),
        ],
    );
    format!("{}/a-{{000000..000001}}.tar", world.text("in"))
}

/// Resizes images to a short side of 60 pixels; returns the report.
fn resize(world: &World, shards: &str) -> Value {
    let out = world.text("out");
    let args = ["shards", "resize", shards, "--out", &out, "--short-side", "60", "--json"];
    json_of(&world.ocelli(&args))
}

#[test]
fn resizing_shrinks_large_images_and_keeps_the_rest() {
    let world = World::new(1);
    let shards = mixed(&world);
    let out = world.text("out");
    let report = resize(&world, &shards);
    assert_eq!((&report["changed"], &report["kept"]), (&3.into(), &3.into()), "{report}");
    let shard = Shard::open(&world.path("out/a-000000.tar")).unwrap();
    let decoded = image::load_from_memory(shard.image(0).unwrap().bytes()).unwrap();
    assert_eq!((decoded.width(), decoded.height()), (100, 60));
    assert_eq!(shard.label(0).unwrap(), Some(0), "the other members stay");
    let before = Shard::open(&world.path("in/a-000000.tar")).unwrap();
    assert_eq!(shard.members(1).unwrap(), before.members(1).unwrap(), "small images stay as they are");

    // Interrupted after the first shard: the second run writes only the missing shard.
    std::fs::remove_file(world.path("out/a-000001.tar")).unwrap();
    let report = resize(&world, &shards);
    assert_eq!((&report["shards"], &report["shards_there"]), (&1.into(), &1.into()));
    let args = ["shards", "resize", &shards, "--out", &out, "--short-side", "50"];
    let name = "prep::resizing_shrinks_large_images_and_keeps_the_rest";
    check_message(&format!("{name}.other_job"), &fails(&world.ocelli(&args), 2));
    let args = ["shards", "resize", &shards, "--out", &world.text("in")];
    check_message(&format!("{name}.input"), &fails(&world.ocelli(&args), 2));
}

#[test]
fn filtering_drops_images_and_records_the_reasons() {
    let world = World::new(1);
    let shards = mixed(&world);
    let args = [
        "shards",
        "filter",
        &shards,
        "--out",
        &world.text("out"),
        "--min-side",
        "35",
        "--max-aspect",
        "3",
        "--min-deviation",
        "2",
        "--json",
    ];
    let report = json_of(&world.ocelli(&args));
    assert_eq!((&report["kept"], &report["dropped"]), (&2.into(), &4.into()), "{report}");
    assert_eq!(keys(&world.path("out/a-000000.tar")), ["large"]);
    assert_eq!(keys(&world.path("out/a-000001.tar")), ["tall"]);
    let text = std::fs::read_to_string(world.path("out/dropped.jsonl")).unwrap();
    let mut reasons: BTreeMap<String, String> = BTreeMap::new();
    for line in text.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        reasons.insert(row["key"].as_str().unwrap().into(), row["reason"].as_str().unwrap().into());
    }
    for (key, reason) in
        [("small", "too small"), ("long", "too elongated"), ("blank", "blank"), ("corrupt", "cut off")]
    {
        assert!(reasons[key].contains(reason), "{key}: {reasons:?}");
    }
}

#[test]
fn duplicates_are_found_within_a_set_and_against_another() {
    let world = World::new(1);
    let original = picture(160, 120, 1);
    write_shard(
        &world.path("in/t-000000.tar"),
        &[
            ("a", "jpg", jpeg(&original, 95)),
            ("again", "jpg", jpeg(&original, 95)),
            ("smaller", "jpg", jpeg(&original.thumbnail(80, 60), 60)),
            ("other", "jpg", jpeg(&picture(160, 120, 2), 95)),
            ("leak", "png", png(&picture(160, 120, 3))),
        ],
    );
    write_shard(&world.path("in/test-000000.tar"), &[("x", "jpg", jpeg(&picture(160, 120, 3), 80))]);
    let shard = world.text("in/t-000000.tar");
    let against = world.text("in/test-000000.tar");
    let args =
        ["shards", "dedup", &shard, "--against", &against, "--out", &world.text("out"), "--remove", "--json"];
    let report = json_of(&world.ocelli(&args));
    assert_eq!((&report["exact"], &report["near"]), (&1.into(), &2.into()), "{report}");
    assert_eq!(keys(&world.path("out/t-000000.tar")), ["a", "other"]);
    let keep = std::fs::read_to_string(world.path("out/keep.txt")).unwrap();
    assert_eq!(keep.lines().count(), 2);
    // Overwriting the results duplicates no line.
    ok(&world.ocelli(&[&args[..], &["--overwrite"]].concat()));
    let dropped = std::fs::read_to_string(world.path("out/dropped.jsonl")).unwrap();
    assert_eq!(dropped.lines().count(), 3);
    // `subset` reads the list, too.
    let args =
        ["shards", "subset", &shard, "--keys", &world.text("out/keep.txt"), "--out", &world.text("kept")];
    ok(&world.ocelli(&args));
    assert_eq!(keys(&world.path("kept/train-000000.tar")), ["a", "other"]);
}

#[test]
fn statistics_count_formats_sizes_and_bad_images() {
    let world = World::new(1);
    let shards = mixed(&world);
    let picture = world.text("stats.png");
    let report = json_of(&world.ocelli(&["shards", "stats", &shards, "--picture", &picture, "--json"]));
    assert_eq!((&report["samples"], &report["bad"]), (&6.into(), &1.into()), "{report}");
    assert_eq!((&report["formats"]["jpeg"], &report["formats"]["png"]), (&2.into(), &3.into()), "{report}");
    assert_eq!((&report["width_px"]["max"], &report["height_px"]["max"]), (&240.0.into(), &300.0.into()));
    assert!(report["predicted_images_per_s"].as_f64().unwrap() > 1.0);
    assert!(image::open(&picture).is_ok());
}

/// Extension and bytes of each member of a sample.
type Members = Vec<(String, Vec<u8>)>;

/// Key and members of each sample of a shard.
fn members(shard: &Shard) -> Vec<(String, Members)> {
    (0..shard.len()).map(|i| (shard.key(i).to_string(), shard.members(i).unwrap())).collect()
}

/// Key and members of all samples in the shards of a folder, sorted.
fn members_in(folder: &Path) -> Vec<(String, Members)> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        if entry.path().extension().is_some_and(|extension| extension == "tar") {
            all.extend(members(&Shard::open(&entry.path()).unwrap()));
        }
    }
    all.sort();
    all
}

/// Reshard, split and subset keep each sample once, with its members unchanged.
#[test]
fn regrouping_keeps_all_samples_unchanged() {
    let world = World::new(50);
    let shard = world.text("data/train-000000.tar");
    let before = Shard::open(&world.shard()).unwrap();
    let expected = members(&before);
    let out = world.text("rs");
    let args =
        ["shards", "reshard", &shard, "--out", &out, "--samples-per-shard", "8", "--shuffle", "3", "--json"];
    assert_eq!(json_of(&world.ocelli(&args))["train"]["shards"], 7);
    assert_eq!(members_in(&world.path("rs")), expected);
    assert_ne!(keys(&world.path("rs/train-000000.tar"))[..2], ["00000000", "00000001"]);
    std::fs::remove_file(world.path("rs/train-000003.tar")).unwrap();
    ok(&world.ocelli(&args));
    assert_eq!(members_in(&world.path("rs")), expected, "an interrupted job continues");

    let args = ["shards", "split", &shard, "--out", &world.text("sp"), "--part", "a=3", "b=1", "--json"];
    let report = json_of(&world.ocelli(&args));
    assert_eq!(members_in(&world.path("sp")), expected);
    assert!((8..22).contains(&report["b"]["samples"].as_u64().unwrap()), "{report}");

    let args =
        ["shards", "subset", &shard, "--out", &world.text("su"), "--count", "7", "--classes", "0,1,2,3,4"];
    ok(&world.ocelli(&args));
    assert_eq!(members_in(&world.path("su")).len(), 7);
    let args = ["shards", "split", &shard, "--out", &world.text("bad"), "--part", "a"];
    assert!(fails(&world.ocelli(&args), 2).contains("train=0.9"));
    let both = format!("{shard}::{}", world.text("rs/train-000000.tar"));
    let args = ["shards", "reshard", &both, "--out", &world.text("twice")];
    assert!(fails(&world.ocelli(&args), 2).contains("--renumber"));
    ok(&world.ocelli(&[&args[..], &["--renumber"]].concat()));
    let args = ["shards", "split", &shard, "--out", &world.text("bad"), "--part", "a=1", "a=1"];
    check_message("prep::regrouping_keeps_all_samples_unchanged.twice", &fails(&world.ocelli(&args), 2));
    // Shards of another job, and shards without a job file, are not overwritten.
    let args = ["shards", "reshard", &shard, "--out", &world.text("twice")];
    check_message("prep::regrouping_keeps_all_samples_unchanged.other_job", &fails(&world.ocelli(&args), 2));
    std::fs::remove_file(world.path("twice/job.json")).unwrap();
    let output = world.ocelli(&args);
    check_message("prep::regrouping_keeps_all_samples_unchanged.unknown_job", &fails(&output, 2));
}

#[test]
fn extraction_stays_inside_its_folder() {
    let world = World::new(3);
    let shard = world.text("data/train-000000.tar");
    ok(&world.ocelli(&["shards", "extract", &shard, "--out", &world.text("x"), "--keys", "00000001"]));
    let files: Vec<_> = std::fs::read_dir(world.path("x/train-000000")).unwrap().flatten().collect();
    assert_eq!(files.len(), 2);
    let again = world.ocelli(&["shards", "extract", &shard, "--out", &world.text("x")]);
    assert!(fails(&again, 2).contains("--overwrite"));

    // A member whose name leads out of the folder, written by hand: tar libraries refuse it.
    let mut header = tar::Header::new_ustar();
    let name = b"../../escaped.txt";
    header.as_old_mut().name[..name.len()].copy_from_slice(name);
    header.set_size(1);
    header.set_mode(0o644);
    header.set_cksum();
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend([b'x'; 1]);
    bytes.resize(2048, 0);
    std::fs::write(world.path("evil.tar"), bytes).unwrap();
    let output =
        world.ocelli(&["shards", "extract", &world.text("evil.tar"), "--out", &world.text("deep/y")]);
    check_message("prep::extraction_stays_inside_its_folder", &fails(&output, 3));
    assert!(!world.path("escaped.txt").exists() && !world.path("deep/escaped.txt").exists());
}

#[test]
fn contact_sheets_and_sidecars_are_written() {
    let world = World::new(30);
    let shard = world.text("data/train-000000.tar");
    let sheet = world.text("sheet.png");
    ok(&world.ocelli(&["shards", "contact-sheet", &shard, "--out", &sheet, "--count", "20"]));
    let plain = image::open(&sheet).unwrap();
    assert!(
        fails(&world.ocelli(&["shards", "contact-sheet", &shard, "--out", &sheet]), 2)
            .contains("--overwrite")
    );
    let recipe = world.text("tiny.toml");
    let views = world.text("views.png");
    let args = ["shards", "contact-sheet", &shard, "--out", &views, "--recipe", &recipe, "--count", "3"];
    ok(&world.ocelli(&args));
    assert_ne!(image::open(&views).unwrap().width(), plain.width());

    let sidecar = sidecar::path_of(&world.shard());
    let written = std::fs::read(&sidecar).unwrap();
    std::fs::remove_file(&sidecar).unwrap();
    assert_eq!(json_of(&world.ocelli(&["shards", "index", &shard, "--json"]))["indexed"], 1);
    assert_ne!(std::fs::read(&sidecar).unwrap(), written, "indexing by headers reads no bytes of members");
    assert_eq!(json_of(&world.ocelli(&["shards", "index", &shard, "--checksums", "--json"]))["indexed"], 1);
    assert_eq!(std::fs::read(&sidecar).unwrap(), written, "the index equals the one of the writer");
    assert_eq!(json_of(&world.ocelli(&["shards", "index", &shard, "--json"]))["indexed"], 0);
}

/// The list of class names is copied with the shards, and scores and features name classes by it.
#[test]
fn class_names_are_copied_with_the_shards() {
    let world = World::new(40);
    let shard = world.shard().display().to_string();
    let names: Vec<String> = (0..10).map(|class| format!("kind {class}")).collect();
    let list = names.join("\n") + "\n";
    std::fs::write(world.path("data/classes.txt"), &list).unwrap();
    let jobs: [&[&str]; 4] = [
        &["split", "--part", "train=0.5", "--part", "test=0.5"],
        &["subset", "--count", "30"],
        &["reshard"],
        &["dedup", "--remove"],
    ];
    for job in jobs {
        let out = world.text(job[0]);
        ok(&world.ocelli(&[&["shards", job[0], &shard, "--out", &out], &job[1..]].concat()));
        assert_eq!(std::fs::read_to_string(world.path(job[0]).join("classes.txt")).unwrap(), list, "{job:?}");
    }
    // A different list is not overwritten.
    std::fs::create_dir(world.path("else")).unwrap();
    std::fs::write(world.path("else/classes.txt"), "cat\ndog\n").unwrap();
    let args = ["shards", "subset", &shard, "--count", "3", "--out", &world.text("else")];
    check_message("prep::class_names_are_copied_with_the_shards.other_list", &fails(&world.ocelli(&args), 2));
    assert_eq!(std::fs::read_to_string(world.path("else/classes.txt")).unwrap(), "cat\ndog\n");

    ok(&world.pretrain("run", &["--set", "optim.length={steps=1}"]));
    let run = world.text("run");
    let train = world.text("split/train-*.tar");
    let test = world.text("split/test-*.tar");
    let probe = ["probe", "--checkpoint", &run, "--train", &train, "--test", &test, "--json"];
    let classes = json_of(&world.ocelli(&probe))["classes"].clone();
    assert!(
        classes.as_array().unwrap().iter().all(|class| class.as_str().unwrap().starts_with("kind ")),
        "{classes}"
    );
    let out = world.text("features.npy");
    ok(&world.ocelli(&["embed", "--checkpoint", &run, "--shards", &test, "--out", &out]));
    let rows = std::fs::read_to_string(world.path("features.npy.rows.jsonl")).unwrap();
    assert!(rows.lines().next().unwrap().contains("\"class\":\"kind "), "{rows}");
    // If the lists differ, the same label means different classes.
    std::fs::write(world.path("split/classes.txt"), list.replace("kind 3", "other 3")).unwrap();
    let probe = ["probe", "--checkpoint", &run, "--train", &shard, "--test", &test];
    let output = world.ocelli(&probe);
    check_message("prep::class_names_are_copied_with_the_shards.other_names", &fails(&output, 3));
}

/// Splits the shard 3 to 1 into the folder `out`.
fn split(world: &World, out: &str, more: &[&str]) {
    let shard = world.shard().display().to_string();
    let out = world.text(out);
    let args = ["shards", "split", &shard, "--out", &out, "--part", "a=3", "--part", "b=1"];
    ok(&world.ocelli(&[&args[..], more].concat()));
}

/// Number of samples of each class in a shard.
fn class_counts(path: &Path) -> BTreeMap<u32, usize> {
    let shard = Shard::open(path).unwrap();
    let mut counts = BTreeMap::new();
    for i in 0..shard.len() {
        *counts.entry(shard.label(i).unwrap().unwrap()).or_default() += 1;
    }
    counts
}

/// Each class is divided by the shares, or samples are by their keys alone.
#[test]
fn splits_divide_each_class_by_the_shares() {
    let world = World::new(60);
    split(&world, "even", &[]);
    split(&world, "again", &[]);
    split(&world, "keys", &["--by-key"]);
    let a = class_counts(&world.path("even/a-000000.tar"));
    let b = class_counts(&world.path("even/b-000000.tar"));
    assert_eq!((a.values().sum::<usize>(), b.values().sum::<usize>()), (45, 15));
    for (class, n_a) in &a {
        let n_b = b.get(class).copied().unwrap_or(0);
        let expected = (n_a + n_b) as f64 / 4.0;
        assert!((n_b as f64 - expected).abs() <= 1.0, "class {class}: {n_a} and {n_b}");
    }
    assert_eq!(keys(&world.path("even/b-000000.tar")), keys(&world.path("again/b-000000.tar")));
    assert_ne!(keys(&world.path("even/b-000000.tar")), keys(&world.path("keys/b-000000.tar")));
}

/// Runs `verb` of `shards` on `input` with more flags.
fn shards_verb(world: &World, verb: &str, input: &str, more: &[&str]) -> std::process::Output {
    world.ocelli(&[&["shards", verb, input], more].concat())
}

/// Commands that read images read a folder of them as they read its shards; those that write shards
/// say what to do first.
#[test]
fn a_folder_of_images_is_read_like_its_shards() {
    const NAME: &str = "prep::a_folder_of_images_is_read_like_its_shards";
    let world = World::new(12);
    world.extract("files");
    let folder = world.text("files/train-000000");
    let shard = world.text("data/train-000000.tar");
    for verb in ["stats", "verify"] {
        let folder_totals = json_of(&shards_verb(&world, verb, &folder, &["--json"]));
        let shard_totals = json_of(&shards_verb(&world, verb, &shard, &["--json"]));
        for key in ["samples", "bad", "classes", "formats", "image_bytes"] {
            assert_eq!(folder_totals[key], shard_totals[key], "{verb}: {key}");
        }
    }
    let listed = shards_verb(&world, "ls", &folder, &[]);
    ok(&listed);
    assert_eq!(String::from_utf8_lossy(&listed.stdout).lines().count(), 12);
    ok(&shards_verb(&world, "contact-sheet", &folder, &["--out", &world.text("sheet.png")]));
    assert!(image::open(world.path("sheet.png")).is_ok());
    let against = ["--against", &shard, "--out", &world.text("against"), "--json"];
    let report = json_of(&shards_verb(&world, "dedup", &folder, &against));
    assert_eq!((&report["samples"], &report["exact"]), (&12.into(), &12.into()), "{report}");

    // The list of images to keep is that of the packed shards, too.
    std::fs::copy(
        world.path("files/train-000000/00000003.jpg"),
        world.path("files/train-000000/00000003 copy.jpg"),
    )
    .unwrap();
    let report =
        json_of(&shards_verb(&world, "dedup", &folder, &["--out", &world.text("checked"), "--json"]));
    assert_eq!((&report["samples"], &report["exact"]), (&13.into(), &1.into()), "{report}");
    let keep = world.text("checked/keep.txt");
    let n_kept = std::fs::read_to_string(&keep).unwrap().lines().count();
    ok(&world.ocelli(&["shards", "pack", &folder, "--out", &world.text("packed")]));
    let unique = world.text("unique");
    let report = json_of(&shards_verb(
        &world,
        "subset",
        &world.text("packed"),
        &["--keys", &keep, "--out", &unique, "--json"],
    ));
    assert_eq!(report["train"]["samples"], n_kept, "{report}");

    let out = world.text("refused");
    for (verb, more) in [
        ("split", &["--part", "a=1"][..]),
        ("filter", &[]),
        ("resize", &[]),
        ("reshard", &[]),
        ("subset", &["--count", "1"]),
        ("extract", &[]),
        ("dedup", &["--remove"]),
    ] {
        let output = shards_verb(&world, verb, &folder, &[&["--out", &out], more].concat());
        check_message(&format!("{NAME}.{verb}"), &fails(&output, 2));
        assert!(!world.path("refused").exists(), "{verb}");
    }
    let inside = world.text("files/train-000000/checked");
    let output = shards_verb(&world, "dedup", &folder, &["--out", &inside]);
    check_message(&format!("{NAME}.inside"), &fails(&output, 2));
}

/// The exact copy in the folder or shard that is preferred is kept.
#[test]
fn exact_copies_are_kept_where_they_are_preferred() {
    const NAME: &str = "prep::exact_copies_are_kept_where_they_are_preferred";
    let world = World::new(1);
    let image = jpeg(&picture(60, 40, 1), 90);
    for name in ["photos/a/1.jpg", "photos/b/1.jpg", "photos/c/1.jpg"] {
        std::fs::create_dir_all(world.path(name).parent().unwrap()).unwrap();
        std::fs::write(world.path(name), &image).unwrap();
    }
    let photos = world.text("photos");
    for (folder, others) in [("a", &["b"][..]), ("b", &["a", "c"]), ("c", &[])] {
        let out = world.text(&format!("out-{folder}"));
        let mut args = vec!["--out".to_string(), out, "--prefer".into(), format!("{photos}/{folder}/")];
        args.extend(others.iter().map(|other| format!("{photos}/{other}")));
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        ok(&shards_verb(&world, "dedup", &photos, &args));
        let kept = std::fs::read_to_string(world.path(&format!("out-{folder}/keep.txt"))).unwrap();
        assert_eq!(kept, format!("{folder}/1\n"));
    }
    for name in ["x", "y"] {
        write_shard(&world.path(&format!("in/{name}.tar")), &[(name, "jpg", image.clone())]);
    }
    let shards = world.text("in");
    for name in ["x", "y"] {
        let out = world.text(&format!("kept-{name}"));
        let preferred = world.text(&format!("in/{name}.tar"));
        ok(&shards_verb(&world, "dedup", &shards, &["--out", &out, "--remove", "--prefer", &preferred]));
        // The other shard would be empty, and is not written.
        let written = members_in(Path::new(&out));
        assert_eq!(written.len(), 1);
        assert_eq!(written[0].0, name);
        assert!(world.path(&format!("kept-{name}/{name}.tar")).exists());
        let other = if name == "x" { "y" } else { "x" };
        assert!(!world.path(&format!("kept-{name}/{other}.tar")).exists());
    }
    let args = ["--out", &world.text("none"), "--prefer", &world.text("elsewhere")];
    check_message(&format!("{NAME}.none"), &fails(&shards_verb(&world, "dedup", &shards, &args), 2));
}

/// A shard has at least one sample: limits of 0 are refused, and images that cannot be read leave
/// no shard behind.
#[test]
fn no_empty_shards_are_written() {
    const NAME: &str = "prep::no_empty_shards_are_written";
    let world = World::new(1);
    for i in 0..3 {
        let path = world.path(&format!("photos/{i}.jpg"));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, jpeg(&picture(40, 30, i), 90)).unwrap();
    }
    std::fs::write(world.path("photos/broken.jpg"), "no image").unwrap();
    let photos = world.text("photos");
    let out = world.text("out");
    let zero = ["--out", &out, "--samples-per-shard", "0"];
    check_message(&format!("{NAME}.pack"), &fails(&shards_verb(&world, "pack", &photos, &zero), 2));
    let shard = world.text("data/train-000000.tar");
    check_message(&format!("{NAME}.reshard"), &fails(&shards_verb(&world, "reshard", &shard, &zero), 2));
    assert!(!world.path("out").exists());

    let one = ["--out", &out, "--samples-per-shard", "1", "--json"];
    let report = json_of(&shards_verb(&world, "pack", &photos, &one));
    assert_eq!((&report["samples"], &report["shards"]), (&3.into(), &3.into()), "{report}");
    let again = shards_verb(&world, "pack", &photos, &one);
    let report = json_of(&again);
    assert_eq!((&report["shards"], &report["shards_there"]), (&3.into(), &3.into()), "{report}");
    assert!(String::from_utf8_lossy(&again.stdout).contains("train-*.tar"), "a pattern, with a gap");
    let listed = shards_verb(&world, "ls", &out, &[]);
    ok(&listed);
    assert_eq!(String::from_utf8_lossy(&listed.stdout).lines().count(), 3);
    let parts = world.text("parts");
    let in_parts = ["--out", &parts, "--samples-per-shard", "1", "--json"];
    for part in ["1/2", "2/2"] {
        ok(&shards_verb(&world, "pack", &photos, &[&in_parts[..], &["--part", part]].concat()));
    }
    let joined = shards_verb(&world, "pack", &photos, &[&in_parts[..], &["--join", "2"]].concat());
    let report = json_of(&joined);
    assert_eq!((&report["samples"], &report["shards"]), (&3.into(), &3.into()), "{report}");
    assert_eq!(members_in(&world.path("parts")), members_in(&world.path("out")));
}

/// Shares that do not add up to 1 are scaled, which is said; others are not mentioned.
#[test]
fn shares_that_do_not_add_up_are_noted() {
    let world = World::new(20);
    let shard = world.text("data/train-000000.tar");
    let args = ["--out", &world.text("more"), "--part", "train=0.8", "--part", "test=0.3"];
    let stderr = ok(&shards_verb(&world, "split", &shard, &args));
    check_message("prep::shares_that_do_not_add_up_are_noted.more", &lines_with(&stderr, "add up"));
    let args = ["--out", &world.text("less"), "--part", "train=0.5", "--part", "test=0.25"];
    let stderr = ok(&shards_verb(&world, "split", &shard, &args));
    check_message("prep::shares_that_do_not_add_up_are_noted.less", &lines_with(&stderr, "add up"));
    let args = ["--out", &world.text("one"), "--part", "a=0.7", "--part", "b=0.2", "--part", "c=0.1"];
    let stderr = ok(&shards_verb(&world, "split", &shard, &args));
    assert!(!stderr.contains("add up"), "{stderr}");
}
