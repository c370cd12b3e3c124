use std::fs;
use std::path::Path;
use std::process::Output;

use pipeline::{Dataset, PipelineError, RetryPolicy, SampleId, Storage, StorageConfig};

use crate::messages::{check_message, lines_with};
use crate::servers::{Faults, S3_KEYS, WebServer, start_s3};
use crate::support::{
    World, cached, fails, ok, open, program, samples, wait_for, wait_for_end, without_sidecar,
};
use pipeline::shard::sidecar;

/// Every fault of the server, with and without the index of the shard.
#[test]
fn a_shard_is_complete_after_every_fault_of_the_connection() {
    type MakeFaults = fn(usize) -> Faults;
    let cases: [(&str, MakeFaults); 6] = [
        ("none", |_| Faults::default()),
        ("drops", |third| Faults { drop_after: Some(third + 1), ..Faults::default() }),
        ("stalls", |third| Faults { stall_after: Some(third), ..Faults::default() }),
        ("is busy", |_| Faults { statuses: vec![503, 429, 500], ..Faults::default() }),
        ("says nothing", |_| Faults { omits_length_and_version: true, ..Faults::default() }),
        ("stalls, no ranges", |third| Faults {
            stall_after: Some(third),
            ignores_ranges: true,
            ..Faults::default()
        }),
    ];
    for (name, make_faults) in cases {
        for sidecar in [true, false] {
            let world = World::new(30);
            let expected = samples(&world.dataset());
            if !sidecar {
                without_sidecar(&world);
            }
            let third = fs::metadata(world.shard()).unwrap().len() as usize / 3;
            let server = WebServer::start(&world.path("data"), make_faults(third));
            let dataset = open(&world, &server.url("train-000000.tar")).unwrap();
            assert_eq!(samples(&dataset), expected, "{name}, sidecar: {sidecar}");
            let ranges = server.ranges("train-000000.tar");
            match name {
                // Every byte was sent once: each request but the first asks for the rest.
                "drops" => {
                    assert_eq!(ranges.len(), 3, "{ranges:?}");
                    assert_eq!(ranges[1], Some(format!("bytes={}-", third + 1)));
                }
                "none" => assert_eq!(ranges, [None]),
                _ => {}
            }
            // The second time, the server is not needed.
            server.set(Faults { statuses: vec![500; 100], ..Faults::default() });
            assert_eq!(samples(&open(&world, &server.url("train-000000.tar")).unwrap()), expected, "{name}");
        }
    }
}

/// Returns the error with which `spec` is refused.
fn open_error(world: &World, spec: &str) -> PipelineError {
    open(world, spec).map(|dataset| samples(&dataset)).unwrap_err()
}

/// Asserts that a fetch failed, and that the reason names `value`.
fn assert_not_fetched(error: &PipelineError, value: &str) {
    assert!(
        matches!(error, PipelineError::Fetch { reason, .. } if reason.contains(value)),
        "{value}: {error}"
    );
}

/// Fetches that cannot succeed fail soon, with the cause.
#[test]
fn fetches_that_cannot_succeed_are_errors() {
    let world = World::new(10);
    let server = WebServer::start(&world.path("data"), Faults::default());
    let error = open_error(&world, &server.url("gone.tar"));
    assert!(matches!(error, PipelineError::MissingShard { .. }), "{error}");
    // A port without a server, and a host that does not exist.
    for url in ["http://127.0.0.1:1/a.tar", "http://host.invalid/a.tar"] {
        assert_not_fetched(&open_error(&world, url), "tried 4 times");
    }
    server.set(Faults { statuses: vec![403; 2], ..Faults::default() });
    assert_not_fetched(&open_error(&world, &server.url("train-000000.tar")), "403");
    server.set(Faults { statuses: vec![418; 2], ..Faults::default() });
    assert_not_fetched(&open_error(&world, &server.url("train-000000.tar")), "418");
}

/// A connection that repeatedly breaks at the same byte makes no progress.
#[test]
fn a_connection_that_breaks_at_one_byte_is_given_up() {
    let world = World::new(10);
    without_sidecar(&world);
    let faults = Faults { drop_after: Some(1000), ignores_ranges: true, ..Faults::default() };
    let server = WebServer::start(&world.path("data"), faults);
    let error = open(&world, &server.url("train-000000.tar")).unwrap_err();
    assert_not_fetched(&error, "1000");
    assert_not_fetched(&error, "tried 13 times");
    assert_eq!(cached(&world).len(), 0);
}

/// A server that sends single bytes keeps a connection alive, and would block a fetch for days.
#[test]
fn a_server_that_is_too_slow_is_given_up() {
    let world = World::new(10);
    without_sidecar(&world);
    let server = WebServer::start(&world.path("data"), Faults { trickles: true, ..Faults::default() });
    let config = world.storage_config();
    let storage =
        Storage::new(StorageConfig { retry: RetryPolicy { max_failures: 1, ..config.retry }, ..config });
    let error = Dataset::open(&[server.url("train-000000.tar")], &storage).map(drop).unwrap_err();
    assert_not_fetched(&error, "bytes in 0.5 s");
    assert_not_fetched(&error, "tried 2 times");
}

/// If the version changes while the shard is fetched, the result is never a mixture of versions,
/// and never a shard that was not indexed.
#[test]
fn a_shard_that_changes_during_a_fetch_is_detected() {
    let world = World::new(30);
    let other = World::new(31);
    without_sidecar(&world);
    // A server that restarts the download, one that compares versions, and one that does not.
    for (ignores_ranges, ignores_versions) in [(true, false), (false, false), (false, true)] {
        let changes_to = Some(other.path("data"));
        let stall_after = Some(1000);
        let faults =
            Faults { stall_after, changes_to, ignores_ranges, ignores_versions, ..Faults::default() };
        let server = WebServer::start(&world.path("data"), faults);
        let dataset = open(&world, &server.url("train-000000.tar")).unwrap();
        assert_eq!(samples(&dataset), samples(&other.dataset()));
    }

    let world = World::new(30);
    let server = WebServer::start(&world.path("data"), Faults::default());
    let dataset = open(&world, &server.url("train-000000.tar")).unwrap();
    let mut bytes = fs::read(world.shard()).unwrap();
    bytes[600] ^= 1;
    fs::write(world.shard(), bytes).unwrap();
    let error = dataset.read(SampleId(0)).unwrap_err();
    assert!(
        matches!(&error, PipelineError::ShardMismatch { reason, .. } if reason.contains("checksum differs")),
        "{error}"
    );
    assert_eq!(server.ranges("train-000000.tar").len(), 2, "it was fetched once more");
    assert_eq!(cached(&world).len(), 0);
}

/// Returns the options for the S3 server at `address`.
fn s3_options(address: &str, secret: &str) -> Vec<(String, String)> {
    let options = [
        ("AWS_ENDPOINT_URL", address),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", S3_KEYS[0]),
        ("AWS_SECRET_ACCESS_KEY", secret),
    ];
    options.map(|(name, value)| (name.to_string(), value.to_string())).to_vec()
}

/// Lists the samples of `spec`, with credentials from the environment.
fn list_s3(world: &World, address: &str, secret: &str, spec: &str) -> Output {
    program()
        .args(["shards", "ls", spec])
        .envs(s3_options(address, secret))
        .env("OCELLI_CACHE", world.text(&format!("cache-{secret}")))
        .output()
        .unwrap()
}

/// An S3 server with keys, a list with braces, and shards with and without an index.
#[test]
fn shards_are_read_from_s3() {
    let world = World::new(40);
    let expected = samples(&world.dataset());
    fs::create_dir_all(world.path("s3/bucket/set")).unwrap();
    for name in ["train-000000.tar", "train-000000.tar.idx.json"] {
        fs::copy(world.path("data").join(name), world.path("s3/bucket/set").join(name)).unwrap();
    }
    fs::copy(world.shard(), world.path("s3/bucket/set/train-000001.tar")).unwrap();
    let address = start_s3(&world.path("s3"));
    let spec = "s3://bucket/set/train-{000000..000001}.tar";
    let config = StorageConfig { options: s3_options(&address, S3_KEYS[1]), ..world.storage_config() };
    let dataset = Dataset::open(&[spec.to_string()], &Storage::new(config)).unwrap();
    let doubled: Vec<_> = expected.iter().chain(&expected).cloned().collect();
    assert_eq!(samples(&dataset), doubled);

    // By the program: with credentials from the environment, and with wrong ones.
    let output = list_s3(&world, &address, S3_KEYS[1], spec);
    ok(&output);
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 80);
    let denied = fails(&list_s3(&world, &address, "wrong", spec), 3);
    assert!(denied.contains("cannot fetch s3://bucket/set/train-00000"), "{denied}");
    let output = list_s3(&world, &address, S3_KEYS[1], "s3://bucket/set/gone.tar");
    check_message("fetch::shards_are_read_from_s3", &fails(&output, 2));
}

#[test]
fn shards_are_read_from_commands() {
    let world = World::new(30);
    let expected = samples(&world.dataset());
    let shard = world.shard().display().to_string();
    assert_eq!(samples(&open(&world, &format!("pipe:cat {shard}")).unwrap()), expected);
    let error = open(&world, "pipe:echo half; echo it broke >&2; exit 7").unwrap_err();
    assert_not_fetched(&error, "exit status: 7");
    assert_not_fetched(&error, "it broke");
}

/// Training over a connection that breaks equals training from the disk.
#[test]
fn training_from_a_server_equals_training_from_the_disk() {
    let world = World::new(40);
    ok(&world.pretrain("disk", &[]));
    let size = fs::metadata(world.shard()).unwrap().len() as usize;
    let faults = Faults { drop_after: Some(size / 2 + 1), ..Faults::default() };
    let server = WebServer::start(&world.path("data"), faults);
    let mut args = world.pretrain_args("line", &[]);
    let shards = args.iter().position(|arg| arg == "--shards").unwrap() + 1;
    args[shards] = server.url("train-000000.tar");
    let output = program().args(&args).env("OCELLI_CACHE", world.path("cache")).output().unwrap();
    let stderr = ok(&output);
    assert!(stderr.contains(&format!("resuming at byte {} in ", size / 2 + 1)), "{stderr}");
    assert_eq!(crate::support::metrics(&world.path("line")), crate::support::metrics(&world.path("disk")));
}

/// A download that is not a shard is not cached: the next start requests it again.
#[test]
fn downloads_that_are_not_shards_are_not_cached() {
    let world = World::new(20);
    let expected = samples(&world.dataset());
    without_sidecar(&world);
    let page = Faults { serves_page_for_unknown: true, ..Faults::default() };
    let server = WebServer::start(&world.path("data"), page);
    // A page instead of the index is ignored; for one instead of the shard, its URL is reported.
    assert_eq!(samples(&open(&world, &server.url("train-000000.tar")).unwrap()), expected);
    let url = server.url("later.tar");
    let error = open_error(&world, &url);
    assert!(
        matches!(&error, PipelineError::NotATar { path, .. } if path.display().to_string() == url),
        "{error}"
    );
    fs::copy(world.shard(), world.path("data/later.tar")).unwrap();
    assert_eq!(samples(&open(&world, &server.url("later.tar")).unwrap()), expected);

    // Cut between two members, without a stated length: complete members, but not all of them.
    let index = sidecar::build(&world.shard()).unwrap();
    let end = index.members(9).next().unwrap().offset_bytes as usize - 512;
    fs::write(world.path("data/cut.tar"), &fs::read(world.shard()).unwrap()[..end]).unwrap();
    server.set(Faults { omits_length_and_version: true, ..Faults::default() });
    let error = open_error(&world, &server.url("cut.tar"));
    assert_not_fetched(&error, "the download may be incomplete");
    // The same with the length stated and met.
    server.set(Faults::default());
    let error = open_error(&world, &server.url("cut.tar"));
    assert!(matches!(error, PipelineError::MissingEnd { .. }), "{error}");
    assert_eq!(cached(&world).len(), 2);
}

/// If the server stops responding during training, a signal stops the run, and a checkpoint is
/// written.
#[test]
fn a_run_that_waits_for_a_server_can_be_stopped() {
    let world = World::new(16);
    ok(&world.ocelli(&[
        "shards",
        "synth",
        "--out",
        &world.text("second"),
        "--count",
        "16",
        "--size-px",
        "20",
        "--seed",
        "9",
        "--prefix",
        "second",
    ]));
    fs::copy(world.path("second/second-000000.tar"), world.path("data/second-000000.tar")).unwrap();
    let sidecar = "second-000000.tar.idx.json";
    fs::copy(world.path("second").join(sidecar), world.path("data").join(sidecar)).unwrap();
    let server = WebServer::start(&world.path("data"), Faults::default());
    let mut args = world.pretrain_args("run", &["--set", "data.window_shards=1"]);
    let shards = args.iter().position(|arg| arg == "--shards").unwrap() + 1;
    args[shards] = format!("{}::{}", server.url("second-000000.tar"), world.shard().display());
    // The second shard of the list is read first. The index of the first one is cached; the shard
    // itself never arrives.
    let cache = world.path("cache");
    let list = ["shards", "ls", &args[shards].clone()].map(String::from);
    ok(&program().args(list).env("OCELLI_CACHE", &cache).output().unwrap());
    server.set(Faults { statuses: vec![503; 10_000], ..Faults::default() });
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_ocelli-under-test"))
        .args(&args)
        .env("OCELLI_CACHE", &cache)
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    wait_for("three requests", std::time::Duration::from_secs(60), || server.n_requests() >= 3);
    std::thread::sleep(std::time::Duration::from_millis(500));
    let stopping = std::time::Instant::now();
    assert!(std::process::Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
    assert_eq!(wait_for_end(&mut child).code(), Some(143));
    assert!(stopping.elapsed().as_secs() < 5, "{:?}", stopping.elapsed());
    assert!(world.path("run/checkpoints/latest").exists());
}

/// Runs the program with this cache.
fn run_with_cache(cache: &Path, args: &[&str]) -> Output {
    program().args(args).env("OCELLI_CACHE", cache).output().unwrap()
}

/// A shard that differs from its index is fetched twice at most and reported once, by each verb.
#[test]
fn a_replaced_shard_is_not_fetched_for_each_of_its_samples() {
    let world = World::new(40);
    let other = World::new(39);
    for verb in ["verify", "stats", "contact-sheet", "filter"] {
        let server = WebServer::start(&world.path("data"), Faults::default());
        let url = server.url("train-000000.tar");
        ok(&run_with_cache(&world.path(verb), &["shards", "index", &url]));
        server.set(Faults { changes_to: Some(other.path("data")), ..Faults::default() });
        // The server answers the first request of each file with the first version.
        ok(&run_with_cache(&world.path("once"), &["shards", "verify", &url]));
        let before = server.ranges("train-000000.tar").len();
        let out = world.text(&format!("out-{verb}.png"));
        let mut args = vec!["shards", verb, &url];
        if ["contact-sheet", "filter"].contains(&verb) {
            args.extend(["--out", &out]);
        }
        let stderr = stderr_after_code_3(&run_with_cache(&world.path(verb), &args));
        // Which of the threads that read the shard fails first depends on the time.
        let again = format!("cannot fetch {url}: failed a moment ago: ");
        check_message(
            &format!("fetch::a_replaced_shard_is_not_fetched_for_each_of_its_samples.{verb}"),
            &lines_with(&stderr, &url).replace(&again, ""),
        );
        assert!(server.ranges("train-000000.tar").len() - before <= 2, "{verb}");
        fs::remove_dir_all(world.path("once")).unwrap();
    }
}

/// Returns standard error of a verb that exited with 3, whether it counts bad samples or stops at
/// the first.
fn stderr_after_code_3(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    stderr
}
