//! Passwords, signatures and commands in shard lists: the files of a run, its exports and its
//! reports hold none of them.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::{Arc, Mutex};

use crate::messages::check_message;
use crate::servers::{Faults, WebServer};
use crate::support::{World, fails, left_out, ok};
use crate::tracking::Tracker;

const PASSWORD: &str = "PLANTED-PASSWORD";
const SIGNATURE: &str = "PLANTED-SIGNATURE";

/// Appends the paths of all files below `folder` to `paths`.
fn list_files(folder: &Path, paths: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_symlink() {
            continue;
        }
        if path.is_dir() { list_files(&path, paths) } else { paths.push(path) }
    }
}

fn contains_secret(bytes: &[u8]) -> bool {
    for secret in [PASSWORD, SIGNATURE] {
        if bytes.windows(secret.len()).any(|window| window == secret.as_bytes()) {
            return true;
        }
    }
    false
}

fn assert_without_secret(output: &Output) {
    assert!(!contains_secret(&output.stdout), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(!contains_secret(&output.stderr), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Returns the address of `name` with a user, a password and a signature.
fn signed_url(server: &WebServer, name: &str, signature: &str) -> String {
    let address = server.url(name).replace("http://", &format!("http://user:{PASSWORD}@"));
    format!("{address}?X-Amz-Signature={signature}&X-Amz-Date=1")
}

/// Runs a command, which must succeed without printing a secret.
fn run(world: &World, args: &[&str]) {
    let output = world.ocelli_with(args, &[("OCELLI_CACHE", &world.text("cache"))]);
    assert_without_secret(&output);
    ok(&output);
}

/// Setting of the length of a run.
fn length(n_steps: u64) -> String {
    format!("optim.length={{steps={n_steps}}}")
}

/// Trains and probes with `shard` in the folder `run`.
fn pretrain(world: &World, shard: &str, n_steps: u64, more: &[&str]) {
    let recipe = world.text("tiny.toml");
    let workdir = world.text("run");
    let length = length(n_steps);
    let args = ["pretrain", "--recipe", &recipe, "--shards", shard, "--workdir", &workdir, "--set", &length];
    let probe_args = ["--probe-train", shard, "--probe-test", shard, "--set", "run.probe_every_steps=4"];
    run(world, &[&args[..], &probe_args, more].concat());
}

#[test]
fn files_and_requests_contain_no_secrets_of_addresses() {
    let world = World::new(48);
    let server = WebServer::start(&world.path("data"), Faults::default());
    let tracker = Tracker::start();
    let shard = signed_url(&server, "train-000000.tar", SIGNATURE);
    let recipe = world.text("tiny.toml");
    let workdir = world.text("run");
    pretrain(&world, &shard, 8, &[]);
    // The same address with another password and another signature resumes the same run.
    let again = signed_url(&server, "train-000000.tar", &format!("{SIGNATURE}-2"))
        .replace(PASSWORD, "PLANTED-PASSWORD-2");
    pretrain(&world, &again, 12, &["--lengthen"]);

    let recipe_text = fs::read_to_string(&recipe).unwrap() + &format!("\n[data]\nshards = [\"{shard}\"]\n");
    let recipe_with_secret = world.text("with-a-secret.toml");
    let second = world.text("second");
    fs::write(&recipe_with_secret, recipe_text).unwrap();
    run(&world, &["pretrain", "--recipe", &recipe_with_secret, "--workdir", &second, "--set", &length(4)]);

    run(&world, &["probe", "--checkpoint", &workdir, "--train", &shard, "--test", &shard, "--json"]);
    run(
        &world,
        &["embed", "--checkpoint", &workdir, "--shards", &shard, "--out", &world.text("features.npy")],
    );
    let backbone = world.text("backbone.safetensors");
    run(
        &world,
        &["export", "--checkpoint", &workdir, "--out", &backbone, "--train", &shard, "--test", &shard],
    );
    run(&world, &["report", &workdir, &second, "--out", &world.text("page.html")]);
    run(&world, &["track", &workdir, "--mlflow", &tracker.address]);
    run(&world, &["shards", "reshard", &shard, "--out", &world.text("again")]);
    run(&world, &["shards", "dedup", &shard, "--out", &world.text("unlike"), "--against", &again]);
    run(&world, &["runs", &world.folder.path().display().to_string()]);

    let mut files = Vec::new();
    list_files(world.folder.path(), &mut files);
    assert!(files.iter().any(|file| file.ends_with("run/plan.toml")));
    for file in files.iter().filter(|file| !file.ends_with("with-a-secret.toml")) {
        assert!(!contains_secret(&fs::read(file).unwrap()), "{}", file.display());
    }
    let sent = tracker.bodies();
    assert!(!sent.is_empty());
    assert!(sent.iter().all(|body| !contains_secret(body)), "what track sent");
}

/// Secrets in the files of an earlier version are neither shown nor sent.
#[test]
fn secrets_in_files_of_older_runs_are_not_shown() {
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
    assert_without_secret(&world.ocelli(&["report", &world.text("run"), "--out", &page, "--no-pictures"]));
    assert!(!contains_secret(&fs::read(page).unwrap()));
    assert_without_secret(&world.ocelli(&["track", &world.text("run"), "--mlflow", &tracker.address]));
    let sent = tracker.bodies();
    assert!(sent.iter().any(|body| !body.is_empty()));
    assert!(sent.iter().all(|body| !contains_secret(body)));
}

/// Trains with a recipe that names `shards`.
fn pretrain_with_recipe_shards(world: &World, shards: &str, more: &[&str]) -> Output {
    let text = fs::read_to_string(world.path("tiny.toml")).unwrap();
    fs::write(world.path("other.toml"), format!("{text}\n[data]\nshards = ['{shards}']\n")).unwrap();
    let recipe = world.text("other.toml");
    let workdir = world.text("run");
    world.ocelli(&[&["pretrain", "--recipe", &recipe, "--workdir", &workdir][..], more].concat())
}

#[test]
fn commands_in_a_recipe_are_not_run() {
    let world = World::new(24);
    let shard = world.text("data/train-000000.tar");
    let touched = world.path("touched");
    let command = format!("pipe:touch {}; cat {shard}", touched.display());
    let workdir = world.text("run");
    for shards in [command.clone(), format!("{shard}::{command}"), command.replace("pipe:", "{pi,pi}pe:")] {
        let stderr = fails(&pretrain_with_recipe_shards(&world, &shards, &[]), 2);
        assert!(stderr.contains("--shards"), "{stderr}");
        assert!(!touched.exists(), "{shards}");
    }
    // If other shards are given, those of the recipe are not opened.
    ok(&pretrain_with_recipe_shards(&world, &command, &["--shards", &shard]));
    assert!(!touched.exists());
    fs::remove_dir_all(&workdir).unwrap();
    // The command line may name a command.
    let recipe = world.text("tiny.toml");
    ok(&world.ocelli(&["pretrain", "--recipe", &recipe, "--workdir", &workdir, "--shards", &command]));
    assert!(touched.exists());
}

/// A server that gives the same answer to every request and records the requests.
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
        let recorded = Arc::clone(&requests);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let mut text = String::new();
                let mut lines = BufReader::new(stream.try_clone().unwrap());
                while lines.read_line(&mut text).is_ok_and(|n| n > 2) {}
                recorded.lock().unwrap().push(text);
                let _ = stream.write_all(answer.as_bytes());
            }
        });
        Self { address, requests }
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

/// Response that redirects to `address`.
fn redirect_to(address: SocketAddr) -> String {
    format!(
        "HTTP/1.1 307 Temporary Redirect\r\nLocation: http://{address}/other.tar\r\nContent-Length: \
         0\r\nConnection: close\r\n\r\n"
    )
}

const NOT_FOUND: &str = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// Secrets in an address or in a request are sent only to the host for which they were given.
#[test]
fn redirected_requests_contain_no_secrets() {
    let world = World::new(4);
    let other = Redirector::start("127.0.0.2", NOT_FOUND.into());
    let first = Redirector::start("127.0.0.1", redirect_to(other.address));
    let url = format!("http://{}/a.tar?X-Amz-Signature=hush", first.address);
    let stderr = fails(&world.ocelli(&["shards", "ls", &url]), 2);
    check_message("secrets::redirected_requests_contain_no_secrets", &stderr);
    assert!(!stderr.contains("hush"), "{stderr}");
    let requests = other.requests();
    assert!(!requests.is_empty(), "a redirect of a web server is followed");
    for request in &requests {
        assert!(!request.contains("hush") && !request.to_lowercase().contains("referer"), "{request}");
    }
    // An object store without encryption whose endpoint redirects the signed request to another
    // host.
    let n_requests = requests.len();
    let endpoint = format!("http://{}", first.address);
    let stderr = fails(
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
    assert!(stderr.contains("it redirects to another host, 127.0.0.2"), "{stderr}");
    assert_eq!(other.requests().len(), n_requests, "nothing was sent to the other host");
}

/// Address of this machine in its network, determined without sending a packet.
fn network_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect("192.0.2.1:9").ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback()).then_some(ip)
}

/// Redirects and lists of remote servers cannot point to services of this machine.
#[test]
fn remote_servers_cannot_redirect_to_this_machine() {
    let world = World::new(4);
    let Some(ip) = network_address() else {
        left_out("this machine is in no network");
        return;
    };
    let local = Redirector::start("127.0.0.1", NOT_FOUND.into());
    let remote = Redirector::start(&ip.to_string(), redirect_to(local.address));
    let stderr = fails(&world.ocelli(&["shards", "ls", &format!("http://{}/a.tar", remote.address)]), 3);
    assert!(stderr.contains("it redirects to 127.0.0.1, a local or link-local address"), "{stderr}");
    let list = format!(
        "{{\"__kind__\":\"wids-shard-index-v1\",\"wids_version\":1,\"shardlist\":[{{\"url\":\"http://{}/a.tar\"}}]}}",
        local.address
    );
    let answer =
        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{list}", list.len());
    let remote = Redirector::start(&ip.to_string(), answer);
    let stderr = fails(&world.ocelli(&["shards", "ls", &format!("http://{}/list.json", remote.address)]), 2);
    let reason = "a remote list cannot name 127.0.0.1, a local or link-local address";
    assert!(stderr.contains(reason), "{stderr}");
    assert!(local.requests().is_empty());
}
