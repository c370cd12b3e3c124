//! `http://` and `https://`: a GET, resumed by `Range` and `If-Range` (RFC 9110, sections 13 and
//! 14).

use std::time::Duration;

use futures_util::StreamExt;
use reqwest::header::{
    CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, HeaderName, IF_RANGE, LAST_MODIFIED, RANGE, RETRY_AFTER,
};
use reqwest::{Client, Response, StatusCode};
use url::Url;

use super::body::{Body, Failure};
use crate::secrets::name_of_url;

/// An object of a web server.
pub(crate) struct HttpObject {
    pub(crate) client: Client,
    pub(crate) url: Url,
    /// `true` if a response whose owner opts out is refused.
    pub(crate) honors_opt_out: bool,
}

/// Words of `X-Robots-Tag` by which an owner opts out.
const OPT_OUTS: [&str; 5] = ["noai", "noimageai", "noindex", "noimageindex", "none"];

impl HttpObject {
    pub(crate) fn name(&self) -> String {
        name_of_url(&self.url)
    }

    pub(crate) async fn open(&self, from: u64, version: Option<&str>) -> Result<Body, Failure> {
        let mut request = self.client.get(self.url.clone());
        if from > 0 {
            request = request.header(RANGE, format!("bytes={from}-"));
            if let Some(version) = version {
                request = request.header(IF_RANGE, version);
            }
        }
        let response = request.send().await.map_err(|error| failure_of(&error))?;
        if self.honors_opt_out
            && response.status().is_success()
            && let Some(word) = opt_out(response.headers())
        {
            return Err(Failure::Denied(format!("its owner opts out (X-Robots-Tag: {word})")));
        }
        body_of(response, from)
    }
}

fn body_of(response: Response, from: u64) -> Result<Body, Failure> {
    let headers = response.headers();
    let (start, total_bytes) = match response.status() {
        StatusCode::OK => (0, number(headers, &CONTENT_LENGTH)),
        StatusCode::PARTIAL_CONTENT if from > 0 => content_range(headers)
            .ok_or_else(|| Failure::Answered("the server sent an invalid Content-Range".into()))?,
        StatusCode::RANGE_NOT_SATISFIABLE => return Err(Failure::Changed),
        status => return Err(refusal(status, headers)),
    };
    let version = version_of(headers);
    let chunks = response.bytes_stream().map(|chunk| chunk.map_err(|error| reason_of(&error))).boxed();
    Ok(Body { start, total_bytes, version, chunks })
}

/// Returns a directive that opts out for all robots. Values with the name of a robot apply to that
/// robot only.
fn opt_out(headers: &HeaderMap) -> Option<&'static str> {
    let mut directives: Vec<String> = Vec::new();
    for value in headers.get_all("x-robots-tag").iter().filter_map(|value| value.to_str().ok()) {
        if !value.contains(':') {
            directives.extend(value.split(',').map(|word| word.trim().to_ascii_lowercase()));
        }
    }
    OPT_OUTS.into_iter().find(|word| directives.iter().any(|directive| directive == word))
}

fn refusal(status: StatusCode, headers: &HeaderMap) -> Failure {
    match status.as_u16() {
        404 | 410 => Failure::NotFound,
        401 | 403 => Failure::Denied(format!("the server answered {status}")),
        408 | 425 | 429 | 500.. => {
            let not_before = number(headers, &RETRY_AFTER).map(Duration::from_secs);
            Failure::Busy(format!("the server answered {status}"), not_before)
        }
        _ => Failure::Answered(format!("the server answered {status}")),
    }
}

/// Parses first byte and total length of a `Content-Range` such as `bytes 5-9/10`.
fn content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let text = headers.get(CONTENT_RANGE)?.to_str().ok()?;
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, _) = range.split_once('-')?;
    let total = if total == "*" { None } else { Some(total.parse().ok()?) };
    Some((first.parse().ok()?, total))
}

/// Returns a value for `If-Range`: a strong entity tag, or a date.
fn version_of(headers: &HeaderMap) -> Option<String> {
    let strong_tag = header_text(headers, &ETAG).filter(|tag| !tag.starts_with("W/"));
    strong_tag.or_else(|| header_text(headers, &LAST_MODIFIED)).map(str::to_string)
}

fn header_text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

fn number(headers: &HeaderMap, name: &HeaderName) -> Option<u64> {
    header_text(headers, name)?.parse().ok()
}

/// Converts an error before the response: a name that does not resolve, a port that refuses, a bad
/// certificate.
fn failure_of(error: &reqwest::Error) -> Failure {
    if error.is_builder() || error.is_redirect() {
        Failure::Permanent(reason_of(error))
    } else {
        Failure::Temporary(reason_of(error))
    }
}

/// Returns the innermost cause, which states the problem; the outer ones repeat the URL.
fn reason_of(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_range(value: &str) -> Option<(u64, Option<u64>)> {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_RANGE, value.parse().expect("a header"));
        content_range(&headers)
    }

    #[test]
    fn content_ranges_are_parsed() {
        assert_eq!(parse_range("bytes 5-9/10"), Some((5, Some(10))));
        assert_eq!(parse_range("bytes 5-9/*"), Some((5, None)));
        for wrong in ["bytes */10", "5-9/10", "bytes 5-9", "bytes x-9/10", "bytes 5-9/ten"] {
            assert_eq!(parse_range(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn opt_outs_and_versions_are_parsed() {
        let mut headers = HeaderMap::new();
        assert_eq!(opt_out(&headers), None);
        headers.append("x-robots-tag", "somebot: nofollow, noindex".parse().expect("a header"));
        assert_eq!(opt_out(&headers), None);
        headers.append("x-robots-tag", "all, NoAI".parse().expect("a header"));
        assert_eq!(opt_out(&headers), Some("noai"));
        headers.insert(LAST_MODIFIED, "Sat, 21 Nov 2026 10:00:00 GMT".parse().expect("a header"));
        headers.insert(ETAG, "W/\"weak\"".parse().expect("a header"));
        assert_eq!(version_of(&headers).as_deref(), Some("Sat, 21 Nov 2026 10:00:00 GMT"));
        headers.insert(ETAG, "\"strong\"".parse().expect("a header"));
        assert_eq!(version_of(&headers).as_deref(), Some("\"strong\""));
    }
}
