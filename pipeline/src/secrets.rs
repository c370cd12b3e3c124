//! Removal of secrets from addresses: users, passwords, signatures and tokens; commands are reduced
//! to their program.
//!
//! Text is parsed, not URLs, because a list has braces, and a plan must not hold a million expanded
//! addresses. The result names the same shards, and redacting it again changes nothing: lists of
//! two runs are equal even if their passwords or signatures differ. A token inside a path looks
//! like a folder and is kept.
//!
//! Nothing opens shards by a redacted list.

use url::Url;
use xxhash_rust::xxh3::xxh3_64;

use crate::braces::{expand_braces, split_list};
use crate::source_name::split_source;

/// Schemes of servers and object stores.
pub(crate) const REMOTE_SCHEMES: [&str; 5] = ["http", "https", "s3", "gs", "az"];

/// Schemes of object stores. In their addresses a question mark is part of a name.
const STORE_SCHEMES: [&str; 3] = ["s3", "gs", "az"];

/// Maximum number of addresses into which one part of a list is expanded.
const MAX_EXPANDED_ADDRESSES: usize = 100;

/// Placeholder for an address that cannot be parsed.
const REDACTED_ADDRESS: &str = "(redacted address)";

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
    let mut follows_command = false;
    let mut parts = Vec::new();
    for part in split_list(spec) {
        // A part after a command may belong to it, because a command may contain `::`.
        let is_address = has_scheme(part) || !part.contains([' ', '\'', '"', '|', '$']);
        if !follows_command || is_address {
            parts.push(redact_part(part));
        }
        follows_command |= part.contains("pipe:");
    }
    parts.join("::")
}

/// Returns one address without secrets, for files and pages that others may read. Braces are not
/// expanded.
pub fn address_without_secrets(address: &str) -> String {
    let trimmed = address.trim();
    match Address::parse(trimmed) {
        Some(parsed) if !is_malformed(trimmed) => parsed.redacted(),
        _ if address.contains(':') => REDACTED_ADDRESS.into(),
        _ => address.into(),
    }
}

fn has_scheme(part: &str) -> bool {
    part.split_once("://").is_some_and(|(scheme, _)| is_remote(scheme))
}

fn is_remote(scheme: &str) -> bool {
    REMOTE_SCHEMES.contains(&scheme.to_ascii_lowercase().as_str())
}

/// Returns one part of a list without secrets.
fn redact_part(part: &str) -> String {
    // Text without a colon has neither a scheme nor a command.
    if let Some((name, rest)) = split_source(part)
        && rest.contains(':')
    {
        return format!("{name}={}", redact_part(rest));
    }
    if is_malformed(part) {
        return REDACTED_ADDRESS.into();
    }
    if let Some(command) = part.strip_prefix("pipe:") {
        return command_without_secrets(command);
    }
    if let Some(address) = Address::parse(part)
        && !address.has_braces_outside_path()
    {
        return address.redacted();
    }
    // Without a colon there is no scheme, address or command.
    if !part.contains('{') || !part.contains(':') {
        return part.to_string();
    }
    // The braces may surround schemes, users or parameters.
    let mut expanded = Vec::new();
    match expand_braces(part, &mut expanded) {
        Ok(()) if !expanded.iter().any(|text| may_hold_secrets(text)) => part.to_string(),
        Ok(()) if expanded.len() <= MAX_EXPANDED_ADDRESSES && expanded != [part] => {
            let parts: Vec<String> = expanded.iter().map(|text| redact_part(text)).collect();
            redact_list(&parts.join("::"))
        }
        Err(_) if !part.contains("//") => part.to_string(),
        _ => REDACTED_ADDRESS.into(),
    }
}

/// Returns whether `text`, without braces, is a command or a remote address.
fn may_hold_secrets(text: &str) -> bool {
    text.starts_with("pipe:") || Address::parse(text).is_some() || is_malformed(text)
}

/// Returns whether `part` is meant as a remote address but cannot be parsed as one: without `//`,
/// or with a login whose password ends the host too early, as `/` in an AWS key does.
fn is_malformed(part: &str) -> bool {
    let trimmed = part.trim_start();
    let Some((scheme, rest)) = trimmed.split_once(':') else { return false };
    if !is_remote(scheme) {
        return false;
    }
    if trimmed != part {
        return true;
    }
    let Some(rest) = rest.strip_prefix("//") else { return true };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if authority.contains(['{', '}']) {
        return false;
    }
    let host = authority.rsplit('@').next().unwrap_or_default();
    let has_invalid_port = match host.split_once(':') {
        // An IPv6 address contains colons.
        Some((_, port)) if !host.starts_with('[') => !port.chars().all(|c| c.is_ascii_digit()),
        _ => false,
    };
    authority.contains('\\') || has_invalid_port
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
    fn parse(part: &'a str) -> Option<Self> {
        let (scheme, rest) = part.split_once("://")?;
        if scheme.eq_ignore_ascii_case("file") || !scheme.chars().all(|c| c.is_ascii_alphanumeric()) {
            return None;
        }
        let (authority, rest) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        if STORE_SCHEMES.contains(&scheme.to_ascii_lowercase().as_str()) {
            return Some(Self { scheme, authority, path: rest, query: None });
        }
        let rest = rest.split('#').next().unwrap_or_default();
        let (path, query) = match rest.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (rest, None),
        };
        Some(Self { scheme, authority, path, query })
    }

    fn has_braces_outside_path(&self) -> bool {
        self.authority.contains(['{', '}']) || self.query.is_some_and(|query| query.contains(['{', '}']))
    }

    /// Returns the address without secrets.
    fn redacted(&self) -> String {
        let host = self.authority.rsplit('@').next().unwrap_or_default();
        let query = self.query.map(|query| Query::parse(query).redacted).unwrap_or_default();
        let mark = if query.is_empty() { "" } else { "?" };
        format!("{}://{host}{}{mark}{query}", self.scheme, self.path)
    }
}

/// Parameters of a query, filtered.
struct Query {
    /// Parameters that may be shown.
    redacted: String,
    /// All parameters except signatures: those that may distinguish files.
    identifying: String,
}

impl Query {
    fn parse(query: &str) -> Self {
        let mut parameters: Vec<(String, &str)> = Vec::new();
        for parameter in query.split(['&', ';']) {
            let name = parameter.split('=').next().unwrap_or_default();
            parameters.push((name.to_ascii_lowercase(), parameter));
        }
        let names: Vec<&str> = parameters.iter().map(|(name, _)| name.as_str()).collect();
        let mut redacted = Vec::new();
        let mut identifying = Vec::new();
        for (name, parameter) in &parameters {
            if is_signature(name, &names) {
                continue;
            }
            identifying.push((*parameter).to_string());
            if !is_secret(name) {
                redacted.push(redact_parameter(parameter));
            }
        }
        Self { redacted: redacted.join("&"), identifying: identifying.join("&") }
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
fn redact_parameter(parameter: &str) -> String {
    let Some((name, value)) = parameter.split_once('=') else {
        let is_public = is_hash(parameter) || PLAIN_NAMES.contains(&parameter) || parameter.is_empty();
        return if is_public { parameter.to_string() } else { hash(parameter) };
    };
    let is_name = name.len() <= MAX_SHOWN_VALUE_CHARS / 4
        && name.chars().all(|c| c.is_ascii_lowercase() || "_-".contains(c));
    if !is_name {
        return hash(parameter);
    }
    let is_number = value.len() <= MAX_DIGITS && value.chars().all(|c| c.is_ascii_digit());
    let is_known = PLAIN_NAMES.contains(&name) && is_plain(value) && value.len() <= MAX_SHOWN_VALUE_CHARS;
    if is_number || is_known || is_hash(value) {
        parameter.to_string()
    } else {
        format!("{name}={}", hash(value))
    }
}

/// Returns whether `text` consists of letters, digits and the characters of paths.
fn is_plain(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-~".contains(c))
}

/// Returns a short hash of `text` to be shown in its place.
fn hash(text: &str) -> String {
    format!("~{:08x}", xxh3_64(text.as_bytes()) as u32)
}

/// Returns whether `text` has the form of a [`hash`].
fn is_hash(text: &str) -> bool {
    let Some(digits) = text.strip_prefix('~') else { return false };
    digits.len() == 8 && digits.chars().all(|c| c.is_ascii_hexdigit())
}

/// Returns a command reduced to its program: passwords among its words cannot be distinguished from
/// other words.
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

/// Returns a command for names and messages: its program, and a hash that distinguishes it from
/// other commands.
pub(crate) fn display_name_of_command(command: &str) -> String {
    format!("{}#{:08x}", command_without_secrets(command), xxh3_64(command.as_bytes()) as u32)
}

/// Returns a URL for names and messages, without secrets. If omitted parameters may identify the
/// file, a hash is added.
pub(crate) fn name_of_url(url: &Url) -> String {
    let shown = without_login(url);
    let Some(query) = shown.query().map(Query::parse) else { return shown.into() };
    let mut named = shown.clone();
    named.set_query(if query.redacted.is_empty() { None } else { Some(query.redacted.as_str()) });
    if query.redacted != query.identifying {
        named.set_fragment(Some(&format!("{:08x}", xxh3_64(query.identifying.as_bytes()) as u32)));
    }
    named.into()
}

/// Returns the part of a URL that identifies it: all but the password and a signature, which differ
/// in every run.
pub(crate) fn identity(url: &Url) -> String {
    let mut url = url.clone();
    // Fails for a URL without a host, which has no password.
    let _ = url.set_password(None);
    if let Some(query) = url.query().map(Query::parse) {
        url.set_query(if query.identifying.is_empty() { None } else { Some(query.identifying.as_str()) });
    }
    url.into()
}

fn without_login(url: &Url) -> Url {
    let mut url = url.clone();
    // Both fail for a URL without a host, which has neither a user nor a password.
    let _ = url.set_password(None);
    let _ = url.set_username("");
    url.set_fragment(None);
    url
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The shards of a named source are redacted like those without a name.
    #[test]
    fn names_of_sources_are_kept() {
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
    fn redacted_lists_name_the_same_shards() {
        for (list, redacted) in [
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
            ("{http://u:PW@h/a.tar", "(redacted address)"),
            ("ftp://u:PW@h/a.tar", "ftp://h/a.tar"),
            ("{a,b}-{1..2}.tar", "{a,b}-{1..2}.tar"),
            ("file:///data/a@b.tar", "file:///data/a@b.tar"),
        ] {
            assert_eq!(redact_list(list), redacted, "{list}");
            assert_eq!(redact_list(redacted), redacted);
        }
    }

    /// A value that may be a secret is replaced by a hash, so that two lists can still be compared.
    #[test]
    fn possible_secrets_are_replaced_by_hashes() {
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
            let redacted = redact_list(&spec);
            assert!(!redacted.contains("PW") && redacted.starts_with("https://h/a.tar"), "{redacted}");
            assert_eq!(redact_list(&redacted), redacted);
        }
        let [a, b] = ["p=PA", "p=PB"].map(|query| redact_list(&format!("https://h/a.tar?{query}")));
        assert!(a != b && a.starts_with("https://h/a.tar?p=~"), "{a} {b}");
    }

    #[test]
    fn malformed_addresses_are_left_out() {
        for spec in [
            "http:u:PW@h/x.tar",
            "http:/u:PW@h/x.tar",
            "http:\\\\u:PW@h\\x.tar",
            " http://u:PW@h/x.jpg",
            "s3://AKIA:ab/PW@bucket/a.tar",
            "https://u:P?W@h/a.tar",
            "h{ttp:,ttps:}//u:x/PW@h/a",
        ] {
            let redacted = redact_list(spec);
            assert!(redacted.contains(REDACTED_ADDRESS) && !redacted.contains('@'), "{spec}: {redacted}");
        }
        assert_eq!(redact_list("h{ttp:,ttps:}//u:PW@h/a"), "http://h/a::https://h/a");
        assert_eq!(redact_list("pipe:A='x SECRET y' curl h"), "pipe:(…)");
        assert_eq!(redact_list("pipe:A=PW B=PW curl h"), "pipe:curl (…)");
    }

    fn url(text: &str) -> Url {
        Url::parse(text).expect(text)
    }

    fn name(text: &str) -> String {
        name_of_url(&url(text))
    }

    #[test]
    fn names_differ_if_addresses_differ() {
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
        fn redaction_is_idempotent(spec in "(http://|s3://|pipe:|https://h/)?[{},.0-9a-c:/@?&=# ']{0,24}") {
            let once = redact_list(&spec);
            prop_assert_eq!(redact_list(&once), once);
        }

        #[test]
        fn passwords_are_removed(user in "[a-z]{1,5}", password in "[A-Z0-9]{8,20}",
            path in "[a-z/{},0-9]{0,12}") {
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
