//! Bytes from outside the local disks: HTTP servers, object stores, commands.
//!
//! [`fetch`] is the retry loop for servers and stores: after a lost connection it waits and
//! resumes at the next byte, or tells a [`Sink`] to restart if that is not possible.

pub(crate) mod body;
pub(crate) mod fetch;
pub(crate) mod http;
pub(crate) mod object;
pub(crate) mod pipe;
mod redirect;
pub(crate) mod retry;

mod client;

pub(crate) use body::Sink;
pub use client::{Client, GetLimits};
pub use retry::RetryPolicy;
