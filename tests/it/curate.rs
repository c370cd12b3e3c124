//! `ocelli curate`: the images that are kept, with their names and members, repeated calls, and
//! errors.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Output;

use pipeline::SampleId;
use serde_json::Value;

use crate::messages::check_message;
use crate::support::{World, fails, json_of, ok, open};

/// Creates a world with features `x.npy`: image `i` lies at angle `degrees[i]` on a circle.
fn world(degrees: &[f32]) -> World {
    let world = World::new(degrees.len() as u64);
    let rows: Vec<f32> = degrees.iter().flat_map(|angle| on_circle(*angle)).collect();
    write_features(&world, "x", &rows, 2, degrees.len());
    world
}

/// Returns the point of the unit circle at an angle in degrees.
fn on_circle(degrees: f32) -> [f32; 2] {
    [degrees.to_radians().cos(), degrees.to_radians().sin()]
}

/// Returns a NumPy file of `rows`, `[n, width]`.
pub(crate) fn npy(rows: &[f32], width: usize) -> Vec<u8> {
    let n = rows.len() / width;
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({n}, {width}), }}");
    let header = format!("{header:<117}\n");
    let bytes: Vec<u8> = rows.iter().flat_map(|value| value.to_le_bytes()).collect();
    let len = (header.len() as u16).to_le_bytes();
    [b"\x93NUMPY\x01\x00", &len[..], header.as_bytes(), &bytes].concat()
}

/// Number of columns of rows whose sums of products depend on the blocks in which they are
/// computed, by rounding. Those of fewer than 513 columns do not.
pub(crate) const WIDTH: usize = 600;

/// Returns a row of [`WIDTH`] columns; the difference of `degrees` is the angle between two rows.
pub(crate) fn wide_row(degrees: f32) -> [f32; WIDTH] {
    let (sin, cos) = degrees.to_radians().sin_cos();
    std::array::from_fn(|column| if column % 2 == 0 { cos } else { sin })
}

/// Writes features of the world's first `n` images under `name`.
fn write_features(world: &World, name: &str, rows: &[f32], width: usize, n: usize) {
    assert_eq!(rows.len(), n * width);
    fs::write(world.path(&format!("{name}.npy")), npy(rows, width)).unwrap();
    let dataset = world.dataset();
    let mut lines = String::new();
    for id in (0..n as u64).map(SampleId) {
        let (shard, key, _) = dataset.describe(id);
        let label = dataset.label(id).unwrap();
        let class = label.map(|label| format!("c{label}"));
        let row = serde_json::json!({ "shard": shard, "key": key, "label": label, "class": class });
        lines += &format!("{row}\n");
    }
    fs::write(world.path(&format!("{name}.npy.rows.jsonl")), lines).unwrap();
}

fn curate(world: &World, verb: &str, out: &str, more: &[&str]) -> Output {
    let features = world.text("x.npy");
    let out = world.text(out);
    world.ocelli(&[&["curate", verb, "--features", &features, "--out", &out], more].concat())
}

/// Returns the standard output of a call that must have succeeded.
fn stdout(output: &Output) -> String {
    ok(output);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns the rows of the list in the folder `out`.
fn list(world: &World, out: &str) -> Vec<Value> {
    let text = fs::read_to_string(world.path(out).join("list.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the numbers of the images that the list in the folder `out` keeps.
fn kept(world: &World, out: &str) -> Vec<usize> {
    let rows = list(world, out);
    (0..rows.len()).filter(|row| rows[*row]["keep"] == true).collect()
}

/// Images in files of their own are queries, beside folders.
#[test]
fn single_images_are_queries() {
    let world = World::new(12);
    ok(&world.pretrain("run", &["--set", "optim.length={steps=1}"]));
    world.extract("files");
    let mut files = crate::embed::walk(&world.path("files"));
    files.sort();
    assert_eq!(files.len(), 12);
    let folder = world.path("queries");
    fs::create_dir(&folder).unwrap();
    fs::copy(&files[9], folder.join("query.jpg")).unwrap();
    let run = world.text("run");
    let shards = world.text("data/train-000000.tar");
    let out = world.text("found");
    let mut args = vec!["curate", "retrieve", "--checkpoint", &run, "--shards", &shards, "--count", "1"];
    let queries = [files[3].display().to_string(), world.text("queries"), files[7].display().to_string()];
    args.push("--like");
    args.extend(queries.iter().map(String::as_str));
    args.extend(["--out", &out]);
    ok(&world.ocelli(&args));
    assert_eq!(kept(&world, "found"), [3, 7, 9]);
}

/// Near-duplicates are found, kept images are packed with all of their members, and a second call
/// changes nothing.
#[test]
fn near_duplicates_leave_one_image_each() {
    let world = world(&[0.0, 1.0, 90.0, 180.0, 181.0, 182.0, 270.0, 0.5]);
    let shards = world.text("data/train-000000.tar");
    let args = ["--threshold", "0.999", "--shards", &shards, "--pack", "--json"];
    let first = curate(&world, "near-duplicates", "unique", &args);
    let text = stdout(&first);
    assert!(text.contains("4 near-duplicates of 2 images"), "{text}");
    assert_eq!(json_of(&first)["kept"], 4);
    let rows = list(&world, "unique");
    assert_eq!(rows.len(), 8);
    // One image is kept of each group, the one that the others name.
    let mut groups: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (i, row) in rows.iter().enumerate() {
        groups.entry(row["group"].as_u64().unwrap()).or_default().push(i);
    }
    let groups: BTreeSet<Vec<usize>> = groups.into_values().collect();
    assert_eq!(groups, BTreeSet::from([vec![0, 1, 7], vec![2], vec![3, 4, 5], vec![6]]));
    let kept = kept(&world, "unique");
    assert_eq!(kept.len(), 4);
    assert!(rows.iter().all(|row| row["pixels"].as_u64().unwrap() > 0 && row["class"].is_string()));
    // Of equally large images the sharpest is kept.
    let sharpness = [0usize, 1, 7].map(|row| (row, rows[row]["sharpness"].as_f64().unwrap()));
    let (sharpest, _) = sharpness.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    assert!(kept.contains(&sharpest), "{kept:?}");
    assert!(world.path("unique/pairs.png").exists());
    // Names, labels and bytes of kept images are those of the source.
    let from = world.dataset();
    let to = open(&world, &world.text("unique")).unwrap();
    for (new, old) in kept.iter().enumerate() {
        let new = SampleId(new as u64);
        let old = SampleId(*old as u64);
        assert_eq!(to.describe(new).1, from.describe(old).1);
        assert_eq!(to.label(new).unwrap(), from.label(old).unwrap());
        assert_eq!(to.read(new).unwrap().image, from.read(old).unwrap().image);
    }
    let before = fs::read(world.path("unique/list.jsonl")).unwrap();
    ok(&curate(&world, "near-duplicates", "unique", &args));
    assert_eq!(fs::read(world.path("unique/list.jsonl")).unwrap(), before);
    let other = curate(&world, "near-duplicates", "unique", &["--threshold", "0.5"]);
    check_message("curate::near_duplicates_leave_one_image_each", &fails(&other, 2));
    // Comparison within cells finds the same groups if copies share a cell.
    ok(&curate(&world, "near-duplicates", "cells", &["--threshold", "0.999", "--cells", "3"]));
    let cells = list(&world, "cells");
    let groups: BTreeSet<u64> = cells.iter().map(|row| row["group"].as_u64().unwrap()).collect();
    assert_eq!(groups.len(), 4);
}

/// Balancing a cluster of 40 images and one of 4 takes half of the images from each, as far as
/// there are enough; likewise for classes.
#[test]
fn balance_chooses_evenly_from_clusters_and_classes() {
    let degrees: Vec<f32> =
        (0..44).map(|i| if i < 40 { i as f32 * 0.1 } else { 180.0 + i as f32 * 0.1 }).collect();
    let world = world(&degrees);
    let args = ["--clusters", "2", "--count", "8", "--resample-rows", "1"];
    let text = stdout(&curate(&world, "balance", "even", &args));
    assert!(text.contains("level 1: 2 clusters of 4 to 40 images"), "{text}");
    let chosen = kept(&world, "even");
    assert_eq!((chosen.len(), chosen.iter().filter(|row| **row >= 40).count()), (8, 4));
    assert!(world.path("even/clusters.safetensors").exists());
    // The clusters of another folder, and weights instead of a choice.
    let even = world.text("even");
    ok(&curate(&world, "balance", "weights", &["--clusters-of", &even, "--count", "8", "--weights"]));
    let weights: Vec<f64> =
        list(&world, "weights").iter().map(|row| row["weight"].as_f64().unwrap()).collect();
    assert!(weights[..40].iter().all(|w| (w - 0.1).abs() < 1e-9), "{weights:?}");
    assert!(weights[40..].iter().all(|w| (w - 1.0).abs() < 1e-9), "{weights:?}");
    assert_eq!(kept(&world, "weights").len(), 44);
    // By class, as the features name it.
    ok(&curate(&world, "balance", "classes", &["--by", "class", "--count", "10"]));
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for row in list(&world, "classes").iter().filter(|row| row["keep"] == true) {
        *counts.entry(row["class"].as_str().unwrap().to_string()).or_default() += 1;
    }
    let least = counts.values().min().unwrap();
    let most = counts.values().max().unwrap();
    assert!(most - least <= 1, "{counts:?}");
    // By a column of a table.
    fs::write(world.path("kinds.csv"), "key,kind\n00000000,rare\n00000041,rare\n").unwrap();
    let kinds = world.text("kinds.csv");
    ok(&curate(&world, "balance", "kinds", &["--by", "kind", "--list", &kinds, "--count", "4"]));
    let chosen = kept(&world, "kinds");
    assert!(chosen.contains(&0) && chosen.contains(&41) && chosen.len() == 4, "{chosen:?}");
}

/// If an image is compared with all better ones, a chain of similar images is one group: that of
/// the image of it that is kept.
#[test]
fn chains_of_near_duplicates_are_one_group() {
    let world = world(&[0.0, 10.0, 20.0, 30.0, 120.0]);
    let all = ["--threshold", "0.97", "--compare-with", "all"];
    let text = stdout(&curate(&world, "near-duplicates", "chain", &all));
    assert!(text.contains("3 near-duplicates of 1 image"), "{text}");
    let rows = list(&world, "chain");
    let kept = kept(&world, "chain");
    assert_eq!((kept.len(), kept[1]), (2, 4));
    for row in &rows[..4] {
        assert_eq!(row["group"], kept[0] as u64, "{row}");
    }
    assert_eq!(rows[4]["group"], 4);
}

#[test]
fn retrieval_outliers_and_removal_keep_the_expected_images() {
    let world = world(&[0.0, 10.0, 20.0, 30.0, 100.0, 110.0, 120.0, 250.0]);
    write_features(&world, "like", &[on_circle(11.0), on_circle(118.0)].concat(), 2, 2);
    let like = world.text("like.npy");
    ok(&curate(&world, "retrieve", "found", &["--like-features", &like, "--count", "2"]));
    assert_eq!(kept(&world, "found"), [1, 2, 5, 6]);
    assert_eq!(list(&world, "found")[6]["query"], "00000001");
    let without = ["--like-features", &like, "--count", "2", "--clusters", "3"];
    let stderr = fails(&curate(&world, "retrieve", "without", &without), 2);
    assert!(stderr.contains("add --by cluster"), "{stderr}");
    let by_cluster = ["--like-features", &like, "--count", "9", "--by", "cluster", "--clusters", "3"];
    ok(&curate(&world, "retrieve", "clusters", &[&by_cluster[..], &["--resample-rows", "1"]].concat()));
    assert_eq!(kept(&world, "clusters"), [0, 1, 2, 3, 4, 5, 6]);

    ok(&curate(&world, "outliers", "outliers", &["--neighbors", "2", "--share", "0.13"]));
    assert_eq!(kept(&world, "outliers"), [0, 1, 2, 3, 4, 5, 6]);

    let text =
        stdout(&curate(&world, "remove", "clean", &["--like-features", &like, "--threshold", "0.999"]));
    assert!(text.contains("2 images with a match among 2 others"), "{text}");
    assert_eq!(kept(&world, "clean"), [0, 2, 3, 4, 5, 7]);
}

/// Features of a run's own network, with pictures and a page.
#[test]
fn a_run_curates_its_own_images() {
    let world = World::new(24);
    ok(&world.pretrain("run", &[]));
    let run = world.text("run");
    let shards = world.text("data/train-000000.tar");
    let out = world.text("map");
    let input = ["--checkpoint", run.as_str(), "--shards", shards.as_str()];
    let near = world.text("near");
    let args = [&["curate", "near-duplicates"], &input[..], &["--out", &near, "--threshold", "0.9"]].concat();
    ok(&world.ocelli(&args));
    let kept = world.text("near/keep.txt");
    let args =
        [&["curate", "map"], &input[..], &["--out", &out, "--clusters", "5,2", "--kept", &kept]].concat();
    assert!(stdout(&world.ocelli(&args)).contains("2 clusters of level 2"));
    let page = fs::read_to_string(Path::new(&out).join("map.html")).unwrap();
    assert!(page.contains("\"n_clusters\":[5,2]") && page.contains("data:image/"), "the page has its data");
    if let Some(browser) = crate::browser::browser() {
        crate::browser::check_page(browser, &format!("{out}/map.html"), 10, 0);
    }
    // Computed features and those of a file give the same rows.
    let file = world.text("x.npy");
    ok(&world.ocelli(&["embed", "--checkpoint", &run, "--shards", &shards, "--out", &file]));
    ok(&curate(&world, "near-duplicates", "of-file", &["--threshold", "0.9", "--shards", &shards]));
    assert_eq!(list(&world, "of-file"), list(&world, "near"));
}

/// Chooses four images evenly.
fn balance(world: &World, out: &str, more: &[&str]) -> Output {
    curate(world, "balance", out, &[&["--count", "4"], more].concat())
}

/// Files that were written for other features, another distance or another list are refused, and
/// inputs are not replaced.
#[test]
fn folders_belong_to_one_input() {
    let world = world(&[0.0, 1.0, 90.0, 91.0, 180.0, 181.0, 270.0, 271.0]);
    let clusters = ["--clusters", "4", "--resample-rows", "1"];
    ok(&balance(&world, "a", &clusters));
    let a = world.text("a");
    let text = fails(&balance(&world, "b", &["--clusters-of", &a, "--metric", "euclidean"]), 2);
    assert!(text.contains("cosine"), "{text}");
    let list = world.text("kinds.csv");
    let by_list = ["--by", "kind", "--list", &list];
    fs::write(&list, "key,kind\n00000000,x\n").unwrap();
    ok(&balance(&world, "c", &by_list));
    fs::write(&list, "key,kind\n00000001,x\n").unwrap();
    let output = balance(&world, "c", &by_list);
    check_message("curate::folders_belong_to_one_input.other_list", &fails(&output, 2));
    ok(&balance(&world, "c", &[&by_list[..], &["--overwrite"]].concat()));
    // Other features under the same name.
    write_features(&world, "x", &[1.0, 0.5].repeat(8), 2, 8);
    let output = balance(&world, "a", &clusters);
    check_message("curate::folders_belong_to_one_input.other_features", &fails(&output, 2));
    let output = balance(&world, "d", &["--clusters-of", &a]);
    check_message("curate::folders_belong_to_one_input.other_clusters", &fails(&output, 2));
    // The folder of the shards that are read.
    let shards = world.text("data/train-000000.tar");
    let data = world.text("data");
    let features = world.text("x.npy");
    fs::write(world.path("data/job.json"), "{}").unwrap();
    let args =
        ["curate", "outliers", "--features", &features, "--shards", &shards, "--out", &data, "--overwrite"];
    check_message("curate::folders_belong_to_one_input.input", &fails(&world.ocelli(&args), 2));
    assert!(world.shard().exists());
}

#[test]
fn errors_are_one_line() {
    let world = world(&[0.0, 10.0, 20.0, 30.0]);
    let output = curate(&world, "near-duplicates", "a", &["--threshold", "1.5"]);
    check_message("curate::errors_are_one_line.threshold", &fails(&output, 2));
    let output = curate(&world, "balance", "b", &["--clusters", "9", "--count", "2"]);
    check_message("curate::errors_are_one_line.clusters", &fails(&output, 2));
    let output = curate(&world, "balance", "c", &["--count", "5"]);
    check_message("curate::errors_are_one_line.count", &fails(&output, 2));
    let output = curate(&world, "balance", "d", &["--clusters", "2,3", "--count", "2"]);
    check_message("curate::errors_are_one_line.level", &fails(&output, 2));
    // A list whose rows do not match the features.
    let rows = world.path("x.npy.rows.jsonl");
    let lines = fs::read_to_string(&rows).unwrap();
    fs::write(&rows, &lines[..lines.len() / 2]).unwrap();
    assert!(fails(&curate(&world, "near-duplicates", "e", &[]), 3).contains("x.npy"));
    fs::write(&rows, lines.replace("00000003", "elsewhere")).unwrap();
    let shards = world.text("data/train-000000.tar");
    let output = curate(&world, "near-duplicates", "f", &["--shards", &shards]);
    check_message("curate::errors_are_one_line.other_images", &fails(&output, 2));
    // Features of another width.
    write_features(&world, "wide", &[1.0; 6], 3, 2);
    let wide = world.text("wide.npy");
    let output = curate(&world, "remove", "g", &["--like-features", &wide]);
    check_message("curate::errors_are_one_line.width", &fails(&output, 2));
    // A file of the user is not overwritten.
    fs::create_dir(world.path("mine")).unwrap();
    fs::write(world.path("mine/list.jsonl"), "mine").unwrap();
    let output = curate(&world, "near-duplicates", "mine", &[]);
    check_message("curate::errors_are_one_line.user_file", &fails(&output, 2));
    assert_eq!(fs::read_to_string(world.path("mine/list.jsonl")).unwrap(), "mine");
    // A row that is not finite.
    write_features(&world, "x", &[1.0, 0.0, f32::NAN, 0.0, 0.0, 1.0, 1.0, 1.0], 2, 4);
    for verb in ["near-duplicates", "outliers"] {
        let output = curate(&world, verb, "h", &[]);
        check_message(&format!("curate::errors_are_one_line.{verb}"), &fails(&output, 3));
        fs::remove_dir_all(world.path("h")).ok();
    }
}

/// Verbs whose work is divided among ranks, with their settings.
#[cfg(feature = "mpi")]
const OVER_RANKS: [(&str, &[&str]); 7] = [
    ("balance", &["--clusters", "60,6", "--count", "300", "--resample-times", "2", "--splits", "2,1"]),
    ("near-duplicates", &["--threshold", "0.99999", "--cells", "1"]),
    ("near-duplicates", &["--threshold", "0.99999", "--cells", "7"]),
    ("outliers", &["--share", "0.05"]),
    ("retrieve", &["--like-features", "like.npy", "--count", "3"]),
    ("retrieve", &["--like-features", "like.npy", "--count", "3", "--by", "cluster", "--clusters", "60"]),
    ("remove", &["--like-features", "like.npy", "--threshold", "0.99999"]),
];

/// Processes under mpirun write the same files as one process, byte for byte.
#[cfg(feature = "mpi")]
#[test]
fn processes_under_mpirun_write_the_same_files_as_one() {
    let world = World::new(4);
    let degrees = (0..1500).map(|i| (i * 7919 % 3600) as f32 / 10.0 + (i % 7) as f32 * 0.001);
    let rows: Vec<f32> = degrees.flat_map(wide_row).collect();
    fs::write(world.path("x.npy"), npy(&rows, WIDTH)).unwrap();
    // Queries of several blocks, some of which are equally similar to a row.
    let like: Vec<f32> = rows.chunks(WIDTH).rev().flatten().chain(&rows[..WIDTH * 650]).copied().collect();
    fs::write(world.path("like.npy"), npy(&like, WIDTH)).unwrap();
    let like = world.text("like.npy");
    for (number, (verb, args)) in OVER_RANKS.into_iter().enumerate() {
        let alone = format!("alone{number}");
        let ranks = format!("ranks{number}");
        let args: Vec<&str> = args.iter().map(|arg| if *arg == "like.npy" { &like } else { *arg }).collect();
        ok(&curate(&world, verb, &alone, &args));
        let features = world.text("x.npy");
        let out = world.text(&ranks);
        let args = [&["curate", verb, "--features", &features, "--out", &out], &args[..]].concat();
        let args: Vec<String> = args.iter().map(ToString::to_string).collect();
        let output = crate::mpirun::mpirun(3, world.folder.path(), &args).output().unwrap();
        let stderr = fs::read_to_string(world.path("stderr-0")).unwrap_or_default();
        assert!(output.status.success(), "{verb}: {stderr}");
        for file in ["list.jsonl", "keep.txt", "clusters.safetensors"] {
            let alone = world.path(&alone).join(file);
            let ranks = world.path(&ranks).join(file);
            assert_eq!(alone.exists(), ranks.exists());
            assert!(
                !alone.exists() || fs::read(alone).unwrap() == fs::read(ranks).unwrap(),
                "{verb}: {file} differs"
            );
        }
    }
}
