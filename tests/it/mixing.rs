//! Sources mixed by shares and images shown by weight: exact, resumable and the same on any number
//! of ranks.

use std::collections::HashMap;
use std::fs;

use crate::support::{World, fails, metrics, ok};

/// Runs a tiny pretraining run on `shards` alone.
fn pretrain(world: &World, workdir: &str, shards: &[&str], more: &[&str]) -> std::process::Output {
    let mut args = world.pretrain_args(workdir, more);
    let at = args.iter().position(|arg| arg == "--shards").unwrap() + 1;
    args.splice(at..=at, shards.iter().map(ToString::to_string));
    world.ocelli(&args.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Every fourth batch position is of the second source, whatever the sizes of the sources, and the
/// metrics say so.
#[test]
fn sources_are_mixed_by_their_shares() {
    let world = World::new(20);
    let few = world.text("few");
    let all = world.text("data/train-000000.tar");
    ok(&world.ocelli(&["shards", "subset", &all, "--count", "3", "--out", &few]));
    let a = format!("many={all}");
    let b = format!("few={few}");
    let both = [a.as_str(), b.as_str()];
    let mix = "data.mix={ many = 3.0, few = 1.0 }";
    let more = ["--set", mix, "--set", "run.log_every_steps=1", "--set", "run.checkpoint_every_steps=1"];
    ok(&pretrain(&world, "run", &both, &more));
    let rows = metrics(&world.path("run"));
    let last = rows.last().unwrap();
    let many = last["data/many"].as_f64().unwrap();
    let few_given = last["data/few"].as_f64().unwrap();
    assert_eq!(many + few_given, last["train/samples"].as_f64().unwrap());
    assert!(few_given > 0.0 && many > few_given, "{many} {few_given}");
    // A run that is killed half way ends as one that is not.
    let fault = ["--inject-fault", "kill:rank=0,step=2,phase=update"];
    assert!(!pretrain(&world, "again", &both, &[&more[..], &fault].concat()).status.success());
    ok(&pretrain(&world, "again", &both, &more));
    let losses = |run: &str| -> Vec<f64> {
        metrics(&world.path(run)).iter().map(|row| row["train/loss"].as_f64().unwrap()).collect()
    };
    assert_eq!(losses("run"), losses("again"));
    // Other shares are another run; shards and shares must fit.
    let even = ["--set", "data.mix={ many = 1.0, few = 1.0 }"];
    let refused = |run: &str, shards: &[&str], more: &[&str]| fails(&pretrain(&world, run, shards, more), 2);
    assert!(refused("run", &both, &even).contains("data.mix"));
    let text = refused("unnamed", &[&all], &even);
    assert!(text.contains("few, many") && text.contains("NAME="), "{text}");
    assert!(refused("missing", &[&a], &even).contains("a source few without shards"));
    let text = refused("shares", &both, &[]);
    assert!(text.contains("--set data.mix.many=0.5"), "{text}");
}

/// A recipe cannot run a command, whatever name stands before it, and names of sources do not hide
/// passwords.
#[test]
fn names_of_sources_hide_nothing() {
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
    assert!(fails(&refused, 2).contains("names a command"));
    assert!(!world.path("ran").exists());
    let name = ["--set", "data.mix={ \"my.web\" = 1.0 }"];
    let text = fails(&pretrain(&world, "x", &["my.web=https://u:secret@h/a.tar"], &name), 2);
    assert!(text.contains("letters, digits, _ and -") && !text.contains("secret"), "{text}");
}

/// Images are shown as their weights say; one that the list does not name is not shown; other
/// weights are another data set.
#[test]
fn weights_are_obeyed() {
    let world = World::new(10);
    let weights = |text: &str| {
        fs::write(world.path("weights.csv"), text).unwrap();
        world.text("weights.csv")
    };
    let list = weights("key,weight\n00000001,1\n00000004,3\n00000009,0\n");
    let set = format!("data.weights={list}");
    let args = ["--set", set.as_str()];
    let first = world.pretrain("run", &args);
    ok(&first);
    let text = String::from_utf8_lossy(&first.stderr);
    assert!(text.contains("7 of 10 images are not in"), "{text}");

    // The order that the run has followed.
    let dataset = pipeline::Dataset::open(&[world.text("data/train-000000.tar")], &world.storage()).unwrap();
    let mut by_id = vec![0.0; 10];
    (by_id[1], by_id[4]) = (1.0, 3.0);
    let sampling = pipeline::Sampling { sources: Vec::new(), weights: Some(by_id) };
    let dataset = dataset.sampled(sampling).unwrap();
    let order = pipeline::Order::of(&dataset, 0, 16);
    let mut counts: HashMap<u64, u64> = HashMap::new();
    (0..4000).for_each(|position| *counts.entry(order.place(position, 0).sample).or_default() += 1);
    assert_eq!(counts.keys().copied().collect::<std::collections::BTreeSet<_>>(), [1, 4].into());
    assert!(counts[&4].abs_diff(3000) <= 100, "{counts:?}");

    // The same weights elsewhere are the same run; others are not.
    fs::rename(world.path("weights.csv"), world.path("moved.csv")).unwrap();
    let moved = format!("data.weights={}", world.text("moved.csv"));
    ok(&world.pretrain("run", &["--set", &moved]));
    weights("key,weight\n00000001,2\n00000004,3\n");
    assert!(fails(&world.pretrain("run", &args), 2).contains("other keys, lengths, order or weights"));
    weights("key,weight\n00000001,heavy\n");
    assert!(fails(&world.pretrain("b", &args), 2).contains("heavy"));
    weights("key,weight\n00000001,-1\n");
    assert!(fails(&world.pretrain("c", &args), 2).contains("a weight is -1"));
    weights("key,weight\nelsewhere,1\n");
    assert!(fails(&world.pretrain("d", &args), 2).contains("names none of the images"));
    weights("key,weight\n00000001,0\n");
    assert!(fails(&world.pretrain("e", &args), 2).contains("no sample of the data set would be shown"));
}
