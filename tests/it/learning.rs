//! Whether a run learns, without labels: what it says, writes and shows.

use std::fs;

use serde_json::Value;

use crate::support::{World, json_of, ok};

/// Settings of a run that is long enough to search views of 64 images.
const LONG: [&str; 4] = ["--set", "optim.batch_size=16", "--set", "optim.length={steps=400}"];

/// Returns the rows of the search of views in `evaluations.jsonl` of a run: network, step, percent.
fn searches(world: &World, run: &str) -> Vec<(String, u64, f64)> {
    let path = world.path(run).join("evaluations.jsonl");
    let mut rows = Vec::new();
    for line in fs::read_to_string(path).unwrap_or_default().lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        if row["metric"] == "retrieval" {
            assert_eq!(row["test"]["images"], 64, "{row}");
            let network = row["about"]["network"].as_str().unwrap().to_string();
            rows.push((network, row["about"]["step"].as_u64().unwrap(), row["found"].as_f64().unwrap()));
        }
    }
    rows
}

/// Returns the line of `stderr` that says whether the run learns.
fn answer(stderr: &str) -> &str {
    let mut lines = stderr.lines().filter_map(|line| line.strip_prefix("without labels: the run is "));
    lines.next().unwrap_or_else(|| panic!("no answer in {stderr}"))
}

#[test]
fn a_run_says_without_labels_whether_it_learns() {
    let world = World::new(80);
    let stderr = ok(&world.pretrain("run", &LONG));
    let rows = searches(&world, "run");
    let random: Vec<f64> = rows.iter().filter(|row| row.0 == "random weights").map(|row| row.2).collect();
    let own: Vec<(u64, f64)> =
        rows.iter().filter(|row| row.0 == "teacher").map(|row| (row.1, row.2)).collect();
    let steps: Vec<u64> = own.iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, [0, 50, 100, 150, 200, 250, 300, 350, 400], "at the start, and eight times");
    assert_eq!(random.len(), 1, "{rows:?}");
    let (_, last) = own[8];
    let found = format!("it finds {last:.0} % of the other views of 64 images");
    assert!(answer(&stderr).contains(&found), "{found}: {stderr}");
    assert!(answer(&stderr).ends_with(&format!("random weights find {:.0} %", random[0])), "{stderr}");

    // The numbers are those of `ocelli runs` and of the page.
    let runs = world.ocelli(&["runs", &world.text("run"), "--json"]);
    ok(&runs);
    let learning = &json_of(&runs)[0]["learning"];
    assert_eq!(learning["words"], answer(&stderr));
    assert_eq!(
        (&learning["last"]["step"], learning["random_percent"].as_f64()),
        (&400.into(), Some(random[0]))
    );
    let table = world.ocelli(&["runs", &world.text("run")]);
    ok(&table);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    let best = own.iter().map(|(_, percent)| *percent).fold(0.0, f64::max);
    assert!(table.contains(&format!("views {:.1} → {best:.1} → {last:.1}", own[0].1)), "{table}");
    let page = fs::read_to_string(world.path("run/report.html")).unwrap();
    assert!(page.contains(&found) && page.contains("views/retrieval"));

    // More steps do not measure random weights again, and ask the same question of the same images.
    let longer = ["--set", "optim.batch_size=16", "--set", "optim.length={steps=410}", "--lengthen"];
    ok(&world.pretrain("run", &longer));
    let rows = searches(&world, "run");
    assert_eq!(rows.iter().filter(|row| row.0 == "random weights").count(), 1, "{rows:?}");
    assert_eq!(rows.last().map(|row| row.1), Some(410));
}

/// The answer of a run that continues weights compares with these.
#[test]
fn a_run_is_compared_with_the_weights_that_it_began_with() {
    let world = World::new(80);
    ok(&world.pretrain("first", &["--set", "run.retrieval_images=0"]));
    assert_eq!(searches(&world, "first"), [], "none is asked for");
    let first = world.text("first");
    let stderr = ok(&world.pretrain("second", &[&LONG[..], &["--init", &first]].concat()));
    let rows = searches(&world, "second");
    let start = rows.iter().find(|row| row.0 == "teacher").unwrap();
    assert_eq!(start.1, 0, "{rows:?}");
    assert!(
        answer(&stderr).contains(&format!("the weights it began with find {:.0} %", start.2)),
        "{stderr}"
    );
}

/// A short run is not kept waiting.
#[test]
fn short_runs_search_nothing() {
    let world = World::new(80);
    let stderr = ok(&world.pretrain("run", &[]));
    assert!(!stderr.contains("without labels") && searches(&world, "run").is_empty(), "{stderr}");
}
