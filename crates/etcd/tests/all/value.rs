//! Watching keys: the scenarios of the public system's event values, those that it loses, and faults of etcd.

use std::collections::BTreeMap;
use std::num::ParseIntError;
use std::str::Utf8Error;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use shepherd_etcd::client::Client;
use shepherd_etcd::key_watcher::{KeyEvent, KeyWatcher, ValueDecodeError, WatchStatus};
use shepherd_etcd::namespace::KeySelector;
use tokio::time::timeout;

use testkit::aloud::TestResult;
use testkit::etcd_servers::{Cluster, PATIENCE, in_time, until};

/// Long enough for an event to arrive, where a test expects none. Too short a time can only hide a fault, never cause
/// one.
const QUIET: Duration = Duration::from_millis(300);

pub(super) type Text = fn(&str, &[u8]) -> Result<String, Utf8Error>;

fn text(_: &str, value: &[u8]) -> Result<String, Utf8Error> {
    std::str::from_utf8(value).map(str::to_owned)
}

fn run_watch(client: &Client, keys: KeySelector) -> KeyWatcher<Text> {
    KeyWatcher::new(client, keys, text)
}

/// A watcher that lists its keys at this interval.
pub(super) fn follow_listing(client: &Client, keys: KeySelector, interval: Duration) -> KeyWatcher<Text> {
    KeyWatcher::with_listing_interval(client, keys, interval, text)
}

fn one(key: &str) -> KeySelector {
    KeySelector::One(key.to_owned())
}

pub(super) fn under(prefix: &str) -> KeySelector {
    KeySelector::Prefix(prefix.to_owned())
}

/// An event in short: `/a=1`, `-/a`, `|`.
pub(super) fn short(event: Result<KeyEvent<String>, ValueDecodeError<Utf8Error>>) -> String {
    match event {
        Ok(KeyEvent::Put { key, value, .. }) => format!("{key}={value}"),
        Ok(KeyEvent::Deleted { key }) => format!("-{key}"),
        Ok(KeyEvent::BacklogDone) => "|".to_owned(),
        Err(error) => error.to_string(),
    }
}

pub(super) async fn next(follower: &mut KeyWatcher<Text>) -> Result<String> {
    Ok(short(in_time("an event", follower.next_event()).await?))
}

/// All events up to this one, which must arrive.
pub(super) async fn up_to(follower: &mut KeyWatcher<Text>, last: &str) -> Result<Vec<String>> {
    let mut events = Vec::new();
    loop {
        events.push(next(follower).await.with_context(|| format!("so far: {events:?}, and not {last}"))?);
        if events.last().is_some_and(|event| event == last) {
            return Ok(events);
        }
    }
}

pub(super) async fn nothing_comes(follower: &mut KeyWatcher<Text>) -> Result<()> {
    match timeout(QUIET, follower.next_event()).await {
        Ok(event) => bail!("nothing was to come, and there is {}", short(event)),
        Err(_) => Ok(()),
    }
}

async fn sight(follower: &KeyWatcher<Text>, lost: bool) -> Result<WatchStatus> {
    let mut sight = follower.status();
    let is = |sight: &WatchStatus| match sight {
        WatchStatus::NotStarted => false,
        WatchStatus::Watching { .. } => !lost,
        WatchStatus::Disconnected { .. } => lost,
    };
    Ok(in_time("etcd to be lost, or seen", sight.wait_for(is)).await??.clone())
}

/// Scenario E-1.
#[tokio::test]
async fn values_of_a_key_come_one_after_the_other_and_the_last_for_sure() -> TestResult {
    let etcd = Cluster::start(3).await?;
    let (writer, client) = (etcd.client_of(&[1]), etcd.client_of(&[0]));
    writer.put_unguarded("/a", b"one").await?;
    let mut follower = run_watch(&client, one("/a"));
    assert_eq!(next(&mut follower).await?, "/a=one");
    assert_eq!(next(&mut follower).await?, "|");
    writer.put_unguarded("/a", b"two").await?;
    assert_eq!(next(&mut follower).await?, "/a=two");
    for value in 3..=6 {
        writer.put_unguarded("/a", value.to_string().as_bytes()).await?;
    }
    let values = up_to(&mut follower, "/a=6").await?;
    assert!(values.is_sorted() && values.len() <= 4, "{values:?}");
    nothing_comes(&mut follower).await?;
    Ok(())
}

/// Scenario E-2.
#[tokio::test]
async fn range_tells_every_key_with_its_newest_value() -> TestResult {
    let etcd = Cluster::start(3).await?;
    let (writer, client) = (etcd.client_of(&[1]), etcd.client_of(&[2]));
    for (key, value) in [("/r/a", "1"), ("/r/b", "1"), ("/r/a", "2"), ("/s", "1"), ("/r", "1")] {
        writer.put_unguarded(key, value.as_bytes()).await?;
    }
    let mut follower = run_watch(&client, under("/r/"));
    assert_eq!(up_to(&mut follower, "|").await?, ["/r/a=2", "/r/b=1", "|"]);
    for (key, value) in [("/r/c", "1"), ("/r/a", "3"), ("/r/d", "1")] {
        writer.put_unguarded(key, value.as_bytes()).await?;
    }
    assert_eq!(up_to(&mut follower, "/r/d=1").await?, ["/r/c=1", "/r/a=3", "/r/d=1"]);
    Ok(())
}

/// Scenario E-3, as strictly as possible: a future may be dropped at any time, and no event is lost.
#[tokio::test]
async fn dropped_wait_loses_nothing() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    client.put_unguarded("/a", b"0").await?;
    let mut follower = run_watch(&client, under("/"));
    assert_eq!(up_to(&mut follower, "|").await?, ["/a=0", "|"]);
    assert!(timeout(Duration::from_millis(1), follower.next_event()).await.is_err());
    let mut seen = Vec::new();
    let writer = tokio::spawn({
        let client = client.clone();
        async move {
            for number in 0..200 {
                client.put_unguarded(&format!("/{number:03}"), b"x").await?;
            }
            anyhow::Ok(())
        }
    });
    let collect = async {
        while seen.len() < 200 {
            // Polled once or a few times, then dropped.
            if let Ok(event) = timeout(Duration::from_micros(50), follower.next_event()).await {
                seen.push(short(event));
            }
        }
    };
    timeout(PATIENCE, collect).await.with_context(|| "an event was lost")?;
    writer.await??;
    assert_eq!(seen, (0..200).map(|number| format!("/{number:03}=x")).collect::<Vec<_>>());
    Ok(())
}

/// Scenario E-4.
#[tokio::test]
async fn wait_can_be_dropped_while_there_is_no_quorum() -> TestResult {
    let mut etcd = Cluster::start(3).await?;
    let client = etcd.client().with_deadline(Duration::from_secs(1));
    client.put_unguarded("/a", b"one").await?;
    etcd.kill(1)?;
    etcd.kill(2)?;
    let mut follower = run_watch(&client, one("/a"));
    nothing_comes(&mut follower).await?;
    let WatchStatus::Disconnected { reason: why, .. } = sight(&follower, true).await? else {
        panic!("it cannot be seen")
    };
    assert!(why.starts_with("reading /a "), "{why}");
    nothing_comes(&mut follower).await?;
    etcd.restart(1)?;
    assert_eq!(up_to(&mut follower, "|").await?, ["/a=one", "|"]);
    Ok(())
}

/// Scenario E-5.
#[tokio::test]
async fn follower_goes_on_with_another_member_when_its_own_is_gone() -> TestResult {
    let mut etcd = Cluster::start(3).await?;
    let (writer, client) = (etcd.client_of(&[2]), etcd.client_of(&[0, 1]));
    writer.put_unguarded("/a", b"one").await?;
    let mut follower = run_watch(&client, under("/"));
    assert_eq!(up_to(&mut follower, "|").await?, ["/a=one", "|"]);
    etcd.kill(0)?;
    etcd.wait_until_it_answers(2).await?;
    writer.put_unguarded("/b", b"two").await?;
    assert_eq!(next(&mut follower).await?, "/b=two", "and /a not once more");
    Ok(())
}

#[tokio::test]
async fn follower_leaves_a_member_that_is_silent() -> TestResult {
    let mut etcd = Cluster::start(3).await?;
    let (writer, client) = (etcd.client_of(&[2]), etcd.client_of(&[0, 1]));
    writer.put_unguarded("/a", b"one").await?;
    let mut follower = run_watch(&client, under("/"));
    assert_eq!(up_to(&mut follower, "|").await?, ["/a=one", "|"]);
    etcd.silence(0)?;
    etcd.wait_until_it_answers(2).await?;
    writer.put_unguarded("/b", b"two").await?;
    assert_eq!(next(&mut follower).await?, "/b=two", "from the other member");
    Ok(())
}

/// Scenario E-6, and that the loss of the connection is visible, which the public system hides.
#[tokio::test]
async fn member_without_a_quorum_is_seen_to_be_out_of_sight_and_catches_up() -> TestResult {
    let mut etcd = Cluster::start(3).await?;
    let (writer, client) = (etcd.client_of(&[2]), etcd.client_of(&[0]).with_deadline(Duration::from_secs(1)));
    writer.put_unguarded("/a", b"one").await?;
    let mut follower = run_watch(&client, under("/"));
    assert_eq!(up_to(&mut follower, "|").await?, ["/a=one", "|"]);
    // The member lives and responds, but receives nothing from the other members.
    etcd.silence(1)?;
    etcd.silence(2)?;
    let WatchStatus::Disconnected { .. } = sight(&follower, true).await? else { panic!("it cannot be seen") };
    nothing_comes(&mut follower).await?;
    // Now the others are connected to each other, and not to it.
    etcd.kill(0)?;
    etcd.let_speak(1)?;
    etcd.let_speak(2)?;
    etcd.wait_until_it_answers(2).await?;
    writer.put_unguarded("/a", b"two").await?;
    writer.put_unguarded("/a", b"three").await?;
    nothing_comes(&mut follower).await?;
    etcd.restart(0)?;
    assert_eq!(next(&mut follower).await?, "/a=three");
    sight(&follower, false).await?;
    Ok(())
}

/// Scenario E-7.
#[tokio::test]
async fn key_that_is_not_there_yet_comes_when_it_is() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let mut follower = run_watch(&client, one("/a"));
    assert_eq!(next(&mut follower).await?, "|");
    nothing_comes(&mut follower).await?;
    client.put_unguarded("/a", b"").await?;
    assert_eq!(next(&mut follower).await?, "/a=", "empty is not absent");
    Ok(())
}

/// Scenarios E-8 and E-9.
#[tokio::test]
async fn deletion_is_reported_of_what_was_reported_before() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    for key in ["/r/a", "/r/b", "/r/c"] {
        client.put_unguarded(key, b"1").await?;
    }
    let mut single = run_watch(&client, one("/r/a"));
    assert_eq!(up_to(&mut single, "|").await?, ["/r/a=1", "|"]);
    client.delete_unguarded(&one("/r/a")).await?;
    let mut range = run_watch(&client, under("/r/"));
    assert_eq!(up_to(&mut range, "|").await?, ["/r/b=1", "/r/c=1", "|"]);
    assert_eq!(next(&mut single).await?, "-/r/a");
    client.put_unguarded("/r/a", b"1").await?;
    assert_eq!(next(&mut single).await?, "/r/a=1", "back as it was");
    assert_eq!(next(&mut range).await?, "/r/a=1");
    client.delete_unguarded(&under("/r/")).await?;
    // All of them in one response, in etcd's order.
    let mut gone = [next(&mut range).await?, next(&mut range).await?, next(&mut range).await?];
    gone.sort();
    assert_eq!(gone, ["-/r/a", "-/r/b", "-/r/c"]);
    nothing_comes(&mut range).await?;
    Ok(())
}

/// Scenario E-10, repeated: any number of changes between the first listing and the watch.
#[tokio::test]
async fn nothing_falls_between_the_look_and_the_watch() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    for round in 0..50 {
        let key = format!("/{round}");
        let (mut follower, expected) = (run_watch(&client, one(&key)), format!("{key}=x"));
        let (written, seen) = tokio::join!(client.put_unguarded(&key, b"x"), up_to(&mut follower, &expected));
        written?;
        seen?;
    }
    Ok(())
}

/// Scenario E-11.
#[tokio::test]
async fn value_that_cannot_be_understood_is_an_error_of_its_own() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let number = |_: &str, value: &[u8]| String::from_utf8_lossy(value).parse::<i32>();
    client.put_unguarded("/r/a", b"1").await?;
    client.put_unguarded("/r/b", b"not a number").await?;
    client.put_unguarded("/r/c", b"3").await?;
    let mut follower = KeyWatcher::new(&client, under("/r/"), number);
    let mut next = async || -> Result<Result<KeyEvent<i32>, ValueDecodeError<ParseIntError>>> {
        in_time("an event", follower.next_event()).await
    };
    assert!(matches!(next().await?, Ok(KeyEvent::Put { value: 1, .. })));
    let error = next().await?.unwrap_err();
    assert_eq!(error.key, "/r/b");
    assert!(error.to_string().starts_with("the value of /r/b in etcd at revision"), "{error}");
    assert!(matches!(next().await?, Ok(KeyEvent::Put { value: 3, .. })));
    assert!(matches!(next().await?, Ok(KeyEvent::BacklogDone)));
    client.put_unguarded("/r/b", b"2").await?;
    assert!(matches!(next().await?, Ok(KeyEvent::Put { value: 2, .. })));
    client.put_unguarded("/r/b", b"").await?;
    assert!(next().await?.is_err(), "empty is a value");
    client.delete_unguarded(&one("/r/b")).await?;
    assert!(matches!(next().await?, Ok(KeyEvent::Deleted { key }) if key == "/r/b"));
    Ok(())
}

/// Scenarios E-12 and E-13: the caller takes nothing while much happens, including several events in one response.
#[tokio::test]
async fn slow_reader_gets_the_newest_value_of_each_key_once() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    client.put_unguarded("/r/a", b"-").await?;
    client.put_unguarded("/r/b", b"-").await?;
    let mut follower = run_watch(&client, under("/r/"));
    assert_eq!(up_to(&mut follower, "|").await?, ["/r/a=-", "/r/b=-", "|"]);
    sight(&follower, false).await?;
    for number in 0..500 {
        client.put_unguarded("/r/a", number.to_string().as_bytes()).await?;
        client.put_unguarded("/r/b", number.to_string().as_bytes()).await?;
    }
    let events = up_to(&mut follower, "/r/b=499").await?;
    let mut newest = BTreeMap::new();
    for event in &events {
        let (key, value) = event.split_once('=').context("only values")?;
        let value: i32 = value.parse()?;
        assert!(newest.insert(key.to_owned(), value).is_none_or(|before| before < value), "{events:?}");
    }
    assert_eq!(newest, BTreeMap::from([("/r/a".to_owned(), 499), ("/r/b".to_owned(), 499)]), "{events:?}");
    assert!(events.len() < 20, "1000 writes, and too many events: {events:?}");
    nothing_comes(&mut follower).await?;
    Ok(())
}

/// Scenarios E-14 and E-15.
#[tokio::test]
async fn backlog_ends_once_and_what_comes_later_is_not_in_it() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    client.put_unguarded("/r/a", b"1").await?;
    client.put_unguarded("/r/b", b"1").await?;
    let mut follower = run_watch(&client, under("/r/"));
    sight(&follower, false).await?;
    assert_eq!(next(&mut follower).await?, "/r/a=1");
    client.put_unguarded("/r/c", b"1").await?;
    client.put_unguarded("/r/a", b"2").await?;
    let mut last = run_watch(&client, one("/r/a"));
    assert_eq!(next(&mut last).await?, "/r/a=2");
    let events = up_to(&mut follower, "/r/a=2").await?;
    assert_eq!(events, ["/r/b=1", "|", "/r/c=1", "/r/a=2"], "each once");
    nothing_comes(&mut follower).await?;
    Ok(())
}

/// The changes that the public system loses.
#[tokio::test]
async fn deletion_while_etcd_was_unreachable_is_reported_and_the_rest_is_not_repeated() -> TestResult {
    let mut etcd = Cluster::start(3).await?;
    let (writer, client) = (etcd.client_of(&[2]), etcd.client_of(&[0]));
    for key in ["/r/a", "/r/b", "/r/c"] {
        writer.put_unguarded(key, b"1").await?;
    }
    let mut follower = run_watch(&client, under("/r/"));
    assert_eq!(up_to(&mut follower, "|").await?, ["/r/a=1", "/r/b=1", "/r/c=1", "|"]);
    etcd.kill(0)?;
    etcd.wait_until_it_answers(2).await?;
    sight(&follower, true).await?;
    writer.delete_unguarded(&one("/r/b")).await?;
    writer.put_unguarded("/r/c", b"2").await?;
    writer.put_unguarded("/r/d", b"1").await?;
    etcd.restart(0)?;
    assert_eq!(up_to(&mut follower, "/r/d=1").await?, ["-/r/b", "/r/c=2", "/r/d=1"]);
    nothing_comes(&mut follower).await?;
    Ok(())
}

#[tokio::test]
async fn compaction_that_was_faster_makes_a_follower_relist() -> TestResult {
    let mut etcd = Cluster::start(1).await?;
    let client = etcd.client();
    client.put_unguarded("/r/a", b"0").await?;
    client.put_unguarded("/r/b", b"0").await?;
    let mut follower = run_watch(&client, under("/r/"));
    assert_eq!(up_to(&mut follower, "|").await?, ["/r/a=0", "/r/b=0", "|"]);
    for round in 0..20 {
        client.put_unguarded("/r/a", format!("{round}a").as_bytes()).await?;
        let revision = client.delete_unguarded(&one("/r/b")).await?;
        client.compact(revision).await?;
        // A new listing delivers deletions first.
        let mut both = [next(&mut follower).await?, next(&mut follower).await?];
        both.sort();
        assert_eq!(both, ["-/r/b".to_owned(), format!("/r/a={round}a")]);
        client.put_unguarded("/r/b", format!("{round}b").as_bytes()).await?;
        assert_eq!(next(&mut follower).await?, format!("/r/b={round}b"));
    }
    // The member is killed, and everything that happened meanwhile is compacted. The watcher may list right before the
    // deletion, so that its watch begins at the compacted revision: see `lost_events.rs`.
    etcd.kill(0)?;
    sight(&follower, true).await?;
    etcd.restart(0)?;
    etcd.wait_until_it_answers(0).await?;
    let revision = client.delete_unguarded(&one("/r/a")).await?;
    client.compact(revision).await?;
    assert_eq!(next(&mut follower).await?, "-/r/a");
    Ok(())
}

#[tokio::test]
async fn dropped_follower_leaves_no_watch_in_etcd() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    client.put_unguarded("/a", b"1").await?;
    for _ in 0..100 {
        let mut follower = run_watch(&client, one("/a"));
        assert_eq!(next(&mut follower).await?, "/a=1");
    }
    let gone = async || Ok(etcd.metric(0, "etcd_debugging_mvcc_watcher_total").await? < 1.0);
    Ok(until("etcd has no watch", gone).await?)
}
