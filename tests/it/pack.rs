//! Packing folders and lists of images into shards, and extracting them, without loss of the user's
//! data.

use std::io::Cursor;
use std::path::Path;

use image::{ImageBuffer, ImageFormat, Rgb};
use pipeline::SampleId;
use serde_json::Value;

use crate::messages::{check_message, lines_with};
use crate::support::{World, fails, json_of, ok, open};

/// Value of a sine wave at the angle of `x / size_px` radians.
fn wave(x: u32, size_px: u32) -> u8 {
    (128.0 + 100.0 * (f64::from(x) / f64::from(size_px)).sin()) as u8
}

/// Draws a small picture that depends on `seed`.
fn picture(seed: u32, size_px: u32) -> ImageBuffer<Rgb<u8>, Vec<u8>> {
    ImageBuffer::from_fn(size_px, size_px, |x, y| {
        let red = wave(x * (7 + seed), size_px);
        let green = wave(y * (5 + seed), size_px);
        let blue = wave((x + y) * (3 + seed + seed), size_px);
        Rgb([red, green, blue])
    })
}

fn write(path: &Path, image: &ImageBuffer<Rgb<u8>, Vec<u8>>, format: ImageFormat) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut bytes = Cursor::new(Vec::new());
    image.write_to(&mut bytes, format).unwrap();
    std::fs::write(path, bytes.into_inner()).unwrap();
}

/// Reads key, label and columns of each sample of `spec`, by key.
fn samples(world: &World, spec: &str) -> Vec<(String, Option<u32>, Value)> {
    let dataset = open(world, spec).unwrap();
    let mut samples = Vec::new();
    for id in 0..dataset.n_samples() {
        let sample = dataset.read(SampleId(id)).unwrap();
        let columns = dataset.member(SampleId(id), &["json"]).unwrap();
        let columns = columns.map_or(Value::Null, |bytes| serde_json::from_slice(&bytes).unwrap());
        samples.push((sample.key, sample.label, columns));
    }
    samples.sort_by(|a, b| a.0.cmp(&b.0));
    samples
}

#[test]
fn packing_a_folder_keeps_names_and_reports_skipped_files() {
    let world = World::new(4);
    let folder = world.path("photos");
    write(&folder.join("cat/IMG 1.JPG"), &picture(1, 20), ImageFormat::Jpeg);
    write(&folder.join("cat/IMG 1.png"), &picture(2, 20), ImageFormat::Png);
    write(&folder.join("dog/a.b.bmp"), &picture(3, 20), ImageFormat::Bmp);
    write(&folder.join("dog/c.tiff"), &picture(4, 20), ImageFormat::Tiff);
    write(&folder.join("dog/d.gif"), &picture(5, 20), ImageFormat::Gif);
    write(&folder.join("dog/._d.jpg"), &picture(6, 20), ImageFormat::Jpeg);
    std::fs::write(folder.join("dog/notes.doc"), "x").unwrap();
    std::fs::write(folder.join("dog/new.AVIF"), "x").unwrap();
    std::fs::write(folder.join("dog/broken.bmp"), "no bitmap").unwrap();
    // A link with the name of an image to a text file.
    std::os::unix::fs::symlink(folder.join("dog/notes.doc"), folder.join("dog/holiday.jpg")).unwrap();
    let out = world.text("packed");
    let packed = world.ocelli(&["shards", "pack", &world.text("photos"), "--out", &out, "--json"]);
    let stderr = ok(&packed);
    assert!(
        stderr.contains("1 .doc") && stderr.contains("1 .jpg") && stderr.contains("failures.jsonl"),
        "{stderr}"
    );
    check_message(
        "pack::packing_a_folder_keeps_names_and_reports_skipped_files",
        &lines_with(&stderr, "1 .avif"),
    );
    let line = json_of(&packed);
    assert_eq!((line["samples"].as_u64(), line["failed"].as_u64()), (Some(5), Some(2)), "{line}");
    let packed_samples = samples(&world, &format!("{out}/*.tar"));
    let keys: Vec<&str> = packed_samples.iter().map(|(key, ..)| key.as_str()).collect();
    assert_eq!(keys, ["cat/IMG 1", "cat/IMG 1-2", "dog/a_b", "dog/c", "dog/d"]);
    assert_eq!(packed_samples[1].2["name"], "cat/IMG 1.png", "a key that differs from the name");
    assert_eq!(packed_samples[2].2["name"], "dog/a.b.bmp");
    assert_eq!(
        packed_samples.iter().map(|(_, label, _)| label.unwrap()).collect::<Vec<_>>(),
        [0, 0, 1, 1, 1]
    );
    // A bitmap is packed without loss.
    let dataset = open(&world, &out).unwrap();
    let id = (0..5).find(|id| dataset.read(SampleId(*id)).unwrap().key == "dog/a_b").unwrap();
    let png = image::load_from_memory(dataset.read(SampleId(id)).unwrap().image.bytes()).unwrap();
    assert_eq!(png.to_rgb8(), picture(3, 20));
    let failures = std::fs::read_to_string(world.path("packed/train.failures.jsonl")).unwrap();
    assert!(failures.contains("dog/broken.bmp") && failures.contains("dog/holiday.jpg"), "{failures}");
}

#[test]
fn packing_a_list_keeps_columns_and_skips_missing_files() {
    let world = World::new(4);
    for i in 0..3 {
        write(&world.path(&format!("i{i}.png")), &picture(i, 20), ImageFormat::Png);
    }
    std::fs::write(
        world.path("list.csv"),
        "Path,Label,caption,split\ni0.png,cat,a cat,x\ngone.png,dog,,y\ni1.png,dog,,z\n",
    )
    .unwrap();
    let out = world.text("csv");
    let stderr = ok(&world.ocelli(&["shards", "pack", &world.text("list.csv"), "--out", &out]));
    let list = lines_with(&stderr, "failures.jsonl");
    check_message("pack::packing_a_list_keeps_columns_and_skips_missing_files", &list);
    let packed_samples = samples(&world, &out);
    assert_eq!(packed_samples.len(), 2);
    assert_eq!(packed_samples[0].2["caption"], "a cat");
    assert_eq!((&packed_samples[1].2["split"], packed_samples[1].1), (&Value::from("z"), Some(1)));
    let row = r#"{"path": "i2.png", "boxes": [[1, 2, 3, 4]], "meta": {"by": "me"}}"#;
    std::fs::write(world.path("list.jsonl"), row).unwrap();
    let out = world.text("jsonl");
    ok(&world.ocelli(&["shards", "pack", &world.text("list.jsonl"), "--out", &out]));
    let columns = &samples(&world, &out)[0].2;
    assert_eq!((&columns["boxes"][0][3], &columns["meta"]["by"]), (&Value::from(4), &Value::from("me")));
    // A list whose files are all missing gives no shard.
    std::fs::write(world.path("none.txt"), "a.jpg\nb.jpg\n").unwrap();
    fails(&world.ocelli(&["shards", "pack", &world.text("none.txt"), "--out", &world.text("none")]), 3);
    assert!(!world.path("none/train-000000.tar").exists());
}

/// Lists state several classes of an image as JSON, and an empty list that it is of none of them;
/// both kinds of list give the same samples.
#[test]
fn lists_state_several_classes() {
    let world = World::new(4);
    for i in 0..5 {
        write(&world.path(&format!("i{i}.png")), &picture(i, 20), ImageFormat::Png);
    }
    let lines = [
        r#"{"path": "i0.png", "tags": ["red", "green", "red"]}"#,
        r#"{"path": "i1.png", "tags": "red"}"#,
        r#"{"path": "i2.png", "tags": []}"#,
        r#"{"path": "i3.png", "tags": null}"#,
        r#"{"path": "i4.png", "tags": [{"box": 1}]}"#,
    ];
    std::fs::write(world.path("lines.jsonl"), lines.join("\n")).unwrap();
    let table = "path,tags\ni0.png,\"[\"\"red\"\", \"\"green\"\", \"\"red\"\"]\"\ni1.png,red\ni2.png,[]\n\
                 i3.png,\ni4.png,\"[{\"\"box\"\": 1}]\"\n";
    std::fs::write(world.path("table.csv"), table).unwrap();
    for (list, column) in [("lines.jsonl", "tags"), ("table.csv", "tags"), ("table.csv", "labels")] {
        let text = std::fs::read_to_string(world.path(list)).unwrap();
        std::fs::write(world.path(list), text.replace("tags", column)).unwrap();
        let out = world.text(&format!("packed-{column}-{list}"));
        let path = world.text(list);
        let args = ["shards", "pack", &path, "--label-column", column, "--out", &out, "--json"];
        let output = world.ocelli(&args);
        let stderr = ok(&output);
        assert!(stderr.contains("1 value in the column of classes, such as {\"box\":1}, state"), "{stderr}");
        assert_eq!(json_of(&output)["classes"], 2, "an image of two classes adds none");
        assert_eq!(std::fs::read_to_string(format!("{out}/classes.txt")).unwrap(), "green\nred\n");
        let dataset = open(&world, &out).unwrap();
        let mut classes = std::collections::BTreeMap::new();
        for id in (0..dataset.n_samples()).map(SampleId) {
            let key = dataset.read(id).unwrap().key;
            classes.insert(key, (dataset.classes(id).unwrap(), dataset.states_no_class(id).unwrap()));
        }
        let expected = [
            (vec!["1".to_string(), "0".to_string()], false),
            (vec!["1".to_string()], false),
            (vec![], true),
            (vec![], false),
            (vec![], false),
        ];
        assert_eq!(classes.into_values().collect::<Vec<_>>(), expected, "{list}");
    }
    // Of several columns, the first that is not empty has the class.
    let table =
        "path,label,labels\ni0.png,,\"[\"\"red\"\"]\"\ni1.png,blue,\"[\"\"red\"\"]\"\ni2.png,\"[0,1,0]\",\n";
    std::fs::write(world.path("both.csv"), table).unwrap();
    let out = world.text("both");
    let stderr = ok(&world.ocelli(&["shards", "pack", &world.text("both.csv"), "--out", &out]));
    check_message("pack::lists_state_several_classes.flags", &lines_with(&stderr, "lists of 0 and 1"));
    assert_eq!(std::fs::read_to_string(format!("{out}/classes.txt")).unwrap(), "0\n1\nblue\nred\n");
    std::fs::write(world.path("broken.jsonl"), r#"{"path": "i0.png", "label": ["a\nb"]}"#).unwrap();
    let output =
        world.ocelli(&["shards", "pack", &world.text("broken.jsonl"), "--out", &world.text("broken")]);
    check_message("pack::lists_state_several_classes.broken", &fails(&output, 2));
    std::fs::write(world.path("python.csv"), "path,label\ni1.png,red\ni0.png,\"['red', 'green']\"\n")
        .unwrap();
    let output = world.ocelli(&["shards", "pack", &world.text("python.csv"), "--out", &world.text("python")]);
    check_message("pack::lists_state_several_classes", &fails(&output, 2));
}

#[test]
fn extract_and_pack_keep_labels_and_columns() {
    let world = World::new(4);
    for (i, class) in ["cat", "dog", "owl"].into_iter().enumerate() {
        write(&world.path(&format!("photos/{class}/{i}.jpg")), &picture(i as u32, 20), ImageFormat::Jpeg);
        std::fs::write(world.path(&format!("photos/{class}/{i}.txt")), format!("a {class}")).unwrap();
    }
    let first = world.text("first");
    let files = world.text("files");
    let second = world.text("second");
    ok(&world.ocelli(&["shards", "pack", &world.text("photos"), "--out", &first]));
    ok(&world.ocelli(&["shards", "extract", &first, "--out", &files]));
    let classes = format!("{files}/classes.txt");
    ok(&world.ocelli(&["shards", "pack", &format!("{files}/train-000000"), "--out", &second]));
    assert_eq!(samples(&world, &first), samples(&world, &second));
    assert_eq!(std::fs::read_to_string(classes).unwrap(), "cat\ndog\nowl\n");
    // By name, and by number.
    for class in ["owl", "2"] {
        let out = world.text(&format!("subset-{class}"));
        ok(&world.ocelli(&["shards", "subset", &first, "--classes", class, "--out", &out]));
        assert_eq!(samples(&world, &out)[0].0, "owl/2");
    }
    let none = world.ocelli(&["shards", "subset", &first, "--classes", "cow", "--out", &world.text("cow")]);
    assert!(fails(&none, 2).contains("cat, dog, owl"));
}

/// Trains on `shards` for `n_steps` steps in the folder `run`; returns standard error.
fn pretrain(world: &World, run: &str, shards: &str, n_steps: u64, more: &[&str]) -> String {
    let recipe = world.text("tiny.toml");
    let workdir = world.text(run);
    let length = format!("optim.length={{steps={n_steps}}}");
    let args = ["pretrain", "--recipe", &recipe, "--shards", shards, "--workdir", &workdir, "--set", &length];
    ok(&crate::support::program().args(args).args(more).output().unwrap())
}

/// Training on a folder of images, without copying them, gives the same weights as training on its
/// shards.
#[test]
fn a_folder_of_images_trains_like_its_shards() {
    let world = World::new(4);
    for i in 0..12 {
        write(
            &world.path(&format!("photos/{}/{i}.png", ["cat", "dog"][i % 2])),
            &picture(i as u32, 24),
            ImageFormat::Png,
        );
    }
    std::fs::write(world.path("photos/dog/notes.doc"), b"no image").unwrap();
    let photos = world.text("photos");
    let shards = world.text("packed");
    ok(&world.ocelli(&["shards", "pack", &photos, "--out", &shards]));
    pretrain(&world, "of-shards", &shards, 4, &[]);
    let stderr = pretrain(&world, "in-place", &photos, 4, &[]);
    assert!(stderr.contains("1 .doc"), "{stderr}");
    let weights = "checkpoints/step-0000000004/rank-00000.safetensors";
    let in_place = std::fs::read(world.path("in-place").join(weights)).unwrap();
    let from_shards = std::fs::read(world.path("of-shards").join(weights)).unwrap();
    assert!(in_place == from_shards, "the order of a folder is not that of its shards");
    assert!(!world.path("in-place/shards").exists(), "images were copied");
    let stderr = pretrain(&world, "in-place", &photos, 6, &["--lengthen"]);
    check_message(
        "pack::a_folder_of_images_trains_like_its_shards.resumed",
        &lines_with(&stderr, "at step 4"),
    );
    let classes = json_of(&world.ocelli(&[
        "probe",
        "--checkpoint",
        &world.text("in-place"),
        "--train",
        &photos,
        "--test",
        &photos,
        "--protocol",
        "knn",
        "--json",
    ]));
    assert_eq!(classes["classes"], serde_json::json!(["cat", "dog"]), "{classes}");
    let nothing = world.path("nothing");
    std::fs::create_dir(&nothing).unwrap();
    let output = world.pretrain("x", &["--shards", &nothing.display().to_string()]);
    check_message("pack::a_folder_of_images_trains_like_its_shards.empty", &fails(&output, 2));
}

/// Encodes a JPEG whose EXIF states a rotation by 90 degrees.
fn rotated_jpeg(seed: u32) -> Vec<u8> {
    let mut jpeg = Cursor::new(Vec::new());
    picture(seed, 24).write_to(&mut jpeg, ImageFormat::Jpeg).unwrap();
    let mut bytes = jpeg.into_inner();
    // A TIFF header and a directory of one entry: tag 0x112, a short, 6.
    let tiff = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0";
    let segment = [&[0xff, 0xe1], (tiff.len() as u16 + 2).to_be_bytes().as_slice(), tiff].concat();
    bytes.splice(2..2, segment);
    bytes
}

/// Published recipes ignore EXIF: if it rotates images, every job reports their number.
#[test]
fn images_rotated_by_exif_are_reported() {
    let world = World::new(4);
    write(&world.path("photos/a.png"), &picture(1, 24), ImageFormat::Png);
    std::fs::write(world.path("photos/b.jpg"), rotated_jpeg(2)).unwrap();
    let photos = world.text("photos");
    let packed = world.text("packed");
    let stderr = ok(&world.ocelli(&["shards", "pack", &photos, "--out", &packed]));
    check_message(
        "pack::images_rotated_by_exif_are_reported.packed",
        &lines_with(&stderr, "data.apply_exif=true"),
    );
    let output = world.ocelli(&["shards", "stats", &packed]);
    ok(&output);
    let stats = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(stats.contains("EXIF turns 1 image (applied only with data.apply_exif=true)"), "{stats}");
    let sizes = ["--shards", &photos, "--set", "optim.length={steps=2}"];
    let stderr = ok(&world.pretrain("run", &sizes));
    check_message(
        "pack::images_rotated_by_exif_are_reported.trained",
        &lines_with(&stderr, "data.apply_exif=true"),
    );
    let stderr =
        ok(&world.pretrain("turned", &[sizes.as_slice(), &["--set", "data.apply_exif=true"]].concat()));
    assert!(!stderr.contains("EXIF"), "{stderr}");
}

/// Names that are not UTF-8 are escaped, so that they remain different and can be restored.
#[test]
fn names_that_are_not_utf8_are_escaped() {
    use std::os::unix::ffi::OsStrExt;
    let world = World::new(4);
    for (seed, name) in [b"caf\xe9.png", b"caf\xe8.png"].into_iter().enumerate() {
        let path = world.path("photos").join(std::ffi::OsStr::from_bytes(name));
        write(&path, &picture(seed as u32, 24), ImageFormat::Png);
    }
    ok(&world.ocelli(&["shards", "pack", &world.text("photos"), "--out", &world.text("packed")]));
    let keys: Vec<String> = samples(&world, &world.text("packed")).into_iter().map(|(key, ..)| key).collect();
    assert_eq!(keys, ["caf%E8", "caf%E9"]);
}

/// Images of less common formats in a folder are trained on, like their PNGs.
#[test]
fn images_of_other_formats_are_trained_on() {
    let world = World::new(4);
    let formats = [
        ("bmp", ImageFormat::Bmp),
        ("dib", ImageFormat::Bmp),
        ("TIF", ImageFormat::Tiff),
        ("ppm", ImageFormat::Pnm),
        ("png", ImageFormat::Png),
        ("tga", ImageFormat::Tga),
    ];
    for (i, (extension, format)) in formats.into_iter().enumerate() {
        write(&world.path(&format!("photos/{i}.{extension}")), &picture(i as u32, 24), format);
    }
    let photos = world.text("photos");
    let packed = world.text("packed");
    let sizes = ["--set", "optim.length={steps=2}", "--set", "optim.batch_size=16"];
    let stderr = ok(&world.pretrain("run", &[["--shards", &photos].as_slice(), &sizes].concat()));
    check_message("pack::images_of_other_formats_are_trained_on.skipped", &lines_with(&stderr, "5.tga"));
    // Four of them are in the shard of the arguments of every run.
    check_message("pack::images_of_other_formats_are_trained_on.few", &lines_with(&stderr, "only 9 images"));
    assert!(!stderr.contains("no pictures"), "{stderr}");
    assert!(!world.path("run/quarantine.jsonl").exists());
    ok(&world.ocelli(&["shards", "pack", &photos, "--out", &packed]));
    assert_eq!(samples(&world, &packed).len(), 6);
}

#[test]
fn dedup_keeps_the_largest_copy_and_draws_the_groups() {
    let world = World::new(4);
    write(&world.path("photos/a-small.png"), &picture(1, 40), ImageFormat::Png);
    write(&world.path("photos/b-large.png"), &picture(1, 160), ImageFormat::Png);
    write(&world.path("photos/c-small-again.png"), &picture(1, 40), ImageFormat::Png);
    write(&world.path("photos/d-other.png"), &picture(9, 160), ImageFormat::Png);
    let shards = world.text("shards");
    let out = world.text("dedup");
    ok(&world.ocelli(&["shards", "pack", &world.text("photos"), "--out", &shards]));
    ok(&world.ocelli(&["shards", "dedup", &shards, "--out", &out, "--max-distance", "6"]));
    let keep = std::fs::read_to_string(world.path("dedup/keep.txt")).unwrap();
    let mut kept: Vec<&str> = keep.lines().map(|line| line.split('\t').nth(1).unwrap()).collect();
    kept.sort_unstable();
    assert_eq!(kept, ["b-large", "d-other"]);
    let copies = std::fs::read_to_string(world.path("dedup/copies.jsonl")).unwrap();
    let exact =
        copies.lines().filter(|row| serde_json::from_str::<Value>(row).unwrap()["distance"].is_null());
    assert_eq!(exact.count(), 1, "the twin of a copy is exact: {copies}");
    // Below each image are its key and what it is.
    let picture = image::open(world.path("dedup/copies.png")).unwrap();
    assert!(picture.width() >= 3 * 128 && picture.height() >= 128 + 2 * 16);
}
