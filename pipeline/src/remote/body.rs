//! What a server or a store answers, why it may not, and where the bytes go.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::BoxStream;

/// Where fetched bytes go.
pub(crate) trait Sink: io::Write + Send {
    /// Forgets what was written: the object comes from its start, `total_bytes` long if that is known.
    fn restart(&mut self, total_bytes: Option<u64>) -> io::Result<()>;
}

/// An answer.
pub(crate) struct Body {
    /// Which byte of the object comes first: the one that was asked for, or 0.
    pub(crate) start: u64,
    /// Length of the whole object.
    pub(crate) total_bytes: Option<u64>,
    /// What names this version of the object, to ask for the rest of the same.
    pub(crate) version: Option<String>,
    pub(crate) chunks: BoxStream<'static, Result<Bytes, String>>,
}

/// Why an object did not come.
#[derive(Debug)]
pub(crate) enum Failure {
    /// There is no such object.
    NotFound,
    /// There may be one, but not for us.
    Denied(String),
    /// An answer after which asking again will not help.
    Answered(String),
    /// There is no answer, or none any more, and asking again will not help.
    Refused(String),
    /// It is not the version any more whose rest was asked for.
    Changed,
    /// Asking again may help.
    Passing(String),
    /// A server that is there asks to come again; not before this time if it names one.
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
            | Self::Refused(reason)
            | Self::Passing(reason)
            | Self::Busy(reason, _) => write!(f, "{reason}"),
            Self::Changed => write!(f, "it changed while it was fetched"),
            Self::Sink(error) => write!(f, "{error}"),
        }
    }
}
