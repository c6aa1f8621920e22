//! The reconcile pass over all kinds of Kubernetes objects. Other modules decide; this one executes.
//!
//! # Costs of a pass
//!
//! One list for each kind that has objects of ours, or may have: the release's six, those of the add-ons, and nodes.
//! Then one request for each object that is not as it should be. The kinds that a server serves, and objects that are
//! not declared any more in other kinds, are looked up in the first pass, in the one after a change of the
//! configuration, and in every 120th pass.
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
use tokio::sync::watch;

use crate::objects::add_ons::AddOnManifests;
use crate::objects::api_client::{ApiClient, ApiError, ApiServerConnection, ObjectList, ReloadingClient};
use crate::objects::api_error::{ApiErrorKind, classify_api_error};
use crate::objects::built_in::built_in_objects;
use crate::objects::cluster_config::ClusterConfig;
use crate::objects::discovery::ApiDiscovery;
use crate::objects::kind_plan::{DiscoveryCache, KindPlan, plan_kinds};
use crate::objects::object_kind::{ObjectKey, ResourceType, resource_version};
use crate::objects::object_plan::{Action, DesiredObject, Expectation, Verdict};
use crate::objects::object_watches::ObjectWatches;
use crate::objects::object_write::{
    WriteMode, WriteResult, applied_kind, create_object, is_owned, update_object,
};
use crate::objects::problem::{Problem, ProblemSubject};
use crate::objects::watch_cache::parse_version;
use crate::objects::{ObjectReconciler, ReconcileError, ReconcileSummary, node_reconcile};

/// A full scan over all kinds is made once in this many passes: once an hour if nothing changes.
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
    /// The objects of this release. Sends no request yet. `config` is `None` until the cluster's configuration is
    /// known.
    #[must_use]
    pub fn new(connection: ApiServerConnection, config: watch::Receiver<Option<ClusterConfig>>) -> Self {
        let kubernetes = Arc::new(ReloadingClient::new(connection));
        let watches = ObjectWatches::new(Arc::clone(&kubernetes));
        let (cache, problems) = (Mutex::default(), watch::Sender::default());
        Self { client: kubernetes, config, watches, cache, problems, records: None }
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
        let ReconcileInputs { api, plans, mut problems, .. } = self.prepare_pass().await?;
        let mut text = String::new();
        for plan in plans {
            let resource = plan.kind.resource();
            let list = match api.list(&plan.kind).await {
                Ok(list) => list,
                Err(error) => {
                    let _ = writeln!(text, "unknown {resource}: {error}");
                    continue;
                }
            };
            let expectation = self.build_expectation(&plan);
            for action in expectation.plan_actions(&list.items) {
                let (word, key) = match &action {
                    Action::Create(key) => {
                        let Some(wanted) = expectation.desired(key) else { continue };
                        match api.get(applied_kind(&plan.kind, wanted), key).await {
                            Ok(Some(present)) if !is_owned(wanted, &present) => {
                                problems.push(Problem::name_conflict(wanted.add_on(), &resource, key));
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
        for problem in problems {
            let _ = writeln!(text, "problem: {problem}");
        }
        Ok(text)
    }

    fn cache(&self) -> MutexGuard<'_, DiscoveryCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn build_expectation(&self, plan: &KindPlan) -> Expectation {
        let watched = self.watches.cache();
        let earlier = watched.expectation(&plan.kind.resource());
        Expectation::new(plan.desired.clone(), plan.unreadable.clone(), earlier)
    }

    /// Determines the desired objects and their kinds.
    async fn prepare_pass(&self) -> Result<ReconcileInputs, ReconcileError> {
        let config = self.config.borrow().clone();
        let config = config
            .ok_or_else(|| ReconcileError("the configuration of the cluster is not known yet".to_owned()))?;
        let api = self.client.client().await.map_err(|error| ReconcileError(error.to_string()))?;
        let discovery_error = |error: ApiError| {
            ReconcileError(format!("the kinds that the API server serves are not known: {error}"))
        };
        let mut cache = self.cache().clone();
        let is_full_scan = cache.passes_until_full_scan == 0 || cache.config.as_ref() != Some(&config);
        if is_full_scan {
            cache.discovery = ApiDiscovery::fetch(&api).await.map_err(discovery_error)?;
            cache.manifests = AddOnManifests::parse(&config.add_ons);
            cache.passes_until_full_scan = FULL_SCAN_EVERY;
        }
        cache.passes_until_full_scan -= 1;
        cache.discovery.fetch_missing(&api, &cache.manifests.kinds()).await.map_err(discovery_error)?;
        let built_in =
            built_in_objects(&config).map_err(|error| ReconcileError(format!("no JSON: {error}")))?;
        cache.config = Some(config);
        let (plans, problems) = plan_kinds(built_in, &cache, is_full_scan);
        Ok(ReconcileInputs { api, plans, problems, cache })
    }

    async fn reconcile_kind(
        &self,
        api: &ApiClient,
        plan: &KindPlan,
    ) -> Result<(KindOutcome, bool), ApiError> {
        let ObjectList { items, resource_version } = api.list(&plan.kind).await?;
        let mut expectation = self.build_expectation(plan);
        let is_nothing = items.is_empty() && expectation.is_empty() && !plan.is_built_in;
        if is_nothing && plan.is_scan_only {
            return Ok((KindOutcome::default(), false));
        }
        self.watches.watch_kind(&plan.kind, &resource_version);
        let mut outcome = KindOutcome::default();
        for action in expectation.plan_actions(&items) {
            self.apply_action(api, plan, &mut expectation, &mut outcome, action).await;
        }
        for object in &items {
            // An object that is in sync shows the server's result of our request.
            let key = ObjectKey::from_object(object);
            let is_applied = expectation.desired(&key).is_some_and(|wanted| wanted.add_on().is_some());
            if is_applied && expectation.evaluate(&key, object) == Verdict::InSync {
                expectation.record_result(&key, object);
            }
        }
        let wrote = std::mem::take(&mut outcome.written);
        self.watches.cache().record_pass(&plan.kind.resource(), &resource_version, expectation, wrote);
        Ok((outcome, !is_nothing))
    }

    /// Takes one action and adds its result to the outcome.
    async fn apply_action(
        &self,
        api: &ApiClient,
        plan: &KindPlan,
        expectation: &mut Expectation,
        outcome: &mut KindOutcome,
        action: Action,
    ) {
        let resource = plan.kind.resource();
        let (key, done) = match action {
            Action::Create(key) => {
                let Some(wanted) = expectation.desired(&key).cloned() else { return };
                let done = create_object(api, &plan.kind, &key, &wanted).await;
                (key, done.map(|done| (Some(wanted), done)))
            }
            Action::Update(key, present) => {
                let Some(wanted) = expectation.desired(&key).cloned() else { return };
                let done = update_object(api, &plan.kind, &key, &wanted, &present).await;
                (key, done.map(|done| (Some(wanted), done)))
            }
            Action::Delete(key, seen) => {
                let done = match api.delete(&plan.kind, &key, &seen).await {
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
                tracing::info!(kind = %resource, object = %key, difference = what, "an object of Kubernetes was corrected");
            }
            Err(error) => {
                tracing::debug!(kind = %resource, object = %key, %error, "an object of Kubernetes could not be corrected");
                if plan.is_built_in && add_on.is_none() {
                    outcome.failures.push(format!("{resource} {key}: {error}"));
                } else {
                    outcome.problems.push(action_problem(add_on.as_deref(), &resource, &key, &error));
                }
            }
        }
    }

    /// Publishes the problems, and logs those that are new.
    fn report_problems(&self, mut problems: Vec<Problem>) {
        problems.sort();
        problems.dedup();
        self.problems.send_if_modified(|published| {
            for problem in problems.iter().filter(|problem| !published.contains(problem)) {
                let Problem { subject, reason: why, remedy } = problem;
                tracing::error!(%subject, reason = why, remedy, "a problem in Kubernetes needs an operator");
            }
            for problem in published.iter().filter(|problem| !problems.contains(problem)) {
                tracing::info!(subject = %problem.subject, "a problem in Kubernetes is solved");
            }
            let changed = *published != problems;
            *published = problems;
            changed
        });
    }
}

impl ObjectReconciler for KubernetesObjects {
    async fn reconcile(&self) -> Result<ReconcileSummary, ReconcileError> {
        let _passing = self.watches.begin_pass();
        let ReconcileInputs { api, plans, mut problems, mut cache } = self.prepare_pass().await?;
        let (mut summary, mut failures) = (ReconcileSummary::default(), Vec::new());
        let mut followed = BTreeSet::new();
        for plan in &plans {
            let resource = plan.kind.resource();
            match self.reconcile_kind(&api, plan).await {
                Ok((outcome, is_followed)) => {
                    let KindOutcome { summary: more, problems: found, failures: failed, .. } = outcome;
                    summary.created += more.created;
                    summary.updated += more.updated;
                    summary.replaced += more.replaced;
                    summary.deleted += more.deleted;
                    problems.extend(found);
                    failures.extend(failed);
                    if is_followed {
                        followed.insert(resource.clone());
                    }
                    let is_leftover = is_followed && plan.desired.is_empty() && !plan.is_built_in;
                    if is_leftover {
                        cache.leftover_kinds.insert(resource, plan.kind.clone());
                    } else {
                        cache.leftover_kinds.remove(&resource);
                    }
                }
                Err(error) => {
                    followed.insert(resource.clone());
                    if plan.is_built_in {
                        failures.push(format!("{resource}: {error}"));
                    } else if !plan.is_scan_only {
                        let add_ons: BTreeSet<_> =
                            plan.desired.values().filter_map(DesiredObject::add_on).collect();
                        problems.extend(add_ons.into_iter().map(|add_on| {
                            let why = format!("its {resource} cannot be listed: {error}");
                            Problem::transient(ProblemSubject::AddOn(add_on.to_owned()), why)
                        }));
                    }
                }
            }
        }
        if let Some(records) = &self.records {
            node_reconcile::reconcile_nodes(&api, records, &mut summary, &mut problems).await;
        }
        self.watches.retain_kinds(|resource| followed.contains(resource));
        *self.cache() = cache;
        self.report_problems(problems);
        if failures.is_empty() { Ok(summary) } else { Err(ReconcileError(failures.join("; "))) }
    }

    async fn wait_for_change(&self) {
        let used = self.cache().config.clone();
        let mut config = self.config.clone();
        let other_config = async {
            if config.wait_for(|config| config.is_some() && *config != used).await.is_err() {
                // The sender is gone, so the configuration does not change any more.
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = other_config => {}
            () = self.watches.wait_for_changes() => {}
        }
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
