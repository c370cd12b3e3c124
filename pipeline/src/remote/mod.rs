//! Bytes from elsewhere: HTTP servers, object stores, commands.
//!
//! [`fetch`] is the one loop that all of them go through: it waits and goes on at the byte where a
//! connection was lost, and tells a [`Sink`] to start anew where that cannot be done.

pub(crate) mod body;
pub(crate) mod fetch;
pub(crate) mod http;
pub(crate) mod object;
pub(crate) mod pipe;
pub(crate) mod retry;

mod client;

pub(crate) use body::Sink;
pub use client::{Client, GetRules};
pub use retry::RetryPolicy;
