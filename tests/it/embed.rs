//! Features as files: contents of the rows, and messages if there can be none.

use std::fs;

use parquet::file::reader::{FileReader, SerializedFileReader};
use serde_json::Value;

use crate::support::{World, fails, json_of, ok};

fn lines(path: &std::path::Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Reads the numbers of a NumPy file and its shape.
fn npy(path: &std::path::Path) -> (Vec<f32>, Vec<u64>) {
    let file = npyz::NpyFile::new(fs::File::open(path).map(std::io::BufReader::new).unwrap()).unwrap();
    let shape = file.shape().to_vec();
    (file.into_vec().unwrap(), shape)
}

/// Reads the features of a Parquet file, and its other columns as JSON rows.
fn read_parquet(path: &std::path::Path) -> (Vec<f32>, Vec<Value>) {
    let reader = SerializedFileReader::new(fs::File::open(path).unwrap()).unwrap();
    let mut features = Vec::new();
    let mut rows = Vec::new();
    for row in reader.get_row_iter(None).unwrap() {
        let mut row = row.unwrap().to_json_value();
        let values = row.as_object_mut().unwrap().remove("features").unwrap();
        features.extend(values.as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32));
        rows.push(row);
    }
    (features, rows)
}

#[test]
fn rows_name_their_images_and_say_how_they_were_made() {
    let world = World::new(20);
    ok(&world.pretrain("run", &[]));
    let run = world.text("run");
    let shard = world.text("data/train-000000.tar");
    let embed = |out: &str, more: &[&str]| {
        let out = world.text(out);
        let args = ["embed", "--checkpoint", &run, "--shards", &shard, "--json", "--out", &out];
        let cache = world.text("cache");
        let env = [("OCELLI_CACHE", cache.as_str()), ("OCELLI_FEATURES_GB", "1")];
        world.ocelli_with(&[&args[..], more].concat(), &env)
    };
    let first = embed("x.npy", &[]);
    ok(&first);
    let width = json_of(&first)["width"].as_u64().unwrap();
    let (rows, shape) = npy(&world.path("x.npy"));
    assert_eq!(shape, [20, width]);
    let images = lines(&world.path("x.npy.rows.jsonl"));
    assert_eq!((images.len(), &images[3]["key"]), (20, &"00000003".into()));
    assert!(images.iter().all(|row| row["label"].is_u64() && row["class"].is_string()), "{images:?}");
    let about: Value = serde_json::from_slice(&fs::read(world.path("x.npy.about.json")).unwrap()).unwrap();
    assert_eq!(about["network"], "teacher");
    assert!(about["transform_in_words"].as_str().unwrap().contains("CenterCrop"), "{about}");

    // The second time nothing is computed; the same numbers come as any format.
    assert!(fails(&embed("x.npy", &[]), 2).contains("--overwrite"));
    let again = embed("x.npy", &["--overwrite"]);
    ok(&again);
    assert_eq!((&json_of(&first)["cached"], &json_of(&again)["cached"]), (&false.into(), &true.into()));
    assert_eq!(npy(&world.path("x.npy")).0, rows);
    ok(&embed("x.safetensors", &[]));
    let bytes = fs::read(world.path("x.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let features: &[u8] = tensors.tensor("features").unwrap().data();
    assert_eq!(features, rows.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
    ok(&embed("x.parquet", &[]));
    assert_eq!(read_parquet(&world.path("x.parquet")), (rows.clone(), images.clone()));

    // Levels are concatenated, the last one last, and followed by the average; patches are all of
    // them.
    ok(&embed("levels.npy", &["--levels", "2", "--average"]));
    let (levels, shape) = npy(&world.path("levels.npy"));
    assert_eq!(shape, [20, 3 * width]);
    let w = width as usize;
    for i in 0..20 {
        assert_eq!(levels[i * 3 * w + w..i * 3 * w + 2 * w], rows[i * w..(i + 1) * w]);
    }
    ok(&embed("patches.npy", &["--patches"]));
    let (patches, shape) = npy(&world.path("patches.npy"));
    let n = shape[1] as usize / w;
    for channel in 0..w {
        let mean: f32 = (0..n).map(|cell| patches[cell * w + channel]).sum::<f32>() / n as f32;
        assert!((mean - levels[2 * w + channel]).abs() < 1e-5, "the average is that of the patches");
    }

    // Each rank writes a part, and together these have all rows.
    for rank in ["0", "1", "2"] {
        let out = world.text("part.npy");
        let args = ["embed", "--checkpoint", &run, "--shards", &shard, "--out", &out];
        ok(&world.ocelli_with(&args, &[("RANK", rank), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "0")]));
    }
    let parts = (0..3).flat_map(|rank| npy(&world.path(&format!("part-{rank:05}-of-00003.npy"))).0);
    let parts: Vec<f32> = parts.collect();
    assert_eq!(parts.len(), rows.len());
    assert!(parts.iter().zip(&rows).all(|(a, b)| (a - b).abs() < 1e-5));
}

/// A folder works like shards: names are paths below it, classes its sub-folders, and other files
/// have no row.
#[test]
fn a_folder_is_embedded_without_being_packed() {
    let world = World::new(6);
    ok(&world.pretrain("run", &[]));
    let shard = world.text("data/train-000000.tar");
    ok(&world.ocelli(&["shards", "extract", &shard, "--out", &world.text("files")]));
    let folder = world.path("photos");
    for class in ["cat", "dog"] {
        fs::create_dir_all(folder.join(class)).unwrap();
    }
    let mut images: Vec<_> = walk(&world.path("files"));
    images.sort();
    for (i, image) in images.iter().enumerate() {
        let class = ["cat", "dog"][i % 2];
        fs::copy(image, folder.join(class).join(format!("{i}.jpg"))).unwrap();
    }
    fs::write(folder.join("dog/broken.jpg"), b"no image").unwrap();
    fs::write(folder.join("dog/phone.heic"), b"not read").unwrap();
    let run = world.text("run");
    let out = world.text("x.npy");
    let args = ["embed", "--checkpoint", &run, "--images", &world.text("photos"), "--out", &out, "--json"];
    let output = world.ocelli(&args);
    let skipped = ok(&output);
    assert!(skipped.contains("1 .heic"), "{skipped}");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("1 images cannot be used and have no row: dog/broken.jpg"), "{said}");
    assert_eq!(json_of(&output)["left_out"], serde_json::json!(["dog/broken.jpg"]));
    let rows = lines(&world.path("x.npy.rows.jsonl"));
    assert_eq!(rows.len(), 6);
    let of = |name: &str| rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("{rows:?}"));
    assert_eq!((&of("cat/0.jpg")["class"], &of("dog/1.jpg")["class"]), (&"cat".into(), &"dog".into()));
}

pub(crate) fn walk(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        match path.is_dir() {
            true => found.extend(walk(&path)),
            false if path.extension().is_some_and(|extension| extension == "jpg") => found.push(path),
            false => {}
        }
    }
    found
}

#[test]
fn bad_input_is_named() {
    let world = World::new(6);
    ok(&world.pretrain("run", &[]));
    let run = world.text("run");
    let shard = world.text("data/train-000000.tar");
    let embed = |more: &[&str]| {
        let args = ["embed", "--checkpoint", &run, "--shards", &shard];
        world.ocelli(&[&args[..], more].concat())
    };
    let out = world.text("x.npy");
    assert!(fails(&embed(&["--out", &world.text("x.txt")]), 2).contains(".npy, .parquet or .safetensors"));
    assert!(fails(&embed(&["--out", &out, "--image-px", "33"]), 2).contains("33 px is not a multiple"));
    assert!(
        fails(&embed(&["--out", &out, "--resize-px", "4"]), 2).contains("is larger than the resized image")
    );
    fs::create_dir_all(world.path("empty")).unwrap();
    let args = ["embed", "--checkpoint", &run, "--images", &world.text("empty"), "--out", &out];
    assert!(fails(&world.ocelli(&args), 2).contains("holds no image"));
    assert!(!world.path("x.npy").exists());
}
