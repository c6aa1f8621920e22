//! Every kind of certificate that the curator signs for Kubernetes, verified by every component that verifies one:
//! valid and expired ones, of this cluster's authority and of another one's, and by components that expect another
//! kind. Once more by a real API server.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use base64::Engine as _;
use chrono::TimeDelta;
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData as _};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore};
use shepherd::curator::kubernetes::component_certificates::resolve_certificate;
use shepherd::curator::kubernetes::settings::KubernetesSettings;
use shepherd::curator::kubernetes::signer::{CertificateSubject, P256PublicKey, Signer, generate_key};
use shepherd::curator::kubernetes::user_certificates;
use shepherd::curator_client::certificate::{Serial, Validity};
use shepherd::curator_client::node::{Node, NodeState};
use shepherd::curator_client::node_status::NodeStatus;
use shepherd::model::cluster::kubernetes::KeyPurpose;
use shepherd::model::time::Timestamp;
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::KubernetesComponent as Component;
use shepherd::proto::curator::v1::issue_kubernetes_user_request::Access;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use uuid::Uuid;

use crate::harness::aloud::TestResult;
use crate::harness::curators::{kubernetes_settings, status};
use crate::harness::etcd_servers::in_time;
use crate::harness::key_holder::Holder;
use crate::objects::real::{Files, Real};

/// The subject of a signed certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    OfComponent(Component),
    OfUser(Access),
}

/// A component that verifies a certificate, and its authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Checker {
    /// A client, which checks the certificate of an API server.
    CallerOfServers,
    /// An API server, which checks the certificate of a kubelet.
    CallerOfKubelets,
    /// An API server or a kubelet, which checks the certificate of its client.
    ServerOfClients,
    /// An API server to which another one forwards calls, which checks the certificate of that one.
    Aggregated,
    /// etcd, which checks the certificate of its client.
    Etcd,
    /// A client of etcd, which checks the certificate of etcd.
    CallerOfEtcd,
}

impl Checker {
    const ALL: [Self; 6] = [
        Self::CallerOfServers,
        Self::CallerOfKubelets,
        Self::ServerOfClients,
        Self::Aggregated,
        Self::Etcd,
        Self::CallerOfEtcd,
    ];

    const fn trusts(self) -> KeyPurpose {
        match self {
            Self::CallerOfServers => KeyPurpose::Servers,
            Self::CallerOfKubelets => KeyPurpose::Kubelets,
            Self::ServerOfClients => KeyPurpose::Clients,
            Self::Aggregated => KeyPurpose::FrontProxy,
            Self::Etcd | Self::CallerOfEtcd => KeyPurpose::Etcd,
        }
    }

    /// Whether it accepts a certificate of this authority at this moment.
    fn believes(self, authority: &Signer, certificate: &[u8], at: Timestamp) -> Result<bool> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from(authority.certificate().to_vec()))?;
        let (roots, provider) = (Arc::new(roots), Arc::new(default_provider()));
        let certificate = CertificateDer::from(certificate.to_vec());
        let now = UnixTime::since_unix_epoch(Duration::from_secs(at.timestamp().try_into()?));
        Ok(match self {
            Self::CallerOfServers | Self::CallerOfKubelets | Self::CallerOfEtcd => {
                // All are reached at the same host: its own address.
                let name = match self {
                    Self::CallerOfEtcd => ServerName::try_from("localhost")?,
                    _ => ServerName::from(IpAddr::from(ADDRESS)),
                };
                let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider).build()?;
                verifier.verify_server_cert(&certificate, &[], &name, &[], now).is_ok()
            }
            Self::ServerOfClients | Self::Aggregated | Self::Etcd => {
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build()?;
                verifier.verify_client_cert(&certificate, &[], now).is_ok()
            }
        })
    }
}

const ADDRESS: Ipv4Addr = Ipv4Addr::LOCALHOST;

impl Kind {
    /// All kinds in the contract.
    fn all() -> Vec<Self> {
        let components =
            (0..100).filter_map(|number| Component::try_from(number).ok()).map(Self::OfComponent);
        let users = (0..100).filter_map(|number| Access::try_from(number).ok()).map(Self::OfUser);
        components.chain(users).filter(|kind| !kind.checked_by().is_empty()).collect()
    }

    /// The checkers that accept this kind. A new kind must be added here.
    const fn checked_by(self) -> &'static [Checker] {
        match self {
            Self::OfComponent(Component::Unspecified) | Self::OfUser(Access::Unspecified) => &[],
            Self::OfComponent(Component::ApiServer) => &[Checker::CallerOfServers],
            Self::OfComponent(Component::KubeletServer) => &[Checker::CallerOfKubelets],
            Self::OfComponent(
                Component::ApiServerKubeletClient
                | Component::ControllerManager
                | Component::Scheduler
                | Component::Reconciler
                | Component::Kubelet
                | Component::Proxy,
            )
            | Self::OfUser(Access::Owner | Access::Viewer) => &[Checker::ServerOfClients],
            Self::OfComponent(Component::FrontProxyClient) => &[Checker::Aggregated],
            Self::OfComponent(Component::ApiServerEtcdClient) => &[Checker::Etcd],
            Self::OfComponent(Component::Etcd) => &[Checker::Etcd, Checker::CallerOfEtcd],
        }
    }

    /// The identity in the certificate, by which an API server decides.
    fn says(self, node: &Node) -> (&'static str, String) {
        let own = |name: &str| ("", name.to_owned());
        match self {
            Self::OfComponent(Component::Unspecified) | Self::OfUser(Access::Unspecified) => own(""),
            Self::OfComponent(Component::ApiServer) => own("shepherd:kube-apiserver"),
            Self::OfComponent(Component::ApiServerKubeletClient) => {
                own("shepherd:kube-apiserver-kubelet-client")
            }
            Self::OfComponent(Component::ApiServerEtcdClient) => own("shepherd:kube-apiserver-etcd-client"),
            Self::OfComponent(Component::FrontProxyClient) => own("front-proxy-client"),
            Self::OfComponent(Component::Etcd) => own("shepherd:etcd"),
            Self::OfComponent(Component::ControllerManager) => own("system:kube-controller-manager"),
            Self::OfComponent(Component::Scheduler) => own("system:kube-scheduler"),
            Self::OfComponent(Component::Proxy) => own("system:kube-proxy"),
            Self::OfComponent(Component::KubeletServer) => own(&format!("system:node:{}", node.id)),
            Self::OfComponent(Component::Kubelet) => ("system:nodes", format!("system:node:{}", node.id)),
            Self::OfComponent(Component::Reconciler) => ("system:masters", "shepherd:reconciler".to_owned()),
            Self::OfUser(Access::Owner) => ("shepherd:owners", "kim".to_owned()),
            Self::OfUser(Access::Viewer) => ("shepherd:viewers", "kim".to_owned()),
        }
    }

    /// The certificate that the curator decides to sign for it.
    fn decided(self, node: &Node) -> Result<(KeyPurpose, CertificateSubject)> {
        match self {
            Self::OfComponent(component) => {
                let settings = KubernetesSettings::new(kubernetes_settings())?;
                Ok(resolve_certificate(component.into(), Some(node), node.id, false, Some(&settings))?)
            }
            Self::OfUser(access) => {
                let request = wire::IssueKubernetesUserRequest {
                    public_key: Vec::new(),
                    name: "kim".to_owned(),
                    access: access.into(),
                    lifetime_ms: 1,
                };
                Ok((KeyPurpose::Clients, user_certificates::plan_user_certificate(&request)?.0))
            }
        }
    }
}

/// A node that may have every kind.
fn node(now: Timestamp) -> Result<Node> {
    let mut node = Node::new(Holder::new()?.key, NodeState::Up, now);
    (node.roles.kubernetes_controller, node.roles.kubernetes_worker) = (true, true);
    let node_status = status(SocketAddr::from((ADDRESS, 0)));
    node.status = Some(NodeStatus::from_report(&node_status, now).map_err(anyhow::Error::msg)?);
    Ok(node)
}

/// The authorities of a cluster.
struct Authorities(Vec<(KeyPurpose, Signer)>);

impl Authorities {
    /// The authorities of the cluster of this number. Two clusters have the same names and other keys.
    fn new(now: Timestamp) -> Result<Self> {
        let validity =
            Validity { not_before: now - TimeDelta::days(30), not_after: now + TimeDelta::days(30) };
        let signers = KeyPurpose::ALL.into_iter().filter(|which| which.is_authority()).map(|which| {
            let (cluster, serial) = (Uuid::from_bytes([7; 16]), Serial::new([7; 16]));
            Ok((which, Signer::new_authority(which.as_str(), cluster, &generate_key()?, serial, validity)?))
        });
        Ok(Self(signers.collect::<Result<_>>()?))
    }

    fn of(&self, which: KeyPurpose) -> Result<&Signer> {
        let found = self.0.iter().find(|(own, _)| *own == which);
        Ok(&found.context("no such authority")?.1)
    }
}

/// A certificate, and its key.
struct Pair {
    certificate: Vec<u8>,
    key: KeyPair,
}

fn issue(kind: Kind, node: &Node, by: &Authorities, validity: Validity) -> Result<Pair> {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    let (which, subject) = kind.decided(node)?;
    let point = P256PublicKey::from_spki(&key.subject_public_key_info())?;
    let serial = Serial::new(rand::random());
    let certificate = by.of(which)?.issue_certificate(&subject, &point, serial, validity)?.certificate;
    Ok(Pair { certificate, key })
}

fn now() -> Timestamp {
    Timestamp::from(std::time::SystemTime::now())
}

#[test]
fn each_kind_is_trusted_in_its_time_by_the_checkers_it_is_for_and_by_no_others() -> TestResult {
    let now = now();
    let (ours, theirs, node) = (Authorities::new(now)?, Authorities::new(now)?, node(now)?);
    let validity = Validity { not_before: now, not_after: now + TimeDelta::hours(1) };
    let kinds = Kind::all();
    assert_eq!(kinds.len(), 13, "{kinds:?}");
    for kind in kinds {
        let own = issue(kind, &node, &ours, validity)?;
        let foreign = issue(kind, &node, &theirs, validity)?;
        for checker in Checker::ALL {
            let authority = ours.of(checker.trusts())?;
            let believes = |pair: &Pair, at| checker.believes(authority, &pair.certificate, at);
            let is_for = kind.checked_by().contains(&checker);
            for (second, in_time) in [(-1, false), (0, true), (3600, true), (3601, false)] {
                let believed = believes(&own, now + TimeDelta::seconds(second))?;
                assert_eq!(believed, is_for && in_time, "{kind:?} shown to {checker:?} at {second}");
            }
            assert!(!believes(&foreign, now)?, "{kind:?} of another cluster shown to {checker:?}");
        }
    }
    Ok(())
}

/// What an API server permits follows from the name and the group alone: no kind is accepted as another one.
#[test]
fn no_kind_says_that_its_holder_is_another() -> TestResult {
    let node = node(now())?;
    let mut seen = BTreeSet::new();
    for kind in Kind::all() {
        let (_, subject) = kind.decided(&node)?;
        let (group, name) = kind.says(&node);
        assert_eq!((subject.organisation.as_str(), &subject.name), (group, &name), "{kind:?}");
        assert!(seen.insert((subject.client_auth, group, name)), "{kind:?} is as another");
    }
    let with =
        |group: &str| Kind::all().into_iter().filter(|kind| kind.says(&node).0 == group).collect::<Vec<_>>();
    assert_eq!(with("system:masters"), [Kind::OfComponent(Component::Reconciler)]);
    assert_eq!(with("shepherd:owners"), [Kind::OfUser(Access::Owner)]);
    assert_eq!(with("system:nodes"), [Kind::OfComponent(Component::Kubelet)]);
    Ok(())
}

fn pem(label: &str, der: &[u8]) -> String {
    let text = base64::engine::general_purpose::STANDARD.encode(der);
    let lines: Vec<&str> = (0..text.len()).step_by(64).map(|at| &text[at..text.len().min(at + 64)]).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

/// The answer of an API server to the holder of this pair: its code, and its sentence.
async fn taken_for(
    address: SocketAddr,
    servers: &Signer,
    pair: Option<&Pair>,
    header: &str,
) -> Result<(u16, String)> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from(servers.certificate().to_vec()))?;
    let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    let config = match pair {
        None => builder.with_no_client_auth(),
        Some(pair) => {
            let chain = vec![CertificateDer::from(pair.certificate.clone())];
            builder.with_client_auth_cert(chain, PrivatePkcs8KeyDer::from(pair.key.serialize_der()).into())?
        }
    };
    let asking = async {
        let stream = tokio::net::TcpStream::connect(address).await?;
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let mut stream = connector.connect(ServerName::from(address.ip()), stream).await?;
        let query = format!("GET /whoami HTTP/1.1\r\nHost: {address}\r\n{header}Connection: close\r\n\r\n");
        stream.write_all(query.as_bytes()).await?;
        let mut answer = Vec::new();
        // It may end the connection without a message.
        let _ = stream.read_to_end(&mut answer).await;
        anyhow::Ok(String::from_utf8_lossy(&answer).into_owned())
    };
    let answer = in_time("an answer", asking).await??;
    let code = answer.split_whitespace().nth(1).with_context(|| format!("no answer: {answer:?}"))?;
    Ok((code.parse()?, answer))
}

/// The same with an API server of Kubernetes itself. It answers 401 to a client that it rejects. It names a client
/// that it knows, because only masters may make this request.
#[tokio::test]
async fn real_api_server_believes_what_is_for_it_in_its_time_and_nothing_else() -> TestResult {
    let now = now();
    let (ours, theirs, node) = (Authorities::new(now)?, Authorities::new(now)?, node(now)?);
    let hours = |from: i64, until: i64| Validity {
        not_before: now + TimeDelta::hours(from),
        not_after: now + TimeDelta::hours(until),
    };
    let text =
        |pair: &Pair| (pem("CERTIFICATE", &pair.certificate), pem("PRIVATE KEY", &pair.key.serialize_der()));
    let server = issue(Kind::OfComponent(Component::ApiServer), &node, &ours, hours(-1, 1))?;
    let reconciler = issue(Kind::OfComponent(Component::Reconciler), &node, &ours, hours(-1, 1))?;
    let authority = |which| anyhow::Ok(pem("CERTIFICATE", ours.of(which)?.certificate()));
    let files = Files {
        servers: authority(KeyPurpose::Servers)?,
        clients: authority(KeyPurpose::Clients)?,
        front_proxy: Some(authority(KeyPurpose::FrontProxy)?),
        server: text(&server),
        client: text(&reconciler),
    };
    let Some(real) = Real::start_with(files).await? else { return Ok(()) };
    let (address, servers) = (real.address(), ours.of(KeyPurpose::Servers)?);
    let ask = async |pair: Option<&Pair>, header: &str| taken_for(address, servers, pair, header).await;
    // The other direction: the authority of this cluster's servers alone verifies a server.
    for wrong in [theirs.of(KeyPurpose::Servers)?, ours.of(KeyPurpose::Clients)?] {
        assert!(taken_for(address, wrong, Some(&reconciler), "").await.is_err());
    }
    assert_eq!(ask(None, "").await?.0, 401, "nobody is anonymous");
    let passed_on = "X-Remote-User: somebody\r\nX-Remote-Group: system:masters\r\n";
    for kind in Kind::all() {
        let good = issue(kind, &node, &ours, hours(-1, 1))?;
        let (group, name) = kind.says(&node);
        let (code, message) = ask(Some(&good), "").await?;
        if !kind.checked_by().contains(&Checker::ServerOfClients) {
            assert_eq!(code, 401, "{kind:?} {message}");
        } else if group == "system:masters" {
            assert_eq!(code, 404, "{kind:?} {message}");
        } else {
            assert_eq!(code, 403, "{kind:?} {message}");
            assert!(message.contains(&format!("User \\\"{name}\\\"")), "{kind:?} {message}");
        }
        // Only the front proxy may name another user.
        let expected = match kind {
            Kind::OfComponent(Component::FrontProxyClient) => 404,
            _ => code,
        };
        assert_eq!(ask(Some(&good), passed_on).await?.0, expected, "{kind:?}");
        for (wrong, pair) in [
            ("over", issue(kind, &node, &ours, hours(-2, -1))?),
            ("not yet good", issue(kind, &node, &ours, hours(1, 2))?),
            ("of another cluster", issue(kind, &node, &theirs, hours(-1, 1))?),
        ] {
            for header in ["", passed_on] {
                let (code, message) = ask(Some(&pair), header).await?;
                assert_eq!(code, 401, "{kind:?} is {wrong}: {message}");
            }
        }
    }
    Ok(())
}
