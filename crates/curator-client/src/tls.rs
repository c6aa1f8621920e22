//! Mutual TLS 1.3 between curators and their callers: certificate checks and configurations.
//!
//! Both ends prove the keys of the certificates that they show. A curator requests a certificate and accepts any, also
//! none. It identifies the peer for each call and not in the handshake ([`crate::peer_identity`]): so the newest
//! revocations count, and a rejection has a message. A caller accepts only a node of the cluster that it means, and if
//! it knows which node to expect, only that one. What else the caller demands is a [`CuratorCheck`], which it decides
//! for each handshake: the role of a curator, and that the certificate is not revoked.
//!
//! Only TLS 1.3 with Ed25519 is allowed, because nothing else is ever certified here. The crate `transport` verifies
//! the signatures, and resumes no session.

use std::fmt;
use std::slice;
use std::sync::{Arc, Mutex, PoisonError};

use model::time::Timestamp;
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

use crate::certificate::Validity;
use crate::clock::Clock;
use crate::curator_role::{CuratorError, identify_curator};
use crate::node_id::NodeId;
use crate::peer_authorities::identify_peer_by_any;
use crate::peer_identity::{Peer, PeerError, Revocations};
use crate::pki::TrustAnchor;

/// What a caller demands of a curator.
#[derive(Clone, Debug)]
pub enum CuratorCheck {
    /// Any node of the cluster is accepted: nothing is known yet about who is a curator.
    AnyNode,
    /// Any server at all is accepted. This is for requesting a statement, which proves itself, without showing a
    /// certificate, and for nothing else.
    AnyServer,
    /// A curator's certificate is required, and may have ended or not have begun. This is for comparing the clocks of two
    /// curators, one of which may be wrong, and for nothing else.
    CuratorAtAnyTime,
    /// A curator's certificate is required.
    Curator {
        /// The authorities, one of which must have signed it.
        anchors: Vec<TrustAnchor>,
        /// Certificates and nodes that are not accepted.
        revocations: Arc<Revocations>,
    },
}

/// Decides for each handshake what is demanded; the error is a sentence, with which the handshake fails.
pub type CuratorCheckProvider = Arc<dyn Fn() -> Result<CuratorCheck, String> + Send + Sync>;

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

/// TLS to any node of the cluster with this authority. `own` is the client's certificate; `expected` is the only node
/// accepted.
pub fn client_config(
    anchor: TrustAnchor,
    expected: Option<NodeId>,
    own: Option<Arc<CertifiedKey>>,
    clock: Clock,
) -> Result<Arc<ClientConfig>, Error> {
    curator_client_config(anchor, Arc::new(|| Ok(CuratorCheck::AnyNode)), expected, own, clock)
}

/// TLS to a curator of the cluster with this authority, as `check` demands it. `own` and `expected` are as in
/// [`client_config`].
pub fn curator_client_config(
    anchor: TrustAnchor,
    check: CuratorCheckProvider,
    expected: Option<NodeId>,
    own: Option<Arc<CertifiedKey>>,
    clock: Clock,
) -> Result<Arc<ClientConfig>, Error> {
    authorities_client_config(vec![anchor], check, expected, own, clock)
}

/// TLS to a curator of the cluster with these authorities, which replace one another. All else is as in
/// [`curator_client_config`].
pub fn authorities_client_config(
    anchors: Vec<TrustAnchor>,
    check: CuratorCheckProvider,
    expected: Option<NodeId>,
    own: Option<Arc<CertifiedKey>>,
    clock: Clock,
) -> Result<Arc<ClientConfig>, Error> {
    let node = ClusterNode { anchors, check, expected, clock, accepted: None };
    transport::config::client_config(ServerVerifier::new(node, AcceptedSignatures::Ed25519), own)
}

/// Like [`authorities_client_config`], for any node. `accepted` gets the certificates that servers show.
pub(super) fn recording_client_config(
    anchors: Vec<TrustAnchor>,
    check: CuratorCheckProvider,
    accepted: AcceptedCertificates,
    own: Option<Arc<CertifiedKey>>,
    clock: Clock,
) -> Result<Arc<ClientConfig>, Error> {
    let node = ClusterNode { anchors, check, expected: None, clock, accepted: Some(accepted) };
    transport::config::client_config(ServerVerifier::new(node, AcceptedSignatures::Ed25519), own)
}

/// The certificates that were accepted in the handshakes of one configuration. In each of these moments the server has
/// not proved the key yet: only a call that succeeds shows that it has.
#[derive(Clone, Debug, Default)]
pub(super) struct AcceptedCertificates(Arc<Mutex<Vec<Vec<u8>>>>);

impl AcceptedCertificates {
    fn push(&self, certificate: &[u8]) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(certificate.to_vec());
    }

    /// The accepted certificate, if there was exactly one handshake: with more of them, nothing shows which connection a
    /// call took.
    pub(super) fn only_one(&self) -> Option<Vec<u8>> {
        match self.0.lock().unwrap_or_else(PoisonError::into_inner).as_slice() {
            [one] => Some(one.clone()),
            _ => None,
        }
    }
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
    InvalidCertificate(#[from] PeerError),
    #[error(transparent)]
    NotACurator(#[from] CuratorError),
    #[error("the other end is {0}, and a node of the cluster was expected")]
    NotANode(Peer),
    /// The caller follows no curator at the moment.
    #[error("{0}")]
    NoCheck(String),
    #[error("the other end is node {found}, and {expected} was expected")]
    OtherNode { found: NodeId, expected: NodeId },
}

/// The message itself, because rustls shows errors that it does not know by `Debug`.
impl fmt::Debug for WrongServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Accepts a node of the cluster as the check demands it, or the expected node alone.
struct ClusterNode {
    anchors: Vec<TrustAnchor>,
    check: CuratorCheckProvider,
    expected: Option<NodeId>,
    clock: Clock,
    accepted: Option<AcceptedCertificates>,
}

impl fmt::Debug for ClusterNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("ClusterNode");
        let cluster = self.anchors.first().map(|anchor| anchor.cluster);
        shown.field("cluster", &cluster).field("expected", &self.expected).finish_non_exhaustive()
    }
}

impl ClusterNode {
    fn verify_node(&self, end_entity: &[u8], more: usize) -> Result<(), WrongServer> {
        if more > 0 {
            return Err(PeerError::UnexpectedChain(more + 1).into());
        }
        let (shown, now) = ([end_entity], self.clock.now());
        let found = match (self.check)().map_err(WrongServer::NoCheck)? {
            CuratorCheck::AnyServer => return Ok(()),
            CuratorCheck::CuratorAtAnyTime => self.identify_at_its_begin(&shown, now)?,
            // No revocations are known here.
            CuratorCheck::AnyNode => {
                match identify_peer_by_any(&shown, &self.anchors, &Revocations::default(), now)? {
                    Peer::Node { id, .. } => id,
                    other => return Err(WrongServer::NotANode(other)),
                }
            }
            CuratorCheck::Curator { anchors, revocations } => {
                identify_curator(&shown, &anchors, &revocations, now)?
            }
        };
        match self.expected {
            Some(expected) if expected != found => Err(WrongServer::OtherNode { found, expected }),
            _ => Ok(()),
        }
    }

    /// Identifies a curator at the moment from which its certificate and that of its authority are valid.
    fn identify_at_its_begin(&self, shown: &[&[u8]], now: Timestamp) -> Result<NodeId, CuratorError> {
        let begin = shown.first().and_then(|shown| Validity::from_der(shown));
        let begin = begin.map_or(now, |validity| validity.not_before);
        let mut refused = CuratorError::NoAuthority;
        for anchor in &self.anchors {
            let moment = begin.max(anchor.validity.not_before);
            match identify_curator(shown, slice::from_ref(anchor), &Revocations::default(), moment) {
                Ok(found) => return Ok(found),
                Err(error) if refused == CuratorError::NoAuthority => refused = error,
                Err(_) => {}
            }
        }
        Err(refused)
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
        })?;
        if let Some(accepted) = &self.accepted {
            accepted.push(end_entity);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use super::*;
    use crate::certificate::Serial;
    use crate::testing::{at, authority, public, serial, validity};

    fn verifier(check: Result<CuratorCheck, String>, expected: Option<NodeId>) -> ClusterNode {
        let clock = Clock::new(|| at(1), || Duration::ZERO);
        let check: CuratorCheckProvider = Arc::new(move || check.clone());
        let anchors = vec![authority(1).anchor().clone()];
        ClusterNode { anchors, check, expected, clock, accepted: None }
    }

    /// A check that demands a curator, of which these certificates are revoked.
    fn curators_without(revoked: &[Serial]) -> CuratorCheck {
        let serials: BTreeMap<_, _> = revoked.iter().map(|serial| (*serial, at(1000))).collect();
        let revocations = Arc::new(Revocations { serials, ..Default::default() });
        CuratorCheck::Curator { anchors: vec![authority(1).anchor().clone()], revocations }
    }

    fn of_node(number: u8) -> Vec<u8> {
        authority(1).issue_node_certificate(&public(number), serial(3), validity()).unwrap().certificate
    }

    fn of_curator(number: u8) -> Vec<u8> {
        authority(1).issue_curator_certificate(&public(number), serial(4), validity()).unwrap().certificate
    }

    fn verdict(verifier: &ClusterNode, certificate: &[u8]) -> String {
        let verdict = verifier.verify_node(certificate, 0);
        verdict.map_or_else(|error| format!("{error:?}"), |()| "accepted".to_owned())
    }

    #[test]
    fn node_without_the_role_is_refused_where_a_curator_is_expected() {
        let id = NodeId::from_key(&public(7));
        for expected in [None, Some(id)] {
            let verifier = verifier(Ok(curators_without(&[])), expected);
            assert_eq!(verdict(&verifier, &of_curator(7)), "accepted");
            let text = format!(
                "the other end is node {id}, which has no curator's certificate: only a consensus member leads"
            );
            assert_eq!(verdict(&verifier, &of_node(7)), text);
        }
        // The role does not make it the one that was named.
        let text = verdict(&verifier(Ok(curators_without(&[])), Some(id)), &of_curator(8));
        assert!(text.contains("was expected"), "{text}");
    }

    #[test]
    fn revoked_curator_is_refused() {
        let (authority, key) = (authority(1), public(7));
        let verifier = verifier(Ok(curators_without(&[serial(4)])), None);
        let text = verdict(&verifier, &of_curator(7));
        assert!(text.contains("credentials are revoked") && text.contains(&serial(4).to_string()), "{text}");
        let renewed = authority.issue_curator_certificate(&key, serial(5), validity()).unwrap();
        assert_eq!(verdict(&verifier, &renewed.certificate), "accepted");
        let over = Validity { not_before: at(-10), not_after: at(0) };
        let over = authority.issue_curator_certificate(&key, serial(5), over).unwrap();
        let text = verdict(&verifier, &over.certificate);
        assert!(text.contains("expired at"), "{text}");
    }

    #[test]
    fn clocks_are_compared_with_the_expected_curator_alone() {
        let (authority, id) = (authority(1), NodeId::from_key(&public(7)));
        let verifier = verifier(Ok(CuratorCheck::CuratorAtAnyTime), Some(id));
        for (from, until) in [(-900, -800), (0, 1000), (800, 900)] {
            let validity = Validity { not_before: at(from), not_after: at(until) };
            let shown = authority.issue_curator_certificate(&public(7), serial(5), validity).unwrap();
            assert_eq!(verdict(&verifier, &shown.certificate), "accepted", "{from}");
        }
        let text = verdict(&verifier, &of_node(7));
        assert!(text.contains("has no curator's certificate"), "{text}");
        let text = verdict(&verifier, &of_curator(8));
        assert!(text.contains("was expected"), "{text}");
        let other = crate::testing::authority(2);
        let shown = other.issue_curator_certificate(&public(7), serial(5), validity()).unwrap();
        let text = verdict(&verifier, &shown.certificate);
        assert!(text.contains("not by the authority"), "{text}");
    }

    #[test]
    fn certificate_of_a_call_is_known_if_there_was_one_handshake() {
        let accepted = AcceptedCertificates::default();
        let any = verifier(Ok(CuratorCheck::AnyNode), None);
        let recording = ClusterNode { accepted: Some(accepted.clone()), ..any };
        let shake_hands = |certificate: Vec<u8>| {
            let (name, end_entity) =
                (ServerName::try_from("curator").unwrap(), CertificateDer::from(certificate));
            let now = UnixTime::since_unix_epoch(Duration::ZERO);
            recording.check_server(&end_entity, &[], &name, &[], now).is_ok()
        };
        assert!(!shake_hands(Vec::new()) && accepted.only_one().is_none(), "it was refused");
        assert!(shake_hands(of_curator(7)));
        assert_eq!(accepted.only_one(), Some(of_curator(7)));
        assert!(shake_hands(of_curator(8)));
        assert_eq!(accepted.only_one(), None, "the call may have taken either connection");
    }

    #[test]
    fn any_node_is_accepted_before_the_first_statement() {
        let verifier_of = |check| verifier(check, None);
        let any = verifier_of(Ok(CuratorCheck::AnyNode));
        assert_eq!(verdict(&any, &of_node(7)), "accepted");
        assert_eq!(verdict(&any, &of_curator(7)), "accepted");
        let owner = authority(1).issue_owner_certificate("kim", &public(7), serial(3), validity()).unwrap();
        let text = verdict(&any, &owner.certificate);
        assert!(text.contains("owner kim") && text.contains("was expected"), "{text}");
        // While the caller follows nobody, the reason is in the error.
        let nobody = verifier_of(Err("no curator is followed at the moment".to_owned()));
        assert_eq!(verdict(&nobody, &of_curator(7)), "no curator is followed at the moment");
    }
}
