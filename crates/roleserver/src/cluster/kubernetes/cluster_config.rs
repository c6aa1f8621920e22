//! Watch the cluster's Kubernetes configuration for the reconciler: runtime handlers, storage, add-ons.
//!
//! Add-ons come from the bundle and from operators. Operators' add-ons are artefacts, and every controller fetches
//! them, because any of them may be elected to run the reconciler. An add-on that is not here yet is passed on as an
//! unreadable manifest. The reconciler reports it, and leaves the objects that it made of it before unchanged.

use std::collections::BTreeSet;
use std::time::Duration;

use model::role_declaration::Sha256;
use proto::curator::v1::KubernetesAddOn;
use reconciler::objects::cluster_config::{AddOn, ClusterConfig, StorageDriver};
use supervisor::combine::CombinedInputs;
use supervisor::context::{Runnable, Starting};
use supervisor::watch_cell::WatchCell;

use crate::cluster::kubernetes::bundle_install::InstalledBundle;
use crate::cluster::kubernetes::bundle_store::Bundle;
use crate::cluster::kubernetes::startup::{KubernetesStartup, RoleStartup};
use crate::cluster::services::artefact_store::ArtefactStore;
use crate::server_pool::ServerPool;

/// Interval between attempts to fetch an add-on that is unavailable.
const RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// Runtime handler that containerd of every worker has.
const RUNTIME_HANDLER: &str = "runc";
/// Largest manifest file of an add-on, in bytes.
const MAX_ADD_ON_BYTES: u64 = model::kubernetes::bundle_manifest::MAX_ADD_ON_BYTES;

/// Makes the runnable that publishes the cluster's configuration in `output`.
#[must_use]
pub fn watch_cluster_config(
    store: ArtefactStore,
    server_pool: ServerPool,
    (startup, held): (WatchCell<KubernetesStartup>, WatchCell<InstalledBundle>),
    output: WatchCell<ClusterConfig>,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (store, server_pool, output) = (store.clone(), server_pool.clone(), output.clone());
        let (startup, held) = (startup.clone(), held.clone());
        async move {
            let healthy = starting.mark_healthy();
            let scope = healthy.scope();
            let mut inputs = CombinedInputs::new((None::<KubernetesStartup>, None::<InstalledBundle>))
                .with(&startup, |known: &mut (Option<KubernetesStartup>, _), next| known.0 = Some(next))
                .with(&held, |known: &mut (_, Option<InstalledBundle>), next| known.1 = Some(next));
            let mut known = scope.until_cancelled(inputs.next()).await?;
            loop {
                let mut again = false;
                if let (Some(startup), Some(InstalledBundle { bundle: Some(bundle), .. })) = &known
                    && startup.controller == RoleStartup::On
                    && let Some(setup) = &startup.setup
                {
                    let settings = setup.settings();
                    let mut add_ons = bundle_add_ons(bundle).await;
                    let mut needed = BTreeSet::new();
                    for add_on in &settings.add_ons {
                        needed.extend(parse_digest(add_on));
                        let got = scope.until_cancelled(read_manifest(&store, &server_pool, add_on)).await?;
                        let manifest = got.unwrap_or_else(|why| {
                            again = true;
                            tracing::warn!(
                                name = add_on.name,
                                reason = why,
                                "an add-on of Kubernetes is not available"
                            );
                            unreadable_manifest(&why)
                        });
                        add_ons.push(AddOn { name: add_on.name.clone(), manifest });
                    }
                    if let Err(error) = remove_unneeded(&store, needed).await {
                        tracing::warn!(%error, "unneeded files of add-ons could not be removed");
                    }
                    let storage_driver = settings.storage.as_ref().map(|storage| StorageDriver {
                        name: storage.driver.clone(),
                        class: storage.class.clone(),
                        parameters: std::collections::BTreeMap::new(),
                        can_expand: false,
                        needs_attach: true,
                    });
                    let wishes = ClusterConfig {
                        runtime_handlers: BTreeSet::from([RUNTIME_HANDLER.to_owned()]),
                        storage_driver,
                        add_ons,
                    };
                    if output.latest().as_ref() != Some(&wishes) {
                        output.set(wishes);
                    }
                }
                let due = async {
                    if again {
                        tokio::time::sleep(RETRY_INTERVAL).await;
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

/// Text that is no manifest and contains the reason why there is none.
fn unreadable_manifest(why: &str) -> Vec<u8> {
    serde_json::Value::from(format!("it is not on this node: {why}")).to_string().into_bytes()
}

async fn bundle_add_ons(bundle: &Bundle) -> Vec<AddOn> {
    let bundle = bundle.clone();
    let reading = move || {
        let read = |add_on: &model::kubernetes::bundle_manifest::BundleAddOn| {
            let manifest =
                bundle.read_add_on(add_on).unwrap_or_else(|error| unreadable_manifest(&error.to_string()));
            AddOn { name: add_on.name.clone(), manifest }
        };
        bundle.add_ons().iter().map(read).collect()
    };
    tokio::task::spawn_blocking(reading).await.unwrap_or_default()
}

fn parse_digest(add_on: &KubernetesAddOn) -> Option<Sha256> {
    hex::decode(&add_on.digest).ok().and_then(|digest| digest.try_into().ok()).map(Sha256)
}

async fn remove_unneeded(store: &ArtefactStore, needed: BTreeSet<Sha256>) -> std::io::Result<()> {
    let store = store.clone();
    tokio::task::spawn_blocking(move || store.remove_unneeded(&needed))
        .await
        .map_err(std::io::Error::other)?
}

/// Fetches and reads the manifest of an add-on; the error is a sentence.
async fn read_manifest(
    store: &ArtefactStore,
    server_pool: &ServerPool,
    add_on: &KubernetesAddOn,
) -> Result<Vec<u8>, String> {
    let digest = parse_digest(add_on).ok_or_else(|| format!("{:?} is no digest", add_on.digest))?;
    let here = store.clone();
    let whole = tokio::task::spawn_blocking(move || {
        use std::os::unix::fs::DirBuilderExt as _;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&here.0)?;
        here.verify_artefact(digest)
    });
    let whole = whole.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    if !whole {
        store.fetch_artefact(digest, &add_on.url, server_pool).await?;
    }
    let path = store.path(digest);
    let size = tokio::fs::metadata(&path).await.map_err(|error| error.to_string())?.len();
    if size > MAX_ADD_ON_BYTES {
        return Err(format!("it has {size} bytes; the limit is {MAX_ADD_ON_BYTES}"));
    }
    tokio::fs::read(&path).await.map_err(|error| error.to_string())
}
