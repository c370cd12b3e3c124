//! Removal of secrets from addresses: users, passwords, signatures and tokens; commands are reduced
//! to their program.
//!
//! Text is parsed, not URLs, because a list has braces, and a plan must not hold a million expanded
//! addresses. The result names the same shards, and redacting it again changes nothing: a list
//! equals the one that an earlier run wrote, whatever password or signature either used. A token
//! inside a path looks like a folder and is kept.

use url::Url;
use xxhash_rust::xxh3::xxh3_64;

use crate::braces::{expand_braces, split_list};
use crate::source_name::split_source;

/// Schemes of servers and object stores.
pub(crate) const REMOTE_SCHEMES: [&str; 5] = ["http", "https", "s3", "gs", "az"];

/// Schemes of object stores, in whose addresses a question mark is part of a name.
const STORE_SCHEMES: [&str; 3] = ["s3", "gs", "az"];

/// Maximum number of addresses of one part of a list that are written out one by one.
const MAX_EXPANDED_ADDRESSES: usize = 100;

/// Placeholder for an address that cannot be parsed.
const REDACTED_ADDRESS: &str = "(an address that is left out)";

/// Parameters whose values may be shown unchanged: names of files and their parts.
const PLAIN_NAMES: [&str; 16] = [
    "archive", "dataset", "download", "file", "filename", "format", "index", "name", "offset", "page",
    "part", "path", "set", "shard", "split", "version",
];

/// Maximum number of characters of a value that is shown unchanged.
const MAX_SHOWN_VALUE_CHARS: usize = 64;

/// Maximum number of digits of a number that is shown under any parameter name.
const MAX_DIGITS: usize = 6;

/// Returns a shard list without secrets, for files and pages that others may read.
pub fn redact_list(spec: &str) -> String {
    let mut behind_a_command = false;
    let mut parts = Vec::new();
    for part in split_list(spec) {
        // A part after a command may belong to it, because a command may contain `::`.
        let is_certain = has_scheme(part) || !part.contains([' ', '\'', '"', '|', '$']);
        if !behind_a_command || is_certain {
            parts.push(part_without_secrets(part));
        }
        behind_a_command |= part.contains("pipe:");
    }
    parts.join("::")
}

/// Returns one address without secrets, for files and pages that others may read. Braces are not
/// expanded.
pub fn address_without_secrets(address: &str) -> String {
    match Address::of(address.trim()).filter(|_| !is_malformed(address.trim())) {
        Some(address) => address.redact_list(),
        None if address.contains(':') => REDACTED_ADDRESS.into(),
        None => address.into(),
    }
}

fn has_scheme(part: &str) -> bool {
    part.split_once("://").is_some_and(|(scheme, _)| is_remote(scheme))
}

fn is_remote(scheme: &str) -> bool {
    REMOTE_SCHEMES.contains(&scheme.to_ascii_lowercase().as_str())
}

fn part_without_secrets(part: &str) -> String {
    // What has no colon has neither a scheme nor a command.
    if let Some((name, rest)) = split_source(part).filter(|(_, rest)| rest.contains(':')) {
        return format!("{name}={}", part_without_secrets(rest));
    }
    if is_malformed(part) {
        return REDACTED_ADDRESS.into();
    }
    if let Some(command) = part.strip_prefix("pipe:") {
        return command_without_secrets(command);
    }
    if let Some(address) = Address::of(part).filter(|address| !address.has_braces_outside_path()) {
        return address.redact_list();
    }
    // Without a colon there is no scheme, address or command.
    if !part.contains('{') || !part.contains(':') {
        return part.to_string();
    }
    // The braces may surround schemes, users or parameters.
    let is_address =
        |one: &String| one.starts_with("pipe:") || Address::of(one).is_some() || is_malformed(one);
    let mut all = Vec::new();
    match expand_braces(part, &mut all) {
        Ok(()) if !all.iter().any(is_address) => part.to_string(),
        Ok(()) if all.len() <= MAX_EXPANDED_ADDRESSES && all != [part] => {
            let parts: Vec<String> = all.iter().map(|one| part_without_secrets(one)).collect();
            redact_list(&parts.join("::"))
        }
        Err(_) if !part.contains("//") => part.to_string(),
        _ => REDACTED_ADDRESS.into(),
    }
}

/// Returns whether `part` is meant as a remote address but cannot be parsed as one: without `//`,
/// or with a login whose password ends the host too early, as `/` in an AWS key does.
fn is_malformed(part: &str) -> bool {
    let trimmed = part.trim_start();
    let Some((_, rest)) = trimmed.split_once(':').filter(|(scheme, _)| is_remote(scheme)) else {
        return false;
    };
    let Some(rest) = rest.strip_prefix("//").filter(|_| trimmed == part) else { return true };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let host = authority.rsplit('@').next().unwrap_or_default();
    // An IPv6 address contains colons.
    let port = host.split_once(':').filter(|_| !host.starts_with('['));
    let is_number = |port: &str| port.chars().all(|c| c.is_ascii_digit());
    let has_braces = authority.contains(['{', '}']);
    !has_braces && (authority.contains('\\') || port.is_some_and(|(_, port)| !is_number(port)))
}

/// Parts of a remote address.
struct Address<'a> {
    scheme: &'a str,
    /// User, password, host and port.
    authority: &'a str,
    path: &'a str,
    /// Query, for servers only: names of objects may contain a question mark.
    query: Option<&'a str>,
}

impl<'a> Address<'a> {
    fn of(part: &'a str) -> Option<Self> {
        let is_scheme = |scheme: &str| {
            scheme.chars().all(|c| c.is_ascii_alphanumeric()) && !scheme.eq_ignore_ascii_case("file")
        };
        let (scheme, rest) = part.split_once("://").filter(|(scheme, _)| is_scheme(scheme))?;
        let (authority, rest) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        if STORE_SCHEMES.contains(&scheme.to_ascii_lowercase().as_str()) {
            return Some(Self { scheme, authority, path: rest, query: None });
        }
        let rest = rest.split('#').next().unwrap_or_default();
        let (path, query) = rest.split_once('?').map_or((rest, None), |(path, query)| (path, Some(query)));
        Some(Self { scheme, authority, path, query })
    }

    fn has_braces_outside_path(&self) -> bool {
        self.authority.contains(['{', '}']) || self.query.is_some_and(|query| query.contains(['{', '}']))
    }

    fn redact_list(&self) -> String {
        let host = self.authority.rsplit('@').next().unwrap_or_default();
        let kept = self.query.map(|query| Query::of(query).kept).unwrap_or_default();
        let mark = if kept.is_empty() { "" } else { "?" };
        format!("{}://{host}{}{mark}{kept}", self.scheme, self.path)
    }
}

/// Parameters of a query, filtered.
struct Query {
    /// Parameters that may be shown.
    kept: String,
    /// All parameters except signatures: those that may tell one file from another.
    identifying: String,
}

impl Query {
    fn of(query: &str) -> Self {
        let parameters: Vec<(String, &str)> = query
            .split(['&', ';'])
            .map(|parameter| {
                (parameter.split('=').next().unwrap_or_default().to_ascii_lowercase(), parameter)
            })
            .collect();
        let names: Vec<&str> = parameters.iter().map(|(name, _)| name.as_str()).collect();
        let mut kept = Vec::new();
        let mut identifying = Vec::new();
        for (name, parameter) in &parameters {
            if is_signature(name, &names) {
                continue;
            }
            identifying.push((*parameter).to_string());
            if !is_secret(name) {
                kept.push(shown(parameter));
            }
        }
        Self { kept: kept.join("&"), identifying: identifying.join("&") }
    }
}

/// Returns whether a parameter is part of a signature, which is different in every run.
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

/// Returns whether the name of a parameter suggests a secret.
fn is_secret(name: &str) -> bool {
    const PARTS: [&str; 14] = [
        "token", "key", "secret", "passw", "pwd", "auth", "cred", "session", "sig", "code", "jwt", "hmac",
        "otp", "access",
    ];
    PARTS.iter().any(|part| name.contains(part)) || ["pin", "sid", "pw", "pass"].contains(&name)
}

/// Returns a parameter as it may be shown: unchanged if it is certainly not a secret, else with its
/// value hashed.
fn shown(parameter: &str) -> String {
    let is_plain = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-~".contains(c));
    let hash = |text: &str| format!("~{:08x}", xxh3_64(text.as_bytes()) as u32);
    let is_hash = |text: &str| {
        text.strip_prefix('~').is_some_and(|hex| hex.len() == 8 && hex.chars().all(|c| c.is_ascii_hexdigit()))
    };
    let Some((name, value)) = parameter.split_once('=') else {
        let stays = is_hash(parameter) || PLAIN_NAMES.contains(&parameter) || parameter.is_empty();
        return if stays { parameter.to_string() } else { hash(parameter) };
    };
    let is_name = name.len() <= MAX_SHOWN_VALUE_CHARS / 4
        && name.chars().all(|c| c.is_ascii_lowercase() || "_-".contains(c));
    let is_number = value.len() <= MAX_DIGITS && value.chars().all(|c| c.is_ascii_digit());
    let is_known = PLAIN_NAMES.contains(&name) && is_plain(value) && value.len() <= MAX_SHOWN_VALUE_CHARS;
    match is_name {
        true if is_number || is_known || is_hash(value) => parameter.to_string(),
        true => format!("{name}={}", hash(value)),
        false => hash(parameter),
    }
}

/// Returns a command reduced to its program: passwords among its words cannot be told from other
/// words.
fn command_without_secrets(command: &str) -> String {
    let mut words = command.split_whitespace();
    // The quoted value of a variable may have several words, any of which could be taken for the
    // program.
    let first = words
        .find(|word| !word.contains('=') || word.contains(['\'', '"', '\\', '`', '$']))
        .unwrap_or_default();
    let program = first.rsplit('/').next().unwrap_or_default();
    if !program.is_empty() && program.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c)) {
        format!("pipe:{program} (…)")
    } else {
        "pipe:(…)".into()
    }
}

/// Returns a command for names and messages: its program, and a hash that tells it from other
/// commands.
pub(crate) fn display_name_of_command(command: &str) -> String {
    format!("{}#{:08x}", command_without_secrets(command), xxh3_64(command.as_bytes()) as u32)
}

/// Returns a URL for names and messages, without secrets. If omitted parameters may identify the
/// file, a hash is added.
pub(crate) fn name_of_url(url: &Url) -> String {
    let shown = without_login(url);
    let Some(query) = shown.query().map(Query::of) else { return shown.into() };
    let mut named = shown.clone();
    named.set_query(Some(query.kept.as_str()).filter(|kept| !kept.is_empty()));
    if query.kept != query.identifying {
        named.set_fragment(Some(&format!("{:08x}", xxh3_64(query.identifying.as_bytes()) as u32)));
    }
    named.into()
}

/// Returns the part of a URL that identifies it: all but the password and a signature, which differ
/// in every run.
pub(crate) fn identity(url: &Url) -> String {
    let mut url = url.clone();
    // The password cannot be set on a URL without a host, which has none.
    let _ = url.set_password(None);
    if let Some(query) = url.query().map(Query::of) {
        url.set_query(Some(query.identifying.as_str()).filter(|identifying| !identifying.is_empty()));
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

    /// The name of a source stays, and what follows it is redacted as it is without a name.
    #[test]
    fn sources_of_a_mix_keep_their_names() {
        for list in [
            "https://u:secret@h/a.tar?token=abc",
            "pipe:curl -u me:secret x",
            "s3://b/{0..9}.tar",
            "{https://u:secret@h/a.tar,x.tar}",
        ] {
            let named = redact_list(&format!("web={list}"));
            assert_eq!(named, format!("web={}", redact_list(list)));
            assert!(!named.contains("secret") && redact_list(&named) == named, "{named}");
        }
        assert_eq!(redact_list("year=2020/a.tar"), "year=2020/a.tar");
    }

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
            assert_eq!(redact_list(given), written, "{given}");
            assert_eq!(redact_list(written), written);
        }
    }

    /// A value that may be a secret is replaced by a hash, so that two lists can still be compared.
    #[test]
    fn what_is_not_certain_is_a_hash() {
        for query in [
            "eyJhbGciOiJIUzI1NiJ9PW",
            "TOKENPW==",
            "md5=0123456789abcdefghijPW",
            "p=PW",
            "x=1;u=PW",
            "u=http://u:PW@h/a",
            "file=http://u:PW@h/a",
            "PW=1",
            "n=1234567PW",
        ] {
            let spec = format!("https://h/a.tar?{query}");
            let written = redact_list(&spec);
            assert!(!written.contains("PW") && written.starts_with("https://h/a.tar"), "{written}");
            assert_eq!(redact_list(&written), written);
        }
        let [a, b] = ["p=PA", "p=PB"].map(|query| redact_list(&format!("https://h/a.tar?{query}")));
        assert!(a != b && a.starts_with("https://h/a.tar?p=~"), "{a} {b}");
    }

    #[test]
    fn addresses_that_cannot_be_taken_apart_are_left_out() {
        for spec in [
            "http:u:PW@h/x.tar",
            "http:/u:PW@h/x.tar",
            "http:\\\\u:PW@h\\x.tar",
            " http://u:PW@h/x.jpg",
            "s3://AKIA:ab/PW@bucket/a.tar",
            "https://u:P?W@h/a.tar",
            "h{ttp:,ttps:}//u:x/PW@h/a",
        ] {
            let written = redact_list(spec);
            assert!(written.contains(REDACTED_ADDRESS) && !written.contains('@'), "{spec}: {written}");
        }
        assert_eq!(redact_list("h{ttp:,ttps:}//u:PW@h/a"), "http://h/a::https://h/a");
        assert_eq!(redact_list("pipe:A='x SECRET y' curl h"), "pipe:(…)");
        assert_eq!(redact_list("pipe:A=PW B=PW curl h"), "pipe:curl (…)");
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
        assert_ne!(display_name_of_command("cat a"), display_name_of_command("cat b"));
        assert_eq!(
            identity(&url("https://u:PW@h/a?X-Amz-Date=1")),
            identity(&url("https://u:P@h/a?X-Amz-Date=2"))
        );
        assert_ne!(identity(&url("https://h/get?key=1")), identity(&url("https://h/get?key=2")));
    }

    proptest! {
        #[test]
        fn writing_twice_changes_nothing(spec in "(http://|s3://|pipe:|https://h/)?[{},.0-9a-c:/@?&=# ']{0,24}") {
            let once = redact_list(&spec);
            prop_assert_eq!(redact_list(&once), once);
        }

        #[test]
        fn no_password_survives(user in "[a-z]{1,5}", password in "[A-Z0-9]{8,20}", path in "[a-z/{},0-9]{0,12}") {
            for spec in [
                format!("https://{user}:{password}@host/{path}.tar"),
                format!("x.tar::gs://{user}:{password}@b/{path}"),
                format!("https://host/{path}.tar?a=1&signature={password}"),
                format!("{{https,http}}://{user}:{password}@host/a"),
            ] {
                prop_assert!(!redact_list(&spec).contains(&password), "{}", redact_list(&spec));
            }
        }
    }
}
