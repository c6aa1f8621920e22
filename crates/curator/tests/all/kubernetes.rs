//! Kubernetes in the curator: the requests that nodes and owners send, and the responses.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use proto::curator::v1 as wire;
use proto::curator::v1::credentials_client::CredentialsClient;
use proto::curator::v1::issue_kubernetes_user_request::Access;
use proto::curator::v1::kubernetes_client::KubernetesClient;
use proto::curator::v1::kubernetes_rotation::Stage;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::nodes_client::NodesClient;
use rcgen::{KeyPair, PublicKeyData as _};
use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use shepherd_curator::kubernetes::key_rotation::TOKEN_OVERLAP;
use tonic::transport::Channel;
use tonic::{Code, Streaming};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use testkit::aloud::TestResult;
use testkit::curators::{AN_HOUR_MS, Cluster, kubernetes_settings, put_kubernetes, refusal, status};
use testkit::etcd_servers::{in_time, until};
use testkit::key_holder::Holder;

const WORKER: &str = "kubernetes-worker";

/// A node of the cluster, and its calls.
struct Caller {
    holder: Holder,
    channel: Channel,
    host: u8,
}

impl Caller {
    async fn come(cluster: &Cluster, host: u8) -> Result<Self> {
        let holder = Holder::new()?;
        let certificate = cluster.take_in(&holder).await?;
        let channel = cluster.channel(0, Some(holder.with(&certificate)?))?;
        Ok(Self { holder, channel, host })
    }

    fn id(&self) -> String {
        self.holder.id.to_string()
    }

    /// Reports its address, and the generation that its components run with.
    async fn say(&self, generation: u64) -> Result<()> {
        let kubernetes =
            (generation > 0).then(|| wire::KubernetesStatus { generation, ..Default::default() });
        let status = wire::NodeStatus { kubernetes, ..status(([10, 0, 0, self.host], 0).into()) };
        let request = wire::UpdateStatusRequest { node_id: self.id(), status: Some(status) };
        NodesClient::new(self.channel.clone()).update_status(request).await?;
        Ok(())
    }

    async fn watch(&self) -> Result<Streaming<wire::WatchOwnKubernetesResponse>> {
        let mut kubernetes = KubernetesClient::new(self.channel.clone());
        Ok(kubernetes.watch_own(wire::WatchOwnKubernetesRequest {}).await?.into_inner())
    }

    async fn certificate(
        &self,
        component: wire::KubernetesComponent,
    ) -> Result<wire::IssueKubernetesCertificateResponse, tonic::Status> {
        let public_key = KeyPair::generate().map(|key| key.subject_public_key_info()).unwrap_or_default();
        let request = wire::IssueKubernetesCertificateRequest { component: component.into(), public_key };
        KubernetesClient::new(self.channel.clone())
            .issue_certificate(request)
            .await
            .map(tonic::Response::into_inner)
    }
}

/// Configures Kubernetes, and gives one node the role of a worker.
async fn owner_and_worker(cluster: &Cluster) -> Result<(Channel, Caller)> {
    let owner = cluster.as_owner().await?;
    put_kubernetes(owner.clone()).await?;
    let node = Caller::come(cluster, 7).await?;
    node.say(0).await?;
    roles(&owner, &node, &[WORKER], &[]).await?;
    Ok((owner, node))
}

async fn roles(owner: &Channel, node: &Caller, give: &[&str], take: &[&str]) -> Result<(), tonic::Status> {
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    let request = wire::UpdateRolesRequest {
        node_id: node.id(),
        add_roles: names(give),
        remove_roles: names(take),
        ..Default::default()
    };
    ManagementClient::new(owner.clone()).update_roles(request).await.map(drop)
}

async fn get(owner: &Channel) -> Result<wire::GetKubernetesResponse> {
    Ok(KubernetesClient::new(owner.clone()).get(wire::GetKubernetesRequest {}).await?.into_inner())
}

async fn next(
    watching: &mut Streaming<wire::WatchOwnKubernetesResponse>,
) -> Result<Option<wire::KubernetesSetup>> {
    Ok(in_time("what it is to run", watching.message()).await??.context("it ended")?.setup)
}

/// Reads the setups that a node receives until one matches.
async fn wait_for_setup(
    watching: &mut Streaming<wire::WatchOwnKubernetesResponse>,
    is: impl Fn(&wire::KubernetesSetup) -> bool,
) -> Result<wire::KubernetesSetup> {
    loop {
        if let Some(setup) = next(watching).await?
            && is(&setup)
        {
            return Ok(setup);
        }
    }
}

fn is_signed_by(certificate: &[u8], authority: &[u8]) -> Result<bool> {
    let (_, certificate) = X509Certificate::from_der(certificate)?;
    let (_, authority) = X509Certificate::from_der(authority)?;
    let key = ring::signature::UnparsedPublicKey::new(
        &ring::signature::ECDSA_P256_SHA256_ASN1,
        &authority.public_key().subject_public_key.data,
    );
    let verified = key.verify(certificate.tbs_certificate.as_ref(), &certificate.signature_value.data);
    Ok(certificate.issuer() == authority.subject() && verified.is_ok())
}

#[tokio::test]
async fn settings_are_put_sent_and_forgotten_and_a_role_needs_them() -> TestResult {
    let cluster = Cluster::start().await?;
    let owner = cluster.as_owner().await?;
    let mut kubernetes = KubernetesClient::new(owner.clone());
    let node = Caller::come(&cluster, 7).await?;
    assert_eq!(refusal(kubernetes.get(wire::GetKubernetesRequest {}).await)?.0, Code::NotFound);
    let refused = roles(&owner, &node, &[WORKER], &[]).await.err().context("it was given")?;
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    let put = |change: &dyn Fn(&mut wire::KubernetesSettings), expected_revision| {
        let mut settings = kubernetes_settings();
        change(&mut settings);
        wire::PutKubernetesRequest { settings: Some(settings), expected_revision }
    };
    let wrong = put(&|reported| (reported.bundle, reported.domain) = (String::new(), String::new()), None);
    let (code, text) = refusal(kubernetes.put(wrong).await)?;
    assert_eq!(code, Code::InvalidArgument);
    assert!(text.contains("bundle: ") && text.contains("domain: "), "{text}");

    let first = kubernetes.put(put(&|_| {}, Some(0))).await?.into_inner();
    assert_eq!((first.revision, first.changed), (1, true));
    let same = kubernetes.put(put(&|_| {}, None)).await?.into_inner();
    assert_eq!((same.revision, same.changed), (1, false));
    for refused in [put(&|_| {}, Some(0)), put(&|reported| reported.domain = "other.local".to_owned(), None)]
    {
        assert_eq!(refusal(kubernetes.put(refused).await)?.0, Code::FailedPrecondition);
    }
    let second =
        kubernetes.put(put(&|reported| reported.bundle = "cd".repeat(32), Some(1))).await?.into_inner();
    assert_eq!(second.revision, 2);
    let known = get(&owner).await?;
    assert_eq!((known.revision, known.authorities.len(), known.rotations.len()), (2, 5, 0));
    assert_eq!(known.settings.as_ref().map(|settings| settings.bundle.clone()), Some("cd".repeat(32)));

    // The node gets a bundle of its own.
    let mut watching = node.watch().await?;
    assert_eq!(next(&mut watching).await?, None, "it has no role");
    roles(&owner, &node, &[WORKER], &[]).await?;
    let setup = wait_for_setup(&mut watching, |_| true).await?;
    assert_eq!((setup.bundle, setup.pod_range.as_str()), ("cd".repeat(32), "10.128.0.0/24"));
    let assign = |node_id: String, bundle: &str| wire::AssignBundleRequest {
        node_id,
        bundle: bundle.to_owned(),
        url: String::new(),
    };
    kubernetes.assign_bundle(assign(node.id(), &"ef".repeat(32))).await?;
    wait_for_setup(&mut watching, |setup| setup.bundle == "ef".repeat(32)).await?;
    assert_eq!(get(&owner).await?.assigned_bundles.get(&node.id()), Some(&"ef".repeat(32)));
    kubernetes.assign_bundle(assign(node.id(), "")).await?;
    wait_for_setup(&mut watching, |setup| setup.bundle == "cd".repeat(32)).await?;
    for (wrong, code) in [
        (assign(node.id(), "ef"), Code::InvalidArgument),
        (assign("node-1".to_owned(), ""), Code::InvalidArgument),
        (assign(Holder::new()?.id.to_string(), ""), Code::NotFound),
    ] {
        assert_eq!(refusal(kubernetes.assign_bundle(wrong).await)?.0, code);
    }

    let delete = wire::DeleteKubernetesRequest {};
    let (code, text) = refusal(kubernetes.delete(delete).await)?;
    assert_eq!((code, text.contains(&node.id())), (Code::FailedPrecondition, true), "{text}");
    roles(&owner, &node, &[], &[WORKER]).await?;
    assert_eq!(next(&mut watching).await?, None);
    kubernetes.delete(delete).await?;
    kubernetes.delete(delete).await?;
    assert_eq!(refusal(kubernetes.get(wire::GetKubernetesRequest {}).await)?.0, Code::NotFound);
    put_kubernetes(owner.clone()).await?;
    let again = get(&owner).await?;
    assert_ne!(again.authorities, known.authorities, "another Kubernetes has other authorities");
    Ok(())
}

#[tokio::test]
async fn certificates_are_for_components_of_roles_that_the_node_has_now() -> TestResult {
    use wire::KubernetesComponent as Component;
    let cluster = Cluster::start().await?;
    let owner = cluster.as_owner().await?;
    put_kubernetes(owner.clone()).await?;
    let node = Caller::come(&cluster, 7).await?;
    roles(&owner, &node, &[WORKER], &[]).await?;
    let refused = node.certificate(Component::Kubelet).await.err().context("it says no address")?;
    assert_eq!((refused.code(), refused.message().contains("address")), (Code::FailedPrecondition, true));
    node.say(0).await?;
    let issued = node.certificate(Component::Kubelet).await?;
    let known = get(&owner).await?;
    let authority = |which: wire::KubernetesKeys| {
        let found = known.authorities.iter().find(|authority| authority.keys() == which);
        found.map(|authority| authority.trusted[0].clone()).context("no such authority")
    };
    let clients = authority(wire::KubernetesKeys::Clients)?;
    assert!(is_signed_by(&issued.certificate, &clients)?);
    assert!(!is_signed_by(&issued.certificate, &authority(wire::KubernetesKeys::Servers)?)?);
    let (_, parsed) = X509Certificate::from_der(&issued.certificate)?;
    assert_eq!(parsed.subject().to_string(), format!("O=system:nodes, CN=system:node:{}", node.id()));
    let week = Duration::from_hours(7 * 24).as_secs();
    let lasts = parsed.validity().not_after.timestamp() - cluster.time.now().timestamp();
    assert!(u64::try_from(lasts)?.abs_diff(week) < 600, "{lasts}");
    let server = node.certificate(Component::KubeletServer).await?;
    assert!(is_signed_by(&server.certificate, &authority(wire::KubernetesKeys::Kubelets)?)?);

    let (code, text) = refusal(node.certificate(Component::ApiServer).await.map(tonic::Response::new))?;
    assert_eq!(
        (code, text.contains("is no kubernetes-controller")),
        (Code::FailedPrecondition, true),
        "{text}"
    );
    let mut calling = KubernetesClient::new(node.channel.clone());
    let (code, _) = refusal(calling.get_signing_key(wire::GetSigningKeyRequest {}).await)?;
    assert_eq!(code, Code::FailedPrecondition);
    let mut wrong = wire::IssueKubernetesCertificateRequest {
        component: Component::Kubelet.into(),
        public_key: node.holder.key.0.to_vec(),
    };
    assert_eq!(refusal(calling.issue_certificate(wrong.clone()).await)?.0, Code::InvalidArgument);
    (wrong.component, wrong.public_key) = (99, KeyPair::generate()?.subject_public_key_info());
    assert_eq!(refusal(calling.issue_certificate(wrong).await)?.0, Code::InvalidArgument);

    // A node that lost the role gets no certificates for it.
    roles(&owner, &node, &[], &[WORKER]).await?;
    let refused = node.certificate(Component::Kubelet).await.err().context("it lost its role")?;
    assert_eq!(
        (refused.code(), refused.message().contains("is no kubernetes-worker")),
        (Code::FailedPrecondition, true)
    );
    Ok(())
}

/// Whether a client with these authorities accepts the certificate as that of a server at this address.
fn is_accepted(authorities: &[Vec<u8>], certificate: &[u8], host: [u8; 4], second: i64) -> Result<bool> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(CertificateDer::from(authority.clone()))?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build()?;
    let now = UnixTime::since_unix_epoch(Duration::from_secs(second.try_into()?));
    let certificate = CertificateDer::from(certificate.to_vec());
    let name = ServerName::from(IpAddr::from(host));
    Ok(verifier.verify_server_cert(&certificate, &[], &name, &[], now).is_ok())
}

/// The key of a kubelet serves as no API server: what a client has of the authority refuses its certificate, and so does every
/// component, because all of them trust the authority of API servers alone.
#[tokio::test]
async fn client_of_an_api_server_refuses_the_certificate_of_a_kubelet() -> TestResult {
    let cluster = Cluster::start().await?;
    let (owner, node) = owner_and_worker(&cluster).await?;
    let kubelet = node.certificate(wire::KubernetesComponent::KubeletServer).await?.certificate;
    let request = wire::IssueKubernetesUserRequest {
        public_key: KeyPair::generate()?.subject_public_key_info(),
        name: "kim".to_owned(),
        access: Access::Viewer.into(),
        lifetime_ms: AN_HOUR_MS,
    };
    let user = KubernetesClient::new(owner.clone()).issue_user(request).await?.into_inner();
    let setup = wait_for_setup(&mut node.watch().await?, |_| true).await?;
    let trusted = |which: wire::KubernetesKeys| {
        let found = setup.authorities.iter().find(|authority| authority.keys() == which);
        found.map(|authority| authority.trusted.clone()).context("no such authority")
    };
    let accepts = |authorities: &[Vec<u8>]| {
        is_accepted(authorities, &kubelet, [10, 0, 0, 7], cluster.time.now().timestamp())
    };
    assert!(!accepts(&user.server_authorities)?, "a client of API servers accepted a kubelet");
    assert!(!accepts(&trusted(wire::KubernetesKeys::Servers)?)?, "a component accepted a kubelet");
    assert!(accepts(&trusted(wire::KubernetesKeys::Kubelets)?)?, "API servers refuse the kubelet");
    Ok(())
}

#[tokio::test]
async fn user_reaches_what_the_clients_authority_opens_for_a_bounded_time() -> TestResult {
    let cluster = Cluster::start().await?;
    let owner = cluster.as_owner().await?;
    let mut kubernetes = KubernetesClient::new(owner.clone());
    let key = KeyPair::generate()?.subject_public_key_info();
    let ask = |name: &str, access: Access, lifetime_ms| wire::IssueKubernetesUserRequest {
        public_key: key.clone(),
        name: name.to_owned(),
        access: access.into(),
        lifetime_ms,
    };
    let (code, _) = refusal(kubernetes.issue_user(ask("kim", Access::Owner, AN_HOUR_MS)).await)?;
    assert_eq!(code, Code::NotFound);
    put_kubernetes(owner.clone()).await?;
    for wrong in [
        ask("system:admin", Access::Owner, AN_HOUR_MS),
        ask("kim", Access::Unspecified, AN_HOUR_MS),
        ask("kim", Access::Viewer, 0),
        ask("kim", Access::Viewer, 8 * 24 * AN_HOUR_MS),
        wire::IssueKubernetesUserRequest { public_key: vec![1], ..ask("kim", Access::Owner, AN_HOUR_MS) },
    ] {
        assert_eq!(refusal(kubernetes.issue_user(wrong).await)?.0, Code::InvalidArgument);
    }
    let issued = kubernetes.issue_user(ask("kim", Access::Viewer, AN_HOUR_MS)).await?.into_inner();
    let known = get(&owner).await?;
    assert_eq!(issued.server_authorities, known.authorities[0].trusted);
    assert!(is_signed_by(&issued.certificate, &known.authorities[1].trusted[0])?);
    let (_, parsed) = X509Certificate::from_der(&issued.certificate)?;
    assert_eq!(parsed.subject().to_string(), "O=shepherd:viewers, CN=kim");
    assert_eq!(parsed.validity().not_after.timestamp(), issued.not_after_ms / 1000);
    Ok(())
}

#[tokio::test]
async fn no_two_workers_have_one_part_however_they_come_and_go() -> TestResult {
    let cluster = Cluster::start().await?;
    let owner = cluster.as_owner().await?;
    put_kubernetes(owner.clone()).await?;
    let mut nodes = Vec::new();
    for host in 1..=4 {
        nodes.push(Caller::come(&cluster, host).await?);
    }
    let given = nodes.iter().map(|node| roles(&owner, node, &[WORKER], &[]));
    futures::future::try_join_all(given).await?;
    let parts = async |nodes: &[Caller]| {
        let mut parts = BTreeSet::new();
        for node in nodes {
            parts.insert(wait_for_setup(&mut node.watch().await?, |_| true).await?.pod_range);
        }
        anyhow::Ok(parts)
    };
    let before = parts(&nodes).await?;
    assert_eq!(before.len(), 4, "two nodes have one part: {before:?}");
    let gone = nodes.remove(0);
    let its = wait_for_setup(&mut gone.watch().await?, |_| true).await?.pod_range;
    let delete = wire::DeleteRequest {
        node_id: gone.id(),
        bypass_has_roles: true,
        bypass_not_decommissioned: true,
        ..Default::default()
    };
    ManagementClient::new(owner.clone()).delete(delete).await?;
    nodes.push(Caller::come(&cluster, 9).await?);
    roles(&owner, &nodes[3], &[WORKER], &[]).await?;
    let after = parts(&nodes).await?;
    assert_eq!(after.len(), 4, "two nodes have one part: {after:?}");
    assert!(after.contains(&its), "what was freed is the lowest");
    Ok(())
}

/// Each kind of key, with a node that reports late.
#[tokio::test]
async fn keys_are_replaced_in_steps_that_each_wait_for_every_node() -> TestResult {
    use wire::KubernetesKeys as Keys;
    let cluster = Cluster::start().await?;
    let (_, node) = owner_and_worker(&cluster).await?;
    let trusted = |setup: &wire::KubernetesSetup, which: Keys| match which {
        Keys::ServiceAccounts => setup.service_account_keys.clone(),
        which => setup
            .authorities
            .iter()
            .find(|authority| authority.keys() == which)
            .map(|authority| authority.trusted.clone())
            .unwrap_or_default(),
    };
    for number in 1..=6_i32 {
        let which = Keys::try_from(number)?;
        // Hours have passed since the last certificate, and an owner's certificate is valid for one hour.
        let owner = cluster.as_owner().await?;
        let mut watching = node.watch().await?;
        let before = wait_for_setup(&mut watching, |_| true).await?;
        let old = trusted(&before, which);
        assert_eq!(old.len(), 1);
        node.say(before.generation).await?;
        let rotate = || wire::RotateKubernetesRequest { keys: which.into() };
        let mut kubernetes = KubernetesClient::new(owner.clone());
        let begun = kubernetes.rotate(rotate()).await?.into_inner().rotation.context("none")?;
        assert_eq!((begun.stage(), begun.waits_for.clone()), (Stage::Trusted, vec![node.id()]));
        let again = kubernetes.rotate(rotate()).await?.into_inner().rotation.context("none")?;
        assert_eq!(again.since_ms, begun.since_ms, "one that is under way goes on");
        let both = wait_for_setup(&mut watching, |setup| setup.generation > before.generation).await?;
        let both_trusted = trusted(&both, which);
        assert_eq!((both_trusted.len(), &both_trusted[0]), (2, &old[0]), "{which:?}: the old one signs");
        // The node has not reported: the rotation waits for it without a time limit, after any number of checks.
        cluster.time.pass(7200);
        let owner = cluster.as_owner().await?;
        let mut kubernetes = KubernetesClient::new(owner.clone());
        let still = kubernetes.rotate(rotate()).await?.into_inner().rotation.context("none")?;
        let as_begun = (Stage::Trusted, vec![node.id()], begun.since_ms);
        assert_eq!(
            (still.stage(), still.waits_for.clone(), still.since_ms),
            as_begun,
            "{which:?}: it did not wait"
        );
        node.say(both.generation).await?;
        let signs = wait_for_setup(&mut watching, |setup| setup.generation > both.generation).await?;
        let now = trusted(&signs, which);
        assert_eq!(now, [both_trusted[1].clone(), old[0].clone()], "{which:?}: the new one signs");
        node.say(signs.generation).await?;
        if which == Keys::ServiceAccounts {
            until("it is known until when", async || Ok(get(&owner).await?.rotations[0].until_ms > 0))
                .await?;
            cluster.time.pass(u32::try_from(TOKEN_OVERLAP.as_secs())?);
        }
        let done = wait_for_setup(&mut watching, |setup| setup.generation > signs.generation).await?;
        assert_eq!(trusted(&done, which), [both_trusted[1].clone()], "{which:?}");
        assert!(get(&cluster.as_owner().await?).await?.rotations.is_empty());
    }
    Ok(())
}

/// The next leader continues where the former one stopped.
#[tokio::test]
async fn replacement_goes_on_under_another_leader() -> TestResult {
    let mut cluster = Cluster::start().await?;
    let (owner, node) = owner_and_worker(&cluster).await?;
    let which = wire::KubernetesKeys::Clients;
    KubernetesClient::new(owner.clone()).rotate(wire::RotateKubernetesRequest { keys: which.into() }).await?;
    let both = get(&owner).await?.authorities[1].trusted.clone();
    assert_eq!(both.len(), 2);

    cluster.stop(0).await?;
    cluster.run(0).await?;
    cluster.until_one_leads(None).await?;
    let owner = cluster.as_owner().await?;
    let certificate = testkit::curators::certificate(&cluster.authority, &node.holder, cluster.time.now())?;
    let node = Caller { channel: cluster.channel(0, Some(node.holder.with(&certificate)?))?, ..node };
    let mut watching = node.watch().await?;
    let mut now = wait_for_setup(&mut watching, |_| true).await?;
    assert_eq!(get(&owner).await?.rotations.len(), 1, "it is under way");
    // The setup that it received before the leader stopped may be that of any step.
    while now.authorities[1].trusted != [both[1].clone()] {
        node.say(now.generation).await?;
        let last = now.generation;
        now = wait_for_setup(&mut watching, |setup| setup.generation > last).await?;
    }
    assert!(get(&owner).await?.rotations.is_empty());
    Ok(())
}

/// A node with revoked certificates gets nothing more of Kubernetes, and its open watch ends.
#[tokio::test]
async fn revoked_node_gets_no_certificate_and_no_settings() -> TestResult {
    use wire::KubernetesComponent as Component;
    let cluster = Cluster::start().await?;
    let owner = cluster.as_owner().await?;
    put_kubernetes(owner.clone()).await?;
    let nodes = [Caller::come(&cluster, 7).await?, Caller::come(&cluster, 8).await?];
    for node in &nodes {
        node.say(0).await?;
        roles(&owner, node, &[WORKER], &[]).await?;
        node.certificate(Component::Kubelet).await?;
    }
    let [node, other] = nodes;
    let mut watching = node.watch().await?;
    wait_for_setup(&mut watching, |_| true).await?;
    let which = Some(wire::revoke_credentials_request::Target::NodeId(node.id()));
    CredentialsClient::new(owner.clone()).revoke(wire::RevokeCredentialsRequest { target: which }).await?;
    let ended = in_time("the end of what it follows", watching.message()).await?;
    assert_eq!(ended.map_err(|status| status.code()), Err(Code::Unauthenticated));
    // A new connection does not help either, for any component.
    let certificate = testkit::curators::certificate(&cluster.authority, &node.holder, cluster.time.now())?;
    let node = Caller { channel: cluster.channel(0, Some(node.holder.with(&certificate)?))?, ..node };
    for component in [Component::Kubelet, Component::KubeletServer, Component::Proxy, Component::ApiServer] {
        let refused = node.certificate(component).await.err().context("it was given one")?;
        assert_eq!(refused.code(), Code::Unauthenticated, "{component:?}: {refused}");
    }
    let mut calling = KubernetesClient::new(node.channel.clone());
    let (code, _) = refusal(calling.get_signing_key(wire::GetSigningKeyRequest {}).await)?;
    assert_eq!(code, Code::Unauthenticated);
    other.certificate(Component::Kubelet).await?;
    Ok(())
}
