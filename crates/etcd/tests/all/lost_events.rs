//! A watcher delivers the right values although etcd loses events, and although listings and events overtake each
//! other.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use shepherd_etcd::key_watcher::KeyEvent;
use shepherd_etcd::namespace::KeySelector;
use tokio::time::timeout;

use super::lossy_etcd::{Delivery, LossyEtcd};
use super::value::{follow_listing, next, nothing_comes, short, under, up_to};
use testkit::aloud::TestResult;
use testkit::etcd_servers::{Cluster, in_time, until};

/// No periodic listing happens during a test.
const NEVER: Duration = Duration::from_hours(24);
const SOON: Duration = Duration::from_millis(20);
/// Much longer than a listing without a pause takes.
const LONG: Duration = Duration::from_mins(1);

/// The behaviour of etcd before 3.4.34 and 3.5.16: issue 18089.
#[tokio::test]
async fn deletion_that_was_compacted_before_the_watch_began_is_noticed() -> TestResult {
    let etcd = LossyEtcd::start()?;
    etcd.put("/r/a", "1", Delivery::Delivered);
    etcd.put("/r/b", "1", Delivery::Delivered);
    let listed = etcd.revision();
    etcd.delete_before_next_watch("/r/b");
    let mut follower = follow_listing(&etcd.client()?, under("/r/"), NEVER);
    assert_eq!(up_to(&mut follower, "|").await?, ["/r/a=1", "/r/b=1", "|"]);
    let found = timeout(LONG, follower.next_event()).await;
    assert_eq!(short(found.ok().context("nothing was listed once the watch existed")?), "-/r/b");
    assert_eq!(etcd.watch_starts(), [listed + 1], "it begins at the compacted revision, and is not refused");
    etcd.put("/r/c", "1", Delivery::Delivered);
    assert_eq!(next(&mut follower).await?, "/r/c=1", "and it goes on");
    Ok(())
}

#[tokio::test]
async fn event_that_etcd_loses_is_found_by_the_next_listing() -> TestResult {
    let etcd = LossyEtcd::start()?;
    etcd.put("/r/a", "1", Delivery::Delivered);
    etcd.put("/r/b", "1", Delivery::Delivered);
    let mut follower = follow_listing(&etcd.client()?, under("/r/"), SOON);
    assert_eq!(up_to(&mut follower, "|").await?, ["/r/a=1", "/r/b=1", "|"]);
    etcd.delete("/r/b", Delivery::Lost);
    let found = timeout(LONG, follower.next_event()).await;
    assert_eq!(short(found.ok().context("no listing found the lost deletion")?), "-/r/b");
    etcd.put("/r/a", "2", Delivery::Lost);
    let found = timeout(LONG, follower.next_event()).await;
    assert_eq!(short(found.ok().context("no listing found the lost value")?), "/r/a=2");
    etcd.put("/r/c", "1", Delivery::Delivered);
    assert_eq!(next(&mut follower).await?, "/r/c=1", "and the watch goes on");
    assert_eq!(etcd.watch_starts().len(), 1, "it is the first one");
    Ok(())
}

#[tokio::test]
async fn listing_that_events_overtook_changes_nothing() -> TestResult {
    let etcd = LossyEtcd::start()?;
    etcd.put("/r/a", "1", Delivery::Delivered);
    etcd.put("/r/b", "1", Delivery::Delivered);
    let mut follower = follow_listing(&etcd.client()?, under("/r/"), SOON);
    assert_eq!(up_to(&mut follower, "|").await?, ["/r/a=1", "/r/b=1", "|"]);
    // From here on a listing is read, and its response is delayed.
    etcd.hold_ranges();
    until("a listing is on its way", async || Ok(etcd.held_ranges() == 1)).await?;
    etcd.put("/r/a", "2", Delivery::Delivered);
    etcd.delete("/r/b", Delivery::Delivered);
    etcd.put("/r/c", "1", Delivery::Delivered);
    assert_eq!(up_to(&mut follower, "/r/c=1").await?, ["/r/a=2", "-/r/b", "/r/c=1"]);
    etcd.release_held_ranges();
    // Listings follow each other, so that the first one has arrived when the next is on its way.
    until("the next listing is on its way", async || Ok(etcd.held_ranges() == 2)).await?;
    nothing_comes(&mut follower).await?;
    etcd.put("/r/d", "1", Delivery::Delivered);
    assert_eq!(next(&mut follower).await?, "/r/d=1", "what the listing holds is old");
    Ok(())
}

/// Listings without a pause beside a real watch, to try every interleaving that timing allows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follower_that_lists_all_the_time_tells_nothing_twice_and_nothing_old() -> TestResult {
    const KEYS: usize = 5;
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let mut follower = follow_listing(&client, under("/r/"), Duration::from_micros(1));
    let writing = {
        let client = client.clone();
        tokio::spawn(async move {
            for number in 0..600 {
                let key = format!("/r/{}", number % KEYS);
                if number % 7 == 3 {
                    client.delete_unguarded(&KeySelector::One(key)).await?;
                } else {
                    client.put_unguarded(&key, format!("{number:04}").as_bytes()).await?;
                }
                if number % 50 == 49 {
                    let revision = client.put_unguarded("/elsewhere", b"").await?;
                    client.compact(revision).await?;
                }
            }
            client.put_unguarded("/r/~", b"end").await?;
            anyhow::Ok(())
        })
    };
    let mut there: BTreeMap<String, String> = BTreeMap::new();
    loop {
        match in_time("an event", follower.next_event()).await?? {
            KeyEvent::Put { key, value, .. } => {
                let before = there.insert(key.clone(), value.clone());
                ensure_newer(before.as_ref(), &value)?;
                if key == "/r/~" {
                    break;
                }
            }
            KeyEvent::Deleted { key } => {
                assert!(there.remove(&key).is_some(), "{key} was not there");
            }
            KeyEvent::BacklogDone => {}
        }
    }
    writing.await??;
    // Events of other keys may come after the last key's event if a listing delivered that one first.
    let listed = client.list(&under("/r/")).await?.records.into_iter();
    let listed: BTreeMap<_, _> =
        listed.map(|record| (record.key, String::from_utf8_lossy(&record.value).into_owned())).collect();
    while there != listed {
        match in_time("the rest", follower.next_event()).await?? {
            KeyEvent::Put { key, value, .. } => {
                ensure_newer(there.insert(key, value.clone()).as_ref(), &value)?;
            }
            KeyEvent::Deleted { key } => drop(there.remove(&key)),
            KeyEvent::BacklogDone => {}
        }
    }
    nothing_comes(&mut follower).await?;
    Ok(())
}

/// Values of a key only grow, unless the key was deleted in between.
fn ensure_newer(before: Option<&String>, value: &String) -> Result<()> {
    ensure!(before.is_none_or(|before| before < value), "{value} after {before:?}");
    Ok(())
}
