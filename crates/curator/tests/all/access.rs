//! Authorisation: which peer may make which call, tested on the real auth layer with real certificates.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use curator_client::certificate::{Serial, Validity};
use curator_client::identity::Identity;
use curator_client::pki::Authority;
use proto::curator::v1 as wire;
use proto::curator::v1::credentials_client::CredentialsClient;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::nodes_client::NodesClient;
use proto::curator::v1::revoke_credentials_request::Target;
use rustls::sign::CertifiedKey;
use shepherd_curator::permissions::{NodeAccess, PERMISSIONS, ServedBy};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;
use uuid::Uuid;

use testkit::aloud::TestResult;
use testkit::curators::{AN_HOUR_MS, Cluster, certificate, refusal, status};
use testkit::etcd_servers::in_time;
use testkit::key_holder::Holder;

/// Makes a call by its name with an empty request, and returns the code of the first response.
async fn call(channel: &Channel, method: &str) -> Result<Code> {
    Ok(answer(channel, method).await?.code())
}

/// Status of the first response to a call with an empty request; OK if the call is accepted and answered.
async fn answer(channel: &Channel, method: &str) -> Result<Status> {
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await?;
    let path = PathAndQuery::try_from(format!("/shepherd.curator.v1.{method}"))?;
    let codec: ProstCodec<wire::GetClusterRequest, wire::GetClusterRequest> = ProstCodec::default();
    let request = Request::new(tokio_stream::once(wire::GetClusterRequest {}));
    let asking = async {
        let mut answers = match client.streaming(request, path, codec).await {
            Ok(answers) => answers.into_inner(),
            Err(status) => return status,
        };
        // A watch without events yet counts as accepted: only the authorisation is tested.
        match tokio::time::timeout(Duration::from_secs(1), answers.message()).await {
            Ok(Err(status)) => status,
            _ => Status::ok(""),
        }
    };
    in_time(method, asking).await
}

/// Whether the auth layer rejected the call, before any handler.
const fn refused(code: Code) -> bool {
    matches!(code, Code::Unauthenticated | Code::PermissionDenied | Code::Unimplemented)
}

/// The first half of "a node with valid credentials tries every call that it may not make", and the same for every
/// other kind of peer.
#[tokio::test]
async fn each_kind_of_peer_is_let_into_its_own_calls_alone() -> TestResult {
    let cluster = Cluster::start().await?;
    let node = Holder::new()?;
    let certificate = cluster.take_in(&node).await?;
    let stranger = Holder::new()?;
    let as_node = cluster.channel(0, Some(node.with(&certificate)?))?;
    let as_owner = cluster.as_owner().await?;
    let registering = cluster.channel(0, Some(stranger.itself()?))?;
    let nobody = cluster.channel(0, None)?;
    let mut denied_to_nodes = 0;
    for row in PERMISSIONS {
        let may = [
            (&as_node, "a node", row.allowed.nodes != NodeAccess::Denied),
            (&as_owner, "an owner", row.allowed.owners),
            (&registering, "who registers", row.allowed.registering),
            (&nobody, "nobody", row.allowed.anybody),
        ];
        for (channel, who, may) in may {
            let status = answer(channel, row.method).await?;
            let code = status.code();
            let expected = match (may, who) {
                // The handler itself rejects a key or a ticket that it does not know.
                (true, "who registers") => {
                    assert!(
                        !matches!(code, Code::Unauthenticated | Code::Unimplemented),
                        "{} {code:?}",
                        row.method
                    );
                    continue;
                }
                (true, _) => {
                    assert!(!refused(code), "{who} may call {}, and got: {status}", row.method);
                    continue;
                }
                (false, "nobody") => Code::Unauthenticated,
                (false, _) => Code::PermissionDenied,
            };
            assert_eq!(code, expected, "{who} called {}: {}", row.method, status.message());
            assert!(status.message().contains(row.method), "{}", status.message());
            denied_to_nodes += usize::from(who == "a node");
        }
    }
    assert!(denied_to_nodes > 12, "only {denied_to_nodes} calls are not for nodes");
    for unknown in ["Nodes/Reboot", "Management/", "Other/Watch"] {
        assert_eq!(call(&as_owner, unknown).await?, Code::Unimplemented, "{unknown}");
    }
    assert_eq!(call(&nobody, "Nodes/Reboot").await?, Code::Unimplemented);
    Ok(())
}

/// The second half: another node's data.
#[tokio::test]
async fn node_writes_its_own_record_alone() -> TestResult {
    let cluster = Cluster::start().await?;
    let (one, other) = (Holder::new()?, Holder::new()?);
    let certificate = cluster.take_in(&one).await?;
    cluster.take_in(&other).await?;
    let mut nodes = NodesClient::new(cluster.channel(0, Some(one.with(&certificate)?))?);
    let report = |node: &Holder| wire::UpdateStatusRequest {
        node_id: node.id.to_string(),
        status: Some(status(([10, 0, 0, 1], 0).into())),
    };
    nodes.update_status(report(&one)).await?;
    let (code, text) = refusal(nodes.update_status(report(&other)).await)?;
    assert_eq!(code, Code::PermissionDenied);
    assert!(text.contains(&other.id.to_string()) && text.contains("itself alone"), "{text}");
    let mut watching = nodes.watch(wire::WatchRequest { node_id: other.id.to_string() }).await?.into_inner();
    let event =
        watching.message().await?.and_then(|response| response.event?.event).context("no event arrived")?;
    let of_other = matches!(&event, wire::node_event::Event::Present(record) if record.status.is_none());
    assert!(of_other, "nothing was written: {event:?}");

    // A call that names no node concerns the node of the certificate.
    nodes.renew_certificate(wire::RenewCertificateRequest {}).await?;
    let owner = cluster.as_owner().await?;
    let listed =
        CredentialsClient::new(owner).list(wire::ListCredentialsRequest {}).await?.into_inner().credentials;
    let of = |node: &Holder| {
        let id = wire::credential::Holder::NodeId(node.id.to_string());
        listed.iter().filter(|kept| kept.holder.as_ref() == Some(&id)).count()
    };
    assert_eq!((of(&one), of(&other)), (2, 1));
    Ok(())
}

/// "Certificates expired, of another cluster, revoked: refused." Each peer tries every call that such a certificate
/// opens otherwise.
#[tokio::test]
async fn certificate_that_is_worth_nothing_opens_nothing() -> TestResult {
    let cluster = Cluster::start().await?;
    let node = Holder::new()?;
    let good = cluster.take_in(&node).await?;
    let owner = cluster.as_owner().await?;
    let now = cluster.time.now();
    let hour = Duration::from_hours(1);
    let issue = |authority: &Authority, from, until| {
        let validity = Validity { not_before: from, not_after: until };
        anyhow::Ok(
            authority.issue_node_certificate(&node.key, Serial::new(rand::random()), validity)?.certificate,
        )
    };
    let foreign = Identity::generate()?;
    let forever = Validity { not_before: now - hour, not_after: now + hour };
    let authority_of =
        |id: Uuid| Authority::create(id, foreign.pkcs8(), Serial::new([1; 16]), forever).context("authority");
    let revoked = certificate(&cluster.authority, &node, now)?;
    let serial = serial_of(&revoked)?;
    CredentialsClient::new(owner.clone())
        .revoke(wire::RevokeCredentialsRequest { target: Some(Target::Serial(serial)) })
        .await?;
    let unknown = Holder::new()?;
    let cases: Vec<(&str, Arc<CertifiedKey>, &str)> = vec![
        ("expired", node.with(&issue(&cluster.authority, now - hour * 2, now - hour)?)?, "expired at"),
        (
            "not yet good",
            node.with(&issue(&cluster.authority, now + hour, now + hour * 2)?)?,
            "is not valid before",
        ),
        (
            "of another cluster",
            node.with(&certificate(&authority_of(Uuid::new_v4())?, &node, now)?)?,
            "not by the authority of cluster",
        ),
        ("forged", node.with(&certificate(&authority_of(cluster.id)?, &node, now)?)?, "did not sign it"),
        ("revoked", node.with(&revoked)?, "is revoked"),
        ("of an unknown node", unknown.with(&certificate(&cluster.authority, &unknown, now)?)?, "is unknown"),
    ];
    let nodes_may: Vec<&str> = PERMISSIONS
        .iter()
        .filter(|row| {
            row.served_by == ServedBy::Leader
                && (row.allowed.nodes != NodeAccess::Denied || row.allowed.owners)
        })
        .map(|row| row.method)
        .collect();
    assert!(nodes_may.len() > 15);
    for (what, own, words) in &cases {
        let channel = cluster.channel(0, Some(own.clone()))?;
        for method in &nodes_may {
            let status = answer(&channel, method).await?;
            assert_eq!(status.code(), Code::Unauthenticated, "{what} called {method}: {}", status.message());
            assert!(status.message().contains(words), "{what}: {}", status.message());
        }
        // The holder of an expired certificate still finds the leader, so that it can join again with its key.
        assert_eq!(call(&channel, "Leader/Watch").await?, Code::Ok, "{what}");
    }
    let channel = cluster.channel(0, Some(node.with(&good)?))?;
    assert_eq!(
        call(&channel, "Management/GetCluster").await?,
        Code::Ok,
        "its other certificate is as good as before"
    );
    Ok(())
}

fn serial_of(certificate: &[u8]) -> Result<String> {
    let (_, certificate) = x509_parser::parse_x509_certificate(certificate)?;
    Ok(hex::encode(certificate.raw_serial()))
}

/// A stream depends on the certificate that opened it: a revocation ends it, and does not only reject the next call.
#[tokio::test]
async fn revocation_ends_what_was_open_and_all_that_comes_until_the_node_is_deleted() -> TestResult {
    let cluster = Cluster::start().await?;
    let (node, other) = (Holder::new()?, Holder::new()?);
    let certificate = cluster.take_in(&node).await?;
    let others = cluster.take_in(&other).await?;
    let owner = cluster.as_owner().await?;
    let watch = async |node: &Holder, certificate: &[u8]| {
        let mut nodes = NodesClient::new(cluster.channel(0, Some(node.with(certificate)?))?);
        let mut watching = nodes.watch_all(wire::WatchAllRequest {}).await?.into_inner();
        let first = watching.message().await?.context("no backlog")?;
        anyhow::ensure!(first.backlog_complete, "{first:?}");
        anyhow::Ok(watching)
    };
    let mut its = watch(&node, &certificate).await?;
    let mut the_others = watch(&other, &others).await?;
    let mut credentials = CredentialsClient::new(owner.clone());
    let revoke = || wire::RevokeCredentialsRequest { target: Some(Target::NodeId(node.id.to_string())) };
    credentials.revoke(revoke()).await?;
    credentials.revoke(revoke()).await?;
    let ended = in_time("the end of its stream", its.message()).await?;
    assert_eq!(ended.map_err(|status| status.code()), Err(Code::Unauthenticated));
    let channel = cluster.channel(0, Some(node.with(&certificate)?))?;
    assert_eq!(call(&channel, "Management/GetCluster").await?, Code::Unauthenticated);
    let itself = cluster.channel(0, Some(node.itself()?))?;
    assert_eq!(call(&itself, "Registration/Join").await?, Code::FailedPrecondition, "nor does its key help");
    assert_eq!(call(&itself, "Registration/Commit").await?, Code::FailedPrecondition);
    let listed = credentials.list(wire::ListCredentialsRequest {}).await?.into_inner().credentials;
    let id = wire::credential::Holder::NodeId(node.id.to_string());
    for kept in &listed {
        assert_eq!(kept.revoked, kept.holder.as_ref() == Some(&id), "{kept:?}");
    }
    // The stream of the other node goes on and receives the next event.
    let mut management = ManagementClient::new(owner);
    let delete = wire::DeleteRequest {
        node_id: node.id.to_string(),
        bypass_not_decommissioned: true,
        ..Default::default()
    };
    management.delete(delete).await?;
    let response = in_time("a deletion", the_others.message()).await??.context("it ended")?;
    let deleted = wire::node_event::Event::Deleted(node.id.to_string());
    assert_eq!(response.events.into_iter().filter_map(|event| event.event).collect::<Vec<_>>(), [deleted]);
    Ok(())
}

/// What an owner's key authorises, and for how long.
#[tokio::test]
async fn owner_claims_with_a_key_and_hands_on_for_a_limited_time() -> TestResult {
    let cluster = Cluster::start().await?;
    let stranger = Holder::new()?;
    let claim = |lifetime_ms| wire::ClaimOwnerRequest { lifetime_ms };
    let mut claiming = CredentialsClient::new(cluster.channel(0, Some(stranger.itself()?))?);
    let (code, text) = refusal(claiming.claim_owner(claim(AN_HOUR_MS)).await)?;
    assert_eq!((code, text.contains("not that of an owner")), (Code::PermissionDenied, true), "{text}");
    let mut claiming = CredentialsClient::new(cluster.channel(0, Some(cluster.owner.itself()?))?);
    let forty_days = 40 * 24 * AN_HOUR_MS;
    for lifetime in [0, forty_days] {
        assert_eq!(
            refusal(claiming.claim_owner(claim(lifetime)).await)?.0,
            Code::InvalidArgument,
            "{lifetime}"
        );
    }

    let mut credentials = CredentialsClient::new(cluster.as_owner().await?);
    let issue = |name: &str| wire::IssueOwnerRequest {
        public_key: stranger.key.0.to_vec(),
        name: name.to_owned(),
        lifetime_ms: AN_HOUR_MS,
    };
    for odd in ["", "a b", &stranger.id.to_string()] {
        assert_eq!(refusal(credentials.issue_owner(issue(odd)).await)?.0, Code::InvalidArgument, "{odd}");
    }
    let issued = credentials.issue_owner(issue("kim")).await?.into_inner();
    assert_eq!(issued.ca_certificate, cluster.anchor.certificate);
    let kim = cluster.channel(0, Some(stranger.with(&issued.certificate)?))?;
    assert_eq!(call(&kim, "Tickets/List").await?, Code::Ok);
    cluster.time.pass(61 * 60);
    let status = answer(&kim, "Tickets/List").await?;
    assert_eq!(status.code(), Code::Unauthenticated, "on the very connection that it was good for");
    assert!(status.message().contains("an owner claims another one"), "{}", status.message());
    Ok(())
}
