use std::fs;
use std::path::Path;
use std::process::Output;

use pipeline::Shard;
use serde_json::Value;

use crate::messages::check_message;
use crate::servers::{Faults, WebServer};
use crate::support::{World, fails, ok};

/// Starts a server with a folder of images, and writes a list of them with labels and captions; two
/// of its images do not exist, and one is not an image.
fn start_server(world: &World, faults: Faults) -> (WebServer, String) {
    world.extract("www");
    let folder = world.path("www/train-000000");
    fs::write(folder.join("broken.jpg"), b"<html>no such image</html>").unwrap();
    let server = WebServer::start(&folder, faults);
    let mut list = String::from("url,label,caption\n");
    for i in 0..20 {
        let url = server.url(&format!("{i:08}.jpg"));
        list += &format!("{url},kind {},\"number {i}, a picture\"\n", i % 3);
    }
    for name in ["gone-1.jpg", "gone-2.jpg", "broken.jpg"] {
        list += &format!("{},kind 0,\n", server.url(name));
    }
    let path = world.text("list.csv");
    fs::write(&path, list).unwrap();
    (server, path)
}

fn pack(world: &World, list: &str, out: &str, more: &[&str]) -> Output {
    let out = world.text(out);
    let args = ["shards", "pack", list, "--urls", "--out", &out, "--samples-per-shard", "8", "--json"];
    world.ocelli(&[&args[..], more].concat())
}

fn report(output: &Output) -> Value {
    ok(output);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

/// URL of a sample, and extension and bytes of its members.
type Content = (String, Vec<(String, Vec<u8>)>);

/// Bytes of the member with `extension`.
fn member<'m>(members: &'m [(String, Vec<u8>)], extension: &str) -> &'m [u8] {
    &members.iter().find(|(name, _)| name == extension).unwrap().1
}

/// Reads all samples, by URL.
fn contents(folder: &Path) -> Vec<Content> {
    let mut contents = Vec::new();
    for k in 0..3 {
        let shard = Shard::open(&folder.join(format!("train-{k:06}.tar"))).unwrap();
        for i in 0..shard.len() {
            let members = shard.members(i).unwrap();
            let columns: Value = serde_json::from_slice(member(&members, "json")).unwrap();
            contents.push((columns["url"].as_str().unwrap().to_string(), members));
        }
    }
    contents.sort();
    contents
}

#[test]
fn a_list_of_urls_is_packed_and_failures_are_listed() {
    let world = World::new(20);
    // Every connection breaks within an image, and the first answers are errors.
    let faults = Faults { drop_after: Some(500), statuses: vec![503, 500], ..Faults::default() };
    let (server, list) = start_server(&world, faults);
    let summary = report(&pack(&world, &list, "out", &["--per-host", "3", "--retries", "4"]));
    assert_eq!(
        (&summary["fetched"], &summary["failed"], &summary["shards"]),
        (&20.into(), &3.into(), &3.into())
    );
    assert!(server.max_concurrent_requests() <= 3, "{}", server.max_concurrent_requests());

    let failures = fs::read_to_string(world.path("out/failures.jsonl")).unwrap();
    let mut reasons: Vec<(String, String)> = Vec::new();
    for line in failures.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        reasons.push((row["url"].as_str().unwrap().into(), row["reason"].as_str().unwrap().into()));
    }
    reasons.sort();
    assert!(reasons[0].0.ends_with("broken.jpg") && reasons[0].1.contains("not an image"), "{reasons:?}");
    assert!(reasons[1].0.ends_with("gone-1.jpg") && reasons[1].1.contains("no such object"), "{reasons:?}");

    let samples = contents(&world.path("out"));
    assert_eq!(samples.len(), 20);
    for (i, (url, members)) in samples.iter().enumerate() {
        let original = fs::read(world.path(&format!("www/train-000000/{i:08}.jpg"))).unwrap();
        assert!(url.ends_with(&format!("{i:08}.jpg")), "{url}");
        assert!(member(members, "jpg") == original, "{url}");
        assert_eq!(member(members, "txt"), format!("number {i}, a picture").as_bytes());
        assert_eq!(member(members, "cls"), (i % 3).to_string().as_bytes());
    }
    assert_eq!(fs::read_to_string(world.path("out/classes.txt")).unwrap(), "kind 0\nkind 1\nkind 2\n");
}

/// Columns of a list are kept, addresses in them without secrets, and several classes stay several.
#[test]
fn columns_and_several_classes_of_a_list_of_urls_are_kept() {
    let world = World::new(20);
    let (server, _) = start_server(&world, Faults::default());
    let list = [
        format!(
            r#"{{"url": "{}", "labels": ["red", "blue"], "license": "CC0", "score": 0.5, "width": 7,"#,
            server.url("00000000.jpg")
        ) + r#" "page": "https://user:pw@host/a?token=secret", "caption": "see https://user:pw@host/b","#
            + r#" "more": [{"page": "https://user:pw@host/a?token=secret"}]}"#,
        format!(r#"{{"url": "{}", "labels": []}}"#, server.url("00000001.jpg")),
    ];
    fs::write(world.path("list.jsonl"), list.join("\n")).unwrap();
    let summary = report(&pack(&world, &world.text("list.jsonl"), "out", &[]));
    assert_eq!(summary["fetched"], 2);
    let shard = Shard::open(&world.path("out/train-000000.tar")).unwrap();
    let mut n_labeled = 0;
    for i in 0..2 {
        let classes = shard.classes(i).unwrap();
        let members = shard.members(i).unwrap();
        let columns: Value = serde_json::from_slice(member(&members, "json")).unwrap();
        if classes.is_empty() {
            assert!(shard.states_no_class(i).unwrap(), "{columns}");
            continue;
        }
        n_labeled += 1;
        assert_eq!(classes, ["1", "0"]);
        assert_eq!((&columns["license"], &columns["score"]), (&"CC0".into(), &0.5.into()));
        assert_eq!((&columns["width"], columns["image_width"].is_u64()), (&7.into(), true));
        assert!(columns["height"].is_u64(), "{columns}");
        let text = columns.to_string();
        assert!(text.contains("https://") && !text.contains("secret") && !text.contains("pw@"), "{text}");
        let caption = String::from_utf8(member(&members, "txt").to_vec()).unwrap();
        assert!(caption.starts_with("see https://") && !caption.contains("pw"), "{caption}");
        assert_eq!(columns["labels"], serde_json::json!(["red", "blue"]));
    }
    assert_eq!(n_labeled, 1);

    // A row that failed has the same classes when it is packed again.
    let url = server.url("late.jpg");
    let table = format!("url,tags,reason\n{url},\"[\"\"red\"\", \"\"blue\"\"]\",mine\n");
    fs::write(world.path("late.csv"), table).unwrap();
    let tags = ["--label-column", "tags"];
    let output = pack(&world, &world.text("late.csv"), "late", &tags);
    assert_eq!(output.status.code(), Some(3), "every row has failed");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("/classes.txt --label-column tags --out"), "{text}");
    let failures = fs::read_to_string(world.path("late/failures.jsonl")).unwrap();
    let failure: Value = serde_json::from_str(&failures).unwrap();
    assert_eq!((&failure["list_reason"], failure["reason"].is_string()), (&"mine".into(), true));
    assert_ne!(failure["reason"], failure["list_reason"]);
    fs::copy(world.path("www/train-000000/00000000.jpg"), world.path("www/train-000000/late.jpg")).unwrap();
    let summary = report(&pack(&world, &world.text("late/failures.jsonl"), "again", &tags));
    assert_eq!(summary["fetched"], 1);
    let shard = Shard::open(&world.path("again/train-000000.tar")).unwrap();
    assert_eq!(shard.classes(0).unwrap(), ["1", "0"]);
}

/// A job whose shard was removed fetches only that one; another job is rejected; the list of
/// failures can be packed.
#[test]
fn an_interrupted_pack_resumes_and_failures_can_be_retried() {
    let world = World::new(20);
    let (server, list) = start_server(&world, Faults::default());
    report(&pack(&world, &list, "out", &[]));
    let expected = contents(&world.path("out"));
    let n_requests = server.n_requests();
    assert_eq!(server.names_after(0).len(), 23);
    fs::remove_file(world.path("out/train-000001.tar")).unwrap();
    fs::write(world.path("out/train-000001.tar.tmp"), b"half").unwrap();
    let summary = report(&pack(&world, &list, "out", &[]));
    assert_eq!(server.names_after(n_requests).len(), 8);
    assert_eq!(summary["failed_in_all"], 3);
    assert_eq!(contents(&world.path("out")), expected);
    let output = pack(&world, &list, "out", &["--seed", "1"]);
    check_message("pack_urls::an_interrupted_pack_resumes_and_failures_can_be_retried", &fails(&output, 2));

    // All failures have kind 1. It keeps its number if the retry gets the list of classes, as the
    // program recommends.
    let failures = fs::read_to_string(world.path("out/failures.jsonl")).unwrap().replace("kind 0", "kind 1");
    fs::write(world.path("again.jsonl"), failures).unwrap();
    fs::copy(world.path("www/train-000000/00000000.jpg"), world.path("www/train-000000/gone-1.jpg")).unwrap();
    let classes = ["--classes", &world.text("out/classes.txt")];
    let summary = report(&pack(&world, &world.text("again.jsonl"), "again", &classes));
    assert_eq!((&summary["fetched"], &summary["failed"]), (&1.into(), &2.into()));
    let shard = Shard::open(&world.path("again/train-000000.tar")).unwrap();
    assert_eq!(shard.label(0).unwrap(), Some(1));
    // Another numbering in the same folder is another job, which needs `--overwrite`.
    fs::write(world.path("other.txt"), "kind 2\nkind 1\nkind 0\n").unwrap();
    let other = ["--classes", &world.text("other.txt")];
    fails(&pack(&world, &list, "out", &other), 2);
    assert_eq!(report(&pack(&world, &list, "out", &[&other[..], &["--overwrite"]].concat()))["fetched"], 21);
}

#[test]
fn images_whose_owners_opt_out_are_skipped() {
    let world = World::new(20);
    let (_server, list) = start_server(&world, Faults { opts_out: Some("0000001"), ..Faults::default() });
    assert_eq!(report(&pack(&world, &list, "out", &[]))["fetched"], 9);
    assert!(fs::read_to_string(world.path("out/failures.jsonl")).unwrap().contains("X-Robots-Tag: noai"));
    assert_eq!(report(&pack(&world, &list, "all", &["--ignore-opt-out"]))["fetched"], 20);
}

#[test]
fn lists_without_urls_are_refused() {
    let world = World::new(1);
    fs::write(world.path("paths.csv"), "path\na.jpg\n").unwrap();
    let output = pack(&world, &world.text("paths.csv"), "out", &[]);
    check_message("pack_urls::lists_without_urls_are_refused.columns", &fails(&output, 2));
    let output = pack(&world, &world.text("data"), "out", &[]);
    check_message("pack_urls::lists_without_urls_are_refused.folder", &fails(&output, 2));
    fs::write(world.path("odd.txt"), "file:///etc/passwd\ns3://bucket/a.jpg\nnot a url\n").unwrap();
    let output = pack(&world, &world.text("odd.txt"), "odd", &[]);
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stdout).contains("3 of 3 rows failed"));
    let failures = fs::read_to_string(world.path("odd/failures.jsonl")).unwrap();
    assert!(failures.contains("expected http or https"), "{failures}");
}
