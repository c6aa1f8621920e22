//! The reconciler as it runs on every controller: it looks at the nodes, stands for election, and leads.
//!
//! What is decided is decided elsewhere; here it is done. The lease is given back whenever it is not needed any more,
//! because this program is not the newest or because it ends, so that the next one does not wait for it to end.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::etcd::client::{Client, EtcdError};
use crate::etcd::election::{Candidate, Standing, stand};
use crate::etcd::guard::{Guard, LostLeadership, WriteError};
use crate::etcd::key_space::{NODES, RECONCILER_LEADER, RECONCILER_STATUS};
use crate::etcd::namespace::Keys;
use crate::etcd::pause;
use crate::etcd::value::Follower;
use crate::reconciler::leadership::{Leadership, Listens, Loudness, Pace, Step, Stored, Write};
use crate::reconciler::nodes::{Blocked, Releases};
use crate::reconciler::objects::Objects;
use crate::reconciler::program::Program;
use crate::reconciler::status::Status;

/// How long after its last sign of life a leader is replaced. One that ends as it should is replaced at once.
pub const LEADER_TTL: Duration = Duration::from_mins(1);
/// How often nodes are looked at when nothing says that they changed.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// What a reconciler is started with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Its node, for people.
    pub name: String,
    /// What it is.
    pub program: Program,
    /// The etcd of its node, in the namespace of the curator: one transaction covers nodes and status.
    pub client: Client,
    /// How long after its last sign of life it is to be replaced.
    pub ttl: Duration,
    /// How it waits when it leads.
    pub pace: Pace,
}

/// A reconciler.
#[derive(Debug)]
pub struct Reconciler<O> {
    settings: Settings,
    objects: O,
    leads: watch::Sender<bool>,
}

/// Says for as long as it lives that this one leads.
struct Leading<'r>(&'r watch::Sender<bool>);

impl<'r> Leading<'r> {
    fn say(leads: &'r watch::Sender<bool>) -> Self {
        leads.send_replace(true);
        Self(leads)
    }
}

impl Drop for Leading<'_> {
    fn drop(&mut self) {
        self.0.send_replace(false);
    }
}

/// Reads the releases of all controllers as they are at one moment.
pub async fn look(client: &Client, program: &Program) -> Result<Releases, EtcdError> {
    Ok(Releases::of(program, &client.list(&nodes()).await?))
}

/// Looks at the releases of all controllers, and again whenever a node changes; never ends.
///
/// Each look is a whole one: what is told with a revision was read at that revision, which a watch does not promise.
pub async fn watch_releases(
    client: &Client,
    program: &Program,
    told: &watch::Sender<Option<Releases>>,
) -> Infallible {
    let mut follower = Follower::new(client, nodes(), |_: &str, _: &[u8]| Ok::<_, Infallible>(()));
    let mut failures = 0;
    loop {
        match look(client, program).await {
            Ok(releases) => {
                failures = 0;
                told.send_replace(Some(releases));
            }
            Err(error) => {
                failures += 1;
                tracing::debug!(%error, failures, "the releases of controllers were not read");
                tokio::time::sleep(pause::after_failure(failures, rand::random())).await;
                continue;
            }
        }
        let _ = tokio::time::timeout(LOOK_AGAIN, follower.next()).await;
        // Many events, one look.
        while follower.next().now_or_never().is_some() {}
    }
}

/// Writes the status as the leader, if it and the nodes it relies on are as they were read. Gives its revision.
pub async fn write_status(client: &Client, guard: &Guard, write: &Write) -> Result<i64, WriteError> {
    let changes = [write.change()];
    match write.unchanged() {
        None => client.write(guard, &changes).await,
        Some(unchanged) => client.write_while(guard, &changes, &unchanged).await,
    }
}

impl<O: Objects> Reconciler<O> {
    /// A reconciler of these objects.
    #[must_use]
    pub fn new(settings: Settings, objects: O) -> Self {
        Self { settings, objects, leads: watch::Sender::new(false) }
    }

    /// Whether it leads.
    #[must_use]
    pub fn leads(&self) -> watch::Receiver<bool> {
        self.leads.subscribe()
    }

    /// Its objects.
    #[must_use]
    pub const fn objects(&self) -> &O {
        &self.objects
    }

    /// Runs until cancelled. Then its lease is given back.
    pub async fn run(&self, cancel: &CancellationToken) {
        let (told, releases) = watch::channel(None);
        tokio::select! {
            never = watch_releases(&self.settings.client, &self.settings.program, &told) => match never {},
            () = self.stand_when_newest(releases, cancel) => {}
        }
    }

    /// Stands for election whenever this is the newest release.
    async fn stand_when_newest(
        &self,
        releases: watch::Receiver<Option<Releases>>,
        cancel: &CancellationToken,
    ) {
        let settings = &self.settings;
        let candidate = Candidate {
            election: RECONCILER_LEADER.range().start.trim_end_matches('/').to_owned(),
            name: settings.name.clone(),
            ttl: settings.ttl,
        };
        while cancel.run_until_cancelled(self.until_newest(releases.clone())).await.is_some() {
            let stop = cancel.child_token();
            let (told, standing) = watch::channel(Standing::Neither);
            let standing_for_it = stand(&settings.client, &candidate, told, &stop);
            let leading = async {
                tokio::select! {
                    () = self.lead_when_elected(standing, &releases) => {}
                    () = self.until_not_newest(releases.clone()) => {}
                    () = cancel.cancelled() => {}
                }
                stop.cancel();
            };
            tokio::join!(standing_for_it, leading);
        }
    }

    async fn until_newest(&self, mut releases: watch::Receiver<Option<Releases>>) {
        let mut told = None;
        let newest = |seen: &Option<Releases>| match seen
            .as_ref()
            .map(|seen| seen.may_stand(&self.settings.program))
        {
            None => false,
            Some(Ok(())) => true,
            Some(Err(blocked)) => {
                tell(&blocked, &mut told);
                false
            }
        };
        // Its sender lives as long as this.
        let _ = releases.wait_for(newest).await;
    }

    async fn until_not_newest(&self, mut releases: watch::Receiver<Option<Releases>>) {
        let other = |seen: &Option<Releases>| {
            seen.as_ref().is_some_and(|seen| seen.may_stand(&self.settings.program).is_err())
        };
        let _ = releases.wait_for(other).await;
    }

    /// Leads as long as it is elected, as often as it is.
    async fn lead_when_elected(
        &self,
        mut standing: watch::Receiver<Standing>,
        releases: &watch::Receiver<Option<Releases>>,
    ) {
        loop {
            let now = standing.borrow_and_update().clone();
            let changed = async {
                while *standing.borrow_and_update() == now {
                    if standing.changed().await.is_err() {
                        return;
                    }
                }
            };
            let Standing::Leader(guard) = &now else {
                changed.await;
                if standing.has_changed().is_err() {
                    return;
                }
                continue;
            };
            let leading = async {
                let _leading = Leading::say(&self.leads);
                let Err(lost) = self.lead(guard, releases.clone()).await;
                tracing::info!(%lost, "the built-in objects of Kubernetes are left to the next");
                // The election says it, too.
                std::future::pending::<()>().await;
            };
            tokio::select! {
                // First: whoever leads no longer sends nothing more.
                biased;
                () = changed => {}
                () = leading => {}
            }
        }
    }

    /// Carries out a leadership until it is lost.
    async fn lead(
        &self,
        guard: &Guard,
        mut releases: watch::Receiver<Option<Releases>>,
    ) -> Result<Infallible, LostLeadership> {
        let settings = &self.settings;
        let version = &settings.program.version;
        tracing::info!(%version, lock = guard.key, "this node keeps the built-in objects of Kubernetes");
        let began = Instant::now();
        let mut leadership = Leadership::begin(settings.program.clone(), settings.pace);
        let mut told = None;
        loop {
            let now = began.elapsed();
            match leadership.next(now) {
                Step::Read => match settings.client.read(guard, RECONCILER_STATUS).await {
                    Ok(record) => {
                        let stored = record.map(|record| {
                            let status = Status::decode(&record.value);
                            status.map(|status| Stored { status, revision: record.mod_revision })
                        });
                        let stored = stored.transpose();
                        if let Err(error) = &stored {
                            tracing::error!(
                                %error,
                                "the built-in objects of Kubernetes are left as they are until somebody repairs the \
                                 status, or deletes it once no controller of another release runs"
                            );
                        }
                        leadership.read(began.elapsed(), stored);
                    }
                    Err(error) => failed(&mut leadership, now, error)?,
                },
                Step::Look => {
                    releases.mark_unchanged();
                    match look(&settings.client, &settings.program).await {
                        Ok(seen) => leadership.looked(now, &seen),
                        Err(error) => failed(&mut leadership, now, error.into())?,
                    }
                    if let Some(blocked) = leadership.blocked() {
                        tell(blocked, &mut told);
                    }
                }
                Step::Write(write) => match write_status(&settings.client, guard, &write).await {
                    Ok(revision) => {
                        let Status { state, version, lowest_compatible } = &write.status;
                        tracing::info!(?state, %version, %lowest_compatible, "the status of objects was written");
                        leadership.written(began.elapsed(), write.status, revision);
                    }
                    Err(error) => failed(&mut leadership, began.elapsed(), error)?,
                },
                Step::Pass => self.pass(&mut leadership, began).await,
                Step::Wait(until) => {
                    let listens = leadership.listens();
                    tokio::select! {
                        () = tokio::time::sleep(until.saturating_sub(now)) => {}
                        Ok(()) = releases.changed(), if listens == Listens::ToNodes => leadership.nodes_changed(),
                        () = self.objects.changed(), if listens == Listens::ToObjects => {
                            leadership.objects_changed();
                        }
                    }
                }
            }
        }
    }

    async fn pass(&self, leadership: &mut Leadership, began: Instant) {
        let passed = self.objects.pass().await;
        let loudness = leadership.passed(began.elapsed(), passed.is_ok(), rand::random());
        match (passed, loudness) {
            (Ok(passed), _) if passed.is_nothing() => {
                tracing::debug!("the built-in objects of Kubernetes are as they should be");
            }
            (Ok(passed), _) => tracing::info!(%passed, "the built-in objects of Kubernetes were changed"),
            (Err(error), Loudness::Quiet) => tracing::debug!(%error, "a pass is tried again"),
            (Err(error), Loudness::Aloud) => tracing::warn!(%error, "a pass is tried again"),
        }
    }
}

/// All records of nodes.
fn nodes() -> Keys {
    Keys::Under(NODES.range().start)
}

/// What etcd refused is decided anew, and what it did not answer is looked at again; a leadership that is lost is over.
fn failed(leadership: &mut Leadership, now: Duration, error: WriteError) -> Result<(), LostLeadership> {
    match error {
        WriteError::LostLeadership(lost) => return Err(lost),
        WriteError::Changed { changed, .. } => {
            tracing::info!(?changed, "the status of objects was not written, and is decided anew");
            leadership.not_written();
        }
        WriteError::Etcd(error) => {
            tracing::info!(%error, "the built-in objects of Kubernetes wait for etcd");
            leadership.unanswered(now);
        }
    }
    Ok(())
}

/// Says once what holds everything up.
fn tell(blocked: &Blocked, told: &mut Option<Blocked>) {
    if told.as_ref() == Some(blocked) {
        return;
    }
    match blocked {
        Blocked::Newer { .. } => tracing::info!(why = %blocked, "the built-in objects are left to another"),
        Blocked::Older { .. } => tracing::warn!(why = %blocked, "the built-in objects are left as they are"),
        Blocked::Unknown(_) => tracing::error!(why = %blocked, "the built-in objects are left as they are"),
    }
    *told = Some(blocked.clone());
}
