use std::fs;
use std::process::{Command, Output};

use crate::servers::{Faults, S3_KEYS, WebServer, start_s3};
use crate::support::{World, ok};

fn run_example(world: &World, name: &str, source: &str, environment: &[(&str, &str)]) -> Output {
    let script = format!("{}/../scripts/examples/{name}", env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new("bash");
    command.args([&script, source, &world.text("out"), "--recipe", &world.text("tiny.toml")]);
    command.env("OCELLI", env!("CARGO_BIN_EXE_ocelli-under-test")).env("OCELLI_CACHE", world.path("cache"));
    command.envs(environment.iter().copied()).output().unwrap()
}

/// Runs an example twice: the first run creates a backbone, the second has nothing to do.
fn assert_creates_backbone(world: &World, name: &str, source: &str, environment: &[(&str, &str)]) {
    ok(&run_example(world, name, source, environment));
    let backbone = fs::read(world.path("out/backbone.safetensors")).unwrap();
    assert!(backbone.len() > 10_000);
    ok(&run_example(world, name, source, environment));
    assert!(fs::read(world.path("out/backbone.safetensors")).unwrap() == backbone);
}

/// Writes images into a folder, and returns it.
fn write_images(world: &World) -> std::path::PathBuf {
    let synth = ["shards", "synth", "--out", &world.text("large"), "--count", "24", "--size-px", "40"];
    ok(&world.ocelli(&synth));
    let large = world.text("large/train-000000.tar");
    ok(&world.ocelli(&["shards", "extract", &large, "--out", &world.text("images")]));
    world.path("images/train-000000")
}

#[test]
fn from_a_folder() {
    let world = World::new(1);
    let images = write_images(&world);
    assert_creates_backbone(&world, "from_folder.sh", &images.display().to_string(), &[]);
}

#[test]
fn from_a_list_of_urls() {
    let world = World::new(1);
    let server = WebServer::start(&write_images(&world), Faults::default());
    let names: Vec<String> = (0..24).map(|i| server.url(&format!("{i:08}.jpg"))).collect();
    let list = format!("{}\n{}\n", names.join("\n"), server.url("gone.jpg"));
    fs::write(world.path("list.txt"), list).unwrap();
    assert_creates_backbone(&world, "from_urls.sh", &world.text("list.txt"), &[]);
}

#[test]
fn from_a_bucket() {
    let world = World::new(24);
    fs::create_dir_all(world.path("s3/bucket/set")).unwrap();
    for name in ["00000.tar", "00001.tar"] {
        fs::copy(world.shard(), world.path("s3/bucket/set").join(name)).unwrap();
    }
    let address = start_s3(&world.path("s3"));
    let environment = [
        ("AWS_ENDPOINT_URL", address.as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", S3_KEYS[0]),
        ("AWS_SECRET_ACCESS_KEY", S3_KEYS[1]),
    ];
    assert_creates_backbone(&world, "from_bucket.sh", "s3://bucket/set/{00000..00001}.tar", &environment);
}
