//! Packing folders and lists of images into shards, and extracting them, without loss of the user's data.

use std::io::Cursor;
use std::path::Path;

use image::{ImageBuffer, ImageFormat, Rgb};
use pipeline::SampleId;
use serde_json::Value;

use crate::support::{World, fails, json_of, ok, open};

/// Draws a small picture that depends on `seed`.
fn picture(seed: u32, size_px: u32) -> ImageBuffer<Rgb<u8>, Vec<u8>> {
    let wave =
        |x: u32, k: u32| (128.0 + 100.0 * (f64::from(x * (k + seed)) / f64::from(size_px)).sin()) as u8;
    ImageBuffer::from_fn(size_px, size_px, |x, y| Rgb([wave(x, 7), wave(y, 5), wave(x + y, 3 + seed)]))
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
    let mut all: Vec<_> = (0..dataset.n_samples())
        .map(|id| {
            let sample = dataset.read(SampleId(id)).unwrap();
            let columns = dataset.member(SampleId(id), &["json"]).unwrap();
            let columns = columns.map_or(Value::Null, |bytes| serde_json::from_slice(&bytes).unwrap());
            (sample.key, sample.label, columns)
        })
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

#[test]
fn a_folder_keeps_names_and_says_what_it_skips() {
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
    // A name does not make an image: this link leads to a text.
    std::os::unix::fs::symlink(folder.join("dog/notes.doc"), folder.join("dog/holiday.jpg")).unwrap();
    let out = world.text("packed");
    let packed = world.ocelli(&["shards", "pack", &world.text("photos"), "--out", &out, "--json"]);
    let said = ok(&packed);
    assert!(said.contains("1 .doc") && said.contains("1 .jpg") && said.contains("failures.jsonl"), "{said}");
    assert!(said.contains("formats that are not read: 1 .avif"), "{said}");
    let line = json_of(&packed);
    assert_eq!((line["samples"].as_u64(), line["failed"].as_u64()), (Some(5), Some(2)), "{line}");
    let found = samples(&world, &format!("{out}/*.tar"));
    let keys: Vec<&str> = found.iter().map(|(key, ..)| key.as_str()).collect();
    assert_eq!(keys, ["cat/IMG 1", "cat/IMG 1-2", "dog/a_b", "dog/c", "dog/d"]);
    assert_eq!(found[1].2["name"], "cat/IMG 1.png", "a key that does not say it");
    assert_eq!(found[2].2["name"], "dog/a.b.bmp");
    assert_eq!(found.iter().map(|(_, label, _)| label.unwrap()).collect::<Vec<_>>(), [0, 0, 1, 1, 1]);
    // A bitmap is packed without loss.
    let dataset = open(&world, &out).unwrap();
    let id = (0..5).find(|id| dataset.read(SampleId(*id)).unwrap().key == "dog/a_b").unwrap();
    let png = image::load_from_memory(&dataset.read(SampleId(id)).unwrap().image).unwrap();
    assert_eq!(png.to_rgb8(), picture(3, 20));
    let failures = std::fs::read_to_string(world.path("packed/train.failures.jsonl")).unwrap();
    assert!(failures.contains("dog/broken.bmp") && failures.contains("dog/holiday.jpg"), "{failures}");
}

#[test]
fn a_list_keeps_its_columns_and_goes_on_over_what_is_missing() {
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
    let said = ok(&world.ocelli(&["shards", "pack", &world.text("list.csv"), "--out", &out]));
    assert!(said.contains("1 images could not be packed"), "{said}");
    let found = samples(&world, &out);
    assert_eq!(found.len(), 2);
    assert_eq!(found[0].2["caption"], "a cat");
    assert_eq!((&found[1].2["split"], found[1].1), (&Value::from("z"), Some(1)));
    let row = r#"{"path": "i2.png", "boxes": [[1, 2, 3, 4]], "meta": {"by": "me"}}"#;
    std::fs::write(world.path("list.jsonl"), row).unwrap();
    let out = world.text("jsonl");
    ok(&world.ocelli(&["shards", "pack", &world.text("list.jsonl"), "--out", &out]));
    let columns = &samples(&world, &out)[0].2;
    assert_eq!((&columns["boxes"][0][3], &columns["meta"]["by"]), (&Value::from(4), &Value::from("me")));
    // A list whose files are all missing yields no shard.
    std::fs::write(world.path("none.txt"), "a.jpg\nb.jpg\n").unwrap();
    fails(&world.ocelli(&["shards", "pack", &world.text("none.txt"), "--out", &world.text("none")]), 3);
    assert!(!world.path("none/train-000000.tar").exists());
}

#[test]
fn extract_and_pack_keep_labels_and_columns() {
    let world = World::new(4);
    for (i, class) in ["cat", "dog", "owl"].into_iter().enumerate() {
        write(&world.path(&format!("photos/{class}/{i}.jpg")), &picture(i as u32, 20), ImageFormat::Jpeg);
        std::fs::write(world.path(&format!("photos/{class}/{i}.txt")), format!("a {class}")).unwrap();
    }
    let (first, files, second) = (world.text("first"), world.text("files"), world.text("second"));
    ok(&world.ocelli(&["shards", "pack", &world.text("photos"), "--out", &first]));
    ok(&world.ocelli(&["shards", "extract", &first, "--out", &files]));
    let classes = format!("{files}/classes.txt");
    ok(&world.ocelli(&["shards", "pack", &format!("{files}/train-000000"), "--out", &second]));
    let strip = |list: Vec<(String, Option<u32>, Value)>| list;
    assert_eq!(strip(samples(&world, &first)), strip(samples(&world, &second)));
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

#[test]
fn a_run_takes_a_folder_of_images_and_goes_on_with_its_shards() {
    let world = World::new(4);
    for i in 0..12 {
        write(&world.path(&format!("photos/{i}.png")), &picture(i, 24), ImageFormat::Png);
    }
    let (recipe, photos, run) = (world.text("tiny.toml"), world.text("photos"), world.text("run"));
    let args = |steps: &str| -> Vec<String> {
        let length = format!("optim.length={{steps={steps}}}");
        let list =
            ["pretrain", "--recipe", &recipe, "--shards", &photos, "--workdir", &run, "--set", &length];
        list.map(String::from).to_vec()
    };
    let run_with = |more: &[String]| crate::support::program().args(more).output().unwrap();
    let said = ok(&run_with(&args("2")));
    assert!(said.contains("packed into shards"), "{said}");
    let said = ok(&run_with(&[args("4"), vec!["--lengthen".into()]].concat()));
    assert!(!said.contains("packed into shards"), "{said}");
    let nothing = world.path("nothing");
    std::fs::create_dir(&nothing).unwrap();
    let error = fails(&world.pretrain("x", &["--shards", &nothing.display().to_string()]), 2);
    assert!(error.contains("no shard"), "{error}");
}

#[test]
fn of_copies_the_largest_stays_and_groups_are_drawn() {
    let world = World::new(4);
    write(&world.path("photos/a-small.png"), &picture(1, 40), ImageFormat::Png);
    write(&world.path("photos/b-large.png"), &picture(1, 160), ImageFormat::Png);
    write(&world.path("photos/c-small-again.png"), &picture(1, 40), ImageFormat::Png);
    write(&world.path("photos/d-other.png"), &picture(9, 160), ImageFormat::Png);
    let (shards, out) = (world.text("shards"), world.text("dedup"));
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
    assert!(image::open(world.path("dedup/copies.png")).unwrap().width() >= 3 * 128);
}
