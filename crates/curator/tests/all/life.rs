//! How a machine becomes a node, joins again and leaves, and what owners order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use curator_client::pki::TrustAnchor;
use proto::curator::v1 as wire;
use proto::curator::v1::commit_response::Result as Committed;
use proto::curator::v1::leader_client::LeaderClient;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::nodes_client::NodesClient;
use proto::curator::v1::registration_client::RegistrationClient;
use proto::curator::v1::tickets_client::TicketsClient;
use shepherd_curator::bootstrap::bootstrap_cluster;
use tonic::Code;
use tonic::transport::Channel;
use uuid::Uuid;

use testkit::aloud::TestResult;
use testkit::curators::found_no_leader;
use testkit::curators::{Cluster, founding, refusal, ticket};
use testkit::etcd_servers::in_time;
use testkit::key_holder::Holder;

fn register(ticket: &[u8]) -> wire::RegisterRequest {
    wire::RegisterRequest {
        ticket: ticket.to_vec(),
        machine_id: "11111111-1111-4111-8111-111111111111".to_owned(),
        labels: BTreeMap::from([("row".to_owned(), "7".to_owned())]),
    }
}

fn taken_in(answer: wire::CommitResponse) -> Result<wire::Membership> {
    match answer.result {
        Some(Committed::Membership(membership)) => Ok(membership),
        other => anyhow::bail!("it was not taken in: {other:?}"),
    }
}

async fn node_of(owner: &Channel, id: &str) -> Result<wire::Node> {
    let listed = ManagementClient::new(owner.clone()).list_nodes(wire::ListNodesRequest::default()).await?;
    let mut nodes = listed.into_inner().nodes.into_iter().filter_map(|listed| listed.node);
    nodes.find(|node| node.node_id == id).context("it is not listed")
}

/// Scenario C-7, with each response lost once: a repeated request gets the same response.
#[tokio::test]
async fn machine_becomes_a_node_step_by_step_and_each_step_may_be_made_again() -> TestResult {
    let cluster = Cluster::start().await?;
    let (owner, node) = (cluster.as_owner().await?, Holder::new()?);
    let mut management = ManagementClient::new(owner.clone());
    let ticket = ticket(owner.clone(), Some(1)).await?;
    let mut registration = RegistrationClient::new(cluster.channel(0, Some(node.itself()?))?);

    let (code, text) = refusal(registration.commit(wire::CommitRequest {}).await)?;
    assert_eq!(code, Code::NotFound, "{text}");
    let (code, text) = refusal(registration.join(wire::JoinRequest {}).await)?;
    assert_eq!(code, Code::NotFound, "{text}");

    let first = registration.register(register(&ticket)).await?.into_inner();
    assert_eq!((first.node_id.clone(), first.state()), (node.id.to_string(), wire::NodeState::New));
    let directory = first.directory.clone().context("no directory")?;
    assert_eq!(directory.cluster_id, cluster.id.to_string());
    assert_eq!(directory.ca_certificate, cluster.anchor.certificate);
    assert_eq!(directory.curators, [cluster.address(0)?]);
    assert_eq!(registration.register(register(&ticket)).await?.into_inner(), first);

    let waiting = registration.commit(wire::CommitRequest {}).await?.into_inner();
    assert!(matches!(waiting.result, Some(Committed::AwaitingApproval(_))), "{waiting:?}");
    let approve = || wire::ApproveRequest { public_key: node.key.0.to_vec(), ..Default::default() };
    for _ in 0..2 {
        let approved = management.approve(approve()).await?.into_inner().node.context("no node")?;
        assert_eq!(approved.state(), wire::NodeState::Standby);
    }
    let standing = registration.register(register(&ticket)).await?.into_inner();
    assert_eq!(standing.state(), wire::NodeState::Standby);

    let membership = taken_in(registration.commit(wire::CommitRequest {}).await?.into_inner())?;
    let record = membership.node.context("no node")?;
    assert_eq!(record.state(), wire::NodeState::Up);
    assert_eq!(record.roles, Some(wire::NodeRoles::default()), "a node that registers has no role");
    assert_eq!(record.machine_id, "11111111-1111-4111-8111-111111111111");
    assert_eq!(record.labels["row"], "7");
    // At once: a certificate that was issued a moment ago is accepted, even if the curator's cache is late.
    let mut nodes = NodesClient::new(cluster.channel(0, Some(node.with(&membership.certificate)?))?);
    let renewed = nodes.renew_certificate(wire::RenewCertificateRequest {}).await?.into_inner();
    let again = taken_in(registration.commit(wire::CommitRequest {}).await?.into_inner())?;
    let back =
        registration.join(wire::JoinRequest {}).await?.into_inner().membership.context("no membership")?;
    assert_eq!(back.node, again.node);
    for certificate in [&renewed.certificate, &again.certificate, &back.certificate] {
        assert_ne!(*certificate, membership.certificate);
        let mut nodes = NodesClient::new(cluster.channel(0, Some(node.with(certificate)?))?);
        nodes.renew_certificate(wire::RenewCertificateRequest {}).await?;
    }
    assert_eq!(
        management.approve(approve()).await?.into_inner().node.context("no node")?.state(),
        wire::NodeState::Up
    );
    assert_eq!(node_of(&owner, &first.node_id).await?, record);
    Ok(())
}

#[tokio::test]
async fn ticket_lets_in_whom_it_was_made_for_and_nobody_else() -> TestResult {
    let cluster = Cluster::start().await?;
    let owner = cluster.as_owner().await?;
    let mut tickets = TicketsClient::new(owner.clone());
    let come = async |node: &Holder, ticket: &[u8]| {
        let mut registration = RegistrationClient::new(cluster.channel(0, Some(node.itself()?))?);
        anyhow::Ok(registration.register(register(ticket)).await)
    };
    let (one, other, third) = (Holder::new()?, Holder::new()?, Holder::new()?);

    let single = ticket(owner.clone(), Some(1)).await?;
    come(&one, &single).await??;
    let (code, text) = refusal(come(&other, &single).await?)?;
    assert_eq!(code, Code::PermissionDenied);
    assert!(text.contains("is used up"), "{text}");
    come(&one, &single).await??;

    let many = ticket(owner.clone(), None).await?;
    come(&other, &many).await??;
    let id = {
        let listed = tickets.list(wire::ListTicketsRequest {}).await?.into_inner().tickets;
        assert_eq!(listed.len(), 2);
        assert_eq!(listed[1].used_by, [one.id.to_string()], "the older one is last");
        listed[0].ticket_id.clone()
    };
    let revoke = || wire::RevokeTicketRequest { ticket_id: id.clone() };
    let revoked = tickets.revoke(revoke()).await?.into_inner().ticket.context("no ticket")?;
    assert_eq!(tickets.revoke(revoke()).await?.into_inner().ticket, Some(revoked), "once and for all");
    let (code, text) = refusal(come(&third, &many).await?)?;
    assert_eq!((code, text.contains("was revoked")), (Code::PermissionDenied, true), "{text}");

    let short = ticket(owner.clone(), None).await?;
    cluster.time.pass(3599);
    cluster.time.pass(2);
    let (code, text) = refusal(come(&third, &short).await?)?;
    assert_eq!((code, text.contains("expired")), (Code::PermissionDenied, true), "{text}");
    let (code, text) = refusal(come(&third, &[7; 32]).await?)?;
    assert_eq!((code, text.contains("unknown")), (Code::PermissionDenied, true), "{text}");
    let (code, _) = refusal(come(&third, &[7; 31]).await?)?;
    assert_eq!(code, Code::InvalidArgument);
    Ok(())
}

/// Uses are counted in the transaction that registers: of many machines that register at once, only as many are
/// admitted as the ticket allows.
#[tokio::test]
async fn of_many_that_come_at_once_with_one_ticket_as_many_are_let_in_as_may() -> TestResult {
    let cluster = Cluster::start().await?;
    let ticket = ticket(cluster.as_owner().await?, Some(3)).await?;
    let mut coming = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let node = Holder::new()?;
        let channel = cluster.channel(0, Some(node.itself()?))?;
        let request = register(&ticket);
        coming.spawn(async move {
            let mut registration = RegistrationClient::new(channel);
            loop {
                match registration
                    .register(wire::RegisterRequest { machine_id: String::new(), ..request.clone() })
                    .await
                {
                    Err(status) if found_no_leader(&status) => {}
                    answer => return answer.map(drop).map_err(|status| status.code()),
                }
            }
        });
    }
    let answers = coming.join_all().await;
    assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 3, "{answers:?}");
    assert!(
        answers.iter().all(|answer| matches!(answer, Ok(()) | Err(Code::PermissionDenied))),
        "{answers:?}"
    );
    Ok(())
}

/// Each writes the ticket's record, so of those that read it together all but one must decide again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crowd_that_comes_at_once_with_one_ticket_is_let_in_without_asking_again() -> TestResult {
    const CROWD: u32 = 200;
    let cluster = Cluster::start().await?;
    let owner = cluster.as_owner().await?;
    let ticket = ticket(owner.clone(), Some(CROWD)).await?;
    let together = Arc::new(tokio::sync::Barrier::new(usize::try_from(CROWD)?));
    let mut coming = tokio::task::JoinSet::new();
    for _ in 0..CROWD {
        let node = Holder::new()?;
        let channel = cluster.channel(0, Some(node.itself()?))?;
        let request = wire::RegisterRequest { machine_id: String::new(), ..register(&ticket) };
        let together = together.clone();
        coming.spawn(async move {
            // They are connected before, so that they register at once and not one after the other. A busy host does not
            // finish so many handshakes before their deadline.
            let connecting = async {
                let mut leader = LeaderClient::new(channel.clone());
                while leader.get_ca_certificate(wire::GetCaCertificateRequest {}).await.is_err() {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            };
            let connected = in_time("a connection of a node", connecting).await;
            together.wait().await;
            connected?;
            RegistrationClient::new(channel).register(request).await?;
            anyhow::Ok(())
        });
    }
    let answers = coming.join_all().await;
    let sent_away: Vec<_> = answers.iter().filter_map(|answer| answer.as_ref().err()).collect();
    assert!(sent_away.is_empty(), "{} of {CROWD} were sent away: {:?}", sent_away.len(), sent_away[0]);
    let listed = TicketsClient::new(owner).list(wire::ListTicketsRequest {}).await?.into_inner().tickets;
    assert_eq!(u32::try_from(listed[0].used_by.len())?, CROWD, "each use is counted");
    Ok(())
}

/// Scenario C-14, and decommissioning.
#[tokio::test]
async fn node_goes_only_when_nothing_protects_it_and_its_key_with_it() -> TestResult {
    let cluster = Cluster::start().await?;
    let owner = cluster.as_owner().await?;
    let mut management = ManagementClient::new(owner.clone());
    let (one, other) = (Holder::new()?, Holder::new()?);
    let certificate = cluster.take_in(&one).await?;
    cluster.take_in(&other).await?;
    let roles = |give: &[&str], take: &[&str]| wire::UpdateRolesRequest {
        node_id: one.id.to_string(),
        add_roles: give.iter().map(|&name| name.to_owned()).collect(),
        remove_roles: take.iter().map(|&name| name.to_owned()).collect(),
        ..Default::default()
    };
    let refused = refusal(management.update_roles(roles(&["kubernetes-worker"], &[])).await)?;
    assert_eq!(
        (refused.0, refused.1.contains("the cluster has none")),
        (Code::FailedPrecondition, true),
        "{}",
        refused.1
    );
    testkit::curators::put_kubernetes(owner.clone()).await?;
    management.update_roles(roles(&["kubernetes-worker"], &[])).await?;
    let decommission = || wire::DecommissionRequest { node_id: one.id.to_string() };
    let (code, text) = refusal(management.decommission(decommission()).await)?;
    assert_eq!((code, text.contains("kubernetes-worker")), (Code::FailedPrecondition, true), "{text}");

    let delete = |bypass_has_roles, bypass_not_decommissioned| wire::DeleteRequest {
        node_id: one.id.to_string(),
        bypass_has_roles,
        bypass_not_decommissioned,
        ..Default::default()
    };
    for (roles, up, protects) in [
        (false, false, "bypass_has_roles"),
        (false, true, "bypass_has_roles"),
        (true, false, "bypass_not_decommissioned"),
    ] {
        let (code, text) = refusal(management.delete(delete(roles, up)).await)?;
        assert_eq!((code, text.contains(protects)), (Code::FailedPrecondition, true), "{text}");
    }
    management.update_roles(roles(&[], &["kubernetes-worker"])).await?;
    let mut as_node = NodesClient::new(cluster.channel(0, Some(one.with(&certificate)?))?);
    let mut watching = as_node.watch_all(wire::WatchAllRequest {}).await?.into_inner();
    assert!(watching.message().await?.context("no backlog")?.backlog_complete);
    let gone = management.decommission(decommission()).await?.into_inner().node.context("no node")?;
    assert_eq!(gone.state(), wire::NodeState::Decommissioned);
    management.decommission(decommission()).await?;

    // From that response on, its certificate is rejected: for calls, for open streams, and for joining again.
    let (code, text) = refusal(as_node.renew_certificate(wire::RenewCertificateRequest {}).await)?;
    assert_eq!((code, text.contains("decommissioned")), (Code::Unauthenticated, true), "{text}");
    let end = loop {
        match watching.message().await {
            Ok(Some(_)) => {}
            other => break other,
        }
    };
    assert_eq!(end.map_err(|status| status.code()), Err(Code::Unauthenticated));
    let mut registration = RegistrationClient::new(cluster.channel(0, Some(one.itself()?))?);
    let fresh = ticket(owner.clone(), None).await?;
    for refused in [
        refusal(registration.register(register(&fresh)).await)?,
        refusal(registration.commit(wire::CommitRequest {}).await)?,
        refusal(registration.join(wire::JoinRequest {}).await)?,
    ] {
        assert_eq!(refused.0, Code::FailedPrecondition, "{}", refused.1);
    }

    management.delete(delete(false, false)).await?;
    let (code, _) = refusal(management.delete(delete(false, false)).await)?;
    assert_eq!(code, Code::NotFound);
    let (code, text) = refusal(as_node.renew_certificate(wire::RenewCertificateRequest {}).await)?;
    assert_eq!((code, text.contains("unknown")), (Code::Unauthenticated, true), "{text}");
    let come_again = registration.register(register(&fresh)).await?.into_inner();
    assert_eq!(come_again.state(), wire::NodeState::New, "like any machine");
    assert_eq!(
        node_of(&owner, &other.id.to_string()).await?.state(),
        wire::NodeState::Up,
        "the other one is as it was"
    );
    Ok(())
}

/// Scenario C-19: labels change all or none.
#[tokio::test]
async fn labels_change_all_or_none() -> TestResult {
    let cluster = Cluster::start().await?;
    let owner = cluster.as_owner().await?;
    let mut management = ManagementClient::new(owner.clone());
    let node = Holder::new()?;
    cluster.take_in(&node).await?;
    let change = |set: &[(&str, &str)], remove: &[&str]| wire::UpdateLabelsRequest {
        node_id: node.id.to_string(),
        set: set.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect(),
        remove: remove.iter().map(|&key| key.to_owned()).collect(),
    };
    let changed = management.update_labels(change(&[("a", "1"), ("b", "2")], &[])).await?.into_inner();
    let labels = changed.node.context("no node")?.labels;
    assert_eq!(labels.len(), 2);
    let changed = management.update_labels(change(&[("a", "3")], &["b", "never"])).await?.into_inner();
    assert_eq!(changed.node.context("no node")?.labels, BTreeMap::from([("a".to_owned(), "3".to_owned())]));
    let too_many: Vec<(String, &str)> = (0..32).map(|number| (format!("k{number}"), "")).collect();
    let too_many: Vec<(&str, &str)> = too_many.iter().map(|(key, value)| (key.as_str(), *value)).collect();
    for (request, expected) in [
        (change(&[("a", "4")], &["a"]), Code::InvalidArgument),
        (change(&[("c", "4")], &["a", "a"]), Code::InvalidArgument),
        (change(&[("not a key", "4")], &[]), Code::InvalidArgument),
        (change(&too_many, &[]), Code::OutOfRange),
        (
            wire::UpdateLabelsRequest { node_id: Holder::new()?.id.to_string(), ..change(&[], &[]) },
            Code::NotFound,
        ),
        (
            wire::UpdateLabelsRequest { node_id: "node-1".to_owned(), ..change(&[], &[]) },
            Code::InvalidArgument,
        ),
    ] {
        let (code, text) = refusal(management.update_labels(request).await)?;
        assert_eq!(code, expected, "{text}");
    }
    assert_eq!(
        node_of(&owner, &node.id.to_string()).await?.labels,
        BTreeMap::from([("a".to_owned(), "3".to_owned())])
    );
    Ok(())
}

/// Scenarios C-11 and C-12. `heartbeats.rs` tests the health that a list shows.
#[tokio::test]
async fn cluster_and_its_nodes_are_listed_as_requested() -> TestResult {
    let cluster = Cluster::start().await?;
    let owner = cluster.as_owner().await?;
    let mut management = ManagementClient::new(owner.clone());
    let response = management.get_cluster(wire::GetClusterRequest {}).await?.into_inner();
    assert_eq!(response.name, "of a test");
    assert_eq!(response.directory.context("no directory")?.curators, [cluster.address(0)?]);

    let (one, new) = (Holder::new()?, Holder::new()?);
    cluster.take_in(&one).await?;
    let ticket = ticket(owner.clone(), None).await?;
    let mut registration = RegistrationClient::new(cluster.channel(0, Some(new.itself()?))?);
    registration.register(register(&ticket)).await?;
    let first = cluster.nodes[0].id.to_string();
    let (one, new) = (one.id.to_string(), new.id.to_string());
    let all = wire::ListNodesRequest::default();
    let states =
        |states: &[wire::NodeState]| states.iter().map(|state| i32::from(*state)).collect::<Vec<_>>();
    for (request, expected) in [
        (all.clone(), vec![&first, &one, &new]),
        (wire::ListNodesRequest { states: states(&[wire::NodeState::New]), ..all.clone() }, vec![&new]),
        (
            wire::ListNodesRequest {
                states: states(&[wire::NodeState::New, wire::NodeState::Up]),
                ..all.clone()
            },
            vec![&first, &one, &new],
        ),
        (wire::ListNodesRequest { roles: vec!["consensus-member".to_owned()], ..all.clone() }, vec![&first]),
        (wire::ListNodesRequest { labels: vec!["row=7".to_owned()], ..all.clone() }, vec![&new]),
        (
            wire::ListNodesRequest {
                machine_id: "11111111-1111-4111-8111-111111111111".to_owned(),
                ..all.clone()
            },
            vec![&new],
        ),
        (
            wire::ListNodesRequest { states: states(&[wire::NodeState::Decommissioned]), ..all.clone() },
            vec![],
        ),
    ] {
        let listed = management.list_nodes(request.clone()).await?.into_inner().nodes;
        let mut listed: Vec<String> =
            listed.into_iter().filter_map(|listed| listed.node).map(|node| node.node_id).collect();
        let mut expected: Vec<String> = expected.into_iter().cloned().collect();
        assert!(listed.is_sorted(), "{listed:?}");
        listed.sort();
        expected.sort();
        assert_eq!(listed, expected, "{request:?}");
    }
    let odd = wire::ListNodesRequest { roles: vec!["Consensus".to_owned()], ..all };
    assert_eq!(refusal(management.list_nodes(odd).await)?.0, Code::InvalidArgument);
    Ok(())
}

/// A repeated bootstrap finds its own records, and leaves those of others alone.
#[tokio::test]
async fn cluster_is_founded_once_however_often_it_is_tried() -> TestResult {
    let etcd = testkit::etcd_servers::Cluster::start(1).await?;
    let (client, node, owner) = (etcd.client(), Holder::new()?, Holder::new()?);
    let now = std::time::SystemTime::now().into();
    let founding = founding(Uuid::new_v4(), &node, &owner, now)?;
    let (first, second) =
        tokio::join!(bootstrap_cluster(&client, &founding, now), bootstrap_cluster(&client, &founding, now));
    let (first, second) = (first?, second?);
    assert_eq!(first.ca_certificate, second.ca_certificate, "one of both at once made it");
    assert_eq!(TrustAnchor::parse(&first.ca_certificate)?.cluster, founding.authority.anchor().cluster);
    let again = bootstrap_cluster(&client, &founding, now).await?;
    assert_eq!(again.ca_certificate, first.ca_certificate);
    assert_ne!(again.certificate, first.certificate);

    let another = shepherd_curator::bootstrap::BootstrapRequest {
        authority: std::sync::Arc::new(shepherd_curator::bootstrap::create_authority(Uuid::new_v4(), now)?),
        ..founding.clone()
    };
    let error = bootstrap_cluster(&client, &another, now).await.map_err(|error| error.to_string());
    assert!(error.as_ref().is_err_and(|error| error.contains("holds cluster")), "{error:?}");
    let stranger =
        shepherd_curator::bootstrap::BootstrapRequest { node_key: Holder::new()?.key, ..founding.clone() };
    let error = bootstrap_cluster(&client, &stranger, now).await.map_err(|error| error.to_string());
    assert!(error.as_ref().is_err_and(|error| error.contains("not part of it")), "{error:?}");
    let ownerless = shepherd_curator::bootstrap::BootstrapRequest { owner_keys: Vec::new(), ..founding };
    assert!(bootstrap_cluster(&client, &ownerless, now).await.is_err());
    Ok(())
}
