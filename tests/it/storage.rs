use std::fs;
use std::io::Write;
use std::sync::Arc;

use augment::Views;
use flate2::Compression;
use flate2::write::GzEncoder;
use pipeline::shard::sidecar;
use pipeline::{Cursor, Dataset, PipelineError, SampleId, Share, Storage, StorageConfig};
use trainer::Recipe;
use trainer::run::data::batches;

use crate::messages::{check_message, lines_with};
use crate::servers::{Faults, WebServer};
use crate::support::{TINY, World, cached, ok, open, program, samples, without_sidecar};

/// Compressed shards on a disk and on a server, a damaged one, and a truncated one.
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
    let error = open(&world, &world.text("data/y.tar.gz")).unwrap_err();
    assert!(error.to_string().contains("y.tar.gz"), "{error}");
    fs::write(world.path("data/z.tar.gz"), &packed[..middle]).unwrap();
    assert!(open(&world, &world.text("data/z.tar.gz")).is_err(), "cut off");
    assert_eq!(cached(&world).len(), 2, "nothing of it is kept");
}

/// Returns the storage of `world` with a cache of at most `cache_bytes`.
fn storage_of_size(world: &World, cache_bytes: u64) -> Storage {
    Storage::new(StorageConfig { cache_bytes, ..world.storage_config() })
}

/// Reads 54 batches of 8 images.
fn read_batches(
    world: &World,
    recipe: &Recipe,
    dataset: Dataset,
    ledger: &str,
) -> Result<Vec<Vec<Views>>, PipelineError> {
    let plan = trainer::resolve(recipe.clone(), dataset.n_samples()).unwrap();
    let share = Share::new(0, 1, 8).unwrap();
    let mut pool = batches(Arc::new(dataset), &plan, share, Cursor(0), &world.path(ledger))?;
    Ok((0..54).map(|_| pool.next_batch().unwrap().unwrap().samples).collect())
}

/// The cache must hold two windows; otherwise the run is rejected before training, instead of
/// fetching forever.
#[test]
fn a_small_cache_keeps_what_is_read_and_drops_the_rest() {
    let world = World::new(1);
    for i in 0..6 {
        let seed = i.to_string();
        let out = world.text("many");
        let name = format!("s{i}");
        let args = ["shards", "synth", "--out", &out, "--count", "24", "--size-px", "20", "--seed", &seed];
        ok(&world.ocelli(&[&args[..], &["--prefix", &name]].concat()));
    }
    let shard_bytes = fs::metadata(world.path("many/s0-000000.tar")).unwrap().len();
    let server =
        WebServer::start(&world.path("many"), Faults { drop_after: Some(20_000), ..Faults::default() });
    let spec = [server.url("s{0..5}-000000.tar")];
    let overrides = ["data.window_shards=1".to_string(), "run.data_threads=2".to_string()];
    let recipe = Recipe::parse(TINY, "tiny", &overrides).unwrap();
    let too_small = Dataset::open(&spec, &storage_of_size(&world, shard_bytes * 3 / 2)).unwrap();
    let error = read_batches(&world, &recipe, too_small, "ledger").unwrap_err();
    assert!(matches!(error, PipelineError::CacheTooSmall { .. }), "{error}");

    // Three epochs through a cache of less than half of the data equal those from the disk.
    let dataset = Dataset::open(&spec, &storage_of_size(&world, shard_bytes * 5 / 2)).unwrap();
    let through_cache = read_batches(&world, &recipe, dataset, "ledger").unwrap();
    let local = [world.text("many/s{0..5}-000000.tar")];
    let dataset = Dataset::open(&local, &world.storage()).unwrap();
    let from_disk = read_batches(&world, &recipe, dataset, "ledger").unwrap();
    for (a, b) in through_cache.iter().zip(&from_disk) {
        assert!(a.iter().map(|views| &views.groups).eq(b.iter().map(|views| &views.groups)));
    }
    assert!(cached(&world).len() <= 3, "{:?}", cached(&world));
}

/// Number of files in the cache.
fn n_cache_files(world: &World) -> usize {
    fs::read_dir(world.path("cache")).map_or(0, Iterator::count)
}

/// A local shard without an index is read once to index it; a rewritten shard is indexed again.
#[test]
fn an_index_that_was_built_is_kept() {
    let world = World::new(20);
    without_sidecar(&world);
    // A file that has just been written may still change within the same tick of the file system's
    // clock.
    std::thread::sleep(std::time::Duration::from_millis(150));
    let storage = world.storage();
    let spec = [world.shard().display().to_string()];
    assert_eq!(n_cache_files(&world), 0);
    assert_eq!(Dataset::open(&spec, &storage).unwrap().n_samples(), 20);
    assert_eq!(n_cache_files(&world), 1);
    assert_eq!(Dataset::open(&spec, &storage).unwrap().n_samples(), 20);
    assert_eq!(n_cache_files(&world), 1);
    let other = World::new(25);
    fs::copy(other.shard(), world.shard()).unwrap();
    assert_eq!(Dataset::open(&spec, &storage).unwrap().n_samples(), 25);
    // A shard without an index, and a cache that cannot be written.
    let nowhere = StorageConfig::new("/proc/nowhere".into());
    assert_eq!(Dataset::open(&spec, &Storage::new(nowhere)).unwrap().n_samples(), 25);
}

/// A sample whose bytes have changed since it was indexed is bad, and named.
#[test]
fn a_shard_that_changes_under_the_reader_is_noticed() {
    let world = World::new(40);
    let dataset = world.dataset();
    let index = sidecar::open(&world.shard()).unwrap();
    let at = index.member(7, &["jpg"]).unwrap().offset_bytes + 100;
    let file = fs::File::options().read(true).write(true).open(world.shard()).unwrap();
    let mut byte = [0];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut byte, at).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[byte[0] ^ 1], at).unwrap();
    let error = dataset.read(SampleId(7)).unwrap_err();
    assert!(matches!(&error, PipelineError::Changed { key, .. } if key == "00000007"), "{error}");
    assert!(dataset.read(SampleId(8)).is_ok());
    let verify = world.ocelli(&["shards", "verify", &world.shard().display().to_string()]);
    let stderr = String::from_utf8_lossy(&verify.stderr).into_owned();
    assert_eq!(verify.status.code(), Some(3), "{stderr}");
    check_message("storage::a_shard_that_changes_under_the_reader_is_noticed", &lines_with(&stderr, "bad: "));
}

/// Concurrent starts, in one process, with the same shard named several times.
#[test]
fn starts_at_the_same_time_share_a_cache() {
    let world = World::new(10);
    let expected = samples(&world.dataset());
    let server = WebServer::start(&world.path("data"), Faults::default());
    let spec = vec![server.url("train-000000.tar"); 12];
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let dataset = Dataset::open(&spec, &world.storage()).unwrap();
                assert_eq!(samples(&dataset)[..10], expected[..]);
            });
        }
    });
    assert_eq!(server.ranges("train-000000.tar").len(), 1, "one fetch for all");
}

/// MD5 of `bytes` in hexadecimal digits.
fn md5(world: &World, bytes: &[u8]) -> String {
    let file = world.path("to-hash");
    fs::write(&file, bytes).unwrap();
    let output = std::process::Command::new("md5sum").arg(&file).output().unwrap();
    String::from_utf8(output.stdout).unwrap()[..32].to_string()
}

/// Writes a list that states length and MD5 of the shard.
fn write_list(world: &World, name: &str, len: usize, md5: &str) {
    let text = format!(
        r#"{{"__kind__":"wids-shard-index-v1","wids_version":1,"shardlist":[
            {{"url":"train-000000.tar","nsamples":10,"filesize":{len},"md5sum":"{md5}"}}]}}"#
    );
    fs::write(world.path("data").join(name), text).unwrap();
}

/// Verifies a list with the cache of `world`.
fn verify(world: &World, list: &str) -> std::process::Output {
    program().args(["shards", "verify", list]).env("OCELLI_CACHE", world.path("cache")).output().unwrap()
}

/// Lists state lengths and hashes of local and remote shards.
#[test]
fn lengths_and_hashes_in_a_list_are_checked() {
    let world = World::new(10);
    let bytes = fs::read(world.shard()).unwrap();
    let right = md5(&world, &bytes);
    let wrong = md5(&world, b"another shard");
    write_list(&world, "right.json", bytes.len(), &right);
    write_list(&world, "length.json", bytes.len() + 1, &right);
    write_list(&world, "hash.json", bytes.len(), &wrong);
    let server = WebServer::start(&world.path("data"), Faults::default());
    for list in [world.text("data/right.json"), server.url("right.json")] {
        assert_eq!(samples(&open(&world, &list).unwrap()).len(), 10, "{list}");
    }
    for list in [world.text("data/length.json"), server.url("length.json")] {
        let error = open(&world, &list).unwrap_err();
        let PipelineError::ShardMismatch { reason, .. } = &error else { panic!("{list}: {error}") };
        assert!(reason.contains("its list says"), "{list}: {error}");
    }
    // The hash of a remote shard is checked when it is fetched, even if its URL was fetched before
    // without a hash.
    let remote = open(&world, &server.url("hash.json")).unwrap();
    let error = remote.read(SampleId(0)).unwrap_err();
    let PipelineError::ShardMismatch { reason, .. } = &error else { panic!("{error}") };
    assert!(reason.contains(&format!("says MD5 {wrong}")), "{error}");
    ok(&verify(&world, &world.text("data/right.json")));
    let verified = verify(&world, &world.text("data/hash.json"));
    assert_eq!(verified.status.code(), Some(3));
    let bad_line = lines_with(&String::from_utf8_lossy(&verified.stderr), "bad: ");
    check_message("storage::lengths_and_hashes_in_a_list_are_checked", &bad_line);
}

/// Damage in padding, which reading the samples does not reveal.
#[test]
fn verify_reads_every_byte() {
    let world = World::new(10);
    let shard = world.shard().display().to_string();
    ok(&world.ocelli(&["shards", "verify", &shard]));
    let mut bytes = fs::read(world.shard()).unwrap();
    // Padding after the first label.
    let label = sidecar::open(&world.shard()).unwrap().member(0, &["cls"]).unwrap().offset_bytes as usize;
    bytes[label + 300] = 1;
    fs::write(world.shard(), bytes).unwrap();
    let output = world.ocelli(&["shards", "verify", &shard, "--json"]);
    assert_eq!(output.status.code(), Some(3));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let report: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!((&report["bad_shards"], &report["bad"]), (&1.into(), &0.into()));
}

/// A damaged sample is dropped by verbs that rewrite shards, and counted by `stats`.
#[test]
fn a_damaged_sample_is_dropped_or_counted() {
    let world = World::new(20);
    let shard = world.shard().display().to_string();
    let index = sidecar::open(&world.shard()).unwrap();
    let mut bytes = fs::read(world.shard()).unwrap();
    bytes[index.member(3, &["jpg"]).unwrap().offset_bytes as usize + 50] ^= 1;
    fs::write(world.shard(), bytes).unwrap();
    for verb in ["filter", "resize", "dedup"] {
        let out = world.text(verb);
        let mut args = vec!["shards", verb, &shard, "--out", &out];
        if verb == "dedup" {
            args.push("--remove");
        }
        ok(&world.ocelli(&args));
        let dropped = fs::read_to_string(world.path(verb).join("dropped.jsonl")).unwrap();
        assert!(dropped.contains("00000003") && dropped.contains("has changed"), "{verb}: {dropped}");
    }
    let stats = world.ocelli(&["shards", "stats", &shard, "--json"]);
    ok(&stats);
    let text = String::from_utf8_lossy(&stats.stdout).into_owned();
    let report: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(report["bad"], 1, "{report}");
}
