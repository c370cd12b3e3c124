//! Comparison of images with others, in parts: `ocelli curate retrieve | remove --part`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use crate::curate::{WIDTH, npy, wide_row};
use crate::messages::check_message;
use crate::parts::{assert_same, files, in_parts};
use crate::support::{World, fails, json_of, ok};

/// The verbs, with a setting with which they keep some of the rows.
const VERBS: [[&str; 3]; 2] = [["retrieve", "--count", "30"], ["remove", "--threshold", "0.9999999"]];

/// A world with features to compare, in blocks of 1,024, 1,024, 1,024 and 928 rows.
struct ComparisonWorld {
    world: World,
}

impl ComparisonWorld {
    /// Writes features of 4,000 images and of 601 others. Some of these are equal to images, and
    /// some images are equally similar to several.
    fn new() -> Self {
        let world = World::new(4);
        let degrees = (0..4000).map(|i| (i * 7919 % 3600) as f32 / 10.0 + (i % 7) as f32 * 0.001);
        let rows: Vec<f32> = degrees.flat_map(wide_row).collect();
        fs::write(world.path("x.npy"), npy(&rows, WIDTH)).unwrap();
        let like: Vec<f32> = rows[..WIDTH * 400]
            .iter()
            .chain(&rows[..WIDTH * 200])
            .chain(&wide_row(12.345))
            .copied()
            .collect();
        fs::write(world.path("like.npy"), npy(&like, WIDTH)).unwrap();
        let mut bad = rows;
        bad[WIDTH * 1100] = f32::NAN;
        fs::write(world.path("bad.npy"), npy(&bad, WIDTH)).unwrap();
        Self { world }
    }

    /// Returns the arguments of a verb with its settings on `features`, written to `out`.
    fn args<'a>(&self, settings: &'a [&'a str], features: &str, out: &str) -> Vec<String> {
        let features = self.world.text(features);
        let like = self.world.text("like.npy");
        let out = self.world.text(out);
        let paths = ["--features", &features, "--like-features", &like, "--json", "--out", &out];
        [&["curate"], settings, &paths].concat().iter().map(ToString::to_string).collect()
    }

    fn run(&self, args: &[String], more: &[&str]) -> Output {
        let args: Vec<&str> = args.iter().map(String::as_str).chain(more.iter().copied()).collect();
        self.world.ocelli(&args)
    }

    /// Runs a verb as one command, and in three parts that are joined; returns the arguments and
    /// the folder of the latter.
    fn compare_parts_with_whole(&self, settings: &[&str]) -> (Vec<String>, PathBuf) {
        let expected = self.run(&self.args(settings, "x.npy", "whole"), &[]);
        ok(&expected);
        let args = self.args(settings, "x.npy", "parts");
        let joined = in_parts(&self.world, &args.iter().map(String::as_str).collect::<Vec<_>>());
        assert_same(&self.world.path("whole"), &self.world.path("parts"));
        assert_eq!(json_of(&joined), json_of(&expected));
        let kept = json_of(&joined)["kept"].as_u64().unwrap();
        assert!(kept > 500 && kept < 3900, "{kept}");
        (args, self.world.path("parts"))
    }
}

#[test]
fn parts_are_joined_to_the_result_of_one_command() {
    for settings in &VERBS {
        let comparison = ComparisonWorld::new();
        let (args, _) = comparison.compare_parts_with_whole(settings);
        // More parts than blocks, after an early join, which writes nothing.
        let many = comparison.args(settings, "x.npy", "many");
        let output = comparison.run(&many, &["--join", "9"]);
        check_message(
            &format!("comparison_parts::parts_are_joined_to_the_result_of_one_command.{}.early", settings[0]),
            &fails(&output, 2),
        );
        for part in 1..=6 {
            ok(&comparison.run(&many, &["--part", &format!("{part}/6")]));
        }
        ok(&comparison.run(&many, &["--join", "6"]));
        assert_same(&comparison.world.path("whole"), &comparison.world.path("many"));
        // A job that overwrites removes all files of parts, those of killed ones too.
        for ending in ["lock", "json.0-0.tmp"] {
            let killed = format!("parts/{}.part-00002-of-00003.{ending}", settings[0]);
            fs::write(comparison.world.path(&killed), "").unwrap();
        }
        let output = comparison.run(&args, &["--join", "3", "--overwrite"]);
        check_message(
            &format!(
                "comparison_parts::parts_are_joined_to_the_result_of_one_command.{}.overwrite",
                settings[0]
            ),
            &fails(&output, 2),
        );
        ok(&comparison.run(&args, &["--overwrite"]));
        assert!(files(&comparison.world.path("parts"), |name| name.contains(".part-")).is_empty());
        assert_same(&comparison.world.path("whole"), &comparison.world.path("parts"));
    }
}

#[test]
fn parts_of_other_jobs_are_refused() {
    for settings in &VERBS {
        let comparison = ComparisonWorld::new();
        let (args, folder) = comparison.compare_parts_with_whole(settings);
        let other = comparison.args(&[settings[0], settings[1], "1"], "x.npy", "parts");
        for (args, more) in [(&args, &["--part", "1/4"][..]), (&args, &[]), (&other, &["--part", "1/3"])] {
            let name = format!("comparison_parts::parts_of_other_jobs_are_refused.{}.job", settings[0]);
            check_message(&name, &fails(&comparison.run(args, more), 2));
        }
        // A part of another job under the name of a part of this job.
        let name = format!("{}.part-00002-of-00003.json", settings[0]);
        let other = comparison.args(&[settings[0], settings[1], "1"], "x.npy", "other");
        ok(&comparison.run(&other, &["--part", "2/3"]));
        let part = fs::read(folder.join(&name)).unwrap();
        fs::copy(comparison.world.path("other").join(&name), folder.join(&name)).unwrap();
        let output = comparison.run(&args, &["--join", "3"]);
        check_message(
            &format!("comparison_parts::parts_of_other_jobs_are_refused.{}.part", settings[0]),
            &fails(&output, 2),
        );
        fs::write(folder.join(&name), part).unwrap();
        ok(&comparison.run(&args, &["--join", "3"]));
        // The same queries, written again, and other queries under the same name.
        let like = comparison.world.path("like.npy");
        let queries = fs::read(&like).unwrap();
        for (change, last) in [("same_queries", queries[queries.len() - 1]), ("other_queries", 0)] {
            fs::write(&like, [&queries[..queries.len() - 1], &[last]].concat()).unwrap();
            for more in [["--join", "3"], ["--part", "2/3"]] {
                let test = "comparison_parts::parts_of_other_jobs_are_refused";
                let name = format!("{test}.{}.{change}.{}", settings[0], more[0]);
                check_message(&name, &fails(&comparison.run(&args, &more), 2));
            }
        }
    }
}

#[test]
fn damaged_parts_are_refused() {
    for settings in &VERBS {
        let comparison = ComparisonWorld::new();
        let (args, folder) = comparison.compare_parts_with_whole(settings);
        let path = folder.join(format!("{}.part-00002-of-00003.json", settings[0]));
        let part = fs::read_to_string(&path).unwrap();
        // The first result `[row, query, similarity]`, and the text around it.
        let (before, results) = part.split_once("\"result\":[[").unwrap();
        let (row, after_row) = results.split_once(',').unwrap();
        let (query, after_query) = after_row.split_once(',').unwrap();
        let (_, after_result) = after_query.split_once("],").unwrap();
        assert_eq!(format!("{before}\"result\":[[{row},{query},{after_query}"), part);
        let without_first = format!("{before}\"result\":[{after_result}");
        let mut damaged = vec![without_first];
        for (row, query) in [("1023", query), ("4000", query), (row, "601")] {
            damaged.push(format!("{before}\"result\":[[{row},{query},{after_query}"));
        }
        for text in damaged {
            fs::write(&path, text).unwrap();
            let output = comparison.run(&args, &["--join", "3"]);
            check_message(
                &format!("comparison_parts::damaged_parts_are_refused.{}", settings[0]),
                &fails(&output, 2),
            );
        }
        // Another part of the same job.
        fs::copy(folder.join(format!("{}.part-00001-of-00003.json", settings[0])), &path).unwrap();
        let output = comparison.run(&args, &["--join", "3"]);
        check_message(
            &format!("comparison_parts::damaged_parts_are_refused.{}.other", settings[0]),
            &fails(&output, 2),
        );
    }
}

/// A row that is not finite fails only the part that compares it.
#[test]
fn parts_check_only_their_rows() {
    let comparison = ComparisonWorld::new();
    for settings in &VERBS {
        let args = comparison.args(settings, "bad.npy", settings[0]);
        ok(&comparison.run(&args, &["--part", "1/3"]));
        check_message(
            "comparison_parts::parts_check_only_their_rows",
            &fails(&comparison.run(&args, &["--part", "2/3"]), 3),
        );
        ok(&comparison.run(&args, &["--part", "3/3"]));
        assert!(fails(&comparison.run(&args, &["--join", "3"]), 2).contains("--part 2/3"));
    }
}

#[test]
fn jobs_that_cannot_be_divided_into_parts_are_refused() {
    let comparison = ComparisonWorld::new();
    let args = comparison.args(&["retrieve", "--by", "cluster"], "x.npy", "no");
    let output = comparison.run(&args, &["--part", "1/2"]);
    check_message(
        "comparison_parts::jobs_that_cannot_be_divided_into_parts_are_refused.clusters",
        &fails(&output, 2),
    );
    let photos = comparison.world.text("data");
    let out = comparison.world.text("no");
    let args =
        ["curate", "remove", "--checkpoint", "run", "--shards", &photos, "--like", &photos, "--out", &out];
    let output = comparison.world.ocelli(&[&args[..], &["--join", "2"]].concat());
    check_message(
        "comparison_parts::jobs_that_cannot_be_divided_into_parts_are_refused.images",
        &fails(&output, 2),
    );
    let args = comparison.args(&VERBS[0], "x.npy", "no");
    let args: Vec<&str> = args.iter().map(String::as_str).chain(["--part", "1/2"]).collect();
    let ranks = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")];
    let output = comparison.world.ocelli_with(&args, &ranks);
    check_message(
        "comparison_parts::jobs_that_cannot_be_divided_into_parts_are_refused.ranks",
        &fails(&output, 2),
    );
    assert!(!Path::new(&out).exists());
}
