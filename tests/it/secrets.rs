//! Passwords, signatures and commands in shard lists: the files of a run, its exports and its
//! reports hold none of them.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::{Arc, Mutex};

use crate::servers::{Faults, WebServer};
use crate::support::{World, fails, left_out, ok};
use crate::tracking::Tracker;

const PASSWORD: &str = "PLANTED-PASSWORD";
const SIGNATURE: &str = "PLANTED-SIGNATURE";

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_symlink() {
            continue;
        }
        if path.is_dir() { files(&path, found) } else { found.push(path) }
    }
}

fn holds_a_secret(bytes: &[u8]) -> bool {
    [PASSWORD, SIGNATURE]
        .iter()
        .any(|secret| bytes.windows(secret.len()).any(|part| part == secret.as_bytes()))
}

fn silent(output: &Output) {
    assert!(!holds_a_secret(&output.stdout), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(!holds_a_secret(&output.stderr), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Returns the address of `name` with a user, a password and a signature.
fn signed(server: &WebServer, name: &str, signature: &str) -> String {
    let address = server.url(name).replace("http://", &format!("http://user:{PASSWORD}@"));
    format!("{address}?X-Amz-Signature={signature}&X-Amz-Date=1")
}

#[test]
fn nothing_that_is_written_holds_the_secrets_of_addresses() {
    let world = World::new(48);
    let server = WebServer::start(&world.path("data"), Faults::default());
    let tracker = Tracker::start();
    let shard = signed(&server, "train-000000.tar", SIGNATURE);
    let cache = world.text("cache");
    let run = |args: &[&str]| {
        let output = world.ocelli_with(args, &[("OCELLI_CACHE", &cache)]);
        silent(&output);
        ok(&output);
    };
    let recipe = world.text("tiny.toml");
    let workdir = world.text("run");
    let steps = |n: u64| format!("optim.length={{steps={n}}}");
    let train = |shard: &str, n: u64, more: &[&str]| {
        let length = steps(n);
        let args =
            ["pretrain", "--recipe", &recipe, "--shards", shard, "--workdir", &workdir, "--set", &length];
        let probed = ["--probe-train", shard, "--probe-test", shard, "--set", "run.probe_every_steps=4"];
        run(&[&args[..], &probed, more].concat());
    };
    train(&shard, 8, &[]);
    // Another password and another signature are the same run.
    let again = signed(&server, "train-000000.tar", &format!("{SIGNATURE}-2"))
        .replace(PASSWORD, "PLANTED-PASSWORD-2");
    train(&again, 12, &["--lengthen"]);

    let in_recipe = fs::read_to_string(&recipe).unwrap() + &format!("\n[data]\nshards = [\"{shard}\"]\n");
    let of_user = world.text("with-a-secret.toml");
    let second = world.text("second");
    fs::write(&of_user, in_recipe).unwrap();
    run(&["pretrain", "--recipe", &of_user, "--workdir", &second, "--set", &steps(4)]);

    run(&["probe", "--checkpoint", &workdir, "--train", &shard, "--test", &shard, "--json"]);
    run(&["embed", "--checkpoint", &workdir, "--shards", &shard, "--out", &world.text("features.npy")]);
    let backbone = world.text("backbone.safetensors");
    run(&["export", "--checkpoint", &workdir, "--out", &backbone, "--train", &shard, "--test", &shard]);
    run(&["report", &workdir, &second, "--out", &world.text("page.html")]);
    run(&["track", &workdir, "--mlflow", &tracker.address]);
    run(&["shards", "reshard", &shard, "--out", &world.text("again")]);
    run(&["shards", "dedup", &shard, "--out", &world.text("unlike"), "--against", &again]);
    run(&["runs", &world.folder.path().display().to_string()]);

    let mut found = Vec::new();
    files(world.folder.path(), &mut found);
    assert!(found.iter().any(|file| file.ends_with("run/plan.toml")));
    for file in found.iter().filter(|file| !file.ends_with("with-a-secret.toml")) {
        assert!(!holds_a_secret(&fs::read(file).unwrap()), "{}", file.display());
    }
    let sent = tracker.bodies();
    assert!(!sent.is_empty());
    assert!(sent.iter().all(|body| !holds_a_secret(body)), "what track sent");
}

/// Secrets that an older release has written are neither shown nor sent.
#[test]
fn the_secrets_of_older_runs_stay_where_they_are() {
    let world = World::new(24);
    let tracker = Tracker::start();
    ok(&world.pretrain("run", &[]));
    let secret = format!("http://user:{PASSWORD}@host/a.tar?sig={SIGNATURE}&se=1");
    for name in ["plan.toml", "starts.jsonl"] {
        let text = fs::read_to_string(world.path("run").join(name)).unwrap();
        let shard = world.text("data/train-000000.tar");
        assert!(text.contains(&shard), "{name}");
        fs::write(world.path("run").join(name), text.replace(&shard, &secret)).unwrap();
    }
    let page = world.text("page.html");
    silent(&world.ocelli(&["report", &world.text("run"), "--out", &page, "--no-pictures"]));
    assert!(!holds_a_secret(&fs::read(page).unwrap()));
    silent(&world.ocelli(&["track", &world.text("run"), "--mlflow", &tracker.address]));
    let sent = tracker.bodies();
    assert!(sent.iter().any(|body| !body.is_empty()) && sent.iter().all(|body| !holds_a_secret(body)));
}

#[test]
fn a_recipe_runs_no_command() {
    let world = World::new(24);
    let shard = world.text("data/train-000000.tar");
    let touched = world.path("touched");
    let command = format!("pipe:touch {}; cat {shard}", touched.display());
    let text = fs::read_to_string(world.path("tiny.toml")).unwrap();
    let workdir = world.text("run");
    let with = |shards: &str, more: &[&str]| {
        fs::write(world.path("other.toml"), format!("{text}\n[data]\nshards = ['{shards}']\n")).unwrap();
        let recipe = world.text("other.toml");
        world.ocelli(&[&["pretrain", "--recipe", &recipe, "--workdir", &workdir][..], more].concat())
    };
    for shards in [command.clone(), format!("{shard}::{command}"), command.replace("pipe:", "{pi,pi}pe:")] {
        let told = fails(&with(&shards, &[]), 2);
        assert!(told.contains("--shards"), "{told}");
        assert!(!touched.exists(), "{shards}");
    }
    // If other shards are given, those of the recipe are not opened.
    ok(&with(&command, &["--shards", &shard]));
    assert!(!touched.exists());
    fs::remove_dir_all(&workdir).unwrap();
    // The command line may name a command.
    let recipe = world.text("tiny.toml");
    ok(&world.ocelli(&["pretrain", "--recipe", &recipe, "--workdir", &workdir, "--shards", &command]));
    assert!(touched.exists());
}

/// A server that gives every request one answer, and keeps what it was asked.
struct Redirector {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Redirector {
    /// Starts a server at `ip` that answers with `answer`: status line, headers and body.
    fn start(ip: &str, answer: String) -> Self {
        let listener = TcpListener::bind((ip, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&requests);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let mut text = String::new();
                let mut lines = BufReader::new(stream.try_clone().unwrap());
                while lines.read_line(&mut text).is_ok_and(|n| n > 2) {}
                kept.lock().unwrap().push(text);
                let _ = stream.write_all(answer.as_bytes());
            }
        });
        Self { address, requests }
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

fn moved_to(address: SocketAddr) -> String {
    format!(
        "HTTP/1.1 307 Temporary Redirect\r\nLocation: http://{address}/other.tar\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )
}

const GONE: &str = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// Secrets in an address or in a request stay with the host that they were given for.
#[test]
fn a_redirect_carries_no_secret() {
    let world = World::new(4);
    let other = Redirector::start("127.0.0.2", GONE.into());
    let first = Redirector::start("127.0.0.1", moved_to(other.address));
    let url = format!("http://{}/a.tar?X-Amz-Signature=hush", first.address);
    let said = fails(&world.ocelli(&["shards", "ls", &url]), 3);
    assert!(said.contains("does not exist") && !said.contains("hush"), "{said}");
    let asked = other.requests();
    assert!(!asked.is_empty(), "a redirect of a web server is followed");
    for request in &asked {
        assert!(!request.contains("hush") && !request.to_lowercase().contains("referer"), "{request}");
    }
    // An object store whose endpoint, which is named without encryption, sends the signed request
    // elsewhere.
    let n_asked = asked.len();
    let endpoint = format!("http://{}", first.address);
    let said = fails(
        &world.ocelli_with(
            &["shards", "ls", "s3://bucket/a.tar"],
            &[
                ("AWS_ENDPOINT_URL", &endpoint),
                ("AWS_ACCESS_KEY_ID", "someone"),
                ("AWS_SECRET_ACCESS_KEY", "hush"),
                ("AWS_SESSION_TOKEN", "hush"),
                ("AWS_REGION", "us-east-1"),
            ],
        ),
        3,
    );
    assert!(said.contains("redirects to another host, 127.0.0.2"), "{said}");
    assert_eq!(other.requests().len(), n_asked, "nothing was sent there");
}

/// A server elsewhere sends nobody to services of this machine, and neither does a list.
#[test]
fn what_is_elsewhere_does_not_lead_here() {
    let world = World::new(4);
    // The address of this machine in its network, found without a packet being sent.
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    let Some(own) = socket
        .connect("192.0.2.1:9")
        .and_then(|()| socket.local_addr())
        .ok()
        .filter(|own| !own.ip().is_loopback())
    else {
        left_out("this machine is in no network");
        return;
    };
    let here = Redirector::start("127.0.0.1", GONE.into());
    let elsewhere = Redirector::start(&own.ip().to_string(), moved_to(here.address));
    let said = fails(&world.ocelli(&["shards", "ls", &format!("http://{}/a.tar", elsewhere.address)]), 3);
    assert!(said.contains("an address of this machine"), "{said}");
    let list = format!(
        "{{\"__kind__\":\"wids-shard-index-v1\",\"wids_version\":1,\"shardlist\":[{{\"url\":\"http://{}/a.tar\"}}]}}",
        here.address
    );
    let answer =
        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{list}", list.len());
    let elsewhere = Redirector::start(&own.ip().to_string(), answer);
    let said = fails(&world.ocelli(&["shards", "ls", &format!("http://{}/list.json", elsewhere.address)]), 2);
    assert!(said.contains("cannot name 127.0.0.1"), "{said}");
    assert!(here.requests().is_empty());
}
