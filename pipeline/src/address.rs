//! Addresses that only a user may name: those of this machine and of its link-local network, whose
//! services are not meant for others, such as the metadata service of a cloud machine.

use std::net::{IpAddr, Ipv6Addr, ToSocketAddrs};

use url::{Host, Url};

/// Returns whether `url` names this machine or a link-local address.
pub(crate) fn is_local(url: &Url) -> bool {
    match url.host() {
        Some(Host::Ipv4(address)) => is_local_address(address.into()),
        Some(Host::Ipv6(address)) => is_local_address(address.into()),
        Some(Host::Domain(name)) => {
            let name = name.trim_end_matches('.');
            name.eq_ignore_ascii_case("localhost") || name.to_ascii_lowercase().ends_with(".localhost")
        }
        None => false,
    }
}

/// Returns whether `url` names this machine or a link-local address, or a host that resolves to
/// one. Hosts that do not resolve count as remote.
pub(crate) fn resolves_to_local(url: &Url) -> bool {
    if is_local(url) {
        return true;
    }
    let (Some(Host::Domain(name)), Some(port)) = (url.host(), url.port_or_known_default()) else {
        return false;
    };
    match (name, port).to_socket_addrs() {
        Ok(mut addresses) => addresses.any(|address| is_local_address(address.ip())),
        Err(_) => false,
    }
}

/// IPv6 address of the metadata service of Amazon EC2.
const EC2_METADATA: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);

fn is_local_address(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_loopback() || address.is_link_local() || address.is_unspecified(),
        IpAddr::V6(address) if address.is_loopback() || address.is_unspecified() => true,
        // IPv4-mapped and IPv4-compatible addresses.
        IpAddr::V6(address) => match address.to_ipv4() {
            Some(inner) => is_local_address(inner.into()),
            None => is_link_local(address) || address == EC2_METADATA,
        },
    }
}

fn is_link_local(address: Ipv6Addr) -> bool {
    address.segments()[0] & 0xffc0 == 0xfe80
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_addresses_are_recognized_in_all_forms() {
        for local in [
            "http://127.0.0.1/",
            "http://127.9.9.9:80/",
            "http://localhost/",
            "http://LOCALHOST./",
            "http://a.localhost/",
            "http://[::1]/",
            "http://0.0.0.0/",
            "http://169.254.169.254/latest/",
            "http://[::ffff:127.0.0.1]/",
            "http://[fe80::1]/",
            "http://2130706433/",
            "http://0x7f.1/",
        ] {
            assert!(is_local(&Url::parse(local).expect("a URL")), "{local}");
        }
        for remote in [
            "http://10.0.0.1/",
            "http://example.org/",
            "http://localhost.example.org/",
            "http://[2001:db8::1]/",
        ] {
            assert!(!is_local(&Url::parse(remote).expect("a URL")), "{remote}");
        }
    }
}
