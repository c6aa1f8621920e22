//! The Kubernetes setup of one node: what it runs, whom it trusts, its labels.
//!
//! It follows from the records alone, and is sent again whenever it changes. It contains no secret: a node requests its
//! secrets one by one, and each request is authorized.
//!
//! # Labels
//!
//! A Kubernetes node has labels under two prefixes of ours. Facts are under `shepherd/` (`shepherd/machine`,
//! `shepherd/release`), and operators' labels are under `label.shepherd/`, as far as Kubernetes can express them. Role
//! labels are missing here, because a node may not set them itself: the reconciler of the built-in objects does. A
//! label of ours may have slashes, and may end with a dash; one of Kubernetes may not. A label that Kubernetes cannot
//! express is left out, rather than changed into one that nobody set.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use curator_client::node::{Node, NodeState};
use proto::curator::v1 as wire;

use crate::kubernetes::node_allocation::NodeAllocation;
use crate::kubernetes::settings::KubernetesSettings;
use crate::kubernetes::trust_bundle::TrustBundle;

/// The port on which every API server listens.
const API_SERVER_PORT: u16 = 6443;

/// Prefix of labels with facts.
const FACT_LABEL_PREFIX: &str = "shepherd/";
/// Prefix of labels that operators set.
const OPERATOR_LABEL_PREFIX: &str = "label.shepherd/";

/// What the setups of nodes are built from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SetupInputs<'a> {
    /// The Kubernetes settings of the cluster.
    pub(crate) settings: &'a KubernetesSettings,
    /// The authorities and public keys of the generation assigned to this node.
    pub(crate) trust_bundle: &'a TrustBundle,
}

/// `host:port` of the API servers of controllers that are up, sorted as text, without duplicates.
pub(crate) fn api_server_addresses<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> Vec<String> {
    let controllers =
        nodes.into_iter().filter(|node| node.state == NodeState::Up && node.roles.kubernetes_controller);
    let addresses = controllers.filter_map(|node| node.status.as_ref().map(|status| status.address));
    let mut messages: Vec<String> =
        addresses.map(|address| SocketAddr::new(address, API_SERVER_PORT).to_string()).collect();
    messages.sort();
    messages.dedup();
    messages
}

/// The setup of a node; `None` if it runs nothing of Kubernetes, or is a worker without a pod range yet.
pub(crate) fn build_node_setup<'a>(
    known: SetupInputs<'_>,
    own: &Node,
    allotment: &NodeAllocation,
    nodes: impl IntoIterator<Item = &'a Node>,
) -> Option<wire::KubernetesSetup> {
    let part = allotment
        .pod_range
        .filter(|part| own.roles.kubernetes_worker && known.settings.ranges().is_node_range(*part));
    let runs = own.roles.kubernetes_controller || part.is_some();
    if own.state != NodeState::Up || !runs {
        return None;
    }
    let settings = known.settings.spec();
    let (bundle, bundle_url) = match &allotment.bundle {
        Some(own) => (own.digest.clone(), own.url.clone()),
        None => (settings.bundle.clone(), settings.bundle_url.clone()),
    };
    Some(wire::KubernetesSetup {
        generation: known.trust_bundle.generation,
        bundle,
        bundle_url,
        settings: Some(settings.clone()),
        pod_range: part.map(|part| part.to_string()).unwrap_or_default(),
        authorities: known.trust_bundle.authorities.clone(),
        service_account_keys: known.trust_bundle.service_account_spkis(),
        api_servers: api_server_addresses(nodes),
        labels: kubernetes_labels(own),
    })
}

/// The labels of the Kubernetes node.
fn kubernetes_labels(node: &Node) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    if let Some(machine) = node.machine {
        labels.insert(format!("{FACT_LABEL_PREFIX}machine"), machine.to_string());
    }
    let release = node.status.as_ref().map(|status| &status.version);
    if let Some(release) = release.filter(|release| !release.is_empty() && is_label_value(release)) {
        labels.insert(format!("{FACT_LABEL_PREFIX}release"), release.clone());
    }
    for (key, value) in &node.labels {
        if !key.is_empty() && is_label_value(key) && is_label_value(value) {
            labels.insert(format!("{OPERATOR_LABEL_PREFIX}{key}"), value.clone());
        }
    }
    labels
}

/// Whether Kubernetes accepts this as the value of a label; if it is not empty, also as a label's name.
fn is_label_value(text: &str) -> bool {
    let outer = |c: char| c.is_ascii_alphanumeric();
    text.is_empty()
        || text.len() <= 63
            && text.chars().all(|c| outer(c) || matches!(c, '-' | '_' | '.'))
            && text.starts_with(outer)
            && text.ends_with(outer)
}

#[cfg(test)]
mod tests {
    use curator_client::testing::{member, up};
    use model::cluster::kubernetes::KeyPurpose;

    use super::*;
    use crate::kubernetes::keys::tests::{keys, replacing};
    use crate::kubernetes::node_allocation::BundleRef;
    use crate::kubernetes::settings::tests::settings;

    fn controller(number: u8) -> Node {
        let mut node = member(number);
        node.roles.kubernetes_controller = true;
        node
    }

    fn worker(number: u8) -> Node {
        let mut node = up(number);
        node.roles.kubernetes_worker = true;
        node
    }

    fn allocation() -> NodeAllocation {
        NodeAllocation { pod_range: Some("10.128.1.0/24".parse().unwrap()), ..NodeAllocation::default() }
    }

    #[test]
    fn api_servers_are_controllers_that_are_up_with_an_address() {
        let silent = Node { status: None, ..controller(3) };
        let mut of_ipv6 = controller(4);
        of_ipv6.status.as_mut().unwrap().address = "fd00::4".parse().unwrap();
        let gone = Node { state: NodeState::Decommissioned, ..controller(5) };
        let nodes = [controller(10), controller(2), silent, of_ipv6, gone, worker(6), member(7)];
        assert_eq!(api_server_addresses(&nodes), ["10.0.0.10:6443", "10.0.0.2:6443", "[fd00::4]:6443"]);
    }

    #[test]
    fn node_setup_follows_its_roles() {
        let (settings, keys) = (settings(), replacing(KeyPurpose::Clients));
        let known = SetupInputs { settings: &settings, trust_bundle: &keys.trust_bundle() };
        let nodes = [controller(1), worker(2)];
        let tell = |node: &Node, allotment: &NodeAllocation| build_node_setup(known, node, allotment, &nodes);
        let none = NodeAllocation::default();
        assert_eq!(tell(&up(3), &allocation()), None, "a part that it has still is no role");
        assert_eq!(tell(&member(3), &none), None);
        assert_eq!(tell(&worker(3), &none), None, "it has no part yet");
        assert_eq!(tell(&Node { state: NodeState::Standby, ..controller(1) }, &none), None);
        let of_before = NodeAllocation { pod_range: Some("192.168.0.0/24".parse().unwrap()), ..allocation() };
        assert_eq!(tell(&worker(3), &of_before), None, "a part of other ranges");

        let setup = tell(&controller(1), &allocation()).unwrap();
        assert_eq!(setup.pod_range, "", "it is no worker");
        let setup = tell(&worker(2), &allocation()).unwrap();
        assert_eq!(setup.pod_range, "10.128.1.0/24");
        assert_eq!(setup.generation, keys.generation);
        assert_eq!(
            (&setup.bundle, &setup.bundle_url),
            (&settings.spec().bundle, &settings.spec().bundle_url)
        );
        assert_eq!(setup.settings.as_ref(), Some(settings.spec()));
        assert_eq!(setup.authorities, keys.authorities());
        assert_eq!(setup.authorities[1].trusted.len(), 2);
        assert_eq!(setup.service_account_keys.len(), 1);
        assert_eq!(setup.api_servers, ["10.0.0.1:6443"]);
        let bundle = Some(BundleRef { digest: "ef".repeat(32), url: String::new() });
        let setup = tell(&worker(2), &NodeAllocation { bundle, ..allocation() }).unwrap();
        assert_eq!((setup.bundle, setup.bundle_url), ("ef".repeat(32), String::new()), "its own");
    }

    #[test]
    fn node_setup_contains_no_secret() {
        use prost::Message as _;
        let (settings, keys) = (settings(), keys());
        let known = SetupInputs { settings: &settings, trust_bundle: &keys.trust_bundle() };
        let setup = build_node_setup(known, &worker(2), &allocation(), &[]).unwrap();
        let text = hex::encode(setup.encode_to_vec());
        for ring in keys.rings.values() {
            // The secret number in PKCS#8, which follows the prefix that all such keys have.
            let secret = hex::encode(&ring.signer.pkcs8()[36..68]);
            assert!(!text.contains(&secret));
        }
    }

    #[test]
    fn labels_are_those_kubernetes_can_represent() {
        let mut node = worker(2);
        node.roles.kubernetes_controller = true;
        node.machine = Some("11111111-1111-4111-8111-111111111111".parse().unwrap());
        node.status.as_mut().unwrap().version = "1.2.3".to_owned();
        for (key, value) in [
            ("row", "7"),
            ("empty", ""),
            ("a/b", "1"),
            ("dash-", "1"),
            ("value", "x/y"),
            ("end", "x-"),
            ("a_b.c-d", "A.b_c-1"),
        ] {
            node.labels.insert(key.to_owned(), value.to_owned());
        }
        let expected = [
            ("label.shepherd/a_b.c-d", "A.b_c-1"),
            ("label.shepherd/empty", ""),
            ("label.shepherd/row", "7"),
            ("shepherd/machine", "11111111-1111-4111-8111-111111111111"),
            ("shepherd/release", "1.2.3"),
        ];
        let reports = kubernetes_labels(&node);
        let reported: Vec<(&str, &str)> =
            reports.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(reported, expected);
        assert_eq!(
            kubernetes_labels(&worker(2)).into_keys().collect::<Vec<_>>(),
            [] as [&str; 0],
            "its roles are not its own to say"
        );
        node.status.as_mut().unwrap().version = "1.2.3+dirty".to_owned();
        assert!(!kubernetes_labels(&node).contains_key("shepherd/release"));
    }
}
