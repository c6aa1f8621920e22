//! Which Kubernetes component gets which certificate: one table.
//!
//! A row names the authority that signs, the subject, and the role that a node needs. What a component may do in
//! Kubernetes follows from the name and the group in its certificate. So the names are those that Kubernetes itself has
//! rules for (`system:kube-scheduler`, `system:node:...` in `system:nodes`), and otherwise names of ours, which the
//! built-in objects have rules for. None of them can be a person's, because each contains a colon
//! ([`user_certificates`](crate::kubernetes::user_certificates)).
//!
//! Kubelets have an authority of their own, which API servers alone trust, and only for kubelets. If the authority of
//! API servers signed for them as well, as it did in earlier releases, the key of a kubelet could serve as an API
//! server: `kubectl`, the reconciler and every component would trust it, and send it their tokens
//! ([`kubelet_authority`](crate::kubernetes::kubelet_authority) explains how such a cluster changes).
//!
//! A node gets certificates for itself alone, for components of roles that it has at that moment, and for the address
//! that it reports. An etcd's certificate is valid for both ends, because etcd shows it to itself where its gateway
//! calls its own port.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use curator_client::node::{Node, NodeState};
use curator_client::node_id::NodeId;
use model::cluster::kubernetes::KeyPurpose;
use model::node_role::NodeRole;
use proto::curator::v1::KubernetesComponent as Component;

use crate::kubernetes::error::KubernetesError;
use crate::kubernetes::settings::KubernetesSettings;
use crate::kubernetes::signer::CertificateSubject;

/// Lifetime of a component's certificate. It is renewed when half of it is over.
pub const COMPONENT_LIFETIME: Duration = Duration::from_hours(7 * 24);

/// How the subject of a component's certificate is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SubjectTemplate {
    /// A client with this common name.
    Client(&'static str),
    /// The API server, under all names and addresses at which the cluster reaches it.
    ApiServer,
    /// The reconciler, which may do everything (`system:masters`).
    Reconciler,
    /// The node's own etcd, as client and server.
    Etcd,
    /// The kubelet as a client: `system:node:<id>`.
    Kubelet,
    /// The kubelet as a server, at the node's address.
    KubeletServer,
}

/// A row of the table of component certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ComponentCertificate {
    component: Component,
    authority: KeyPurpose,
    role: KubernetesRole,
    subject: SubjectTemplate,
}

/// One of the two Kubernetes roles that a node can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KubernetesRole {
    /// The node runs the control plane.
    Controller,
    /// The node runs workloads.
    Worker,
}

const fn component_certificate(
    component: Component,
    authority: KeyPurpose,
    role: KubernetesRole,
    named: SubjectTemplate,
) -> ComponentCertificate {
    ComponentCertificate { component, authority, role, subject: named }
}

const COMPONENT_CERTIFICATES: [ComponentCertificate; 11] = [
    component_certificate(
        Component::ApiServer,
        KeyPurpose::Servers,
        KubernetesRole::Controller,
        SubjectTemplate::ApiServer,
    ),
    component_certificate(
        Component::ApiServerKubeletClient,
        KeyPurpose::Clients,
        KubernetesRole::Controller,
        SubjectTemplate::Client("shepherd:kube-apiserver-kubelet-client"),
    ),
    component_certificate(
        Component::ApiServerEtcdClient,
        KeyPurpose::Etcd,
        KubernetesRole::Controller,
        SubjectTemplate::Client("shepherd:kube-apiserver-etcd-client"),
    ),
    component_certificate(
        Component::FrontProxyClient,
        KeyPurpose::FrontProxy,
        KubernetesRole::Controller,
        SubjectTemplate::Client("front-proxy-client"),
    ),
    component_certificate(
        Component::Etcd,
        KeyPurpose::Etcd,
        KubernetesRole::Controller,
        SubjectTemplate::Etcd,
    ),
    component_certificate(
        Component::ControllerManager,
        KeyPurpose::Clients,
        KubernetesRole::Controller,
        SubjectTemplate::Client("system:kube-controller-manager"),
    ),
    component_certificate(
        Component::Scheduler,
        KeyPurpose::Clients,
        KubernetesRole::Controller,
        SubjectTemplate::Client("system:kube-scheduler"),
    ),
    component_certificate(
        Component::Reconciler,
        KeyPurpose::Clients,
        KubernetesRole::Controller,
        SubjectTemplate::Reconciler,
    ),
    component_certificate(
        Component::Kubelet,
        KeyPurpose::Clients,
        KubernetesRole::Worker,
        SubjectTemplate::Kubelet,
    ),
    component_certificate(
        Component::KubeletServer,
        KeyPurpose::Kubelets,
        KubernetesRole::Worker,
        SubjectTemplate::KubeletServer,
    ),
    component_certificate(
        Component::Proxy,
        KeyPurpose::Clients,
        KubernetesRole::Worker,
        SubjectTemplate::Client("system:kube-proxy"),
    ),
];

impl KubernetesRole {
    /// The role as a node role.
    #[must_use]
    pub const fn role(self) -> NodeRole {
        match self {
            Self::Controller => NodeRole::KubernetesController,
            Self::Worker => NodeRole::KubernetesWorker,
        }
    }

    const fn is_role_of(self, node: &Node) -> bool {
        match self {
            Self::Controller => node.roles.kubernetes_controller,
            Self::Worker => node.roles.kubernetes_worker,
        }
    }
}

/// Returns the calling node if it may have what is for nodes of this role.
pub fn authorize_node<'node>(
    node: Option<&'node Node>,
    id: NodeId,
    revoked: bool,
    role: KubernetesRole,
    settings: Option<&KubernetesSettings>,
) -> Result<&'node Node, KubernetesError> {
    let node = node.ok_or(KubernetesError::UnknownNode(id))?;
    if revoked {
        return Err(KubernetesError::Revoked(id));
    }
    if node.state != NodeState::Up {
        return Err(KubernetesError::NotUp { node: id, state: node.state });
    }
    if settings.is_none() {
        return Err(KubernetesError::NotConfiguredForNode { node: id });
    }
    if !role.is_role_of(node) {
        return Err(KubernetesError::MissingRole { node: id, role: role.role() });
    }
    Ok(node)
}

/// The authority and the subject for the certificate that a node requests for one of its components.
pub fn resolve_certificate(
    component: i32,
    node: Option<&Node>,
    id: NodeId,
    revoked: bool,
    settings: Option<&KubernetesSettings>,
) -> Result<(KeyPurpose, CertificateSubject), KubernetesError> {
    let row = COMPONENT_CERTIFICATES
        .iter()
        .find(|row| i32::from(row.component) == component)
        .ok_or(KubernetesError::UnknownComponent(component))?;
    let node = authorize_node(node, id, revoked, row.role, settings)?;
    let address = node.status.as_ref().ok_or(KubernetesError::NoAddress(id))?.address;
    let settings = settings.ok_or(KubernetesError::NotConfiguredForNode { node: id })?;
    Ok((row.authority, build_subject(row.subject, id, address, settings)))
}

fn build_subject(
    named: SubjectTemplate,
    id: NodeId,
    address: IpAddr,
    settings: &KubernetesSettings,
) -> CertificateSubject {
    let own_host = IpAddr::from(Ipv4Addr::LOCALHOST);
    let client = |organisation: &str, name: String| CertificateSubject {
        organisation: organisation.to_owned(),
        name,
        client_auth: true,
        ..CertificateSubject::default()
    };
    let server = |name: String, dns: Vec<String>, addresses: Vec<IpAddr>| CertificateSubject {
        name,
        dns,
        addresses,
        server_auth: true,
        ..CertificateSubject::default()
    };
    let kubelet = || format!("system:node:{id}");
    match named {
        SubjectTemplate::Client(name) => client("", name.to_owned()),
        SubjectTemplate::Reconciler => client("system:masters", "shepherd:reconciler".to_owned()),
        SubjectTemplate::Kubelet => client("system:nodes", kubelet()),
        SubjectTemplate::KubeletServer => server(kubelet(), vec![id.to_string()], vec![address]),
        SubjectTemplate::Etcd => CertificateSubject {
            client_auth: true,
            ..server("shepherd:etcd".to_owned(), vec!["localhost".to_owned(), id.to_string()], vec![own_host])
        },
        SubjectTemplate::ApiServer => {
            let domain = &settings.spec().domain;
            let dns = vec![
                "kubernetes".to_owned(),
                "kubernetes.default".to_owned(),
                "kubernetes.default.svc".to_owned(),
                format!("kubernetes.default.svc.{domain}"),
                "localhost".to_owned(),
                id.to_string(),
            ];
            let service = IpAddr::from(settings.ranges().api_server_address());
            let mut addresses = vec![own_host, service];
            if !addresses.contains(&address) {
                addresses.push(address);
            }
            server("shepherd:kube-apiserver".to_owned(), dns, addresses)
        }
    }
}

#[cfg(test)]
mod tests {
    use curator_client::testing::{member, node_id};

    use super::*;
    use crate::kubernetes::settings::tests::settings;

    fn node(controller: bool, worker: bool) -> Node {
        let mut node = member(1);
        (node.roles.kubernetes_controller, node.roles.kubernetes_worker) = (controller, worker);
        node
    }

    fn resolve(
        component: Component,
        node: &Node,
    ) -> Result<(KeyPurpose, CertificateSubject), KubernetesError> {
        resolve_certificate(component.into(), Some(node), node.id, false, Some(&settings()))
    }

    #[test]
    fn every_component_of_the_contract_has_one_entry() {
        let mut numbers: Vec<i32> = COMPONENT_CERTIFICATES.iter().map(|row| row.component.into()).collect();
        numbers.sort_unstable();
        let known: Vec<i32> = (1..100).filter(|number| Component::try_from(*number).is_ok()).collect();
        assert_eq!(numbers, known);
    }

    #[test]
    fn each_component_has_its_authority_name_and_usages() {
        let (both, id) = (node(true, true), node_id(1));
        let kubelet = format!("system:node:{id}");
        for (component, authority, organisation, name, serves, calls) in [
            (Component::ApiServer, KeyPurpose::Servers, "", "shepherd:kube-apiserver", true, false),
            (
                Component::ApiServerKubeletClient,
                KeyPurpose::Clients,
                "",
                "shepherd:kube-apiserver-kubelet-client",
                false,
                true,
            ),
            (
                Component::ApiServerEtcdClient,
                KeyPurpose::Etcd,
                "",
                "shepherd:kube-apiserver-etcd-client",
                false,
                true,
            ),
            (Component::FrontProxyClient, KeyPurpose::FrontProxy, "", "front-proxy-client", false, true),
            (Component::Etcd, KeyPurpose::Etcd, "", "shepherd:etcd", true, true),
            (
                Component::ControllerManager,
                KeyPurpose::Clients,
                "",
                "system:kube-controller-manager",
                false,
                true,
            ),
            (Component::Scheduler, KeyPurpose::Clients, "", "system:kube-scheduler", false, true),
            (
                Component::Reconciler,
                KeyPurpose::Clients,
                "system:masters",
                "shepherd:reconciler",
                false,
                true,
            ),
            (Component::Kubelet, KeyPurpose::Clients, "system:nodes", kubelet.as_str(), false, true),
            (Component::KubeletServer, KeyPurpose::Kubelets, "", kubelet.as_str(), true, false),
            (Component::Proxy, KeyPurpose::Clients, "", "system:kube-proxy", false, true),
        ] {
            let (which, subject) = resolve(component, &both).unwrap();
            assert_eq!(which, authority, "{component:?}");
            assert_eq!(
                (
                    subject.organisation.as_str(),
                    subject.name.as_str(),
                    subject.server_auth,
                    subject.client_auth
                ),
                (organisation, name, serves, calls),
                "{component:?}"
            );
            assert_eq!(subject.dns.is_empty(), !serves, "{component:?}");
            assert!(subject.name.contains(':') || subject.name == "front-proxy-client", "{}", subject.name);
        }
    }

    #[test]
    fn server_certificates_list_every_name_and_address() {
        let both = node(true, true);
        let id = node_id(1).to_string();
        let of = |component| {
            let (_, subject) = resolve(component, &both).unwrap();
            let addresses: Vec<String> = subject.addresses.iter().map(ToString::to_string).collect();
            (subject.dns, addresses)
        };
        let (dns, addresses) = of(Component::ApiServer);
        assert_eq!(
            dns,
            [
                "kubernetes",
                "kubernetes.default",
                "kubernetes.default.svc",
                "kubernetes.default.svc.cluster.local",
                "localhost",
                &id
            ]
        );
        assert_eq!(addresses, ["127.0.0.1", "10.96.0.1", "10.0.0.1"]);
        assert_eq!(of(Component::KubeletServer), (vec![id.clone()], vec!["10.0.0.1".to_owned()]));
        assert_eq!(of(Component::Etcd), (vec!["localhost".to_owned(), id], vec!["127.0.0.1".to_owned()]));
    }

    #[test]
    fn node_gets_certificates_for_its_own_roles_only() {
        for (controller, worker) in [(false, false), (true, false), (false, true), (true, true)] {
            let node = node(controller, worker);
            for row in COMPONENT_CERTIFICATES {
                let has = matches!(
                    (row.role, controller, worker),
                    (KubernetesRole::Controller, true, _) | (KubernetesRole::Worker, _, true)
                );
                let decided = resolve(row.component, &node);
                assert_eq!(decided.is_ok(), has, "{:?} {controller} {worker}", row.component);
                assert!(
                    decided.err().is_none_or(|refusal| refusal.code() == tonic::Code::FailedPrecondition)
                );
            }
        }
    }

    #[test]
    fn untrusted_node_gets_no_certificate() {
        let (node, settings) = (node(true, true), settings());
        let id = node.id;
        let ask = |node: Option<&Node>, revoked, settings: Option<&KubernetesSettings>| {
            resolve_certificate(Component::Scheduler.into(), node, id, revoked, settings)
                .err()
                .map(|refusal| refusal.to_string())
        };
        assert_eq!(ask(Some(&node), false, Some(&settings)), None);
        let standby = Node { state: NodeState::Standby, ..node.clone() };
        let silent = Node { status: None, ..node.clone() };
        for (node, revoked, settings, text) in [
            (None, false, Some(&settings), "is unknown"),
            (Some(&node), true, Some(&settings), "are revoked"),
            (Some(&standby), false, Some(&settings), "it is on standby"),
            (Some(&silent), false, Some(&settings), "has not reported its address"),
            (Some(&node), false, None, "has no Kubernetes"),
        ] {
            let refusal = ask(node, revoked, settings).unwrap();
            assert!(refusal.contains(text), "{text}: {refusal}");
        }
        for unknown in [0, 12, -1] {
            let refusal = resolve_certificate(unknown, Some(&node), id, false, Some(&settings)).unwrap_err();
            assert_eq!(refusal.code(), tonic::Code::InvalidArgument, "{unknown}");
        }
    }
}
