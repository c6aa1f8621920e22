//! Listen addresses: the warning for an endpoint that leads to a listener of another family.
//!
//! The defaults listen on all IPv4 addresses. With an endpoint that is an IPv6 address, `--check` and the start succeed,
//! and no machine arrives. A balancer may translate, so this is a warning and no refusal. What a name resolves to is not
//! read: it may differ where the machines are.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::service::flags::ServiceComponent;
use crate::service::service_plan::ServicePlan;

/// Logs a warning for each listener with endpoints that are addresses of another family than it accepts.
pub(super) fn warn_about_listen_addresses(plan: &ServicePlan) {
    let flags = &plan.flags;
    for (component, listen_flag, listen_address, endpoint_flag, endpoints) in [
        (
            ServiceComponent::Callback,
            "--agent_listen_address",
            flags.agent_listen_address,
            "--agent_endpoint",
            &plan.endpoints,
        ),
        (
            ServiceComponent::Api,
            "--api_listen_address",
            flags.api_listen_address,
            "--api_endpoint",
            &flags.api_endpoint,
        ),
    ] {
        if !plan.components.contains(&component) {
            continue;
        }
        if let Some(warning) = family_warning(listen_flag, listen_address, endpoint_flag, endpoints) {
            tracing::warn!("{warning}");
        }
    }
}

/// The warning for endpoints that a listener cannot accept connections to; `None` without one. *Pure.*
fn family_warning(
    listen_flag: &str,
    listen_address: SocketAddr,
    endpoint_flag: &str,
    endpoints: &[String],
) -> Option<String> {
    let foreign: Vec<&str> = endpoints
        .iter()
        .map(String::as_str)
        .filter(|endpoint| {
            read_address(endpoint).is_some_and(|address| !accepts(listen_address.ip(), address))
        })
        .collect();
    if foreign.is_empty() {
        return None;
    }
    let (family, remedy) = if listen_address.is_ipv4() {
        ("IPv4", SocketAddr::from((Ipv6Addr::UNSPECIFIED, listen_address.port())))
    } else {
        ("IPv6", SocketAddr::from(([0, 0, 0, 0], listen_address.port())))
    };
    Some(format!(
        "{endpoint_flag} {} leads to a listener of another family: {listen_flag} {listen_address} accepts {family} alone; \
         give {listen_flag} {remedy}, unless something in between translates",
        foreign.join(",")
    ))
}

/// The address of an endpoint; `None` if it has a name.
fn read_address(endpoint: &str) -> Option<IpAddr> {
    let (host, _) = endpoint.rsplit_once(':')?;
    host.trim_start_matches('[').trim_end_matches(']').parse().ok()
}

/// Whether a listener at this address may get connections to the other one. Linux lets one on all IPv6 addresses accept
/// IPv4, too.
fn accepts(listener: IpAddr, endpoint: IpAddr) -> bool {
    let endpoint = endpoint.to_canonical();
    match listener.to_canonical() {
        IpAddr::V4(_) => endpoint.is_ipv4(),
        IpAddr::V6(address) => address.is_unspecified() || endpoint.is_ipv6(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_of_another_family_than_its_listener_is_a_warning() {
        for (listen_address, endpoints, expected) in [
            ("0.0.0.0:8443", &["192.0.2.1:8443"][..], None),
            ("0.0.0.0:8443", &["shepherd.example:8443"], None),
            ("0.0.0.0:8443", &["[::ffff:192.0.2.1]:8443"], None),
            ("[::]:8443", &["192.0.2.1:8443", "[2001:db8::1]:8443"], None),
            ("[2001:db8::1]:8443", &["[2001:db8::1]:443"], None),
            (
                "0.0.0.0:8443",
                &["192.0.2.1:8443", "[2001:db8::1]:443", "[2001:db8::2]:443"],
                Some(
                    "--agent_endpoint [2001:db8::1]:443,[2001:db8::2]:443 leads to a listener of another family: \
                     --agent_listen_address 0.0.0.0:8443 accepts IPv4 alone; give --agent_listen_address [::]:8443, unless \
                     something in between translates",
                ),
            ),
            (
                "[2001:db8::1]:8443",
                &["192.0.2.1:8443"],
                Some(
                    "--agent_endpoint 192.0.2.1:8443 leads to a listener of another family: --agent_listen_address \
                     [2001:db8::1]:8443 accepts IPv6 alone; give --agent_listen_address 0.0.0.0:8443, unless something in \
                     between translates",
                ),
            ),
        ] {
            let endpoints: Vec<String> = endpoints.iter().map(|endpoint| (*endpoint).to_owned()).collect();
            let listen_address = listen_address.parse().unwrap();
            let warning =
                family_warning("--agent_listen_address", listen_address, "--agent_endpoint", &endpoints);
            assert_eq!(warning.as_deref(), expected, "{endpoints:?}");
        }
    }
}
