use std::fs;

use pipeline::{Dataset, RetryPolicy, SampleId, Storage, StorageConfig};

use crate::servers::{Faults, S3_KEYS, WebServer, start_s3};
use crate::support::{World, cached, fails, ok, open, program, samples, without_sidecar};
use pipeline::shard::sidecar;

/// Every fault of the server, with and without a sidecar beside the shard.
#[test]
fn a_shard_comes_whole_over_a_bad_line() {
    let third = |world: &World| fs::metadata(world.shard()).unwrap().len() as usize / 3;
    type Make = fn(usize) -> Faults;
    let faults: [(&str, Make); 6] = [
        ("none", |_| Faults::default()),
        ("drops", |third| Faults { drop_after: Some(third + 1), ..Faults::default() }),
        ("stalls", |third| Faults { stall_after: Some(third), ..Faults::default() }),
        ("is busy", |_| Faults { statuses: vec![503, 429, 500], ..Faults::default() }),
        ("says nothing", |_| Faults { says_nothing: true, ..Faults::default() }),
        ("stalls, no ranges", |third| Faults {
            stall_after: Some(third),
            ignores_ranges: true,
            ..Faults::default()
        }),
    ];
    for (name, make) in faults {
        for sidecar in [true, false] {
            let world = World::new(30);
            let expected = samples(&world.dataset());
            if !sidecar {
                without_sidecar(&world);
            }
            let server = WebServer::start(&world.path("data"), make(third(&world)));
            let dataset = open(&world, &server.url("train-000000.tar")).unwrap();
            assert_eq!(samples(&dataset), expected, "{name}, sidecar: {sidecar}");
            let ranges = server.ranges("train-000000.tar");
            match name {
                // Every byte came once: each request but the first asks for the rest.
                "drops" => {
                    assert_eq!(ranges.len(), 3, "{ranges:?}");
                    assert_eq!(ranges[1], Some(format!("bytes={}-", third(&world) + 1)));
                }
                "none" => assert_eq!(ranges, [None]),
                _ => {}
            }
            // Another start does not need the server.
            server.set(Faults { statuses: vec![500; 100], ..Faults::default() });
            assert_eq!(samples(&open(&world, &server.url("train-000000.tar")).unwrap()), expected, "{name}");
        }
    }
}

/// Fetches that cannot succeed fail soon, with the cause.
#[test]
fn what_does_not_come_is_an_error() {
    let world = World::new(10);
    let server = WebServer::start(&world.path("data"), Faults::default());
    let error = |spec: &str| open(&world, spec).map(|dataset| samples(&dataset)).unwrap_err().to_string();
    assert!(error(&server.url("gone.tar")).contains("does not exist"), "{}", error(&server.url("gone.tar")));
    // A port that nobody listens on, and a name that nobody has.
    for host in ["http://127.0.0.1:1/a.tar", "http://host.invalid/a.tar"] {
        assert!(error(host).contains("tried 4 times"), "{}", error(host));
    }
    server.set(Faults { statuses: vec![403; 2], ..Faults::default() });
    assert!(error(&server.url("train-000000.tar")).contains("403"));
    server.set(Faults { statuses: vec![418; 2], ..Faults::default() });
    assert!(error(&server.url("train-000000.tar")).contains("418"));
}

/// A server that repeatedly breaks at the same byte makes no progress.
#[test]
fn a_server_that_never_gets_further_is_given_up() {
    let world = World::new(10);
    without_sidecar(&world);
    let faults = Faults { drop_after: Some(1000), ignores_ranges: true, ..Faults::default() };
    let server = WebServer::start(&world.path("data"), faults);
    let error = open(&world, &server.url("train-000000.tar")).unwrap_err().to_string();
    assert!(error.contains("1000") && error.contains("tried 13 times"), "{error}");
    assert_eq!(cached(&world).len(), 0);
}

/// A byte now and then keeps a connection alive, and would block a fetch for days.
#[test]
fn a_server_that_trickles_is_given_up() {
    let world = World::new(10);
    without_sidecar(&world);
    let server = WebServer::start(&world.path("data"), Faults { trickles: true, ..Faults::default() });
    let config = world.storage_config();
    let storage =
        Storage::new(StorageConfig { retry: RetryPolicy { max_failures: 1, ..config.retry }, ..config });
    let opened = Dataset::open(&[server.url("train-000000.tar")], &storage);
    let error = opened.map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("bytes came in 0.5 s") && error.contains("tried 2 times"), "{error}");
}

/// The version changes while the shard is fetched: the result is never a mixture, and never a shard
/// that was not indexed.
#[test]
fn a_shard_that_changes_on_the_way_is_noticed() {
    let world = World::new(30);
    let other = World::new(31);
    without_sidecar(&world);
    // A server that starts anew, one that sees that the version is another, and one that does not.
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
    let error = dataset.read(SampleId(0)).unwrap_err().to_string();
    assert!(error.contains("checksum differs"), "{error}");
    assert_eq!(server.ranges("train-000000.tar").len(), 2, "it was fetched once more");
    assert_eq!(cached(&world).len(), 0);
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
    let options = |secret: &str| {
        let options = [
            ("AWS_ENDPOINT_URL", address.as_str()),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ACCESS_KEY_ID", S3_KEYS[0]),
            ("AWS_SECRET_ACCESS_KEY", secret),
        ];
        options.map(|(name, value)| (name.to_string(), value.to_string())).to_vec()
    };
    let spec = "s3://bucket/set/train-{000000..000001}.tar";
    let config = StorageConfig { options: options(S3_KEYS[1]), ..world.storage_config() };
    let dataset = Dataset::open(&[spec.to_string()], &pipeline::Storage::new(config)).unwrap();
    let doubled: Vec<_> = expected.iter().chain(&expected).cloned().collect();
    assert_eq!(samples(&dataset), doubled);

    // As a user: credentials from the environment, and a wrong one.
    let list = |secret: &str, spec: &str| {
        let cache = world.text(&format!("cache-{secret}"));
        program()
            .args(["shards", "ls", spec])
            .envs(options(secret))
            .env("OCELLI_CACHE", cache)
            .output()
            .unwrap()
    };
    let output = list(S3_KEYS[1], spec);
    ok(&output);
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 80);
    let denied = fails(&list("wrong", spec), 3);
    assert!(denied.contains("cannot fetch s3://bucket/set/train-00000"), "{denied}");
    let gone = fails(&list(S3_KEYS[1], "s3://bucket/set/gone.tar"), 3);
    assert!(gone.contains("s3://bucket/set/gone.tar does not exist"), "{gone}");
}

#[test]
fn commands_write_shards() {
    let world = World::new(30);
    let expected = samples(&world.dataset());
    let shard = world.shard().display().to_string();
    assert_eq!(samples(&open(&world, &format!("pipe:cat {shard}")).unwrap()), expected);
    let error = open(&world, "pipe:echo half; echo it broke >&2; exit 7").unwrap_err().to_string();
    assert!(error.contains("exit status: 7") && error.contains("it broke"), "{error}");
}

/// Training over a connection that breaks, end to end, equals training from the disk.
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
    let said = ok(&output);
    assert!(said.contains("connection") && said.contains("resuming at byte"), "{said}");
    assert_eq!(crate::support::metrics(&world.path("line")), crate::support::metrics(&world.path("disk")));
}

/// A download that is not a shard is not cached: the next start requests it again.
#[test]
fn what_is_no_shard_is_not_kept() {
    let world = World::new(20);
    let expected = samples(&world.dataset());
    without_sidecar(&world);
    let page = Faults { has_a_page_for_all: true, ..Faults::default() };
    let server = WebServer::start(&world.path("data"), page);
    // A page in place of the index is passed over, one in place of the shard is named by its URL.
    assert_eq!(samples(&open(&world, &server.url("train-000000.tar")).unwrap()), expected);
    let error = open(&world, &server.url("later.tar")).unwrap_err().to_string();
    assert!(error.contains(&server.url("later.tar")) && error.contains("not a tar"), "{error}");
    fs::copy(world.shard(), world.path("data/later.tar")).unwrap();
    assert_eq!(samples(&open(&world, &server.url("later.tar")).unwrap()), expected);

    // Cut between two members, with no length said: whole members, and yet not all of them.
    let index = sidecar::build(&world.shard()).unwrap();
    let end = index.members(9).next().unwrap().offset_bytes as usize - 512;
    fs::write(world.path("data/cut.tar"), &fs::read(world.shard()).unwrap()[..end]).unwrap();
    server.set(Faults { says_nothing: true, ..Faults::default() });
    let error = open(&world, &server.url("cut.tar")).unwrap_err().to_string();
    assert!(error.contains("not all of it came"), "{error}");
    // The same with the length stated and met.
    server.set(Faults::default());
    let error = open(&world, &server.url("cut.tar")).unwrap_err().to_string();
    assert!(error.contains("the end of the archive is missing"), "{error}");
    assert_eq!(cached(&world).len(), 2);
}

/// A server that stops in the middle of training: a signal stops the run, and a checkpoint is
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
    // The second of the list is read first. The index of the other is known; the shard itself never
    // comes.
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
    let start = std::time::Instant::now();
    while server.n_requests() < 3 && start.elapsed().as_secs() < 20 {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    std::thread::sleep(std::time::Duration::from_millis(500));
    let stopping = std::time::Instant::now();
    assert!(std::process::Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(stopping.elapsed().as_secs() < 5, "{:?}", stopping.elapsed());
    assert!(world.path("run/checkpoints/latest").exists());
}

/// A shard that differs from its index is fetched twice at most and named once, by each verb.
#[test]
fn a_replaced_shard_is_not_fetched_for_each_of_its_samples() {
    let world = World::new(40);
    let other = World::new(39);
    for verb in ["verify", "stats", "contact-sheet", "filter"] {
        let server = WebServer::start(&world.path("data"), Faults::default());
        let url = server.url("train-000000.tar");
        let run =
            |args: &[&str]| program().args(args).env("OCELLI_CACHE", world.path(verb)).output().unwrap();
        ok(&run(&["shards", "index", &url]));
        server.set(Faults { changes_to: Some(other.path("data")), ..Faults::default() });
        // The first request of each file is that of the first version: one is made here.
        ok(&program()
            .args(["shards", "verify", &url])
            .env("OCELLI_CACHE", world.path("once"))
            .output()
            .unwrap());
        let before = server.ranges("train-000000.tar").len();
        let out = world.text(&format!("out-{verb}.png"));
        let mut args = vec!["shards", verb, &url];
        if ["contact-sheet", "filter"].contains(&verb) {
            args.extend(["--out", &out]);
        }
        let said = ends_with_3(&run(&args));
        assert!(said.contains("is not the expected one"), "{verb}: {said}");
        assert!(server.ranges("train-000000.tar").len() - before <= 2, "{verb}");
        fs::remove_dir_all(world.path("once")).unwrap();
    }
}

/// Returns standard error of a verb that exited with 3, whether it counts bad samples or stops at
/// the first.
fn ends_with_3(output: &std::process::Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{said}");
    said
}
