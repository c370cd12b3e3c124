//! Objects of `s3://`, `gs://` and `az://`, through `object_store`.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::client::{HttpClient, HttpConnector};
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path;
use object_store::{ClientConfigKey, ClientOptions, Error, GetOptions, GetRange, ObjectStore, RetryConfig};
use url::Url;

use super::body::{Body, Failure};
use super::redirect;
use crate::secrets::name_of_url;

/// Number of retries by the library itself, for its credentials; [`super::fetch`] resumes shards.
/// Its delays multiply with those of the fetch loop.
const LIBRARY_RETRIES: usize = 2;

/// Address of the service from which a cloud machine gets its own credentials.
const METADATA_SERVICE: &str = "169.254.169.254";

/// Limit of the time until a connection is established.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Makes the HTTP client of a store: like the library's own, but it follows no redirect to another
/// host.
#[derive(Debug)]
struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let mut builder = reqwest::Client::builder()
            .user_agent(concat!("ocelli/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT)
            .https_only(!is_set(options, ClientConfigKey::AllowHttp))
            .referer(false)
            .redirect(redirect::store_policy());
        // Many transfers at a time are faster over as many connections.
        if !is_set(options, ClientConfigKey::Http2Only) {
            builder = builder.http1_only();
        }
        if is_set(options, ClientConfigKey::AllowInvalidCertificates) {
            builder = builder.tls_danger_accept_invalid_certs(true);
        }
        if let Some(proxy) = options.get_config_value(&ClientConfigKey::ProxyUrl) {
            let excluded = options.get_config_value(&ClientConfigKey::ProxyExcludes);
            let excluded = excluded.and_then(|names| reqwest::NoProxy::from_string(&names));
            builder = builder.proxy(reqwest::Proxy::all(proxy).map_err(client_error)?.no_proxy(excluded));
        }
        Ok(HttpClient::new(builder.build().map_err(client_error)?))
    }
}

fn client_error(source: reqwest::Error) -> Error {
    Error::Generic { store: "HTTP client", source: Box::new(source) }
}

/// Returns whether a flag is set, by the same rule as the library.
fn is_set(options: &ClientOptions, key: ClientConfigKey) -> bool {
    let Some(value) = options.get_config_value(&key) else { return false };
    matches!(value.to_lowercase().as_str(), "1" | "true" | "on" | "yes" | "y")
}

/// An object of a store.
pub(crate) struct StoredObject {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) url: Url,
    pub(crate) path: Path,
}

impl StoredObject {
    pub(crate) fn name(&self) -> String {
        name_of_url(&self.url)
    }

    pub(crate) async fn open(&self, from: u64, version: Option<&str>) -> Result<Body, Failure> {
        let options = GetOptions {
            range: (from > 0).then_some(GetRange::Offset(from)),
            if_match: version.filter(|_| from > 0).map(str::to_string),
            ..GetOptions::default()
        };
        let answer = self.store.get_opts(&self.path, options).await.map_err(failure_of)?;
        let start = answer.range.start;
        let total_bytes = Some(answer.meta.size);
        let version = answer.meta.e_tag.clone();
        let chunks = answer.into_stream().map(|chunk| chunk.map_err(|error| reason_of(&error))).boxed();
        Ok(Body { start, total_bytes, version, chunks })
    }
}

/// Opens the store that `url` names, with credentials from `options`: pairs with the names of the
/// usual environment variables (`AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`,
/// `AZURE_STORAGE_ACCOUNT_NAME` …). Names that the store does not know are ignored.
pub(crate) fn open_store(url: &Url, options: &[(String, String)]) -> Result<Arc<dyn ObjectStore>, String> {
    // An endpoint without encryption is allowed if the options name one.
    let allows_http = options
        .iter()
        .any(|(name, value)| name.to_ascii_uppercase().contains("ENDPOINT") && value.starts_with("http://"));
    // A shard may take any time; a connection that stalls is detected by the fetch loop.
    let client = ClientOptions::new()
        .with_timeout_disabled()
        .with_connect_timeout(CONNECT_TIMEOUT)
        .with_allow_http(allows_http);
    let retry = RetryConfig { max_retries: LIBRARY_RETRIES, ..RetryConfig::default() };
    macro_rules! build {
        ($builder:ty) => {{
            let mut builder = <$builder>::new()
                .with_url(url.as_str())
                .with_client_options(client)
                .with_http_connector(Connector)
                .with_retry(retry);
            for (name, value) in options {
                if let Ok(key) = name.to_ascii_lowercase().parse() {
                    builder = builder.with_config(key, value);
                }
            }
            builder.build().map(|store| Arc::new(store) as Arc<dyn ObjectStore>)
        }};
    }
    let store = match url.scheme() {
        "s3" => build!(AmazonS3Builder),
        "gs" => build!(GoogleCloudStorageBuilder),
        _ => build!(MicrosoftAzureBuilder),
    };
    store.map_err(|error| error.to_string())
}

fn failure_of(error: Error) -> Failure {
    match error {
        Error::NotFound { .. } => Failure::NotFound,
        Error::Precondition { .. } => Failure::Changed,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => Failure::Denied(reason_of(&error)),
        Error::Generic { .. } if is_redirect(&error) => Failure::Permanent(reason_of(&error)),
        Error::Generic { .. } => Failure::Temporary(reason_of(&error)),
        error => Failure::Answered(reason_of(&error)),
    }
}

/// Returns whether a redirect was not followed.
fn is_redirect(error: &Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if error.downcast_ref::<reqwest::Error>().is_some_and(reqwest::Error::is_redirect) {
            return true;
        }
        cause = error.source();
    }
    false
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the innermost cause, which states the problem, as one line: it quotes the server, whose
/// line breaks must not imitate log lines of the program.
fn reason_of(error: &Error) -> String {
    let text = one_line(&error.to_string());
    if !text.contains(METADATA_SERVICE) {
        let mut cause: &dyn std::error::Error = error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        return one_line(&cause.to_string());
    }
    // Without keys the library queries the cloud's metadata service, and reports only that failure.
    format!(
        "no credentials: none in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, \
         GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY; for public data, AWS_SKIP_SIGNATURE, \
         GOOGLE_SKIP_SIGNATURE or AZURE_SKIP_SIGNATURE = true), and none from the metadata service of this \
         machine: {text}"
    )
}
