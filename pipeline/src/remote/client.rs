//! Client of servers and object stores: one runtime, one HTTP client and one client per bucket.
//!
//! The client is made when it is first needed: a run on local files starts no runtime.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use object_store::ObjectStore;
use object_store::path::Path;
use tokio::runtime::Runtime;
use tokio::time::timeout;
use url::Url;

use super::body::{Failure, Sink};
use super::fetch::{Origin, fetch};
use super::http::HttpObject;
use super::object::{StoredObject, open_store};
use super::redirect;
use super::retry::RetryPolicy;

/// Number of threads that wait for the network. Received bytes are written by the calling threads.
const RUNTIME_THREADS: usize = 2;

/// A client for all remote URLs. Shared by threads; its calls block.
pub struct Client {
    runtime: Runtime,
    http: reqwest::Client,
    stores: Mutex<HashMap<String, Arc<dyn ObjectStore>>>,
    options: Vec<(String, String)>,
    policy: RetryPolicy,
    answered: AtomicBool,
}

/// Rules for a response that is read into memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GetLimits {
    /// Limit of the length, in bytes.
    pub max_bytes: u64,
    /// Limit of the time, all retries included.
    pub timeout: Duration,
    /// `true` if an `X-Robots-Tag` that forbids indexing or AI training is honored.
    pub honors_opt_out: bool,
}

/// Sink that keeps bytes in memory, up to a limit.
struct BoundedBuffer {
    bytes: Vec<u8>,
    max_bytes: u64,
}

impl Client {
    /// Creates a client. `options` are the credentials of object stores, under the names of the
    /// usual environment variables.
    ///
    /// # Errors
    /// Fails if no thread can be started or no root certificates are installed.
    pub fn new(options: Vec<(String, String)>, policy: RetryPolicy) -> io::Result<Self> {
        // Fails if the program has already installed a provider, which works as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(RUNTIME_THREADS)
            .thread_name("ocelli-net")
            .enable_all()
            .build()?;
        let http = reqwest::Client::builder()
            .user_agent(concat!("ocelli/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(Duration::from_secs(10).min(policy.stall))
            // The query of a signed URL is a secret.
            .referer(false)
            .redirect(redirect::server_policy())
            .build()
            .map_err(io::Error::other)?;
        Ok(Self {
            runtime,
            http,
            stores: Mutex::default(),
            options,
            policy,
            answered: AtomicBool::new(false),
        })
    }

    /// Fetches the object of an `http` or `https` URL into memory.
    ///
    /// # Errors
    /// Returns the reason as text: the object does not exist, breaks one of the `rules`, or could
    /// not be fetched.
    pub fn get(&self, url: &str, rules: &GetLimits) -> Result<Vec<u8>, String> {
        let url = Url::parse(url).map_err(|error| error.to_string())?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(format!("unsupported scheme {}: expected http or https", url.scheme()));
        }
        let object = HttpObject { client: self.http.clone(), url, honors_opt_out: rules.honors_opt_out };
        let mut sink = BoundedBuffer { bytes: Vec::new(), max_bytes: rules.max_bytes };
        let origin = Origin::Http(object);
        let fetched = fetch(&origin, &self.policy, &self.answered, &mut sink);
        let fetched = self.runtime.block_on(async { timeout(rules.timeout, fetched).await });
        match fetched {
            Ok(Ok(())) => Ok(sink.bytes),
            Ok(Err(failure)) => Err(failure.to_string()),
            Err(_) => Err(format!("timed out after {:?}", rules.timeout)),
        }
    }

    /// Fetches the object of `url` into memory, up to a limit.
    pub(crate) fn read(&self, url: &Url, max_bytes: u64) -> Result<Vec<u8>, Failure> {
        let mut sink = BoundedBuffer { bytes: Vec::new(), max_bytes };
        self.fetch(url, &mut sink)?;
        Ok(sink.bytes)
    }

    /// Fetches the object of `url` into `sink`, with retries.
    pub(crate) fn fetch(&self, url: &Url, sink: &mut dyn Sink) -> Result<(), Failure> {
        let origin = self.origin(url).map_err(Failure::Permanent)?;
        self.runtime.block_on(fetch(&origin, &self.policy, &self.answered, sink))
    }

    fn origin(&self, url: &Url) -> Result<Origin, String> {
        if matches!(url.scheme(), "http" | "https") {
            let client = self.http.clone();
            let url = url.clone();
            return Ok(Origin::Http(HttpObject { client, url, honors_opt_out: false }));
        }
        let bucket = url[..url::Position::BeforePath].to_string();
        // A poisoned lock only means that another thread panicked between two plain inserts.
        let mut stores = self.stores.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let store = match stores.get(&bucket) {
            Some(store) => Arc::clone(store),
            None => {
                let store = open_store(url, &self.options)?;
                stores.insert(bucket, Arc::clone(&store));
                store
            }
        };
        let path = Path::from_url_path(url.path()).map_err(|error| error.to_string())?;
        Ok(Origin::Stored(StoredObject { store, url: url.clone(), path }))
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The options hold secrets.
        f.debug_struct("Client").field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl Sink for BoundedBuffer {
    fn restart(&mut self, total_bytes: Option<u64>) -> io::Result<()> {
        self.bytes.clear();
        self.check(total_bytes.unwrap_or(0))
    }
}

impl BoundedBuffer {
    fn check(&self, len_bytes: u64) -> io::Result<()> {
        if len_bytes > self.max_bytes {
            Err(io::Error::other(format!("it is larger than {} bytes", self.max_bytes)))
        } else {
            Ok(())
        }
    }
}

impl io::Write for BoundedBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.check((self.bytes.len() + bytes.len()) as u64)?;
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
