//! `ocelli report` and `ocelli runs`, as a user calls them: the contents of a page, in a browser if
//! there is one.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use networks::{ModelConfig, Origin};
use serde_json::Value;
use weights::{Card, Export, Format, Precision, Preprocessing};

use crate::browser::{browser, chart_titles, check_page};
use crate::libraries::{pixels, random_parameters};
use crate::messages::{check_message, lines_with};
use crate::methods::{LEJEPA, VIT, recipe};
use crate::support::{World, fails, json_of, ok, program, wait_for};

/// Returns the data within a page.
pub(crate) fn page_data(page: &str) -> Value {
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

/// Steps may take minutes: a page has loss, rate and stages of a run after its first step, and
/// curves after its second.
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

/// A page with pictures is not replaced by one without, because of a misspelled folder.
#[test]
fn a_page_is_kept_if_the_images_do_not_exist() {
    let world = World::new(24);
    ok(&world.pretrain("run", &[]));
    let page = fs::read(world.path("run/report.html")).unwrap();
    let nowhere = world.text("nowhere");
    let output = world.ocelli(&["report", &world.text("run"), "--images", &nowhere]);
    check_message("report::a_page_is_kept_if_the_images_do_not_exist", &fails(&output, 2));
    assert!(fs::read(world.path("run/report.html")).unwrap() == page);
}

/// Writes random weights of `model` to the file `name`, with a license; returns its path.
fn write_weights(world: &World, name: &str, model: &str) -> String {
    let model: ModelConfig = toml::from_str(model).unwrap();
    let origin = Origin {
        name: "first.pth".into(),
        step: None,
        library: "timm".into(),
        fingerprint: "00000000000000aa".into(),
        license: Some("<b>mit</b>".into()),
    };
    let card = Card { origins: vec![origin], ..Card::default() };
    let tensors = random_parameters(&model);
    let export = Export {
        model: &model,
        tensors: &tensors,
        classifier: None,
        decoder: None,
        preprocessing: Preprocessing::with_size(32, pixels(&model)),
        network_name: "teacher",
        precision: Precision::F32,
        card: &card,
    };
    weights::write(&world.path(name), Format::Safetensors, &export, false).unwrap();
    world.text(name)
}

/// Reports on weights with the images of the world's shard, in the world's folder.
fn report_on(world: &World, checkpoint: &str, more: &[&str]) -> Output {
    let shard = world.text("data/train-000000.tar");
    let args = ["report", "--checkpoint", checkpoint, "--images", &shard];
    program().args([&args[..], more].concat()).current_dir(world.folder.path()).output().unwrap()
}

/// Checks that a picture has many colors, and is at least as wide.
fn check_picture(path: &Path, width_px: u32) {
    let picture = image::open(path).unwrap().to_rgb8();
    let colors: HashSet<_> = picture.pixels().map(|pixel| pixel.0).collect();
    assert!(colors.len() > 20, "{}: {} colors", path.display(), colors.len());
    assert!(picture.width() >= width_px, "{}: {} px", path.display(), picture.width());
}

/// Value of a fact on the page of a network.
fn fact(network: &Value, name: &str) -> String {
    let mut facts = network["facts"].as_array().unwrap().iter();
    let fact = facts.find(|fact| fact[0] == name).unwrap_or_else(|| panic!("no {name} in {network}"));
    fact[1].as_str().unwrap().to_string()
}

#[test]
fn weights_of_any_library_have_a_page_and_pictures() {
    let world = World::new(40);
    let vit = "arch='vit'\nimage_px=32\npatch_px=8\nwidth=64\ndepth=2\nheads=2";
    let weights = write_weights(&world, "small.v2.safetensors", vit);
    ok(&report_on(&world, &weights, &["--n-images", "3"]));
    let folder = world.path("small.v2-report");
    let page = fs::read_to_string(folder.join("report.html")).unwrap();
    assert!(
        !page.contains("src=\"http") && !page.contains("<b>mit"),
        "nothing is loaded, texts are no markup"
    );
    let network = page_data(&page)["network"].clone();
    assert_eq!(network["name"], "small.v2.safetensors");
    assert_eq!(fact(&network, "license"), "<b>mit</b>");
    assert!(fact(&network, "began with").starts_with("first.pth, timm, fingerprint 00000000000000aa"));
    assert!(fact(&network, "network").contains("64 features, cells of 8 px"), "{network}");
    let gallery = &network["gallery"];
    for (sheet, expected_rows, expected_tiles) in
        [("patches", 3, 2), ("attention", 3, 4), ("neighbors", 3, 9), ("views", 0, 0)]
    {
        assert_eq!(n_rows(gallery, sheet), expected_rows, "{sheet}");
        assert!(expected_rows == 0 || n_tiles(gallery, sheet) == expected_tiles, "{sheet}");
    }
    check_picture(&folder.join("patches.png"), 6 * 116);
    check_picture(&folder.join("attention.png"), 4 * 116);
    check_picture(&folder.join("neighbors.png"), 9 * 116);

    // Nothing is replaced unless it is asked for.
    fs::write(folder.join("attention.png"), "mine").unwrap();
    let output = report_on(&world, &weights, &["--n-images", "3"]);
    check_message("report::weights_of_any_library_have_a_page_and_pictures.exists", &fails(&output, 2));
    assert_eq!(fs::read_to_string(folder.join("attention.png")).unwrap(), "mine");
    let output = report_on(&world, &weights, &["--n-images", "2", "--overwrite", "--json"]);
    ok(&output);
    assert_eq!(json_of(&output)["files"].as_array().unwrap().len(), 4);
    check_picture(&folder.join("attention.png"), 4 * 116);
    let output = world.ocelli(&["report", "--checkpoint", &weights]);
    check_message("report::weights_of_any_library_have_a_page_and_pictures.no_images", &fails(&output, 2));
}

/// A convolutional network has no attention; its patches are the cells of its last feature map.
#[test]
fn convolutional_networks_are_shown_by_their_last_feature_map() {
    let world = World::new(24);
    let resnet = "arch='resnet'\nimage_px=32\ndepth=10\nwidth=8\nstem='small'";
    let weights = write_weights(&world, "conv.safetensors", resnet);
    // The picture of another network in the same folder must not be taken for one of this network.
    fs::create_dir(world.path("out")).unwrap();
    fs::write(world.path("out/attention.png"), "another network").unwrap();
    let out = world.text("out");
    let output = report_on(&world, &weights, &["--out", &out, "--n-images", "3", "--overwrite", "--json"]);
    ok(&output);
    let files: Vec<PathBuf> = serde_json::from_value(json_of(&output)["files"].clone()).unwrap();
    assert_eq!(
        files,
        ["report.html", "patches.png", "neighbors.png"].map(|name| world.path("out").join(name))
    );
    assert!(!world.path("out/attention.png").exists());
    let page = fs::read_to_string(world.path("out/report.html")).unwrap();
    let gallery = &page_data(&page)["network"]["gallery"];
    assert_eq!(n_rows(gallery, "attention"), 0);
    let caption = gallery["patches"]["rows"][0][1]["caption"].as_str().unwrap();
    assert!(caption.ends_with("4 x 4 patches"), "{caption}");
}

/// A run's own network on other images, a folder with classes.
#[test]
fn a_run_is_shown_on_any_images() {
    let world = World::new(24);
    ok(&world.pretrain("run", &["--set", "optim.length={steps=2}"]));
    for (class, number) in [("cat", 1), ("cat", 2), ("dog", 3), ("dog", 4)] {
        let path = world.path(&format!("photos/{class}/{number}.png"));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        image::RgbImage::from_fn(24, 24, |x: u32, y: u32| image::Rgb([(x * number) as u8, (y * 9) as u8, 7]))
            .save(path)
            .unwrap();
    }
    let run = world.text("run");
    let photos = world.text("photos");
    let args = ["report", "--checkpoint", &run, "--images", &photos, "--network", "student"];
    ok(&program().args(args).current_dir(world.folder.path()).output().unwrap());
    let page = fs::read_to_string(world.path("run-report/report.html")).unwrap();
    let network = page_data(&page)["network"].clone();
    assert_eq!(
        (fact(&network, "made by").as_str(), &network["name"]),
        ("a run of ocelli, after 2 steps", &"run".into())
    );
    assert!(network["gallery"]["network_description"].as_str().unwrap().starts_with("the student of run"));
    assert_eq!(n_rows(&network["gallery"], "neighbors"), 4);
    assert!(network["gallery"]["neighbors"]["rows"][0][1]["mark"].is_string(), "classes are known");
}

/// Left out if there is no browser.
#[test]
fn a_browser_opens_the_page_of_weights_without_an_error() {
    let Some(browser) = browser() else { return };
    let world = World::new(40);
    for (name, model, n_pictures) in [
        ("vit", "arch='vit'\nimage_px=32\npatch_px=8\nwidth=64\ndepth=2\nheads=2", 2 * (2 + 4 + 9)),
        ("conv", "arch='resnet'\nimage_px=32\ndepth=10\nwidth=8\nstem='small'", 2 * (2 + 9)),
    ] {
        let weights = write_weights(&world, &format!("{name}.safetensors"), model);
        ok(&report_on(&world, &weights, &["--n-images", "2"]));
        check_page(browser, &world.text(&format!("{name}-report/report.html")), n_pictures - 1, 0);
    }
}

/// Probes the run in `workdir` by its nearest neighbors; returns the scores, by metric.
fn probe(world: &World, workdir: &str) -> Value {
    let run = world.text(workdir);
    let shard = world.text("data/train-000000.tar");
    let sets = ["--train", &shard, "--test", &shard, "--protocol", "knn", "--json"];
    let output = world.ocelli(&[&["probe", "--checkpoint", &run], &sets[..]].concat());
    ok(&output);
    json_of(&output)["networks"]["teacher"].clone()
}

/// Runs that differ only in their seed are one row of the table, in each of its formats.
#[test]
fn scores_over_seeds_have_a_mean_and_a_deviation() {
    const NAME: &str = "report::scores_over_seeds_have_a_mean_and_a_deviation";
    let world = World::new(40);
    let runs = world.text("runs");
    let table = ["runs", &runs, "--table"];
    for (run, seed, rate) in
        [("slow-0", "seed=0", "1e-3"), ("slow-1", "seed=1", "1e-3"), ("fast", "seed=0", "3e-2")]
    {
        let rate = format!("optim.lr={rate}");
        let sets = ["--set", seed, "--set", &rate, "--set", "optim.length={steps=4}"];
        ok(&world.pretrain(&format!("runs/{run}"), &sets));
    }
    check_message(&format!("{NAME}.unscored"), &fails(&world.ocelli(&table), 2));
    let slow = [probe(&world, "runs/slow-0"), probe(&world, "runs/slow-1")];
    let stderr = ok(&world.ocelli(&table));
    check_message(&format!("{NAME}.some"), &lines_with(&stderr, "not in the table"));
    probe(&world, "runs/fast");

    let output = world.ocelli(&[&table[..], &["--json"]].concat());
    ok(&output);
    let found = json_of(&output);
    let rows = found["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2, "{found}");
    assert_eq!((&rows[0]["name"], &rows[1]["name"]), (&"fast".into(), &"slow".into()));
    assert_eq!(rows[1]["seeds"], serde_json::json!([0, 1]));
    assert_eq!(
        (&rows[0]["settings"]["optim.lr"], &rows[1]["settings"]["optim.lr"]),
        (&"0.03".into(), &"0.001".into())
    );
    for (index, column) in found["columns"].as_array().unwrap().iter().enumerate() {
        let metric = column["label"].as_str().unwrap();
        let [a, b] = [0, 1].map(|run: usize| slow[run][metric]["accuracy"].as_f64().unwrap());
        let score = &rows[1]["scores"][index];
        assert_eq!(score["values"], serde_json::json!([a, b]), "{metric}");
        assert!((score["mean"].as_f64().unwrap() - (a + b) / 2.0).abs() < 1e-9, "{score}");
        let deviation = (a - b).abs() / 2f64.sqrt();
        assert!((score["deviation"].as_f64().unwrap() - deviation).abs() < 1e-9, "{score}");
        assert!(rows[0]["scores"][index]["deviation"].is_null(), "one run has no deviation");
    }
    for (format, part) in [
        ("text", "knn_20: accuracy in percent; on 40 images"),
        ("csv", ",knn_20,accuracy,"),
        ("latex", "knn\\_20 \\\\"),
    ] {
        let output = world.ocelli(&[&table[..], &["--format", format]].concat());
        ok(&output);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains(part), "{text}");
    }
    fails(&world.ocelli(&["runs", &runs, "--format", "csv"]), 2);
}

/// Losses of different methods have no common scale. Left out if there is no browser.
#[test]
fn losses_of_different_methods_are_in_charts_of_their_own() {
    let Some(browser) = browser() else { return };
    let world = World::new(40);
    ok(&world.pretrain("first", &[]));
    ok(&world.pretrain("second", &["--set", "seed=4"]));
    fs::write(
        world.path("tiny.toml"),
        recipe(VIT, LEJEPA, 2, "schedule = 'constant'\ncooldown = { steps = 4 }"),
    )
    .unwrap();
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
