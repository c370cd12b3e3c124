use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use trainer::checkpoint::Checkpoint;

use crate::finetune::prepare;
use crate::messages::{check_message, lines_with};
use crate::mpirun::{DEADLINE_S, Ranks, mpirun, wait_for_steps};
use crate::support::{World, metrics, ok, wait_for, wait_for_end};

/// Returns the weights of all networks of a run's newest checkpoint.
fn weights(workdir: &Path) -> Vec<Vec<f32>> {
    let checkpoint = Checkpoint::open(workdir).unwrap();
    let units = checkpoint.manifest.units.iter();
    units.map(|unit| checkpoint.buffer(&unit.network, &unit.name).unwrap()).collect()
}

fn losses(workdir: &Path) -> Vec<f64> {
    metrics(workdir).iter().map(|row| row["train/loss"].as_f64().unwrap()).collect()
}

/// Returns the rows of metrics without the columns about ranks.
fn rows(workdir: &Path) -> Vec<serde_json::Value> {
    let mut rows = metrics(workdir);
    for row in &mut rows {
        row.as_object_mut().unwrap().retain(|key, _| !key.starts_with("rank/"));
    }
    rows
}

#[test]
fn mpi_passes_the_conformance_test() {
    let folder = tempfile::tempdir().unwrap();
    for n in 2..=4 {
        for more in [&[][..], &["--max-count", "2000"]] {
            let args: Vec<String> =
                ["doctor", "--fabric"].iter().chain(more).map(ToString::to_string).collect();
            let output = mpirun(n, folder.path(), &args).output().unwrap();
            ok(&output);
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(text.contains(&format!("mpi on {n} ranks: all operations passed")), "{text}");
        }
    }
}

/// One, two and four processes, in every sharding mode, have the same metrics and the same weights,
/// bit for bit.
#[test]
fn weights_are_bit_identical_for_any_number_of_processes() {
    let world = World::new(60);
    let ranks = Ranks::new(&world, &["optim.batch_size=8", "optim.micro_batches=4"]);
    ok(&ranks.run(1, "one", &[]));
    let expected = rows(&world.path("one"));
    let expected_weights = weights(&world.path("one"));
    assert_eq!(expected.len(), 12);
    let units = Checkpoint::open(&world.path("one")).unwrap().manifest.units;
    assert!(units.iter().any(|unit| unit.network == "teacher"), "two networks");
    for (n, workdir, more) in [
        (2, "full2", &[][..]),
        (4, "full4", &["--set", "run.keep=0"]),
        (4, "group4", &["--set", "run.shard_group=2"]),
        (4, "none4", &["--set", "run.shard=\"none\""]),
    ] {
        ok(&ranks.run(n, workdir, more));
        assert_eq!(rows(&world.path(workdir)), expected, "{workdir}");
        assert!(weights(&world.path(workdir)) == expected_weights, "{workdir}: weights differ");
    }
    // Every rank has written its own shards only.
    let manifest = Checkpoint::open(&world.path("full4")).unwrap().manifest;
    assert_eq!((manifest.world_size, manifest.files.len()), (4, 4));
    assert_eq!(Checkpoint::open(&world.path("none4")).unwrap().manifest.files.len(), 1);
}

/// Returns the arguments that train a classifier in the folder `workdir`, with batches that are
/// equal on one, two and four ranks.
fn classifier_args(world: &World, workdir: &str, more: &[&str]) -> Vec<String> {
    let recipe = world.text("alone.toml");
    let shards = world.text("sets/train");
    let workdir = world.text(workdir);
    let mut args = vec!["finetune", "--recipe", &recipe, "--shards", &shards, "--workdir", &workdir];
    for setting in [
        "optim.micro_batches=4",
        "run.workers=1",
        "run.probe_every_steps=3",
        "run.checkpoint_every_steps=2",
        "data.validation=0.25",
        "method.mixup=0.8",
        DEADLINE_S,
    ] {
        args.extend(["--set", setting]);
    }
    args.extend(more);
    args.into_iter().map(str::to_string).collect()
}

/// A classifier that two and four processes train, the first of which validates it, has the
/// metrics, scores and weights of one process, also if a process is killed and others continue.
#[test]
fn classifiers_are_bit_identical_for_any_number_of_processes() {
    let world = prepare();
    let ranks = Ranks::new(&world, &[]);
    ok(&ranks.launch(1, &classifier_args(&world, "one", &[])));
    let expected = rows(&world.path("one"));
    assert_eq!(expected.len(), 12);
    assert!(expected.iter().any(|row| row["val/top1"].is_number()), "{expected:?}");
    let expected_weights = weights(&world.path("one"));
    for n in [2, 4] {
        let workdir = format!("whole{n}");
        ok(&ranks.launch(n, &classifier_args(&world, &workdir, &[])));
        assert_eq!(rows(&world.path(&workdir)), expected, "{n} ranks");
        assert!(weights(&world.path(&workdir)) == expected_weights, "{n} ranks: weights differ");
    }
    let fault = ["--inject-fault", "kill:rank=1,step=7,phase=backward"];
    ranks.launch(2, &classifier_args(&world, "parts", &fault));
    assert_eq!(ranks.code(1), 137);
    ok(&ranks.launch(4, &classifier_args(&world, "parts", &[])));
    assert_eq!(rows(&world.path("parts")), expected);
    assert!(weights(&world.path("parts")) == expected_weights, "weights differ after a resumption");
}

/// A run that is killed in every phase, on three, two and four ranks in turn, and finished on four
/// has the losses of an undisturbed run.
#[test]
fn a_killed_rank_is_named_and_the_run_resumes_on_other_ranks() {
    let world = World::new(60);
    let ranks = Ranks::new(&world, &["run.checkpoint_every_steps=2"]);
    ok(&ranks.run(1, "undisturbed", &[]));
    let expected = losses(&world.path("undisturbed"));
    let phases = ["targets", "forward", "head", "backward", "data", "update", "checkpoint"];
    for (i, phase) in phases.iter().enumerate() {
        let n = [3, 2, 4][i % 3];
        // The fault is always in a step after the newest checkpoint.
        let fault = format!("kill:rank=1,step={},phase={phase}", 2 * i.min(4) + 3);
        let start = Instant::now();
        ranks.run(n, "killed", &["--inject-fault", &fault]);
        assert!(start.elapsed() < Duration::from_secs(20), "{phase}: {:?}", start.elapsed());
        assert_eq!(ranks.code(1), 137, "{phase}");
        for rank in (0..n).filter(|rank| *rank != 1) {
            let stderr = ranks.stderr(rank);
            assert_eq!(ranks.code(rank), 134, "{phase}, rank {rank}: {stderr}");
            assert!(stderr.contains("rank 1 is lost"), "{phase}, rank {rank}: {stderr}");
            assert!(stderr.contains("waits in") && stderr.contains("(number "), "{stderr}");
            let flight = world.path(&format!("killed/flight/rank-{rank:05}.jsonl"));
            let text = std::fs::read_to_string(flight).unwrap();
            assert!(text.lines().last().unwrap().contains("\"took_ms\":null"), "{text}");
        }
    }
    ok(&ranks.run(4, "killed", &[]));
    let resumed = losses(&world.path("killed"));
    assert_eq!(resumed.len(), expected.len());
    for (a, b) in resumed.iter().zip(&expected) {
        assert!((a - b).abs() < 1e-4 * b.abs(), "{resumed:?}\n{expected:?}");
    }
}

/// A rank that hangs ends the run within the deadline, and is named with its position.
#[test]
fn a_hanging_rank_is_named_within_the_deadline() {
    let world = World::new(60);
    let ranks = Ranks::new(&world, &[DEADLINE_S]);
    let mut child = ranks.start(3, "run", &["--inject-fault", "hang:rank=2,step=3,phase=backward"]);
    wait_for("the end of the other ranks", Duration::from_secs(30), || {
        world.path("code-0").exists() && world.path("code-1").exists()
    });
    for rank in [0, 1] {
        let stderr = ranks.stderr(rank);
        assert_eq!(ranks.code(rank), 134, "{stderr}");
        assert!(stderr.contains("rank 2 on") && stderr.contains("in backward of step 3"), "{stderr}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

/// If one rank is asked to stop, all write the same checkpoint and report it.
#[test]
fn a_signal_on_one_rank_stops_all_at_the_same_step() {
    let world = World::new(60);
    let ranks = Ranks::new(&world, &["optim.length={steps=100000}"]);
    for (signal, rank) in [("-TERM", 1), ("-USR2", 2)] {
        let workdir = format!("run{signal}");
        let mut child = ranks.start(3, &workdir, &[]);
        wait_for_steps(&world.path(&workdir), 5);
        let beat = world.path(&workdir).join(format!("heartbeats/rank-{rank:05}.json"));
        let beat: serde_json::Value = serde_json::from_slice(&std::fs::read(beat).unwrap()).unwrap();
        Command::new("kill").args([signal, &beat["pid"].to_string()]).status().unwrap();
        wait_for_end(&mut child);
        for rank in 0..3 {
            assert_eq!(ranks.code(rank), 143, "{signal}: {}", ranks.stderr(rank));
        }
        let newest = Checkpoint::open(&world.path(&workdir)).unwrap();
        assert_eq!(newest.manifest.step as usize, losses(&world.path(&workdir)).len());
    }
}

/// A step with a NaN on one rank is skipped by all; after three in a row, all return to the last
/// checkpoint and skip the batches.
#[test]
fn a_nan_on_one_rank_is_skipped_and_three_roll_back() {
    let world = World::new(60);
    for shard in ["run.shard=\"full\"", "run.shard=\"none\""] {
        let ranks = Ranks::new(&world, &[shard]);
        let name = &shard[11..15];
        ok(&ranks.run(2, &format!("one-{name}"), &["--inject-fault", "nan:rank=1,step=6"]));
        let rows = metrics(&world.path(&format!("one-{name}")));
        let finite: Vec<f64> = rows.iter().map(|row| row["train/finite"].as_f64().unwrap()).collect();
        assert_eq!(finite.iter().position(|f| *f == 0.0), Some(6), "{finite:?}");
        assert_eq!(finite.iter().sum::<f64>(), 11.0);
    }
    let ranks = Ranks::new(&world, &[]);
    ok(&ranks.run(2, "three", &["--inject-fault", "nan:rank=1,step=5,steps=3"]));
    check_message(
        "mpi::a_nan_on_one_rank_is_skipped_and_three_roll_back",
        &lines_with(&ranks.stderr(0), "up to 7"),
    );
    let manifest = Checkpoint::open(&world.path("three")).unwrap().manifest;
    assert_eq!((manifest.step, manifest.skipped_batches), (12, 4));
    assert!(losses(&world.path("three")).iter().all(|loss| loss.is_finite()));
    // The same without a checkpoint to return to.
    ranks.run(2, "early", &["--inject-fault", "nan:rank=0,step=0,steps=3"]);
    assert_eq!((ranks.code(0), ranks.code(1)), (78, 78));
}

/// A recipe that ranks cannot divide, or that differs between ranks, ends all ranks with the
/// reason.
#[test]
fn ranks_that_cannot_start_end_all() {
    let world = World::new(60);
    let ranks = Ranks::new(&world, &["optim.batch_size=8", "optim.micro_batches=0"]);
    ranks.run(3, "uneven", &[]);
    assert!((0..3).all(|rank| ranks.code(rank) == 2), "{}", ranks.stderr(0));
    check_message("mpi::ranks_that_cannot_start_end_all", &ranks.stderr(1));
    let script = "if [ $OMPI_COMM_WORLD_RANK = 1 ]; then x='--set optim.lr=0.5'; fi; exec \"$@\" $x";
    let mut args: Vec<String> = vec!["-c".into(), script.into(), "bash".into()];
    args.push(env!("CARGO_BIN_EXE_ocelli-under-test").into());
    args.extend(ranks.args("differ", &["--set", "run.workers=1"]));
    let output = Command::new("mpirun")
        .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
        .args(["--oversubscribe", "--enable-recovery", "-n", "2", "bash"])
        .args(args)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(stderr.contains("rank 1 differs from rank 0 in optim.lr: 0.5 there"), "{stderr}");
}

/// A failure on one rank, here of the probe on the first, ends all at once, with a checkpoint.
#[test]
fn a_probe_that_fails_ends_all() {
    let world = World::new(60);
    let broken = world.path("broken.tar");
    let mut tar = tar::Builder::new(std::fs::File::create(&broken).unwrap());
    for (name, bytes) in [("0.jpg", &b"no image"[..]), ("0.cls", b"1")] {
        let mut header = tar::Header::new_ustar();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, name, bytes).unwrap();
    }
    tar.into_inner().unwrap();
    let ranks = Ranks::new(&world, &["run.probe_every_steps=3"]);
    let broken = broken.to_str().unwrap();
    ranks.run(2, "run", &["--probe-train", broken, "--probe-test", broken]);
    assert_eq!((ranks.code(0), ranks.code(1)), (3, 3), "{}\n{}", ranks.stderr(0), ranks.stderr(1));
    assert!(ranks.stderr(0).contains("probe"), "{}", ranks.stderr(0));
    check_message("mpi::a_probe_that_fails_ends_all", &ranks.stderr(1));
    // The probe precedes the first step; the ranks vote on the first batch.
    assert!(trainer::checkpoint::steps(&world.path("run/checkpoints")).is_empty(), "no step is taken");
}

/// A slow rank is named.
#[test]
fn a_straggler_is_named() {
    let world = World::new(60);
    let ranks = Ranks::new(&world, &["optim.length={steps=5}"]);
    ok(&ranks.run(2, "run", &["--inject-fault", "slow:rank=1,step=2,phase=data"]));
    // On a busy machine another rank may be slow too, and only the first warning is printed.
    let warnings = std::fs::read_to_string(world.path("run/warnings.jsonl")).unwrap();
    assert!(warnings.contains("rank 1 slows the others down"), "{warnings}");
    assert!(ranks.stderr(0).contains("slows the others down"), "{}", ranks.stderr(0));
}

/// Measures a step of four ranks with a limit on the memory of each. The model has 68 million
/// parameters: 16 bytes each are 1.1 GB, a third of the peak of an unsharded rank.
fn bench_with_memory_limit(world: &World, limit_kb: u64, shard: &str) -> Output {
    let tiny = world.text("tiny.toml");
    let mut args = vec!["bench", "shard", "--as-set", "--json", "--repeats", "1", "--recipe", &tiny];
    let sizes = ["method.head_hidden=8192", "optim.batch_size=4", "run.workers=1", shard];
    args.extend(sizes.iter().flat_map(|entry| ["--set", entry]));
    let script = format!("ulimit -d {limit_kb}; exec \"$@\"");
    Command::new("mpirun")
        .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
        // The limit counts all writable memory: by default the allocator requests a gigabyte at a
        // time.
        .env("MIMALLOC_ARENA_EAGER_COMMIT", "0")
        .args(["--oversubscribe", "-n", "4", "bash", "-c", &script, "bash"])
        .arg(env!("CARGO_BIN_EXE_ocelli-under-test"))
        .args(args)
        .output()
        .unwrap()
}

/// Asserts that the peak of the memory of a rank is within 10 % of the planned one; returns it in
/// bytes.
fn assert_peak_is_as_planned(row: &serde_json::Value) -> f64 {
    let peak = number(row, "peak_bytes");
    let planned = number(row, "planned_peak_bytes");
    assert!((peak - planned).abs() < 0.1 * planned, "peak {peak}, planned {planned}: {row}");
    peak
}

/// Four ranks train a model within a limit on their memory that is too low for one rank; and the
/// memory of each rank is that estimated by `plan`.
#[test]
fn four_ranks_fit_into_memory_that_is_too_small_for_one() {
    let world = World::new(60);
    let limit_kb = 1_600_000;
    let output = bench_with_memory_limit(&world, limit_kb, "run.shard=\"full\"");
    ok(&output);
    let text = String::from_utf8(output.stdout).unwrap();
    let row: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    let row = &row["modes"][0];
    let state = number(row, "state_bytes");
    let planned = number(row, "planned_state_bytes");
    assert!((state - planned).abs() < 0.02 * planned, "state {state}, planned {planned}");
    assert_peak_is_as_planned(row);
    let unsharded = bench_with_memory_limit(&world, limit_kb, "run.shard=\"none\"");
    assert!(!unsharded.status.success(), "the limit does not bind");
    assert!(String::from_utf8_lossy(&unsharded.stderr).contains("memory allocation"), "{unsharded:?}");
}

/// Prototypes that are divided among ranks have the same loss as undivided ones up to rounding, the
/// same bits on 2 and 4 ranks, and less memory and traffic, as planned.
#[test]
fn ranks_divide_prototypes() {
    divide_prototypes(&["method.prototypes=256"], &["method.prototypes=131072", "method.head_bottleneck=64"]);
}

/// Returns the setting of a method with prototypes of masked patches.
fn dinov2_setting(prototypes: usize, bottleneck: usize) -> String {
    format!(
        "method={{name='dinov2',prototypes={prototypes},head_hidden=32,head_bottleneck={bottleneck},\
         patch_head={{prototypes={prototypes},hidden=32,bottleneck={bottleneck}}},\
         teacher_temp=[0.04,0.07],teacher_temp_warmup={{percent=50}},centering='sinkhorn'}}"
    )
}

/// Prototypes of masked patches, and those whose lengths are trained.
#[test]
fn ranks_divide_prototypes_of_masked_patches() {
    let views = "views={preset='dinov2',global_px=16,local_px=8,n_local=2}";
    divide_prototypes(&[&dinov2_setting(256, 16), views], &[&dinov2_setting(65536, 64), views]);
}

/// Trains with the settings `small`, with undivided and with divided prototypes, and measures steps
/// with the settings `large`, which have 34 MB of prototypes: every model takes a few MB more than
/// planned, which is much for a small one.
fn divide_prototypes(small: &[&str], large: &[&str]) {
    let world = World::new(60);
    let ranks = Ranks::new(&world, &[&["optim.batch_size=8", "optim.micro_batches=4"], small].concat());
    ok(&ranks.run(1, "whole", &[]));
    let divided = ["--set", "method.prototype_group=2"];
    ok(&ranks.run(2, "two", &divided));
    ok(&ranks.run(4, "four", &divided));
    assert_eq!(rows(&world.path("two")), rows(&world.path("four")));
    assert_eq!(weights(&world.path("two")), weights(&world.path("four")));
    let whole = losses(&world.path("whole"));
    let two = losses(&world.path("two"));
    assert!(whole != two, "nothing was divided");
    assert!((whole[0] - two[0]).abs() < 1e-5 * whole[0], "{} {}", whole[0], two[0]);

    // A run resumes with another size of groups, and reports that.
    let stderr = String::from_utf8(ranks.run(2, "two", &[]).stderr).unwrap() + &ranks.stderr(0);
    check_message("mpi::divide_prototypes", &lines_with(&stderr, "method.prototype_group 2"));

    let whole = bench_shard(&world, &[large, &["method.prototype_group=1"]].concat());
    let parts = bench_shard(&world, &[large, &["method.prototype_group=4"]].concat());
    let whole_peak = assert_peak_is_as_planned(&whole);
    let parts_peak = assert_peak_is_as_planned(&parts);
    assert!(parts_peak < 0.8 * whole_peak, "{whole} {parts}");
    for key in ["gather_bytes", "reduce_bytes"] {
        assert!(number(&parts, key) < 0.5 * number(&whole, key), "{key}: {whole} {parts}");
    }
    let a = number(&whole, "loss");
    let b = number(&parts, "loss");
    assert!((a - b).abs() < 1e-5 * a, "{a} {b}");
}

/// Measures a step of four ranks with these settings. The ranks recompute all units unless a
/// setting changes that.
fn bench_shard(world: &World, sets: &[&str]) -> serde_json::Value {
    let tiny = world.text("tiny.toml");
    let sets = [&["optim.batch_size=8", "run.workers=1", "run.keep=0"], sets].concat();
    let mut args = vec!["bench", "shard", "--as-set", "--json", "--repeats", "1", "--recipe", &tiny];
    args.extend(sets.iter().flat_map(|entry| ["--set", entry]));
    let args: Vec<String> = args.iter().map(ToString::to_string).collect();
    let output = mpirun(4, &world.path(""), &args).output().unwrap();
    ok(&output);
    let text = String::from_utf8(output.stdout).unwrap();
    let row: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    row["modes"][0].clone()
}

/// The plan includes weights of kept units and gradients in transfer, which are most of the memory
/// here.
#[test]
fn kept_weights_are_planned() {
    let world = World::new(60);
    // 45 MB of parameters, 34 of them in two units.
    let model = "model={arch='resnet',depth=18,image_px=16,stem='small'}";
    for keep in [0, 1, 4, 9] {
        let row = bench_shard(&world, &[model, &format!("run.keep={keep}")]);
        let peak = number(&row, "peak_bytes");
        let planned = number(&row, "planned_peak_bytes");
        assert!((peak - planned).abs() < 0.1 * planned, "{keep}: peak {peak}, planned {planned}");
    }
}

fn number(row: &serde_json::Value, key: &str) -> f64 {
    row[key].as_f64().unwrap()
}

/// Units that are divided have the same loss, the same bits on any number of ranks, and less
/// memory. A rank holds no gathered unit after the unit has run.
#[test]
fn ranks_gather_parts_of_units() {
    let world = World::new(60);
    let network = "model={arch='resnet',depth=14,width=16,image_px=16,stem='small'}";
    let ranks = Ranks::new(&world, &["optim.batch_size=8", "optim.micro_batches=4", network]);
    ok(&ranks.run(1, "whole", &[]));
    let divided = ["--set", "run.max_unit_parameters=20000"];
    ok(&ranks.run(1, "one", &divided));
    ok(&ranks.run(4, "four", &divided));
    assert_eq!(rows(&world.path("one")), rows(&world.path("four")));
    assert_eq!(weights(&world.path("one")), weights(&world.path("four")));
    let whole = losses(&world.path("whole"));
    let four = losses(&world.path("four"));
    assert!((whole[0] - four[0]).abs() < 1e-5 * whole[0], "{} {}", whole[0], four[0]);

    // A run resumes with another bound, and reports that.
    let stderr = String::from_utf8(ranks.run(4, "four", &[]).stderr).unwrap() + &ranks.stderr(0);
    check_message("mpi::ranks_gather_parts_of_units", &lines_with(&stderr, "run.max_unit_parameters 20000"));
    ranks.run(2, "small", &["--set", "run.max_unit_parameters=9"]);
    let stderr = ranks.stderr(0);
    assert!(stderr.contains("run.max_unit_parameters 9: unit"), "{stderr}");

    let network = "model={arch='resnet',depth=10,width=96,image_px=16,stem='small'}";
    let whole = bench_shard(&world, &[network]);
    let parts = bench_shard(&world, &[network, "run.max_unit_parameters=200000"]);
    let peak = assert_peak_is_as_planned(&parts);
    assert!(peak < 0.6 * number(&whole, "peak_bytes"), "{whole} {parts}");
    let a = number(&whole, "loss");
    let b = number(&parts, "loss");
    assert!((a - b).abs() < 1e-4 * a, "{a} {b}");
}
