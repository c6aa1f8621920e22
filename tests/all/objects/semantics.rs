//! The properties of an API server that the reconciler relies on: they are the same for the server in this process and
//! the real one.

use anyhow::{Context as _, Result, bail};
use futures::StreamExt as _;
use serde_json::{Value, json};
use shepherd::reconciler::objects::api_client::{ApiClient, ApiError, ObjectEvent};
use shepherd::reconciler::objects::api_error::{ApiErrorKind, classify_api_error};
use shepherd::reconciler::objects::diff::{applied_fields, was_written_by_us};
use shepherd::reconciler::objects::discovery::ApiDiscovery;
use shepherd::reconciler::objects::object_kind::{
    MANAGED_LABEL, ObjectKind, is_terminating, resource_version, uid,
};
use shepherd::reconciler::objects::object_plan::Precondition;

use super::kit::{
    Other, Server, bindings, cluster_roles, config_maps, in_default, named, node, nodes, priorities, role,
    runtimes,
};
use super::server::kinds::UNKNOWN_FIELD;
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::in_time;

#[tokio::test]
async fn server_in_this_process_keeps_the_semantics() -> TestResult {
    Ok(suite(&Server::simulated().await?).await?)
}

#[tokio::test]
async fn real_server_keeps_the_semantics() -> TestResult {
    let Some(server) = Server::real().await? else { return Ok(()) };
    Ok(suite(&server).await?)
}

async fn suite(server: &Server) -> Result<()> {
    versions_and_names(server).await.context("versions and names")?;
    what_cannot_be_changed(server).await.context("what cannot be changed")?;
    preconditions(server).await.context("preconditions")?;
    labels(server).await.context("labels")?;
    watches(server).await.context("watches")?;
    applying(server).await.context("applying")?;
    amending(server).await.context("amending")?;
    kinds(server).await.context("kinds")
}

fn refused<T: std::fmt::Debug>(answer: Result<T, ApiError>) -> ApiErrorKind {
    assert!(matches!(answer, Err(ApiError::Rejected(_))), "it was not refused: {answer:?}");
    match answer {
        Err(ApiError::Rejected(status)) => classify_api_error(&status),
        _ => ApiErrorKind::Other,
    }
}

async fn versions_and_names(server: &Server) -> Result<()> {
    let (api, roles, key) = (server.api().await?, cluster_roles(), named("suite:a"));
    assert_eq!(api.get(&roles, &key).await?, None);
    let first = api.create(&roles, &key, &role("suite:a", "get", true)).await?;
    assert!(!uid(&first).is_empty() && !resource_version(&first).is_empty() && was_written_by_us(&first));
    assert_eq!(
        refused(api.create(&roles, &key, &role("suite:a", "get", true)).await),
        ApiErrorKind::AlreadyExists
    );
    let mut second = first.clone();
    second["rules"][0]["verbs"] = json!(["list"]);
    let second = api.replace(&roles, &key, &second).await?;
    assert_ne!(resource_version(&second), resource_version(&first));
    assert_eq!(uid(&second), uid(&first));
    let mut stale = first.clone();
    stale["rules"][0]["verbs"] = json!(["watch"]);
    assert_eq!(refused(api.replace(&roles, &key, &stale).await), ApiErrorKind::Conflict, "a stale version");
    let unchanged = api.replace(&roles, &key, &second).await?;
    assert_eq!(
        resource_version(&unchanged),
        resource_version(&second),
        "a write that changes nothing is none"
    );
    assert_eq!(
        refused(api.delete(&roles, &named("suite:never"), &Precondition::from_object(&first)).await),
        ApiErrorKind::NotFound
    );
    Ok(())
}

async fn changed(
    api: &ApiClient,
    kind: &ObjectKind,
    object: Value,
    change: impl FnOnce(&mut Value),
) -> Result<ApiErrorKind> {
    let key = named(object["metadata"]["name"].as_str().context("it has a name")?);
    let mut made = api.create(kind, &key, &object).await?;
    change(&mut made);
    Ok(refused(api.replace(kind, &key, &made).await))
}

async fn what_cannot_be_changed(server: &Server) -> Result<()> {
    let api = server.api().await?;
    let runtime = |name: &str| json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": "one"});
    let judged =
        changed(&api, &runtimes(), runtime("suite-a"), |object| object["handler"] = json!("two")).await?;
    assert_eq!(judged, ApiErrorKind::Immutable, "one cause");
    let judged =
        changed(&api, &runtimes(), runtime("suite-b"), |object| object["handler"] = json!("Not A Name"))
            .await?;
    assert_eq!(judged, ApiErrorKind::Other, "it cannot be changed, and would not do either");
    let priority = json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "suite"},
        "value": 7});
    let judged = changed(&api, &priorities(), priority, |object| object["value"] = json!(8)).await?;
    assert_eq!(judged, ApiErrorKind::Immutable, "in other words");
    let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": {"name": "suite:b"}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole",
        "name": "view"}, "subjects": [{"kind": "User", "name": "u"}]});
    let judged =
        changed(&api, &bindings(), binding, |object| object["roleRef"]["name"] = json!("edit")).await?;
    assert_eq!(judged, ApiErrorKind::Immutable, "in yet others");
    let filled = api.get(&bindings(), &named("suite:b")).await?.context("it was made")?;
    assert_eq!(filled["subjects"][0]["apiGroup"], "rbac.authorization.k8s.io", "filled in");
    Ok(())
}

async fn preconditions(server: &Server) -> Result<()> {
    let (api, roles, key) = (server.api().await?, cluster_roles(), named("suite:c"));
    let first = api.create(&roles, &key, &role("suite:c", "get", false)).await?;
    let mut second = first.clone();
    second["rules"][0]["verbs"] = json!(["list"]);
    let second = api.replace(&roles, &key, &second).await?;
    assert_eq!(
        refused(api.delete(&roles, &key, &Precondition::from_object(&first)).await),
        ApiErrorKind::Conflict,
        "another state"
    );
    let mut another = Precondition::from_object(&second);
    "00000000-0000-0000-0000-000000000000".clone_into(&mut another.uid);
    assert_eq!(refused(api.delete(&roles, &key, &another).await), ApiErrorKind::Conflict, "another object");
    api.delete(&roles, &key, &Precondition::from_object(&second)).await?;
    assert_eq!(api.get(&roles, &key).await?, None);
    let again = api.create(&roles, &key, &role("suite:c", "get", false)).await?;
    assert_ne!(uid(&again), uid(&second));
    // A deletion waits until an object has no finalizers.
    let mut held = again.clone();
    held["metadata"]["finalizers"] = json!(["suite.example/held"]);
    let held = api.replace(&roles, &key, &held).await?;
    api.delete(&roles, &key, &Precondition::from_object(&held)).await?;
    let ending = api.get(&roles, &key).await?.context("it is held")?;
    assert!(is_terminating(&ending));
    let mut let_go = ending.clone();
    let_go["metadata"].as_object_mut().context("it has metadata")?.remove("finalizers");
    api.replace(&roles, &key, &let_go).await?;
    assert_eq!(api.get(&roles, &key).await?, None);
    Ok(())
}

async fn labels(server: &Server) -> Result<()> {
    let (api, roles) = (server.api().await?, cluster_roles());
    api.create(&roles, &named("suite:d"), &role("suite:d", "get", true)).await?;
    api.create(&roles, &named("suite:e"), &role("suite:e", "get", false)).await?;
    let listed = api.list(&roles).await?;
    let names: Vec<&str> =
        listed.items.iter().filter_map(|object| object["metadata"]["name"].as_str()).collect();
    assert!(names.contains(&"suite:d") && !names.contains(&"suite:e"), "{names:?}");
    let listed_alone = listed.items.iter().find(|object| object["metadata"]["name"] == "suite:d");
    let read_alone = api.get(&roles, &named("suite:d")).await?;
    assert_eq!(listed_alone, read_alone.as_ref(), "an object says the same in a list and alone");
    let newest = listed.items.iter().filter_map(|object| resource_version(object).parse::<u64>().ok()).max();
    assert!(listed.resource_version.parse::<u64>()? >= newest.context("versions are numbers")?);
    Ok(())
}

async fn watches(server: &Server) -> Result<()> {
    let (api, other, roles) = (server.api().await?, server.other()?, cluster_roles());
    let from = api.list(&roles).await?.resource_version;
    let events = api.watch(&roles, &from).await?;
    tokio::pin!(events);
    let mut next = async || -> Result<ObjectEvent> {
        loop {
            let event = in_time("an event", events.next()).await?.context("the watch ended")??;
            if !matches!(event, ObjectEvent::Bookmark(_)) {
                return Ok(event);
            }
        }
    };
    let key = named("suite:f");
    other.create(&roles, &role("suite:unlabelled", "get", false)).await??;
    let made = other.create(&roles, &role("suite:f", "get", true)).await??;
    assert_eq!(next().await?, ObjectEvent::Updated(made), "and nothing of what has no label");
    let edited = other.edit(&roles, &key, |object| object["rules"][0]["verbs"] = json!(["list"])).await?;
    assert_eq!(next().await?, ObjectEvent::Updated(edited));
    other.edit(&roles, &key, |object| object["metadata"]["labels"] = json!({})).await?;
    let taken = next().await?;
    let ObjectEvent::Deleted(last) = &taken else { bail!("the label was taken off: {taken:?}") };
    assert_eq!(last["metadata"]["name"], "suite:f");
    let labelled = other
        .edit(&roles, &key, |object| object["metadata"]["labels"] = json!({MANAGED_LABEL: "built-in"}))
        .await?;
    assert_eq!(next().await?, ObjectEvent::Updated(labelled.clone()));
    other.delete(&roles, &key).await??;
    let gone = next().await?;
    let ObjectEvent::Deleted(last) = &gone else { bail!("it was deleted: {gone:?}") };
    let number = |object: &Value| resource_version(object).parse::<u64>();
    assert!(number(last)? > number(&labelled)?, "the version is that of its end");
    Ok(())
}

async fn applying(server: &Server) -> Result<()> {
    let (api, other, maps, key) = (server.api().await?, server.other()?, config_maps(), in_default("suite"));
    let reported = |data: Value| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "suite", "namespace": "default"}, "data": data});
    let first = api.apply(&maps, &key, &reported(json!({"a": "1", "b": "1"}))).await?;
    let fields = applied_fields(&first).context("what was applied is recorded")?;
    let again = api.apply(&maps, &key, &reported(json!({"a": "1", "b": "1"}))).await?;
    assert_eq!(resource_version(&again), resource_version(&first), "what is so already is no write");
    let refused =
        other.apply(&maps, &reported(json!({"a": "2"})), false).await?.err().context("it is theirs")?;
    assert_eq!((refused.code, classify_api_error(&refused)), (409, ApiErrorKind::Conflict), "{refused:?}");
    let added = other.edit(&maps, &key, |object| object["data"]["theirs"] = json!("1")).await?;
    assert_eq!(applied_fields(&added).as_ref(), Some(&fields), "what is theirs takes nothing of ours");
    let taken = other.edit(&maps, &key, |object| object["data"]["a"] = json!("3")).await?;
    assert_ne!(applied_fields(&taken).as_ref(), Some(&fields), "what they change is theirs");
    let back = api.apply(&maps, &key, &reported(json!({"a": "1", "b": "1"}))).await?;
    assert_eq!(back["data"], json!({"a": "1", "b": "1", "theirs": "1"}));
    assert_eq!(applied_fields(&back).as_ref(), Some(&fields));
    let less = api.apply(&maps, &key, &reported(json!({"a": "1"}))).await?;
    assert_eq!(less["data"], json!({"a": "1", "theirs": "1"}), "a field no longer applied is removed");
    what_applying_cannot_do(&api, &other).await
}

/// Why an object of the release is created and replaced, and not applied.
async fn what_applying_cannot_do(api: &ApiClient, other: &Other) -> Result<()> {
    let map = |value: &str| {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "suite-theirs", "namespace": "default"},
            "data": {"a": value}})
    };
    other.create(&config_maps(), &map("theirs")).await??;
    let overwritten = api.apply(&config_maps(), &in_default("suite-theirs"), &map("ours")).await?;
    assert_eq!(overwritten["data"]["a"], "ours", "it does not matter who made it");
    let (roles, key) = (cluster_roles(), named("suite:later"));
    let mut later = role("suite:later", "get", false);
    later[UNKNOWN_FIELD] = json!("any");
    assert_eq!(
        refused(api.apply(&roles, &key, &later).await),
        ApiErrorKind::Other,
        "a field that is not known"
    );
    let made = api.create(&roles, &key, &later).await?;
    assert_eq!(made.get(UNKNOWN_FIELD), None, "it is dropped");
    let mut changed = made.clone();
    changed[UNKNOWN_FIELD] = json!("any");
    changed["rules"][0]["verbs"] = json!(["list"]);
    let changed = api.replace(&roles, &key, &changed).await?;
    assert_eq!((changed.get(UNKNOWN_FIELD), &changed["rules"][0]["verbs"]), (None, &json!(["list"])));
    Ok(())
}

async fn amending(server: &Server) -> Result<()> {
    let (api, other, name) = (server.api().await?, server.other()?, "suite");
    let first = other.create(&nodes(), &node(name, &["a", "b"])).await??;
    let listed = api.list_nodes().await?;
    let listed = listed.iter().find(|node| node["metadata"]["name"] == name).context("it is listed")?;
    assert_eq!((uid(listed), resource_version(listed)), (uid(&first), resource_version(&first)));
    assert_eq!(listed["metadata"]["labels"], first["metadata"]["labels"]);
    let change =
        |version: &str| json!({"metadata": {"resourceVersion": version, "labels": {"a": null, "c": ""}}});
    api.patch_node(name, &change(resource_version(&first))).await?;
    let second = api.read_node(name).await?.context("it was made")?;
    assert_eq!(second["metadata"]["labels"], json!({"b": "", "c": ""}), "what is not named stays");
    assert_eq!(
        refused(api.patch_node(name, &change(resource_version(&first))).await),
        ApiErrorKind::Conflict
    );
    api.patch_node(name, &change(resource_version(&second))).await?;
    let third = api.read_node(name).await?.context("it was made")?;
    assert_eq!(resource_version(&third), resource_version(&second), "what is so already is no write");
    let stale = api.delete(&nodes(), &named(name), &Precondition::from_object(listed)).await;
    assert_eq!(refused(stale), ApiErrorKind::Conflict);
    api.delete(&nodes(), &named(name), &Precondition::from_object(&third)).await?;
    assert_eq!(refused(api.patch_node(name, &change("")).await), ApiErrorKind::NotFound);
    Ok(())
}

async fn kinds(server: &Server) -> Result<()> {
    let served = ApiDiscovery::fetch(&server.api().await?).await?;
    let wanted = shepherd::reconciler::objects::built_in::built_in_kinds();
    for wanted in wanted.into_iter().chain([config_maps(), nodes()]) {
        assert_eq!(served.find(&wanted.api_version(), &wanted.kind), Some(&wanted));
        assert!(served.preferred_kinds().iter().any(|kind| kind.resource() == wanted.resource()));
    }
    assert_eq!(served.find("example.com/v1", "Thing"), None);
    assert_eq!(served.find("authorization.k8s.io/v1", "SubjectAccessReview"), None, "it has no objects");
    assert!(!served.preferred_kinds().iter().any(|kind| kind.plural.contains('/')), "subresources are none");
    assert!(served.failed_versions.is_empty(), "{:?}", served.failed_versions);
    Ok(())
}
