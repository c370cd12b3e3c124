//! `ocelli curate`: what is kept, with which names and members, again after a kill, and refused
//! where it cannot be right.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use pipeline::SampleId;
use serde_json::Value;

use crate::support::{World, fails, json_of, ok, open};

/// A world with features of its own making: image `i` has angle `degrees[i]` on a circle.
fn world(degrees: &[f32]) -> World {
    let world = World::new(degrees.len() as u64);
    let rows: Vec<f32> = degrees.iter().flat_map(|a| [a.to_radians().cos(), a.to_radians().sin()]).collect();
    write_features(&world, "x", &rows, 2, degrees.len());
    world
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

/// Columns of rows whose sums of products are rounded by the blocks in which they are computed.
/// Those of fewer than 513 are not.
pub(crate) const WIDTH: usize = 600;

/// Returns a row of [`WIDTH`] columns at an angle in degrees from others.
pub(crate) fn wide_row(degrees: f32) -> [f32; WIDTH] {
    let (sin, cos) = degrees.to_radians().sin_cos();
    std::array::from_fn(|column| if column % 2 == 0 { cos } else { sin })
}

/// Writes features of the world's first `n` images under `name`.
fn write_features(world: &World, name: &str, rows: &[f32], width: usize, n: usize) {
    assert_eq!(rows.len(), n * width);
    fs::write(world.path(&format!("{name}.npy")), npy(rows, width)).unwrap();
    let dataset = world.dataset();
    let line = |i: usize| {
        let (shard, key, _) = dataset.describe(SampleId(i as u64));
        let label = dataset.label(SampleId(i as u64)).unwrap();
        serde_json::json!({ "shard": shard, "key": key, "label": label, "class": label.map(|l| format!("c{l}")) })
    };
    let lines: Vec<String> = (0..n).map(|i| format!("{}\n", line(i))).collect();
    fs::write(world.path(&format!("{name}.npy.rows.jsonl")), lines.concat()).unwrap();
}

fn curate(world: &World, verb: &str, out: &str, more: &[&str]) -> std::process::Output {
    let features = world.text("x.npy");
    let out = world.text(out);
    world.ocelli(&[&["curate", verb, "--features", &features, "--out", &out], more].concat())
}

/// Returns the standard output of a call that must have succeeded.
fn printed(output: &std::process::Output) -> String {
    ok(output);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn list(world: &World, out: &str) -> Vec<Value> {
    let text = fs::read_to_string(world.path(out).join("list.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn kept(world: &World, out: &str) -> Vec<usize> {
    let rows = list(world, out);
    (0..rows.len()).filter(|row| rows[*row]["keep"] == true).collect()
}

/// Near-duplicates are found, kept images are packed with all of their members, and a second call
/// changes nothing.
#[test]
fn near_duplicates_leave_one_image_each() {
    let world = world(&[0.0, 1.0, 90.0, 180.0, 181.0, 182.0, 270.0, 0.5]);
    let shards = world.text("data/train-000000.tar");
    let args = ["--threshold", "0.999", "--shards", &shards, "--pack", "--json"];
    let first = curate(&world, "near-duplicates", "unique", &args);
    let text = printed(&first);
    assert!(text.contains("4 near-duplicates of 2 images"), "{text}");
    assert_eq!(json_of(&first)["kept"], 4);
    let rows = list(&world, "unique");
    assert_eq!(rows.len(), 8);
    // One image is kept of each group, the one that the others name.
    let groups: BTreeMap<u64, Vec<usize>> =
        rows.iter().enumerate().fold(BTreeMap::new(), |mut groups, (i, row)| {
            groups.entry(row["group"].as_u64().unwrap()).or_insert_with(Vec::new).push(i);
            groups
        });
    let sets: BTreeSet<Vec<usize>> = groups.into_values().collect();
    assert_eq!(sets, BTreeSet::from([vec![0, 1, 7], vec![2], vec![3, 4, 5], vec![6]]));
    let kept = kept(&world, "unique");
    assert_eq!(kept.len(), 4);
    assert!(rows.iter().all(|row| row["pixels"].as_u64().unwrap() > 0 && row["class"].is_string()));
    // Of equally large images the sharpest is kept.
    let sharpness = |row: usize| rows[row]["sharpness"].as_f64().unwrap();
    let best = *[0, 1, 7].iter().max_by(|a, b| sharpness(**a).total_cmp(&sharpness(**b))).unwrap();
    assert!(kept.contains(&best), "{kept:?}");
    assert!(world.path("unique/pairs.png").exists());
    // Names, labels and bytes of what is kept are those of the source.
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
    assert!(fails(&other, 2).contains("holds another job"));
    // Cells find the same where copies share a cell.
    ok(&curate(&world, "near-duplicates", "cells", &["--threshold", "0.999", "--cells", "3"]));
    assert_eq!(kept_groups(&world, "cells"), 4);
}

fn kept_groups(world: &World, out: &str) -> usize {
    let groups: BTreeSet<u64> = list(world, out).iter().map(|row| row["group"].as_u64().unwrap()).collect();
    groups.len()
}

/// 40 images in one place and 4 in another: half of what is chosen comes from each, as far as there
/// are images; classes likewise.
#[test]
fn balance_chooses_evenly_and_weights_say_so() {
    let degrees: Vec<f32> =
        (0..44).map(|i| if i < 40 { i as f32 * 0.1 } else { 180.0 + i as f32 * 0.1 }).collect();
    let world = world(&degrees);
    let args = ["--clusters", "2", "--count", "8", "--resample-rows", "1"];
    let text = printed(&curate(&world, "balance", "even", &args));
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
    fs::write(world.path("own.csv"), "key,kind\n00000000,rare\n00000041,rare\n").unwrap();
    let own = world.text("own.csv");
    ok(&curate(&world, "balance", "own", &["--by", "kind", "--list", &own, "--count", "4"]));
    let chosen = kept(&world, "own");
    assert!(chosen.contains(&0) && chosen.contains(&41) && chosen.len() == 4, "{chosen:?}");
}

#[test]
fn retrieval_outliers_and_evaluation_sets() {
    let world = world(&[0.0, 10.0, 20.0, 30.0, 100.0, 110.0, 120.0, 250.0]);
    let query = |degrees: f32| [degrees.to_radians().cos(), degrees.to_radians().sin()];
    write_features(&world, "like", &[query(11.0), query(118.0)].concat(), 2, 2);
    let like = world.text("like.npy");
    ok(&curate(&world, "retrieve", "found", &["--like-features", &like, "--count", "2"]));
    assert_eq!(kept(&world, "found"), [1, 2, 5, 6]);
    assert_eq!(list(&world, "found")[6]["query"], "00000001");
    let by_cluster = ["--like-features", &like, "--count", "9", "--by", "cluster", "--clusters", "3"];
    ok(&curate(&world, "retrieve", "clusters", &[&by_cluster[..], &["--resample-rows", "1"]].concat()));
    assert_eq!(kept(&world, "clusters"), [0, 1, 2, 3, 4, 5, 6]);

    ok(&curate(&world, "outliers", "outliers", &["--neighbors", "2", "--share", "0.13"]));
    assert_eq!(kept(&world, "outliers"), [0, 1, 2, 3, 4, 5, 6]);

    let text =
        printed(&curate(&world, "remove", "clean", &["--like-features", &like, "--threshold", "0.999"]));
    assert!(text.contains("2 images are like one of 2 others"), "{text}");
    assert_eq!(kept(&world, "clean"), [0, 2, 3, 4, 5, 7]);
}

/// A network's own features, straight from a run, with pictures and a page.
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
    assert!(printed(&world.ocelli(&args)).contains("2 clusters of level 2"));
    let page = fs::read_to_string(Path::new(&out).join("map.html")).unwrap();
    assert!(page.contains("\"n_clusters\":[5,2]") && page.contains("data:image/"), "the page has its data");
    if let Some(browser) = crate::browser::browser() {
        crate::browser::check_page(browser, &format!("{out}/map.html"), 10, 0);
    }
    // Features that are computed and those of a file are the same rows.
    let file = world.text("x.npy");
    ok(&world.ocelli(&["embed", "--checkpoint", &run, "--shards", &shards, "--out", &file]));
    ok(&curate(&world, "near-duplicates", "of-file", &["--threshold", "0.9", "--shards", &shards]));
    assert_eq!(list(&world, "of-file"), list(&world, "near"));
}

/// Files that were written for other features, another distance or another list are refused, and
/// inputs are not replaced.
#[test]
fn folders_belong_to_one_input() {
    let world = world(&[0.0, 1.0, 90.0, 91.0, 180.0, 181.0, 270.0, 271.0]);
    let balance =
        |out: &str, more: &[&str]| curate(&world, "balance", out, &[&["--count", "4"], more].concat());
    let clusters = ["--clusters", "4", "--resample-rows", "1"];
    ok(&balance("a", &clusters));
    let a = world.text("a");
    let text = fails(&balance("b", &["--clusters-of", &a, "--metric", "euclidean"]), 2);
    assert!(text.contains("cosine"), "{text}");
    let list = world.text("own.csv");
    let by_list = ["--by", "kind", "--list", &list];
    fs::write(&list, "key,kind\n00000000,x\n").unwrap();
    ok(&balance("c", &by_list));
    fs::write(&list, "key,kind\n00000001,x\n").unwrap();
    assert!(fails(&balance("c", &by_list), 2).contains("holds another job"));
    ok(&balance("c", &[&by_list[..], &["--overwrite"]].concat()));
    // Other features under the same name.
    write_features(&world, "x", &[1.0, 0.5].repeat(8), 2, 8);
    assert!(fails(&balance("a", &clusters), 2).contains("holds another job"));
    assert!(fails(&balance("d", &["--clusters-of", &a]), 2).contains("other features"));
    // The folder of the shards that are read.
    let shards = world.text("data/train-000000.tar");
    let data = world.text("data");
    let features = world.text("x.npy");
    fs::write(world.path("data/job.json"), "{}").unwrap();
    let args =
        ["curate", "outliers", "--features", &features, "--shards", &shards, "--out", &data, "--overwrite"];
    assert!(fails(&world.ocelli(&args), 2).contains("is in the output folder"));
    assert!(world.shard().exists());
}

#[test]
fn mistakes_are_one_line() {
    let world = world(&[0.0, 10.0, 20.0, 30.0]);
    let refused =
        |verb: &str, out: &str, code: i32, more: &[&str]| fails(&curate(&world, verb, out, more), code);
    let text = refused("near-duplicates", "a", 2, &["--threshold", "1.5"]);
    assert!(text.contains("1.5") && text.contains("--threshold") && text.contains("at most 1"), "{text}");
    let text = refused("balance", "b", 2, &["--clusters", "9", "--count", "2"]);
    assert!(text.contains("9 clusters of 4 rows"), "{text}");
    let text = refused("balance", "c", 2, &["--count", "5"]);
    assert!(text.contains("--count 5 of 4 images"), "{text}");
    let text = refused("balance", "d", 2, &["--clusters", "2,3", "--count", "2"]);
    assert!(text.contains("level 2 has 3 clusters of 2 clusters"), "{text}");
    // A list beside the features that has other rows.
    let rows = world.path("x.npy.rows.jsonl");
    let lines = fs::read_to_string(&rows).unwrap();
    fs::write(&rows, &lines[..lines.len() / 2]).unwrap();
    assert!(refused("near-duplicates", "e", 3, &[]).contains("x.npy"));
    fs::write(&rows, lines.replace("00000003", "elsewhere")).unwrap();
    let shards = world.text("data/train-000000.tar");
    let text = refused("near-duplicates", "f", 2, &["--shards", &shards]);
    assert!(text.contains("elsewhere") && text.contains("features of other images"), "{text}");
    // Features of another width.
    write_features(&world, "wide", &[1.0; 6], 3, 2);
    let wide = world.text("wide.npy");
    let text = refused("remove", "g", 2, &["--like-features", &wide]);
    assert!(text.contains("rows of 3") && text.contains("rows of 2"), "{text}");
    // A file of the user's is not overwritten.
    fs::create_dir(world.path("mine")).unwrap();
    fs::write(world.path("mine/list.jsonl"), "mine").unwrap();
    let text = refused("near-duplicates", "mine", 2, &[]);
    assert!(text.contains("list.jsonl") && text.contains("choose another --out"), "{text}");
    assert_eq!(fs::read_to_string(world.path("mine/list.jsonl")).unwrap(), "mine");
    // Rows that are not numbers.
    write_features(&world, "x", &[1.0, 0.0, f32::NAN, 0.0, 0.0, 1.0, 1.0, 1.0], 2, 4);
    for verb in ["near-duplicates", "outliers"] {
        assert!(refused(verb, "h", 3, &[]).contains("row 1 of the features is not finite"));
        fs::remove_dir_all(world.path("h")).ok();
    }
}

/// The verbs whose work ranks divide, with their settings.
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

/// Processes under mpirun write what one process writes, byte for byte.
#[cfg(feature = "mpi")]
#[test]
fn processes_under_mpirun_write_what_one_does() {
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
        let done = crate::mpirun::mpirun(3, world.folder.path(), &args).output().unwrap();
        let said =
            |rank: usize| fs::read_to_string(world.path(&format!("stderr-{rank}"))).unwrap_or_default();
        assert!(done.status.success(), "{verb}: {}", said(0));
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
