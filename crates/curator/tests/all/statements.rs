//! The statement of the cluster's authority: when it is made, what it permits, and what a false curator gains without it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use curator_client::certificate::{Serial, Validity};
use curator_client::known_epoch::{EpochChange, KnownEpoch};
use curator_client::leader_channel::{LeaderEndpoint, LeaderTracker, PersistEpoch};
use curator_client::statement::SignedStatement;
use curator_client::statement_trust::StatementTrust;
use proto::curator::v1 as wire;
use proto::curator::v1::credentials_client::CredentialsClient;
use proto::curator::v1::leader_client::LeaderClient;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::revoke_credentials_request::Target;
use shepherd_curator::service::curator_server::CuratorError;
use shepherd_curator::service::gate_monitor::GateMonitor;
use shepherd_curator::statement_record::statement_record_key;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Code, Status};

use testkit::aloud::TestResult;
use testkit::curators::{Cluster, ClusterOptions, certificate};
use testkit::etcd_servers::{in_time, until};
use testkit::key_holder::Holder;

use crate::false_curator::{FalseClaims, FalseCurator};
use crate::leading::{call_leader, three, way};

/// Requests the statement of one curator; `None` if it has none.
async fn request_statement(cluster: &Cluster, number: usize) -> Result<Option<wire::SignedStatement>> {
    let mut leader = LeaderClient::new(cluster.channel(number, None)?);
    match leader.get_statement(wire::GetStatementRequest {}).await {
        Ok(response) => Ok(response.into_inner().statement),
        Err(status) if status.code() == Code::NotFound => Ok(None),
        Err(status) => Err(status.into()),
    }
}

/// Waits until a curator serves a statement with this number or a higher one, and verifies it.
pub(super) async fn until_stated(cluster: &Cluster, number: usize, lowest: u64) -> Result<SignedStatement> {
    let mut stated = None;
    until("a curator serves the statement", async || {
        // A curator that does not know the leader yet closes the connection.
        let Ok(Some(served)) = request_statement(cluster, number).await else { return Ok(false) };
        let verified = SignedStatement::verify(&served, std::slice::from_ref(&cluster.anchor))?;
        let is_there = verified.statement.number >= lowest;
        stated = Some(verified);
        Ok(is_there)
    })
    .await?;
    stated.context("no statement")
}

/// Waits until a curator serves the first statement, over one connection. After that the leader dials no curator, and a
/// watch of the leader gets no message for the first statement.
pub(super) async fn until_first_statement(cluster: &Cluster, number: usize) -> Result<()> {
    let mut leader = LeaderClient::new(cluster.channel(number, None)?);
    until("there is a statement", async || {
        Ok(leader.get_statement(wire::GetStatementRequest {}).await.is_ok())
    })
    .await
}

/// A tracker that follows statements, with these curators in its directory. It runs in the background, and keeps the
/// epochs that it stores.
pub(super) struct Follower {
    pub(super) tracker: LeaderTracker,
    epochs: Arc<Mutex<Vec<EpochChange>>>,
    _following: JoinSet<()>,
}

impl Follower {
    pub(super) fn start(trust: &StatementTrust, directory: &[String]) -> Self {
        let epochs = Arc::new(Mutex::new(Vec::new()));
        let stored = epochs.clone();
        let persist: PersistEpoch = Arc::new(move |change| {
            stored.lock().unwrap_or_else(PoisonError::into_inner).push(change);
            Ok(())
        });
        let known = KnownEpoch::default();
        let tracker = LeaderTracker::with_statements(trust.clone(), Arc::new(|| None), known, persist);
        tracker.set_directory(directory.iter().cloned());
        let mut following = JoinSet::new();
        following.spawn({
            let tracker = tracker.clone();
            async move { match tracker.track_leader().await {} }
        });
        Self { tracker, epochs, _following: following }
    }

    pub(super) fn leader(&self) -> Option<LeaderEndpoint> {
        self.tracker.leader()
    }

    /// The changes of the epoch that it stored.
    fn stored_epochs(&self) -> Vec<EpochChange> {
        self.epochs.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) async fn until_it_follows(&self, address: &str) -> Result<()> {
        until("calls go to the curator", async || {
            Ok(self.leader().is_some_and(|leader| leader.address == address))
        })
        .await
    }

    /// Waits until the reason why nobody is followed contains this text.
    pub(super) async fn until_refusal(&self, text: &str) -> Result<()> {
        until(text, async || {
            Ok(self.tracker.refusal().borrow().as_ref().is_some_and(|refusal| refusal.contains(text)))
        })
        .await
    }
}

pub(super) fn trust_of(cluster: &Cluster) -> StatementTrust {
    StatementTrust::in_memory(cluster.anchor.clone(), cluster.time.clock())
}

/// A channel to one curator, as an owner.
fn owner_at(cluster: &Cluster, number: usize) -> Result<Channel> {
    let validity = Validity::starting(cluster.time.now(), Duration::from_hours(1));
    let issued = cluster.authority.issue_owner_certificate(
        "kim",
        &cluster.owner.key,
        Serial::new(rand::random()),
        validity,
    )?;
    cluster.channel(number, Some(cluster.owner.with(&issued.certificate)?))
}

async fn revoke(channel: Channel, node: &Holder) -> Result<(), Status> {
    let target = Some(Target::NodeId(node.id.to_string()));
    CredentialsClient::new(channel).revoke(wire::RevokeCredentialsRequest { target }).await?;
    Ok(())
}

/// Has the leader revoke a node. The call is repeated while none leads.
async fn revoke_through_leader(cluster: &Cluster, node: &Holder) -> Result<()> {
    let (owner, _calling) = way(cluster)?;
    let target = Some(Target::NodeId(node.id.to_string()));
    let (credentials, request) =
        (CredentialsClient::new(owner.channel()), wire::RevokeCredentialsRequest { target });
    call_leader("a revocation", async || credentials.clone().revoke(request.clone()).await).await?;
    Ok(())
}

/// A false curator with the key and the certificate of this one. It serves a true statement, and claims an epoch.
async fn impersonate(
    cluster: &Cluster,
    number: usize,
    epoch: u64,
    served: &SignedStatement,
) -> Result<FalseCurator> {
    let node = &cluster.nodes[number];
    let shown = node.with(cluster.certificate_of_curator(number))?;
    let statement = Some((served.to_wire(), served.statement.number));
    FalseCurator::start(shown, FalseClaims { node: node.id, epoch, statement }).await
}

/// The nodes that the first statement waits for, as the leader names them.
async fn waits_for(cluster: &Cluster, leader: usize) -> Result<Vec<String>> {
    let mut management = ManagementClient::new(owner_at(cluster, leader)?);
    Ok(management.get_cluster(wire::GetClusterRequest {}).await?.into_inner().statement_waits_for)
}

/// A curator's certificate that outlasts a statement.
pub(super) fn week_long_certificate(cluster: &Cluster, node: &Holder) -> Result<Vec<u8>> {
    let validity = Validity::starting(cluster.time.now(), Duration::from_hours(7 * 24));
    let serial = Serial::new(rand::random());
    Ok(cluster.authority.issue_curator_certificate(&node.key, serial, validity)?.certificate)
}

#[tokio::test]
async fn first_statement_is_made_once_every_curator_shows_its_role() -> TestResult {
    let options = ClusterOptions { size: 3, old_curators: 1, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_with(options).await?;
    let leader = cluster.until_one_leads(None).await?;
    let old = cluster.nodes[2].id.to_string();
    until("the old curator is named", async || {
        let made = cluster.client_of(leader).get(&statement_record_key()?).await?;
        ensure!(made.is_none(), "a statement was made before every curator shows its role");
        Ok(waits_for(&cluster, leader).await? == [old.clone()])
    })
    .await?;
    for number in 0..3 {
        until("it has no statement", async || {
            let Ok(none) = request_statement(&cluster, number).await else { return Ok(false) };
            ensure!(none.is_none(), "{number} has one: {none:?}");
            Ok(true)
        })
        .await?;
    }

    cluster.stop(2).await?;
    cluster.run(2).await?;
    let leader = cluster.until_one_leads(None).await?;
    let first = until_stated(&cluster, 0, 1).await?;
    let statement = &first.statement;
    assert_eq!((statement.cluster, statement.order()), (cluster.id, (0, 1)));
    assert_eq!(statement.authorities, [cluster.anchor.clone()]);
    assert!(statement.revoked.is_empty() && statement.is_fresh(cluster.time.now()), "{statement:?}");
    for number in 0..3 {
        assert_eq!(until_stated(&cluster, number, 1).await?, first, "they serve the same bytes");
        let mut discovery = LeaderClient::new(cluster.channel(number, None)?);
        let mut answers = discovery.watch(wire::WatchLeaderRequest {}).await?.into_inner();
        let response = in_time("the leader", answers.message()).await??.context("nobody leads")?;
        assert_eq!(response.statement_number, 1);
    }
    until("nobody is waited for", async || Ok(waits_for(&cluster, leader).await?.is_empty())).await?;
    Ok(())
}

/// A node that knows no statement follows curators of a release before, and none of them any more after the first
/// statement.
#[tokio::test]
async fn old_curators_are_followed_before_the_first_statement() -> TestResult {
    let mut cluster =
        Cluster::start_with(ClusterOptions { old_curators: 1, ..ClusterOptions::default() }).await?;
    cluster.until_one_leads(None).await?;
    let trust = trust_of(&cluster);
    let follower = Follower::start(&trust, &[cluster.address(0)?]);
    follower.until_it_follows(&cluster.address(0)?).await?;
    let mut through = LeaderClient::new(follower.tracker.channel());
    let mut answers = through.watch(wire::WatchLeaderRequest {}).await?.into_inner();
    let response = in_time("the leader", answers.message()).await??.context("nobody leads")?;
    assert_eq!((response.statement_number, trust.current()), (0, None));

    // Its next release has a curator's certificate, and the cluster its first statement.
    cluster.stop(0).await?;
    cluster.run(0).await?;
    follower.tracker.set_directory([cluster.address(0)?]);
    until("the first statement counts", async || Ok(trust.current().is_some())).await?;
    follower.until_it_follows(&cluster.address(0)?).await?;

    // It is rolled back: the statement counts for good.
    cluster.stop(0).await?;
    let old = certificate(&cluster.authority, &cluster.nodes[0], cluster.time.now())?;
    cluster.run_with(0, old).await?;
    follower.tracker.set_directory([cluster.address(0)?]);
    follower.until_refusal("which has no curator's certificate").await?;
    assert_eq!(follower.leader(), None);
    Ok(())
}

/// The wait begins when the last curator is ready, and again after it was rolled back.
#[tokio::test]
async fn update_to_statements_can_be_rolled_back_for_an_hour() -> TestResult {
    let first_statement_wait = Duration::from_hours(1);
    let options = ClusterOptions { old_curators: 1, first_statement_wait, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_with(options).await?;
    let trust = trust_of(&cluster);
    let follower = Follower::start(&trust, &[cluster.address(0)?]);
    for _ in 0..2 {
        cluster.stop(0).await?;
        cluster.run(0).await?;
        cluster.until_one_leads(None).await?;
        follower.tracker.set_directory([cluster.address(0)?]);
        follower.until_it_follows(&cluster.address(0)?).await?;
        // By now the curator is ready. Less than the hour passes.
        until("nobody is waited for", async || Ok(waits_for(&cluster, 0).await?.is_empty())).await?;
        cluster.time.pass(1_800);

        cluster.stop(0).await?;
        let old = certificate(&cluster.authority, &cluster.nodes[0], cluster.time.now())?;
        cluster.run_with(0, old).await?;
        follower.tracker.set_directory([cluster.address(0)?]);
        follower.until_it_follows(&cluster.address(0)?).await?;
        let made = cluster.client_of(0).get(&statement_record_key()?).await?;
        assert!(
            made.is_none() && trust.current().is_none(),
            "an update can be rolled back no more: {made:?}"
        );
    }

    cluster.stop(0).await?;
    cluster.run(0).await?;
    cluster.until_one_leads(None).await?;
    follower.tracker.set_directory([cluster.address(0)?]);
    until("the first statement counts", async || {
        cluster.time.pass(600);
        Ok(trust.current().is_some())
    })
    .await?;
    Ok(())
}

/// Somebody has the key and the certificate of a member's curator, and answers in its place.
#[tokio::test]
async fn revoked_curator_loses_what_was_open_and_is_followed_no_more() -> TestResult {
    let cluster = Cluster::start_with(three()).await?;
    let leader = cluster.until_one_leads(None).await?;
    let (stolen, other) = ((leader + 1) % 3, (leader + 2) % 3);
    let first = until_stated(&cluster, leader, 1).await?;
    let node = &cluster.nodes[stolen];
    let thief = impersonate(&cluster, stolen, 0, &first).await?;
    let trust = trust_of(&cluster);
    let follower = Follower::start(&trust, std::slice::from_ref(&thief.address));
    follower.until_it_follows(&thief.address).await?;
    let mut open =
        LeaderClient::new(follower.tracker.channel()).watch(wire::WatchLeaderRequest {}).await?.into_inner();
    in_time("a false answer", open.message()).await??.context("it ended")?;

    revoke_through_leader(&cluster, node).await?;
    let next = until_stated(&cluster, other, first.statement.number + 1).await?;
    assert!(!next.statement.revoked.is_empty(), "{:?}", next.statement);
    // The statement comes from an honest curator, as it does within minutes for a node that reaches one.
    let honest =
        [leader, other].map(|number| cluster.address(number)).into_iter().collect::<Result<Vec<_>>>()?;
    let _elsewhere = Follower::start(&trust, &honest);
    let ended = in_time("the end of what was open", open.message()).await?;
    assert!(ended.is_err(), "{ended:?}");
    follower.until_refusal("are revoked").await?;
    let requests = thief.statements();
    until("it was tried again", async || Ok(thief.statements() > requests + 1)).await?;
    assert_eq!(follower.leader(), None, "it is followed again");
    Ok(())
}

/// A curator's certificate is not enough to make a node believe a later epoch, with which it would follow nobody else.
#[tokio::test]
async fn epoch_of_somebody_else_raises_nothing() -> TestResult {
    let cluster = Cluster::start().await?;
    let first = until_stated(&cluster, 0, 1).await?;
    let liar = impersonate(&cluster, 0, 4, &first).await?;
    let follower = Follower::start(&trust_of(&cluster), std::slice::from_ref(&liar.address));
    until("it has answered", async || Ok(liar.watches() > 1 || follower.leader().is_some())).await?;
    let believed = (follower.tracker.highest_epoch(), follower.stored_epochs());
    assert_eq!(believed, (0, Vec::new()), "an epoch that no statement proves was believed");
    assert_eq!(follower.leader(), None);
    // The true curator is followed as before.
    let address = cluster.address(0)?;
    follower.tracker.set_directory([liar.address.clone(), address.clone()]);
    follower.until_it_follows(&address).await?;
    assert_eq!(follower.tracker.highest_epoch(), 0);
    Ok(())
}

/// Before the first statement, the key of any node is enough to make a node believe a later epoch. It must not keep that
/// node away from the first statement, and so with the thief.
#[tokio::test]
async fn epoch_of_before_the_first_statement_ends_with_it() -> TestResult {
    let cluster = Cluster::start().await?;
    until_stated(&cluster, 0, 1).await?;
    let node = &cluster.nodes[0];
    let of_node = certificate(&cluster.authority, node, cluster.time.now())?;
    let claims = FalseClaims { node: node.id, epoch: 900, statement: None };
    let liar = FalseCurator::start(node.with(&of_node)?, claims).await?;
    let trust = trust_of(&cluster);
    let follower = Follower::start(&trust, std::slice::from_ref(&liar.address));
    follower.until_it_follows(&liar.address).await?;
    assert_eq!(follower.tracker.known_epoch(), KnownEpoch { highest: 900, proved: 0 });

    let address = cluster.address(0)?;
    follower.tracker.set_directory([address.clone()]);
    until("the first statement counts", async || Ok(trust.current().is_some())).await?;
    follower.until_it_follows(&address).await?;
    assert_eq!(follower.tracker.known_epoch(), KnownEpoch::default());
    assert_eq!(follower.stored_epochs(), [EpochChange::Reported(900), EpochChange::Stated(0)]);
    Ok(())
}

/// A stolen curator leads, and reports dead addresses until every place for former curators is taken. Then it reports
/// itself alone, and nobody but the honest curators has the statement that revokes it.
#[tokio::test]
async fn false_leader_hides_no_revocation_by_the_lists_that_it_reports() -> TestResult {
    let cluster = Cluster::start_with(three()).await?;
    let leader = cluster.until_one_leads(None).await?;
    let (stolen, other) = ((leader + 1) % 3, (leader + 2) % 3);
    let first = until_stated(&cluster, leader, 1).await?;
    until_stated(&cluster, other, 1).await?;
    let node = &cluster.nodes[stolen];
    let thief = impersonate(&cluster, stolen, 0, &first).await?;
    let trust = trust_of(&cluster);
    let follower = Follower::start(&trust, std::slice::from_ref(&thief.address));
    follower.until_it_follows(&thief.address).await?;

    let honest: Vec<String> =
        [leader, other].map(|number| cluster.address(number)).into_iter().collect::<Result<_>>()?;
    let with_thief = |others: Vec<String>| [vec![thief.address.clone()], others].concat();
    follower.tracker.set_directory(with_thief(honest.clone()));
    until("the honest curators have proved themselves", async || {
        let proved = trust.curators().addresses();
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

    revoke_through_leader(&cluster, node).await?;
    until_stated(&cluster, other, first.statement.number + 1).await?;
    // A new address is requested at once, and all others with it: the test need not wait for the next minute.
    follower.tracker.set_directory(with_thief(vec!["127.9.99.1:1".to_owned()]));
    follower.until_refusal("are revoked").await?;
    let is_followed = || follower.leader().is_some_and(|leader| leader.node == node.id);
    until("the thief is not followed", async || Ok(!is_followed())).await?;
    Ok(())
}

/// A node that was out of contact for longer than a curator's certificate lives.
#[tokio::test]
async fn stale_statement_follows_nobody_until_a_newer_one() -> TestResult {
    let mut cluster = Cluster::start().await?;
    let first = until_stated(&cluster, 0, 1).await?;
    let trust = trust_of(&cluster);
    assert!(trust.offer(&first.to_wire(), 0).await?);
    cluster.stop(0).await?;
    let lasting = week_long_certificate(&cluster, &cluster.nodes[0])?;
    cluster.time.pass(25 * 3_600);
    // A curator that was not replaced meanwhile, with the statement of a day ago.
    let claims = FalseClaims {
        node: cluster.nodes[0].id,
        epoch: 0,
        statement: Some((first.to_wire(), first.statement.number)),
    };
    let late = FalseCurator::start(cluster.nodes[0].with(&lasting)?, claims).await?;
    let follower = Follower::start(&trust, std::slice::from_ref(&late.address));
    follower.until_refusal("older than a day: no curator is followed until one sends a newer one").await?;
    until("it was tried again", async || Ok(late.statements() > 2)).await?;
    assert_eq!((follower.leader(), late.watches()), (None, 0));

    // The leader signs another one as soon as it leads.
    cluster.run_with(0, lasting).await?;
    let address = cluster.address(0)?;
    follower.tracker.set_directory([address.clone()]);
    follower.until_it_follows(&address).await?;
    let newest = trust.current().context("no statement")?.statement.order();
    assert!(newest > first.statement.order(), "{newest:?}");
    assert_eq!(follower.tracker.refusal().borrow().clone(), None);
    Ok(())
}

/// Three curators, and the membership of a revoked one does not end meanwhile.
fn three_that_stay() -> ClusterOptions {
    ClusterOptions { sync_interval: Duration::from_hours(1), ..three() }
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

#[tokio::test]
async fn last_curator_is_not_revoked() -> TestResult {
    let cluster = Cluster::start_with(three_that_stay()).await?;
    let leader = cluster.until_one_leads(None).await?;
    let client = cluster.client_of(leader);
    until("all are connected", async || Ok(client.connected_peers().await?.len() == 2)).await?;
    let (last, others) = (&cluster.nodes[leader], [(leader + 1) % 3, (leader + 2) % 3]);
    for other in others {
        revoke(owner_at(&cluster, leader)?, &cluster.nodes[other]).await?;
    }
    let refused = revoke(owner_at(&cluster, leader)?, last).await.err().context("it was revoked")?;
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains("Add a consensus member"), "{refused}");
    // To repeat a revocation is no error, and the last curator leads on.
    revoke(owner_at(&cluster, leader)?, &cluster.nodes[others[0]]).await?;
    waits_for(&cluster, leader).await?;
    Ok(())
}

/// A revoked member still votes. But its curator leads no more, and nobody could ever change that again.
#[tokio::test]
async fn last_curator_is_not_removed() -> TestResult {
    let cluster = Cluster::start_with(three_that_stay()).await?;
    let leader = cluster.until_one_leads(None).await?;
    let client = cluster.client_of(leader);
    until("all are connected", async || Ok(client.connected_peers().await?.len() == 2)).await?;
    for other in [(leader + 1) % 3, (leader + 2) % 3] {
        revoke(owner_at(&cluster, leader)?, &cluster.nodes[other]).await?;
    }
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
    assert_eq!(client.list_members().await?.len(), 3, "a member was removed");
    Ok(())
}

/// Without this, nobody would know of it until nodes follow no curator, a day later.
#[tokio::test]
async fn record_that_cannot_be_read_is_reported_at_once() -> TestResult {
    let cluster = Cluster::start().await?;
    until_stated(&cluster, 0, 1).await?;
    assert_eq!(cluster.statements.problem(), None);
    let (client, key) = (cluster.client_of(0), statement_record_key()?);
    let whole = client.get(&key).await?.context("no record")?.value;
    // Damaged, and of a format that a later release may have (field 1).
    for (record, reason) in [(&[0xff][..], "cannot be read"), (&[0x08, 99][..], "format 99")] {
        client.put_unguarded(&key, record).await?;
        until(reason, async || {
            let problem = cluster.statements.problem().unwrap_or_default();
            Ok(problem.contains(reason) && problem.contains("signs no statement"))
        })
        .await?;
    }
    client.put_unguarded(&key, &whole).await?;
    until("nothing is reported any more", async || Ok(cluster.statements.problem().is_none())).await?;
    Ok(())
}
