//! Object reconciliation: the release's objects are created, updated, replaced and deleted; foreign objects stay.

use anyhow::{Context as _, Result};
use serde_json::json;
use shepherd::reconciler::objects::ObjectReconciler as _;
use shepherd::reconciler::objects::built_in::{BuiltInObject, STORAGE_PROVISIONER, built_in_objects};
use shepherd::reconciler::objects::cluster_config::ClusterConfig;
use shepherd::reconciler::objects::diff::{create_body, is_satisfied};
use shepherd::reconciler::objects::object_kind::{
    MANAGED_BUILT_IN, MANAGED_LABEL, ObjectKey, resource_version, uid,
};

use super::kit::{
    EVERYTHING, ManagedObjects, Server, bindings, cluster_roles, everything, named, priorities, role,
    runtimes,
};
use crate::harness::aloud::TestResult;

const NOTHING: [usize; 4] = [0, 0, 0, 0];

#[tokio::test]
async fn objects_are_made_put_right_and_deleted() -> TestResult {
    Ok(made_put_right_and_deleted(&Server::simulated().await?).await?)
}

#[tokio::test]
async fn objects_are_made_put_right_and_deleted_in_a_real_server() -> TestResult {
    let Some(server) = Server::real().await? else { return Ok(()) };
    Ok(made_put_right_and_deleted(&server).await?)
}

async fn made_put_right_and_deleted(server: &Server) -> Result<()> {
    let other = server.other()?;
    let kept = ManagedObjects::new(server, everything());
    assert_eq!(kept.objects.describe_plan().await?.lines().count(), EVERYTHING, "what a pass would do");
    assert_eq!(kept.pass().await?, [EVERYTHING, 0, 0, 0]);
    assert_eq!(kept.pass().await?, NOTHING);
    assert_eq!(kept.objects.describe_plan().await?, "");
    // Another client changes one object, adds another one, deletes some, and puts the label on one of its own.
    other.edit(&cluster_roles(), &named(STORAGE_PROVISIONER), |role| role["rules"] = json!([])).await?;
    other
        .edit(&bindings(), &named("shepherd:viewers"), |binding| {
            binding["metadata"]["annotations"] = json!({"his": "own"});
        })
        .await?;
    other.delete(&bindings(), &named("shepherd:owners")).await??;
    other.create(&cluster_roles(), &role("his", "get", true)).await??;
    other.create(&cluster_roles(), &role("his-own", "get", false)).await??;
    let planned = kept.objects.describe_plan().await?;
    for line in [
        "update clusterroles.rbac.authorization.k8s.io shepherd:storage-provisioner",
        "create clusterrolebindings.rbac.authorization.k8s.io shepherd:owners",
        "delete clusterroles.rbac.authorization.k8s.io his",
    ] {
        assert!(planned.lines().any(|planned| planned == line), "{line} is not in\n{planned}");
    }
    assert_eq!(planned.lines().count(), 3, "{planned}");
    assert_eq!(kept.pass().await?, [1, 1, 0, 1]);
    assert_eq!(kept.pass().await?, NOTHING);
    let annotated = other.get(&bindings(), &named("shepherd:viewers")).await??;
    assert_eq!(annotated["metadata"]["annotations"]["his"], "own", "what others say of an object stays");
    assert!(other.get(&cluster_roles(), &named("his")).await?.is_err());
    assert!(other.get(&cluster_roles(), &named("his-own")).await?.is_ok());
    // An object with an immutable difference is replaced, and only that one.
    let before = other.get(&priorities(), &named("shepherd-spare-time")).await??;
    other.delete(&priorities(), &named("shepherd-spare-time")).await??;
    let mut wrong = before.clone();
    wrong["value"] = json!(5);
    for field in ["uid", "resourceVersion", "managedFields", "creationTimestamp"] {
        wrong["metadata"].as_object_mut().context("it has metadata")?.remove(field);
    }
    other.create(&priorities(), &wrong).await??;
    assert_eq!(kept.pass().await?, [0, 0, 1, 0]);
    let after = other.get(&priorities(), &named("shepherd-spare-time")).await??;
    assert_eq!(after["value"], before["value"]);
    assert_eq!(kept.pass().await?, NOTHING);
    // The cluster's configuration now has fewer objects.
    kept.wishes.send_replace(Some(ClusterConfig::default()));
    assert_eq!(kept.pass().await?, [0, 0, 0, 6]);
    // A program that has just started has nothing to do either.
    assert_eq!(ManagedObjects::new(server, ClusterConfig::default()).pass().await?, NOTHING);
    assert_eq!(kept.troubles(), Vec::<String>::new());
    Ok(())
}

#[tokio::test]
async fn what_others_put_where_nothing_is_to_be_is_taken_away() -> TestResult {
    Ok(emptied(&Server::simulated().await?).await?)
}

#[tokio::test]
async fn what_others_put_where_nothing_is_to_be_is_taken_away_in_a_real_server() -> TestResult {
    let Some(server) = Server::real().await? else { return Ok(()) };
    Ok(emptied(&server).await?)
}

async fn emptied(server: &Server) -> Result<()> {
    let other = server.other()?;
    let kept = ManagedObjects::new(server, everything());
    assert_eq!(kept.pass().await?, [EVERYTHING, 0, 0, 0]);
    let key = named("runc");
    let added = other
        .edit(&runtimes(), &key, |class| class["scheduling"] = json!({"nodeSelector": {"his": "own"}}))
        .await?;
    assert_eq!(added["scheduling"]["nodeSelector"]["his"], "own");
    assert_eq!(kept.pass().await?, [0, 1, 0, 0]);
    let after = other.get(&runtimes(), &key).await??;
    assert_eq!(uid(&after), uid(&added), "it is the same object");
    assert!(after["scheduling"]["nodeSelector"].is_null(), "{after}");
    assert_eq!(kept.pass().await?, NOTHING);
    Ok(())
}

#[tokio::test]
async fn every_field_that_a_server_would_fill_in_is_set() -> TestResult {
    Ok(nothing_is_filled_in(&Server::simulated().await?).await?)
}

/// The API server of Kubernetes 1.20 knows fewer fields than these types, and fills in no default that they do not set.
#[tokio::test]
async fn every_field_that_a_real_server_would_fill_in_is_set() -> TestResult {
    let Some(server) = Server::real().await? else { return Ok(()) };
    Ok(nothing_is_filled_in(&server).await?)
}

async fn nothing_is_filled_in(server: &Server) -> Result<()> {
    let api = server.api().await?;
    for BuiltInObject { kind, object } in built_in_objects(&everything())? {
        let sent = create_body(&object);
        let mut made = api.create(&kind, &ObjectKey::from_object(&object), &sent).await?;
        let metadata = made["metadata"].as_object_mut().context("it has metadata")?;
        metadata.retain(|field, _| ["name", "labels", "annotations"].contains(&field.as_str()));
        assert!(
            is_satisfied(&made, Some(&sent)),
            "the server fills in a field that is not set: sent {sent}, and it became {made}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn object_of_another_owner_is_reported_and_blocks_nothing() -> TestResult {
    Ok(clash(&Server::simulated().await?).await?)
}

#[tokio::test]
async fn object_of_another_owner_is_reported_and_blocks_nothing_in_a_real_server() -> TestResult {
    let Some(server) = Server::real().await? else { return Ok(()) };
    Ok(clash(&server).await?)
}

async fn clash(server: &Server) -> Result<()> {
    let other = server.other()?;
    let theirs = other.create(&cluster_roles(), &role(STORAGE_PROVISIONER, "get", false)).await??;
    let kept = ManagedObjects::new(server, everything());
    let planned = kept.objects.describe_plan().await?;
    assert!(
        planned.contains("problem: clusterroles.rbac.authorization.k8s.io shepherd:storage-provisioner"),
        "{planned}"
    );
    for created in [EVERYTHING - 1, 0] {
        assert_eq!(kept.pass().await?, [created, 0, 0, 0], "all others are made, and the pass is done");
        let troubles = kept.troubles();
        assert!(
            troubles.len() == 1
                && troubles[0].contains("made by somebody else")
                && troubles[0].contains(
                    "kubectl get clusterroles.rbac.authorization.k8s.io shepherd:storage-provisioner"
                ),
            "{troubles:?}"
        );
    }
    let after = other.get(&cluster_roles(), &named(STORAGE_PROVISIONER)).await??;
    assert_eq!(resource_version(&after), resource_version(&theirs), "it was not touched");
    other.delete(&cluster_roles(), &named(STORAGE_PROVISIONER)).await??;
    assert_eq!(kept.pass().await?, [1, 0, 0, 0]);
    assert_eq!(kept.troubles(), Vec::<String>::new());
    // An object of ours without the label is still ours.
    other.edit(&runtimes(), &named("runc"), |class| class["metadata"]["labels"] = json!({})).await?;
    assert_eq!(kept.pass().await?, [0, 1, 0, 0]);
    let labelled = other.get(&runtimes(), &named("runc")).await??;
    assert_eq!(labelled["metadata"]["labels"][MANAGED_LABEL], MANAGED_BUILT_IN);
    assert_eq!(kept.pass().await?, NOTHING);
    Ok(())
}

#[tokio::test]
async fn what_is_not_what_was_judged_any_more_is_not_deleted() -> TestResult {
    let server = Server::simulated().await?;
    let (api, other) = (server.api().await?, server.other()?);
    let stray = other.create(&cluster_roles(), &role("stray", "get", true)).await??;
    let seen = shepherd::reconciler::objects::object_plan::Precondition::from_object(&stray);
    // Between the list and the deletion another client removes the label.
    other.edit(&cluster_roles(), &named("stray"), |role| role["metadata"]["labels"] = json!({})).await?;
    let answer = api.delete(&cluster_roles(), &named("stray"), &seen).await;
    assert!(answer.is_err(), "it was deleted, whatever it was");
    let kept = ManagedObjects::new(&server, ClusterConfig::default());
    kept.pass().await?;
    let left = other.get(&cluster_roles(), &named("stray")).await??;
    assert_eq!(uid(&left), uid(&stray), "it is his now");
    Ok(())
}

#[tokio::test]
async fn one_kind_that_fails_hides_no_other() -> TestResult {
    let server = Server::simulated().await?;
    let other = server.other()?;
    // Another client's finalizer holds it, and it is in the way of its replacement.
    let mut held = role(STORAGE_PROVISIONER, "get", true);
    held["metadata"]["finalizers"] = json!(["somebody.example/holds"]);
    other.create(&cluster_roles(), &held).await??;
    other.delete(&cluster_roles(), &named(STORAGE_PROVISIONER)).await??;
    let kept = ManagedObjects::new(&server, everything());
    for _ in 0..2 {
        let error = kept.objects.reconcile().await.unwrap_err().to_string();
        assert!(error.contains("shepherd:storage-provisioner") && error.contains("finalizers"), "{error}");
    }
    assert!(other.get(&bindings(), &named("shepherd:owners")).await?.is_ok(), "the rest is made");
    other
        .edit(&cluster_roles(), &named(STORAGE_PROVISIONER), |role| {
            role["metadata"]["finalizers"] = json!([]);
        })
        .await?;
    assert_eq!(kept.pass().await?, [1, 0, 0, 0]);
    Ok(())
}

#[tokio::test]
async fn nothing_is_done_before_it_is_known_what_the_cluster_wishes() -> TestResult {
    let server = Server::simulated().await?;
    let kept = ManagedObjects::new(&server, everything());
    assert_eq!(kept.pass().await?, [EVERYTHING, 0, 0, 0]);
    // Another program that does not know these objects.
    let (wishes, receiver) = tokio::sync::watch::channel(None);
    let objects =
        shepherd::reconciler::objects::reconcile::KubernetesObjects::new(server.connection(), receiver);
    let error = objects.reconcile().await.unwrap_err().to_string();
    assert!(error.contains("the configuration of the cluster is not known yet"), "{error}");
    assert_eq!(kept.pass().await?, NOTHING, "it has taken nothing away");
    wishes.send_replace(Some(everything()));
    assert!(objects.reconcile().await?.is_unchanged());
    Ok(())
}

#[tokio::test]
async fn a_thousand_strays_are_deleted() -> TestResult {
    Ok(strays(&Server::simulated().await?, 1000).await?)
}

#[tokio::test]
async fn a_thousand_strays_are_deleted_from_a_real_server() -> TestResult {
    let Some(server) = Server::real().await? else { return Ok(()) };
    Ok(strays(&server, 1000).await?)
}

async fn strays(server: &Server, many: usize) -> Result<()> {
    let other = server.other()?;
    for number in 0..many {
        other.create(&cluster_roles(), &role(&format!("stray:{number}"), "get", true)).await??;
    }
    let kept = ManagedObjects::new(server, ClusterConfig::default());
    assert_eq!(kept.pass().await?, [5, 0, 0, many]);
    assert_eq!(server.api().await?.list(&cluster_roles()).await?.items, Vec::<serde_json::Value>::new());
    assert_eq!(kept.pass().await?, NOTHING);
    Ok(())
}
