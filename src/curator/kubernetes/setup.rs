//! What one node is told of Kubernetes: what it is to run, and whom it is to trust.
//!
//! It follows from the records alone, and is told anew whenever it is different. No secret is in it: those a node asks for
//! one by one, and each time it is looked whether it may have them.
//!
//! # Labels
//!
//! A node of Kubernetes has below names of ours what is known of it: `shepherd/machine`, `shepherd/release`, and under
//! `label.shepherd/` what people said of it, as far as Kubernetes can say it. Its roles it may not say itself: that is for
//! whoever keeps the built-in objects. A label here may have slashes, and may end with a dash; one there may not. What cannot
//! be said there is left out, rather than changed into something that nobody said.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use crate::curator::kubernetes::allotment::Allotment;
use crate::curator::kubernetes::editions::Edition;
use crate::curator::kubernetes::settings::Settings;
use crate::curator::node::{Node, State};
use crate::proto::curator::v1 as wire;

/// Where every API server listens.
pub const API_SERVER_PORT: u16 = 6443;

/// What stands before a fact.
const FACT: &str = "shepherd/";
/// What stands before what people said.
const SAID: &str = "label.shepherd/";

/// What there is of Kubernetes, as far as a node may know it.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    /// What it is to be.
    pub settings: &'a Settings,
    /// By which keys its parts know each other, as far as this node may be told.
    pub edition: &'a Edition,
}

/// `host:port` of API servers of controllers that are up, in order of their texts.
pub fn api_servers<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> Vec<String> {
    let controllers =
        nodes.into_iter().filter(|node| node.state == State::Up && node.roles.kubernetes_controller);
    let addresses = controllers.filter_map(|node| node.status.as_ref().map(|status| status.address));
    let mut told: Vec<String> =
        addresses.map(|address| SocketAddr::new(address, API_SERVER_PORT).to_string()).collect();
    told.sort();
    told.dedup();
    told
}

/// What a node is to run; `None` where that is nothing, or where a worker has no part of the pods' addresses yet.
pub fn setup<'a>(
    known: Known<'_>,
    own: &Node,
    allotment: &Allotment,
    nodes: impl IntoIterator<Item = &'a Node>,
) -> Option<wire::KubernetesSetup> {
    let part =
        allotment.part.filter(|part| own.roles.kubernetes_worker && known.settings.ranges().has(*part));
    let runs = own.roles.kubernetes_controller || part.is_some();
    if own.state != State::Up || !runs {
        return None;
    }
    let said = known.settings.said();
    let (bundle, bundle_url) = match &allotment.bundle {
        Some(own) => (own.digest.clone(), own.url.clone()),
        None => (said.bundle.clone(), said.bundle_url.clone()),
    };
    Some(wire::KubernetesSetup {
        generation: known.edition.generation,
        bundle,
        bundle_url,
        settings: Some(said.clone()),
        pod_range: part.map(|part| part.to_string()).unwrap_or_default(),
        authorities: known.edition.authorities.clone(),
        service_account_keys: known.edition.points(),
        api_servers: api_servers(nodes),
        labels: labels(own),
    })
}

/// Labels that a node of Kubernetes is to have.
fn labels(node: &Node) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    if let Some(machine) = node.machine {
        labels.insert(format!("{FACT}machine"), machine.to_string());
    }
    let release = node.status.as_ref().map(|status| &status.version);
    if let Some(release) = release.filter(|release| !release.is_empty() && is_value(release)) {
        labels.insert(format!("{FACT}release"), release.clone());
    }
    for (key, value) in &node.labels {
        if !key.is_empty() && is_value(key) && is_value(value) {
            labels.insert(format!("{SAID}{key}"), value.clone());
        }
    }
    labels
}

/// Whether Kubernetes takes this as the value of a label, or as the name of one if it is not empty.
fn is_value(text: &str) -> bool {
    let outer = |c: char| c.is_ascii_alphanumeric();
    text.is_empty()
        || text.len() <= 63
            && text.chars().all(|c| outer(c) || matches!(c, '-' | '_' | '.'))
            && text.starts_with(outer)
            && text.ends_with(outer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curator::kubernetes::allotment::Bundle;
    use crate::curator::kubernetes::keys::Which;
    use crate::curator::kubernetes::keys::tests::{keys, replacing};
    use crate::curator::kubernetes::settings::tests::settings;
    use crate::curator::node::tests::{member, up};

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

    fn part() -> Allotment {
        Allotment { part: Some("10.128.1.0/24".parse().unwrap()), ..Allotment::default() }
    }

    #[test]
    fn api_servers_are_those_of_controllers_that_are_up_and_say_where() {
        let silent = Node { status: None, ..controller(3) };
        let mut of_ipv6 = controller(4);
        of_ipv6.status.as_mut().unwrap().address = "fd00::4".parse().unwrap();
        let gone = Node { state: State::Decommissioned, ..controller(5) };
        let nodes = [controller(10), controller(2), silent, of_ipv6, gone, worker(6), member(7)];
        assert_eq!(api_servers(&nodes), ["10.0.0.10:6443", "10.0.0.2:6443", "[fd00::4]:6443"]);
    }

    #[test]
    fn node_is_told_what_its_roles_need_and_nothing_without_one() {
        let (settings, keys) = (settings(), replacing(Which::Clients));
        let known = Known { settings: &settings, edition: &keys.edition() };
        let nodes = [controller(1), worker(2)];
        let tell = |node: &Node, allotment: &Allotment| setup(known, node, allotment, &nodes);
        let none = Allotment::default();
        assert_eq!(tell(&up(3), &part()), None, "a part that it has still is no role");
        assert_eq!(tell(&member(3), &none), None);
        assert_eq!(tell(&worker(3), &none), None, "it has no part yet");
        assert_eq!(tell(&Node { state: State::Standby, ..controller(1) }, &none), None);
        let of_before = Allotment { part: Some("192.168.0.0/24".parse().unwrap()), ..part() };
        assert_eq!(tell(&worker(3), &of_before), None, "a part of other ranges");

        let told = tell(&controller(1), &part()).unwrap();
        assert_eq!(told.pod_range, "", "it is no worker");
        let told = tell(&worker(2), &part()).unwrap();
        assert_eq!(told.pod_range, "10.128.1.0/24");
        assert_eq!(told.generation, keys.generation);
        assert_eq!((&told.bundle, &told.bundle_url), (&settings.said().bundle, &settings.said().bundle_url));
        assert_eq!(told.settings.as_ref(), Some(settings.said()));
        assert_eq!(told.authorities, keys.authorities());
        assert_eq!(told.authorities[1].trusted.len(), 2);
        assert_eq!(told.service_account_keys.len(), 1);
        assert_eq!(told.api_servers, ["10.0.0.1:6443"]);
        let bundle = Some(Bundle { digest: "ef".repeat(32), url: String::new() });
        let told = tell(&worker(2), &Allotment { bundle, ..part() }).unwrap();
        assert_eq!((told.bundle, told.bundle_url), ("ef".repeat(32), String::new()), "its own");
    }

    #[test]
    fn no_secret_is_told() {
        use prost::Message as _;
        let (settings, keys) = (settings(), keys());
        let known = Known { settings: &settings, edition: &keys.edition() };
        let told = setup(known, &worker(2), &part(), &[]).unwrap();
        let told = hex::encode(told.encode_to_vec());
        for ring in keys.rings.values() {
            // The secret number in PKCS#8, behind what all such keys begin with.
            let secret = hex::encode(&ring.signs.pkcs8()[36..68]);
            assert!(!told.contains(&secret));
        }
    }

    #[test]
    fn labels_are_what_kubernetes_can_say() {
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
        let told = labels(&node);
        let told: Vec<(&str, &str)> =
            told.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(told, expected);
        assert_eq!(
            labels(&worker(2)).into_keys().collect::<Vec<_>>(),
            [] as [&str; 0],
            "its roles are not its own to say"
        );
        node.status.as_mut().unwrap().version = "1.2.3+dirty".to_owned();
        assert!(!labels(&node).contains_key("shepherd/release"));
    }
}
