use std::process::{Command, Output};

use crate::messages::check_message;
use crate::support::{World, fails, metrics, ok, without_sidecar};
use pipeline::shard::sidecar;
use pipeline::{PipelineError, Share};

#[test]
fn a_missing_shard_is_named() {
    let world = World::new(1);
    let output = world.pretrain("run", &["--shards", "nowhere/x-{0..1}.tar"]);
    check_message("bad_input::a_missing_shard_is_named.pretrain", &fails(&output, 2));
    let output = world.ocelli(&["shards", "verify", "nowhere/x-{0..1}.tar"]);
    check_message("bad_input::a_missing_shard_is_named.verify", &fails(&output, 2));
}

/// A path that does not exist is an error of the command line, whichever flag names it, and not of
/// the data: a scheduler may start a run with damaged data again, but not a misspelled one.
#[test]
fn missing_paths_are_errors_of_the_command_line() {
    let world = World::new(4);
    world.extract("files");
    let shard = world.text("data/train-000000.tar");
    let recipe = world.text("tiny.toml");
    let commands = [
        "shards ls GONE.tar",
        "shards verify GONE",
        "shards stats GONE*.tar",
        "shards index GONE.parquet",
        "shards pack GONE --out OUT",
        "shards pack GONE.csv --urls --out OUT",
        "shards pack FILES --classes GONE.txt --out OUT",
        "shards subset SHARD --keys GONE.txt --out OUT",
        "shards dedup SHARD --against GONE.tar --out OUT",
        "pretrain --recipe GONE.toml --shards SHARD --workdir OUT",
        "pretrain --recipe RECIPE --shards GONE.tar --workdir OUT",
        "pretrain --recipe RECIPE --shards SHARD --workdir OUT --init GONE.pth",
        "pretrain --recipe RECIPE --shards SHARD --workdir OUT --fork GONE",
        "embed --checkpoint GONE --shards SHARD --out OUT.npy",
        "export --checkpoint GONE.pth --out OUT.onnx",
        "probe --checkpoint GONE --train SHARD --test SHARD",
        "curate outliers --features GONE.npy --out OUT",
        "curate outliers --checkpoint GONE --shards SHARD --out OUT",
        "report GONE",
        "runs GONE",
        "plan --recipe GONE.toml",
    ];
    for (i, command) in commands.iter().enumerate() {
        let command = command.replace("SHARD", &shard).replace("FILES", &world.text("files"));
        let command = command.replace("RECIPE", &recipe).replace("GONE", &world.text("gone"));
        let command = command.replace("OUT", &world.text(&format!("out-{i}")));
        let args: Vec<&str> = command.split(' ').collect();
        let stderr = fails(&world.ocelli(&args), 2);
        assert!(stderr.contains("gone"), "{command}: {stderr}");
    }
    // A file that exists and cannot be used is data.
    std::fs::write(world.path("text.pth"), "no weights").unwrap();
    fails(&world.ocelli(&["export", "--checkpoint", &world.text("text.pth"), "--out", "x.onnx"]), 3);
}

#[test]
fn a_truncated_tar_names_the_member() {
    let world = World::new(20);
    let bytes = std::fs::read(world.shard()).unwrap();
    std::fs::write(world.shard(), &bytes[..bytes.len() / 2]).unwrap();
    check_message("bad_input::a_truncated_tar_names_the_member", &fails(&world.pretrain("run", &[]), 3));
}

#[test]
fn a_file_that_is_not_a_tar_is_named() {
    let world = World::new(1);
    std::fs::write(world.shard(), "not a tar at all ".repeat(100)).unwrap();
    check_message("bad_input::a_file_that_is_not_a_tar_is_named", &fails(&world.pretrain("run", &[]), 3));
}

#[test]
fn a_tar_without_images_is_refused() {
    let world = World::new(1);
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(1);
    builder.append_data(&mut header, "a.txt", &b"x"[..]).unwrap();
    std::fs::write(world.shard(), builder.into_inner().unwrap()).unwrap();
    check_message("bad_input::a_tar_without_images_is_refused", &fails(&world.pretrain("run", &[]), 3));
    std::fs::create_dir(world.path("empty")).unwrap();
    let args = ["shards", "pack", &world.text("empty"), "--out", &world.text("out")];
    check_message("bad_input::a_tar_without_images_is_refused.folder", &fails(&world.ocelli(&args), 3));
}

/// An image whose header states 60,000 x 60,000 pixels is recorded in the ledger and replaced, and
/// the run continues; with a limit of zero bad samples the run stops and names it.
#[test]
fn an_image_with_a_false_size_is_recorded_in_the_ledger() {
    let world = World::new(30);
    let mut bytes = std::fs::read(world.shard()).unwrap();
    let index = sidecar::build(&world.shard()).unwrap();
    let member = index.member(4, &["jpg"]).unwrap();
    let image = &mut bytes[member.offset_bytes as usize..(member.offset_bytes + member.len_bytes) as usize];
    // The frame header of a baseline JPEG: marker, length, precision, height, width.
    let frame = image.windows(2).position(|w| w == [0xff, 0xc0]).unwrap();
    image[frame + 5..frame + 9].copy_from_slice(&[0xea, 0x60, 0xea, 0x60]);
    std::fs::write(world.shard(), bytes).unwrap();
    // The damaged shard is indexed again, so only the decoder can detect it.
    std::fs::remove_file(sidecar::path_of(&world.shard())).unwrap();
    ok(&world.pretrain("run", &[]));
    let ledger = std::fs::read_to_string(world.path("run/quarantine.jsonl")).unwrap();
    assert_eq!(ledger.lines().count(), 1);
    assert!(ledger.contains("60000 x 60000") && ledger.contains("00000004"), "{ledger}");
    let stderr = fails(&world.pretrain("strict", &["--set", "data.max_bad_rate=0.0"]), 3);
    assert!(stderr.contains("sample 00000004") && stderr.contains("quarantine.jsonl"), "{stderr}");
}

/// The limit of bad samples applies from the first hundred samples on: of few images, four
/// unreadable ones are too many.
#[test]
fn a_few_images_with_many_bad_ones_stop_a_run() {
    let world = World::new(37);
    let files = world.path("files");
    ok(&world.ocelli(&[
        "shards",
        "extract",
        &world.text("data/train-000000.tar"),
        "--out",
        &world.text("files"),
    ]));
    let mut images = crate::embed::walk(&files);
    images.sort();
    for path in &images[..4] {
        std::fs::write(path, b"no image").unwrap();
    }
    let shards = ["--shards", &world.text("files"), "--set", "optim.length={epochs=2}"];
    let stderr = fails(&world.pretrain("run", &shards), 3);
    assert!(stderr.contains(" 1 %") && stderr.contains("data.max_bad_rate"), "{stderr}");
    ok(&world.pretrain("loose", &[shards.as_slice(), &["--set", "data.max_bad_rate=0.2"]].concat()));
}

#[test]
fn a_misspelled_key_names_the_nearest_one() {
    let world = World::new(1);
    let recipe = std::fs::read_to_string(world.path("tiny.toml")).unwrap();
    std::fs::write(world.path("tiny.toml"), recipe.replace("\nwarmup =", "\nwarmpu =")).unwrap();
    check_message(
        "bad_input::a_misspelled_key_names_the_nearest_one.file",
        &fails(&world.pretrain("run", &[]), 2),
    );
    std::fs::write(world.path("tiny.toml"), recipe).unwrap();
    let output = world.pretrain("run", &["--set", "model.widht=8"]);
    check_message("bad_input::a_misspelled_key_names_the_nearest_one.flag", &fails(&output, 2));
    let output = world.ocelli(&["pretrain", "--recipe", "dino_vits61", "--workdir", "x"]);
    assert!(fails(&output, 2).contains("dino_vits16"));
}

#[test]
fn a_batch_that_does_not_divide_is_refused() {
    let world = World::new(1);
    assert!(fails(&world.pretrain("run", &["--set", "optim.batch_size=0"]), 2).contains("optim.batch_size"));
    let output = world.pretrain("run", &["--set", "model.heads=3"]);
    check_message("bad_input::a_batch_that_does_not_divide_is_refused.heads", &fails(&output, 2));
    let stderr = fails(&world.pretrain("run", &["--set", "model.patch_px=3"]), 2);
    assert!(stderr.contains("model.patch_px 3"), "{stderr}");
    let error = Share::new(0, 3, 8).unwrap_err();
    assert!(matches!(error, PipelineError::UnevenShare { batch_size: 8, world_size: 3 }), "{error}");
}

/// Values that would otherwise do silent harm, such as a negative clip norm, which reverses the
/// gradient.
#[test]
fn values_out_of_range_name_their_key() {
    let world = World::new(1);
    for (set, key) in [
        ("optim.clip_norm=-1.0", "optim.clip_norm"),
        ("optim.betas=[0.9,1.0]", "optim.betas"),
        ("optim.lr=nan", "optim.lr"),
        ("method.teacher_temp=[-0.04,-0.04]", "method.teacher_temp"),
        ("data.max_bad_rate=nan", "data.max_bad_rate"),
        ("model.init_std=inf", "model.init_std"),
        ("run.workers=1000000", "run.workers"),
        ("views.local_px=16", "views.local_px"),
    ] {
        let stderr = fails(&world.pretrain("run", &["--set", set]), 2);
        assert!(stderr.contains(key), "{set}: {stderr}");
    }
    assert!(!world.path("run").exists(), "no folder is created for a recipe that is refused");
}

/// Asserts that `shards verify` reports the shard of the world as truncated, in the words of the
/// section `name`.
fn assert_verify_reports_truncation(world: &World, name: &str) {
    let verify = world.ocelli(&["shards", "verify", &world.text("data/train-000000.tar")]);
    let stderr = String::from_utf8_lossy(&verify.stderr).into_owned();
    assert_eq!(verify.status.code(), Some(3), "{stderr}");
    check_message(name, &stderr);
}

/// A tar that was cut exactly between two members has complete headers, but no end.
#[test]
fn a_tar_cut_between_members_is_detected() {
    let world = World::new(30);
    let index = sidecar::open(&world.shard()).unwrap();
    let cut = index.members(20).next().unwrap().offset_bytes - 512;
    std::fs::File::options().write(true).open(world.shard()).unwrap().set_len(cut).unwrap();
    check_message(
        "bad_input::a_tar_cut_between_members_is_detected.pretrain",
        &fails(&world.pretrain("run", &[]), 3),
    );
    assert_verify_reports_truncation(&world, "bad_input::a_tar_cut_between_members_is_detected.with_index");
    // Also without its index, and cut within the padding of a member.
    without_sidecar(&world);
    for (place, len) in [("between_members", cut), ("in_padding", cut - 3)] {
        std::fs::File::options().write(true).open(world.shard()).unwrap().set_len(len).unwrap();
        assert_verify_reports_truncation(
            &world,
            &format!("bad_input::a_tar_cut_between_members_is_detected.{place}"),
        );
    }
}

#[test]
fn a_workdir_of_another_recipe_is_refused_and_not_changed() {
    let world = World::new(30);
    ok(&world.pretrain("run", &[]));
    let before = metrics(&world.path("run"));
    let output = world.pretrain("run", &["--set", "optim.lr=0.5"]);
    check_message("bad_input::a_workdir_of_another_recipe_is_refused_and_not_changed", &fails(&output, 2));
    assert_eq!(metrics(&world.path("run")), before);
    // Settings that do not affect the result may change.
    ok(&world.pretrain("run", &["--set", "run.log_every_steps=5"]));
}

/// Runs a tiny pretraining run in bash, after the command `limit`.
fn pretrain_with_limit(world: &World, limit: &str) -> Output {
    let program = env!("CARGO_BIN_EXE_ocelli-under-test");
    let args = world.pretrain_args("run", &[]);
    let quoted: Vec<String> = args.iter().map(|arg| format!("'{arg}'")).collect();
    let script = format!("trap '' XFSZ; {limit} exec '{program}' {}", quoted.join(" "));
    Command::new("bash").args(["-c", &script]).output().unwrap()
}

/// A disk that is full while a checkpoint is written, simulated by a limit on file size: the error
/// names the checkpoint, no incomplete one is left, and the run can be started again.
#[test]
fn a_full_disk_leaves_no_incomplete_checkpoint() {
    let world = World::new(30);
    let more = ["--set", "optim.length={steps=4}"];
    ok(&world.pretrain("size", &more));
    let file = world.path("size/checkpoints/step-0000000004/rank-00000.safetensors");
    let blocks = std::fs::metadata(file).unwrap().len() / 1024 - 1;
    let output = pretrain_with_limit(&world, &format!("ulimit -f {blocks};"));
    check_message("bad_input::a_full_disk_leaves_no_incomplete_checkpoint", &fails(&output, 3));
    let left: Vec<_> = std::fs::read_dir(world.path("run/checkpoints")).unwrap().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
    ok(&pretrain_with_limit(&world, ""));
    assert_eq!(metrics(&world.path("run")).len(), 12);
}

#[test]
fn a_run_whose_loss_is_not_finite_stops_with_78() {
    let world = World::new(30);
    let output = world.pretrain("run", &["--set", "method.teacher_temp=[1e-45,1e-45]"]);
    check_message("bad_input::a_run_whose_loss_is_not_finite_stops_with_78", &fails(&output, 78));
}

#[test]
fn a_folder_without_a_checkpoint_is_named() {
    let world = World::new(1);
    let shard = world.text("data/train-000000.tar");
    let args = ["probe", "--checkpoint", &world.text("data"), "--train", &shard, "--test", &shard];
    check_message("bad_input::a_folder_without_a_checkpoint_is_named", &fails(&world.ocelli(&args), 3));
}
