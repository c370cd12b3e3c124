//! Comparison of images with given ones, in parts: `ocelli curate retrieve | remove --part`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use crate::curate::{WIDTH, npy, wide_row};
use crate::parts::{assert_same, files, in_parts};
use crate::support::{World, fails, json_of, ok};

/// The verbs, with a setting under which they keep some rows, and not all.
const VERBS: [[&str; 3]; 2] = [["retrieve", "--count", "30"], ["remove", "--threshold", "0.9999999"]];

/// Features to compare, in blocks of 1,024, 1,024, 1,024 and 928 rows.
struct Desk {
    world: World,
}

impl Desk {
    /// Writes features of 4,000 images and of 601 others. Some of these are equal to images, and
    /// some images are equally similar to several.
    fn new() -> Self {
        let world = World::new(4);
        let rows: Vec<f32> = (0..4000)
            .flat_map(|i| wide_row((i * 7919 % 3600) as f32 / 10.0 + (i % 7) as f32 * 0.001))
            .collect();
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

    /// Runs a verb whole, and in three parts that are joined; returns the arguments and the folder
    /// of the latter.
    fn whole_and_in_parts(&self, settings: &[&str]) -> (Vec<String>, PathBuf) {
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
        let desk = Desk::new();
        let (args, _) = desk.whole_and_in_parts(settings);
        // More parts than blocks, after they were joined too early, which claims nothing.
        let many = desk.args(settings, "x.npy", "many");
        let early = fails(&desk.run(&many, &["--join", "9"]), 2);
        assert!(early.contains("9 part(s) are missing") && early.contains("--part 1/9"), "{early}");
        for part in 1..=6 {
            ok(&desk.run(&many, &["--part", &format!("{part}/6")]));
        }
        ok(&desk.run(&many, &["--join", "6"]));
        assert_same(&desk.world.path("whole"), &desk.world.path("many"));
        // A whole job that overwrites leaves nothing of parts behind, not even of killed ones.
        for ending in ["lock", "json.0-0.tmp"] {
            let killed = format!("parts/{}.part-00002-of-00003.{ending}", settings[0]);
            fs::write(desk.world.path(&killed), "").unwrap();
        }
        assert!(
            fails(&desk.run(&args, &["--join", "3", "--overwrite"]), 2)
                .contains("delete the results of parts")
        );
        ok(&desk.run(&args, &["--overwrite"]));
        let left = |name: &str| name.contains(".part-");
        assert!(files(&desk.world.path("parts"), left).is_empty());
        assert_same(&desk.world.path("whole"), &desk.world.path("parts"));
    }
}

#[test]
fn parts_of_other_jobs_are_refused() {
    for settings in &VERBS {
        let desk = Desk::new();
        let (args, folder) = desk.whole_and_in_parts(settings);
        let other = desk.args(&[settings[0], settings[1], "1"], "x.npy", "parts");
        for (args, more) in [(&args, &["--part", "1/4"][..]), (&args, &[]), (&other, &["--part", "1/3"])] {
            let said = fails(&desk.run(args, more), 2);
            assert!(
                said.contains("holds another job")
                    && said.contains("with other inputs, flags or number of parts"),
                "{said}"
            );
        }
        // The part of another job under the name of one of this job.
        let name = format!("{}.part-00002-of-00003.json", settings[0]);
        let other = desk.args(&[settings[0], settings[1], "1"], "x.npy", "other");
        ok(&desk.run(&other, &["--part", "2/3"]));
        let part = fs::read(folder.join(&name)).unwrap();
        fs::copy(desk.world.path("other").join(&name), folder.join(&name)).unwrap();
        assert!(fails(&desk.run(&args, &["--join", "3"]), 2).contains("is of another job or part"));
        fs::write(folder.join(&name), part).unwrap();
        ok(&desk.run(&args, &["--join", "3"]));
        // The same queries, written again, and others of the same name.
        let like = desk.world.path("like.npy");
        let queries = fs::read(&like).unwrap();
        for (last, reason) in [(queries[queries.len() - 1], "changed since"), (0, "holds another job")] {
            fs::write(&like, [&queries[..queries.len() - 1], &[last]].concat()).unwrap();
            for work in [["--join", "3"], ["--part", "2/3"]] {
                assert!(fails(&desk.run(&args, &work), 2).contains(reason));
            }
        }
    }
}

#[test]
fn damaged_parts_are_refused() {
    for settings in &VERBS {
        let desk = Desk::new();
        let (args, folder) = desk.whole_and_in_parts(settings);
        let path = folder.join(format!("{}.part-00002-of-00003.json", settings[0]));
        let part = fs::read_to_string(&path).unwrap();
        let (before, found) = part.split_once("\"result\":[[").unwrap();
        let [row, query, similarity] =
            <[&str; 3]>::try_from(found.split([',', ']']).take(3).collect::<Vec<_>>()).unwrap();
        let rest = &found[[row, query, similarity].concat().len() + 2..];
        let with = |row: &str, query: &str| format!("{before}\"result\":[[{row},{query},{similarity}{rest}");
        assert_eq!(with(row, query), part);
        let lost = format!("{before}\"result\":[{}", &rest[2..]);
        for text in [with("1023", query), with("4000", query), with(row, "601"), lost] {
            fs::write(&path, text).unwrap();
            let said = fails(&desk.run(&args, &["--join", "3"]), 2);
            assert!(said.contains("is damaged") && said.contains("do part 2/3 again"), "{said}");
        }
        // Another part of the same job.
        fs::copy(folder.join(format!("{}.part-00001-of-00003.json", settings[0])), &path).unwrap();
        assert!(fails(&desk.run(&args, &["--join", "3"]), 2).contains("of another job or part"));
    }
}

/// A row that is not finite fails the part that compares it, and no other.
#[test]
fn parts_check_their_own_rows() {
    let desk = Desk::new();
    for settings in &VERBS {
        let args = desk.args(settings, "bad.npy", settings[0]);
        ok(&desk.run(&args, &["--part", "1/3"]));
        let said = fails(&desk.run(&args, &["--part", "2/3"]), 3);
        assert!(said.contains("row 1100 of the features is not finite"), "{said}");
        ok(&desk.run(&args, &["--part", "3/3"]));
        assert!(fails(&desk.run(&args, &["--join", "3"]), 2).contains("--part 2/3"));
    }
}

#[test]
fn what_cannot_be_done_in_parts_is_refused() {
    let desk = Desk::new();
    let args = desk.args(&["retrieve", "--by", "cluster"], "x.npy", "no");
    assert!(fails(&desk.run(&args, &["--part", "1/2"]), 2).contains("need --by image"));
    let photos = desk.world.text("data");
    let out = desk.world.text("no");
    let args =
        ["curate", "remove", "--checkpoint", "run", "--shards", &photos, "--like", &photos, "--out", &out];
    let said = fails(&desk.world.ocelli(&[&args[..], &["--join", "2"]].concat()), 2);
    assert!(said.contains("need --features and --like-features"), "{said}");
    let args = desk.args(&VERBS[0], "x.npy", "no");
    let args: Vec<&str> = args.iter().map(String::as_str).chain(["--part", "1/2"]).collect();
    let ranks = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")];
    assert!(fails(&desk.world.ocelli_with(&args, &ranks), 2).contains("started one by one"));
    assert!(!Path::new(&out).exists());
}
