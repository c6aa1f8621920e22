//! What others change is told at once, and nothing else is.

use anyhow::Result;
use serde_json::json;
use shepherd::reconciler::objects::kind::BUILT_IN;
use shepherd::reconciler::objects::kind::KEPT;
use shepherd::reconciler::objects::wishes::Wishes;

use super::kit::{
    EVERYTHING, Kept, Server, bindings, cluster_roles, config_maps, everything, in_default, map, named, role,
};
use super::server::Simulated;
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;

const NOTHING: [usize; 4] = [0, 0, 0, 0];
/// The kinds of the release.
const KINDS: usize = 6;

async fn until_watched(server: &Simulated) -> Result<()> {
    until("all kinds are watched", async || Ok(server.watches() == KINDS)).await
}

#[tokio::test]
async fn what_others_change_is_told_and_what_is_no_change_is_not() -> TestResult {
    Ok(told(&Server::simulated().await?).await?)
}

#[tokio::test]
async fn what_others_change_in_a_real_server_is_told_and_what_is_no_change_is_not() -> TestResult {
    let Some(server) = Server::real().await? else { return Ok(()) };
    Ok(told(&server).await?)
}

async fn told(server: &Server) -> Result<()> {
    let other = server.other()?;
    let kept = Kept::new(server, everything());
    kept.wish(&[("dns", &map("dns", "one"))]);
    assert_eq!(kept.pass().await?, [EVERYTHING + 1, 0, 0, 0]);
    assert!(!kept.is_told().await, "what we wrote is no news");
    other.edit(&bindings(), &named("shepherd:owners"), |binding| binding["subjects"] = json!([])).await?;
    kept.until_changed().await?;
    kept.until_changed().await?;
    assert_eq!(kept.pass().await?, [0, 1, 0, 0]);
    assert!(!kept.is_told().await, "it was put right");
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
    assert!(!kept.is_told().await);
    other
        .edit(&config_maps(), &in_default("dns"), |map| map["metadata"]["annotations"]["his"] = json!("own"))
        .await?;
    other.create(&cluster_roles(), &role("his-own", "get", false)).await??;
    assert!(!kept.is_told().await, "nothing of that is ours");
    kept.wish(&[]);
    kept.until_changed().await?;
    assert_eq!(kept.pass().await?, [0, 0, 0, 1]);
    assert!(!kept.is_told().await);
    Ok(())
}

#[tokio::test]
async fn a_watch_that_breaks_off_goes_on_from_where_nothing_had_happened() -> TestResult {
    let server = Server::simulated().await?;
    let kept = Kept::new(&server, Wishes::default());
    kept.pass().await?;
    assert_eq!(kept.pass().await?, NOTHING);
    let simulated = server.in_this_process()?;
    until_watched(simulated).await?;
    // Others write elsewhere, and the server says up to where nothing of ours has changed before it forgets.
    simulated.advance();
    simulated.bookmark();
    simulated.forget();
    simulated.asked();
    simulated.break_watches();
    let mut asked = Vec::new();
    until("all kinds are watched again", async || {
        asked.extend(simulated.asked());
        Ok(asked.len() >= KINDS)
    })
    .await?;
    assert!(asked.iter().all(|asked| asked.starts_with("WATCH ")), "{asked:?}");
    assert!(!kept.is_told().await, "nothing has changed, and the server had said so");
    server.other()?.create(&cluster_roles(), &role("stray", "get", true)).await??;
    kept.until_changed().await?;
    assert_eq!(kept.pass().await?, [0, 0, 0, 1]);
    Ok(())
}

#[tokio::test]
async fn what_a_server_has_forgotten_is_looked_up() -> TestResult {
    let server = Server::simulated().await?;
    let kept = Kept::new(&server, Wishes::default());
    kept.pass().await?;
    let simulated = server.in_this_process()?;
    until_watched(simulated).await?;
    simulated.advance();
    simulated.forget();
    simulated.break_watches();
    kept.until_changed().await?;
    simulated.asked();
    // A watch that had not heard of it when the pass began tells it later.
    until("all kinds are looked up, and watched from there", async || {
        if kept.is_told().await {
            assert_eq!(kept.pass().await?, NOTHING);
            return Ok(false);
        }
        Ok(simulated.watches() == KINDS)
    })
    .await?;
    let asked = simulated.asked();
    let listed = asked.iter().filter(|asked| asked.starts_with("GET ")).count();
    assert!(listed >= KINDS && listed.is_multiple_of(KINDS), "each pass asks one list for each: {asked:?}");
    let stray = role("stray", "get", true);
    assert_eq!(stray["metadata"]["labels"][KEPT], BUILT_IN);
    server.other()?.create(&cluster_roles(), &stray).await??;
    kept.until_changed().await?;
    Ok(())
}
