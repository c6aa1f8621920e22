//! Watch cells shared by the parts of a node: connection, roles, address, status.
//!
//! A part that starts late or is restarted sees the newest value. None of the values is the address of a curator to
//! call: every call goes through the one channel in [`CuratorConnection`], which follows the leader.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock};

use curator::bootstrap::BootstrapRequest;
use curator::service::gate_monitor::GateMonitor;
use curator::service::statement_monitor::StatementMonitor;
use curator_client::certificate::Validity;
use curator_client::clock::Clock;
use curator_client::identity::Identity;
use curator_client::leader_channel::LeaderTracker;
use curator_client::node::NodeRoles;
use curator_client::node_id::NodeId;
use curator_client::peer_identity::{Peer, Revocations, identify_peer};
use curator_client::pki::{PkiError, TrustAnchor};
use curator_client::statement::SignedStatement;
use curator_client::statement_trust::{ReadStatement, StatementTrust, persist_by};
use curator_client::tls::certified_key;
use model::cluster::restore_programs::EtcdPrograms;
use model::storage_level::MeasuredFileSystem;
use proto::curator::v1::{AuthorityStatus, KubernetesStatus, ServiceStatus};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use supervisor::watch_cell::WatchCell;

use crate::cluster::files::{ClusterFiles, ClusterFilesError, Credentials, SecretKeysOrder};
use crate::cluster::kubernetes::cgroup_driver;
use crate::cluster::kubernetes::setup::NodeSetup;
use crate::cluster::node_order::EtcdImage;
use crate::cluster::node_problems::NodeProblems;
use crate::cluster::services::desired::{DeclarationMap, NodeInfo, REFUSED_DECLARATIONS, RetainedRoles};
use crate::cluster::stored_authorities::authorities_above_or_anchor;
use crate::host_findings::HostFindings;

/// The certificate that this node presents; it can be replaced while the process runs.
#[derive(Clone)]
pub struct CurrentCertificate(Arc<RwLock<Arc<CertifiedKey>>>);

impl CurrentCertificate {
    /// Starts with this certificate.
    #[must_use]
    pub fn new(first: Arc<CertifiedKey>) -> Self {
        Self(Arc::new(RwLock::new(first)))
    }

    /// The certificate that is presented now.
    #[must_use]
    pub fn current(&self) -> Arc<CertifiedKey> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Presents another certificate on every new connection.
    pub fn replace(&self, next: Arc<CertifiedKey>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = next;
    }
}

impl fmt::Debug for CurrentCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shown")
    }
}

impl ResolvesServerCert for CurrentCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }
}

/// This node's identity, and its connection to the leading curator. Published as soon as the certificate is durable.
#[derive(Clone, Debug)]
pub struct CuratorConnection {
    /// ID of this node, derived from its key.
    pub id: NodeId,
    /// The cluster's ID and trusted certificate, as they were when the connection was published.
    pub anchor: TrustAnchor,
    /// Channel that follows the leader.
    pub curators: LeaderTracker,
    /// Certificate that this node presents.
    pub certificate: CurrentCertificate,
}

/// Why a stored or received certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// The text is not hexadecimal.
    #[error("the certificate of this node is no hexadecimal text")]
    NotHex(#[from] hex::FromHexError),
    /// The authority's certificate is invalid.
    #[error(transparent)]
    Authority(#[from] PkiError),
    /// A file of the cluster cannot be read or written.
    #[error(transparent)]
    Files(#[from] ClusterFilesError),
    /// Key and certificate do not match, or TLS cannot use them.
    #[error("the certificate of this node cannot be used with its key: {0}")]
    Tls(#[from] rustls::Error),
    /// A received certificate is not that of this node, or not by the authority of its cluster.
    #[error("the certificate that was received is none of this node, and the former one stays: {0}")]
    NotOwn(String),
}

impl CuratorConnection {
    /// The connection of this node, from its stored key and credentials.
    pub fn new(
        key: &Identity,
        credentials: &Credentials,
        files: &ClusterFiles,
        clock: &Clock,
    ) -> Result<Self, CredentialsError> {
        let anchor = TrustAnchor::parse(&hex::decode(&credentials.ca_certificate)?)?;
        let shown =
            CurrentCertificate::new(certified_key(&hex::decode(&credentials.certificate)?, key.pkcs8())?);
        let curators = curator_channel(&anchor, &shown, files, clock)?;
        if let Some(proved) = curators.proved_curators() {
            proved.restore(files.read_proved_curators());
        }
        // In this order: the tracker remembers what the second list leaves out.
        curators.set_directory(files.read_former_curators());
        curators.set_directory(files.read_curators());
        Ok(Self { id: node_id_of_key(key), anchor, curators, certificate: shown })
    }

    /// The authority that this node trusts without a statement now: after a theft, an order replaces it.
    #[must_use]
    pub fn authority(&self) -> TrustAnchor {
        self.curators.anchor().unwrap_or_else(|| self.anchor.clone())
    }

    /// Replaces the certificate of this node. The new one is durable before any peer sees it, so a node that is
    /// interrupted has one of the two. A certificate that does not match the key, or is none of this node in its cluster,
    /// replaces nothing.
    pub fn replace_certificate(
        &self,
        files: &ClusterFiles,
        key: &Identity,
        certificate: &[u8],
    ) -> Result<(), CredentialsError> {
        let next = certified_key(certificate, key.pkcs8())?;
        let authority = self.authority();
        check_own_certificate(certificate, self.id, &authorities_above_or_anchor(files, &authority)?)?;
        let renewed = files.renew_credentials(&Credentials {
            certificate: hex::encode(certificate),
            ca_certificate: hex::encode(&authority.certificate),
        })?;
        if !renewed {
            let sentence = "the authority of the cluster was replaced meanwhile";
            return Err(CredentialsError::NotOwn(sentence.to_owned()));
        }
        self.certificate.replace(next);
        Ok(())
    }
}

/// Checks a certificate before this node stores and shows it: curators would refuse another one, until a person acts.
/// One of `authorities` has to have signed it. The clock of this node may be wrong, so the certificate is checked at the
/// time of its beginning.
pub(super) fn check_own_certificate(
    certificate: &[u8],
    own: NodeId,
    authorities: &[TrustAnchor],
) -> Result<(), CredentialsError> {
    let not_own = CredentialsError::NotOwn;
    let validity = Validity::from_der(certificate).ok_or_else(|| not_own("it cannot be read".to_owned()))?;
    let mut reasons = Vec::new();
    for authority in authorities {
        let begin = validity.not_before.max(authority.validity.not_before);
        match identify_peer(&[certificate], authority, &Revocations::default(), begin) {
            Ok(Peer::Node { id, .. }) if id == own => return Ok(()),
            Ok(other) => reasons.push(format!("it is that of {other}")),
            Err(error) => reasons.push(error.to_string()),
        }
    }
    reasons.dedup();
    Err(not_own(reasons.join("; ")))
}

/// A channel to the leader of this cluster that presents `shown`. The newest statement of the cluster's authority and
/// the changes of the epoch are stored in `files`. With a stored statement that cannot be read, it follows
/// nobody, and the node still runs its etcd.
pub fn curator_channel(
    anchor: &TrustAnchor,
    shown: &CurrentCertificate,
    files: &ClusterFiles,
    clock: &Clock,
) -> Result<LeaderTracker, ClusterFilesError> {
    let cluster = anchor.cluster;
    let epoch = files.known_epoch(cluster)?;
    let read: ReadStatement = {
        let (files, anchor) = (files.clone(), anchor.clone());
        Arc::new(move || files.read_statement(&anchor).map_err(|error| error.to_string()))
    };
    let persist = {
        let files = files.clone();
        move |signed: &SignedStatement| files.write_statement(signed).map_err(|error| error.to_string())
    };
    let trust = StatementTrust::reading(anchor.clone(), read, persist_by(persist), clock.clone());
    let (shown, files) = (shown.clone(), files.clone());
    let keep = move |change| files.change_epoch(cluster, change).map_err(|error| error.to_string());
    let own = move || Some(shown.current());
    Ok(LeaderTracker::with_statements(trust, Arc::new(own), epoch, Arc::new(keep)))
}

/// The ID of the node with this key.
#[must_use]
pub fn node_id_of_key(key: &Identity) -> NodeId {
    NodeId::from_key(&curator_client::node_id::PublicKey(key.public_key()))
}

/// The control plane of this node, once its curator listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlPlane {
    /// TCP port of its curator.
    pub port: u16,
}

/// The database file of this node's etcd, for its metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EtcdSpaceStatus {
    /// Size of the file.
    pub file_bytes: u64,
    /// The part of the file that has data.
    pub bytes_in_use: u64,
    /// Size of the file from which etcd accepts no writes.
    pub quota_bytes: u64,
    /// Members of the cluster that have no space.
    pub full_members: usize,
    /// Members of the cluster with data that differs from that of the others.
    pub corrupt_members: usize,
    /// How often this role server has defragmented the file since it started.
    pub defragmentations: u64,
}

/// A cluster that this node is founding.
#[derive(Clone, Debug)]
pub struct ClusterFounding {
    /// The authority and the first records of the cluster.
    pub founding: Arc<BootstrapRequest>,
    /// Address at which other nodes will connect to this one.
    pub address: IpAddr,
    /// The fetched image of etcd that the cluster is restored from.
    pub image: Option<EtcdImage>,
}

/// All values that the parts of a node share.
#[derive(Clone, Default)]
pub struct NodeFacts {
    /// Connection to the leader; empty until this machine is a node.
    pub connection: WatchCell<CuratorConnection>,
    /// The cluster that this node is founding; `None` once it is founded.
    pub founding: WatchCell<Option<ClusterFounding>>,
    /// The roles of this node.
    pub roles: WatchCell<NodeRoles>,
    /// This node's control plane; `None` while it does not run.
    pub control_plane: WatchCell<Option<ControlPlane>>,
    /// Address at which other nodes connect to this one.
    pub address: WatchCell<IpAddr>,
    /// Machine and labels in the node's record.
    pub node_info: WatchCell<NodeInfo>,
    /// Addresses of all curators, `host:port` each.
    pub curators: WatchCell<BTreeSet<String>>,
    /// Declarations of this node's roles that operators declared.
    pub declarations: WatchCell<DeclarationMap>,
    /// Roles of which services continue although none is declared; set before `declarations`.
    pub retained_roles: WatchCell<RetainedRoles>,
    /// Status of the services of these roles.
    pub services: WatchCell<Vec<ServiceStatus>>,
    /// The Kubernetes setup of this node; `None` if the curator assigns none.
    pub setup: WatchCell<Option<NodeSetup>>,
    /// Kubernetes status; `None` if the node has no Kubernetes role and no component.
    pub kubernetes: WatchCell<Option<KubernetesStatus>>,
    /// The authorities of the cluster that this node uses.
    pub authority: WatchCell<AuthorityStatus>,
    /// What a person has to know, such as why the order cannot be executed at the moment, by part.
    pub problems: NodeProblems,
    /// Why this node follows no curator although one answers; `None` while it follows one.
    pub refusal: WatchCell<Option<String>>,
    /// Sentences about children that would end with the role server, and about limits that do not hold for them; empty
    /// where there are none.
    pub unprotected: WatchCell<Vec<String>>,
    /// What the role server finds wrong with how it runs, from all its parts.
    pub host_findings: HostFindings,
    /// The file systems that the role server and its programs write to, as they were last measured.
    pub file_systems: WatchCell<Vec<MeasuredFileSystem>>,
    /// What the gate of this node's curator has done since this process started.
    pub curator_gate: GateMonitor,
    /// The database file of this node's etcd, and the alarms of its cluster; `None` without an etcd that answers.
    pub etcd_space: WatchCell<Option<EtcdSpaceStatus>>,
    /// Whether this node's curator is stopped until another authority is in etcd, after a theft.
    pub curator_closed: WatchCell<bool>,
    /// Why this node's curator signs no statement while it leads. The curator withdraws it.
    pub statements: StatementMonitor,
    /// The keys of Kubernetes Secrets by the newest order; empty if there is none.
    pub secret_keys: WatchCell<SecretKeysOrder>,
    /// The versions of etcd and etcdutl on this host.
    pub programs: WatchCell<EtcdPrograms>,
    /// Set whenever another order was stored.
    pub order_changed: WatchCell<()>,
}

impl NodeFacts {
    /// Resets everything but `order_changed`, `programs`, `file_systems` and the counters of `curator_gate`, for a machine
    /// that is no node any more.
    /// No part may be running.
    pub fn clear(&self) {
        self.connection.clear();
        self.founding.clear();
        self.roles.clear();
        self.control_plane.clear();
        self.etcd_space.clear();
        self.curator_closed.clear();
        self.address.clear();
        self.problems.clear();
        self.refusal.clear();
        self.unprotected.clear();
        self.host_findings.set(cgroup_driver::FINDINGS, Vec::new());
        self.host_findings.set(REFUSED_DECLARATIONS, Vec::new());
        self.node_info.clear();
        self.curators.clear();
        self.declarations.clear();
        self.retained_roles.clear();
        self.services.clear();
        self.setup.clear();
        self.kubernetes.clear();
        self.secret_keys.clear();
        self.authority.clear();
    }
}

impl fmt::Debug for NodeFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Facts")
            .field("connection", &self.connection.latest())
            .field("roles", &self.roles.latest())
            .field("control_plane", &self.control_plane.latest())
            .field("address", &self.address.latest())
            .field("services", &self.services.latest())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use curator_client::node_id::PublicKey;
    use curator_client::testing::{authority, public, serial, validity};

    use super::*;

    #[test]
    fn certificate_of_the_leader_is_checked_before_it_is_stored() {
        let directory = tempfile::tempdir().unwrap();
        let files = ClusterFiles::in_state_directory(directory.path());
        let key = files.read_or_create_key().unwrap();
        let (own, cluster) = (PublicKey(key.public_key()), authority(1));
        let first = cluster.issue_node_certificate(&own, serial(3), validity()).unwrap().certificate;
        let credentials = Credentials {
            certificate: hex::encode(&first),
            ca_certificate: hex::encode(&cluster.anchor().certificate),
        };
        files.write_credentials(&credentials).unwrap();
        let connection = CuratorConnection::new(&key, &credentials, &files, &Clock::system()).unwrap();
        let address = "10.0.0.1".parse().unwrap();
        let of_etcd = cluster.issue_etcd_peer_certificate(&own, address, serial(4), validity()).unwrap();
        let of_owner = cluster.issue_owner_certificate("kim", &own, serial(4), validity()).unwrap();
        let elsewhere = authority(2).issue_node_certificate(&own, serial(4), validity()).unwrap();
        // Each has the key of this node.
        for (what, certificate) in [
            ("that of its member of etcd", of_etcd.certificate),
            ("that of an owner", of_owner.certificate),
            ("one of another cluster", elsewhere.certificate),
            ("one that nobody signed but itself", key.certificate_der().to_vec()),
        ] {
            let error = connection.replace_certificate(&files, &key, &certificate).unwrap_err().to_string();
            assert!(error.contains("is none of this node"), "{what}: {error}");
            assert_eq!(files.read_credentials().unwrap().as_ref(), Some(&credentials), "{what}");
            assert_eq!(connection.certificate.current().cert[0].to_vec(), first, "{what}");
        }
        let anchors = slice::from_ref(cluster.anchor());
        let of_another = cluster.issue_node_certificate(&public(8), serial(4), validity()).unwrap();
        assert!(check_own_certificate(&of_another.certificate, connection.id, anchors).is_err());
        assert!(check_own_certificate(&[], connection.id, anchors).is_err());
        let renewed = cluster.issue_node_certificate(&own, serial(5), validity()).unwrap().certificate;
        connection.replace_certificate(&files, &key, &renewed).unwrap();
        let stored = files.read_credentials().unwrap().unwrap();
        assert_eq!(
            stored.certificate,
            hex::encode(&renewed),
            "it is not valid by this clock, which may be wrong"
        );
    }
}
