//! Tests of the table of entitlements.

use curator_client::certificate::IssuedCertificate;
use curator_client::node::{Node, NodeState};
use curator_client::peer_renewal::renew_peer;
use curator_client::pki::{Authority, certificate_params};
use curator_client::testing::{
    at, authority, key, member, node_id, pkcs8, public, serial, snapshot, up, validity,
};
use proto::curator::v1::KubernetesComponent as Component;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, SanType,
};

use super::*;
use crate::kubernetes::component_certificates::resolve_certificate;
use crate::kubernetes::settings::tests::settings;
use crate::kubernetes::signer::tests::{component_key, signer};
use crate::node_lifecycle::{check_curator, check_join, etcd_peer_address};

/// A row as the table has it: organisation, name, DNS names, addresses, usages, and days.
fn row(entitled: &Entitlement) -> String {
    let addresses: Vec<String> = entitled.addresses.iter().map(ToString::to_string).collect();
    format!(
        "O={} CN={} DNS={} IP={} server={} client={} days={}",
        entitled.organisation,
        entitled.name,
        entitled.dns.join(","),
        addresses.join(","),
        entitled.server_auth,
        entitled.client_auth,
        entitled.max_lifetime.as_secs() / 86_400
    )
}

/// A certificate of the test's own making. Nobody here looks at who signed it.
fn certificate(entitled: &Entitlement, change: impl FnOnce(&mut CertificateParams)) -> Vec<u8> {
    let mut params = certificate_params(serial(3), validity()).unwrap();
    params.distinguished_name = DistinguishedName::new();
    if !entitled.organisation.is_empty() {
        params.distinguished_name.push(DnType::OrganizationName, entitled.organisation.as_str());
    }
    params.distinguished_name.push(DnType::CommonName, entitled.name.as_str());
    for dns in &entitled.dns {
        params.subject_alt_names.push(SanType::DnsName(dns.as_str().try_into().unwrap()));
    }
    params.subject_alt_names.extend(entitled.addresses.iter().copied().map(SanType::IpAddress));
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    if entitled.server_auth {
        params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
    }
    if entitled.client_auth {
        params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
    }
    change(&mut params);
    params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
}

/// What the signers of this release make for each kind, with the row of that kind.
fn every_kind() -> Vec<(Entitlement, Vec<u8>)> {
    let (authority, key) = (authority(1), public(7));
    let id = NodeId::from_key(&key);
    let address: IpAddr = "10.0.0.1".parse().unwrap();
    let der = |issued: IssuedCertificate| issued.certificate;
    let mut all = vec![
        (
            Entitlement::for_node(&id),
            der(authority.issue_node_certificate(&key, serial(3), validity()).unwrap()),
        ),
        (
            Entitlement::for_etcd_peer(address),
            der(authority.issue_etcd_peer_certificate(&key, address, serial(4), validity()).unwrap()),
        ),
        (
            Entitlement::for_owner("kim"),
            der(authority.issue_owner_certificate("kim", &key, serial(5), validity()).unwrap()),
        ),
        (
            Entitlement::for_curator(&id),
            der(authority.issue_curator_certificate(&key, serial(6), validity()).unwrap()),
        ),
    ];
    let user = CertificateSubject {
        organisation: "shepherd:viewers".to_owned(),
        name: "kim".to_owned(),
        client_auth: true,
        ..CertificateSubject::default()
    };
    let signer = signer("servers", 1);
    let sign = |subject: &CertificateSubject, number| {
        let issued = signer.issue_certificate(subject, &component_key(), serial(number), validity());
        der(issued.unwrap())
    };
    all.push((Entitlement::for_kubernetes_user(&user), sign(&user, 7)));
    let mut node = member(1);
    (node.roles.kubernetes_controller, node.roles.kubernetes_worker) = (true, true);
    for number in 1..=11 {
        let component = Component::try_from(number).unwrap();
        let (_, subject) =
            resolve_certificate(number, Some(&node), node.id, false, Some(&settings())).unwrap();
        all.push((Entitlement::for_component(component, &subject), sign(&subject, 8)));
    }
    all
}

#[test]
fn each_kind_is_entitled_to_its_row() {
    let (own, node) = (NodeId::from_key(&public(7)), node_id(1));
    let cluster = "kubernetes,kubernetes.default,kubernetes.default.svc,kubernetes.default.svc.cluster.local";
    let client = |organisation: &str, name: &str| {
        format!("O={organisation} CN={name} DNS= IP= server=false client=true days=7")
    };
    let expected = [
        format!("O= CN={own} DNS={own} IP= server=true client=true days=30"),
        "O= CN=etcd peer DNS= IP=10.0.0.1 server=true client=true days=30".to_owned(),
        "O=owner CN=kim DNS= IP= server=false client=true days=30".to_owned(),
        format!("O=curator CN={own} DNS={own} IP= server=true client=true days=1"),
        client("shepherd:viewers", "kim"),
        format!(
            "O= CN=shepherd:kube-apiserver DNS={cluster},localhost,{node} IP=127.0.0.1,10.96.0.1,10.0.0.1 server=true \
             client=false days=7"
        ),
        client("", "shepherd:kube-apiserver-kubelet-client"),
        client("", "shepherd:kube-apiserver-etcd-client"),
        client("", "front-proxy-client"),
        format!("O= CN=shepherd:etcd DNS=localhost,{node} IP=127.0.0.1 server=true client=true days=7"),
        client("", "system:kube-controller-manager"),
        client("", "system:kube-scheduler"),
        client("system:masters", "shepherd:reconciler"),
        client("system:nodes", &format!("system:node:{node}")),
        format!("O= CN=system:node:{node} DNS={node} IP=10.0.0.1 server=true client=false days=7"),
        client("", "system:kube-proxy"),
    ];
    let all = every_kind();
    assert_eq!(all.iter().map(|(entitled, _)| row(entitled)).collect::<Vec<_>>(), expected);
    for (entitled, _) in &all {
        for (other, der) in &all {
            let result = check_certificate(der, entitled);
            assert_eq!(result.is_ok(), entitled.kind == other.kind, "{} as {}", other.kind, entitled.kind);
        }
    }
}

/// The kinds of certificates that a node gets.
fn kinds_for(node: &Node, revoked: bool) -> String {
    let (known, key) = (Some(node), &node.key);
    let mut kinds = vec![
        ("node".to_owned(), check_join(known, key, revoked).is_ok()),
        ("curator".to_owned(), check_curator(known, key, revoked).is_ok()),
        ("peer".to_owned(), etcd_peer_address(known, key, revoked).is_ok()),
    ];
    for number in 1..=11 {
        let component = Component::try_from(number).unwrap();
        let resolved = resolve_certificate(number, known, node.id, revoked, Some(&settings()));
        kinds.push((format!("{component:?}"), resolved.is_ok()));
    }
    let given: Vec<String> = kinds.into_iter().filter(|(_, given)| *given).map(|(kind, _)| kind).collect();
    given.join(" ")
}

#[test]
fn each_role_gets_its_kinds_while_its_node_is_up() {
    let with_roles = |member: Node, controller, worker| {
        let mut node = member;
        (node.roles.kubernetes_controller, node.roles.kubernetes_worker) = (controller, worker);
        node
    };
    let controllers = "ApiServer ApiServerKubeletClient ApiServerEtcdClient FrontProxyClient Etcd ControllerManager \
                       Scheduler Reconciler";
    let workers = "Kubelet KubeletServer Proxy";
    for (what, node, expected) in [
        ("none", up(1), "node".to_owned()),
        ("consensus member", member(1), "node curator peer".to_owned()),
        ("worker", with_roles(up(1), false, true), format!("node {workers}")),
        ("controller", with_roles(up(1), true, false), format!("node {controllers}")),
        ("both", with_roles(up(1), true, true), format!("node {controllers} {workers}")),
        ("all", with_roles(member(1), true, true), format!("node curator peer {controllers} {workers}")),
    ] {
        assert_eq!(kinds_for(&node, false), expected, "{what}");
        assert_eq!(kinds_for(&node, true), "", "{what}, revoked");
        for state in [NodeState::New, NodeState::Standby, NodeState::Decommissioned] {
            let node = Node { state, ..node.clone() };
            assert_eq!(kinds_for(&node, false), "", "{what}, {}", state.as_str());
        }
        // Without an address, only what names none.
        let silent = Node { status: None, ..node.clone() };
        let members = if node.roles.consensus_member.is_some() { "node curator" } else { "node" };
        assert_eq!(kinds_for(&silent, false), members, "{what}, no address");
    }
}

#[test]
fn certificate_by_an_order_of_the_shepherd_has_the_row_of_a_member() {
    let ca = authority(1).anchor().certificate.clone();
    let issued = renew_peer(&snapshot(), &ca, &key(2), serial(9), at(60)).unwrap().certificate;
    let row = |address: &str| Entitlement::for_etcd_peer(address.parse().unwrap());
    assert_eq!(check_certificate(&issued, &row("10.0.0.2")), Ok(()));
    assert!(check_certificate(&issued, &row("10.0.0.1")).is_err(), "the address of another member");
}

#[test]
fn peer_certificate_lasts_for_long_only_before_the_first_statement() {
    let address: IpAddr = "10.0.0.1".parse().unwrap();
    // An authority that lasts longer than what it signs.
    let now = at(0);
    let authority = Authority::create(
        uuid::Uuid::nil(),
        &pkcs8(1),
        serial(1),
        Validity::starting(now, 2 * AUTHORITY_LIFETIME),
    );
    let authority = authority.unwrap();
    let days =
        [(PEER_LIFETIME, true, true), (AUTHORITY_LIFETIME, false, true), (PEER_LIFETIME * 2, true, false)];
    for (lifetime, stated, allowed) in days {
        let validity = Validity::starting(now, lifetime);
        let issued = authority.issue_etcd_peer_certificate(&public(7), address, serial(4), validity).unwrap();
        let checked = check_peer_certificate(&issued.certificate, address, peer_lifetime(stated));
        assert_eq!(checked.is_ok(), allowed, "{lifetime:?} {stated}: {checked:?}");
    }
}

#[test]
fn certificate_beyond_its_row_is_refused() {
    type Change = fn(&mut CertificateParams);
    let row = Entitlement {
        kind: SubjectKind::Component(Component::KubeletServer),
        organisation: String::new(),
        name: "holder".to_owned(),
        dns: vec!["holder.example".to_owned()],
        addresses: vec!["10.0.0.1".parse().unwrap(), "2001:db8::1".parse().unwrap()],
        server_auth: true,
        client_auth: false,
        max_lifetime: Duration::from_secs(1000),
    };
    assert_eq!(check_certificate(&certificate(&row, |_| {}), &row), Ok(()));
    let longest: Change = |params| params.not_after += Duration::from_secs(301);
    assert_eq!(check_certificate(&certificate(&row, longest), &row), Ok(()), "as long before its issue");
    let cases: [(Change, &str); 16] = [
        (|params| params.distinguished_name.push(DnType::OrganizationName, "system:masters"), "subject"),
        (|params| params.distinguished_name.push(DnType::CommonName, "other"), "subject"),
        (|params| params.distinguished_name.push(DnType::OrganizationalUnitName, "unit"), "subject"),
        (|params| params.distinguished_name = DistinguishedName::new(), "subject"),
        (
            |params| params.subject_alt_names.push(SanType::DnsName("other.example".try_into().unwrap())),
            "names",
        ),
        (|params| params.subject_alt_names.push(SanType::IpAddress("10.0.0.2".parse().unwrap())), "names"),
        (
            |params| params.subject_alt_names.push(SanType::URI("https://a.example".try_into().unwrap())),
            "names",
        ),
        (|params| drop(params.subject_alt_names.pop()), "names"),
        (|params| params.subject_alt_names.clear(), "names"),
        (|params| params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth), "usage"),
        (|params| params.extended_key_usages.push(ExtendedKeyUsagePurpose::Any), "usage"),
        (|params| params.extended_key_usages.push(ExtendedKeyUsagePurpose::CodeSigning), "usage"),
        (|params| params.extended_key_usages.clear(), "usage"),
        (|params| params.key_usages.push(KeyUsagePurpose::KeyEncipherment), "key usage"),
        (|params| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained), "right to sign others"),
        (|params| params.not_after += Duration::from_secs(302), "lifetime"),
    ];
    for (number, (change, expected)) in cases.into_iter().enumerate() {
        match check_certificate(&certificate(&row, change), &row) {
            Err(EntitlementError::Mismatch { kind, part, .. }) => {
                assert_eq!((kind, part), (row.kind, expected), "case {number}");
            }
            other => panic!("case {number}, {expected}: {other:?}"),
        }
    }
    let organisation = Entitlement { organisation: "group".to_owned(), ..row.clone() };
    assert!(check_certificate(&certificate(&row, |_| {}), &organisation).is_err(), "less than its row");
    let mut longer = certificate(&row, |_| {});
    longer.push(0);
    for der in [longer, b"certificate".to_vec(), Vec::new()] {
        assert_eq!(check_certificate(&der, &row), Err(EntitlementError::Unreadable(row.kind)));
    }
}

#[test]
fn refusal_is_one_sentence_with_both_values() {
    let id = node_id(1);
    let entitled = Entitlement::for_node(&id);
    let organised = Entitlement { organisation: "system:masters".to_owned(), ..entitled.clone() };
    let refusal = check_certificate(&certificate(&organised, |_| {}), &entitled).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        format!(
            "no certificate was issued: the one that was signed for a node has O=\"system:masters\" CN=\"{id}\" as its \
             subject, and is entitled to CN=\"{id}\". Please report it"
        )
    );
}
