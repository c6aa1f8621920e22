//! A pass: everything that decides is elsewhere, and here it is done.
//!
//! # What a pass costs
//!
//! One list for each kind that there are objects of, or may be: the release's six, those of the add-ons, and nodes; then one
//! request for each object that is not as it should be. Which kinds a server serves, and whether any of them holds what
//! nobody declares any more, is looked up in the first pass, in the one after the wishes changed, and once in an hour.
//!
//! # What makes a pass fail
//!
//! What belongs to the release and could not be done, for the first pass lets controllers begin. What only a person can
//! change does not ([`trouble`][]): a name that is taken is told, and a pass with one is *done*. Were it not, whoever may
//! make a role could keep every controller of the cluster from beginning, and nobody would see why. What belongs to an
//! add-on is no reason either. It is told, and tried again in the next pass. One kind that fails hides no other.
//!
//! [`trouble`]: crate::reconciler::objects::trouble

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use tokio::sync::watch;

use crate::etcd::client::Client;
use crate::reconciler::objects::add_ons::{Asked, Manifests, rank};
use crate::reconciler::objects::answers::{Refusal, refusal};
use crate::reconciler::objects::built_in::{BuiltIn, built_in, kinds};
use crate::reconciler::objects::compare::{applied_fields, holds, to_create, to_update, was_written_by_us};
use crate::reconciler::objects::kind::{KEPT, Key, Kind, Resource, resource_version};
use crate::reconciler::objects::kubernetes::{Api, AskError, Connection, Kubernetes, List};
use crate::reconciler::objects::plan::{Action, Expectation, Precondition, Verdict, Wanted};
use crate::reconciler::objects::served::Served;
use crate::reconciler::objects::sight::number;
use crate::reconciler::objects::trouble::{Subject, Trouble};
use crate::reconciler::objects::watch::Watches;
use crate::reconciler::objects::wishes::Wishes;
use crate::reconciler::objects::{Objects, PassError, Passed, node_pass};

/// After so many passes all kinds are looked through: once in an hour.
const LOOK_THROUGH_EVERY: u32 = 120;

/// The objects of this release in one Kubernetes, made through one of its API servers.
///
/// One is made for each controller, and lives as long as its role:
///
/// ```no_run
/// use shepherd::reconciler::objects::kubernetes::{Connection, Identity};
/// use shepherd::reconciler::objects::pass::KubernetesObjects;
/// use shepherd::reconciler::objects::wishes::Wishes;
/// use tokio::sync::watch;
///
/// let connection = Connection {
///     url: "https://127.0.0.1:6443".to_owned(),
///     identity: Some(Identity {
///         authority: "/state/kubernetes/ca.pem".into(),
///         certificate: "/state/kubernetes/reconciler.pem".into(),
///         key: "/state/kubernetes/reconciler.key".into(),
///     }),
/// };
/// // Until the cluster's wishes are known there are none to be had, and passes fail.
/// let (wishes, receiver) = watch::channel(None);
/// let objects = KubernetesObjects::new(connection, receiver);
/// wishes.send_replace(Some(Wishes::default()));
/// // What a person has to do, for whoever reports it.
/// let troubles = objects.troubles();
/// # drop((objects, troubles));
/// ```
#[derive(Debug)]
pub struct KubernetesObjects {
    kubernetes: Arc<Kubernetes>,
    wishes: watch::Receiver<Option<Wishes>>,
    watches: Watches,
    known: Mutex<Known>,
    troubles: watch::Sender<Vec<Trouble>>,
    records: Option<Client>,
}

/// What is kept from one pass to the next.
#[derive(Debug, Default)]
struct Known {
    wishes: Option<Wishes>,
    manifests: Manifests,
    served: Served,
    /// Kinds of which there was something of ours that nobody declares.
    left: BTreeMap<Resource, Kind>,
    passes_until_looked_through: u32,
}

/// One kind in one pass.
struct Lane {
    kind: Kind,
    wanted: BTreeMap<Key, Wanted>,
    unread: BTreeSet<String>,
    /// Whether anything of the release may be of this kind: then what fails makes the pass fail.
    is_built_in: bool,
    /// Whether it is only looked through.
    is_looked_through: bool,
}

/// What there is to do, before anything was listed.
struct Prepared {
    api: Api,
    lanes: Vec<Lane>,
    troubles: Vec<Trouble>,
    known: Known,
}

/// What became of one kind.
#[derive(Default)]
struct Outcome {
    passed: Passed,
    troubles: Vec<Trouble>,
    /// What of the release's failed.
    failures: Vec<String>,
    wrote: BTreeMap<Key, u64>,
}

impl KubernetesObjects {
    /// The objects of this release; nothing is asked yet. `wishes` is `None` until it is known what the cluster wishes.
    #[must_use]
    pub fn new(connection: Connection, wishes: watch::Receiver<Option<Wishes>>) -> Self {
        let kubernetes = Arc::new(Kubernetes::new(connection));
        let watches = Watches::new(Arc::clone(&kubernetes));
        let (known, troubles) = (Mutex::default(), watch::Sender::default());
        Self { kubernetes, wishes, watches, known, troubles, records: None }
    }

    /// And the objects of nodes ([`nodes`](crate::reconciler::objects::nodes)), whose records are in the curator's etcd.
    #[must_use]
    pub fn and_nodes_of(mut self, curator: Client) -> Self {
        self.records = Some(curator);
        self
    }

    /// What stands in the way of objects, as of the last pass.
    #[must_use]
    pub fn troubles(&self) -> watch::Receiver<Vec<Trouble>> {
        self.troubles.subscribe()
    }

    /// What a pass would change now, a line for each object; empty where there is nothing to do. Changes nothing.
    pub async fn plan(&self) -> Result<String, PassError> {
        let Prepared { api, lanes, mut troubles, .. } = self.prepare().await?;
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
            let expectation = self.expectation(&lane);
            for action in expectation.plan(&list.items) {
                let (word, key) = match &action {
                    Action::Create(key) => {
                        let Some(wanted) = expectation.wanted(key) else { continue };
                        match api.get(kind_of(&lane.kind, wanted), key).await {
                            Ok(Some(present)) if !is_ours(wanted, &present) => {
                                troubles.push(Trouble::clash(wanted.add_on(), &resource, key));
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
                    Action::Await(key) => ("await the end of", key),
                };
                let _ = writeln!(text, "{word} {resource} {key}");
            }
        }
        if let Some(records) = &self.records {
            node_pass::plan(&api, records, &mut text).await;
        }
        for trouble in troubles {
            let _ = writeln!(text, "cannot {trouble}");
        }
        Ok(text)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn expectation(&self, lane: &Lane) -> Expectation {
        let sight = self.watches.sight();
        let earlier = sight.expectation(&lane.kind.resource());
        Expectation::new(lane.wanted.clone(), lane.unread.clone(), earlier)
    }

    /// Finds out what is wanted, and of which kinds.
    async fn prepare(&self) -> Result<Prepared, PassError> {
        let wishes = self.wishes.borrow().clone();
        let wishes =
            wishes.ok_or_else(|| PassError("it is not known yet what the cluster wishes for".to_owned()))?;
        let api = self.kubernetes.api().await.map_err(|error| PassError(error.to_string()))?;
        let asking = |error: AskError| PassError(format!("it is not known which kinds there are: {error}"));
        let mut known = self.known().clone_for_a_pass();
        let looks_through = known.passes_until_looked_through == 0 || known.wishes.as_ref() != Some(&wishes);
        if looks_through {
            known.served = Served::ask(&api).await.map_err(asking)?;
            known.manifests = Manifests::read(&wishes.add_ons);
            known.passes_until_looked_through = LOOK_THROUGH_EVERY;
        }
        known.passes_until_looked_through -= 1;
        known.served.ask_for(&api, &known.manifests.kinds()).await.map_err(asking)?;
        let made = built_in(&wishes).map_err(|error| PassError(format!("no JSON: {error}")))?;
        known.wishes = Some(wishes);
        let (lanes, troubles) = lanes(made, &known, looks_through);
        Ok(Prepared { api, lanes, troubles, known })
    }

    async fn pass_lane(&self, api: &Api, lane: &Lane) -> Result<(Outcome, bool), AskError> {
        let List { items, resource_version } = api.list(&lane.kind).await?;
        let mut expectation = self.expectation(lane);
        let is_nothing = items.is_empty() && expectation.is_empty() && !lane.is_built_in;
        if is_nothing && lane.is_looked_through {
            return Ok((Outcome::default(), false));
        }
        self.watches.watch(&lane.kind, &resource_version);
        let mut outcome = Outcome::default();
        for action in expectation.plan(&items) {
            self.act(api, lane, &mut expectation, &mut outcome, action).await;
        }
        for object in &items {
            // What was found to be right is what the server makes of it.
            let key = Key::of(object);
            let is_applied = expectation.wanted(&key).is_some_and(|wanted| wanted.add_on().is_some());
            if is_applied && expectation.judge(&key, object) == Verdict::Right {
                expectation.remember(&key, object);
            }
        }
        let wrote = std::mem::take(&mut outcome.wrote);
        self.watches.sight().passed(&lane.kind.resource(), &resource_version, expectation, wrote);
        Ok((outcome, !is_nothing))
    }

    /// Does one thing.
    async fn act(
        &self,
        api: &Api,
        lane: &Lane,
        expectation: &mut Expectation,
        outcome: &mut Outcome,
        action: Action,
    ) {
        let resource = lane.kind.resource();
        let (key, done) = match action {
            Action::Create(key) => {
                let Some(wanted) = expectation.wanted(&key).cloned() else { return };
                let done = create(api, &lane.kind, &key, &wanted).await;
                (key, done.map(|done| (Some(wanted), done)))
            }
            Action::Update(key, present) => {
                let Some(wanted) = expectation.wanted(&key).cloned() else { return };
                let done = update(api, &lane.kind, &key, &wanted, &present).await;
                (key, done.map(|done| (Some(wanted), done)))
            }
            Action::Delete(key, seen) => {
                let done = match api.delete(&lane.kind, &key, &seen).await {
                    Err(AskError::Refused(status)) if refusal(&status) == Refusal::Gone => Ok(()),
                    other => other,
                };
                (key, done.map(|()| (None, Done::Deleted)))
            }
            Action::Await(key) => {
                let why = "it is being deleted, and somebody has asked to be waited for: see its finalizers"
                    .to_owned();
                (key, Err(AskError::NotSent(why)))
            }
        };
        let add_on = expectation.wanted(&key).and_then(|wanted| wanted.add_on().map(str::to_owned));
        match done {
            Ok((wanted, done)) => {
                let what = match done {
                    Done::Is(how, answer) => {
                        if let Some(version) = number(resource_version(&answer)) {
                            outcome.wrote.insert(key.clone(), version);
                        }
                        if wanted.is_some() {
                            expectation.remember(&key, &answer);
                        }
                        match how {
                            How::Created => outcome.passed.created += 1,
                            How::Updated => outcome.passed.updated += 1,
                            How::Replaced => outcome.passed.replaced += 1,
                        }
                        match how {
                            How::Created => "created",
                            How::Updated => "updated",
                            How::Replaced => "made anew",
                        }
                    }
                    Done::Deleted => {
                        outcome.passed.deleted += 1;
                        "deleted"
                    }
                    Done::Clash => {
                        outcome.troubles.push(Trouble::clash(add_on.as_deref(), &resource, &key));
                        return;
                    }
                };
                tracing::info!(kind = %resource, object = %key, what, "an object of Kubernetes was not as it should be");
            }
            Err(error) => {
                tracing::debug!(kind = %resource, object = %key, %error, "an object of Kubernetes is not as it should be");
                if lane.is_built_in && add_on.is_none() {
                    outcome.failures.push(format!("{resource} {key}: {error}"));
                } else {
                    outcome.troubles.push(not_done(add_on.as_deref(), &resource, &key, &error));
                }
            }
        }
    }

    /// Tells troubles, and says aloud which are new.
    fn tell(&self, mut troubles: Vec<Trouble>) {
        troubles.sort();
        troubles.dedup();
        self.troubles.send_if_modified(|told| {
            for trouble in troubles.iter().filter(|trouble| !told.contains(trouble)) {
                let Trouble { subject, why, remedy } = trouble;
                tracing::error!(%subject, why, remedy, "something in Kubernetes cannot be put right from here");
            }
            for trouble in told.iter().filter(|trouble| !troubles.contains(trouble)) {
                tracing::info!(subject = %trouble.subject, "it no longer stands in the way");
            }
            let changed = *told != troubles;
            *told = troubles;
            changed
        });
    }
}

impl Known {
    fn clone_for_a_pass(&self) -> Self {
        Self {
            wishes: self.wishes.clone(),
            manifests: self.manifests.clone(),
            served: self.served.clone(),
            left: self.left.clone(),
            passes_until_looked_through: self.passes_until_looked_through,
        }
    }
}

impl Objects for KubernetesObjects {
    async fn pass(&self) -> Result<Passed, PassError> {
        let _passing = self.watches.begin();
        let Prepared { api, lanes, mut troubles, mut known } = self.prepare().await?;
        let (mut passed, mut failures) = (Passed::default(), Vec::new());
        let mut followed = BTreeSet::new();
        for lane in &lanes {
            let resource = lane.kind.resource();
            match self.pass_lane(&api, lane).await {
                Ok((outcome, is_followed)) => {
                    let Outcome { passed: more, troubles: found, failures: failed, .. } = outcome;
                    passed.created += more.created;
                    passed.updated += more.updated;
                    passed.replaced += more.replaced;
                    passed.deleted += more.deleted;
                    troubles.extend(found);
                    failures.extend(failed);
                    if is_followed {
                        followed.insert(resource.clone());
                    }
                    let is_left = is_followed && lane.wanted.is_empty() && !lane.is_built_in;
                    if is_left {
                        known.left.insert(resource, lane.kind.clone());
                    } else {
                        known.left.remove(&resource);
                    }
                }
                Err(error) => {
                    followed.insert(resource.clone());
                    if lane.is_built_in {
                        failures.push(format!("{resource}: {error}"));
                    } else if !lane.is_looked_through {
                        let add_ons: BTreeSet<_> = lane.wanted.values().filter_map(Wanted::add_on).collect();
                        troubles.extend(add_ons.into_iter().map(|add_on| {
                            let why = format!("its {resource} cannot be listed: {error}");
                            Trouble::passing(Subject::AddOn(add_on.to_owned()), why)
                        }));
                    }
                }
            }
        }
        if let Some(records) = &self.records {
            node_pass::pass(&api, records, &mut passed, &mut troubles).await;
        }
        self.watches.keep(|resource| followed.contains(resource));
        *self.known() = known;
        self.tell(troubles);
        if failures.is_empty() { Ok(passed) } else { Err(PassError(failures.join("; "))) }
    }

    async fn changed(&self) {
        let used = self.known().wishes.clone();
        let mut wishes = self.wishes.clone();
        let other_wishes = async {
            if wishes.wait_for(|wishes| wishes.is_some() && *wishes != used).await.is_err() {
                // Nobody changes them any more.
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = other_wishes => {}
            () = self.watches.news() => {}
        }
    }
}

/// Which kinds are looked at, in which order, and for what.
fn lanes(made: Vec<BuiltIn>, known: &Known, looks_through: bool) -> (Vec<Lane>, Vec<Trouble>) {
    let mut wanted: BTreeMap<Resource, BTreeMap<Key, Wanted>> = BTreeMap::new();
    for BuiltIn { kind, object } in made {
        wanted.entry(kind.resource()).or_default().insert(Key::of(&object), Wanted::BuiltIn(object));
    }
    let taken =
        |resource: &Resource, key: &Key| wanted.get(resource).is_some_and(|keys| keys.contains_key(key));
    let Asked { kinds: mut asked, unread, troubles } = known.manifests.ask(&known.served, taken);
    let mut lanes = Vec::new();
    for kind in kinds() {
        let resource = kind.resource();
        let mut all = wanted.remove(&resource).unwrap_or_default();
        all.extend(asked.remove(&resource).map(|(_, wanted)| wanted).unwrap_or_default());
        lanes.push(Lane {
            kind,
            wanted: all,
            unread: unread.clone(),
            is_built_in: true,
            is_looked_through: false,
        });
    }
    let mut others: Vec<_> = asked.into_values().collect();
    others.sort_by_key(|(kind, _)| rank(kind));
    let lane = |kind: Kind, wanted, is_looked_through| Lane {
        kind,
        wanted,
        unread: unread.clone(),
        is_built_in: false,
        is_looked_through,
    };
    lanes.extend(others.into_iter().map(|(kind, wanted)| lane(kind, wanted, false)));
    let nowhere =
        |lanes: &[Lane], kind: &Kind| lanes.iter().all(|lane| lane.kind.resource() != kind.resource());
    let all = if looks_through { known.served.all() } else { &[] };
    for kind in known.left.values().chain(all) {
        if nowhere(&lanes, kind) {
            lanes.push(lane(kind.clone(), BTreeMap::new(), true));
        }
    }
    (lanes, troubles)
}

/// How an object became what it is.
#[derive(Clone, Copy)]
enum How {
    Created,
    Updated,
    Replaced,
}

/// What was done with one.
enum Done {
    Is(How, Value),
    Deleted,
    /// Nothing: it is somebody else's.
    Clash,
}

/// In which version of its API an object is spoken of.
fn kind_of<'k>(kind: &'k Kind, wanted: &'k Wanted) -> &'k Kind {
    match wanted {
        Wanted::BuiltIn(_) => kind,
        Wanted::Applied { kind, .. } => kind,
    }
}

/// Whether an object without the label is ours all the same: somebody took it off, or it says what ours would.
///
/// Only of the release's own is it enough to say the same: an add-on takes nothing over that it would delete one day.
fn is_ours(wanted: &Wanted, present: &Value) -> bool {
    match wanted {
        Wanted::BuiltIn(object) => was_written_by_us(present) || holds(&without_label(object), Some(present)),
        Wanted::Applied { .. } => applied_fields(present).is_some(),
    }
}

fn without_label(object: &Value) -> Value {
    let mut object = object.clone();
    if let Some(labels) = object.pointer_mut("/metadata/labels").and_then(Value::as_object_mut) {
        labels.remove(KEPT);
    }
    if object.pointer("/metadata/labels") == Some(&json!({}))
        && let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut)
    {
        metadata.remove("labels");
    }
    object
}

async fn create(api: &Api, kind: &Kind, key: &Key, wanted: &Wanted) -> Result<Done, AskError> {
    match wanted {
        Wanted::BuiltIn(object) => match api.create(kind, key, &to_create(object)).await {
            Ok(answer) => Ok(Done::Is(How::Created, answer)),
            Err(AskError::Refused(status)) if refusal(&status) == Refusal::NameTaken => {
                match api.get(kind, key).await? {
                    Some(present) if is_ours(wanted, &present) => {
                        update(api, kind, key, wanted, &present).await
                    }
                    Some(_) => Ok(Done::Clash),
                    // It was there a moment ago; the next pass makes it.
                    None => Err(AskError::Refused(status)),
                }
            }
            Err(error) => Err(error),
        },
        Wanted::Applied { kind, object, .. } => match api.get(kind, key).await? {
            Some(present) if !is_ours(wanted, &present) => Ok(Done::Clash),
            Some(_) => Ok(Done::Is(How::Updated, api.apply(kind, key, object).await?)),
            None => Ok(Done::Is(How::Created, api.apply(kind, key, object).await?)),
        },
    }
}

async fn update(
    api: &Api,
    kind: &Kind,
    key: &Key,
    wanted: &Wanted,
    present: &Value,
) -> Result<Done, AskError> {
    let object = match wanted {
        Wanted::BuiltIn(object) => object,
        // What cannot be changed of an add-on may hold data: it is not made anew, but told.
        Wanted::Applied { kind, object, .. } => {
            return Ok(Done::Is(How::Updated, api.apply(kind, key, object).await?));
        }
    };
    match api.replace(kind, key, &to_update(object, present)).await {
        Ok(answer) => Ok(Done::Is(How::Updated, answer)),
        Err(AskError::Refused(status)) if refusal(&status) == Refusal::Immutable => {
            // Only what was judged goes. Were the second request lost, the next pass would make it.
            api.delete(kind, key, &Precondition::of(present)).await?;
            Ok(Done::Is(How::Replaced, api.create(kind, key, &to_create(object)).await?))
        }
        Err(error) => Err(error),
    }
}

fn not_done(add_on: Option<&str>, resource: &Resource, key: &Key, error: &AskError) -> Trouble {
    let (subject, why) = (Subject::object(add_on, resource, key), error.to_string());
    match error {
        AskError::Refused(status) if refusal(status) == Refusal::Immutable => {
            let remedy = "delete it, if nothing in it is needed: then it is made anew".to_owned();
            Trouble { subject, why, remedy }
        }
        _ => Trouble::passing(subject, why),
    }
}
