//! What each certificate may contain: one table of kinds, which every signed certificate is compared with.
//!
//! The functions that sign build a certificate from many parts. A mistake in one of them, or in what calls them, would
//! make a certificate that is worth more than its holder may have. So each certificate is read back before it is
//! recorded or sent, and must have exactly what its kind has here:
//!
//! | kind | organisation | name | DNS names | addresses | for | at most |
//! | --- | --- | --- | --- | --- | --- | --- |
//! | node | none | node id | node id | none | servers and clients | 30 days |
//! | curator | `curator` | node id | node id | none | servers and clients | a day |
//! | member of etcd | none | `etcd peer` | none | its one address | servers and clients | 30 days |
//! | owner | `owner` | its name | none | none | clients | 30 days |
//! | component of Kubernetes | as its row | as its row | as its row | as its row | as its row | 7 days |
//! | user of Kubernetes | its group | its name | none | none | clients | 7 days |
//!
//! The rows of components are in [`component_certificates`](crate::kubernetes::component_certificates). No certificate
//! signs others, and none has another key usage than signatures. A certificate begins [`CLOCK_SKEW`] before it is
//! issued, which the lifetimes here do not include.
//!
//! Until the authority of a cluster makes its first statement, a member of etcd may go back to a release that renews no
//! certificate of it. Until then such a certificate lasts as long as the authority ([`peer_lifetime`]).
//!
//! A difference is a fault of the curator, and no answer to the caller's request: nothing is recorded or sent.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use curator_client::certificate::{CLOCK_SKEW, Validity};
use curator_client::node_id::NodeId;
use curator_client::pki::{
    AUTHORITY_LIFETIME, CURATOR_LIFETIME, ETCD_PEER_NAME, MAX_OWNER_LIFETIME, NODE_LIFETIME, PEER_LIFETIME,
};
use model::cluster::kubernetes_user::LONGEST_LIFETIME;
use model::time::between;
use proto::curator::v1 as wire;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::credential::{CertificateKind, Credential, CredentialHolder};
use crate::kubernetes::component_certificates::COMPONENT_LIFETIME;
use crate::kubernetes::signer::CertificateSubject;

/// Certificates have whole seconds, so a validity may be longer than what was wanted.
const ROUNDING: Duration = Duration::from_secs(1);
/// The flags of a key that makes signatures and nothing else (RFC 5280, 4.2.1.3).
const DIGITAL_SIGNATURE: u16 = 1;

/// The kind of a certificate's holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubjectKind {
    /// A node of the cluster.
    Node,
    /// The curator on a consensus member.
    Curator,
    /// The etcd member of a consensus member.
    EtcdPeer,
    /// An owner of the cluster.
    Owner,
    /// A component of Kubernetes on a node.
    Component(wire::KubernetesComponent),
    /// A user of the Kubernetes API.
    KubernetesUser,
}

impl fmt::Display for SubjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node => f.write_str("a node"),
            Self::Curator => f.write_str("a curator"),
            Self::EtcdPeer => f.write_str("a member of etcd"),
            Self::Owner => f.write_str("an owner"),
            Self::Component(component) => f.write_str(component.as_str_name()),
            Self::KubernetesUser => f.write_str("a user of Kubernetes"),
        }
    }
}

/// What a certificate has to contain, and nothing else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entitlement {
    /// The kind of its holder.
    pub kind: SubjectKind,
    /// The organisation in its subject; empty for none.
    pub organisation: String,
    /// The common name in its subject.
    pub name: String,
    /// Its DNS names, in any order.
    pub dns: Vec<String>,
    /// Its IP addresses, in any order.
    pub addresses: Vec<IpAddr>,
    /// Whether it is valid for servers.
    pub server_auth: bool,
    /// Whether it is valid for clients.
    pub client_auth: bool,
    /// The longest time that it may be valid after it was issued.
    pub max_lifetime: Duration,
}

/// Why a certificate that was just signed is not issued.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntitlementError {
    /// It cannot be parsed, or an extension of it is malformed.
    #[error("no certificate was issued: the one that was signed for {0} cannot be parsed. Please report it")]
    Unreadable(SubjectKind),
    /// A part of it is not what its kind has.
    #[error(
        "no certificate was issued: the one that was signed for {kind} has {found} as its {part}, and is entitled to \
         {entitled}. Please report it"
    )]
    Mismatch {
        /// The kind of its holder.
        kind: SubjectKind,
        /// The part that differs.
        part: &'static str,
        /// What the certificate has.
        found: String,
        /// What its kind has.
        entitled: String,
    },
}

impl Entitlement {
    /// The certificate of a node.
    #[must_use]
    pub fn for_node(node: &NodeId) -> Self {
        Self {
            kind: SubjectKind::Node,
            organisation: String::new(),
            name: node.to_string(),
            dns: vec![node.to_string()],
            addresses: Vec::new(),
            server_auth: true,
            client_auth: true,
            max_lifetime: NODE_LIFETIME,
        }
    }

    /// The certificate that the curator on a node shows.
    #[must_use]
    pub fn for_curator(node: &NodeId) -> Self {
        Self {
            kind: SubjectKind::Curator,
            organisation: "curator".to_owned(),
            max_lifetime: CURATOR_LIFETIME,
            ..Self::for_node(node)
        }
    }

    /// The certificate that the etcd member at this address shows to the others.
    #[must_use]
    pub fn for_etcd_peer(address: IpAddr) -> Self {
        Self {
            kind: SubjectKind::EtcdPeer,
            organisation: String::new(),
            name: ETCD_PEER_NAME.to_owned(),
            dns: Vec::new(),
            addresses: vec![address],
            server_auth: true,
            client_auth: true,
            max_lifetime: PEER_LIFETIME,
        }
    }

    /// The certificate of an owner.
    #[must_use]
    pub fn for_owner(name: &str) -> Self {
        Self {
            kind: SubjectKind::Owner,
            organisation: "owner".to_owned(),
            name: name.to_owned(),
            dns: Vec::new(),
            addresses: Vec::new(),
            server_auth: false,
            client_auth: true,
            max_lifetime: MAX_OWNER_LIFETIME,
        }
    }

    /// The certificate of a component of Kubernetes, by its row of the table of components.
    #[must_use]
    pub fn for_component(component: wire::KubernetesComponent, row: &CertificateSubject) -> Self {
        Self::from_subject(SubjectKind::Component(component), row, COMPONENT_LIFETIME)
    }

    /// The certificate of a user of the Kubernetes API. Only its group and its name count, so it is a client's.
    #[must_use]
    pub fn for_kubernetes_user(subject: &CertificateSubject) -> Self {
        let client = CertificateSubject {
            organisation: subject.organisation.clone(),
            name: subject.name.clone(),
            client_auth: true,
            ..CertificateSubject::default()
        };
        Self::from_subject(SubjectKind::KubernetesUser, &client, LONGEST_LIFETIME.0)
    }

    fn from_subject(kind: SubjectKind, subject: &CertificateSubject, max_lifetime: Duration) -> Self {
        Self {
            kind,
            organisation: subject.organisation.clone(),
            name: subject.name.clone(),
            dns: subject.dns.clone(),
            addresses: subject.addresses.clone(),
            server_auth: subject.server_auth,
            client_auth: subject.client_auth,
            max_lifetime,
        }
    }
}

/// Checks the certificate of a record. That of a member of etcd is checked by [`check_peer_certificate`] alone: its
/// address is in no record.
pub(crate) fn check_credential(der: &[u8], credential: &Credential) -> Result<(), EntitlementError> {
    let entitled = match (&credential.holder, credential.kind) {
        (CredentialHolder::Owner(name), _) => Entitlement::for_owner(name),
        (CredentialHolder::Node(_), CertificateKind::EtcdPeer { .. }) => return Ok(()),
        (CredentialHolder::Node(node), CertificateKind::Curator) => Entitlement::for_curator(node),
        (CredentialHolder::Node(node), CertificateKind::Node | CertificateKind::Owner) => {
            Entitlement::for_node(node)
        }
    };
    check_certificate(der, &entitled)
}

/// How long the certificate of an etcd member may last that is issued now. `stated`: whether the authority has made its
/// first statement.
#[must_use]
pub const fn peer_lifetime(stated: bool) -> Duration {
    if stated { PEER_LIFETIME } else { AUTHORITY_LIFETIME }
}

/// Checks the certificate of the etcd member at this address, which may last for so long.
pub(crate) fn check_peer_certificate(
    der: &[u8],
    address: IpAddr,
    max_lifetime: Duration,
) -> Result<(), EntitlementError> {
    check_certificate(der, &Entitlement { max_lifetime, ..Entitlement::for_etcd_peer(address) })
}

/// Checks that a certificate in DER contains exactly this.
pub fn check_certificate(der: &[u8], entitled: &Entitlement) -> Result<(), EntitlementError> {
    let unreadable = || EntitlementError::Unreadable(entitled.kind);
    let (rest, certificate) = X509Certificate::from_der(der).map_err(|_| unreadable())?;
    if !rest.is_empty() {
        return Err(unreadable());
    }
    let compare = |part, found: String, wanted: String| {
        if found == wanted {
            return Ok(());
        }
        Err(EntitlementError::Mismatch { kind: entitled.kind, part, found, entitled: wanted })
    };
    compare("subject", read_subject(&certificate).ok_or_else(unreadable)?, subject_of(entitled))?;
    let names = read_names(&certificate).ok_or_else(unreadable)?;
    compare("names", join(names), join(names_of(entitled)))?;
    let usages = read_usages(&certificate).ok_or_else(unreadable)?;
    let servers = entitled.server_auth.then_some("servers");
    let clients = entitled.client_auth.then_some("clients");
    compare("usage", join(usages), join(servers.into_iter().chain(clients).map(str::to_owned)))?;
    let constraints = certificate.basic_constraints().map_err(|_| unreadable())?;
    let signs_others = constraints.is_some_and(|constraints| constraints.value.ca);
    compare("right to sign others", signs_others.to_string(), false.to_string())?;
    let key_usage = certificate.key_usage().map_err(|_| unreadable())?.map_or(0, |usage| usage.value.flags);
    compare("key usage", key_usage.to_string(), DIGITAL_SIGNATURE.to_string())?;
    let validity = Validity::from_x509(&certificate).ok_or_else(unreadable)?;
    let lifetime = between(validity.not_before, validity.not_after);
    if lifetime > entitled.max_lifetime + CLOCK_SKEW + ROUNDING {
        return Err(EntitlementError::Mismatch {
            kind: entitled.kind,
            part: "lifetime",
            found: format!("{} s", lifetime.as_secs()),
            entitled: format!("{} s at most", entitled.max_lifetime.as_secs()),
        });
    }
    Ok(())
}

/// Every attribute of the subject, in order: `O=organisation`, `CN=name`, and others by their number.
fn read_subject(certificate: &X509Certificate<'_>) -> Option<String> {
    let subject = certificate.subject();
    let organisations: Vec<&str> =
        subject.iter_organization().map(|value| value.as_str().ok()).collect::<Option<_>>()?;
    let names: Vec<&str> =
        subject.iter_common_name().map(|value| value.as_str().ok()).collect::<Option<_>>()?;
    let all = subject.iter_attributes().count();
    let others = all.checked_sub(organisations.len() + names.len())?;
    let mut parts: Vec<String> = organisations.iter().map(|value| format!("O={value:?}")).collect();
    parts.extend(names.iter().map(|value| format!("CN={value:?}")));
    if others > 0 {
        parts.push(format!("{others} others"));
    }
    Some(parts.join(" "))
}

fn subject_of(entitled: &Entitlement) -> String {
    let organisation = (!entitled.organisation.is_empty()).then(|| format!("O={:?} ", entitled.organisation));
    format!("{}CN={:?}", organisation.unwrap_or_default(), entitled.name)
}

/// The alternative names, each with its kind.
fn read_names(certificate: &X509Certificate<'_>) -> Option<Vec<String>> {
    let extension = certificate.subject_alternative_name().ok()?;
    let names = extension.map(|names| names.value.general_names.as_slice()).unwrap_or_default();
    names.iter().map(read_name).collect()
}

fn read_name(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(dns) => Some(format!("DNS {dns:?}")),
        GeneralName::IPAddress(bytes) => {
            let short = <[u8; 4]>::try_from(*bytes).ok().map(IpAddr::from);
            let address = short.or_else(|| <[u8; 16]>::try_from(*bytes).ok().map(IpAddr::from));
            address.map(|address| format!("IP {address}"))
        }
        _ => Some("a name of another kind".to_owned()),
    }
}

fn names_of(entitled: &Entitlement) -> impl Iterator<Item = String> + '_ {
    let dns = entitled.dns.iter().map(|dns| format!("DNS {dns:?}"));
    dns.chain(entitled.addresses.iter().map(|address| format!("IP {address}")))
}

/// What the certificate is valid for.
fn read_usages(certificate: &X509Certificate<'_>) -> Option<Vec<String>> {
    let Some(usage) = certificate.extended_key_usage().ok()?.map(|usage| usage.value) else {
        return Some(vec!["anything".to_owned()]);
    };
    let flags = [
        (usage.server_auth, "servers"),
        (usage.client_auth, "clients"),
        (usage.any, "anything"),
        (usage.code_signing, "code"),
        (usage.email_protection, "mail"),
        (usage.time_stamping, "time stamps"),
        (usage.ocsp_signing, "revocation"),
        (!usage.other.is_empty(), "another purpose"),
    ];
    Some(flags.into_iter().filter(|(has, _)| *has).map(|(_, name)| name.to_owned()).collect())
}

/// A set as text: in order, and without duplicates.
fn join(parts: impl IntoIterator<Item = String>) -> String {
    let parts: BTreeSet<String> = parts.into_iter().collect();
    if parts.is_empty() {
        return "nothing".to_owned();
    }
    parts.into_iter().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
