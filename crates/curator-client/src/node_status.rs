//! Node status: what a node reports of itself, validated.
//!
//! A node reports its address, the port of its curator, its release, its boot, its services and its Kubernetes
//! components. The curator stores the newest report in the node's record and sends it to all watchers, so the number
//! and the length of its parts are limited. A report that breaks a limit is rejected as a whole.
//!
//! The time in a status is that of the curator which received it. A node's clock may be wrong.

use std::net::IpAddr;

use model::node_role::{self, DeclaredRole};
use model::time::Timestamp;
use proto::curator::v1 as wire;

use crate::kubernetes_status;

/// Most services in the status of a node.
const MAX_SERVICES: usize = 256;
/// Most authorities of each kind in the status of a node.
const MAX_AUTHORITIES: usize = 4;
/// Longest text in the status of a node, in bytes.
const MAX_TEXT_BYTES: usize = 1000;
/// Length of the hash that identifies an authority, in bytes.
const SHA256_BYTES: usize = 32;

/// The status that a node reported.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeStatus {
    /// The address at which others reach it.
    pub address: IpAddr,
    /// The port of its curator; `None` if none runs.
    pub curator_port: Option<u16>,
    /// Version of its role server.
    pub version: String,
    /// Boot id of the running kernel.
    pub boot_id: String,
    /// The status of its services; checked to be well-formed.
    pub services: Vec<wire::ServiceStatus>,
    /// The status of its Kubernetes components; checked to be well-formed.
    pub kubernetes: Option<wire::KubernetesStatus>,
    /// The authorities that the node uses; checked to be well-formed. `None`: its release cannot replace one.
    pub authority: Option<wire::AuthorityStatus>,
    /// When the curator received it.
    pub reported_at: Timestamp,
}

impl NodeStatus {
    /// Validates a status that a node reports at `now`; the error names the field.
    pub fn from_report(report: &wire::NodeStatus, now: Timestamp) -> Result<Self, String> {
        let address: IpAddr = report.external_address.parse().map_err(|_| {
            format!(
                "external_address is {:?}, and an IP address is wanted",
                truncate(&report.external_address)
            )
        })?;
        if address.is_unspecified() || address.is_multicast() {
            return Err(format!("external_address is {address}, which reaches no node"));
        }
        let curator_port = match u16::try_from(report.curator_port) {
            Ok(0) => None,
            Ok(port) => Some(port),
            Err(_) => return Err(format!("curator_port is {}; the highest is 65535", report.curator_port)),
        };
        for (field, text) in [("version", &report.version), ("boot_id", &report.boot_id)] {
            if text.len() > MAX_TEXT_BYTES {
                return Err(format!("{field} has {} bytes; {MAX_TEXT_BYTES} are enough", text.len()));
            }
        }
        if report.services.len() > MAX_SERVICES {
            let count = report.services.len();
            return Err(format!("services has {count} entries; {MAX_SERVICES} are enough"));
        }
        report.services.iter().try_for_each(validate_service)?;
        report.kubernetes.as_ref().map_or(Ok(()), kubernetes_status::validate_status)?;
        report.authority.as_ref().map_or(Ok(()), validate_authority)?;
        Ok(Self {
            address,
            curator_port,
            version: report.version.clone(),
            boot_id: report.boot_id.clone(),
            services: report.services.clone(),
            kubernetes: report.kubernetes.clone(),
            authority: report.authority.clone(),
            reported_at: now,
        })
    }

    /// The status as it is stored and sent.
    pub(super) fn to_wire(&self) -> wire::NodeStatus {
        wire::NodeStatus {
            external_address: self.address.to_string(),
            curator_port: self.curator_port.unwrap_or(0).into(),
            version: self.version.clone(),
            boot_id: self.boot_id.clone(),
            services: self.services.clone(),
            reported_at_ms: self.reported_at.timestamp_millis(),
            kubernetes: self.kubernetes.clone(),
            authority: self.authority.clone(),
        }
    }
}

fn validate_authority(authority: &wire::AuthorityStatus) -> Result<(), String> {
    let lists = [("trusted", &authority.trusted), ("etcd_trusted", &authority.etcd_trusted)];
    for (field, list) in lists {
        if list.len() > MAX_AUTHORITIES {
            return Err(format!(
                "authority.{field} has {} entries; {MAX_AUTHORITIES} are enough",
                list.len()
            ));
        }
        if list.iter().any(|one| one.len() != SHA256_BYTES) {
            return Err(format!("authority.{field} has an entry that is no SHA-256"));
        }
    }
    let issuers = [
        ("node_issuer", &authority.node_issuer),
        ("curator_issuer", &authority.curator_issuer),
        ("peer_issuer", &authority.peer_issuer),
    ];
    for (field, issuer) in issuers {
        if !issuer.is_empty() && issuer.len() != SHA256_BYTES {
            return Err(format!("authority.{field} is no SHA-256"));
        }
    }
    Ok(())
}

fn validate_service(service: &wire::ServiceStatus) -> Result<(), String> {
    let name = |text: &str| format!("services has {:?}", truncate(text));
    service.role.parse::<DeclaredRole>().map_err(|error| format!("services: {error}"))?;
    if !node_role::is_role_name(&service.service) {
        return Err(format!("{}, which names no service", name(&service.service)));
    }
    if service.kind() == wire::service_status::Kind::Unspecified {
        return Err(format!("{} in state {}, which does not exist", name(&service.service), service.kind));
    }
    if service.message.len() > MAX_TEXT_BYTES {
        return Err(format!("{} with a message of more than {MAX_TEXT_BYTES} bytes", name(&service.service)));
    }
    Ok(())
}

fn truncate(text: &str) -> String {
    text.chars().take(100).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::testing::at;

    pub(crate) fn sample_report() -> wire::NodeStatus {
        wire::NodeStatus {
            external_address: "2001:db8::7".to_owned(),
            curator_port: 7835,
            version: "1.2.3".to_owned(),
            boot_id: "b".to_owned(),
            services: vec![wire::ServiceStatus {
                role: "web".to_owned(),
                service: "server".to_owned(),
                kind: wire::service_status::Kind::BackingOff.into(),
                since_ms: 5,
                restarts: 2,
                message: "it ended with 1".to_owned(),
                declaration_revision: 3,
            }],
            reported_at_ms: 1,
            kubernetes: Some(kubernetes_status::tests::sample_status()),
            authority: Some(wire::AuthorityStatus {
                trusted: vec![vec![1; 32], vec![2; 32]],
                node_issuer: vec![1; 32],
                etcd_trusted: vec![vec![1; 32]],
                ..Default::default()
            }),
        }
    }

    #[test]
    fn invalid_status_report_error_names_its_field() {
        let good = || NodeStatus::from_report(&sample_report(), at(3)).unwrap().to_wire();
        assert!(NodeStatus::from_report(&good(), at(9)).is_ok());
        let service = || good().services[0].clone();
        let with = |service: wire::ServiceStatus| wire::NodeStatus { services: vec![service], ..good() };
        let authority = || good().authority.unwrap();
        let of = |authority: wire::AuthorityStatus| wire::NodeStatus { authority: Some(authority), ..good() };
        for (field, report) in [
            ("external_address", wire::NodeStatus { external_address: String::new(), ..good() }),
            ("external_address", wire::NodeStatus { external_address: "host".to_owned(), ..good() }),
            ("external_address", wire::NodeStatus { external_address: "0.0.0.0".to_owned(), ..good() }),
            ("external_address", wire::NodeStatus { external_address: "10.0.0.1:80".to_owned(), ..good() }),
            ("curator_port", wire::NodeStatus { curator_port: 65_536, ..good() }),
            ("version", wire::NodeStatus { version: "v".repeat(1001), ..good() }),
            ("services", wire::NodeStatus { services: vec![service(); 257], ..good() }),
            ("services", with(wire::ServiceStatus { role: "kubernetes-worker".to_owned(), ..service() })),
            ("services", with(wire::ServiceStatus { service: "a b".to_owned(), ..service() })),
            ("services", with(wire::ServiceStatus { kind: 0, ..service() })),
            ("services", with(wire::ServiceStatus { kind: 99, ..service() })),
            ("services", with(wire::ServiceStatus { message: "m".repeat(1001), ..service() })),
            ("authority.trusted", of(wire::AuthorityStatus { trusted: vec![vec![1; 32]; 5], ..authority() })),
            ("authority.trusted", of(wire::AuthorityStatus { trusted: vec![vec![1; 31]], ..authority() })),
            (
                "authority.etcd_trusted",
                of(wire::AuthorityStatus { etcd_trusted: vec![vec![]], ..authority() }),
            ),
            ("authority.peer_issuer", of(wire::AuthorityStatus { peer_issuer: vec![1], ..authority() })),
            (
                "kubernetes.bundle",
                wire::NodeStatus {
                    kubernetes: Some(wire::KubernetesStatus { bundle: "b".to_owned(), ..Default::default() }),
                    ..good()
                },
            ),
        ] {
            let error = NodeStatus::from_report(&report, at(9)).unwrap_err();
            assert!(error.starts_with(field), "{field}: {error}");
        }
    }

    #[test]
    fn report_is_dated_by_the_curator_and_not_by_the_node() {
        let report = wire::NodeStatus { reported_at_ms: 1, ..sample_report() };
        assert_eq!(NodeStatus::from_report(&report, at(9)).unwrap().reported_at, at(9));
    }
}
