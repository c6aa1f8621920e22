//! The objects that a cluster's add-ons declare are applied, kept, and deleted with their add-on.

use anyhow::{Context as _, Result};
use serde_json::json;
use shepherd::reconciler::objects::ObjectReconciler as _;
use shepherd::reconciler::objects::cluster_config::ClusterConfig;
use shepherd::reconciler::objects::object_kind::{
    ADD_ON_LABEL, MANAGED_ADD_ON, MANAGED_LABEL, resource_version,
};

use super::kit::{ManagedObjects, Server, cluster_roles, config_maps, in_default, kind, map, named, role};
use crate::harness::aloud::TestResult;

const NOTHING: [usize; 4] = [0, 0, 0, 0];

async fn without_add_ons(server: &Server) -> Result<ManagedObjects> {
    let kept = ManagedObjects::new(server, ClusterConfig::default());
    kept.pass().await?;
    Ok(kept)
}

#[tokio::test]
async fn what_is_declared_is_applied_when_it_differs_and_goes_with_its_add_on() -> TestResult {
    Ok(applied_and_pruned(&Server::simulated().await?).await?)
}

#[tokio::test]
async fn what_is_declared_is_applied_when_it_differs_and_goes_with_its_add_on_in_a_real_server() -> TestResult
{
    let Some(server) = Server::real().await? else { return Ok(()) };
    Ok(applied_and_pruned(&server).await?)
}

async fn applied_and_pruned(server: &Server) -> Result<()> {
    let (other, maps) = (server.other()?, config_maps());
    let kept = without_add_ons(server).await?;
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: dns}\n---\n";
    let inside =
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: inside, namespace: dns}\ndata: {key: '1'}\n---\n";
    let reads = "apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata: {name: 'dns:reads'}\nrules:\n\
                 - {apiGroups: [''], resources: [services], verbs: [list]}\n";
    kept.wish(&[("dns", &format!("{inside}{namespace}{reads}")), ("network", &map("network", "one"))]);
    assert_eq!(kept.pass().await?, [4, 0, 0, 0], "{:?}", kept.troubles());
    assert_eq!(kept.pass().await?, NOTHING, "nothing differs, and nothing is applied");
    let made = other.get(&maps, &in_default("network")).await??;
    assert_eq!(made["metadata"]["labels"], json!({MANAGED_LABEL: MANAGED_ADD_ON, ADD_ON_LABEL: "network"}));
    // What other clients add stays; what they change is restored.
    let annotated = other
        .edit(&maps, &in_default("network"), |map| map["metadata"]["annotations"]["his"] = json!("own"))
        .await?;
    assert_eq!(kept.pass().await?, NOTHING);
    let after = other.get(&maps, &in_default("network")).await??;
    assert_eq!(resource_version(&after), resource_version(&annotated), "nothing was applied");
    other.edit(&maps, &in_default("network"), |map| map["data"]["key"] = json!("two")).await?;
    other.delete(&cluster_roles(), &named("dns:reads")).await??;
    assert_eq!(kept.pass().await?, [1, 1, 0, 0]);
    let back = other.get(&maps, &in_default("network")).await??;
    assert_eq!(
        (&back["data"]["key"], &back["metadata"]["annotations"]["his"]),
        (&json!("one"), &json!("own"))
    );
    // Another manifest; another program; one add-on less.
    kept.wish(&[("dns", &format!("{inside}{namespace}{reads}")), ("network", &map("network", "three"))]);
    assert_eq!(kept.pass().await?, [0, 1, 0, 0]);
    let wishes = kept.wishes.borrow().clone().context("there are some")?;
    assert_eq!(
        ManagedObjects::new(server, wishes).pass().await?,
        NOTHING,
        "one that begins finds all as it should be"
    );
    kept.wish(&[("dns", &format!("{namespace}{reads}"))]);
    assert_eq!(
        kept.pass().await?,
        [0, 0, 0, 2],
        "one that is declared no more, and one of an add-on that is gone"
    );
    kept.wish(&[]);
    assert_eq!(kept.pass().await?, [0, 0, 0, 2]);
    assert!(other.get(&cluster_roles(), &named("dns:reads")).await?.is_err());
    assert_eq!(kept.troubles(), Vec::<String>::new());
    Ok(())
}

#[tokio::test]
async fn objects_of_the_former_leader_are_found_by_the_next_one() -> TestResult {
    let server = Server::simulated().await?;
    let before = without_add_ons(&server).await?;
    before.wish(&[("dns", &map("dns", "one"))]);
    assert_eq!(before.pass().await?, [1, 0, 0, 0]);
    assert_eq!(without_add_ons(&server).await?.pass().await?, NOTHING);
    assert!(
        server.other()?.get(&config_maps(), &in_default("dns")).await?.is_err(),
        "it was deleted by its first pass"
    );
    Ok(())
}

#[tokio::test]
async fn what_cannot_be_read_deletes_nothing_that_it_made() -> TestResult {
    let server = Server::simulated().await?;
    let other = server.other()?;
    let kept = without_add_ons(&server).await?;
    kept.wish(&[("dns", &map("dns", "one")), ("network", &map("network", "one"))]);
    assert_eq!(kept.pass().await?, [2, 0, 0, 0]);
    for broken in ["", "a: [", "kind: ConfigMap"] {
        kept.wish(&[("dns", broken)]);
        let deleted = usize::from(broken.is_empty());
        assert_eq!(kept.pass().await?, [0, 0, 0, deleted], "the other one's goes");
        assert!(
            other.get(&config_maps(), &in_default("dns")).await?.is_ok(),
            "{broken:?} deletes what it made"
        );
        let troubles = kept.troubles();
        assert!(troubles.len() == 1 && troubles[0].starts_with("the add-on dns: its "), "{troubles:?}");
    }
    kept.wish(&[("dns", &map("dns", "two"))]);
    assert_eq!(kept.pass().await?, [0, 1, 0, 0]);
    assert_eq!(kept.troubles(), Vec::<String>::new());
    Ok(())
}

#[tokio::test]
async fn what_an_add_on_cannot_do_is_reported_and_blocks_nothing() -> TestResult {
    let server = Server::simulated().await?;
    let other = server.other()?;
    let kept = without_add_ons(&server).await?;
    let theirs = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "theirs", "namespace": "default"},
        "data": {"key": "one"}});
    other.create(&config_maps(), &theirs).await??;
    let unknown = "apiVersion: example.com/v1\nkind: Thing\nmetadata: {name: x}\n---\n";
    let ours = "apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRoleBinding\nmetadata: {name: 'shepherd:owners'}\n---\n";
    let refused =
        "apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: x}\nhandler: 'Not A Name'\n---\n";
    let manifest = [unknown, ours, refused, &map("theirs", "one"), &map("own", "one")].concat();
    kept.wish(&[("dns", &manifest)]);
    assert_eq!(kept.pass().await?, [1, 0, 0, 0]);
    let troubles = kept.troubles();
    for says in [
        "this cluster has no kind Thing of example.com/v1",
        "clusterrolebindings.rbac.authorization.k8s.io shepherd:owners of the add-on dns: it belongs to the release",
        "runtimeclasses.node.k8s.io x of the add-on dns: ",
        "configmaps default/theirs of the add-on dns: an object of this name was made by somebody else",
    ] {
        assert!(troubles.iter().any(|trouble| trouble.contains(says)), "{says} is not in {troubles:#?}");
    }
    assert_eq!(troubles.len(), 4, "{troubles:#?}");
    // Objects that belonged to another client before still belong to it.
    kept.wish(&[]);
    assert_eq!(kept.pass().await?, [0, 0, 0, 1]);
    assert!(other.get(&config_maps(), &in_default("theirs")).await?.is_ok());
    let namespaces = kind("", "Namespace", "namespaces", false);
    assert!(other.get(&namespaces, &named("none")).await?.is_err());
    assert!(kept.objects.reconcile().await?.is_unchanged());
    other.create(&cluster_roles(), &role("x", "get", false)).await??;
    Ok(())
}
