//! An API server of Kubernetes in this process, for the requests that tests make.
//!
//! It behaves on loopback as the real one does: versions, preconditions, defaults, immutable fields, labels, field
//! ownership, watches with bookmarks, compaction, and discovery. `semantics.rs` checks both in the same way. A test can
//! also inspect each request, break off watches, and add groups that another server answers for.

mod fields;
pub(crate) mod kinds;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};
use shepherd::reconciler::objects::api_client::ApiServerConnection;
use shepherd::reconciler::objects::object_kind::{ObjectKey, ObjectKind};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use self::store::{Happened, Refused, Store};

pub(crate) struct Simulated {
    shared: Arc<Shared>,
    url: String,
    _task: AbortOnDropHandle<()>,
}

struct Shared {
    store: Mutex<Store>,
    requests: Mutex<Vec<String>>,
    /// The user agents of the clients.
    agents: Mutex<BTreeSet<String>>,
    pulse: watch::Sender<Pulse>,
    /// Groups of other servers, with what these answer; `None` if they do not.
    aggregated: Mutex<BTreeMap<String, Option<Value>>>,
    ends_watches: AtomicBool,
}

/// State that running watches follow.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Pulse {
    revision: u64,
    bookmarks: u64,
    broken: u64,
}

impl Shared {
    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_requests(&self) -> MutexGuard<'_, Vec<String>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn aggregated(&self) -> MutexGuard<'_, BTreeMap<String, Option<Value>>> {
        self.aggregated.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Simulated {
    pub(crate) async fn start() -> Result<Self> {
        let shared = Arc::new(Shared {
            store: Mutex::new(Store::begin()),
            requests: Mutex::default(),
            agents: Mutex::default(),
            pulse: watch::Sender::default(),
            aggregated: Mutex::default(),
            ends_watches: AtomicBool::new(false),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let app = axum::Router::new().fallback(answer).with_state(Arc::clone(&shared));
        let serving = async move {
            let _ = axum::serve(listener, app).await;
        };
        Ok(Self { shared, url, _task: AbortOnDropHandle::new(tokio::spawn(serving)) })
    }

    pub(crate) fn connection(&self) -> ApiServerConnection {
        ApiServerConnection { url: self.url.clone(), identity: None }
    }

    /// The requests since the last call: `GET /api/v1/configmaps`, `WATCH …`.
    pub(crate) fn take_requests(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.lock_requests())
    }

    /// The user agents of all requests since the last call.
    pub(crate) fn agents(&self) -> BTreeSet<String> {
        std::mem::take(&mut self.shared.agents.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// How many watches are open.
    pub(crate) fn watches(&self) -> usize {
        self.shared.pulse.receiver_count()
    }

    /// Sends a bookmark to every watch.
    pub(crate) fn bookmark(&self) {
        self.shared.pulse.send_modify(|pulse| pulse.bookmarks += 1);
    }

    /// Breaks off every watch.
    pub(crate) fn break_watches(&self) {
        self.shared.pulse.send_modify(|pulse| pulse.broken += 1);
    }

    /// Ends every watch from now on as soon as it begins.
    pub(crate) fn end_watches(&self) {
        self.shared.ends_watches.store(true, Ordering::SeqCst);
        self.break_watches();
    }

    /// Adds a group that another server answers for: with `answer`, or not at all.
    pub(crate) fn aggregate(&self, group: &str, answer: Option<Value>) {
        self.shared.aggregated().insert(group.to_owned(), answer);
    }

    /// Compacts the history.
    pub(crate) fn forget(&self) {
        let mut store = self.shared.store();
        store.compacted = store.revision;
    }

    /// Counts a change that no watch sees: revisions are counted over all stored objects, of every kind.
    pub(crate) fn advance(&self) {
        self.shared.store().revision += 1;
    }
}

async fn answer(
    State(shared): State<Arc<Shared>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    Query(query): Query<BTreeMap<String, String>>,
    body: Bytes,
) -> Response {
    let agent = headers.get("user-agent").and_then(|agent| agent.to_str().ok()).unwrap_or_default();
    shared.agents.lock().unwrap_or_else(PoisonError::into_inner).insert(agent.to_owned());
    let watches = query.contains_key("watch");
    shared.lock_requests().push(format!(
        "{} {}",
        if watches { "WATCH" } else { method.as_str() },
        uri.path()
    ));
    let media = headers.get("content-type").and_then(|media| media.to_str().ok()).unwrap_or_default();
    let answered = match uri.path() {
        "/apis" => Ok(groups(&shared.aggregated())),
        path => match place(path, &shared.aggregated()) {
            Some(Place::Version(group)) => Ok(resources(&group)),
            Some(Place::Aggregated(answer)) => answer.ok_or_else(|| {
                let message = "the server is currently unable to handle the request";
                (503, "ServiceUnavailable", message.to_owned(), Vec::new())
            }),
            Some(Place::Objects(kind, namespace)) if watches => {
                return watched(&shared, &kind, namespace.as_deref(), &query);
            }
            Some(Place::Objects(kind, namespace)) if method == Method::GET => {
                Ok(list(&shared.store(), &kind, namespace.as_deref(), &query))
            }
            Some(Place::Objects(kind, namespace)) => {
                write(&shared, &method, &kind, (namespace, None), &query, (media, &body))
            }
            Some(Place::Object(kind, key)) if method == Method::GET => shared.store().get(&kind, &key),
            Some(Place::Object(kind, key)) => {
                write(&shared, &method, &kind, (key.namespace, Some(key.name)), &query, (media, &body))
            }
            None => Err((
                404,
                "NotFound",
                "the server could not find the requested resource".to_owned(),
                Vec::new(),
            )),
        },
    };
    match answered {
        Ok(object) => (StatusCode::OK, axum::Json(object)).into_response(),
        Err(refused) => {
            let code = StatusCode::from_u16(refused.0).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            (code, axum::Json(status(refused))).into_response()
        }
    }
}

fn status((code, reason, message, causes): Refused) -> Value {
    let causes: Vec<Value> =
        causes.into_iter().map(|(field, message)| json!({"field": field, "message": message})).collect();
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message,
        "details": {"causes": causes}})
}

enum Place {
    Version(String),
    Aggregated(Option<Value>),
    Objects(ObjectKind, Option<String>),
    Object(ObjectKind, ObjectKey),
}

fn place(path: &str, aggregated: &BTreeMap<String, Option<Value>>) -> Option<Place> {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let (group, rest) = match parts.as_slice() {
        ["apis", group, "v1", ..] if aggregated.contains_key(*group) => {
            return Some(Place::Aggregated(aggregated[*group].clone()));
        }
        ["api", "v1", rest @ ..] => ("", rest),
        ["apis", group, "v1", rest @ ..] => (*group, rest),
        _ => return None,
    };
    let kind = |plural: &str| kinds::kinds().find(|kind| kind.group == group && kind.plural == plural);
    let named = |namespace: Option<&str>, name: &str| ObjectKey {
        namespace: namespace.map(str::to_owned),
        name: name.to_owned(),
    };
    match rest {
        [] => groups_served().any(|served| served == group).then(|| Place::Version(group.to_owned())),
        [plural] => Some(Place::Objects(kind(plural)?, None)),
        [plural, name] => Some(Place::Object(kind(plural)?, named(None, name))),
        ["namespaces", namespace, plural] => {
            Some(Place::Objects(kind(plural)?, Some((*namespace).to_owned())))
        }
        ["namespaces", namespace, plural, name] => {
            Some(Place::Object(kind(plural)?, named(Some(namespace), name)))
        }
        _ => None,
    }
}

fn groups_served() -> impl Iterator<Item = String> {
    kinds::kinds().map(|kind| kind.group).chain([kinds::REVIEWS.0.to_owned()])
}

fn groups(aggregated: &BTreeMap<String, Option<Value>>) -> Value {
    let mut names: Vec<String> = groups_served().filter(|group| !group.is_empty()).collect();
    names.dedup();
    names.extend(aggregated.keys().cloned());
    let groups: Vec<Value> = names
        .into_iter()
        .map(|name| {
            let version = json!({"groupVersion": format!("{name}/v1"), "version": "v1"});
            json!({"name": name, "versions": [version], "preferredVersion": version})
        })
        .collect();
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
}

/// The kinds of a group, with a subresource each.
fn resources(group: &str) -> Value {
    let verbs = json!(["create", "delete", "get", "list", "patch", "update", "watch"]);
    let resource = |kind: &ObjectKind, name: &str| {
        let (kind, namespaced) = (kind.kind.as_str(), kind.namespaced);
        json!({"name": name, "singularName": "", "kind": kind, "namespaced": namespaced, "verbs": verbs})
    };
    let of_it = kinds::kinds().filter(|kind| kind.group == group);
    let mut resources: Vec<Value> = of_it
        .flat_map(|kind| [resource(&kind, &kind.plural), resource(&kind, &format!("{}/status", kind.plural))])
        .collect();
    let (reviews, kind, plural) = kinds::REVIEWS;
    if group == reviews {
        resources.push(json!({"name": plural, "singularName": "", "kind": kind, "namespaced": false,
            "verbs": ["create"]}));
    }
    let version = if group.is_empty() { "v1".to_owned() } else { format!("{group}/v1") };
    json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources})
}

/// Whether an object has the labels of the query's `labelSelector`.
fn selected(object: &Value, query: &BTreeMap<String, String>) -> bool {
    let selector = query.get("labelSelector").map(String::as_str).unwrap_or_default();
    selector.split(',').filter(|part| !part.is_empty()).all(|part| {
        let (name, wanted) = part.split_once('=').map_or((part, None), |(name, value)| (name, Some(value)));
        let label = object["metadata"]["labels"][name].as_str();
        label.is_some_and(|label| wanted.is_none_or(|wanted| label == wanted.trim_start_matches('=')))
    })
}

fn list(
    store: &Store,
    kind: &ObjectKind,
    namespace: Option<&str>,
    query: &BTreeMap<String, String>,
) -> Value {
    let mut items = store.list(&kind.resource(), namespace);
    items.retain(|object| selected(object, query));
    // A list states the kind and the version once, and not in each item.
    for fields in items.iter_mut().filter_map(Value::as_object_mut) {
        fields.remove("apiVersion");
        fields.remove("kind");
    }
    json!({"kind": format!("{}List", kind.kind), "apiVersion": kind.api_version(),
        "metadata": {"resourceVersion": store.revision.to_string()}, "items": items})
}

fn write(
    shared: &Shared,
    method: &Method,
    kind: &ObjectKind,
    (namespace, name): (Option<String>, Option<String>),
    query: &BTreeMap<String, String>,
    (media, body): (&str, &[u8]),
) -> Result<Value, Refused> {
    let object: Value = serde_json::from_slice(body).unwrap_or_default();
    let named =
        name.clone().or_else(|| object["metadata"]["name"].as_str().map(str::to_owned)).unwrap_or_default();
    let key = ObjectKey { namespace, name: named };
    let manager = query.get("fieldManager").map_or("unknown", String::as_str);
    let mut store = shared.store();
    let answer = match (method.as_str(), name) {
        ("POST", None) => store.create(kind, &key, object, manager),
        ("PUT", Some(_)) => store.replace(kind, &key, object, manager),
        ("PATCH", Some(_)) if media == "application/merge-patch+json" => {
            store.merge(kind, &key, &object, manager)
        }
        ("PATCH", Some(_)) => store.apply(kind, &key, &object, (manager, query.contains_key("force"))),
        ("DELETE", Some(_)) => store.delete(kind, &key, &object),
        _ => Err((405, "MethodNotAllowed", "the server does not allow this method".to_owned(), Vec::new())),
    };
    let revision = store.revision;
    drop(store);
    shared.pulse.send_if_modified(|pulse| std::mem::replace(&mut pulse.revision, revision) != revision);
    answer
}

/// One event as a watch with these labels receives it; `None` if it receives none.
fn event(happened: &Happened, query: &BTreeMap<String, String>) -> Option<Value> {
    let is = |object: &Option<Value>| object.as_ref().is_some_and(|object| selected(object, query));
    let (what, object) = match (is(&happened.before), is(&happened.after)) {
        (false, false) => return None,
        (false, true) => ("ADDED", &happened.after),
        (true, true) => ("MODIFIED", &happened.after),
        (true, false) => ("DELETED", &happened.before),
    };
    let mut object = object.clone()?;
    object["metadata"]["resourceVersion"] = json!(happened.revision.to_string());
    Some(json!({"type": what, "object": object}))
}

fn watched(
    shared: &Arc<Shared>,
    kind: &ObjectKind,
    namespace: Option<&str>,
    query: &BTreeMap<String, String>,
) -> Response {
    assert_eq!(namespace, None, "nobody watches one namespace here");
    if shared.ends_watches.load(Ordering::SeqCst) {
        return Body::empty().into_response();
    }
    let from: u64 = query.get("resourceVersion").and_then(|version| version.parse().ok()).unwrap_or_default();
    let mut pulse = shared.pulse.subscribe();
    let began = *pulse.borrow_and_update();
    let (shared, kind, query) = (Arc::clone(shared), kind.clone(), query.clone());
    let (tell, receiver) = tokio::sync::mpsc::channel::<Result<String, Infallible>>(1000);
    tokio::spawn(async move {
        if from < shared.store().compacted {
            let gone = (410, "Expired", "too old resource version".to_owned(), Vec::new());
            let _ = tell.send(Ok(format!("{}\n", json!({"type": "ERROR", "object": status(gone)})))).await;
            return;
        }
        let (mut from, mut bookmarks) = (from, began.bookmarks);
        loop {
            let now = *pulse.borrow_and_update();
            let (events, revision): (Vec<Value>, u64) = {
                let store = shared.store();
                let new = store.happened.iter().filter(|happened| happened.revision > from);
                let of_it = new.filter(|happened| happened.resource == kind.resource());
                (of_it.filter_map(|happened| event(happened, &query)).collect(), store.revision)
            };
            from = revision;
            for event in events {
                if tell.send(Ok(format!("{event}\n"))).await.is_err() {
                    return;
                }
            }
            if now.bookmarks != bookmarks && query.contains_key("allowWatchBookmarks") {
                bookmarks = now.bookmarks;
                let bookmark = json!({"type": "BOOKMARK", "object": {"kind": kind.kind, "apiVersion": kind.api_version(),
                    "metadata": {"resourceVersion": revision.to_string()}}});
                if tell.send(Ok(format!("{bookmark}\n"))).await.is_err() {
                    return;
                }
            }
            // Last, so that all earlier events are sent.
            if now.broken != began.broken {
                return;
            }
            tokio::select! {
                changed = pulse.changed() => if changed.is_err() { return },
                () = tell.closed() => return,
            }
        }
    });
    Body::from_stream(tokio_stream::wrappers::ReceiverStream::new(receiver)).into_response()
}
