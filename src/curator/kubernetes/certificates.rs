//! Which component gets a certificate: of which authority, in whose name, on which nodes.
//!
//! One table. What a component may do in Kubernetes follows from the name and the group in its certificate, so those are
//! the ones that Kubernetes itself has rules for (`system:kube-scheduler`, `system:node:…` in `system:nodes`), and for the
//! rest names of ours, which the built-in objects have rules for. None of them can be a person's: there is a colon in each
//! ([`users`](crate::curator::kubernetes::users)).
//!
//! A node gets them for itself alone, for components of roles that it has at that moment, and at the address that it says.
//! An etcd's is good for both ends, because etcd shows it to itself where its gateway calls its own port.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use crate::curator::kubernetes::authority::Subject;
use crate::curator::kubernetes::keys::Which;
use crate::curator::kubernetes::refusal::Refusal;
use crate::curator::kubernetes::settings::Settings;
use crate::curator::node::{Node, State};
use crate::curator::node_id::NodeId;
use crate::model::role::Role;
use crate::proto::curator::v1::KubernetesComponent as Component;

/// How long a component's certificate is good for. It is renewed when half of that is over.
pub const LIFETIME: Duration = Duration::from_hours(7 * 24);

/// What a component calls itself, and where it is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    /// This name, as a client.
    Client(&'static str),
    /// The API server as all of the cluster reaches it.
    ApiServer,
    /// The reconciler: it may do all.
    Reconciler,
    /// The node's own etcd.
    Etcd,
    /// The node, as a client.
    Kubelet,
    /// The node, as a server.
    KubeletServer,
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    component: Component,
    authority: Which,
    role: Needs,
    named: Named,
}

/// Which of the two roles of Kubernetes something is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// It runs the control plane.
    Controller,
    /// It runs workloads.
    Worker,
}

const fn row(component: Component, authority: Which, role: Needs, named: Named) -> Row {
    Row { component, authority, role, named }
}

const TABLE: [Row; 11] = [
    row(Component::ApiServer, Which::Servers, Needs::Controller, Named::ApiServer),
    row(
        Component::ApiServerKubeletClient,
        Which::Clients,
        Needs::Controller,
        Named::Client("shepherd:kube-apiserver-kubelet-client"),
    ),
    row(
        Component::ApiServerEtcdClient,
        Which::Etcd,
        Needs::Controller,
        Named::Client("shepherd:kube-apiserver-etcd-client"),
    ),
    row(
        Component::FrontProxyClient,
        Which::FrontProxy,
        Needs::Controller,
        Named::Client("front-proxy-client"),
    ),
    row(Component::Etcd, Which::Etcd, Needs::Controller, Named::Etcd),
    row(
        Component::ControllerManager,
        Which::Clients,
        Needs::Controller,
        Named::Client("system:kube-controller-manager"),
    ),
    row(Component::Scheduler, Which::Clients, Needs::Controller, Named::Client("system:kube-scheduler")),
    row(Component::Reconciler, Which::Clients, Needs::Controller, Named::Reconciler),
    row(Component::Kubelet, Which::Clients, Needs::Worker, Named::Kubelet),
    row(Component::KubeletServer, Which::Servers, Needs::Worker, Named::KubeletServer),
    row(Component::Proxy, Which::Clients, Needs::Worker, Named::Client("system:kube-proxy")),
];

impl Needs {
    /// The role by its name.
    #[must_use]
    pub const fn role(self) -> Role {
        match self {
            Self::Controller => Role::KubernetesController,
            Self::Worker => Role::KubernetesWorker,
        }
    }

    /// Whether the node has it.
    #[must_use]
    pub const fn is_had_by(self, node: &Node) -> bool {
        match self {
            Self::Controller => node.roles.kubernetes_controller,
            Self::Worker => node.roles.kubernetes_worker,
        }
    }
}

/// The node that asks for something of its own, if it may have what is for nodes of this role.
pub fn may_have<'node>(
    node: Option<&'node Node>,
    id: NodeId,
    revoked: bool,
    role: Needs,
    settings: Option<&Settings>,
) -> Result<&'node Node, Refusal> {
    let node = node.ok_or(Refusal::Unknown(id))?;
    if revoked {
        return Err(Refusal::Revoked(id));
    }
    if node.state != State::Up {
        return Err(Refusal::NotUp { node: id, state: node.state });
    }
    if settings.is_none() {
        return Err(Refusal::NothingToRun { node: id });
    }
    if !role.is_had_by(node) {
        return Err(Refusal::NotItsRole { node: id, role: role.role() });
    }
    Ok(node)
}

/// Which authority signs what for a node that asks for a certificate of one of its components.
pub fn decide(
    component: i32,
    node: Option<&Node>,
    id: NodeId,
    revoked: bool,
    settings: Option<&Settings>,
) -> Result<(Which, Subject), Refusal> {
    let row = TABLE
        .iter()
        .find(|row| i32::from(row.component) == component)
        .ok_or(Refusal::Component(component))?;
    let node = may_have(node, id, revoked, row.role, settings)?;
    let address = node.status.as_ref().ok_or(Refusal::NoAddress(id))?.address;
    let settings = settings.ok_or(Refusal::NothingToRun { node: id })?;
    Ok((row.authority, subject(row.named, id, address, settings)))
}

fn subject(named: Named, id: NodeId, address: IpAddr, settings: &Settings) -> Subject {
    let own_host = IpAddr::from(Ipv4Addr::LOCALHOST);
    let client = |organisation: &str, name: String| Subject {
        organisation: organisation.to_owned(),
        name,
        calls: true,
        ..Subject::default()
    };
    let server = |name: String, dns: Vec<String>, addresses: Vec<IpAddr>| Subject {
        name,
        dns,
        addresses,
        serves: true,
        ..Subject::default()
    };
    let kubelet = || format!("system:node:{id}");
    match named {
        Named::Client(name) => client("", name.to_owned()),
        Named::Reconciler => client("system:masters", "shepherd:reconciler".to_owned()),
        Named::Kubelet => client("system:nodes", kubelet()),
        Named::KubeletServer => server(kubelet(), vec![id.to_string()], vec![address]),
        Named::Etcd => Subject {
            calls: true,
            ..server("shepherd:etcd".to_owned(), vec!["localhost".to_owned(), id.to_string()], vec![own_host])
        },
        Named::ApiServer => {
            let domain = &settings.said().domain;
            let dns = vec![
                "kubernetes".to_owned(),
                "kubernetes.default".to_owned(),
                "kubernetes.default.svc".to_owned(),
                format!("kubernetes.default.svc.{domain}"),
                "localhost".to_owned(),
                id.to_string(),
            ];
            let service = IpAddr::from(settings.ranges().api_server());
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
    use super::*;
    use crate::curator::kubernetes::settings::tests::settings;
    use crate::curator::node::tests::member;
    use crate::curator::node_id::tests::node_id;

    fn node(controller: bool, worker: bool) -> Node {
        let mut node = member(1);
        (node.roles.kubernetes_controller, node.roles.kubernetes_worker) = (controller, worker);
        node
    }

    fn decided(component: Component, node: &Node) -> Result<(Which, Subject), Refusal> {
        decide(component.into(), Some(node), node.id, false, Some(&settings()))
    }

    #[test]
    fn every_component_of_the_contract_has_one_row() {
        let mut numbers: Vec<i32> = TABLE.iter().map(|row| row.component.into()).collect();
        numbers.sort_unstable();
        let known: Vec<i32> = (1..100).filter(|number| Component::try_from(*number).is_ok()).collect();
        assert_eq!(numbers, known);
    }

    #[test]
    fn each_has_its_authority_its_name_and_its_use() {
        let (both, id) = (node(true, true), node_id(1));
        let kubelet = format!("system:node:{id}");
        for (component, authority, organisation, name, serves, calls) in [
            (Component::ApiServer, Which::Servers, "", "shepherd:kube-apiserver", true, false),
            (
                Component::ApiServerKubeletClient,
                Which::Clients,
                "",
                "shepherd:kube-apiserver-kubelet-client",
                false,
                true,
            ),
            (
                Component::ApiServerEtcdClient,
                Which::Etcd,
                "",
                "shepherd:kube-apiserver-etcd-client",
                false,
                true,
            ),
            (Component::FrontProxyClient, Which::FrontProxy, "", "front-proxy-client", false, true),
            (Component::Etcd, Which::Etcd, "", "shepherd:etcd", true, true),
            (Component::ControllerManager, Which::Clients, "", "system:kube-controller-manager", false, true),
            (Component::Scheduler, Which::Clients, "", "system:kube-scheduler", false, true),
            (Component::Reconciler, Which::Clients, "system:masters", "shepherd:reconciler", false, true),
            (Component::Kubelet, Which::Clients, "system:nodes", kubelet.as_str(), false, true),
            (Component::KubeletServer, Which::Servers, "", kubelet.as_str(), true, false),
            (Component::Proxy, Which::Clients, "", "system:kube-proxy", false, true),
        ] {
            let (which, subject) = decided(component, &both).unwrap();
            assert_eq!(which, authority, "{component:?}");
            assert_eq!(
                (subject.organisation.as_str(), subject.name.as_str(), subject.serves, subject.calls),
                (organisation, name, serves, calls),
                "{component:?}"
            );
            assert_eq!(subject.dns.is_empty(), !serves, "{component:?}");
            assert!(subject.name.contains(':') || subject.name == "front-proxy-client", "{}", subject.name);
        }
    }

    #[test]
    fn servers_are_known_by_every_name_they_are_reached_by() {
        let both = node(true, true);
        let id = node_id(1).to_string();
        let of = |component| {
            let (_, subject) = decided(component, &both).unwrap();
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
    fn node_gets_what_is_for_roles_that_it_has_and_nothing_else() {
        for (controller, worker) in [(false, false), (true, false), (false, true), (true, true)] {
            let node = node(controller, worker);
            for row in TABLE {
                let has = matches!(
                    (row.role, controller, worker),
                    (Needs::Controller, true, _) | (Needs::Worker, _, true)
                );
                let decided = decided(row.component, &node);
                assert_eq!(decided.is_ok(), has, "{:?} {controller} {worker}", row.component);
                assert!(
                    decided.err().is_none_or(|refusal| refusal.code() == tonic::Code::FailedPrecondition)
                );
            }
        }
    }

    #[test]
    fn whoever_is_not_trusted_gets_nothing() {
        let (node, settings) = (node(true, true), settings());
        let id = node.id;
        let ask = |node: Option<&Node>, revoked, settings: Option<&Settings>| {
            decide(Component::Scheduler.into(), node, id, revoked, settings)
                .err()
                .map(|refusal| refusal.to_string())
        };
        assert_eq!(ask(Some(&node), false, Some(&settings)), None);
        let standby = Node { state: State::Standby, ..node.clone() };
        let silent = Node { status: None, ..node.clone() };
        for (node, revoked, settings, said) in [
            (None, false, Some(&settings), "is unknown"),
            (Some(&node), true, Some(&settings), "are revoked"),
            (Some(&standby), false, Some(&settings), "it is on standby"),
            (Some(&silent), false, Some(&settings), "has not reported its address"),
            (Some(&node), false, None, "has no Kubernetes"),
        ] {
            let refusal = ask(node, revoked, settings).unwrap();
            assert!(refusal.contains(said), "{said}: {refusal}");
        }
        for unknown in [0, 12, -1] {
            let refusal = decide(unknown, Some(&node), id, false, Some(&settings)).unwrap_err();
            assert_eq!(refusal.code(), tonic::Code::InvalidArgument, "{unknown}");
        }
    }
}
