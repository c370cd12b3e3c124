//! Classes and masks that commands must neither drop nor mistake for others.

use std::fs;

use image::{DynamicImage, ImageBuffer, Luma, Rgb};
use pipeline::{Dataset, SampleId, Shard};
use prep::open::open_dataset;

use crate::messages::{check_message, lines_with};
use crate::support::{World, encode_png, fails, ok, open, shard_writer};

/// Draws a picture that differs from those of other numbers.
fn picture(number: u32, width: u32, height: u32) -> DynamicImage {
    ImageBuffer::from_fn(width, height, |x, y| Rgb([(x * 3) as u8, (y * 5) as u8, (number * 20) as u8]))
        .into()
}

/// Writes the picture `number` into a file of the world, whose folder is created.
fn write_picture(world: &World, name: &str, number: u32) {
    let path = world.path(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    picture(number, 24, 20).save(path).unwrap();
}

/// Returns key, classes and whether the sample states that it is of none, by key.
fn classes_by_key(world: &World, shards: &str) -> Vec<(String, Vec<String>, bool)> {
    classes_of(&open(world, shards).unwrap())
}

/// The same of an opened data set.
fn classes_of(dataset: &Dataset) -> Vec<(String, Vec<String>, bool)> {
    let mut samples = Vec::new();
    for id in (0..dataset.n_samples()).map(SampleId) {
        let key = dataset.read(id).unwrap().key;
        samples.push((key, dataset.classes(id).unwrap(), dataset.states_no_class(id).unwrap()));
    }
    samples.sort();
    samples
}

/// An empty list or `.cls` beside an image says that it is of no class, where the folder is read in
/// place and where it is packed; a negative number and a folder's name do not.
#[test]
fn an_image_of_no_class_stays_one() {
    let world = World::new(2);
    let sidecars = [
        ("list.json", r#"{"labels": []}"#, true),
        ("file.cls", "", true),
        ("pets/list.json", r#"{"label": []}"#, true),
        ("pets/file.cls", "\n", true),
        ("unknown.cls", "-1", false),
        ("pets/unknown.cls", "-1", false),
        ("pets/null.json", r#"{"label": null}"#, false),
        ("other.json", r#"{"caption": "a cat"}"#, false),
    ];
    let mut expected = Vec::new();
    for (number, (name, text, is_of_none)) in (0..).zip(sidecars) {
        let (key, _) = name.split_once('.').unwrap();
        write_picture(&world, &format!("photos/{key}.png"), number);
        fs::write(world.path(&format!("photos/{name}")), text).unwrap();
        expected.push((key.to_string(), Vec::new(), is_of_none));
    }
    expected.sort();
    let photos = world.text("photos");
    let in_place = open_dataset(std::slice::from_ref(&photos), &world.storage()).unwrap();
    assert_eq!(classes_of(&in_place), expected);
    ok(&world.ocelli(&["shards", "pack", &photos, "--out", &world.text("packed")]));
    assert_eq!(classes_by_key(&world, &world.text("packed")), expected);
}

/// A list of keys whose lines have changed is another job, and lines that name nothing are told.
#[test]
fn lists_of_keys_are_known_by_their_lines() {
    let world = World::new(10);
    let data = world.text("data");
    let keys: Vec<String> = classes_by_key(&world, &data).into_iter().map(|(key, ..)| key).collect();
    let list = world.path("keep.txt");
    let out = world.text("out");
    let subset = ["shards", "subset", &data, "--keys", &world.text("keep.txt"), "--out", &out];
    fs::write(&list, format!("{}\n{}\n\nno-such-key\n", keys[0], keys[1])).unwrap();
    let stderr = ok(&world.ocelli(&subset));
    let name = "classes::lists_of_keys_are_known_by_their_lines.others";
    check_message(name, &lines_with(&stderr, "without a sample"));
    let kept: Vec<String> = classes_by_key(&world, &out).into_iter().map(|(key, ..)| key).collect();
    assert_eq!(kept, &keys[..2]);
    // The same list continues, and has nothing to do.
    ok(&world.ocelli(&subset));
    fs::write(&list, format!("{}\n", keys[5])).unwrap();
    let stderr = fails(&world.ocelli(&subset), 2);
    assert!(stderr.contains("choose another"), "{stderr}");
}

/// Packs one image of each class into the folder `name`, whose list names them.
fn pack_classes(world: &World, name: &str, classes: &[&str]) {
    for (number, class) in (0..).zip(classes) {
        write_picture(world, &format!("{name}-photos/{class}/{number}.png"), number);
    }
    let photos = world.text(&format!("{name}-photos"));
    ok(&world.ocelli(&["shards", "pack", &photos, "--out", &world.text(name)]));
}

/// Shards whose lists of names differ are not merged by number, wherever they are read together.
#[test]
fn shards_with_other_lists_of_classes_are_not_merged() {
    let world = World::new(2);
    pack_classes(&world, "pets", &["cat", "dog"]);
    pack_classes(&world, "vehicles", &["car", "truck"]);
    let shards = [world.text("pets/train-*.tar"), world.text("vehicles/train-*.tar")];
    let workdir = world.text("run");
    let finetune = ["finetune", "--recipe", "classify_cifar", "--workdir", &workdir, "--shards"];
    let output = world.ocelli(&[&finetune[..], &[&shards[0], &shards[1]]].concat());
    check_message("classes::shards_with_other_lists_of_classes_are_not_merged", &fails(&output, 2));
    let reshard = ["shards", "reshard", &shards[0], &shards[1], "--out", &world.text("all")];
    assert!(fails(&world.ocelli(&reshard), 2).contains("name classes differently"));
    assert!(!world.path("all/job.json").exists(), "the folder is not claimed");
    // One pattern for both is no other case.
    let pattern = world.text("*/train-*.tar");
    fs::remove_dir_all(world.path("data")).unwrap();
    let output = world.ocelli(&[&finetune[..], &[&pattern]].concat());
    assert!(fails(&output, 2).contains("name classes differently"));
}

/// The class of an image is in the column that the user has named, and in no other one.
#[test]
fn the_named_column_is_the_only_one_of_classes() {
    let world = World::new(2);
    for number in 0..3 {
        write_picture(&world, &format!("i{number}.png"), number);
    }
    let table = "path,label,species\ni0.png,3,cat\ni1.png,3,\ni2.png,4,dog\n";
    fs::write(world.path("list.csv"), table).unwrap();
    let list = world.text("list.csv");
    let out = world.text("packed");
    ok(&world.ocelli(&["shards", "pack", &list, "--label-column", "species", "--out", &out]));
    let classes: Vec<Vec<String>> =
        classes_by_key(&world, &out).into_iter().map(|(_, classes, _)| classes).collect();
    assert_eq!(classes, [vec!["0".to_string()], vec![], vec!["1".to_string()]]);
    // Tars and folders have no columns to choose from, which is told once.
    for input in [&out, &world.folder.path().display().to_string()] {
        let output = world.ocelli(&["shards", "stats", input, "--label-column", "species"]);
        let stderr = ok(&output);
        assert_eq!(stderr.matches("the column species is not used").count(), 1, "{stderr}");
    }
    // A number with a point is that number, beside empty cells.
    fs::write(world.path("points.csv"), "path,label\ni0.png,1.0\ni1.png,\ni2.png,0.0\n").unwrap();
    let out = world.text("points");
    ok(&world.ocelli(&["shards", "pack", &world.text("points.csv"), "--out", &out]));
    let classes: Vec<String> =
        classes_by_key(&world, &out).into_iter().map(|(_, classes, _)| classes.join(" ")).collect();
    assert_eq!(classes, ["1", "", "0"]);
}

/// Packing addresses again with another column of classes is another job.
#[test]
fn addresses_with_other_columns_are_another_job() {
    let world = World::new(2);
    fs::write(world.path("list.csv"), "url,label,clean\nhttp://127.0.0.1:9/a.png,0,1\n").unwrap();
    let list = world.text("list.csv");
    let out = world.text("out");
    let pack = ["shards", "pack", &list, "--urls", "--out", &out, "--retries", "0"];
    world.ocelli(&pack);
    let output = world.ocelli(&[&pack[..], &["--label-column", "clean"]].concat());
    assert!(fails(&output, 2).contains("choose another"), "the labels are others");
}

/// A mask beside an image is packed with it, belongs to it in a folder that is read in place, and
/// is no image.
#[test]
fn masks_in_folders_belong_to_their_images() {
    let world = World::new(2);
    for number in 0..6 {
        write_picture(&world, &format!("photos/{number}.png"), number);
        let mask = ImageBuffer::from_fn(24, 20, |x, _| Luma([u8::from(x > 4 * number)]));
        mask.save(world.path(&format!("photos/{number}.seg.png"))).unwrap();
    }
    // Nothing has the name of this one.
    write_picture(&world, "photos/alone.seg.png", 7);
    let photos = world.text("photos");
    let out = world.text("packed");
    ok(&world.ocelli(&["shards", "pack", &photos, "--out", &out]));
    let packed = Shard::open(&world.path("packed/train-000000.tar")).unwrap();
    let in_place = prep::open::open_dataset(std::slice::from_ref(&photos), &world.storage()).unwrap();
    assert_eq!((packed.len(), in_place.n_samples()), (7, 7));
    let mut n_masks = 0;
    for index in 0..packed.len() {
        let mask = packed.member(index, &["seg.png"]).unwrap();
        if let Some(mask) = &mask {
            let file = world.path(&format!("photos/{}.seg.png", packed.key(index)));
            assert_eq!(*mask, fs::read(file).unwrap());
            n_masks += 1;
        }
        assert_eq!(in_place.member(SampleId(index as u64), &["seg.png"]).unwrap(), mask, "{index}");
    }
    assert_eq!(n_masks, 6);
    // What is extracted can be packed again.
    let files = world.text("files");
    ok(&world.ocelli(&["shards", "extract", &out, "--out", &files]));
    let again = world.text("again");
    ok(&world.ocelli(&["shards", "pack", &format!("{files}/train-000000"), "--out", &again]));
    let again = Shard::open(&world.path("again/train-000000.tar")).unwrap();
    assert_eq!(again.len(), 7);
    // The decoder of pixels is trained on the folder itself.
    let workdir = world.text("run");
    let finetune = ["finetune", "--recipe", "segment_small", "--shards", &photos, "--workdir", &workdir];
    ok(&world.ocelli(
        &[&finetune[..], &["--set", "optim.length={steps=1}", "--set", "optim.batch_size=2"]].concat(),
    ));
}

/// A mask has the size of its resized image; an image whose mask does not fit it stays as it is.
#[test]
fn masks_are_resized_with_their_images() {
    let world = World::new(2);
    let image = encode_png(&picture(1, 80, 40));
    let mask: DynamicImage =
        ImageBuffer::from_fn(80, 40, |x, y| Luma([(x / 20 + 4 * (y / 20)) as u8])).into();
    let other: DynamicImage = ImageBuffer::from_pixel(8, 8, Luma([1u8])).into();
    let mut writer = shard_writer(&world.path("in"), "in");
    writer.add("fits", &[("png", &image), ("seg.png", &encode_png(&mask))]).unwrap();
    writer.add("other", &[("png", &image), ("seg.png", &encode_png(&other))]).unwrap();
    writer.finish().unwrap();
    let out = world.text("out");
    let args = ["shards", "resize", &world.text("in"), "--short-side", "20", "--out", &out];
    let stderr = ok(&world.ocelli(&args));
    assert!(stderr.contains("1 image with masks left as stored"), "{stderr}");
    let shard = Shard::open(&world.path("out/in-000000.tar")).unwrap();
    let resized = image::load_from_memory(&shard.member(0, &["jpg"]).unwrap().unwrap()).unwrap();
    let mask =
        image::load_from_memory(&shard.member(0, &["seg.png"]).unwrap().unwrap()).unwrap().into_luma8();
    assert_eq!((resized.width(), resized.height()), (40, 20));
    assert_eq!(mask.dimensions(), (40, 20));
    for (x, y, class) in mask.enumerate_pixels() {
        assert_eq!(u32::from(class.0[0]), x / 10 + 4 * (y / 10), "{x} {y}");
    }
    assert_eq!(shard.member(1, &["png"]).unwrap().unwrap(), image);
}

/// The class in the row of an image's features is the first of those that a list states, and none
/// for an empty list.
#[test]
fn features_of_lists_have_the_first_class() {
    let world = World::new(8);
    for number in 0..3 {
        write_picture(&world, &format!("i{number}.png"), number);
    }
    let lines = [
        r#"{"path": "i0.png", "labels": ["red", "green"]}"#,
        r#"{"path": "i1.png", "labels": []}"#,
        r#"{"path": "i2.png", "labels": "green"}"#,
    ];
    fs::write(world.path("list.jsonl"), lines.join("\n")).unwrap();
    ok(&world.pretrain("run", &["--set", "optim.length={steps=1}"]));
    let run = world.text("run");
    let list = world.text("list.jsonl");
    let out = world.text("features.npy");
    ok(&world.ocelli(&["embed", "--checkpoint", &run, "--images", &list, "--out", &out]));
    let rows = fs::read_to_string(world.path("features.npy.rows.jsonl")).unwrap();
    let mut classes = Vec::new();
    for row in rows.lines() {
        let row: serde_json::Value = serde_json::from_str(row).unwrap();
        classes.push(row["class"].as_str().map(str::to_string));
    }
    assert_eq!(classes, [Some("red".to_string()), None, Some("green".to_string())]);
}

/// Folders that are parts of a set are no classes, which is told.
#[test]
fn parts_of_a_set_are_told_from_classes() {
    let world = World::new(2);
    for (number, name) in (0..).zip(["train/cat/a", "train/dog/b", "val/cat/c", "val/dog/d"]) {
        write_picture(&world, &format!("photos/{name}.png"), number);
    }
    let out = world.text("packed");
    let stderr = ok(&world.ocelli(&["shards", "pack", &world.text("photos"), "--out", &out]));
    let name = "classes::parts_of_a_set_are_told_from_classes";
    check_message(name, &lines_with(&stderr, "usually parts"));
}
