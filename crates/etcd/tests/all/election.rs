//! Which of several candidates leads, and when a former leader stops.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use shepherd_etcd::client::Client;
use shepherd_etcd::election::{Candidate, campaign};
use shepherd_etcd::election_view::CandidateRole;
use shepherd_etcd::guard::{ExpectedRevision, KeyChange, LeaderGuard, WriteError};
use shepherd_etcd::namespace::KeySelector;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use testkit::aloud::TestResult;
use testkit::etcd_servers::{Cluster, PATIENCE, in_time};

/// Longer than any test, so that the event does not happen during one.
const NEVER: Duration = Duration::from_hours(1);
/// Long enough that a busy host, which runs hundreds of tests, keeps the lease alive.
const TTL: Duration = Duration::from_secs(10);

/// One curator's candidacy in the election.
struct Stander {
    name: String,
    client: Client,
    standing: watch::Receiver<CandidateRole>,
    cancel: CancellationToken,
    task: JoinSet<()>,
}

impl Stander {
    fn new(client: Client, name: &str, ttl: Duration) -> Self {
        let (sender, standing) = watch::channel(CandidateRole::Unknown);
        let (cancel, mut task) = (CancellationToken::new(), JoinSet::new());
        let candidate = Candidate { election: "/leader".to_owned(), name: name.to_owned(), ttl };
        task.spawn({
            let (client, cancel) = (client.clone(), cancel.clone());
            async move { campaign(&client, &candidate, sender, &cancel).await }
        });
        Self { name: name.to_owned(), client, standing, cancel, task }
    }

    fn now(&self) -> CandidateRole {
        self.standing.borrow().clone()
    }

    async fn until(&mut self, what: &str, is: impl FnMut(&CandidateRole) -> bool) -> Result<CandidateRole> {
        Ok(in_time(what, self.standing.wait_for(is)).await??.clone())
    }

    /// Waits until it leads.
    async fn leads(&mut self) -> Result<LeaderGuard> {
        match self.until("it leads", |now| matches!(now, CandidateRole::Leader(_))).await? {
            CandidateRole::Leader(guard) => Ok(guard),
            other => anyhow::bail!("{other:?}"),
        }
    }

    /// Waits until it follows this leader.
    async fn follows(&mut self, guard: &LeaderGuard) -> Result<String> {
        let follows =
            |now: &CandidateRole| matches!(now, CandidateRole::Follower(leader) if leader.guard == *guard);
        match self.until("it follows", follows).await? {
            CandidateRole::Follower(leader) => Ok(leader.name),
            other => anyhow::bail!("{other:?}"),
        }
    }

    async fn is_neither(&mut self) -> Result<()> {
        self.until("it is neither", |now| *now == CandidateRole::Unknown).await.map(drop)
    }

    /// Cancels it, and waits until it has stopped.
    async fn stop(mut self) -> Result<()> {
        self.cancel.cancel();
        in_time("its end", self.task.join_next()).await?.context("it ran")??;
        ensure!(*self.standing.borrow() == CandidateRole::Unknown, "it ended and still is {:?}", self.now());
        Ok(())
    }
}

async fn write(client: &Client, guard: &LeaderGuard, value: &str) -> Result<i64, WriteError> {
    let change =
        KeyChange::Put { key: "/by".to_owned(), value: value.into(), expected: ExpectedRevision::Any };
    client.write_guarded(guard, &[change]).await
}

/// Waits until one candidate leads and all others follow it, except the one that is left out. Returns the leader's
/// index and guard.
async fn agreed(all: &[Stander], left_out: Option<usize>) -> Result<(usize, LeaderGuard)> {
    let end = Instant::now() + PATIENCE;
    loop {
        let now: Vec<(usize, CandidateRole)> = all
            .iter()
            .map(Stander::now)
            .enumerate()
            .filter(|(number, _)| Some(*number) != left_out)
            .collect();
        let leaders: Vec<(usize, &LeaderGuard)> =
            now.iter()
                .filter_map(|(number, now)| {
                    if let CandidateRole::Leader(guard) = now { Some((*number, guard)) } else { None }
                })
                .collect();
        if let [(leader, guard)] = leaders[..] {
            let follows = |now: &CandidateRole| matches!(now, CandidateRole::Follower(by) if by.guard == *guard && by.name == all[leader].name);
            if now.iter().all(|(number, now)| *number == leader || follows(now)) {
                return Ok((leader, guard.clone()));
            }
        }
        ensure!(Instant::now() < end, "they do not agree: {now:#?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Scenario C-1: each candidate uses an etcd of its own, and the leader's etcd stops responding.
#[tokio::test]
async fn of_three_one_leads_and_another_when_its_etcd_falls_silent() -> TestResult {
    let etcd = Cluster::start(3).await?;
    let client = |number: usize| etcd.client_of(&[number]).with_deadline(Duration::from_secs(5));
    // Only the candidate that has to end may lose its lease by time. On a slow host the next leader could lose it
    // too, and the order of the leaders would be undefined.
    let leader = 0;
    let mut all = vec![Stander::new(client(leader), "node-0", 2 * TTL)];
    all[leader].leads().await?;
    all.extend((1..3).map(|number| Stander::new(client(number), &format!("node-{number}"), NEVER)));
    let (first, guard) = agreed(&all, None).await?;
    assert_eq!(first, leader, "who came first leads");
    write(&client(leader), &guard, "first").await?;

    etcd.silence(leader)?;
    // The write that is sent now arrives after it has lost the leadership.
    let late = tokio::spawn({
        let (client, guard) = (client(leader).with_deadline(PATIENCE), guard.clone());
        async move { write(&client, &guard, "late").await }
    });
    all[leader].is_neither().await?;
    let (next, next_guard) = agreed(&all, Some(leader)).await?;
    assert!(next_guard.key != guard.key && next_guard.create_revision > guard.create_revision);
    assert_eq!(all[leader].now(), CandidateRole::Unknown, "it cannot know who leads");
    write(&all[next].client, &next_guard, "second").await?;
    // The result is the same with each etcd that the former leader reaches.
    let error = write(&all[next].client, &guard, "first again").await.unwrap_err();
    assert!(matches!(error, WriteError::LostLeadership(_)), "{error:?}");

    etcd.let_speak(leader)?;
    let (next, _) = agreed(&all, None).await?;
    assert_ne!(next, leader, "it stands behind the others");
    let error = write(&client(leader), &guard, "first again").await.unwrap_err();
    assert!(matches!(error, WriteError::LostLeadership(_)), "{error:?}");
    let late = in_time("its end", late).await?.context("it ran")?;
    assert!(late.is_err(), "{late:?}");
    let by = all[next].client.get("/by").await?.context("it is there")?;
    assert_eq!(by.value, b"second", "no write of a former leader is ever seen");
    Ok(())
}

#[tokio::test]
async fn there_are_never_two_leaders_and_a_cancelled_one_need_not_be_waited_for() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let mut all: Vec<Stander> =
        (0..4).map(|number| Stander::new(client.clone(), &format!("node-{number}"), NEVER)).collect();
    let mut last = None;
    while !all.is_empty() {
        let (leader, guard) = agreed(&all, None).await?;
        assert!(last.is_none_or(|before| before < guard.create_revision), "in the order of their keys");
        last = Some(guard.create_revision);
        all.remove(leader).stop().await?;
        let error = write(&client, &guard, "late").await.unwrap_err();
        assert!(matches!(error, WriteError::LostLeadership(_)), "{error:?}");
    }
    let left = client.list(&KeySelector::Prefix("/leader/".to_owned())).await?.records;
    assert_eq!(left, [], "every lease was given back");
    Ok(())
}

#[tokio::test]
async fn one_that_ends_without_a_word_is_followed_when_its_lease_has_ended() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let mut first = Stander::new(etcd.client(), "first", TTL);
    let guard = first.leads().await?;
    let mut second = Stander::new(etcd.client(), "second", NEVER);
    second.follows(&guard).await?;
    let dropped = Instant::now();
    first.task.abort_all();
    assert!(in_time("its end", first.task.join_next()).await?.context("it ran")?.is_err());
    assert_eq!(*first.standing.borrow(), CandidateRole::Unknown, "dropped, and no leader is left to be read");
    // The lease was last renewed less than a third of its time to live before it ended.
    let next = second.leads().await?;
    assert!(dropped.elapsed() > TTL / 3, "its lease did not end, it was given back");
    assert_ne!(next, guard);
    second.stop().await?;
    Ok(())
}

#[tokio::test]
async fn what_a_former_life_left_is_removed_at_the_start() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let mut former = Stander::new(client.clone(), "node", NEVER);
    let guard = former.leads().await?;
    let mut other = Stander::new(client.clone(), "other", NEVER);
    other.follows(&guard).await?;
    former.task.abort_all();
    let mut node = Stander::new(client.clone(), "node", NEVER);
    // Its lease would live for an hour.
    let next = other.leads().await?;
    assert_eq!(node.follows(&next).await?, "other");
    assert_eq!(client.get(&guard.key).await?, None);
    node.stop().await?;
    other.stop().await?;
    Ok(())
}

#[tokio::test]
async fn leader_whose_key_is_deleted_leads_no_more_until_it_is_elected_again() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let mut only = Stander::new(client.clone(), "node", NEVER);
    let guard = only.leads().await?;
    client.delete_unguarded(&KeySelector::One(guard.key.clone())).await?;
    let other = |now: &CandidateRole| matches!(now, CandidateRole::Leader(now) if *now != guard);
    let again = only.until("it leads again", other).await?;
    let CandidateRole::Leader(again) = again else { panic!("{again:?}") };
    assert!(again.create_revision > guard.create_revision);
    write(&client, &again, "again").await?;
    let error = write(&client, &guard, "before").await.unwrap_err();
    assert!(matches!(error, WriteError::LostLeadership(_)), "{error:?}");
    only.stop().await?;
    Ok(())
}

#[tokio::test]
async fn without_a_quorum_there_is_neither_leader_nor_follower() -> TestResult {
    let mut etcd = Cluster::start(3).await?;
    let client = etcd.client().with_deadline(Duration::from_secs(5));
    let mut leader = Stander::new(client.clone(), "node-0", TTL);
    let guard = leader.leads().await?;
    let mut follower = Stander::new(client.clone(), "node-1", TTL);
    follower.follows(&guard).await?;
    etcd.kill(1)?;
    etcd.kill(2)?;
    leader.is_neither().await?;
    follower.is_neither().await?;
    etcd.restart(1)?;
    etcd.restart(2)?;
    etcd.wait_until_it_answers(0).await?;
    let both = [leader, follower];
    let (_, guard) = agreed(&both, None).await?;
    assert!(write(&etcd.client(), &guard, "again").await.is_ok());
    Ok(())
}

#[tokio::test]
async fn leader_has_stopped_before_its_lease_can_have_ended() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let mut leader = Stander::new(etcd.client(), "node", TTL);
    leader.leads().await?;
    let silent = Instant::now();
    etcd.silence(0)?;
    leader.is_neither().await?;
    // The last renewal was right before this. The allowance is for a busy host.
    assert!(silent.elapsed() < TTL + Duration::from_mins(1), "{:?}", silent.elapsed());
    assert!(in_time("its end", leader.stop()).await.is_ok(), "though etcd does not take the lease back");
    Ok(())
}
