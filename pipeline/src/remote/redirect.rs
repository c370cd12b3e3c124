//! Rules for redirects: a server could send requests to services of this machine, and a store's
//! answer could send its credentials elsewhere.

use reqwest::redirect::{Attempt, Policy};

use crate::address::{is_local, resolves_to_local};

/// Largest number of redirects that are followed: half of what browsers allow.
const MAX_REDIRECTS: usize = 10;

/// Returns the rule for web servers: redirects are followed, but lead to this machine or its link
/// only if the URL that the user named does.
pub(super) fn server_policy() -> Policy {
    Policy::custom(|attempt: Attempt<'_>| {
        if attempt.previous().len() > MAX_REDIRECTS {
            return attempt.error(format!("it redirects more than {MAX_REDIRECTS} times"));
        }
        let first = attempt.previous().first();
        let is_named = first.is_some_and(|first| is_local(first) || first.host() == attempt.url().host());
        if !is_named && resolves_to_local(attempt.url()) {
            let host = attempt.url().host_str().unwrap_or_default().to_string();
            return attempt.error(format!("it redirects to {host}, a local or link-local address"));
        }
        attempt.follow()
    })
}

/// Returns the rule for object stores, whose requests hold credentials: a redirect to another host
/// is an error.
pub(super) fn store_policy() -> Policy {
    Policy::custom(|attempt: Attempt<'_>| {
        if attempt.previous().len() > MAX_REDIRECTS {
            return attempt.error(format!("it redirects more than {MAX_REDIRECTS} times"));
        }
        let previous = attempt.previous().last();
        let is_same = previous.is_some_and(|previous| previous.origin() == attempt.url().origin());
        if !is_same {
            let host = attempt.url().host_str().unwrap_or_default().to_string();
            return attempt
                .error(format!("it redirects to another host, {host}: check the endpoint and region"));
        }
        attempt.follow()
    })
}
