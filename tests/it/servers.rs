use std::collections::{BTreeSet, HashMap};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;

/// Faults of the server, for all of its files.
#[derive(Debug, Clone, Default)]
pub(crate) struct Faults {
    /// Status codes of the first responses, one per request.
    pub(crate) statuses: Vec<u16>,
    /// Closes the connection after this many bytes of a body.
    pub(crate) drop_after: Option<usize>,
    /// Stops sending after this many bytes of a body, for the first request of each file.
    pub(crate) stall_after: Option<usize>,
    /// Sends one byte every 10 ms.
    pub(crate) trickles: bool,
    /// Sends the whole file for any range.
    pub(crate) ignores_ranges: bool,
    /// Sends neither length nor version.
    pub(crate) omits_length_and_version: bool,
    /// Sends the rest of the current file for any requested version.
    pub(crate) ignores_versions: bool,
    /// Responds to unknown names with a page.
    pub(crate) serves_page_for_unknown: bool,
    /// Part of the names of files whose owner opts out.
    pub(crate) opts_out: Option<&'static str>,
    /// Folder from which a file is served from its second request on.
    pub(crate) changes_to: Option<PathBuf>,
}

/// A web server for the files in a folder.
pub(crate) struct WebServer {
    address: SocketAddr,
    state: Arc<State>,
}

struct State {
    root: PathBuf,
    faults: Mutex<Faults>,
    /// Path and `Range` of each request.
    requests: Mutex<Vec<(String, Option<String>)>>,
    /// Current number of concurrent requests, and its maximum.
    active: Mutex<[usize; 2]>,
}

impl WebServer {
    pub(crate) fn start(root: &Path, faults: Faults) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = State {
            root: root.to_path_buf(),
            faults: Mutex::new(faults),
            requests: Mutex::default(),
            active: Mutex::default(),
        };
        let state = Arc::new(state);
        let shared = Arc::clone(&state);
        // Ends with the test process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                // A client that disconnects is not an error.
                std::thread::spawn(move || {
                    let mut active = state.active.lock().unwrap();
                    active[0] += 1;
                    active[1] = active[1].max(active[0]);
                    drop(active);
                    drop(answer(&state, stream, Active(&state)));
                });
            }
        });
        Self { address, state }
    }

    pub(crate) fn url(&self, name: &str) -> String {
        format!("http://{}/{name}", self.address)
    }

    pub(crate) fn set(&self, faults: Faults) {
        *self.state.faults.lock().unwrap() = faults;
    }

    /// Returns the largest number of concurrent requests.
    pub(crate) fn max_concurrent_requests(&self) -> usize {
        self.state.active.lock().unwrap()[1]
    }

    /// Returns the number of requests so far.
    pub(crate) fn n_requests(&self) -> usize {
        self.state.requests.lock().unwrap().len()
    }

    /// Returns the names requested after the first `skip` requests; a client may request a name
    /// twice.
    pub(crate) fn names_after(&self, skip: usize) -> BTreeSet<String> {
        self.state.requests.lock().unwrap().iter().skip(skip).map(|(name, _)| name.clone()).collect()
    }

    /// Returns the `Range` of each request for `name`, in order.
    pub(crate) fn ranges(&self, name: &str) -> Vec<Option<String>> {
        let requests = self.state.requests.lock().unwrap();
        requests.iter().filter(|(path, _)| path == name).map(|(_, range)| range.clone()).collect()
    }
}

/// A request in progress. Dropped before the last bytes are sent, because the client may send
/// another as soon as it has them.
struct Active<'a>(&'a State);

impl Drop for Active<'_> {
    fn drop(&mut self) {
        self.0.active.lock().unwrap()[0] -= 1;
    }
}

/// Answers one request and closes the connection.
fn answer(state: &State, mut stream: TcpStream, active: Active<'_>) -> std::io::Result<()> {
    let (path, headers) = request(&stream)?;
    let range = headers.get("range").cloned();
    let mut requests = state.requests.lock().unwrap();
    let n_before = requests.iter().filter(|(before, _)| *before == path).count();
    requests.push((path.clone(), range.clone()));
    drop(requests);
    let mut guard = state.faults.lock().unwrap();
    let status = if guard.statuses.is_empty() { None } else { Some(guard.statuses.remove(0)) };
    let faults = guard.clone();
    drop(guard);
    if let Some(status) = status {
        drop(active);
        return write!(stream, "HTTP/1.1 {status} Fault\r\nretry-after: 0\r\ncontent-length: 0\r\n\r\n");
    }
    let mut bytes = match std::fs::read(state.root.join(&path)) {
        Ok(bytes) => bytes,
        Err(_) if faults.serves_page_for_unknown => b"<html>Hello</html>".to_vec(),
        Err(_) => {
            drop(active);
            return write!(stream, "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n");
        }
    };
    let mut version = "\"first\"";
    if let Some(root) = faults.changes_to.filter(|_| n_before > 0) {
        bytes = std::fs::read(root.join(&path))?;
        version = "\"second\"";
    }
    let is_other_version = headers.get("if-range").is_some_and(|requested| requested != version);
    let sends_range = !faults.ignores_ranges && (faults.ignores_versions || !is_other_version);
    let mut start: usize = 0;
    if sends_range && let Some(range) = range.as_deref().and_then(|range| range.strip_prefix("bytes=")) {
        start = range.trim_end_matches('-').parse().unwrap();
    }
    if start == 0 {
        write!(stream, "HTTP/1.1 200 OK\r\nconnection: close\r\n")?;
    } else {
        let range = format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len());
        write!(stream, "HTTP/1.1 206 Partial Content\r\nconnection: close\r\ncontent-range: {range}\r\n")?;
    }
    if !faults.omits_length_and_version {
        write!(stream, "content-length: {}\r\netag: {version}\r\n", bytes.len() - start)?;
    }
    if faults.opts_out.is_some_and(|word| path.contains(word)) {
        write!(stream, "x-robots-tag: noai, noindex\r\n")?;
    }
    write!(stream, "\r\n")?;
    let stall = faults.stall_after.filter(|_| n_before == 0);
    let end = bytes.len().min(start + faults.drop_after.or(stall).unwrap_or(usize::MAX - start));
    if faults.trickles {
        for byte in &bytes[start..end] {
            stream.write_all(&[*byte])?;
            std::thread::sleep(Duration::from_millis(10));
        }
        return Ok(());
    }
    stream.write_all(&bytes[start..end - 1])?;
    drop(active);
    stream.write_all(&bytes[end - 1..end])?;
    if stall.is_some() {
        std::thread::sleep(Duration::from_secs(20));
    }
    Ok(())
}

/// Reads path and headers of a request.
///
/// # Errors
///
/// If the connection is closed without a request, as by a client that sent its request over another
/// connection.
fn request(stream: &TcpStream) -> std::io::Result<(String, HashMap<String, String>)> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next().unwrap_or_else(|| Err(std::io::ErrorKind::UnexpectedEof.into()))?;
    let path = first.split(' ').nth(1).unwrap_or("/").split('?').next().unwrap_or("/");
    let mut headers = HashMap::new();
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        headers.insert(name.to_ascii_lowercase(), value.to_string());
    }
    Ok((path.trim_start_matches('/').to_string(), headers))
}

/// Key and secret of the S3 server.
pub(crate) const S3_KEYS: [&str; 2] = ["a-key", "a-secret"];

/// Starts an S3 server whose buckets are the folders in `root`, and returns its address.
pub(crate) fn start_s3(root: &Path) -> String {
    let mut service = S3ServiceBuilder::new(FileSystem::new(root).unwrap());
    service.set_auth(SimpleAuth::from_single(S3_KEYS[0], S3_KEYS[1]));
    let service = service.build();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            let http = hyper_util::server::conn::auto::Builder::new(hyper_util::rt::TokioExecutor::new());
            while let Ok((stream, _)) = listener.accept().await {
                let connection =
                    http.serve_connection(hyper_util::rt::TokioIo::new(stream), service.clone()).into_owned();
                tokio::spawn(async move { drop(connection.await) });
            }
        });
    });
    format!("http://{address}")
}
