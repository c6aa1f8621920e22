//! Real API servers on an etcd that is restored with an image: what they serve, and what becomes of their clients.
//!
//! The API servers find the etcd by a link, as on a machine they find it by its path: the link leads to the restored etcd
//! once there is one. One API server runs on all the time, with its watch caches, and the other one is started again.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use futures::stream::BoxStream;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use kube::api::{ListParams, VersionMatch, WatchEvent};
use serde_json::{Value, json};
use shepherd::reconciler::objects::object_kind::ObjectKind;

use super::node::Node;
use super::owner::Owner;
use super::restoring::{image, order_restore, snapshot};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_program::etcdutl_program;
use crate::harness::etcd_servers::{in_time, until};
use crate::harness::kubernetes::{ProgramSet, folder};
use crate::objects::kit::{Other, config_maps, in_default, kind};
use crate::objects::real::{Files, Real};

/// Requests at a time while objects are created.
const AT_ONCE: usize = 16;
/// The revision of a restored etcd exceeds every one of before by about as much.
const REVISION_GAP: i64 = 900_000_000;

type Watch = BoxStream<'static, kube::Result<WatchEvent<Value>>>;

/// The kinds of the objects that are created, and how many of each.
fn kinds() -> [(ObjectKind, usize); 3] {
    [
        (config_maps(), 500),
        (kind("", "Secret", "secrets", true), 300),
        (kind("", "ServiceAccount", "serviceaccounts", true), 200),
    ]
}

fn object(kind: &ObjectKind, name: &str) -> Value {
    let mut object =
        json!({"apiVersion": "v1", "kind": kind.kind, "metadata": {"name": name, "namespace": "default"}});
    if kind.kind == "ConfigMap" {
        object["data"] = json!({"name": name});
    }
    object
}

/// Creates a thousand objects through these API servers in turns.
async fn create_objects(servers: [&Other; 2]) -> Result<()> {
    let objects = kinds().into_iter().flat_map(|(kind, count)| {
        (0..count).map(move |number| (kind.clone(), object(&kind, &format!("of-a-test-{number:03}"))))
    });
    let creating = stream::iter(servers.into_iter().cycle().zip(objects)).map(Ok::<_, anyhow::Error>);
    creating
        .try_for_each_concurrent(AT_ONCE, async |(server, (kind, object))| {
            server.create(&kind, &object).await??;
            Ok(())
        })
        .await
}

/// All objects of the kinds that were created, with everything that the server shows of them.
async fn objects(server: &Other) -> Result<BTreeMap<(String, String), Value>> {
    let mut found = BTreeMap::new();
    for (kind, _) in kinds() {
        let list = server.list(&kind, &ListParams::default()).await??;
        for item in list["items"].as_array().context("a list has items")? {
            let name = item["metadata"]["name"].as_str().context("an object has a name")?;
            found.insert((kind.plural.clone(), name.to_owned()), item.clone());
        }
    }
    Ok(found)
}

fn version_of(object: &Value) -> Result<&str> {
    object["metadata"]["resourceVersion"].as_str().context("it has no resourceVersion")
}

/// The HTTP status of the answer to a watch from this version on; `None` if it begins.
async fn refusal_of_watch(server: &Other, from: &str) -> Result<Option<u16>> {
    let mut events = match server.watch(&config_maps(), from).await {
        Ok(events) => events,
        Err(kube::Error::Api(status)) => return Ok(Some(status.code)),
        Err(error) => return Err(error.into()),
    };
    match in_time("the first event of a watch", events.try_next()).await? {
        Ok(Some(WatchEvent::Error(status))) | Err(kube::Error::Api(status)) => Ok(Some(status.code)),
        Ok(_) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether a watch ends without an object of after the restore.
async fn ends(mut watch: Watch, before: i64) -> Result<()> {
    loop {
        match in_time("the end of a watch of before", watch.try_next()).await? {
            Ok(None | Some(WatchEvent::Error(_))) | Err(_) => return Ok(()),
            Ok(Some(WatchEvent::Bookmark(bookmark))) => {
                let version: i64 = bookmark.metadata.resource_version.parse()?;
                ensure!(version < before + REVISION_GAP, "a watch of before continues at {version}");
            }
            Ok(Some(
                WatchEvent::Added(object) | WatchEvent::Modified(object) | WatchEvent::Deleted(object),
            )) => {
                let version: i64 = version_of(&object)?.parse()?;
                ensure!(version < before + REVISION_GAP, "a watch of before continues: {object}");
            }
        }
    }
}

/// What a client of an API server of before knows.
struct Client {
    /// The resourceVersion of a list of before the image.
    version: String,
    /// Where a list of before the image continues.
    continue_token: String,
    /// An object that was changed after the image.
    changed: Value,
    /// Its resourceVersion is of after the image, too.
    later: Value,
}

impl Client {
    /// Checks that the server continues nothing of before.
    async fn has_to_list_again(&self, server: &Other) -> Result<()> {
        let later = version_of(&self.later)?;
        for version in [self.version.as_str(), later] {
            ensure!(refusal_of_watch(server, version).await? == Some(410), "a watch begins at {version}");
            let exact = ListParams::default().at(version).matching(VersionMatch::Exact);
            let listed = server.list(&config_maps(), &exact).await?;
            let code = listed.as_ref().err().map(|status| status.code);
            ensure!(code == Some(410), "a list is of {version}: {listed:?}");
        }
        let rest = ListParams::default().limit(10).continue_token(&self.continue_token);
        let listed = server.list(&config_maps(), &rest).await?;
        let code = listed.as_ref().err().map(|status| status.code);
        ensure!(code == Some(410), "a list of before continues: {listed:?}");
        let replaced = server.replace(&config_maps(), &self.changed).await?;
        let code = replaced.as_ref().err().map(|status| status.code);
        ensure!(code == Some(409), "an object of after the image is replaced: {replaced:?}");
        Ok(())
    }
}

/// Leads API servers to the etcd of this node.
fn lead_to(link: &Path, node: &Node) -> Result<()> {
    let _ = std::fs::remove_file(link);
    Ok(symlink(node.files().etcd_directory(), link)?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn api_servers_serve_the_objects_of_the_image_and_their_clients_list_again() -> TestResult {
    if etcdutl_program()?.is_none() || folder(ProgramSet::ApiServer)?.is_none() {
        return Ok(());
    }
    let (mut owner, mut first) = (Owner::new()?, Node::new()?);
    first.ask(owner.founding_order())?;
    first.start()?;
    first.until_control_plane(true).await?;
    owner.claim(&first).await?;
    let place = tempfile::tempdir()?;
    let link = place.path().join("etcd");
    lead_to(&link, &first)?;
    let (socket, files) = (link.join("client:1"), Files::generate()?);
    let running = Real::start_on(&socket, files.clone()).await?.context("no API server")?;
    let mut restarted = Real::start_on(&socket, files).await?.context("no API server")?;
    let (one, other) = (Other::new(&running.connection())?, Other::new(&restarted.connection())?);
    create_objects([&one, &other]).await?;
    let before = objects(&other).await?;
    let ours = before.keys().filter(|(_, name)| name.starts_with("of-a-test-")).count();
    assert_eq!((ours, before == objects(&one).await?), (1_000, true));

    let page = one.list(&config_maps(), &ListParams::default().limit(10)).await??;
    let version = version_of(&page)?.to_owned();
    let continue_token = page["metadata"]["continue"].as_str().context("it is all on one page")?.to_owned();
    let mut watch = one.watch(&config_maps(), &version).await?;
    let (taken, image) = (snapshot(&owner).await?, image(&owner).await?);
    let later = one.create(&config_maps(), &object(&config_maps(), "later")).await??;
    let changed = in_default("of-a-test-007");
    let changed =
        other.edit(&config_maps(), &changed, |object| object["data"] = json!({"of": "later"})).await?;
    let event = in_time("a change", watch.try_next()).await??;
    assert!(matches!(event, Some(WatchEvent::Added(_))), "the watch does not work: {event:?}");
    let client = Client { version, continue_token, changed, later };
    let last: i64 = version_of(&client.changed)?.parse()?;

    restarted.kill()?;
    first.cut_power().await?;
    let mut second = Node::at(first.address)?;
    order_restore(&owner, &second, &taken, &image)?;
    second.start()?;
    second.until_control_plane(true).await?;
    lead_to(&link, &second)?;
    restarted.run().await?;
    assert!(objects(&other).await? == before, "a restarted API server serves other objects");
    client.has_to_list_again(&other).await?;
    ends(watch, last).await?;
    until("the API server that ran on has the objects of the image", async || {
        // Its readers wait for a moment, and some get an error.
        Ok(objects(&one).await.is_ok_and(|found| found == before))
    })
    .await?;
    client.has_to_list_again(&one).await?;

    // A client that has listed again sees what is written from now on, through each of them.
    let listed = version_of(&other.list(&config_maps(), &ListParams::default()).await??)?.to_owned();
    let mut watch = other.watch(&config_maps(), &listed).await?;
    let written = one.create(&config_maps(), &object(&config_maps(), "later")).await??;
    let version: i64 = version_of(&written)?.parse()?;
    assert!(version > last + REVISION_GAP, "a client of before could continue: {last}, {version}");
    let event = in_time("what was written", watch.try_next()).await??;
    let Some(WatchEvent::Added(received)) = event else { panic!("another event: {event:?}") };
    assert_eq!(received, written);
    Ok(())
}
