//! Object watches: changes by others are reported at once, and nothing else is.

use anyhow::Result;
use serde_json::json;
use shepherd::reconciler::objects::cluster_config::ClusterConfig;
use shepherd::reconciler::objects::object_kind::MANAGED_BUILT_IN;
use shepherd::reconciler::objects::object_kind::MANAGED_LABEL;

use super::kit::{
    A_WHILE, EVERYTHING, ManagedObjects, Server, bindings, cluster_roles, config_maps, everything,
    in_default, map, named, role,
};
use super::server::Simulated;
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;

const NOTHING: [usize; 4] = [0, 0, 0, 0];
/// The number of kinds of the release.
const KINDS: usize = 6;

async fn until_watched(server: &Simulated) -> Result<()> {
    until("all kinds are watched", async || Ok(server.watches() == KINDS)).await
}

#[tokio::test]
async fn change_by_others_is_reported_and_what_is_no_change_is_not() -> TestResult {
    Ok(check_change_reports(&Server::simulated().await?).await?)
}

#[tokio::test]
async fn change_by_others_in_a_real_server_is_reported_and_what_is_no_change_is_not() -> TestResult {
    let Some(server) = Server::real().await? else { return Ok(()) };
    Ok(check_change_reports(&server).await?)
}

async fn check_change_reports(server: &Server) -> Result<()> {
    let other = server.other()?;
    let kept = ManagedObjects::new(server, everything());
    kept.wish(&[("dns", &map("dns", "one"))]);
    assert_eq!(kept.pass().await?, [EVERYTHING + 1, 0, 0, 0]);
    assert!(!kept.is_change_reported().await, "what we wrote is no news");
    other.edit(&bindings(), &named("shepherd:owners"), |binding| binding["subjects"] = json!([])).await?;
    kept.until_changed().await?;
    kept.until_changed().await?;
    assert_eq!(kept.pass().await?, [0, 1, 0, 0]);
    assert!(!kept.is_change_reported().await, "it was put right");
    other.delete(&bindings(), &named("shepherd:owners")).await??;
    kept.until_changed().await?;
    assert_eq!(kept.pass().await?, [1, 0, 0, 0]);
    other
        .edit(&bindings(), &named("shepherd:owners"), |binding| binding["metadata"]["labels"] = json!({}))
        .await?;
    kept.until_changed().await?;
    assert_eq!(kept.pass().await?, [0, 1, 0, 0], "the label is back");
    other.create(&cluster_roles(), &role("stray", "get", true)).await??;
    kept.until_changed().await?;
    assert_eq!(kept.pass().await?, [0, 0, 0, 1]);
    other.edit(&config_maps(), &in_default("dns"), |map| map["data"]["key"] = json!("two")).await?;
    kept.until_changed().await?;
    assert_eq!(kept.pass().await?, [0, 1, 0, 0]);
    assert!(!kept.is_change_reported().await);
    other
        .edit(&config_maps(), &in_default("dns"), |map| map["metadata"]["annotations"]["his"] = json!("own"))
        .await?;
    other.create(&cluster_roles(), &role("his-own", "get", false)).await??;
    assert!(!kept.is_change_reported().await, "nothing of that is ours");
    kept.wish(&[]);
    kept.until_changed().await?;
    assert_eq!(kept.pass().await?, [0, 0, 0, 1]);
    assert!(!kept.is_change_reported().await);
    Ok(())
}

#[tokio::test]
async fn a_watch_that_breaks_off_goes_on_from_where_nothing_had_happened() -> TestResult {
    let server = Server::simulated().await?;
    let kept = ManagedObjects::new(&server, ClusterConfig::default());
    kept.pass().await?;
    assert_eq!(kept.pass().await?, NOTHING);
    let simulated = server.in_this_process()?;
    until_watched(simulated).await?;
    // Other objects are written. Before the server compacts, it reports up to which revision none of our objects has
    // changed.
    simulated.advance();
    simulated.bookmark();
    simulated.forget();
    simulated.take_requests();
    simulated.break_watches();
    let mut requests = Vec::new();
    until("all kinds are watched again", async || {
        requests.extend(simulated.take_requests());
        Ok(requests.len() >= KINDS)
    })
    .await?;
    assert!(requests.iter().all(|query| query.starts_with("WATCH ")), "{requests:?}");
    assert!(!kept.is_change_reported().await, "nothing changed after the version that the server reported");
    server.other()?.create(&cluster_roles(), &role("stray", "get", true)).await??;
    kept.until_changed().await?;
    assert_eq!(kept.pass().await?, [0, 0, 0, 1]);
    Ok(())
}

#[tokio::test]
async fn requests_to_a_server_that_ends_each_watch_at_once_become_rare() -> TestResult {
    let server = Server::simulated().await?;
    let kept = ManagedObjects::new(&server, ClusterConfig::default());
    kept.pass().await?;
    let simulated = server.in_this_process()?;
    until_watched(simulated).await?;
    simulated.take_requests();
    simulated.end_watches();
    let mut requests = Vec::new();
    until("all kinds are watched again", async || {
        requests.extend(simulated.take_requests());
        Ok(requests.len() >= KINDS)
    })
    .await?;
    tokio::time::sleep(A_WHILE).await;
    requests.extend(simulated.take_requests());
    assert!(requests.iter().all(|query| query.starts_with("WATCH ")), "{requests:?}");
    // The delays double: ten requests for each take more than ten seconds.
    assert!(requests.len() < KINDS * 10, "{} requests: {requests:?}", requests.len());
    assert!(!kept.is_change_reported().await, "nothing was missed");
    Ok(())
}

#[tokio::test]
async fn what_a_server_has_forgotten_is_looked_up() -> TestResult {
    let server = Server::simulated().await?;
    let kept = ManagedObjects::new(&server, ClusterConfig::default());
    kept.pass().await?;
    let simulated = server.in_this_process()?;
    until_watched(simulated).await?;
    simulated.advance();
    simulated.forget();
    simulated.break_watches();
    kept.until_changed().await?;
    simulated.take_requests();
    // A watch that had not yet noticed the break when the pass began reports it later.
    until("all kinds are looked up, and watched from there", async || {
        if kept.is_change_reported().await {
            assert_eq!(kept.pass().await?, NOTHING);
            return Ok(false);
        }
        Ok(simulated.watches() == KINDS)
    })
    .await?;
    let requests = simulated.take_requests();
    let listed = requests.iter().filter(|query| query.starts_with("GET ")).count();
    assert!(
        listed >= KINDS && listed.is_multiple_of(KINDS),
        "each pass asks one list for each: {requests:?}"
    );
    let stray = role("stray", "get", true);
    assert_eq!(stray["metadata"]["labels"][MANAGED_LABEL], MANAGED_BUILT_IN);
    server.other()?.create(&cluster_roles(), &stray).await??;
    kept.until_changed().await?;
    Ok(())
}
