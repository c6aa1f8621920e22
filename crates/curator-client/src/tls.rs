//! Mutual TLS 1.3 between curators and their callers: certificate checks and configurations.
//!
//! Both ends prove the keys of the certificates that they show. A curator requests a certificate and accepts any, also
//! none. It identifies the peer for each call and not in the handshake ([`crate::peer_identity`]): so the newest
//! revocations count, and a rejection has a message. A caller accepts only a node of the cluster that it means, and if
//! it knows which node to expect, only that one.
//!
//! Only TLS 1.3 with Ed25519 is allowed, because nothing else is ever certified here. The crate `transport` verifies
//! the signatures, and resumes no session.

use std::fmt;
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::ResolvesServerCert;
use rustls::sign::CertifiedKey;
use rustls::{CertificateError, ClientConfig, Error, ServerConfig};
use transport::config::HTTP_2;
use transport::signature::AcceptedSignatures;
use transport::verifier::{
    ClientAuth, ClientCertificateCheck, ClientVerifier, ServerCertificateCheck, ServerVerifier,
};

use crate::clock::Clock;
use crate::node_id::NodeId;
use crate::peer_identity::{Peer, Revocations, identify_peer};
use crate::pki::TrustAnchor;

/// A key and its certificate in the form that TLS uses.
pub fn certified_key(certificate: &[u8], pkcs8: &[u8]) -> Result<Arc<CertifiedKey>, Error> {
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(pkcs8.to_vec()));
    let chain = vec![CertificateDer::from(certificate.to_vec())];
    CertifiedKey::from_der(chain, key, &ring::default_provider()).map(Arc::new)
}

/// TLS for a curator. It shows the certificate of `shown`, and accepts any certificate whose key the peer proves.
pub fn server_config(shown: Arc<dyn ResolvesServerCert>) -> Result<Arc<ServerConfig>, Error> {
    let verifier = ClientVerifier::new(AnyClient, ClientAuth::Optional);
    transport::config::server_config(verifier, shown, &[HTTP_2])
}

/// TLS to a node of the cluster with this authority. `own` is the client's certificate; `expected` is the only node
/// accepted.
pub fn client_config(
    anchor: TrustAnchor,
    expected: Option<NodeId>,
    own: Option<Arc<CertifiedKey>>,
    clock: Clock,
) -> Result<Arc<ClientConfig>, Error> {
    let node = ClusterNode { anchor, expected, clock };
    transport::config::client_config(ServerVerifier::new(node, AcceptedSignatures::Ed25519), own)
}

/// Accepts any certificate: each call identifies its peer by it.
#[derive(Debug)]
struct AnyClient;

impl ClientCertificateCheck for AnyClient {
    fn check_client(&self, _: &CertificateDer<'_>, _: &[CertificateDer<'_>]) -> Result<(), Error> {
        Ok(())
    }
}

/// Why the server is not the expected node.
#[derive(thiserror::Error)]
enum WrongServer {
    #[error(transparent)]
    InvalidCertificate(#[from] crate::peer_identity::PeerError),
    #[error("the other end is {0}, and a node of the cluster was expected")]
    NotANode(Peer),
    #[error("the other end is node {found}, and {expected} was expected")]
    OtherNode { found: NodeId, expected: NodeId },
}

/// The message itself, because rustls shows errors that it does not know by `Debug`.
impl fmt::Debug for WrongServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Accepts a node of the cluster, or the expected node alone.
#[derive(Debug)]
struct ClusterNode {
    anchor: TrustAnchor,
    expected: Option<NodeId>,
    clock: Clock,
}

impl ClusterNode {
    fn verify_node(&self, end_entity: &[u8], more: usize) -> Result<(), WrongServer> {
        if more > 0 {
            return Err(crate::peer_identity::PeerError::UnexpectedChain(more + 1).into());
        }
        // Only a curator knows the revocations, so none are checked here. A node that is no longer in the cluster
        // cannot pass for the leader: the connection to the leader accepts only the node that was named as leader.
        match identify_peer(&[end_entity], &self.anchor, &Revocations::default(), self.clock.now())? {
            Peer::Node { id, .. } => match self.expected {
                Some(expected) if expected != id => Err(WrongServer::OtherNode { found: id, expected }),
                _ => Ok(()),
            },
            other => Err(WrongServer::NotANode(other)),
        }
    }
}

impl ServerCertificateCheck for ClusterNode {
    fn check_server(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<(), Error> {
        self.verify_node(end_entity, intermediates.len()).map_err(|error| {
            Error::InvalidCertificate(CertificateError::Other(rustls::OtherError(Arc::new(error))))
        })
    }
}
