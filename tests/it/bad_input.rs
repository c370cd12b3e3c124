use std::process::{Command, Output};

use crate::support::{World, fails, metrics, ok, without_sidecar};
use pipeline::shard::sidecar;

#[test]
fn a_missing_shard_is_named() {
    let world = World::new(1);
    let output = world.pretrain("run", &["--shards", "nowhere/x-{0..1}.tar"]);
    assert!(fails(&output, 3).contains("nowhere/x-0.tar does not exist"));
    let output = world.ocelli(&["shards", "verify", "nowhere/x-{0..1}.tar"]);
    assert!(fails(&output, 3).contains("nowhere/x-0.tar does not exist"));
}

#[test]
fn a_truncated_tar_names_the_member() {
    let world = World::new(20);
    let bytes = std::fs::read(world.shard()).unwrap();
    std::fs::write(world.shard(), &bytes[..bytes.len() / 2]).unwrap();
    let stderr = fails(&world.pretrain("run", &[]), 3);
    assert!(
        stderr.contains("train-000000.tar is truncated: member ") && stderr.contains("bytes"),
        "{stderr}"
    );
}

#[test]
fn a_file_that_is_not_a_tar_is_named() {
    let world = World::new(1);
    std::fs::write(world.shard(), "not a tar at all ".repeat(100)).unwrap();
    let stderr = fails(&world.pretrain("run", &[]), 3);
    assert!(stderr.contains("train-000000.tar is not a tar file"), "{stderr}");
}

#[test]
fn a_tar_without_images_is_refused() {
    let world = World::new(1);
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(1);
    builder.append_data(&mut header, "a.txt", &b"x"[..]).unwrap();
    std::fs::write(world.shard(), builder.into_inner().unwrap()).unwrap();
    let stderr = fails(&world.pretrain("run", &[]), 3);
    assert!(stderr.contains("no samples") && stderr.contains("jpg"), "{stderr}");
    std::fs::create_dir(world.path("empty")).unwrap();
    let args = ["shards", "pack", &world.text("empty"), "--out", &world.text("out")];
    assert!(fails(&world.ocelli(&args), 3).contains("no image in"));
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
    assert!(stderr.contains("above the limit of 1 %") && stderr.contains("data.max_bad_rate"), "{stderr}");
    ok(&world.pretrain("loose", &[shards.as_slice(), &["--set", "data.max_bad_rate=0.2"]].concat()));
}

#[test]
fn a_misspelled_key_names_the_nearest_one() {
    let world = World::new(1);
    let recipe = std::fs::read_to_string(world.path("tiny.toml")).unwrap();
    std::fs::write(world.path("tiny.toml"), recipe.replace("\nwarmup =", "\nwarmpu =")).unwrap();
    let stderr = fails(&world.pretrain("run", &[]), 2);
    assert!(stderr.contains("warmpu") && stderr.contains("did you mean warmup?"), "{stderr}");
    std::fs::write(world.path("tiny.toml"), recipe).unwrap();
    let stderr = fails(&world.pretrain("run", &["--set", "model.widht=8"]), 2);
    assert!(stderr.contains("did you mean width?"), "{stderr}");
    let output = world.ocelli(&["pretrain", "--recipe", "dino_vits61", "--workdir", "x"]);
    assert!(fails(&output, 2).contains("dino_vits16"));
}

#[test]
fn a_batch_that_does_not_divide_is_refused() {
    let world = World::new(1);
    assert!(fails(&world.pretrain("run", &["--set", "optim.batch_size=0"]), 2).contains("optim.batch_size"));
    let stderr = fails(&world.pretrain("run", &["--set", "model.heads=3"]), 2);
    assert!(stderr.contains("model.width 32 is not divisible by model.heads 3"), "{stderr}");
    let stderr = fails(&world.pretrain("run", &["--set", "model.patch_px=3"]), 2);
    assert!(stderr.contains("model.patch_px 3"), "{stderr}");
    let error = pipeline::Share::new(0, 3, 8).unwrap_err().to_string();
    assert!(error.contains("8 samples is not divisible by 3 ranks"), "{error}");
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

/// Asserts that `shards verify` reports the shard of the world as truncated.
fn assert_verify_reports_truncation(world: &World) {
    let verify = world.ocelli(&["shards", "verify", &world.text("data/train-000000.tar")]);
    let stderr = String::from_utf8_lossy(&verify.stderr).into_owned();
    assert_eq!(verify.status.code(), Some(3), "{stderr}");
    assert!(stderr.starts_with("bad: shard ") && stderr.contains("truncated"), "{stderr}");
}

/// A tar that was cut exactly between two members has complete headers, but no end.
#[test]
fn a_tar_cut_between_members_is_detected() {
    let world = World::new(30);
    let index = sidecar::open(&world.shard()).unwrap();
    let cut = index.members(20).next().unwrap().offset_bytes - 512;
    std::fs::File::options().write(true).open(world.shard()).unwrap().set_len(cut).unwrap();
    let stderr = fails(&world.pretrain("run", &[]), 3);
    assert!(stderr.contains("truncated") && stderr.contains("00000019"), "{stderr}");
    assert_verify_reports_truncation(&world);
    // Also without its index, and cut within the padding of a member.
    without_sidecar(&world);
    for len in [cut, cut - 3] {
        std::fs::File::options().write(true).open(world.shard()).unwrap().set_len(len).unwrap();
        assert_verify_reports_truncation(&world);
    }
}

#[test]
fn a_workdir_of_another_recipe_is_refused_and_not_changed() {
    let world = World::new(30);
    ok(&world.pretrain("run", &[]));
    let before = metrics(&world.path("run"));
    let stderr = fails(&world.pretrain("run", &["--set", "optim.lr=0.5"]), 2);
    assert!(stderr.contains("optim.lr is 0.01 there but 0.5 here"), "{stderr}");
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
    let stderr = fails(&pretrain_with_limit(&world, &format!("ulimit -f {blocks};")), 3);
    assert!(stderr.contains("cannot write checkpoint") && stderr.contains("step-0000000004"), "{stderr}");
    let left: Vec<_> = std::fs::read_dir(world.path("run/checkpoints")).unwrap().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
    ok(&pretrain_with_limit(&world, ""));
    assert_eq!(metrics(&world.path("run")).len(), 12);
}

#[test]
fn a_run_whose_loss_is_not_finite_stops_with_78() {
    let world = World::new(30);
    let stderr = fails(&world.pretrain("run", &["--set", "method.teacher_temp=[1e-45,1e-45]"]), 78);
    assert!(stderr.contains("not finite for 3 steps in a row"), "{stderr}");
}

#[test]
fn a_folder_without_a_checkpoint_is_named() {
    let world = World::new(1);
    let shard = world.text("data/train-000000.tar");
    let args = ["probe", "--checkpoint", &world.text("data"), "--train", &shard, "--test", &shard];
    assert!(fails(&world.ocelli(&args), 3).contains("neither a run nor a checkpoint"));
}
