//! What the cluster wishes to have in its Kubernetes: runtime handlers, storage, add-ons.
//!
//! Add-ons come from the bundle and from operators; the latter are artefacts, and each controller fetches them, for any of
//! them may be the one that keeps objects. One that is not here yet is handed over as what cannot be read, which the
//! reconciler tells, and which changes nothing of what it made before.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::model::declaration::Sha256;
use crate::proto::curator::v1::KubernetesAddOn;
use crate::reconciler::objects::wishes::{AddOn, StorageDriver, Wishes};
use crate::roleserver::cluster::kubernetes::bundles::Bundle;
use crate::roleserver::cluster::kubernetes::held::Held;
use crate::roleserver::cluster::kubernetes::startup::{Part, Startup};
use crate::roleserver::cluster::services::artefacts::Store;
use crate::roleserver::shepherds::Shepherds;
use crate::supervisor::context::{Runnable, Starting};
use crate::supervisor::reduce::Inputs;
use crate::supervisor::value::Value;

/// When what is not to be had is asked for again.
const AGAIN: Duration = Duration::from_secs(30);
/// What containerd of every worker has.
const HANDLER: &str = "runc";
/// The largest file of an add-on.
const LARGEST: u64 = crate::model::kubernetes::bundle::LARGEST_ADD_ON;

/// The runnable; `output` is what is wished.
#[must_use]
pub fn wishing(
    store: Store,
    shepherds: Shepherds,
    (startup, held): (Value<Startup>, Value<Held>),
    output: Value<Wishes>,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (store, shepherds, output) = (store.clone(), shepherds.clone(), output.clone());
        let (startup, held) = (startup.clone(), held.clone());
        async move {
            let healthy = starting.healthy();
            let scope = healthy.scope();
            let mut inputs = Inputs::new((None::<Startup>, None::<Held>))
                .with(&startup, |known: &mut (Option<Startup>, _), next| known.0 = Some(next))
                .with(&held, |known: &mut (_, Option<Held>), next| known.1 = Some(next));
            let mut known = scope.until_cancelled(inputs.next()).await?;
            loop {
                let mut again = false;
                if let (Some(startup), Some(Held { bundle: Some(bundle), .. })) = &known
                    && startup.controller == Part::On
                    && let Some(setup) = &startup.setup
                {
                    let settings = setup.settings();
                    let mut add_ons = of_bundle(bundle).await;
                    let mut needed = BTreeSet::new();
                    for add_on in &settings.add_ons {
                        needed.extend(digest(add_on));
                        let got = scope.until_cancelled(manifest(&store, &shepherds, add_on)).await?;
                        let manifest = got.unwrap_or_else(|why| {
                            again = true;
                            tracing::warn!(
                                name = add_on.name,
                                why,
                                "an add-on of Kubernetes is not to be had"
                            );
                            unreadable(&why)
                        });
                        add_ons.push(AddOn { name: add_on.name.clone(), manifest });
                    }
                    if let Err(error) = keep_only(&store, needed).await {
                        tracing::warn!(%error, "files of add-ons that nobody needs any more stay");
                    }
                    let storage_driver = settings.storage.as_ref().map(|storage| StorageDriver {
                        name: storage.driver.clone(),
                        class: storage.class.clone(),
                        parameters: std::collections::BTreeMap::new(),
                        can_expand: false,
                        attaches: true,
                    });
                    let wishes = Wishes {
                        runtime_handlers: BTreeSet::from([HANDLER.to_owned()]),
                        storage_driver,
                        add_ons,
                    };
                    if output.latest().as_ref() != Some(&wishes) {
                        output.set(wishes);
                    }
                }
                let due = async {
                    if again {
                        tokio::time::sleep(AGAIN).await;
                    } else {
                        std::future::pending::<()>().await;
                    }
                };
                tokio::select! {
                    cancelled = scope.cancelled() => return Err(cancelled.into()),
                    next = inputs.next() => known = next,
                    () = due => {}
                }
            }
        }
    })
}

/// What is no manifest, and says why there is none.
fn unreadable(why: &str) -> Vec<u8> {
    serde_json::Value::from(format!("it is not on this node: {why}")).to_string().into_bytes()
}

async fn of_bundle(bundle: &Bundle) -> Vec<AddOn> {
    let bundle = bundle.clone();
    let reading = move || {
        let read = |add_on: &crate::model::kubernetes::bundle::AddOn| {
            let manifest = bundle.read_add_on(add_on).unwrap_or_else(|error| unreadable(&error.to_string()));
            AddOn { name: add_on.name.clone(), manifest }
        };
        bundle.add_ons().iter().map(read).collect()
    };
    tokio::task::spawn_blocking(reading).await.unwrap_or_default()
}

fn digest(add_on: &KubernetesAddOn) -> Option<Sha256> {
    hex::decode(&add_on.digest).ok().and_then(|digest| digest.try_into().ok()).map(Sha256)
}

async fn keep_only(store: &Store, needed: BTreeSet<Sha256>) -> std::io::Result<()> {
    let store = store.clone();
    tokio::task::spawn_blocking(move || store.keep_only(&needed)).await.map_err(std::io::Error::other)?
}

/// The file of an add-on; the error is a sentence.
async fn manifest(store: &Store, shepherds: &Shepherds, add_on: &KubernetesAddOn) -> Result<Vec<u8>, String> {
    let digest = digest(add_on).ok_or_else(|| format!("{:?} is no digest", add_on.digest))?;
    let here = store.clone();
    let whole = tokio::task::spawn_blocking(move || {
        use std::os::unix::fs::DirBuilderExt as _;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&here.0)?;
        here.is_whole(digest)
    });
    let whole = whole.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    if !whole {
        store.get(digest, &add_on.url, shepherds).await?;
    }
    let path = store.path(digest);
    let size = tokio::fs::metadata(&path).await.map_err(|error| error.to_string())?.len();
    if size > LARGEST {
        return Err(format!("it has {size} bytes, and {LARGEST} are the most"));
    }
    tokio::fs::read(&path).await.map_err(|error| error.to_string())
}
