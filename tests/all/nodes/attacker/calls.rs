//! The calls of an attacker: every row of the table of permissions, with requests that would change the cluster.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rcgen::{KeyPair, PublicKeyData as _};
use rustls::sign::CertifiedKey;
use shepherd::curator::permissions::{MethodPermission, NodeAccess, PERMISSIONS};
use shepherd::curator_client::clock::Clock;
use shepherd::curator_client::curator_channel::open_channel;
use shepherd::curator_client::tls::client_config;
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::credentials_client::CredentialsClient;
use shepherd::proto::curator::v1::declarations_client::DeclarationsClient;
use shepherd::proto::curator::v1::kubernetes_client::KubernetesClient;
use shepherd::proto::curator::v1::tickets_client::TicketsClient;
use shepherd::roleserver::cluster::local_curator::CURATOR_PORT;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

use super::super::node::Node;
use super::super::owner::{Owner, patiently};
use super::Loot;
use super::attempts::{Attempt, Attempts};
use crate::harness::curators::{AN_HOUR_MS, found_no_leader, kubernetes_settings, status};
use crate::harness::etcd_servers::{PATIENCE, in_time};

/// A watch that was accepted sends its first message at once. On a busy host this may take a while.
const FIRST_MESSAGE: Duration = Duration::from_secs(10);

/// How a curator must answer a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expected {
    Answered,
    Refused(Code),
}

/// The node that a request names, where it names one.
pub(super) struct Target {
    node: String,
    address: IpAddr,
}

impl Target {
    pub(super) fn new(node: &Node) -> Result<Self> {
        Ok(Self { node: node.id()?.to_string(), address: node.address })
    }
}

/// A channel to the true curator of a node. It accepts that node alone, so every answer is that of the curator.
pub(super) fn channel_to(loot: &Loot, curator: &Node, own: Arc<CertifiedKey>) -> Result<Channel> {
    let config = client_config(loot.anchor.clone(), Some(curator.id()?), Some(own), Clock::system())?;
    Ok(open_channel(&SocketAddr::new(curator.address, CURATOR_PORT).to_string(), config))
}

/// Makes every call of the table, and compares each answer with the expected one. `what` names the caller.
pub(super) async fn try_every_call(
    attempts: &mut Attempts,
    what: &str,
    channel: &Channel,
    target: &Target,
    expected: impl Fn(&MethodPermission) -> Expected,
) -> Result<()> {
    try_every_call_refused_as(attempts, what, channel, target, "revoked", expected).await
}

/// The same. `worthless` is a part of the sentence with which a certificate is refused.
pub(super) async fn try_every_call_refused_as(
    attempts: &mut Attempts,
    what: &str,
    channel: &Channel,
    target: &Target,
    worthless: &str,
    expected: impl Fn(&MethodPermission) -> Expected,
) -> Result<()> {
    for row in PERMISSIONS {
        let status = attempt(channel, row.method, target).await?;
        let answer = match status.code() {
            Code::Ok => Expected::Answered,
            code => Expected::Refused(code),
        };
        let expected = expected(row);
        ensure!(answer == expected, "{what}: {}: {status}, and {expected:?} was expected", row.method);
        // Refused for the reason under test.
        let reason = match answer {
            Expected::Refused(Code::PermissionDenied) if !row.allowed.registering => row.method,
            Expected::Refused(Code::Unauthenticated) => worthless,
            _ => "",
        };
        ensure!(status.message().contains(reason), "{what}: {}: {status}", row.method);
        let outcome = if answer == Expected::Answered { Attempt::Answered } else { Attempt::Refused };
        attempts.record(format!("{what}: {}", row.method), outcome);
    }
    Ok(())
}

/// The answers to a node that is no consensus member, in a cluster with Kubernetes. `is_own`: the requests name the
/// caller itself.
pub(super) fn answer_to_node(row: &MethodPermission, is_own: bool, is_worker: bool) -> Expected {
    match row.method {
        _ if row.allowed.nodes == NodeAccess::Denied => Expected::Refused(Code::PermissionDenied),
        "Nodes/UpdateStatus" if !is_own => Expected::Refused(Code::PermissionDenied),
        // The certificate of a kubelet, in these requests.
        "Kubernetes/IssueCertificate" if is_worker => Expected::Answered,
        "Nodes/IssuePeerCertificate"
        | "Nodes/IssueCuratorCertificate"
        | "Kubernetes/IssueCertificate"
        | "Kubernetes/GetSigningKey" => Expected::Refused(Code::FailedPrecondition),
        _ => Expected::Answered,
    }
}

/// The answers to a node that proves nothing but its key.
pub(super) fn answer_to_key(row: &MethodPermission, is_revoked: bool) -> Expected {
    match row.method {
        _ if row.allowed.anybody => Expected::Answered,
        // What the key is worth: another certificate of this node.
        "Registration/Commit" | "Registration/Join" if !is_revoked => Expected::Answered,
        "Registration/Commit" | "Registration/Join" => Expected::Refused(Code::FailedPrecondition),
        // The ticket is unknown, the key is not an owner's, or the call is not for a key.
        _ => Expected::Refused(Code::PermissionDenied),
    }
}

/// The answers to a key of a node that was deleted.
pub(super) fn answer_to_deleted(row: &MethodPermission) -> Expected {
    match row.method {
        "Registration/Commit" | "Registration/Join" => Expected::Refused(Code::NotFound),
        _ => answer_to_key(row, true),
    }
}

/// The answers to a certificate that is worth nothing any more.
pub(super) fn answer_to_revoked(row: &MethodPermission) -> Expected {
    if row.allowed.anybody { Expected::Answered } else { Expected::Refused(Code::Unauthenticated) }
}

/// Requests a certificate for each component of Kubernetes. Only those of `allowed` are issued.
pub(super) async fn try_every_component(
    attempts: &mut Attempts,
    channel: &Channel,
    allowed: &[wire::KubernetesComponent],
) -> Result<()> {
    let mut count = 0;
    for component in (1..).map_while(|number| wire::KubernetesComponent::try_from(number).ok()) {
        count += 1;
        let status = request(channel, "Kubernetes/IssueCertificate", certificate_of(component)?).await?;
        let name = component.as_str_name();
        let (code, outcome) = if allowed.contains(&component) {
            (Code::Ok, Attempt::Answered)
        } else {
            (Code::FailedPrecondition, Attempt::Refused)
        };
        ensure!(status.code() == code, "{name}: {status}, and {code:?} was expected");
        attempts.record(format!("a certificate of Kubernetes: {name}"), outcome);
    }
    ensure!(count > 10, "only {count} components were found");
    Ok(())
}

/// What nobody but an owner may change: nodes and their roles, tickets, declarations, Kubernetes, owners, revocations.
pub(super) async fn orders(owner: &Owner) -> Result<Vec<String>> {
    let mut orders = Vec::new();
    for listed in owner.nodes().await? {
        let node = listed.node.context("a node without a record")?;
        let (state, roles, labels) = (node.state(), &node.roles, &node.labels);
        orders.push(format!("{} is {state:?} with {roles:?} and {labels:?}", node.node_id));
    }
    let channel = owner.curators()?.channel();
    let mut tickets = TicketsClient::new(channel.clone());
    let listed = patiently(async || tickets.list(wire::ListTicketsRequest {}).await).await?;
    orders.extend(listed.tickets.iter().map(|ticket| format!("{ticket:?}")));
    let mut declarations = DeclarationsClient::new(channel.clone());
    let listed = patiently(async || declarations.list(wire::ListDeclarationsRequest {}).await).await?;
    orders.extend(listed.declarations.iter().map(|declaration| format!("{declaration:?}")));
    let mut kubernetes = KubernetesClient::new(channel.clone());
    let configured = patiently(async || kubernetes.get(wire::GetKubernetesRequest {}).await).await?;
    orders.push(format!(
        "{:?} {} {:?} {:?}",
        configured.settings, configured.revision, configured.rotations, configured.authorities
    ));
    let mut credentials = CredentialsClient::new(channel);
    let listed = patiently(async || credentials.list(wire::ListCredentialsRequest {}).await).await?;
    let of_owners = |credential: &&wire::Credential| {
        credential.revoked || matches!(credential.holder, Some(wire::credential::Holder::Owner(_)))
    };
    orders.extend(listed.credentials.iter().filter(of_owners).map(|credential| format!("{credential:?}")));
    orders.sort();
    Ok(orders)
}

/// Makes a call as an attacker would, and returns the status of its first response.
async fn attempt(channel: &Channel, method: &str, target: &Target) -> Result<Status> {
    let node_id = target.node.clone();
    match method {
        "Registration/Register" => {
            let body = wire::RegisterRequest { ticket: vec![7; 32], ..Default::default() };
            request(channel, method, body).await
        }
        "Nodes/Watch" => request(channel, method, wire::WatchRequest { node_id }).await,
        "Nodes/UpdateStatus" => {
            let status = Some(status(SocketAddr::new(target.address, 0)));
            request(channel, method, wire::UpdateStatusRequest { node_id, status }).await
        }
        "Kubernetes/IssueCertificate" => {
            let body = certificate_of(wire::KubernetesComponent::KubeletServer)?;
            request(channel, method, body).await
        }
        "Credentials/ClaimOwner" => {
            request(channel, method, wire::ClaimOwnerRequest { lifetime_ms: AN_HOUR_MS }).await
        }
        _ => attempt_order(channel, method, target).await,
    }
}

/// The same for the calls of owners.
async fn attempt_order(channel: &Channel, method: &str, target: &Target) -> Result<Status> {
    let (node_id, public_key) = (target.node.clone(), vec![7; 32]);
    match method {
        "Declarations/Put" => {
            let declaration = wire::Declaration { role: "web".to_owned(), ..Default::default() };
            let body =
                wire::PutDeclarationRequest { declaration: Some(declaration), expected_revision: None };
            request(channel, method, body).await
        }
        "Declarations/Delete" => {
            request(channel, method, wire::DeleteDeclarationRequest { role: "web".to_owned() }).await
        }
        "Kubernetes/Put" => {
            let settings = wire::KubernetesSettings { bundle: "cd".repeat(32), ..kubernetes_settings() };
            let body = wire::PutKubernetesRequest { settings: Some(settings), expected_revision: None };
            request(channel, method, body).await
        }
        "Kubernetes/AssignBundle" => {
            let body = wire::AssignBundleRequest { node_id, bundle: "cd".repeat(32), url: String::new() };
            request(channel, method, body).await
        }
        "Kubernetes/IssueUser" => {
            let body = wire::IssueKubernetesUserRequest {
                public_key: p256_key()?,
                name: "kim".to_owned(),
                access: wire::issue_kubernetes_user_request::Access::Owner.into(),
                lifetime_ms: AN_HOUR_MS,
            };
            request(channel, method, body).await
        }
        "Kubernetes/Rotate" => {
            let keys = wire::KubernetesKeys::Servers.into();
            request(channel, method, wire::RotateKubernetesRequest { keys }).await
        }
        "Management/Approve" => {
            let body = wire::ApproveRequest { public_key, ..Default::default() };
            request(channel, method, body).await
        }
        "Management/UpdateRoles" => {
            let add_roles = vec!["consensus-member".to_owned()];
            let body = wire::UpdateRolesRequest { node_id, add_roles, ..Default::default() };
            request(channel, method, body).await
        }
        "Management/UpdateLabels" => {
            let set = [("rack".to_owned(), "7".to_owned())].into();
            let body = wire::UpdateLabelsRequest { node_id, set, remove: Vec::new() };
            request(channel, method, body).await
        }
        "Management/Decommission" => request(channel, method, wire::DecommissionRequest { node_id }).await,
        "Management/Delete" => {
            let body = wire::DeleteRequest {
                node_id,
                bypass_has_roles: true,
                bypass_not_decommissioned: true,
                ..Default::default()
            };
            request(channel, method, body).await
        }
        "Tickets/Create" => {
            let body = wire::CreateTicketRequest {
                lifetime_ms: AN_HOUR_MS,
                max_uses: None,
                purpose: "theft".to_owned(),
            };
            request(channel, method, body).await
        }
        "Credentials/IssueOwner" => {
            let body =
                wire::IssueOwnerRequest { public_key, name: "kim".to_owned(), lifetime_ms: AN_HOUR_MS };
            request(channel, method, body).await
        }
        "Credentials/AddOwnerKey" => request(channel, method, wire::AddOwnerKeyRequest { public_key }).await,
        "Credentials/Revoke" => {
            let target = Some(wire::revoke_credentials_request::Target::NodeId(node_id));
            request(channel, method, wire::RevokeCredentialsRequest { target }).await
        }
        // The request is empty, or is refused before it is read.
        _ => request(channel, method, wire::GetClusterRequest {}).await,
    }
}

fn p256_key() -> Result<Vec<u8>> {
    Ok(KeyPair::generate()?.subject_public_key_info())
}

fn certificate_of(component: wire::KubernetesComponent) -> Result<wire::IssueKubernetesCertificateRequest> {
    Ok(wire::IssueKubernetesCertificateRequest { component: component.into(), public_key: p256_key()? })
}

/// Makes a call again until a curator leads. An answer of any other reason counts; a lost connection counts for nothing.
async fn request<M: prost::Message + Clone + Default + 'static>(
    channel: &Channel,
    method: &str,
    message: M,
) -> Result<Status> {
    let end = Instant::now() + PATIENCE;
    loop {
        let calling = Box::pin(first_status(channel, method, message.clone()));
        let status = in_time(method, calling).await??;
        if !found_no_leader(&status) && !is_lost_connection(&status) {
            return Ok(status);
        }
        ensure!(Instant::now() < end, "{method} reached no leader: {status:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Whether the connection ended before a response, as it does when the curator stops leading. The client made such a status
/// itself. If the connection cannot be opened again, the next call says so.
fn is_lost_connection(status: &Status) -> bool {
    let cause = std::error::Error::source(status);
    status.code() == Code::Unknown
        && cause.is_some_and(<dyn std::error::Error>::is::<tonic::transport::Error>)
}

/// The status of the first response; OK if the call is accepted.
async fn first_status<M: prost::Message + Default + 'static>(
    channel: &Channel,
    method: &str,
    message: M,
) -> Result<Status> {
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await.with_context(|| format!("{method} reached nobody"))?;
    let path = PathAndQuery::try_from(format!("/shepherd.curator.v1.{method}"))?;
    // The content of a response is of no interest, so it is decoded as a message without fields.
    let codec: ProstCodec<M, wire::GetClusterRequest> = ProstCodec::default();
    let mut responses = match client.streaming(Request::new(tokio_stream::once(message)), path, codec).await {
        Ok(responses) => responses.into_inner(),
        Err(status) => return Ok(status),
    };
    Ok(match tokio::time::timeout(FIRST_MESSAGE, responses.message()).await {
        Ok(Err(status)) => status,
        _ => Status::ok(""),
    })
}
