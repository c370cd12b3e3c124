//! Files of features: contents of the rows, and messages about bad input.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use parquet::file::reader::{FileReader, SerializedFileReader};
use serde_json::Value;

use crate::messages::check_message;
use crate::support::{World, fails, json_of, ok};

/// Reads the lines of a JSONL file.
fn read_jsonl(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Reads the values and the shape of a NumPy file.
fn read_npy(path: &Path) -> (Vec<f32>, Vec<u64>) {
    let file = npyz::NpyFile::new(fs::File::open(path).map(std::io::BufReader::new).unwrap()).unwrap();
    let shape = file.shape().to_vec();
    (file.into_vec().unwrap(), shape)
}

/// Reads the features of a Parquet file, and its other columns as JSON rows.
fn read_parquet(path: &Path) -> (Vec<f32>, Vec<Value>) {
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

/// Embeds the shard with the run `run` and a feature cache.
fn embed_with_cache(world: &World, out: &str, more: &[&str]) -> Output {
    let run = world.text("run");
    let shard = world.text("data/train-000000.tar");
    let out = world.text(out);
    let cache = world.text("cache");
    let args = ["embed", "--checkpoint", &run, "--shards", &shard, "--json", "--out", &out];
    let env = [("OCELLI_CACHE", cache.as_str()), ("OCELLI_FEATURES_GB", "1")];
    world.ocelli_with(&[&args[..], more].concat(), &env)
}

#[test]
fn rows_name_their_images_and_the_transform() {
    let world = World::new(20);
    ok(&world.pretrain("run", &[]));
    let run = world.text("run");
    let shard = world.text("data/train-000000.tar");
    let first = embed_with_cache(&world, "x.npy", &[]);
    ok(&first);
    let width = json_of(&first)["width"].as_u64().unwrap();
    let (rows, shape) = read_npy(&world.path("x.npy"));
    assert_eq!(shape, [20, width]);
    let images = read_jsonl(&world.path("x.npy.rows.jsonl"));
    assert_eq!((images.len(), &images[3]["key"]), (20, &"00000003".into()));
    assert!(images.iter().all(|row| row["label"].is_u64() && row["class"].is_string()), "{images:?}");
    let about: Value = serde_json::from_slice(&fs::read(world.path("x.npy.about.json")).unwrap()).unwrap();
    assert_eq!(about["network"], "teacher");
    assert!(about["transform_in_words"].as_str().unwrap().contains("CenterCrop"), "{about}");

    // The second time nothing is computed; all formats have the same values.
    assert!(fails(&embed_with_cache(&world, "x.npy", &[]), 2).contains("--overwrite"));
    let again = embed_with_cache(&world, "x.npy", &["--overwrite"]);
    ok(&again);
    assert_eq!((&json_of(&first)["cached"], &json_of(&again)["cached"]), (&false.into(), &true.into()));
    assert_eq!(read_npy(&world.path("x.npy")).0, rows);
    ok(&embed_with_cache(&world, "x.safetensors", &[]));
    let bytes = fs::read(world.path("x.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let features: &[u8] = tensors.tensor("features").unwrap().data();
    assert_eq!(features, rows.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
    ok(&embed_with_cache(&world, "x.parquet", &[]));
    assert_eq!(read_parquet(&world.path("x.parquet")), (rows.clone(), images.clone()));

    // Levels are concatenated, the last one at the end, and followed by the average; `--patches`
    // writes all patches.
    ok(&embed_with_cache(&world, "levels.npy", &["--levels", "2", "--average"]));
    let (levels, shape) = read_npy(&world.path("levels.npy"));
    assert_eq!(shape, [20, 3 * width]);
    let w = width as usize;
    for i in 0..20 {
        assert_eq!(levels[i * 3 * w + w..i * 3 * w + 2 * w], rows[i * w..(i + 1) * w]);
    }
    ok(&embed_with_cache(&world, "patches.npy", &["--patches"]));
    let (patches, shape) = read_npy(&world.path("patches.npy"));
    let n = shape[1] as usize / w;
    for channel in 0..w {
        let mean: f32 = (0..n).map(|cell| patches[cell * w + channel]).sum::<f32>() / n as f32;
        assert!((mean - levels[2 * w + channel]).abs() < 1e-5, "the average is that of the patches");
    }

    // Each rank writes a part, and the parts together have all rows.
    for rank in ["0", "1", "2"] {
        let out = world.text("part.npy");
        let args = ["embed", "--checkpoint", &run, "--shards", &shard, "--out", &out];
        ok(&world.ocelli_with(&args, &[("RANK", rank), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "0")]));
    }
    let mut parts = Vec::new();
    for rank in 0..3 {
        let (part, _) = read_npy(&world.path(&format!("part-{rank:05}-of-00003.npy")));
        parts.extend(part);
    }
    assert_eq!(parts.len(), rows.len());
    assert!(parts.iter().zip(&rows).all(|(a, b)| (a - b).abs() < 1e-5));
}

/// A folder is read like shards: names are paths relative to it, classes are its sub-folders, and
/// other files have no row.
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
    let mut images = walk(&world.path("files"));
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
    let stderr = ok(&output);
    assert!(stderr.contains("1 .heic"), "{stderr}");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(stdout.contains("1 unusable image without a row: dog/broken.jpg"), "{stdout}");
    assert_eq!(json_of(&output)["left_out"], serde_json::json!(["dog/broken.jpg"]));
    let rows = read_jsonl(&world.path("x.npy.rows.jsonl"));
    assert_eq!(rows.len(), 6);
    for (name, class) in [("cat/0.jpg", "cat"), ("dog/1.jpg", "dog")] {
        let row = rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("{rows:?}"));
        assert_eq!(row["class"], class);
    }
}

/// Returns the JPEG files in a folder and its sub-folders.
pub(crate) fn walk(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            files.extend(walk(&path));
        } else if path.extension().is_some_and(|extension| extension == "jpg") {
            files.push(path);
        }
    }
    files
}

#[test]
fn bad_input_is_reported() {
    let world = World::new(6);
    ok(&world.pretrain("run", &[]));
    let run = world.text("run");
    let shard = world.text("data/train-000000.tar");
    let out = world.text("x.npy");
    let text = world.text("x.txt");
    let embed = ["embed", "--checkpoint", &run, "--shards", &shard];
    for (name, more) in [
        ("format", &["--out", &text][..]),
        ("image_px", &["--out", &out, "--image-px", "33"]),
        ("resize_px", &["--out", &out, "--resize-px", "4"]),
    ] {
        let output = world.ocelli(&[&embed[..], more].concat());
        check_message(&format!("embed::bad_input_is_reported.{name}"), &fails(&output, 2));
    }
    fs::create_dir_all(world.path("empty")).unwrap();
    let args = ["embed", "--checkpoint", &run, "--images", &world.text("empty"), "--out", &out];
    check_message("embed::bad_input_is_reported.empty", &fails(&world.ocelli(&args), 2));
    assert!(!world.path("x.npy").exists());
}
