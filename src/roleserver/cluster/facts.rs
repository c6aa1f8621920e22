//! What the parts of a node tell each other about its cluster.
//!
//! Each of these is a value: whoever comes late, or is started again, sees the newest. None of them is an address: who
//! asks a curator goes through the one channel in [`Connection`], and follows the leader by that.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use crate::curator::bootstrap::Founding;
use crate::curator::clock::Clock;
use crate::curator::identity::Identity;
use crate::curator::leader_channel::Curators;
use crate::curator::node::Roles;
use crate::curator::node_id::NodeId;
use crate::curator::pki::{Anchor, PkiError};
use crate::curator::tls::{certified, client_config};
use crate::proto::curator::v1::{KubernetesStatus, ServiceStatus};
use crate::roleserver::cluster::files::{Credentials, Files, FilesError};
use crate::roleserver::cluster::kubernetes::setup::Setup;
use crate::roleserver::cluster::services::wanted::{About, Declared};
use crate::supervisor::value::Value;

/// The certificate that this node shows to everybody, replaced while it runs.
#[derive(Clone)]
pub struct Shown(Arc<RwLock<Arc<CertifiedKey>>>);

impl Shown {
    /// Shows this one.
    #[must_use]
    pub fn new(first: Arc<CertifiedKey>) -> Self {
        Self(Arc::new(RwLock::new(first)))
    }

    /// What is shown now.
    #[must_use]
    pub fn current(&self) -> Arc<CertifiedKey> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Shows another one, on every connection from now on.
    pub fn replace(&self, next: Arc<CertifiedKey>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = next;
    }
}

impl fmt::Debug for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shown")
    }
}

impl ResolvesServerCert for Shown {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }
}

/// That this node is one, and its way to the curator that leads. There is one as soon as the certificate is durable.
#[derive(Clone, Debug)]
pub struct Connection {
    /// The node.
    pub id: NodeId,
    /// The cluster.
    pub anchor: Anchor,
    /// The way to the leader.
    pub curators: Curators,
    /// The certificate.
    pub shown: Shown,
}

/// Why a certificate that was kept, or was just answered, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// It is none.
    #[error("the certificate of this node is no hexadecimal text")]
    NoText(#[from] hex::FromHexError),
    /// The authority's is none.
    #[error(transparent)]
    Authority(#[from] PkiError),
    /// What is kept of the cluster cannot be read.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// Key and certificate are not of one node, or TLS cannot use them.
    #[error("the certificate of this node cannot be used with its key: {0}")]
    Tls(#[from] rustls::Error),
}

impl Connection {
    /// The way of this node, by what is on its disk.
    pub fn new(
        key: &Identity,
        credentials: &Credentials,
        files: &Files,
        clock: &Clock,
    ) -> Result<Self, CredentialsError> {
        let anchor = Anchor::parse(&hex::decode(&credentials.ca_certificate)?)?;
        let shown = Shown::new(certified(&hex::decode(&credentials.certificate)?, key.pkcs8())?);
        let curators = way(&anchor, &shown, files, clock)?;
        curators.learn(files.curators());
        Ok(Self { id: id_of(key), anchor, curators, shown })
    }
}

/// A way to the leader of this cluster, as whoever is shown. The highest epoch that is heard is kept in `files`.
pub fn way(anchor: &Anchor, shown: &Shown, files: &Files, clock: &Clock) -> Result<Curators, FilesError> {
    let of_cluster = anchor.cluster;
    let (anchor, shown, clock) = (anchor.clone(), shown.clone(), clock.clone());
    let configure =
        move |expected| client_config(anchor.clone(), expected, Some(shown.current()), clock.clone());
    let (cluster, files) = (of_cluster, files.clone());
    let epoch = files.epoch(cluster)?;
    let keep = move |epoch| files.raise_epoch(cluster, epoch).map_err(|error| error.to_string());
    Ok(Curators::of_epoch(Arc::new(configure), epoch, Arc::new(keep)))
}

/// The node that this key makes.
#[must_use]
pub fn id_of(key: &Identity) -> NodeId {
    NodeId::of(&crate::curator::node_id::PublicKey(key.public_key()))
}

/// The control plane of this node, once its curator listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlPlane {
    /// The port of its curator.
    pub port: u16,
}

/// A cluster that this node is founding.
#[derive(Clone, Debug)]
pub struct ToFound {
    /// With what.
    pub founding: Arc<Founding>,
    /// Where other nodes will reach this one.
    pub address: IpAddr,
}

/// All that the parts tell each other.
#[derive(Clone, Default)]
pub struct Facts {
    /// The way to the leader.
    pub connection: Value<Connection>,
    /// A cluster to be founded; none once it is.
    pub to_found: Value<Option<ToFound>>,
    /// What this node is to do.
    pub roles: Value<Roles>,
    /// Whether it runs a control plane.
    pub control_plane: Value<Option<ControlPlane>>,
    /// Where other nodes reach it.
    pub address: Value<IpAddr>,
    /// What people say of it.
    pub about: Value<About>,
    /// `host:port` of every curator.
    pub curators: Value<BTreeSet<String>>,
    /// Declarations of the operators' roles that it has.
    pub declarations: Value<Declared>,
    /// How the services of these do.
    pub services: Value<Vec<ServiceStatus>>,
    /// What this node is to run of Kubernetes: none where it is told that it is to run nothing.
    pub setup: Value<Option<Setup>>,
    /// How that does; none where nothing of it runs.
    pub kubernetes: Value<Option<KubernetesStatus>>,
    /// Why it does not become what it was asked to be; none when nothing is in its way.
    pub trouble: Value<Option<String>>,
    /// Another order stands on the disk.
    pub ordered: Value<()>,
}

impl Facts {
    /// Makes all of them unknown again, for a machine that is no node any more. Nobody may be at work with them.
    pub fn forget(&self) {
        self.connection.forget();
        self.to_found.forget();
        self.roles.forget();
        self.control_plane.forget();
        self.address.forget();
        self.trouble.forget();
        self.about.forget();
        self.curators.forget();
        self.declarations.forget();
        self.services.forget();
        self.setup.forget();
        self.kubernetes.forget();
    }
}

impl fmt::Debug for Facts {
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
