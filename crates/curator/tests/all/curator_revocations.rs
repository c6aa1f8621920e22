//! The revocation of curators: what a revoked curator loses, and that the last one stays.

use std::time::Duration;

use anyhow::{Context as _, Result};
use curator_client::statement::SignedStatement;
use curator_client::statement_trust::StatementTrust;
use proto::curator::v1 as wire;
use proto::curator::v1::credentials_client::CredentialsClient;
use proto::curator::v1::leader_client::LeaderClient;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::revoke_credentials_request::Target;
use shepherd_curator::service::curator_error::CuratorError;
use shepherd_curator::service::gate_monitor::GateMonitor;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use testkit::aloud::TestResult;
use testkit::curators::{Cluster, ClusterOptions};
use testkit::etcd_servers::{in_time, until};
use testkit::key_holder::Holder;

use crate::false_curator::{FalseCurator, SlowPath};
use crate::leading::{revoke_node, start_connected, three, way};
use crate::statements::{
    Follower, impersonate, owner_at, trust_of, until_stated, waits_for, week_long_certificate,
};

async fn revoke(channel: Channel, node: &Holder) -> Result<(), Status> {
    let target = Some(Target::NodeId(node.id.to_string()));
    CredentialsClient::new(channel).revoke(wire::RevokeCredentialsRequest { target }).await?;
    Ok(())
}

/// Has the leader revoke a node. The call is repeated while none leads.
async fn revoke_through_leader(cluster: &Cluster, node: &Holder) -> Result<()> {
    let (owner, _calling) = way(cluster)?;
    revoke_node(&owner, node).await
}

/// Three curators, of which one does not lead and is stolen: a false curator has its key and its certificate, and a node
/// follows it.
struct StolenCurator {
    cluster: Cluster,
    leader: usize,
    stolen: usize,
    /// The third curator.
    other: usize,
    /// The number of the first statement.
    first: u64,
    thief: FalseCurator,
    /// What the node believes.
    trust: StatementTrust,
    follower: Follower,
}

impl StolenCurator {
    /// Founds the cluster, and waits until the node follows the false curator.
    async fn start() -> Result<Self> {
        let cluster = Cluster::start_with(three()).await?;
        let leader = cluster.until_one_leads(None).await?;
        let (stolen, other) = ((leader + 1) % 3, (leader + 2) % 3);
        let first = until_stated(&cluster, leader, 1).await?;
        let thief = impersonate(&cluster, stolen, 0, &first).await?;
        let trust = trust_of(&cluster);
        let follower = Follower::start(&trust, std::slice::from_ref(&thief.address));
        follower.until_it_follows(&thief.address).await?;
        let first = first.statement.number;
        Ok(Self { cluster, leader, stolen, other, first, thief, trust, follower })
    }

    fn node(&self) -> &Holder {
        &self.cluster.nodes[self.stolen]
    }

    /// The addresses of the honest curators.
    fn honest(&self) -> Result<Vec<String>> {
        [self.leader, self.other].map(|number| self.cluster.address(number)).into_iter().collect()
    }

    /// A stream through the false curator, after its first message.
    async fn open_watch(&self) -> Result<Streaming<wire::WatchLeaderResponse>> {
        let mut through = LeaderClient::new(self.follower.tracker.channel());
        let mut open = through.watch(wire::WatchLeaderRequest {}).await?.into_inner();
        in_time("a false answer", open.message()).await??.context("it ended")?;
        Ok(open)
    }

    /// Has the leader revoke the stolen curator, and waits until the third one serves the next statement.
    async fn revoke(&self) -> Result<SignedStatement> {
        revoke_through_leader(&self.cluster, self.node()).await?;
        until_stated(&self.cluster, self.other, self.first + 1).await
    }
}

/// Somebody has the key and the certificate of a member's curator, and answers in its place.
#[tokio::test]
async fn revoked_curator_loses_what_was_open_and_is_followed_no_more() -> TestResult {
    let theft = StolenCurator::start().await?;
    let (thief, follower) = (&theft.thief, &theft.follower);
    let mut open = theft.open_watch().await?;

    let next = theft.revoke().await?;
    assert!(!next.statement.revoked.is_empty(), "{:?}", next.statement);
    // The statement comes from an honest curator, as it does within minutes for a node that reaches one.
    let _elsewhere = Follower::start(&theft.trust, &theft.honest()?);
    let ended = in_time("the end of what was open", open.message()).await?;
    assert!(ended.is_err(), "{ended:?}");
    follower.until_refusal("are revoked").await?;
    let requests = thief.statements();
    until("it was tried again", async || Ok(thief.statements() > requests + 1)).await?;
    assert_eq!(follower.leader(), None, "it is followed again");
    Ok(())
}

/// A stolen curator leads, and reports dead addresses until every place for former curators is taken. Then it reports
/// itself alone, and nobody but the honest curators has the statement that revokes it.
#[tokio::test]
async fn false_leader_hides_no_revocation_by_the_lists_that_it_reports() -> TestResult {
    let theft = StolenCurator::start().await?;
    let (thief, follower) = (&theft.thief, &theft.follower);
    until_stated(&theft.cluster, theft.other, 1).await?;

    let honest = theft.honest()?;
    let with_thief = |others: Vec<String>| [vec![thief.address.clone()], others].concat();
    follower.tracker.set_directory(with_thief(honest.clone()));
    until("the honest curators have proved themselves", async || {
        let proved = theft.trust.curators().addresses();
        Ok(honest.iter().all(|address| proved.contains_key(address)))
    })
    .await?;
    // Nobody listens there.
    let dead = |batch: usize| (1..=13).map(move |number| format!("127.9.{batch}.{number}:1"));
    for batch in 0..3 {
        follower.tracker.set_directory(with_thief([honest.clone(), dead(batch).collect()].concat()));
    }
    follower.tracker.set_directory(with_thief(Vec::new()));
    for batch in 3..8 {
        follower.tracker.set_directory(with_thief(dead(batch).collect()));
    }
    assert_eq!(follower.leader().map(|leader| leader.address), Some(thief.address.clone()));

    theft.revoke().await?;
    // The next round is soon after a curator is followed again: the test need not wait for the next minute.
    follower.tracker.reconnect();
    follower.until_refusal("are revoked").await?;
    let is_followed = || follower.leader().is_some_and(|leader| leader.node == theft.node().id);
    until("the thief is not followed", async || Ok(!is_followed())).await?;
    Ok(())
}

/// A stolen curator ends each answer about the leader at once, and leaves open what goes through it. The requests to the
/// honest curator take longer than that.
#[tokio::test]
async fn false_leader_that_ends_its_watches_ends_no_request_for_the_statement() -> TestResult {
    let theft = StolenCurator::start().await?;
    let (thief, follower) = (&theft.thief, &theft.follower);
    let honest = SlowPath::start(theft.cluster.address(theft.other)?, thief).await?;
    thief.set_lasting(true);
    let mut open = theft.open_watch().await?;
    thief.set_lasting(false);

    theft.revoke().await?;
    // The honest curator has left the directory, so it is requested for the statement alone.
    follower.tracker.set_directory([thief.address.clone(), honest.address.clone()]);
    follower.tracker.set_directory([thief.address.clone()]);
    until("a request is under way", async || Ok(honest.accepted() > 0)).await?;
    let watches = thief.watches();
    thief.end_watches();
    let ended = in_time("the end of what was open", open.message()).await?;
    assert!(ended.is_err(), "{ended:?}");
    assert!(thief.watches() > watches, "it was not followed again");
    follower.until_refusal("are revoked").await?;
    assert_eq!(follower.leader(), None, "it is followed again");
    Ok(())
}

/// Nodes do not follow the curator of a revoked node, so it must not keep the others from leading.
#[tokio::test]
async fn revoked_leader_steps_down() -> TestResult {
    let mut cluster = Cluster::start_with(three()).await?;
    let leader = cluster.until_one_leads(None).await?;
    let first = until_stated(&cluster, leader, 1).await?;
    // The call may end with the leadership that it ends. The next leader answers it then.
    revoke_through_leader(&cluster, &cluster.nodes[leader]).await?;
    let next = cluster.until_one_leads(Some(leader)).await?;
    until_stated(&cluster, next, first.statement.number + 1).await?;
    let ended = cluster.stop(leader).await.err().context("it ended without an error")?;
    assert!(ended.to_string().contains("are revoked"), "{ended:#}");

    // It takes part in no election again, however often it is started.
    let node = &cluster.nodes[leader];
    let shown = week_long_certificate(&cluster, node)?;
    // Beside another etcd: its own is no member any more.
    let again = cluster.bind_curator(node, next, &shown, GateMonitor::default()).await?;
    let ended = in_time("its end", Box::pin(again.run(&CancellationToken::new()))).await?;
    assert!(matches!(ended, Err(CuratorError::NodeRevoked(id)) if id == node.id), "{ended:?}");
    // A node that follows statements continues with the others.
    let others = [(leader + 1) % 3, (leader + 2) % 3].map(|number| cluster.address(number));
    let others = others.into_iter().collect::<Result<Vec<_>>>()?;
    let follower = Follower::start(&trust_of(&cluster), &others);
    until("another one is followed", async || Ok(follower.leader().is_some())).await?;
    assert_ne!(follower.leader().map(|leader| leader.node), Some(node.id));
    Ok(())
}

/// Three curators of which all but the leader are revoked. Their memberships do not end meanwhile.
async fn start_with_last_curator() -> Result<(Cluster, usize)> {
    let options = ClusterOptions { sync_interval: Duration::from_hours(1), ..three() };
    let (cluster, leader) = start_connected(options).await?;
    for other in [(leader + 1) % 3, (leader + 2) % 3] {
        revoke(owner_at(&cluster, leader)?, &cluster.nodes[other]).await?;
    }
    Ok((cluster, leader))
}

#[tokio::test]
async fn last_curator_is_not_revoked() -> TestResult {
    let (cluster, leader) = start_with_last_curator().await?;
    let (last, other) = (&cluster.nodes[leader], &cluster.nodes[(leader + 1) % 3]);
    let refused = revoke(owner_at(&cluster, leader)?, last).await.err().context("it was revoked")?;
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains("Add a consensus member"), "{refused}");
    // To repeat a revocation is no error, and the last curator leads on.
    revoke(owner_at(&cluster, leader)?, other).await?;
    waits_for(&cluster, leader).await?;
    Ok(())
}

/// A revoked member still votes. But its curator leads no more, and nobody could ever change that again.
#[tokio::test]
async fn last_curator_is_not_removed() -> TestResult {
    let (cluster, leader) = start_with_last_curator().await?;
    let last = cluster.nodes[leader].id.to_string();
    let mut management = ManagementClient::new(owner_at(&cluster, leader)?);
    let order = wire::UpdateRolesRequest {
        node_id: last.clone(),
        add_roles: Vec::new(),
        remove_roles: vec!["consensus-member".to_owned()],
        ..Default::default()
    };
    let taken = management.update_roles(order).await.err().context("its role was taken")?;
    let request = wire::DeleteRequest {
        node_id: last,
        bypass_has_roles: true,
        bypass_not_decommissioned: true,
        ..Default::default()
    };
    let deleted = management.delete(request).await.err().context("it was deleted")?;
    for refused in [taken, deleted] {
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(refused.message().contains("Add a consensus member"), "{refused}");
    }
    let members = cluster.client_of(leader).list_members().await?;
    assert_eq!(members.len(), 3, "a member was removed");
    Ok(())
}
