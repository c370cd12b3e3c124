//! Sources that are mixed by shares and images that are sampled by weight: exact and resumable.

use std::collections::HashMap;
use std::fs;

use crate::messages::{check_message, lines_with};
use crate::support::{World, fails, metrics, ok};

/// Runs a tiny pretraining run on `shards`.
fn pretrain(world: &World, workdir: &str, shards: &[&str], more: &[&str]) -> std::process::Output {
    let mut args = world.pretrain_args(workdir, more);
    let value = args.iter().position(|arg| arg == "--shards").unwrap() + 1;
    args.splice(value..=value, shards.iter().map(ToString::to_string));
    world.ocelli(&args.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Returns the losses of a run.
fn losses(world: &World, run: &str) -> Vec<f64> {
    metrics(&world.path(run)).iter().map(|row| row["train/loss"].as_f64().unwrap()).collect()
}

/// Every fourth batch position is of the second source, independent of the sizes of the sources,
/// and the metrics count the samples of each.
#[test]
fn sources_are_mixed_by_their_shares() {
    let world = World::new(20);
    let few = world.text("few");
    let all = world.text("data/train-000000.tar");
    ok(&world.ocelli(&["shards", "subset", &all, "--count", "3", "--out", &few]));
    let many = format!("many={all}");
    let few = format!("few={few}");
    let both = [many.as_str(), few.as_str()];
    let mix = "data.mix={ many = 3.0, few = 1.0 }";
    let more = ["--set", mix, "--set", "run.log_every_steps=1", "--set", "run.checkpoint_every_steps=1"];
    ok(&pretrain(&world, "run", &both, &more));
    let rows = metrics(&world.path("run"));
    let last = rows.last().unwrap();
    let n_many = last["data/many"].as_f64().unwrap();
    let n_few = last["data/few"].as_f64().unwrap();
    assert_eq!(n_many + n_few, last["train/samples"].as_f64().unwrap());
    assert!(n_few > 0.0 && n_many > n_few, "{n_many} {n_few}");
    // A run that is killed and resumed has the same losses.
    let fault = ["--inject-fault", "kill:rank=0,step=2,phase=update"];
    assert!(!pretrain(&world, "again", &both, &[&more[..], &fault].concat()).status.success());
    ok(&pretrain(&world, "again", &both, &more));
    assert_eq!(losses(&world, "run"), losses(&world, "again"));
    // A run does not resume with other shares; shards and shares must have the same names.
    let even = ["--set", "data.mix={ many = 1.0, few = 1.0 }"];
    let text = fails(&pretrain(&world, "run", &both, &even), 2);
    assert!(text.contains("data.mix"), "{text}");
    let text = fails(&pretrain(&world, "unnamed", &[&all], &even), 2);
    assert!(text.contains("few, many") && text.contains("NAME="), "{text}");
    let output = pretrain(&world, "missing", &[&many], &even);
    check_message("mixing::sources_are_mixed_by_their_shares.missing", &fails(&output, 2));
    let text = fails(&pretrain(&world, "shares", &both, &[]), 2);
    assert!(text.contains("--set data.mix.many=0.5"), "{text}");
}

/// A recipe cannot run a command under the name of a source, and messages about names of sources do
/// not show passwords.
#[test]
fn names_of_sources_hide_no_commands_and_reveal_no_passwords() {
    let world = World::new(4);
    let shared = fs::read_to_string(world.path("tiny.toml")).unwrap();
    let marker = world.text("ran");
    let list = format!("[data]\nshards = [\"own=pipe:touch {marker}\"]\nmix = {{ own = 1.0 }}\n");
    let text = if shared.contains("[data]") {
        shared.replacen("[data]", &list, 1)
    } else {
        format!("{shared}\n{list}")
    };
    fs::write(world.path("shared.toml"), text).unwrap();
    let recipe = world.text("shared.toml");
    let workdir = world.text("w");
    let refused = world.ocelli(&["pretrain", "--recipe", &recipe, "--workdir", &workdir]);
    check_message(
        "mixing::names_of_sources_hide_no_commands_and_reveal_no_passwords.command",
        &fails(&refused, 2),
    );
    assert!(!world.path("ran").exists());
    let name = ["--set", "data.mix={ \"my.web\" = 1.0 }"];
    let text = fails(&pretrain(&world, "x", &["my.web=https://u:secret@h/a.tar"], &name), 2);
    check_message("mixing::names_of_sources_hide_no_commands_and_reveal_no_passwords.name", &text);
    assert!(!text.contains("secret"), "{text}");
}

/// Images are sampled by their weights; images that are not in the list are not sampled; a run does
/// not resume with other weights.
#[test]
fn images_are_sampled_by_their_weights() {
    let world = World::new(10);
    let list = world.path("weights.csv");
    fs::write(&list, "key,weight\n00000001,1\n00000004,3\n00000009,0\n").unwrap();
    let set = format!("data.weights={}", list.display());
    let args = ["--set", set.as_str()];
    let first = world.pretrain("run", &args);
    ok(&first);
    let unlisted = lines_with(&String::from_utf8_lossy(&first.stderr), "7 of 10");
    check_message("mixing::images_are_sampled_by_their_weights", &unlisted);

    // The order of the run.
    let dataset = pipeline::Dataset::open(&[world.text("data/train-000000.tar")], &world.storage()).unwrap();
    let mut by_id = vec![0.0; 10];
    by_id[1] = 1.0;
    by_id[4] = 3.0;
    let sampling = pipeline::Sampling { sources: Vec::new(), weights: Some(by_id) };
    let dataset = dataset.sampled(sampling).unwrap();
    let order = pipeline::Order::for_dataset(&dataset, 0, 16);
    let mut counts: HashMap<u64, u64> = HashMap::new();
    for position in 0..4000 {
        *counts.entry(order.place(position, 0).sample).or_default() += 1;
    }
    assert_eq!(counts.keys().copied().collect::<std::collections::BTreeSet<_>>(), [1, 4].into());
    assert!(counts[&4].abs_diff(3000) <= 100, "{counts:?}");

    // The run resumes with the same weights in another file, and not with other weights.
    fs::rename(&list, world.path("moved.csv")).unwrap();
    let moved = format!("data.weights={}", world.text("moved.csv"));
    ok(&world.pretrain("run", &["--set", &moved]));
    for (run, weights) in [
        ("run", "00000001,2\n00000004,3"),
        ("word", "00000001,heavy"),
        ("negative", "00000001,-1"),
        ("elsewhere", "elsewhere,1"),
        ("zero", "00000001,0"),
    ] {
        fs::write(&list, format!("key,weight\n{weights}\n")).unwrap();
        check_message(
            &format!("mixing::images_are_sampled_by_their_weights.{run}"),
            &fails(&world.pretrain(run, &args), 2),
        );
    }
}
