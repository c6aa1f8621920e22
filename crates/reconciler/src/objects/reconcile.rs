//! The reconcile pass over all kinds. Other modules decide; this one executes.
//!
//! # Costs of a pass
//!
//! One list for each kind that has objects of ours, or may have: the release's six, those of the add-ons, and nodes.
//! Then one request for each object that is not as it should be. The kinds that a server serves, and objects that are
//! not declared any more in other kinds, are looked up in the first pass, in the one after a change of the
//! configuration, and once an hour.
//!
//! # What makes a pass fail
//!
//! A pass fails if an object of the release could not be reconciled, because the first successful pass lets controllers
//! start. Problems that only a person can solve ([`problem`][]) do not make it fail: a name that is taken is reported,
//! and a pass with such a problem is *done*. Otherwise anyone who may create a role could keep every controller of the
//! cluster from starting, and nobody would see why. A failure of an add-on's object does not make it fail either. It is
//! reported and retried in the next pass. One kind that fails hides no other.
//!
//! [`problem`]: crate::objects::problem

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use etcd::client::Client;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::objects::add_ons::{AddOnManifests, AddOnObjects, kind_order};
use crate::objects::api_client::{ApiClient, ApiError, ApiServerConnection, ObjectList, ReloadingClient};
use crate::objects::api_error::{ApiErrorKind, classify_api_error};
use crate::objects::built_in::{BuiltInObject, built_in_kinds, built_in_objects};
use crate::objects::cluster_config::ClusterConfig;
use crate::objects::diff::{applied_fields, create_body, is_satisfied, update_body, was_written_by_us};
use crate::objects::discovery::ApiDiscovery;
use crate::objects::object_kind::{MANAGED_LABEL, ObjectKey, ObjectKind, ResourceType, resource_version};
use crate::objects::object_plan::{Action, DesiredObject, Expectation, Precondition, Verdict};
use crate::objects::object_watches::ObjectWatches;
use crate::objects::problem::{Problem, ProblemSubject};
use crate::objects::watch_cache::parse_version;
use crate::objects::{ObjectReconciler, ReconcileError, ReconcileSummary, node_reconcile};

/// A full scan over all kinds is made once in this many passes, which is once an hour.
const FULL_SCAN_EVERY: u32 = 120;

/// The objects of this release in one Kubernetes, reconciled through one of its API servers.
///
/// Each controller has one, which lives as long as the controller's role:
///
/// ```no_run
/// use shepherd_reconciler::objects::api_client::{ApiServerConnection, ClientIdentity};
/// use shepherd_reconciler::objects::cluster_config::ClusterConfig;
/// use shepherd_reconciler::objects::reconcile::KubernetesObjects;
/// use tokio::sync::watch;
///
/// let connection = ApiServerConnection {
///     url: "https://127.0.0.1:6443".to_owned(),
///     identity: Some(ClientIdentity {
///         authority: "/state/kubernetes/ca.pem".into(),
///         certificate: "/state/kubernetes/reconciler.pem".into(),
///         key: "/state/kubernetes/reconciler.key".into(),
///     }),
/// };
/// // Until the cluster's configuration is known, passes fail.
/// let (config, receiver) = watch::channel(None);
/// let objects = KubernetesObjects::new(connection, receiver);
/// config.send_replace(Some(ClusterConfig::default()));
/// // The problems that a person has to solve, for a status page or a log.
/// let problems = objects.problems();
/// # drop((objects, problems));
/// ```
#[derive(Debug)]
pub struct KubernetesObjects {
    client: Arc<ReloadingClient>,
    config: watch::Receiver<Option<ClusterConfig>>,
    watches: ObjectWatches,
    cache: Mutex<DiscoveryCache>,
    problems: watch::Sender<Vec<Problem>>,
    records: Option<Client>,
}

/// What is kept from one pass to the next.
#[derive(Debug, Default)]
struct DiscoveryCache {
    config: Option<ClusterConfig>,
    manifests: AddOnManifests,
    discovery: ApiDiscovery,
    /// Kinds with objects of ours that are not declared any more.
    leftover_kinds: BTreeMap<ResourceType, ObjectKind>,
    passes_until_full_scan: u32,
}

/// The plan for one kind in one pass.
struct KindPlan {
    kind: ObjectKind,
    desired: BTreeMap<ObjectKey, DesiredObject>,
    unreadable: BTreeSet<String>,
    /// Whether the release may have objects of this kind: then a failure makes the pass fail.
    is_built_in: bool,
    /// Whether the kind is only searched for leftover objects.
    is_scan_only: bool,
}

/// The work of a pass, before anything is listed.
struct ReconcileInputs {
    api: ApiClient,
    plans: Vec<KindPlan>,
    problems: Vec<Problem>,
    cache: DiscoveryCache,
}

/// The result of one kind.
#[derive(Default)]
struct KindOutcome {
    summary: ReconcileSummary,
    problems: Vec<Problem>,
    /// The failures of the release's objects.
    failures: Vec<String>,
    written: BTreeMap<ObjectKey, u64>,
}

impl KubernetesObjects {
    /// The objects of this release. Sends no request yet. `wishes` is `None` until the cluster's configuration is
    /// known.
    #[must_use]
    pub fn new(connection: ApiServerConnection, wishes: watch::Receiver<Option<ClusterConfig>>) -> Self {
        let kubernetes = Arc::new(ReloadingClient::new(connection));
        let watches = ObjectWatches::new(Arc::clone(&kubernetes));
        let (known, troubles) = (Mutex::default(), watch::Sender::default());
        Self { client: kubernetes, config: wishes, watches, cache: known, problems: troubles, records: None }
    }

    /// Also reconciles the Node objects ([`node_objects`](crate::objects::node_objects)), whose records are
    /// in the curator's etcd.
    #[must_use]
    pub fn with_node_records(mut self, curator: Client) -> Self {
        self.records = Some(curator);
        self
    }

    /// The problems as of the last pass.
    #[must_use]
    pub fn problems(&self) -> watch::Receiver<Vec<Problem>> {
        self.problems.subscribe()
    }

    /// What a pass would change now, one line per object; empty if there is nothing to do. Changes nothing.
    pub async fn describe_plan(&self) -> Result<String, ReconcileError> {
        let ReconcileInputs { api, plans: lanes, problems: mut troubles, .. } = self.prepare_pass().await?;
        let mut text = String::new();
        for lane in lanes {
            let resource = lane.kind.resource();
            let list = match api.list(&lane.kind).await {
                Ok(list) => list,
                Err(error) => {
                    let _ = writeln!(text, "unknown {resource}: {error}");
                    continue;
                }
            };
            let expectation = self.build_expectation(&lane);
            for action in expectation.plan_actions(&list.items) {
                let (word, key) = match &action {
                    Action::Create(key) => {
                        let Some(wanted) = expectation.desired(key) else { continue };
                        match api.get(applied_kind(&lane.kind, wanted), key).await {
                            Ok(Some(present)) if !is_owned(wanted, &present) => {
                                troubles.push(Problem::name_conflict(wanted.add_on(), &resource, key));
                                continue;
                            }
                            Ok(Some(_)) => ("update", key),
                            Ok(None) => ("create", key),
                            Err(error) => {
                                let _ = writeln!(text, "unknown {resource} {key}: {error}");
                                continue;
                            }
                        }
                    }
                    Action::Update(key, _) => ("update", key),
                    Action::Delete(key, _) => ("delete", key),
                    Action::AwaitDeletion(key) => ("await the end of", key),
                };
                let _ = writeln!(text, "{word} {resource} {key}");
            }
        }
        if let Some(records) = &self.records {
            node_reconcile::describe_changes(&api, records, &mut text).await;
        }
        for trouble in troubles {
            let _ = writeln!(text, "cannot {trouble}");
        }
        Ok(text)
    }

    fn cache(&self) -> MutexGuard<'_, DiscoveryCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn build_expectation(&self, lane: &KindPlan) -> Expectation {
        let sight = self.watches.cache();
        let earlier = sight.expectation(&lane.kind.resource());
        Expectation::new(lane.desired.clone(), lane.unreadable.clone(), earlier)
    }

    /// Determines the desired objects and their kinds.
    async fn prepare_pass(&self) -> Result<ReconcileInputs, ReconcileError> {
        let wishes = self.config.borrow().clone();
        let wishes = wishes
            .ok_or_else(|| ReconcileError("it is not known yet what the cluster wishes for".to_owned()))?;
        let api = self.client.client().await.map_err(|error| ReconcileError(error.to_string()))?;
        let asking =
            |error: ApiError| ReconcileError(format!("it is not known which kinds there are: {error}"));
        let mut known = self.cache().clone_for_pass();
        let looks_through = known.passes_until_full_scan == 0 || known.config.as_ref() != Some(&wishes);
        if looks_through {
            known.discovery = ApiDiscovery::fetch(&api).await.map_err(asking)?;
            known.manifests = AddOnManifests::parse(&wishes.add_ons);
            known.passes_until_full_scan = FULL_SCAN_EVERY;
        }
        known.passes_until_full_scan -= 1;
        known.discovery.fetch_missing(&api, &known.manifests.kinds()).await.map_err(asking)?;
        let made = built_in_objects(&wishes).map_err(|error| ReconcileError(format!("no JSON: {error}")))?;
        known.config = Some(wishes);
        let (lanes, troubles) = plan_kinds(made, &known, looks_through);
        Ok(ReconcileInputs { api, plans: lanes, problems: troubles, cache: known })
    }

    async fn reconcile_kind(
        &self,
        api: &ApiClient,
        lane: &KindPlan,
    ) -> Result<(KindOutcome, bool), ApiError> {
        let ObjectList { items, resource_version } = api.list(&lane.kind).await?;
        let mut expectation = self.build_expectation(lane);
        let is_nothing = items.is_empty() && expectation.is_empty() && !lane.is_built_in;
        if is_nothing && lane.is_scan_only {
            return Ok((KindOutcome::default(), false));
        }
        self.watches.watch_kind(&lane.kind, &resource_version);
        let mut outcome = KindOutcome::default();
        for action in expectation.plan_actions(&items) {
            self.apply_action(api, lane, &mut expectation, &mut outcome, action).await;
        }
        for object in &items {
            // An object that is in sync shows what the server makes of our request.
            let key = ObjectKey::from_object(object);
            let is_applied = expectation.desired(&key).is_some_and(|wanted| wanted.add_on().is_some());
            if is_applied && expectation.evaluate(&key, object) == Verdict::InSync {
                expectation.record_result(&key, object);
            }
        }
        let wrote = std::mem::take(&mut outcome.written);
        self.watches.cache().record_pass(&lane.kind.resource(), &resource_version, expectation, wrote);
        Ok((outcome, !is_nothing))
    }

    /// Takes one action and adds its result to the outcome.
    async fn apply_action(
        &self,
        api: &ApiClient,
        lane: &KindPlan,
        expectation: &mut Expectation,
        outcome: &mut KindOutcome,
        action: Action,
    ) {
        let resource = lane.kind.resource();
        let (key, done) = match action {
            Action::Create(key) => {
                let Some(wanted) = expectation.desired(&key).cloned() else { return };
                let done = create_object(api, &lane.kind, &key, &wanted).await;
                (key, done.map(|done| (Some(wanted), done)))
            }
            Action::Update(key, present) => {
                let Some(wanted) = expectation.desired(&key).cloned() else { return };
                let done = update_object(api, &lane.kind, &key, &wanted, &present).await;
                (key, done.map(|done| (Some(wanted), done)))
            }
            Action::Delete(key, seen) => {
                let done = match api.delete(&lane.kind, &key, &seen).await {
                    Err(ApiError::Rejected(status))
                        if classify_api_error(&status) == ApiErrorKind::NotFound =>
                    {
                        Ok(())
                    }
                    other => other,
                };
                (key, done.map(|()| (None, WriteResult::Deleted)))
            }
            Action::AwaitDeletion(key) => {
                let why =
                    "it is being deleted, and its finalizers delay that: see metadata.finalizers".to_owned();
                (key, Err(ApiError::NotSent(why)))
            }
        };
        let add_on = expectation.desired(&key).and_then(|wanted| wanted.add_on().map(str::to_owned));
        match done {
            Ok((wanted, done)) => {
                let what = match done {
                    WriteResult::Written(how, answer) => {
                        if let Some(version) = parse_version(resource_version(&answer)) {
                            outcome.written.insert(key.clone(), version);
                        }
                        if wanted.is_some() {
                            expectation.record_result(&key, &answer);
                        }
                        match how {
                            WriteMode::Created => outcome.summary.created += 1,
                            WriteMode::Updated => outcome.summary.updated += 1,
                            WriteMode::Replaced => outcome.summary.replaced += 1,
                        }
                        match how {
                            WriteMode::Created => "created",
                            WriteMode::Updated => "updated",
                            WriteMode::Replaced => "replaced",
                        }
                    }
                    WriteResult::Deleted => {
                        outcome.summary.deleted += 1;
                        "deleted"
                    }
                    WriteResult::NameConflict => {
                        outcome.problems.push(Problem::name_conflict(add_on.as_deref(), &resource, &key));
                        return;
                    }
                };
                tracing::info!(kind = %resource, object = %key, difference = what, "an object of Kubernetes was not as it should be");
            }
            Err(error) => {
                tracing::debug!(kind = %resource, object = %key, %error, "an object of Kubernetes is not as it should be");
                if lane.is_built_in && add_on.is_none() {
                    outcome.failures.push(format!("{resource} {key}: {error}"));
                } else {
                    outcome.problems.push(action_problem(add_on.as_deref(), &resource, &key, &error));
                }
            }
        }
    }

    /// Publishes the problems, and logs those that are new.
    fn report_problems(&self, mut troubles: Vec<Problem>) {
        troubles.sort();
        troubles.dedup();
        self.problems.send_if_modified(|problems| {
            for trouble in troubles.iter().filter(|trouble| !problems.contains(trouble)) {
                let Problem { subject, reason: why, remedy } = trouble;
                tracing::error!(%subject, reason = why, remedy, "something in Kubernetes cannot be put right from here");
            }
            for trouble in problems.iter().filter(|trouble| !troubles.contains(trouble)) {
                tracing::info!(subject = %trouble.subject, "it no longer stands in the way");
            }
            let changed = *problems != troubles;
            *problems = troubles;
            changed
        });
    }
}

impl DiscoveryCache {
    fn clone_for_pass(&self) -> Self {
        Self {
            config: self.config.clone(),
            manifests: self.manifests.clone(),
            discovery: self.discovery.clone(),
            leftover_kinds: self.leftover_kinds.clone(),
            passes_until_full_scan: self.passes_until_full_scan,
        }
    }
}

impl ObjectReconciler for KubernetesObjects {
    async fn reconcile(&self) -> Result<ReconcileSummary, ReconcileError> {
        let _passing = self.watches.begin_pass();
        let ReconcileInputs { api, plans: lanes, problems: mut troubles, cache: mut known } =
            self.prepare_pass().await?;
        let (mut passed, mut failures) = (ReconcileSummary::default(), Vec::new());
        let mut followed = BTreeSet::new();
        for lane in &lanes {
            let resource = lane.kind.resource();
            match self.reconcile_kind(&api, lane).await {
                Ok((outcome, is_followed)) => {
                    let KindOutcome { summary: more, problems: found, failures: failed, .. } = outcome;
                    passed.created += more.created;
                    passed.updated += more.updated;
                    passed.replaced += more.replaced;
                    passed.deleted += more.deleted;
                    troubles.extend(found);
                    failures.extend(failed);
                    if is_followed {
                        followed.insert(resource.clone());
                    }
                    let is_left = is_followed && lane.desired.is_empty() && !lane.is_built_in;
                    if is_left {
                        known.leftover_kinds.insert(resource, lane.kind.clone());
                    } else {
                        known.leftover_kinds.remove(&resource);
                    }
                }
                Err(error) => {
                    followed.insert(resource.clone());
                    if lane.is_built_in {
                        failures.push(format!("{resource}: {error}"));
                    } else if !lane.is_scan_only {
                        let add_ons: BTreeSet<_> =
                            lane.desired.values().filter_map(DesiredObject::add_on).collect();
                        troubles.extend(add_ons.into_iter().map(|add_on| {
                            let why = format!("its {resource} cannot be listed: {error}");
                            Problem::transient(ProblemSubject::AddOn(add_on.to_owned()), why)
                        }));
                    }
                }
            }
        }
        if let Some(records) = &self.records {
            node_reconcile::reconcile_nodes(&api, records, &mut passed, &mut troubles).await;
        }
        self.watches.retain_kinds(|resource| followed.contains(resource));
        *self.cache() = known;
        self.report_problems(troubles);
        if failures.is_empty() { Ok(passed) } else { Err(ReconcileError(failures.join("; "))) }
    }

    async fn wait_for_change(&self) {
        let used = self.cache().config.clone();
        let mut wishes = self.config.clone();
        let other_wishes = async {
            if wishes.wait_for(|wishes| wishes.is_some() && *wishes != used).await.is_err() {
                // The sender is gone, so the configuration does not change any more.
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = other_wishes => {}
            () = self.watches.wait_for_changes() => {}
        }
    }
}

/// The kinds to process, their order, and what for.
fn plan_kinds(
    made: Vec<BuiltInObject>,
    known: &DiscoveryCache,
    looks_through: bool,
) -> (Vec<KindPlan>, Vec<Problem>) {
    let mut wanted: BTreeMap<ResourceType, BTreeMap<ObjectKey, DesiredObject>> = BTreeMap::new();
    for BuiltInObject { kind, object } in made {
        wanted
            .entry(kind.resource())
            .or_default()
            .insert(ObjectKey::from_object(&object), DesiredObject::BuiltIn(object));
    }
    let taken = |resource: &ResourceType, key: &ObjectKey| {
        wanted.get(resource).is_some_and(|keys| keys.contains_key(key))
    };
    let AddOnObjects { kinds: mut requests, unreadable: unread, problems: troubles } =
        known.manifests.resolve_kinds(&known.discovery, taken);
    let mut lanes = Vec::new();
    for kind in built_in_kinds() {
        let resource = kind.resource();
        let mut all = wanted.remove(&resource).unwrap_or_default();
        all.extend(requests.remove(&resource).map(|(_, wanted)| wanted).unwrap_or_default());
        lanes.push(KindPlan {
            kind,
            desired: all,
            unreadable: unread.clone(),
            is_built_in: true,
            is_scan_only: false,
        });
    }
    let mut others: Vec<_> = requests.into_values().collect();
    others.sort_by_key(|(kind, _)| kind_order(kind));
    let lane = |kind: ObjectKind, wanted, is_looked_through| KindPlan {
        kind,
        desired: wanted,
        unreadable: unread.clone(),
        is_built_in: false,
        is_scan_only: is_looked_through,
    };
    lanes.extend(others.into_iter().map(|(kind, wanted)| lane(kind, wanted, false)));
    let nowhere = |lanes: &[KindPlan], kind: &ObjectKind| {
        lanes.iter().all(|lane| lane.kind.resource() != kind.resource())
    };
    let all = if looks_through { known.discovery.preferred_kinds() } else { &[] };
    for kind in known.leftover_kinds.values().chain(all) {
        if nowhere(&lanes, kind) {
            lanes.push(lane(kind.clone(), BTreeMap::new(), true));
        }
    }
    (lanes, troubles)
}

/// How an object got its present state.
#[derive(Clone, Copy)]
enum WriteMode {
    Created,
    Updated,
    Replaced,
}

/// The result of one action.
enum WriteResult {
    Written(WriteMode, Value),
    Deleted,
    /// Nothing was written: the object belongs to another owner.
    NameConflict,
}

/// The kind in the API version that the object uses.
fn applied_kind<'k>(kind: &'k ObjectKind, wanted: &'k DesiredObject) -> &'k ObjectKind {
    match wanted {
        DesiredObject::BuiltIn(_) => kind,
        DesiredObject::Applied { kind, .. } => kind,
    }
}

/// Whether an object without the label is ours all the same: the label was removed, or its content equals ours.
///
/// Equal content is only enough for an object of the release: an add-on does not take over an object, because it would
/// delete it one day.
fn is_owned(wanted: &DesiredObject, present: &Value) -> bool {
    match wanted {
        DesiredObject::BuiltIn(object) => {
            was_written_by_us(present) || is_satisfied(&without_label(object), Some(present))
        }
        DesiredObject::Applied { .. } => applied_fields(present).is_some(),
    }
}

fn without_label(object: &Value) -> Value {
    let mut object = object.clone();
    if let Some(labels) = object.pointer_mut("/metadata/labels").and_then(Value::as_object_mut) {
        labels.remove(MANAGED_LABEL);
    }
    if object.pointer("/metadata/labels") == Some(&json!({}))
        && let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut)
    {
        metadata.remove("labels");
    }
    object
}

async fn create_object(
    api: &ApiClient,
    kind: &ObjectKind,
    key: &ObjectKey,
    wanted: &DesiredObject,
) -> Result<WriteResult, ApiError> {
    match wanted {
        DesiredObject::BuiltIn(object) => match api.create(kind, key, &create_body(object)).await {
            Ok(answer) => Ok(WriteResult::Written(WriteMode::Created, answer)),
            Err(ApiError::Rejected(status)) if classify_api_error(&status) == ApiErrorKind::AlreadyExists => {
                match api.get(kind, key).await? {
                    Some(present) if is_owned(wanted, &present) => {
                        update_object(api, kind, key, wanted, &present).await
                    }
                    Some(_) => Ok(WriteResult::NameConflict),
                    // It existed a moment ago; the next pass creates it.
                    None => Err(ApiError::Rejected(status)),
                }
            }
            Err(error) => Err(error),
        },
        DesiredObject::Applied { kind, object, .. } => match api.get(kind, key).await? {
            Some(present) if !is_owned(wanted, &present) => Ok(WriteResult::NameConflict),
            Some(_) => Ok(WriteResult::Written(WriteMode::Updated, api.apply(kind, key, object).await?)),
            None => Ok(WriteResult::Written(WriteMode::Created, api.apply(kind, key, object).await?)),
        },
    }
}

async fn update_object(
    api: &ApiClient,
    kind: &ObjectKind,
    key: &ObjectKey,
    wanted: &DesiredObject,
    present: &Value,
) -> Result<WriteResult, ApiError> {
    let object = match wanted {
        DesiredObject::BuiltIn(object) => object,
        // An add-on's object with changed immutable fields may hold data: it is not replaced, but reported.
        DesiredObject::Applied { kind, object, .. } => {
            return Ok(WriteResult::Written(WriteMode::Updated, api.apply(kind, key, object).await?));
        }
    };
    match api.replace(kind, key, &update_body(object, present)).await {
        Ok(answer) => Ok(WriteResult::Written(WriteMode::Updated, answer)),
        Err(ApiError::Rejected(status)) if classify_api_error(&status) == ApiErrorKind::Immutable => {
            // Only the evaluated object is deleted. If the second request were lost, the next pass would create it.
            api.delete(kind, key, &Precondition::from_object(present)).await?;
            Ok(WriteResult::Written(WriteMode::Replaced, api.create(kind, key, &create_body(object)).await?))
        }
        Err(error) => Err(error),
    }
}

fn action_problem(
    add_on: Option<&str>,
    resource: &ResourceType,
    key: &ObjectKey,
    error: &ApiError,
) -> Problem {
    let (subject, why) = (ProblemSubject::for_object(add_on, resource, key), error.to_string());
    match error {
        ApiError::Rejected(status) if classify_api_error(status) == ApiErrorKind::Immutable => {
            let remedy = "delete it, if nothing in it is needed: then it is created again".to_owned();
            Problem { subject, reason: why, remedy }
        }
        _ => Problem::transient(subject, why),
    }
}
