//! What statements of the cluster's authority change for the tracker: the epoch, open connections, further requests.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use model::cluster::restore::MAX_EPOCH_LEAD;
use model::time::Timestamp;
use proto::curator::v1 as wire;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::curator_authentication::{FetchError, may_have_newer};
use crate::known_epoch::{EpochChange, KnownEpoch};
use crate::leader_channel::follow_error::FollowError;
use crate::leader_channel::rounds::{NextRequest, ROUND_INTERVAL, RoundSchedule, round_delay};
use crate::leader_channel::{CurrentEpoch, LeaderTracker};
use crate::node_id::NodeId;
use crate::pki::TrustAnchor;
use crate::proved_curators::ProvedAddresses;
use crate::statement::SignedStatement;
use crate::statement_trust::StatementTrust;

/// How often the statement is checked by the clock.
const CHECK_INTERVAL: Duration = Duration::from_mins(1);

impl LeaderTracker {
    /// Whether the authority's statements decide about curators and epochs.
    pub(super) fn has_statement(&self) -> bool {
        self.0.authentication.trust().is_some_and(StatementTrust::decides)
    }

    /// When the statement was signed by which the open connections were checked; `None` if there is none.
    #[must_use]
    pub fn statement_time(&self) -> Option<Timestamp> {
        let enforced = self.0.enforced.lock().unwrap_or_else(PoisonError::into_inner);
        enforced.as_ref().map(|enforced| enforced.statement.issued_at)
    }

    /// The authority that is trusted without a statement; `None` if the caller's configuration decides alone.
    #[must_use]
    pub fn anchor(&self) -> Option<TrustAnchor> {
        self.0.authentication.trust().map(StatementTrust::anchor)
    }

    /// Trusts another authority from now on, with its statement and its epoch, and cuts off all open connections.
    /// Nothing that was trusted before counts. The caller has stored them. The epoch may be lower: a higher one may be
    /// that of a thief who stated it with the former authority.
    pub fn adopt_authority(&self, anchor: TrustAnchor, statement: Option<SignedStatement>, epoch: u64) {
        let Some(trust) = self.0.authentication.trust() else { return };
        trust.adopt(anchor, statement);
        *self.0.enforced.lock().unwrap_or_else(PoisonError::into_inner) = trust.current();
        self.0.epoch.send_modify(|known| {
            known.superseded.cancel();
            *known = CurrentEpoch::new(KnownEpoch::proved(epoch));
        });
        self.0.cuts.send_modify(|count| *count += 1);
    }

    /// Opens all connections again, because this side shows another certificate now.
    pub fn reconnect(&self) {
        self.cut_connections();
    }

    /// Believes the epoch that a curator reports, or requests the statement that proves it.
    pub(super) async fn adopt_epoch(
        &self,
        response: &wire::WatchLeaderResponse,
        candidate: &str,
    ) -> Result<(), FollowError> {
        if let Some(trust) = self.0.authentication.trust() {
            let current = trust.current().map(|current| current.statement.order());
            if may_have_newer(current, response) && self.refresh_statement(candidate).await? {
                return Err(FollowError::StatementChanged);
            }
        }
        let highest = self.highest_epoch();
        if self.has_statement() {
            return if response.epoch > highest {
                Err(FollowError::UnprovedEpoch { received: response.epoch, highest })
            } else {
                Ok(())
            };
        }
        if response.epoch.saturating_sub(highest) > MAX_EPOCH_LEAD {
            return Err(FollowError::InvalidResponse(format!(
                "epoch {} is too far beyond {highest}, the highest known one",
                response.epoch
            )));
        }
        self.change_epoch(EpochChange::Reported(response.epoch)).map_err(FollowError::EpochNotPersisted)
    }

    /// Requests all other curators than the followed one for newer statements, and cuts off the open connections when the
    /// newest one permits them no more. Nothing that the followed curator does ends or delays this.
    pub(super) async fn watch_statements(&self) -> Infallible {
        let Some(trust) = self.0.authentication.trust() else { return std::future::pending().await };
        let mut accepted = trust.subscribe();
        // On the heap, as in `request_statement`.
        let mut rounds = Box::pin(self.request_from_others());
        loop {
            // A newer statement counts at once, also while slow addresses are requested.
            tokio::select! {
                never = &mut rounds => match never {},
                _ = timeout(CHECK_INTERVAL, accepted.changed()) => {}
            }
            if let Err(error) = self.enforce_statement().and_then(|_| self.check_statement()) {
                tracing::debug!(%error, "no curator is followed, and open connections are cut off");
                self.cut_connections();
            }
        }
    }

    /// Fails while the statement permits to follow nobody: it is stale, or cannot be read.
    pub(super) fn check_statement(&self) -> Result<(), FollowError> {
        let Some(trust) = self.0.authentication.trust() else { return Ok(()) };
        trust.curator_check().map(drop).map_err(FollowError::Statement)
    }

    /// Requests statements from all other curators, when their round is due ([`rounds`](super::rounds)).
    async fn request_from_others(&self) -> Infallible {
        let mut changes = self.0.address_changes.subscribe();
        let mut follows = self.0.followed.subscribe();
        loop {
            let (followed, proved, now) = (self.followed(), self.proved_addresses(), Instant::now());
            let others = self.0.addresses().others(followed.as_deref(), &proved);
            let next = self.rounds().next_request(&others, now);
            match next {
                NextRequest::At(start) => tokio::select! {
                    () = sleep_until(start) => {}
                    // This has the senders, so errors are not possible.
                    changed = changes.changed() => if changed.is_err() { std::future::pending::<()>().await },
                    changed = follows.changed() => if changed.is_err() { std::future::pending::<()>().await },
                },
                NextRequest::New(new) => {
                    for (address, node) in self.request_all(&new).await {
                        if let Some(proved) = self.proved_curators() {
                            proved.record_answer(&address, node);
                        }
                    }
                    self.rounds().record_requested(new);
                }
                NextRequest::Round => {
                    let answers = self.request_all(&others).await;
                    if let Some(proved) = self.proved_curators() {
                        proved.record_round(&others, answers);
                    }
                    // What is followed at the end was requested when that began.
                    let requested = others.into_iter().chain(followed).chain(self.followed()).collect();
                    let next = now + ROUND_INTERVAL + self.draw_round_delay();
                    self.rounds().complete_round(requested, now, next);
                }
            }
        }
    }

    /// Remembers the address of the followed curator, or `None`. The caller has requested its statement just before. The
    /// others are requested soon.
    pub(super) fn set_followed(&self, address: Option<&str>) {
        if let Some(address) = address {
            let latest = Instant::now() + self.draw_round_delay();
            let mut rounds = self.rounds();
            rounds.record_requested([address.to_owned()]);
            rounds.bring_forward(latest);
        }
        self.0.followed.send_if_modified(|followed| {
            let is_other = followed.as_deref() != address;
            *followed = address.map(str::to_owned);
            is_other
        });
    }

    fn followed(&self) -> Option<String> {
        self.0.followed.borrow().clone()
    }

    fn rounds(&self) -> MutexGuard<'_, RoundSchedule> {
        self.0.rounds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long a round is put off now. A published refusal is why this side waits for a newer statement.
    fn draw_round_delay(&self) -> Duration {
        let has_none = self.0.authentication.trust().is_none_or(|trust| trust.current().is_none());
        round_delay(has_none || self.0.refusal.borrow().is_some(), (self.0.random_part)())
    }

    /// Requests statements from all of these at once. Returns which of them have proved to be curators. Their number is
    /// bounded by what the tracker remembers.
    async fn request_all(&self, addresses: &BTreeSet<String>) -> ProvedAddresses {
        let mut requests = JoinSet::new();
        for address in addresses.iter().cloned() {
            let tracker = self.clone();
            requests.spawn(async move { (tracker.request_statement(&address).await, address) });
        }
        let mut answers = ProvedAddresses::new();
        while let Some(ended) = requests.join_next().await {
            match ended {
                Ok((Ok(Some(node)), address)) => {
                    answers.insert(address, node);
                }
                Ok((Ok(None), _)) | Err(_) => {}
                Ok((Err(error), address)) => {
                    tracing::debug!(curator = address, %error, "another curator gave no statement");
                }
            }
        }
        answers
    }

    /// Requests the newest statement from a curator. Returns whether it ended the open connections.
    pub(super) async fn refresh_statement(&self, address: &str) -> Result<bool, FollowError> {
        if let Some(trust) = self.0.authentication.trust() {
            trust.load().map_err(FollowError::Statement)?;
        }
        let node = self.request_statement(address).await?;
        if let (Some(node), Some(proved)) = (node, self.proved_curators()) {
            proved.record_answer(address, node);
        }
        self.enforce_statement()
    }

    async fn request_statement(&self, address: &str) -> Result<Option<NodeId>, FetchError> {
        // On the heap, because every task that follows a leader contains this one in several places.
        Box::pin(self.0.authentication.fetch_statement(address, self.known_epoch().proved)).await
    }

    /// Follows the newest statement: adopts its epoch, and cuts off what was checked by one that permitted more. Returns
    /// whether it did the latter.
    fn enforce_statement(&self) -> Result<bool, FollowError> {
        let Some(current) = self.0.authentication.trust().and_then(StatementTrust::current) else {
            return Ok(false);
        };
        let stated = EpochChange::Stated(current.statement.epoch);
        self.change_epoch(stated).map_err(FollowError::EpochNotPersisted)?;
        let mut enforced = self.0.enforced.lock().unwrap_or_else(PoisonError::into_inner);
        let before = enforced.as_deref().map(|enforced| &enforced.statement);
        // Another task may have enforced a higher one meanwhile.
        if before.is_some_and(|before| before.order() >= current.statement.order()) {
            return Ok(false);
        }
        let ends = current.statement.ends_connections_of(before);
        *enforced = Some(current);
        drop(enforced);
        if ends {
            self.cut_connections();
        }
        Ok(ends)
    }

    fn cut_connections(&self) {
        self.0.epoch.send_modify(|epoch| {
            epoch.superseded.cancel();
            epoch.superseded = CancellationToken::new();
        });
        self.0.cuts.send_modify(|count| *count += 1);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tokio::net::TcpListener;

    use super::*;
    use crate::clock::Clock;
    use crate::curator_authentication::CuratorAuthentication;
    use crate::leader_channel::PersistEpoch;
    use crate::leader_channel::rounds::ROUND_SPREAD;
    use crate::statement::Statement;
    use crate::statement_trust::persist_by;
    use crate::testing::{at, authority, authority_of, serial, statement};

    #[tokio::test]
    async fn statement_raises_the_epoch_and_cuts_off_what_it_permits_no_more() {
        let clock = Clock::new(|| at(0), || Duration::ZERO);
        let trust = StatementTrust::in_memory(authority(1).anchor().clone(), clock);
        let stored = Arc::new(Mutex::new(Vec::new()));
        let epochs = stored.clone();
        let persist: PersistEpoch = Arc::new(move |change| {
            epochs.lock().unwrap().push(change.epoch());
            Ok(())
        });
        let tracker =
            LeaderTracker::with_statements(trust.clone(), Arc::new(|| None), KnownEpoch::default(), persist);
        assert!(!tracker.enforce_statement().unwrap() && !tracker.has_statement());
        let revoking_nothing = |epoch, number| Statement {
            revoked: std::collections::BTreeMap::default(),
            ..statement(epoch, number)
        };
        for (offered, cut, epoch, why) in [
            (revoking_nothing(0, 1), true, 0, "any node could lead before the first one"),
            (revoking_nothing(0, 2), false, 0, "nothing but the number changed"),
            (statement(0, 3), true, 0, "it revokes certificates"),
            (statement(0, 4), false, 0, "it revokes the same ones"),
            (statement(2, 1), true, 2, "the cluster was restored"),
        ] {
            let before = tracker.0.epoch.borrow().superseded.clone();
            let signed = offered.sign(&authority(1)).unwrap();
            assert!(trust.offer(&signed.to_wire(), tracker.highest_epoch()).await.unwrap(), "{why}");
            assert_eq!(tracker.enforce_statement().unwrap(), cut, "{why}");
            assert_eq!(before.is_cancelled(), cut, "{why}");
            assert!(!tracker.0.epoch.borrow().superseded.is_cancelled(), "{why}");
            assert_eq!(tracker.highest_epoch(), epoch, "{why}");
            assert!(!tracker.enforce_statement().unwrap(), "it is enforced once: {why}");
        }
        assert_eq!(*stored.lock().unwrap(), [2], "it is stored before it counts");
    }

    /// Before the first statement, any node could let this one believe any epoch.
    #[tokio::test]
    async fn first_statement_lowers_an_epoch_that_nothing_proves() {
        for (ordered, stated, expected) in [(0, 0, 0), (0, 3, 3), (2, 2, 2), (2, 5, 5)] {
            let clock = Clock::new(|| at(0), || Duration::ZERO);
            let trust = StatementTrust::in_memory(authority(1).anchor().clone(), clock);
            let known = KnownEpoch { highest: 900, proved: ordered };
            let tracker =
                LeaderTracker::with_statements(trust.clone(), Arc::new(|| None), known, Arc::new(|_| Ok(())));
            let before = tracker.0.epoch.borrow().superseded.clone();
            let signed = statement(stated, 1).sign(&authority(1)).unwrap();
            assert!(trust.offer(&signed.to_wire(), tracker.known_epoch().proved).await.unwrap());
            assert!(tracker.enforce_statement().unwrap() && before.is_cancelled());
            let known = tracker.known_epoch();
            assert_eq!(known, KnownEpoch::proved(expected), "the statement leaves what nothing proves");
            // What another task has believed meanwhile ends, too.
            tracker.change_epoch(EpochChange::Reported(901)).unwrap();
            tracker.enforce_statement().unwrap();
            assert_eq!(tracker.known_epoch(), KnownEpoch::proved(expected));
        }
    }

    #[tokio::test]
    async fn authority_after_a_theft_cuts_off_everything_and_lowers_the_epoch_of_the_thief() {
        let clock = Clock::new(|| at(0), || Duration::ZERO);
        let trust = StatementTrust::in_memory(authority(1).anchor().clone(), clock);
        let tracker = LeaderTracker::with_statements(
            trust.clone(),
            Arc::new(|| None),
            KnownEpoch::proved(2),
            Arc::new(|_| Ok(())),
        );
        let by_thief = statement(700, 9).sign(&authority(1)).unwrap().to_wire();
        assert!(trust.offer(&by_thief, tracker.highest_epoch()).await.unwrap());
        assert!(tracker.enforce_statement().unwrap());
        assert_eq!(tracker.highest_epoch(), 700);
        let heir = authority_of(1, 5);
        let stated = Statement { authorities: vec![heir.anchor().clone()], ..statement(2, 1) };
        let before = tracker.0.epoch.borrow().superseded.clone();
        tracker.adopt_authority(heir.anchor().clone(), Some(stated.sign(&heir).unwrap()), 2);
        assert_eq!((tracker.highest_epoch(), tracker.anchor()), (2, Some(heir.anchor().clone())));
        assert!(before.is_cancelled() && !tracker.0.epoch.borrow().superseded.is_cancelled());
        assert!(!tracker.enforce_statement().unwrap(), "it is enforced already");
        let next = Statement { number: 2, revoked: [(serial(7), at(60))].into(), ..stated };
        assert!(trust.offer(&next.sign(&heir).unwrap().to_wire(), 2).await.unwrap());
        assert!(tracker.enforce_statement().unwrap(), "the next one revokes");
    }

    #[test]
    fn stored_statement_cuts_nothing_off_at_the_start() {
        let clock = Clock::new(|| at(0), || Duration::ZERO);
        let signed = statement(3, 1).sign(&authority(1)).unwrap();
        let anchor = authority(1).anchor().clone();
        let trust = StatementTrust::new(anchor, Some(signed), persist_by(|_| Ok(())), clock);
        let known = KnownEpoch::default();
        let tracker = LeaderTracker::with_statements(trust, Arc::new(|| None), known, Arc::new(|_| Ok(())));
        assert!(!tracker.enforce_statement().unwrap() && tracker.has_statement());
        assert_eq!(tracker.highest_epoch(), 3, "a node that was interrupted before it stored the epoch");
    }

    const PATIENCE: Duration = Duration::from_mins(1);

    /// A server that ends each connection, with its address.
    async fn refusing_curator() -> (TcpListener, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        (listener, address)
    }

    /// Requests statements until `end`, and ends each connection to this curator. Returns how many there were.
    async fn request_until(tracker: &LeaderTracker, curator: &TcpListener, end: impl Fn() -> bool) -> usize {
        let mut connections = 0;
        let requesting = async {
            let mut requests = Box::pin(tracker.watch_statements());
            while !end() {
                tokio::select! {
                    biased;
                    never = &mut requests => match never {},
                    accepted = curator.accept() => {
                        drop(accepted.unwrap());
                        connections += 1;
                    }
                    () = tokio::task::yield_now() => {}
                }
            }
        };
        timeout(PATIENCE, requesting).await.unwrap();
        connections
    }

    /// A tracker with a statement, for which half of each random time passes.
    async fn tracker_with_statement() -> LeaderTracker {
        let clock = Clock::new(|| at(0), || Duration::ZERO);
        let trust = StatementTrust::in_memory(authority(1).anchor().clone(), clock);
        assert!(trust.offer(&statement(0, 1).sign(&authority(1)).unwrap().to_wire(), 0).await.unwrap());
        let authentication = CuratorAuthentication::Statements { trust, own: Arc::new(|| None) };
        let persist: PersistEpoch = Arc::new(|_| Ok(()));
        LeaderTracker::with_authentication(authentication, KnownEpoch::default(), persist, || 0.5)
    }

    /// When the next round through these addresses starts; `None` if something is requested now.
    fn next_start(tracker: &LeaderTracker, others: &BTreeSet<String>) -> Option<Instant> {
        match tracker.rounds().next_request(others, Instant::now()) {
            NextRequest::At(start) => Some(start),
            NextRequest::Round | NextRequest::New(_) => None,
        }
    }

    /// All nodes of a cluster follow another curator in the same moment, and get the same new list.
    #[tokio::test]
    async fn round_after_a_change_of_the_leader_is_put_off_and_the_first_one_is_not() {
        let tracker = tracker_with_statement().await;
        let spread = ROUND_SPREAD.mul_f64(0.5);
        let (other, address) = refusing_curator().await;
        tracker.set_directory([address.clone()]);
        let others: BTreeSet<String> = [address.clone()].into();

        let began = Instant::now();
        let requests = request_until(&tracker, &other, || next_start(&tracker, &others).is_some()).await;
        assert!(requests > 0, "the first round is at once");
        let routine = next_start(&tracker, &others).unwrap();
        assert!(routine >= began + ROUND_INTERVAL + spread, "a routine round is not spread");

        let changed = Instant::now();
        tracker.set_followed(Some("127.0.0.1:1"));
        let start = tracker.rounds().due().unwrap();
        assert!(start >= changed + spread, "every node requests it in the same moment");
        assert!(start < routine, "the round is not brought forward");

        // A new address has to prove itself at once, also before that round. The others keep their time.
        let now = Instant::now();
        let later = now + Duration::from_hours(1);
        tracker.rounds().complete_round(others, now, later);
        let (new, new_address) = refusing_curator().await;
        tracker.set_directory([address.clone(), new_address.clone()]);
        let all: BTreeSet<String> = [address, new_address].into();
        let requests = request_until(&tracker, &new, || next_start(&tracker, &all).is_some()).await;
        assert!(requests > 0, "a new address is not requested");
        assert_eq!(next_start(&tracker, &all), Some(later), "all are requested because of a new address");

        // A node that follows nobody until there is a newer statement puts off nothing.
        assert_eq!(tracker.draw_round_delay(), spread);
        tracker.publish_refusal(Some("the statement is stale".to_owned()));
        assert_eq!(tracker.draw_round_delay(), Duration::ZERO);
    }

    /// A false leader lists dead addresses alone, or names no leader.
    #[tokio::test]
    async fn rounds_run_while_no_curator_is_followed() {
        let tracker = tracker_with_statement().await;
        let (other, address) = refusing_curator().await;
        tracker.set_directory([address]);
        let running = async {
            let mut tracking = Box::pin(tracker.track_leader());
            while tracker.rounds().due().is_none() {
                tokio::select! {
                    biased;
                    never = &mut tracking => match never {},
                    accepted = other.accept() => drop(accepted.unwrap()),
                    () = tokio::task::yield_now() => {}
                }
            }
        };
        timeout(PATIENCE, running).await.expect("no round was completed");
        assert_eq!(tracker.leader(), None);
    }
}
