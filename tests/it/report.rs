//! `ocelli report` and `ocelli runs`, as a user calls them: the contents of a page, in a browser if
//! there is one.

use std::fs;
use std::time::Duration;

use serde_json::Value;

use crate::browser::{browser, chart_titles, check_page};
use crate::messages::{check_message, lines_with};
use crate::methods::{LEJEPA, VIT, recipe};
use crate::support::{World, fails, json_of, ok, wait_for};

/// Returns the data within a page.
fn page_data(page: &str) -> Value {
    let (_, rest) = page.split_once(r#"<script type="application/json" id="data">"#).unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

/// Creates two runs, one with an evaluation, a damaged sample and names that would be markup
/// without escaping.
fn create_runs() -> World {
    let world = World::new(40);
    damage(&world);
    ok(&world.pretrain("run", &["--set", "name=<b>tiny</b>", "--set", "data.max_bad_rate=0.5"]));
    ok(&world.pretrain("other", &["--set", "optim.lr=2e-2", "--set", "data.max_bad_rate=0.5"]));
    let run = world.text("run");
    let shard = world.text("data/train-000000.tar");
    ok(&world.ocelli(&[
        "probe",
        "--checkpoint",
        &run,
        "--train",
        &shard,
        "--test",
        &shard,
        "--name",
        "</script>",
    ]));
    world
}

/// Damages the end of the first image of the shard, so that a strict decoder rejects it.
fn damage(world: &World) {
    let dataset = world.dataset();
    let (_, _, offset) = dataset.describe(pipeline::SampleId(0));
    let length = dataset.read(pipeline::SampleId(0)).unwrap().image.len();
    drop(dataset);
    let mut bytes = fs::read(world.shard()).unwrap();
    let start = offset as usize + 512 + length / 2;
    bytes[start..start + length / 4].fill(0xff);
    fs::write(world.shard(), bytes).unwrap();
    // The sidecar describes the undamaged shard.
    for entry in fs::read_dir(world.path("data")).unwrap().flatten() {
        if entry.path().extension().is_some_and(|extension| extension != "tar") {
            fs::remove_file(entry.path()).unwrap();
        }
    }
}

/// Number of rows of a sheet of the gallery.
fn n_rows(gallery: &Value, sheet: &str) -> usize {
    gallery[sheet]["rows"].as_array().unwrap().len()
}

/// Number of tiles in the first row of a sheet of the gallery.
fn n_tiles(gallery: &Value, sheet: &str) -> usize {
    gallery[sheet]["rows"][0].as_array().unwrap().len()
}

#[test]
fn a_page_shows_a_run_without_other_files() {
    let world = create_runs();
    let output = world.ocelli(&["report", &world.text("run"), "--json", "--n-images", "3"]);
    let report = json_of(&output);
    assert_eq!(report["runs"], 1);
    let path = world.path("run/report.html");
    let page = fs::read_to_string(&path).unwrap();
    assert!(!page.contains("src=\"http"), "nothing is loaded");
    assert!(!page.contains("<b>tiny"), "names are no markup");
    let data = page_data(&page);
    let run = &data["runs"][0];
    assert_eq!(run["recipe"], "<b>tiny</b>");
    assert_eq!(run["overview"]["state"], "finished");
    assert_eq!(run["overview"]["step"], 12);
    assert_eq!(run["series"]["train/loss"].as_array().unwrap().len(), 12);
    assert_eq!(run["series"]["train/loss"][11][0], 12, "steps are counted as they are taken");
    assert_eq!(run["scores"][0]["kind"]["set"], "</script>");
    assert!(run["confusions"][0]["matrix"].is_array());
    assert_eq!(run["n_bad"], 1, "{:?}", run["bad"]);
    let gallery = &run["gallery"];
    // The first of the three images is the damaged one: neighbors do not decode it.
    for (sheet, expected_rows) in [("patches", 2), ("attention", 2), ("neighbors", 3), ("views", 2)] {
        assert_eq!(n_rows(gallery, sheet), expected_rows, "{sheet}");
    }
    assert!(run["bad"][0]["tile"]["src"].is_string(), "a part of it can be seen: {}", run["bad"]);
    for (sheet, expected_tiles) in [("patches", 2), ("attention", 4), ("neighbors", 9), ("views", 5)] {
        assert_eq!(n_tiles(gallery, sheet), expected_tiles, "{sheet}");
    }
    let continues = run["continue"].as_str().unwrap();
    assert!(
        continues.contains("pretrain --recipe") && continues.contains("'name=<b>tiny</b>'"),
        "{continues}"
    );

    ok(&world.ocelli(&["report", &world.text("run"), "--no-pictures"]));
    fs::write(&path, "a letter").unwrap();
    let output = world.ocelli(&["report", &world.text("run"), "--no-pictures"]);
    check_message("report::a_page_shows_a_run_without_other_files", &fails(&output, 2));
    assert_eq!(fs::read_to_string(&path).unwrap(), "a letter");
}

/// A run's files may be incomplete, of another release or missing.
#[test]
fn missing_files_are_reported_and_the_rest_is_shown() {
    let world = World::new(16);
    ok(&world.pretrain("run", &[]));
    fs::remove_dir_all(world.path("data")).unwrap();
    let metrics = fs::read_to_string(world.path("run/metrics.jsonl")).unwrap();
    fs::write(world.path("run/metrics.jsonl"), &metrics[..metrics.len() - 30]).unwrap();
    let stderr = ok(&world.ocelli(&["report", &world.text("run")]));
    check_message(
        "report::missing_files_are_reported_and_the_rest_is_shown.pictures",
        &lines_with(&stderr, "warning:"),
    );
    let data = page_data(&fs::read_to_string(world.path("run/report.html")).unwrap());
    assert_eq!(data["runs"][0]["series"]["train/loss"].as_array().unwrap().len(), 11);
    assert!(data["runs"][0]["no_gallery"].as_str().unwrap().contains("--images"), "{stderr}");
    let output = world.ocelli(&["report", &world.text("nowhere")]);
    check_message("report::missing_files_are_reported_and_the_rest_is_shown.nowhere", &fails(&output, 2));
}

/// Steps may take minutes: a page has loss, rate and stages of a run after its first step, and curves
/// after its second.
#[test]
fn a_page_shows_a_run_from_its_first_step_on() {
    let world = World::new(16);
    for (step, steps) in [(1, &[1][..]), (3, &[1, 2])] {
        let name = format!("run-{step}");
        let fault = format!("kill:rank=0,step={step},phase=backward");
        world.pretrain(&name, &["--set", "run.log_every_steps=50", "--inject-fault", &fault]);
        ok(&world.ocelli(&["report", &world.text(&name), "--no-pictures"]));
        let data = page_data(&fs::read_to_string(world.path(&name).join("report.html")).unwrap());
        let run = &data["runs"][0];
        let losses = run["series"]["train/loss"].as_array().unwrap();
        let logged: Vec<u64> = losses.iter().map(|point| point[0].as_u64().unwrap()).collect();
        assert_eq!(logged, steps, "{data}");
        assert!(run["overview"]["loss"].is_f64() && run["overview"]["images_per_s"].is_f64(), "{data}");
        assert!(run["overview"]["seconds_left"].is_f64(), "{data}");
        assert!(run["stages"]["step_ms"].is_f64(), "{data}");
    }
}

/// Folders of years are classes with the names of numbers.
#[test]
fn names_of_classes_are_quoted() {
    let world = World::new(1);
    for i in 0..12u32 {
        let path = world.path(&format!("photos/{}/{i}.png", ["2023", "2024"][i as usize % 2]));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let image =
            image::ImageBuffer::from_fn(20, 20, |x, y| image::Rgb([(x * 9) as u8, (y * i) as u8, i as u8]));
        image.save(path).unwrap();
    }
    ok(&world.pretrain("run", &["--shards", &world.text("photos")]));
    let data = page_data(&fs::read_to_string(world.path("run/report.html")).unwrap());
    let neighbors = data["runs"][0]["gallery"]["neighbors"]["rows"].to_string();
    assert!(neighbors.contains(r#"class \"2024\""#), "{neighbors}");
}

/// Row of the run whose folder ends with `name`.
fn find_run<'v>(rows: &'v Value, name: &str) -> &'v Value {
    let mut rows = rows.as_array().unwrap().iter();
    rows.find(|row| row["workdir"].as_str().is_some_and(|path| path.ends_with(name))).unwrap()
}

#[test]
fn runs_are_listed_with_their_states() {
    let world = World::new(16);
    ok(&world.pretrain("runs/whole", &[]));
    ok(&world.pretrain("runs/deep/other", &[]));
    world.pretrain("runs/killed", &["--inject-fault", "kill:rank=0,step=6,phase=backward"]);
    fs::create_dir(world.path("runs/foreign")).unwrap();
    fs::write(world.path("runs/foreign/plan.toml"), "from = 'elsewhere'\n").unwrap();
    // A run counts as running for some seconds after its last heartbeat.
    let mut rows = Value::Null;
    wait_for("the end of the killed run", Duration::from_secs(30), || {
        rows = json_of(&world.ocelli(&["runs", &world.text("runs"), "--json"]));
        !rows.to_string().contains("running")
    });
    assert_eq!(rows.as_array().unwrap().len(), 4);
    assert_eq!(find_run(&rows, "whole")["state"], "finished");
    let other = find_run(&rows, "deep/other");
    assert_eq!(other["step"], 12);
    assert_eq!(other["method"], "dino");
    let killed = find_run(&rows, "killed");
    assert_eq!(killed["state"], "died", "{killed}");
    assert!(killed["why"].as_str().unwrap().contains("has ended"), "{killed}");
    assert!(killed["seconds_left"].as_f64().unwrap() > 0.0);
    assert!(find_run(&rows, "foreign")["error"].as_str().unwrap().contains("cannot read it"));
    let output = world.ocelli(&["runs", &world.text("runs")]);
    let stderr = ok(&output);
    check_message("report::runs_are_listed_with_their_states.foreign", &lines_with(&stderr, "foreign"));
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(table.lines().next().unwrap().starts_with("run "), "{table}");
    assert!(table.contains("deep/other") && table.contains("12/12"), "{table}");
    let output = world.ocelli(&["runs", &world.text("data")]);
    check_message("report::runs_are_listed_with_their_states.none", &fails(&output, 2));
}

/// Left out if there is no browser; `.ci/run` installs one.
#[test]
fn a_browser_opens_the_page_without_an_error() {
    let Some(browser) = browser() else { return };
    let world = create_runs();
    let run = world.text("run");
    let other = world.text("other");
    for (runs, out) in [(vec![&run], world.text("one.html")), (vec![&run, &other], world.text("both.html"))] {
        let mut args = vec!["report", "--out", &out, "--n-images", "2"];
        args.extend(runs.iter().map(|run| run.as_str()));
        ok(&world.ocelli(&args));
        let n_pictures = runs.len() * (2 + 4 + 9 + 5);
        check_page(browser, &out, n_pictures, 10 * runs.len());
    }
}

/// Losses of different methods have no common scale. Left out if there is no browser.
#[test]
fn losses_of_different_methods_are_in_charts_of_their_own() {
    let Some(browser) = browser() else { return };
    let world = World::new(40);
    ok(&world.pretrain("first", &[]));
    ok(&world.pretrain("second", &["--set", "seed=4"]));
    fs::write(world.path("tiny.toml"), recipe(VIT, LEJEPA, 2, "schedule = 'constant'\ncooldown = { steps = 4 }")).unwrap();
    ok(&world.pretrain("other", &[]));
    let out = world.text("all.html");
    let runs = [world.text("first"), world.text("second"), world.text("other")];
    ok(&world.ocelli(&["report", &runs[0], &runs[1], &runs[2], "--out", &out, "--no-pictures"]));
    let titles = chart_titles(browser, &out);
    for title in ["train/loss · dino", "train/loss · lejepa", "health/feature_std"] {
        assert_eq!(titles.iter().filter(|found| *found == title).count(), 1, "{title}: {titles:?}");
    }
    assert!(!titles.contains(&"train/loss".to_string()), "{titles:?}");
    ok(&world.ocelli(&["report", &runs[0], &runs[1], "--out", &out, "--no-pictures"]));
    assert!(chart_titles(browser, &out).contains(&"train/loss".to_string()), "of one method");
}
