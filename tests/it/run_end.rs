//! The end of a run: scores from the first to the last, the export, and the commands that come
//! next; and a start that has lost the probes of earlier ones.

use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::messages::{check_message, lines_with};
use crate::support::{World, fails, json_of, ok, wait_for};

/// Flags of a probe on the world's shard, every four steps.
fn probe_flags(world: &World) -> [String; 6] {
    let shard = world.text("data/train-000000.tar");
    let every = "run.probe_every_steps=4".to_string();
    ["--probe-train".into(), shard.clone(), "--probe-test".into(), shard, "--set".into(), every]
}

/// Returns the commands that a run has typed out at its end.
fn next_commands(stderr: &str) -> Vec<String> {
    let lines = stderr.lines().skip_while(|line| *line != "next:").skip(1);
    lines.take_while(|line| line.starts_with("  ")).map(|line| line.trim().to_string()).collect()
}

/// The commands are complete: each runs as it stands.
#[test]
fn commands_that_come_next_run_unchanged() {
    let world = World::new(60);
    let names = ["report", "export", "embed", "probe"];
    let stderr = ok(&world.pretrain("my run", &["--set", "optim.length={steps=2}"]));
    let mut commands = next_commands(&stderr);
    assert_eq!(commands.len(), 4, "{stderr}");
    let probe: Vec<String> = probe_flags(&world)[..4].to_vec();
    let flags: Vec<&str> = probe.iter().map(String::as_str).collect();
    let probed = ok(&world.pretrain("probed", &[&flags[..], &["--set", "optim.length={steps=2}"]].concat()));
    commands.extend(next_commands(&probed));
    assert_eq!(commands.len(), 8, "{probed}");
    for (index, command) in commands.iter().enumerate() {
        assert!(command.contains(&format!(" {} ", names[index % 4])), "{command}");
        let output = Command::new("bash")
            .args(["-c", command])
            .env("OCELLI_CACHE", world.path("cache"))
            .env("OCELLI_FEATURES_GB", "0")
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command}\n{stderr}");
    }
    assert!(commands[3].contains("--leave-one-out") && commands[7].contains("--train"), "{commands:#?}");
    assert!(world.path("my run/features.npy").exists() && world.path("my run/export-timm").is_dir());
}

/// Returns the bytes of a file of the world.
fn bytes(world: &World, path: &str) -> Vec<u8> {
    std::fs::read(world.path(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn a_run_exports_its_backbone_as_export_does() {
    let world = World::new(24);
    let run = world.text("run");
    for (format, file, exported) in [
        ("timm", "export-timm/model.safetensors", "timm/model.safetensors"),
        ("dinov2", "export-dinov2/backbone.pth", "dinov2.pth"),
        ("onnx", "export-onnx/backbone.onnx", "a.onnx"),
        ("safetensors", "export-safetensors/backbone.safetensors", "a.safetensors"),
    ] {
        // After the first format the run has ended, and only its export is new.
        let more = ["--set", "optim.length={steps=2}", "--export", format, "--json"];
        let output = world.pretrain("run", &more);
        let stderr = ok(&output);
        assert!(next_commands(&stderr).iter().all(|command| !command.contains(" export ")), "{stderr}");
        let path = json_of(&output)["export"].as_str().unwrap().to_string();
        assert!(world.path("run").join(file).starts_with(&path), "{path}");
        let out = exported.split('/').next().unwrap();
        let out = world.text(out);
        ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &out, "--format", format]));
        assert!(bytes(&world, &format!("run/{file}")) == bytes(&world, exported), "{format}");
    }
    // The same command again replaces its own export.
    ok(&world.pretrain("run", &["--set", "optim.length={steps=2}", "--export", "timm"]));
    // A format that cannot hold the network is refused before anything is written.
    let output = world.pretrain("other", &["--export", "dinov3"]);
    check_message("run_end::a_run_exports_its_backbone_as_export_does.refused", &fails(&output, 2));
    assert!(!world.path("other").exists());
}

/// Scores are told from the first, before training, to the last: at the end of the run, in the list
/// of runs and on the page.
#[test]
fn scores_are_told_from_the_first_to_the_last() {
    let world = World::new(40);
    ok(&world.pretrain("first", &["--set", "optim.length={steps=2}"]));
    let first = world.text("first");
    let probe = probe_flags(&world);
    let mut more: Vec<&str> = probe.iter().map(String::as_str).collect();
    more.extend(["--init", &first]);
    let stderr = ok(&world.pretrain("run", &more));
    let said = lines_with(&stderr, "scores:");
    assert!(said.starts_with("scores: k-NN (20) ") && said.contains(" % at the start, "), "{said}");
    assert!(said.contains("last ") && said.ends_with(" % at step 12"), "{said}");

    let run = world.text("run");
    let row = json_of(&world.ocelli(&["runs", &run, "--json"]))[0].clone();
    let best = &row["best"];
    assert_eq!((&best["first"]["step"], &best["last"]["step"]), (&0.into(), &12.into()), "{best}");
    assert_eq!(format!("scores: {}", best["words"].as_str().unwrap()), said);
    let values = [&best["first"]["value"], &best["value"], &best["last"]["value"]];
    let values = values.map(|value| format!("{:.1}", value.as_f64().unwrap()));
    assert_eq!(best["course"], values.join(" → "));
    let table = world.ocelli(&["runs", &run]);
    ok(&table);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(table.contains(&format!("knn_20 {}", values.join(" → "))), "{table}");
    let page = std::fs::read_to_string(world.path("run/report.html")).unwrap();
    let (_, data) = page.split_once(r#"<script type="application/json" id="data">"#).unwrap();
    let data: Value = serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap();
    assert_eq!(data["runs"][0]["overview"]["best"], *best);
}

/// A run that is stopped tells its last score.
#[test]
fn a_stopped_run_tells_its_last_score() {
    let world = World::new(40);
    let probe = probe_flags(&world);
    let mut more: Vec<&str> = probe.iter().map(String::as_str).collect();
    more.extend(["--set", "optim.length={steps=4000}"]);
    let child = Command::new(env!("CARGO_BIN_EXE_ocelli-under-test"))
        .args(world.pretrain_args("run", &more))
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let evaluations = world.path("run/evaluations.jsonl");
    wait_for("a score", Duration::from_secs(120), || {
        std::fs::metadata(&evaluations).is_ok_and(|file| file.len() > 0)
    });
    Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(143), "{stderr}");
    assert!(lines_with(&stderr, "scores:").starts_with("scores: k-NN (20) "), "{stderr}");
}

#[test]
fn a_resume_without_the_probes_of_earlier_starts_warns() {
    let world = World::new(40);
    let probe = probe_flags(&world);
    let with_probe: Vec<&str> = probe[..4].iter().map(String::as_str).collect();
    let begun = ok(&world.pretrain("run", &[&with_probe[..], &["--set", "optim.length={steps=4}"]].concat()));
    assert!(!begun.contains("scored it"), "{begun}");
    let longer = ["--lengthen", "--set", "optim.length={steps=8}"];
    let stderr = ok(&world.pretrain("run", &longer));
    check_message(
        "run_end::a_resume_without_the_probes_of_earlier_starts_warns",
        &lines_with(&stderr, "earlier start"),
    );
    // The flags that it types out are those that continue the scores.
    let longer = ["--lengthen", "--set", "optim.length={steps=12}"];
    let stderr = ok(&world.pretrain("run", &[&longer[..], &with_probe[..]].concat()));
    assert!(!stderr.contains("earlier start"), "{stderr}");
    assert!(lines_with(&stderr, "scores:").ends_with("at step 12"), "{stderr}");
}
