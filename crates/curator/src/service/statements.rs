//! The statement of the cluster's authority: every curator serves it, and the leader signs it.
//!
//! [`StatementCache`] follows the record in the curator's own etcd, in either role. The leader compares the record with
//! the cluster at each tick, and at once after a revocation. What must be done is decided in `statement_plan`. Every
//! write depends on the leader's lock and on the revision of the record, so a leader that was frozen writes nothing.
//!
//! Before there is a statement, the leader dials the curators of all consensus members, its own included. One that
//! shows no curator's certificate, or does not know the call, runs a release before statements, or its role server has
//! not obtained its certificate yet.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use curator_client::certificate::Serial;
use curator_client::curator_channel::open_channel;
use curator_client::node::Node;
use curator_client::node_id::NodeId;
use curator_client::peer_identity::Revocations;
use curator_client::statement::SignedStatement;
use curator_client::tls::{CuratorCheck, CuratorCheckProvider, authorities_client_config};
use etcd::client::Client;
use etcd::key_watcher::{KeyEvent, KeyWatcher};
use etcd::namespace::KeySelector;
use etcd::record::RecordError;
use model::time::Timestamp;
use prost::Message as _;
use proto::curator::v1 as wire;
use proto::curator::v1::leader_client::LeaderClient;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use tonic::Code;
use tonic::transport::Channel;

use crate::credential::{CertificateKind, Credential, CredentialHolder, Revocation};
use crate::membership::{Nodes, plan_sync};
use crate::service::error::ServiceError;
use crate::service::leader_context::LeaderContext;
use crate::service::statement_monitor::{StatementMonitor, WithdrawnAtEnd};
use crate::service::store::record_change;
use crate::statement_plan::{
    StatementInputs, StatementStep, may_be_valid, plan_statement, remaining_wait, revoked_curators,
};
use crate::statement_record::{decode_statement, encode_statement, statement_record_key};

/// How long a curator may take to show that it knows statements.
pub(super) const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// The newest statement in this curator's etcd.
#[derive(Clone, Debug)]
pub(super) struct CachedStatement {
    /// Number of the statement.
    pub(super) number: u64,
    /// The statement as it was signed.
    pub(super) signed: wire::SignedStatement,
}

/// The newest statement that this curator has received from its etcd.
#[derive(Debug)]
pub(super) struct StatementCache {
    sender: watch::Sender<Option<Arc<CachedStatement>>>,
    /// Whether the record, or that there is none, has been read.
    is_read: watch::Sender<bool>,
}

impl StatementCache {
    /// An empty cache; [`StatementCache::watch_etcd`] fills it.
    #[must_use]
    pub(super) fn new() -> Self {
        Self { sender: watch::Sender::new(None), is_read: watch::Sender::new(false) }
    }

    /// The newest statement; `None` if the cluster has none.
    #[must_use]
    pub(super) fn current(&self) -> Option<Arc<CachedStatement>> {
        self.sender.borrow().clone()
    }

    /// The newest statement and its changes.
    #[must_use]
    pub(super) fn subscribe(&self) -> watch::Receiver<Option<Arc<CachedStatement>>> {
        self.sender.subscribe()
    }

    /// Waits until the record, or that there is none, has been read.
    pub(super) async fn wait_until_read(&self) {
        let mut is_read = self.is_read.subscribe();
        // The sender is a part of this cache, so the wait ends only with the value.
        let _ = is_read.wait_for(|is_read| *is_read).await;
    }

    /// Follows the record in etcd, until the future is dropped.
    pub(super) async fn watch_etcd(&self, client: &Client) -> Infallible {
        let key = match statement_record_key() {
            Ok(key) => key,
            Err(error) => {
                tracing::error!(%error, "the statement of the cluster cannot be read");
                return std::future::pending().await;
            }
        };
        let mut record = KeyWatcher::new(client, KeySelector::One(key), decode_cached);
        loop {
            match record.next_event().await {
                Ok(KeyEvent::Put { value, .. }) => {
                    self.sender.send_replace(Some(Arc::new(value)));
                }
                Ok(KeyEvent::Deleted { .. }) => {
                    self.sender.send_replace(None);
                }
                Ok(KeyEvent::BacklogDone) => {
                    self.is_read.send_replace(true);
                }
                Err(error) => {
                    tracing::error!(%error, "the statement of the cluster cannot be read; the former one is served");
                }
            }
        }
    }
}

fn decode_cached(key: &str, value: &[u8]) -> Result<CachedStatement, RecordError> {
    let signed = decode_statement(key, value)?;
    let statement = wire::Statement::decode(signed.statement.as_slice())
        .map_err(|error| RecordError::new(key, error.to_string()))?;
    Ok(CachedStatement { number: statement.number, signed })
}

impl LeaderContext {
    /// Keeps the statement right and fresh, for as long as this curator leads.
    ///
    /// `first_wait`: how long every curator must have been ready before the first statement. `monitor` gets what a person
    /// has to repair.
    pub(super) async fn keep_statements(
        &self,
        interval: Duration,
        first_wait: Duration,
        monitor: &StatementMonitor,
    ) -> Infallible {
        let _withdrawn = WithdrawnAtEnd(monitor);
        let mut tick = tokio::time::interval(interval);
        let mut ready_since = None;
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut distrust = self.cache.subscribe_trust_changes();
        loop {
            let by_tick = tokio::select! {
                _ = tick.tick() => true,
                changed = distrust.changed() => {
                    // Unreachable while `self` lives.
                    if changed.is_err() {
                        std::future::pending::<()>().await;
                    }
                    false
                }
            };
            // First, so that the statement of the next stage follows at once.
            Box::pin(self.continue_replacement()).await;
            // What was just revoked may be newer than what was read at the last tick.
            let certificates = if by_tick { self.curator_certificates.take() } else { None };
            let kept = async {
                let Some(ready) = self.find_ready_curators().await? else { return Ok(None) };
                let now = self.clock.monotonic();
                ready_since = ready.values().all(|ready| *ready).then(|| ready_since.unwrap_or(now));
                let first_in = remaining_wait(ready_since, now, first_wait);
                self.keep_statement(&ready, first_in, certificates).await.map(Some)
            };
            match Box::pin(kept).await {
                Ok(Some(step)) => {
                    monitor.set(None);
                    self.report_step(&step);
                }
                Ok(None) => {
                    tracing::debug!("the first statement waits until etcd's members and records agree");
                }
                Err(error) => {
                    tracing::warn!(%error, "the statement of the cluster was not brought up to date");
                    // A call to etcd that failed says nothing about a problem that is known.
                    if let Some(problem) = lasting_problem(&error) {
                        monitor.set(Some(problem));
                    }
                }
            }
        }
    }

    /// Compares the stored statement with the cluster, and signs and stores another one if that is due.
    ///
    /// `ready`: each consensus member, and whether its curator knows statements. Only the first statement needs it, and
    /// waits for `first_in`. `certificates`: those of curators, if they were read before.
    async fn keep_statement(
        &self,
        ready: &BTreeMap<NodeId, bool>,
        first_in: Duration,
        certificates: Option<Vec<Credential>>,
    ) -> Result<StatementStep, ServiceError> {
        let stored = self.store.statement().await?;
        let ring = self.authority_ring();
        let (authorities, signers) = (ring.trusted(), ring.signers());
        let current =
            stored.as_ref().map(|stored| SignedStatement::verify(&stored.value, &signers)).transpose()?;
        let revoked = self.read_revoked_curators(certificates).await?;
        let inputs = StatementInputs {
            cluster: self.cluster.id,
            epoch: self.cluster.epoch,
            authorities: &authorities,
            revoked: &revoked,
            curators_ready: ready,
            first_in,
        };
        let step =
            plan_statement(current.as_ref().map(|current| &current.statement), &inputs, self.clock.now());
        if let StatementStep::Sign(statement) = &step {
            let signed = statement.sign(&ring.signer)?.with_successors(ring.successors.clone());
            let record = encode_statement(&signed.to_wire());
            self.store.write(&[record_change(statement_record_key()?, record, stored.as_ref())]).await?;
        }
        Ok(step)
    }

    /// The certificates of curators that nodes must reject, with the end of each.
    async fn read_revoked_curators(
        &self,
        certificates: Option<Vec<Credential>>,
    ) -> Result<BTreeMap<Serial, Timestamp>, ServiceError> {
        let now = self.clock.now();
        // Credentials first, as `revoked_curators` requires. Few nodes have a curator's certificate, so only the records
        // of these are read.
        let credentials = if let Some(passed) = certificates {
            passed
        } else {
            let (credentials, revision) = self.store.credentials_at().await?;
            self.curator_certificates.record_use(revision);
            credentials
        };
        let credentials: Vec<Credential> = credentials
            .into_iter()
            .filter(|one| one.kind == CertificateKind::Curator && may_be_valid(one.validity, now))
            .collect();
        let holders: BTreeSet<NodeId> = credentials
            .iter()
            .filter_map(|one| match one.holder {
                CredentialHolder::Node(id) => Some(id),
                CredentialHolder::Owner(_) => None,
            })
            .collect();
        let (mut nodes, mut revocations) = (Nodes::new(), Revocations::default());
        for id in holders {
            if let Some(stored) = self.store.node(&id).await? {
                nodes.insert(id, stored.value);
            }
            if self.store.is_node_revoked(id).await? {
                revocations.nodes.insert(id);
            }
        }
        for stored in self.store.revoked_certificates().await? {
            if let Revocation::Certificate(serial, end) = stored.value {
                revocations.serials.insert(serial, end);
            }
        }
        Ok(revoked_curators(&credentials, &nodes, &revocations, now))
    }

    /// Each consensus member, and whether its curator knows statements. Empty if the cluster has a statement, because
    /// nobody is waited for then. `None` while etcd's members and the records differ: a member could be missing.
    async fn find_ready_curators(&self) -> Result<Option<BTreeMap<NodeId, bool>>, ServiceError> {
        if self.store.statement().await?.is_some() {
            return Ok(Some(BTreeMap::new()));
        }
        let members = self.list_members().await?;
        let nodes = self.store.nodes().await?.nodes;
        let difference = plan_sync(self.node_id, &members, &nodes, &BTreeSet::new())
            .map_err(|abort| ServiceError::rejected(Code::Unavailable, abort.to_string()))?;
        if difference.action.is_some() {
            return Ok(None);
        }
        Ok(Some(self.probe_curators(&nodes).await))
    }

    /// Dials the curators of all consensus members.
    async fn probe_curators(&self, nodes: &Nodes) -> BTreeMap<NodeId, bool> {
        let members = nodes.values().filter(|node| node.roles.consensus_member.is_some());
        let probes = members.map(|node| async move { (node.id, self.probe_curator(node).await) });
        let outcomes = futures::future::join_all(probes).await;
        let ready = outcomes.into_iter().map(|(node, outcome)| {
            if let Err(reason) = &outcome {
                tracing::debug!(%node, reason, "the first statement waits for this curator");
            }
            (node, outcome.is_ok())
        });
        ready.collect()
    }

    /// Checks that the curator of a node shows a curator's certificate and knows statements; the error is a sentence.
    async fn probe_curator(&self, node: &Node) -> Result<(), String> {
        let anchors = self.authority_ring().trusted();
        let check = CuratorCheck::Curator { anchors, revocations: Arc::default() };
        let mut client = self.dial_curator(node, check)?;
        let answer = client.get_statement(wire::GetStatementRequest {});
        match tokio::time::timeout(PROBE_TIMEOUT, answer).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(status)) if status.code() == Code::NotFound => Ok(()),
            Ok(Err(status)) => Err(error_chain(&status)),
            Err(_) => Err(format!("it did not answer within {} s", PROBE_TIMEOUT.as_secs())),
        }
    }

    /// A client of the curator of a node, which must pass this check; the error is a sentence.
    pub(super) fn dial_curator(
        &self,
        node: &Node,
        check: CuratorCheck,
    ) -> Result<LeaderClient<Channel>, String> {
        let reported = node.status.as_ref();
        let address = reported.and_then(|status| Some(SocketAddr::new(status.address, status.curator_port?)));
        let address = address.ok_or("it has not reported where its curator listens")?;
        let anchors = self.authority_ring().trusted();
        let provider: CuratorCheckProvider = Arc::new(move || Ok(check.clone()));
        let config = authorities_client_config(anchors, provider, Some(node.id), None, self.clock.clone())
            .map_err(|error| error.to_string())?;
        Ok(LeaderClient::new(open_channel(&address.to_string(), config)))
    }

    /// The nodes of the curators that the first statement waits for.
    pub(super) fn statement_waits_for(&self) -> BTreeSet<NodeId> {
        self.statement_waits.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Remembers and logs what a step did. The log names the curators that are waited for when these change.
    fn report_step(&self, step: &StatementStep) {
        let waits_for = match step {
            StatementStep::WaitFor(nodes) => nodes.clone(),
            StatementStep::Keep | StatementStep::WaitForRollBack | StatementStep::Sign(_) => BTreeSet::new(),
        };
        match step {
            StatementStep::Keep => {}
            StatementStep::WaitForRollBack => tracing::debug!(
                "the first statement waits until the update to it is not rolled back any more"
            ),
            StatementStep::Sign(statement) => tracing::info!(
                epoch = statement.epoch,
                number = statement.number,
                revoked = statement.revoked.len(),
                "the authority of the cluster made a statement"
            ),
            StatementStep::WaitFor(_) if waits_for == self.statement_waits_for() => {}
            StatementStep::WaitFor(_) => {
                let names: Vec<String> = waits_for.iter().map(ToString::to_string).collect();
                tracing::info!(
                    nodes = names.join(", "),
                    "the first statement of the cluster waits for the curators of these nodes: each must run a release \
                     that has curators' certificates"
                );
            }
        }
        *self.statement_waits.lock().unwrap_or_else(PoisonError::into_inner) = waits_for;
    }
}

/// The problem that a person has to solve, as a sentence; `None` if the next attempt may succeed.
fn lasting_problem(error: &ServiceError) -> Option<String> {
    let lasts = matches!(
        error,
        ServiceError::Record(_)
            | ServiceError::InvalidRecord(_)
            | ServiceError::Statement(_)
            | ServiceError::Pki(_)
            | ServiceError::Key(_)
    );
    lasts.then(|| {
        format!(
            "the leading curator signs no statement of the cluster, so nodes follow no curator a day after the last one: \
             {error}. If a newer release wrote the record, update the consensus members to that release; otherwise \
             restore the cluster from a snapshot of before"
        )
    })
}

/// The error with its causes.
fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        // Writing to a string does not fail.
        let _ = write!(text, ": {next}");
        cause = next.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use curator_client::statement::StatementError;

    use super::*;

    #[test]
    fn cached_statement_has_its_number() {
        let encoded = wire::Statement { number: 7, ..Default::default() }.encode_to_vec();
        let signed = wire::SignedStatement { statement: encoded, ..Default::default() };
        let key = statement_record_key().unwrap();
        let cached = decode_cached(&key, &encode_statement(&signed)).unwrap();
        assert_eq!((cached.number, cached.signed), (7, signed));
        let broken = wire::SignedStatement { statement: vec![0xff], ..Default::default() };
        assert!(decode_cached(&key, &encode_statement(&broken)).is_err());
    }

    #[test]
    fn only_what_lasts_is_a_problem() {
        let damaged = RecordError::new("/statement", "it has no statement");
        let problem = lasting_problem(&damaged.into()).unwrap();
        assert!(problem.contains("/statement") && problem.contains("restore the cluster"), "{problem}");
        assert!(lasting_problem(&StatementError::BadSignature.into()).is_some());
        let passing = ServiceError::rejected(Code::Unavailable, "etcd does not answer");
        assert_eq!(lasting_problem(&passing), None);
    }
}
