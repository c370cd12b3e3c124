use std::fs;
use std::path::Path;
use std::process::Output;

use pipeline::Shard;
use serde_json::Value;

use crate::servers::{Faults, WebServer};
use crate::support::{World, fails, ok};

/// Starts a server with a folder of images, and writes a list of them with labels and captions, two
/// of which do not exist and one of which is not an image.
fn web(world: &World, faults: Faults) -> (WebServer, String) {
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

/// URL and members of a sample.
type Content = (String, Vec<(String, Vec<u8>)>);

/// Reads all samples, by URL.
fn contents(folder: &Path) -> Vec<Content> {
    let mut found = Vec::new();
    for k in 0..3 {
        let shard = Shard::open(&folder.join(format!("train-{k:06}.tar"))).unwrap();
        for i in 0..shard.len() {
            let members = shard.members(i).unwrap();
            let json = &members.iter().find(|(extension, _)| extension == "json").unwrap().1;
            let about: Value = serde_json::from_slice(json).unwrap();
            found.push((about["url"].as_str().unwrap().to_string(), members));
        }
    }
    found.sort();
    found
}

#[test]
fn a_list_of_urls_becomes_shards_and_a_list_of_failures() {
    let world = World::new(20);
    // Every connection breaks in the middle of an image, and the first answers are errors.
    let faults = Faults { drop_after: Some(500), statuses: vec![503, 500], ..Faults::default() };
    let (server, list) = web(&world, faults);
    let said = report(&pack(&world, &list, "out", &["--per-host", "3", "--retries", "4"]));
    assert_eq!((&said["fetched"], &said["failed"], &said["shards"]), (&20.into(), &3.into(), &3.into()));
    assert!(server.most_at_a_time() <= 3, "{}", server.most_at_a_time());

    let failures = fs::read_to_string(world.path("out/failures.jsonl")).unwrap();
    let mut reasons: Vec<(String, String)> = failures
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .map(|row| (row["url"].as_str().unwrap().into(), row["reason"].as_str().unwrap().into()))
        .collect();
    reasons.sort();
    assert!(reasons[0].0.ends_with("broken.jpg") && reasons[0].1.contains("not an image"), "{reasons:?}");
    assert!(reasons[1].0.ends_with("gone-1.jpg") && reasons[1].1.contains("no such object"), "{reasons:?}");

    let found = contents(&world.path("out"));
    assert_eq!(found.len(), 20);
    for (i, (url, members)) in found.iter().enumerate() {
        let member = |extension: &str| &members.iter().find(|(there, _)| there == extension).unwrap().1;
        let original = fs::read(world.path(&format!("www/train-000000/{i:08}.jpg"))).unwrap();
        assert!(url.ends_with(&format!("{i:08}.jpg")) && *member("jpg") == original, "{url}");
        assert_eq!(*member("txt"), format!("number {i}, a picture").into_bytes());
        assert_eq!(*member("cls"), (i % 3).to_string().into_bytes());
    }
    assert_eq!(fs::read_to_string(world.path("out/classes.txt")).unwrap(), "kind 0\nkind 1\nkind 2\n");
}

/// A job that lost a shard fetches only that one; another job is rejected; the failures are a list.
#[test]
fn a_pack_goes_on_and_failures_can_be_tried_again() {
    let world = World::new(20);
    let (server, list) = web(&world, Faults::default());
    report(&pack(&world, &list, "out", &[]));
    let whole = contents(&world.path("out"));
    let n_requests = server.n_requests();
    assert_eq!(server.names_after(0).len(), 23);
    fs::remove_file(world.path("out/train-000001.tar")).unwrap();
    fs::write(world.path("out/train-000001.tar.tmp"), b"half").unwrap();
    let said = report(&pack(&world, &list, "out", &[]));
    assert_eq!(server.names_after(n_requests).len(), 8);
    assert_eq!(said["failed_in_all"], 3);
    assert_eq!(contents(&world.path("out")), whole);
    assert!(fails(&pack(&world, &list, "out", &["--seed", "1"]), 2).contains("another job"));

    // Only kind 1 has failed: it keeps its number if the retry is told the classes, as the program
    // says.
    let failures = fs::read_to_string(world.path("out/failures.jsonl")).unwrap().replace("kind 0", "kind 1");
    fs::write(world.path("again.jsonl"), failures).unwrap();
    fs::copy(world.path("www/train-000000/00000000.jpg"), world.path("www/train-000000/gone-1.jpg")).unwrap();
    let classes = ["--classes", &world.text("out/classes.txt")];
    let said = report(&pack(&world, &world.text("again.jsonl"), "again", &classes));
    assert_eq!((&said["fetched"], &said["failed"]), (&1.into(), &2.into()));
    let shard = Shard::open(&world.path("again/train-000000.tar")).unwrap();
    assert_eq!(shard.label(0).unwrap(), Some(1));
    // Another numbering in the same folder is another job, and starts anew if told so.
    fs::write(world.path("other.txt"), "kind 2\nkind 1\nkind 0\n").unwrap();
    let other = ["--classes", &world.text("other.txt")];
    fails(&pack(&world, &list, "out", &other), 2);
    assert_eq!(report(&pack(&world, &list, "out", &[&other[..], &["--overwrite"]].concat()))["fetched"], 21);
}

#[test]
fn owners_who_opt_out_are_heard() {
    let world = World::new(20);
    let (_server, list) = web(&world, Faults { opts_out: Some("0000001"), ..Faults::default() });
    assert_eq!(report(&pack(&world, &list, "out", &[]))["fetched"], 9);
    assert!(fs::read_to_string(world.path("out/failures.jsonl")).unwrap().contains("X-Robots-Tag: noai"));
    assert_eq!(report(&pack(&world, &list, "all", &["--ignore-opt-out"]))["fetched"], 20);
}

#[test]
fn what_is_no_list_of_urls_is_said() {
    let world = World::new(1);
    fs::write(world.path("paths.csv"), "path\na.jpg\n").unwrap();
    assert!(
        fails(&pack(&world, &world.text("paths.csv"), "out", &[]), 2)
            .contains("none of the columns url, image_url")
    );
    assert!(fails(&pack(&world, &world.text("data"), "out", &[]), 2).contains("list of URLs"));
    fs::write(world.path("odd.txt"), "file:///etc/passwd\ns3://bucket/a.jpg\nnot a url\n").unwrap();
    let nothing = pack(&world, &world.text("odd.txt"), "odd", &[]);
    assert_eq!(nothing.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&nothing.stdout).contains("3 of 3 rows failed"));
    let failures = fs::read_to_string(world.path("odd/failures.jsonl")).unwrap();
    assert!(failures.contains("neither http nor https"), "{failures}");
}
