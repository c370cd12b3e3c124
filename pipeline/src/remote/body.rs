//! Responses of servers and object stores, failures of a fetch, and the sink of the bytes.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::BoxStream;

/// Receiver of fetched bytes.
pub(crate) trait Sink: io::Write + Send {
    /// Discards the bytes written so far: the object follows from its start, `total_bytes` long if
    /// that is known.
    fn restart(&mut self, total_bytes: Option<u64>) -> io::Result<()>;
}

/// A response.
pub(crate) struct Body {
    /// Offset of the first byte in the object: the requested one, or 0.
    pub(crate) start: u64,
    /// Length of the whole object.
    pub(crate) total_bytes: Option<u64>,
    /// Identifier of this version of the object, with which the rest of it can be requested.
    pub(crate) version: Option<String>,
    pub(crate) chunks: BoxStream<'static, Result<Bytes, String>>,
}

/// Reason why an object could not be fetched.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The object does not exist.
    NotFound,
    /// Access to the object, which may not even exist, is denied.
    Denied(String),
    /// An error response; a retry will not help.
    Answered(String),
    /// No response, or none within the retries; another retry will not help.
    Permanent(String),
    /// The object is no longer the version whose rest was requested.
    Changed,
    /// A temporary failure; a retry may help.
    Temporary(String),
    /// A reachable server asks for a later retry, after this time if it names one.
    Busy(String, Option<Duration>),
    /// The sink failed.
    Sink(io::Error),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotFound => write!(f, "there is no such object"),
            Self::Denied(reason)
            | Self::Answered(reason)
            | Self::Permanent(reason)
            | Self::Temporary(reason)
            | Self::Busy(reason, _) => write!(f, "{reason}"),
            Self::Changed => write!(f, "it changed during the download"),
            Self::Sink(error) => write!(f, "{error}"),
        }
    }
}
