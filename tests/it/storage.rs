use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use flate2::Compression;
use flate2::write::GzEncoder;
use pipeline::index::ShardIndex;
use pipeline::{Cursor, Dataset, PipelineError, SampleId, Share, StorageConfig};
use trainer::data::batches;
use trainer::{Plan, Recipe};

use crate::servers::{Faults, S3_KEYS, WebServer, start_s3};
use crate::support::{TINY, World, fails, ok, program};

/// Keys, images and labels of all samples.
fn samples(dataset: &Dataset) -> Vec<(String, Vec<u8>, Option<u32>)> {
    let all = (0..dataset.n_samples()).map(|id| dataset.read(SampleId(id)).unwrap());
    all.map(|sample| (sample.key, sample.image, sample.label)).collect()
}

fn open(world: &World, spec: &str) -> Result<Dataset, PipelineError> {
    Dataset::open(&[spec.to_string()], &world.storage())
}

/// Files in the cache that are shards.
fn cached(world: &World) -> Vec<PathBuf> {
    let entries = fs::read_dir(world.path("cache")).into_iter().flatten();
    entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "tar"))
        .collect()
}

fn without_sidecar(world: &World) {
    fs::remove_file(ShardIndex::sidecar_path(&world.shard())).unwrap();
}

/// Every fault of the server, with a sidecar beside the shard and without.
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
            // Another start needs the server no more.
            server.set(Faults { statuses: vec![500; 100], ..Faults::default() });
            assert_eq!(samples(&open(&world, &server.url("train-000000.tar")).unwrap()), expected, "{name}");
        }
    }
}

/// What cannot be right is said, and soon.
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

/// A server that breaks at the same byte again and again gains nothing.
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

/// The version changes while the shard is fetched: never a mixture, and never one that was not indexed.
#[test]
fn a_shard_that_changes_on_the_way_is_noticed() {
    let (world, other) = (World::new(30), World::new(31));
    without_sidecar(&world);
    for ignores_ranges in [true, false] {
        let changes_to = Some(other.path("data"));
        let faults = Faults { stall_after: Some(1000), changes_to, ignores_ranges, ..Faults::default() };
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

/// An S3 server with keys; braces; its own index, and none.
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

/// A compressed shard on a disk and on a server, and one that is damaged.
#[test]
fn compressed_shards_are_unpacked_into_the_cache() {
    let world = World::new(30);
    let expected = samples(&world.dataset());
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(&fs::read(world.shard()).unwrap()).unwrap();
    let mut packed = encoder.finish().unwrap();
    fs::write(world.path("data/x.tar.gz"), &packed).unwrap();
    assert_eq!(samples(&open(&world, &world.text("data/x.tar.gz")).unwrap()), expected);
    let faults = Faults { drop_after: Some(packed.len() / 2), ..Faults::default() };
    let server = WebServer::start(&world.path("data"), faults);
    assert_eq!(samples(&open(&world, &server.url("x.tar.gz")).unwrap()), expected);
    assert_eq!(cached(&world).len(), 2);

    let middle = packed.len() / 2;
    packed[middle] ^= 255;
    fs::write(world.path("data/y.tar.gz"), &packed).unwrap();
    let error = open(&world, &world.text("data/y.tar.gz")).unwrap_err().to_string();
    assert!(error.contains("y.tar.gz"), "{error}");
    fs::write(world.path("data/z.tar.gz"), &packed[..middle]).unwrap();
    assert!(open(&world, &world.text("data/z.tar.gz")).is_err(), "cut off");
    assert_eq!(cached(&world).len(), 2, "nothing of it stays");
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

/// Two windows must fit; what does not fit is refused before training, not fetched for ever.
#[test]
fn a_small_cache_keeps_what_is_read_and_drops_the_rest() {
    let world = World::new(1);
    for i in 0..6 {
        let seed = i.to_string();
        let (out, name) = (world.text("many"), format!("s{i}"));
        let args = ["shards", "synth", "--out", &out, "--count", "24", "--size-px", "20", "--seed", &seed];
        ok(&world.ocelli(&[&args[..], &["--prefix", &name]].concat()));
    }
    let shard_bytes = fs::metadata(world.path("many/s0-000000.tar")).unwrap().len();
    let server =
        WebServer::start(&world.path("many"), Faults { drop_after: Some(20_000), ..Faults::default() });
    let spec = [server.url("s{0..5}-000000.tar")];
    let overrides = ["data.window_shards=1".to_string(), "run.data_threads=2".to_string()];
    let recipe = Recipe::parse(TINY, "tiny", &overrides).unwrap();
    let views = |dataset: Dataset, ledger: &str| {
        let plan = Plan::resolve(recipe.clone(), dataset.n_samples()).unwrap();
        let share = Share::new(0, 1, 8).unwrap();
        let mut pool = batches(Arc::new(dataset), &plan, share, Cursor(0), &world.path(ledger))?;
        Ok::<_, PipelineError>(
            (0..54).map(|_| pool.next_batch().unwrap().unwrap().samples).collect::<Vec<_>>(),
        )
    };
    let small = |cache_bytes| StorageConfig { cache_bytes, ..world.storage_config() };
    let too_small = Dataset::open(&spec, &pipeline::Storage::new(small(shard_bytes * 3 / 2))).unwrap();
    let error = views(too_small, "ledger").unwrap_err().to_string();
    assert!(error.contains("cache") && error.contains("data.window_shards"), "{error}");

    // Three epochs through a cache of less than half of the data equal those from the disk.
    let dataset = Dataset::open(&spec, &pipeline::Storage::new(small(shard_bytes * 5 / 2))).unwrap();
    let through_cache = views(dataset, "ledger").unwrap();
    let local = [world.text("many/s{0..5}-000000.tar")];
    let from_disk = views(Dataset::open(&local, &world.storage()).unwrap(), "ledger").unwrap();
    assert!(
        through_cache
            .iter()
            .zip(&from_disk)
            .all(|(a, b)| a.iter().map(|s| &s.groups).eq(b.iter().map(|s| &s.groups)))
    );
    assert!(cached(&world).len() <= 3, "{:?}", cached(&world));
}

/// A shard on a disk without an index is walked once; one that was written anew is walked again.
#[test]
fn an_index_that_was_built_is_kept() {
    let world = World::new(20);
    without_sidecar(&world);
    let storage = world.storage();
    let spec = [world.shard().display().to_string()];
    let kept = || fs::read_dir(world.path("cache")).map_or(0, Iterator::count);
    assert_eq!(kept(), 0);
    assert_eq!(Dataset::open(&spec, &storage).unwrap().n_samples(), 20);
    assert_eq!(kept(), 1);
    assert_eq!(Dataset::open(&spec, &storage).unwrap().n_samples(), 20);
    assert_eq!(kept(), 1);
    let other = World::new(25);
    fs::copy(other.shard(), world.shard()).unwrap();
    assert_eq!(Dataset::open(&spec, &storage).unwrap().n_samples(), 25);
    // A shard without an index on a disk where nothing can be kept.
    let nowhere = StorageConfig::new("/proc/nowhere".into());
    assert_eq!(Dataset::open(&spec, &pipeline::Storage::new(nowhere)).unwrap().n_samples(), 25);
}

/// Training over a line that breaks, end to end, equals training from the disk.
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
    assert!(said.contains("connection") && said.contains("going on at byte"), "{said}");
    assert_eq!(crate::support::metrics(&world.path("line")), crate::support::metrics(&world.path("disk")));
}

/// A sample whose bytes are others than when it was indexed is bad, and named.
#[test]
fn a_shard_that_changes_under_the_reader_is_noticed() {
    let world = World::new(40);
    let dataset = world.dataset();
    let index = ShardIndex::open(&world.shard()).unwrap();
    let at = index.member(7, &["jpg"]).unwrap().offset_bytes + 100;
    let file = fs::File::options().read(true).write(true).open(world.shard()).unwrap();
    let mut byte = [0];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut byte, at).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[byte[0] ^ 1], at).unwrap();
    let error = dataset.read(SampleId(7)).unwrap_err().to_string();
    assert!(error.contains("has changed since it was indexed"), "{error}");
    assert!(dataset.read(SampleId(8)).is_ok());
    let verify = world.ocelli(&["shards", "verify", &world.shard().display().to_string()]);
    let said = String::from_utf8_lossy(&verify.stderr).into_owned();
    assert_eq!(verify.status.code(), Some(3), "{said}");
    assert!(said.contains("checksum differs") && said.contains("jpg has changed"), "{said}");
}
