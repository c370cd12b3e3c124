//! `ocelli track` against a server that responds like MLflow and records the requests.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Output;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::messages::check_message;
use crate::support::{World, fails, metrics, ok};

/// A request: its method and path, and its body.
type Request = (String, Vec<u8>);

/// A stand-in for MLflow's server.
pub(crate) struct Tracker {
    pub(crate) address: String,
    requests: Arc<Mutex<Vec<Request>>>,
    /// Paths of requests that are rejected from now on.
    refuses: Arc<Mutex<BTreeSet<&'static str>>>,
}

impl Tracker {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let tracker = Self { address, requests: Arc::default(), refuses: Arc::default() };
        let requests = Arc::clone(&tracker.requests);
        let refuses = Arc::clone(&tracker.refuses);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                answer(stream, &requests, &refuses);
            }
        });
        tracker
    }

    /// Returns the bodies of all recorded requests that have not been taken.
    pub(crate) fn bodies(&self) -> Vec<Vec<u8>> {
        self.requests.lock().unwrap().iter().map(|(_, body)| body.clone()).collect()
    }

    /// Takes the bodies of the requests since the last call whose paths end with `path`.
    fn take(&self, path: &str) -> Vec<Value> {
        let mut requests = self.requests.lock().unwrap();
        let (matching, rest): (Vec<Request>, Vec<Request>) =
            requests.drain(..).partition(|(request_path, _)| request_path.ends_with(path));
        *requests = rest;
        matching.iter().map(|(_, body)| serde_json::from_slice(body).unwrap_or_default()).collect()
    }

    /// Takes the metrics since the last call: values by name and step.
    fn numbers(&self) -> BTreeMap<String, BTreeMap<u64, f64>> {
        let mut numbers = BTreeMap::<String, BTreeMap<u64, f64>>::new();
        for body in self.take("runs/log-batch") {
            for metric in body["metrics"].as_array().into_iter().flatten() {
                let name = metric["key"].as_str().unwrap();
                let step = metric["step"].as_u64().unwrap();
                let value = metric["value"].as_f64().unwrap();
                let previous = numbers.entry(name.into()).or_default().insert(step, value);
                assert_eq!(previous, None, "{name} at step {step} came twice");
            }
        }
        numbers
    }
}

fn answer(mut stream: TcpStream, requests: &Mutex<Vec<Request>>, refuses: &Mutex<BTreeSet<&'static str>>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut first = String::new();
    let mut n_bytes = 0;
    reader.read_line(&mut first).unwrap();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if let Some(length) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            n_bytes = length.trim().parse().unwrap();
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let mut body = vec![0; n_bytes];
    reader.read_exact(&mut body).unwrap();
    let path = first.split(' ').take(2).collect::<Vec<_>>().join(" ");
    let path = path.split('?').next().unwrap().to_string();
    let (status, answer) = match path.as_str() {
        path if refuses.lock().unwrap().iter().any(|refused| path.contains(refused)) => {
            ("503 Busy", json!({ "error_code": "TEMPORARILY_UNAVAILABLE", "message": "come back later" }))
        }
        path if path.ends_with("get-by-name") => {
            ("404 Not Found", json!({ "error_code": "RESOURCE_DOES_NOT_EXIST" }))
        }
        path if path.ends_with("experiments/create") => ("200 OK", json!({ "experiment_id": "7" })),
        path if path.ends_with("runs/create") => {
            ("200 OK", json!({ "run": { "info": { "run_id": "abc" } } }))
        }
        _ => ("200 OK", json!({})),
    };
    if status == "200 OK" {
        requests.lock().unwrap().push((path, body));
    }
    let text = answer.to_string();
    // A client that disconnects is not an error.
    let _ = write!(
        stream,
        "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{text}",
        text.len()
    );
}

/// Sends the run `run` to the server.
fn track(world: &World, tracker: &Tracker) -> Output {
    let run = world.text("run");
    world.ocelli(&["track", &run, "--mlflow", &tracker.address, "--experiment", "mine"])
}

#[test]
fn a_server_gets_every_number_of_a_run_once() {
    let world = World::new(24);
    let tracker = Tracker::start();
    ok(&world.pretrain("run", &[]));
    let run = world.text("run");
    let shard = world.text("data/train-000000.tar");

    // A server that becomes busy while a run is sent receives the rest later.
    tracker.refuses.lock().unwrap().insert("runs/log-batch");
    let stderr = fails(&track(&world, &tracker), 2);
    assert!(stderr.contains("503") && stderr.contains("come back later"), "{stderr}");
    tracker.refuses.lock().unwrap().clear();
    tracker.refuses.lock().unwrap().insert("runs/update");
    fails(&track(&world, &tracker), 2);
    tracker.refuses.lock().unwrap().clear();
    let output = track(&world, &tracker);
    ok(&output);
    assert!(String::from_utf8_lossy(&output.stdout).contains("finished"), "{output:?}");

    let created = tracker.take("runs/create");
    assert_eq!(created.len(), 1, "a run is created once");
    assert_eq!(created[0]["experiment_id"], "7");
    assert_eq!(created[0]["run_name"], "run");
    let mut params: BTreeMap<String, Value> = BTreeMap::new();
    for (_, body) in tracker.requests.lock().unwrap().iter() {
        let Ok(body) = serde_json::from_slice::<Value>(body) else { continue };
        for param in body["params"].as_array().into_iter().flatten() {
            params.insert(param["key"].as_str().unwrap().into(), param["value"].clone());
        }
    }
    assert_eq!(params["method.name"], "dino");
    assert_eq!(params["n_samples"], "24");
    let rows = metrics(&world.path("run"));
    let losses: Vec<f64> = rows.iter().map(|row| row["train/loss"].as_f64().unwrap()).collect();
    let numbers = tracker.numbers();
    assert_eq!(numbers["train/loss"].values().copied().collect::<Vec<_>>(), losses);
    assert_eq!(
        numbers["train/loss"].keys().next_back().copied(),
        rows.last().unwrap()["step"].as_u64().map(|s| s + 1)
    );
    let updates = tracker.take("runs/update");
    assert_eq!(updates.last().unwrap()["status"], "FINISHED");
    let files = tracker.requests.lock().unwrap().iter().filter(|(path, _)| path.starts_with("PUT ")).count();
    assert_eq!(files, fs::read_dir(world.path("run")).unwrap().flatten().filter(is_sent).count());

    // Numbers are sent once; a score that is added later is sent by the next call.
    ok(&track(&world, &tracker));
    assert!(tracker.numbers().is_empty());
    ok(&world.ocelli(&[
        "probe",
        "--checkpoint",
        &run,
        "--train",
        &shard,
        "--test",
        &shard,
        "--protocol",
        "knn",
    ]));
    ok(&track(&world, &tracker));
    let numbers = tracker.numbers();
    let knn = numbers.keys().find(|name| name.starts_with("eval/knn_20/data/train/evaluated/"));
    assert!(knn.is_some_and(|name| name.contains("px/data/train-24/")), "{numbers:?}");
    assert!(tracker.take("runs/create").is_empty());
    // The sidebar of TensorBoard shows forty characters of a name.
    let tags = event_tags(&world.path("run"));
    assert!(tags.iter().any(|tag| tag.starts_with("eval/knn_20/data/train/evaluated-")), "{tags:?}");
    assert!(tags.iter().any(|tag| tag == "train/loss"), "{tags:?}");
    assert!(tags.iter().all(|tag| tag.len() <= 40), "{tags:?}");
}

/// Names of the numbers in the event files of `workdir`: fields of protocol buffers, whose number
/// and length precede the text.
fn event_tags(workdir: &Path) -> BTreeSet<String> {
    let mut tags = BTreeSet::new();
    for entry in fs::read_dir(workdir).unwrap().flatten() {
        if !entry.file_name().to_string_lossy().starts_with("events.out.tfevents.") {
            continue;
        }
        let bytes = fs::read(entry.path()).unwrap();
        for at in 2..bytes.len() {
            let len = usize::from(bytes[at - 1]);
            let has_beginning = bytes[at..].starts_with(b"eval/") || bytes[at..].starts_with(b"train/");
            if bytes[at - 2] == 0x0a && has_beginning {
                tags.insert(String::from_utf8_lossy(&bytes[at..at + len]).into_owned());
            }
        }
    }
    tags
}

/// Returns `true` for pictures, the report and the plan.
fn is_sent(entry: &fs::DirEntry) -> bool {
    let name = entry.file_name().to_string_lossy().into_owned();
    name.ends_with(".png") || name == "report.html" || name == "plan.toml"
}

#[test]
fn errors_name_an_unreachable_server() {
    let world = World::new(24);
    ok(&world.pretrain("run", &[]));
    let output = world.ocelli(&["track", &world.text("run"), "--mlflow", "http://127.0.0.1:1"]);
    check_message("tracking::errors_name_an_unreachable_server.no_server", &fails(&output, 2));
    let output = world.ocelli(&["track", &world.text("run"), "--mlflow", "file:mlruns"]);
    check_message("tracking::errors_name_an_unreachable_server.address", &fails(&output, 2));
    fails(&world.ocelli(&["track", &world.text("data"), "--mlflow", "http://127.0.0.1:1"]), 2);
}
