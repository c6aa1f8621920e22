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
use proto::curator::v1::leader_client::LeaderClient;
use proto::curator::v1::management_client::ManagementClient;
use shepherd_curator::statement_record::statement_record_key;
use tokio::task::JoinSet;
use tonic::Code;
use tonic::transport::Channel;

use testkit::aloud::TestResult;
use testkit::curators::{Cluster, ClusterOptions, certificate};
use testkit::etcd_servers::{in_time, until};
use testkit::key_holder::Holder;

use crate::false_curator::{FalseClaims, FalseCurator};

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
pub(super) fn owner_at(cluster: &Cluster, number: usize) -> Result<Channel> {
    let validity = Validity::starting(cluster.time.now(), Duration::from_hours(1));
    let issued = cluster.authority.issue_owner_certificate(
        "kim",
        &cluster.owner.key,
        Serial::new(rand::random()),
        validity,
    )?;
    cluster.channel(number, Some(cluster.owner.with(&issued.certificate)?))
}

/// A false curator with the key and the certificate of this one. It serves a true statement, and claims an epoch.
pub(super) async fn impersonate(
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
pub(super) async fn waits_for(cluster: &Cluster, leader: usize) -> Result<Vec<String>> {
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
