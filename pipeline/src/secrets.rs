//! Addresses without what opens them: users, passwords, signatures and tokens; and commands by their program alone.
//!
//! Text is read, not URLs, because a list of shards has braces, and a plan must not hold a million expanded addresses. What is
//! written names the same shards, and writing it again changes nothing: a list equals what was written of it, whatever password or
//! signature a later start gives. A token that is part of a path cannot be told from a folder and stays.

use url::Url;
use xxhash_rust::xxh3::xxh3_64;

use crate::braces::{expand_braces, split_list};

/// Schemes of servers and stores.
pub(crate) const REMOTE_SCHEMES: [&str; 5] = ["http", "https", "s3", "gs", "az"];

/// Schemes of stores, in whose addresses a question mark is part of a name.
const STORES: [&str; 3] = ["s3", "gs", "az"];

/// Addresses of one group of braces that are written out one by one.
const MAX_WRITTEN: usize = 100;

/// A value of a query that is longer may be a token.
const MAX_VALUE_CHARS: usize = 24;

/// A shard list for files and pages that others may read.
pub fn without_secrets(spec: &str) -> String {
    let mut behind_a_command = false;
    let mut parts = Vec::new();
    for part in split_list(spec) {
        // What follows a command may be its own: a command may hold `::`.
        let is_certain = has_scheme(part) || !part.contains([' ', '\'', '"', '|', '$']);
        if !behind_a_command || is_certain {
            parts.push(part_without_secrets(part));
        }
        behind_a_command |= part.contains("pipe:");
    }
    parts.join("::")
}

fn has_scheme(part: &str) -> bool {
    part.split_once("://").is_some_and(|(scheme, _)| is_remote(scheme))
}

fn is_remote(scheme: &str) -> bool {
    REMOTE_SCHEMES.contains(&scheme.to_ascii_lowercase().as_str())
}

fn part_without_secrets(part: &str) -> String {
    if let Some(command) = part.strip_prefix("pipe:") {
        return command_without_secrets(command);
    }
    if let Some(address) = Address::of(part).filter(|address| !address.has_braces_beside_its_path()) {
        return address.without_secrets();
    }
    let head = part.split('{').next().unwrap_or_default();
    let may_hold_addresses = part.contains("://") || "pipe:".starts_with(head);
    if !part.contains('{') || !may_hold_addresses {
        return part.to_string();
    }
    // Braces around schemes, users or parameters.
    let is_address = |one: &String| one.starts_with("pipe:") || Address::of(one).is_some();
    let mut all = Vec::new();
    match expand_braces(part, &mut all) {
        Ok(()) if !all.iter().any(is_address) => part.to_string(),
        Ok(()) if all.len() <= MAX_WRITTEN && all != [part] => {
            let parts: Vec<String> = all.iter().map(|one| part_without_secrets(one)).collect();
            without_secrets(&parts.join("::"))
        }
        Err(_) if !part.contains("://") => part.to_string(),
        _ => "(an address that is left out)".into(),
    }
}

/// A remote address in its parts.
struct Address<'a> {
    scheme: &'a str,
    /// User, password, host and port.
    authority: &'a str,
    path: &'a str,
    /// What follows `?`, of servers alone: names of objects may hold one.
    query: Option<&'a str>,
}

impl<'a> Address<'a> {
    fn of(part: &'a str) -> Option<Self> {
        let is_scheme = |scheme: &str| {
            scheme.chars().all(|c| c.is_ascii_alphanumeric()) && !scheme.eq_ignore_ascii_case("file")
        };
        let (scheme, rest) = part.split_once("://").filter(|(scheme, _)| is_scheme(scheme))?;
        let (authority, rest) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        if STORES.contains(&scheme.to_ascii_lowercase().as_str()) {
            return Some(Self { scheme, authority, path: rest, query: None });
        }
        let rest = rest.split('#').next().unwrap_or_default();
        let (path, query) = rest.split_once('?').map_or((rest, None), |(path, query)| (path, Some(query)));
        Some(Self { scheme, authority, path, query })
    }

    fn has_braces_beside_its_path(&self) -> bool {
        self.authority.contains(['{', '}']) || self.query.is_some_and(|query| query.contains(['{', '}']))
    }

    fn without_secrets(&self) -> String {
        let host = self.authority.rsplit('@').next().unwrap_or_default();
        let kept = self.query.map(|query| Query::of(query).kept).unwrap_or_default();
        let mark = if kept.is_empty() { "" } else { "?" };
        format!("{}://{host}{}{mark}{kept}", self.scheme, self.path)
    }
}

/// A query, taken apart.
struct Query {
    /// Parameters that may be shown.
    kept: String,
    /// Parameters that may be shown, and those that may tell one file from another.
    telling: String,
}

impl Query {
    fn of(query: &str) -> Self {
        let parameters: Vec<(String, &str)> = query
            .split('&')
            .map(|parameter| {
                (parameter.split('=').next().unwrap_or_default().to_ascii_lowercase(), parameter)
            })
            .collect();
        let names: Vec<&str> = parameters.iter().map(|(name, _)| name.as_str()).collect();
        let (mut kept, mut telling) = (Vec::new(), Vec::new());
        for (name, parameter) in &parameters {
            if is_signature(name, &names) {
                continue;
            }
            telling.push((*parameter).to_string());
            if !is_secret(name) {
                kept.push(shortened(parameter));
            }
        }
        Self { kept: kept.join("&"), telling: telling.join("&") }
    }
}

/// Whether a parameter is part of a signature, which is made anew for every start.
fn is_signature(name: &str, names: &[&str]) -> bool {
    const CLOUD: [&str; 2] = ["x-amz-", "x-goog-"];
    const SIGNED: [&str; 6] =
        ["signature", "awsaccesskeyid", "googleaccessid", "expires", "policy", "key-pair-id"];
    const SHARED_ACCESS: [&str; 18] = [
        "sig", "sv", "ss", "srt", "sp", "se", "st", "spr", "sip", "sr", "si", "sdd", "skoid", "sktid", "skt",
        "ske", "sks", "skv",
    ];
    CLOUD.iter().any(|prefix| name.starts_with(prefix))
        || names.contains(&"signature") && SIGNED.contains(&name)
        || names.contains(&"sig") && SHARED_ACCESS.contains(&name)
}

/// Whether a parameter is a secret by its name.
fn is_secret(name: &str) -> bool {
    const PARTS: [&str; 14] = [
        "token", "key", "secret", "passw", "pwd", "auth", "cred", "session", "sig", "code", "jwt", "hmac",
        "otp", "access",
    ];
    PARTS.iter().any(|part| name.contains(part)) || ["pin", "sid", "pw", "pass"].contains(&name)
}

/// A parameter whose value is a hash where it is so long that it may be a secret under another name.
fn shortened(parameter: &str) -> String {
    match parameter.split_once('=') {
        Some((name, value)) if value.chars().count() > MAX_VALUE_CHARS => {
            format!("{name}=~{:08x}", xxh3_64(value.as_bytes()) as u32)
        }
        _ => parameter.to_string(),
    }
}

/// A command by its program: passwords among its words cannot be told from others.
fn command_without_secrets(command: &str) -> String {
    let first = command.split_whitespace().find(|word| !word.contains('=')).unwrap_or_default();
    let program = first.rsplit('/').next().unwrap_or_default();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    match !program.is_empty() && program.chars().all(is_plain) {
        true => format!("pipe:{program} (…)"),
        false => "pipe:(…)".into(),
    }
}

/// A command for names and messages: by its program, and a hash that tells it from others.
pub(crate) fn name_of_command(command: &str) -> String {
    format!("{}#{:08x}", command_without_secrets(command), xxh3_64(command.as_bytes()) as u32)
}

/// A URL for names and messages. Where a parameter is left out that may tell one file from another, a hash stands for it.
pub(crate) fn name_of_url(url: &Url) -> String {
    let shown = without_login(url);
    let Some(query) = shown.query().map(Query::of) else { return shown.into() };
    let mut named = shown.clone();
    named.set_query(Some(query.kept.as_str()).filter(|kept| !kept.is_empty()));
    if query.kept != query.telling {
        named.set_fragment(Some(&format!("{:08x}", xxh3_64(query.telling.as_bytes()) as u32)));
    }
    named.into()
}

/// What tells a URL from others: all of it but the password, and a signature that is made anew for every start.
pub(crate) fn identity(url: &Url) -> String {
    let mut url = url.clone();
    // It cannot be set on a URL without a host, which has none.
    let _ = url.set_password(None);
    if let Some(query) = url.query().map(Query::of) {
        url.set_query(Some(query.telling.as_str()).filter(|telling| !telling.is_empty()));
    }
    url.into()
}

fn without_login(url: &Url) -> Url {
    let mut url = url.clone();
    // Neither can be set on a URL without a host, which has neither.
    let _ = url.set_password(None);
    let _ = url.set_username("");
    url.set_fragment(None);
    url
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_written_names_the_same_shards() {
        for (given, written) in [
            ("data/train-{000..146}.tar", "data/train-{000..146}.tar"),
            ("data/a@b?c=d.tar", "data/a@b?c=d.tar"),
            ("http://user:PW@host:80/{a,b}.tar?x=1", "http://host:80/{a,b}.tar?x=1"),
            ("https://h/a.tar?X-Amz-Credential=PW&X-Amz-Signature=PW&part=2", "https://h/a.tar?part=2"),
            ("https://h/a.tar?sv=2020&st=3&se=PW&sig=PW", "https://h/a.tar"),
            ("https://h/a.tar?st=3", "https://h/a.tar?st=3"),
            ("https://h/a.tar?Expires=1&Signature=PW&Key-Pair-Id=PW", "https://h/a.tar"),
            ("https://h/a.tar?api_key=PW#PW", "https://h/a.tar"),
            ("s3://KEY:PW@bucket/a?b.tar", "s3://bucket/a?b.tar"),
            ("http://[::1]/a.tar::http://u:PW@h/b.tar", "http://[::1]/a.tar::http://h/b.tar"),
            ("{http,https}://u:PW@h/a.tar", "http://h/a.tar::https://h/a.tar"),
            ("http://{u:PW@a,u:PW@b}/x.tar", "http://a/x.tar::http://b/x.tar"),
            ("pipe:TOKEN=PW curl -H 'Bearer PW' http://h/x", "pipe:curl (…)"),
            ("a.tar::pipe:curl -H 'X::PW' h", "a.tar::pipe:curl (…)"),
            ("{pi,x}pe:cat PW", "pipe:cat (…)"),
            ("http://u:PW@h/{a.tar", "http://h/{a.tar"),
            ("{http://u:PW@h/a.tar", "(an address that is left out)"),
            ("ftp://u:PW@h/a.tar", "ftp://h/a.tar"),
            ("{a,b}-{1..2}.tar", "{a,b}-{1..2}.tar"),
            ("file:///data/a@b.tar", "file:///data/a@b.tar"),
        ] {
            assert_eq!(without_secrets(given), written, "{given}");
            assert_eq!(without_secrets(written), written);
        }
        let long = format!("https://h/a.tar?file={}", "x".repeat(40));
        assert!(without_secrets(&long).starts_with("https://h/a.tar?file=~"));
    }

    fn url(text: &str) -> Url {
        Url::parse(text).expect(text)
    }

    #[test]
    fn names_differ_where_addresses_do() {
        let name = |text: &str| name_of_url(&url(text));
        assert_eq!(name("https://u:PW@h/a.tar?x=1"), "https://h/a.tar?x=1");
        assert_eq!(name("https://h/a.tar?X-Amz-Signature=1"), name("https://h/a.tar?X-Amz-Signature=2"));
        assert_ne!(name("https://h/get?token=1"), name("https://h/get?token=2"));
        assert_ne!(name_of_command("cat a"), name_of_command("cat b"));
        assert_eq!(
            identity(&url("https://u:PW@h/a?X-Amz-Date=1")),
            identity(&url("https://u:P@h/a?X-Amz-Date=2"))
        );
        assert_ne!(identity(&url("https://h/get?key=1")), identity(&url("https://h/get?key=2")));
    }

    proptest! {
        #[test]
        fn writing_twice_changes_nothing(spec in "(http://|s3://|pipe:|https://h/)?[{},.0-9a-c:/@?&=# ']{0,24}") {
            let once = without_secrets(&spec);
            prop_assert_eq!(without_secrets(&once), once);
        }

        #[test]
        fn no_password_survives(user in "[a-z]{1,5}", password in "[A-Z0-9]{8,20}", path in "[a-z/{},0-9]{0,12}") {
            for spec in [
                format!("https://{user}:{password}@host/{path}.tar"),
                format!("x.tar::gs://{user}:{password}@b/{path}"),
                format!("https://host/{path}.tar?a=1&signature={password}"),
                format!("{{https,http}}://{user}:{password}@host/a"),
            ] {
                prop_assert!(!without_secrets(&spec).contains(&password), "{}", without_secrets(&spec));
            }
        }
    }
}
