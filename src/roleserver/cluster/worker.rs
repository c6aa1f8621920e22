//! The node's part in a cluster as one runnable.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::curator::clock::Clock;
use crate::roleserver::child::cgroup::Mounts;
use crate::roleserver::child::keep::{Places, end_leftovers};
use crate::roleserver::cluster::certificate::certificate;
use crate::roleserver::cluster::control_plane::{Host, control_plane};
use crate::roleserver::cluster::directory::{directory, leader};
use crate::roleserver::cluster::enrolment::enrolment;
use crate::roleserver::cluster::facts::Facts;
use crate::roleserver::cluster::files::{Files, FilesError};
use crate::roleserver::cluster::heartbeat::heartbeat;
use crate::roleserver::cluster::kubernetes::{self, ports::Ports};
use crate::roleserver::cluster::order::What;
use crate::roleserver::cluster::roles::roles;
use crate::roleserver::cluster::services::services;
use crate::roleserver::cluster::status::status;
use crate::roleserver::shepherds::Shepherds;
use crate::supervisor::context::{Runnable, Starting};
use crate::supervisor::outcome::Stop;

/// How often the directory of a machine that is no node is looked at for an order.
const LOOK: Duration = Duration::from_secs(2);

/// What it is run with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The state directory of the role server.
    pub state_directory: PathBuf,
    /// This program, by which others are started.
    pub launcher: PathBuf,
    /// The program etcd.
    pub etcd: PathBuf,
    /// UUID of the running boot.
    pub boot_id: String,
    /// The time.
    pub clock: Clock,
    /// Cancelled before the role server ends: what runs beside it goes on then.
    pub leaving: CancellationToken,
    /// Where files come from that nobody says a URL of.
    pub shepherds: Shepherds,
    /// Where components of Kubernetes listen.
    pub ports: Ports,
}

/// The runnable.
///
/// `facts` are what its parts tell each other; whoever gives them can watch.
#[must_use]
pub fn worker(settings: &Settings, facts: &Facts) -> Runnable {
    let files = Files::of(&settings.state_directory);
    let host = Host {
        files: files.clone(),
        places: Arc::new(places(&settings.state_directory, settings)),
        etcd: settings.etcd.clone(),
        clock: settings.clock.clone(),
    };
    let (facts, clock, boot_id) = (facts.clone(), settings.clock.clone(), settings.boot_id.clone());
    let shepherds = settings.shepherds.clone();
    let of_kubernetes = kubernetes::Host {
        files: files.clone(),
        places: host.places.clone(),
        clock: clock.clone(),
        boot_id: boot_id.clone(),
        shepherds: shepherds.clone(),
        ports: settings.ports.clone(),
    };
    Runnable::new(move |starting: Starting| {
        let parts = [
            ("enrolment", enrolment(files.clone(), facts.clone(), clock.clone(), shepherds.clone())),
            ("leader", leader(facts.clone())),
            ("control_plane", control_plane(host.clone(), facts.clone())),
            ("roles", roles(files.clone(), facts.clone())),
            ("status", status(facts.clone(), boot_id.clone())),
            ("heartbeat", heartbeat(facts.clone())),
            ("certificate", certificate(files.clone(), facts.clone(), clock.clone())),
            ("directory", directory(files.clone(), facts.clone())),
            (
                "services",
                services(
                    (files.clone(), shepherds.clone()),
                    facts.clone(),
                    host.places.clone(),
                    clock.clone(),
                    boot_id.clone(),
                ),
            ),
            ("kubernetes", kubernetes::kubernetes(of_kubernetes.clone(), facts.clone())),
        ];
        let (files, facts, host) = (files.clone(), facts.clone(), host.clone());
        async move {
            // Nothing of an earlier life runs any more.
            if is_to_leave(&files)? {
                leave(&host).await?;
                facts.forget();
            }
            let mut ordered = facts.ordered.watch();
            if !is_asked(&files)? {
                let healthy = starting.healthy();
                while !is_asked(&files)? {
                    let look = tokio::time::timeout(LOOK, ordered.next());
                    // Either way it is looked.
                    let _ = healthy.scope().until_cancelled(look).await?;
                }
                return Err(Stop::because("this machine was asked to be a node, and begins with it"));
            }
            for (name, part) in parts {
                starting.start(name, part)?;
            }
            let healthy = starting.healthy();
            loop {
                healthy.scope().until_cancelled(ordered.next()).await?;
                if is_to_leave(&files)? {
                    return Err(Stop::because(
                        "this machine was asked to leave its cluster, and ends what it runs",
                    ));
                }
            }
        }
    })
}

/// Whether this machine is a node, or was asked to be one.
fn is_asked(files: &Files) -> Result<bool, FilesError> {
    let asked = files.order()?.is_some_and(|order| order.what != What::Leave {});
    Ok(asked || files.credentials()?.is_some())
}

fn is_to_leave(files: &Files) -> Result<bool, FilesError> {
    Ok(files.order()?.is_some_and(|order| order.what == What::Leave {}))
}

/// Ends and removes what is left of a node. It may be cut off anywhere, and is done again then.
async fn leave(host: &Host) -> Result<(), Stop> {
    let (files, places) = (host.files.clone(), host.places.clone());
    let leaving = move || {
        for name in places.recorded() {
            end_leftovers(&name, &places)?;
            places.forget(&name)?;
        }
        kubernetes::leftovers::undo_all(&files, &places)?;
        Ok::<_, Stop>(files.remove_all_but_the_order()?)
    };
    tokio::task::spawn_blocking(leaving).await?
}

fn places(state_directory: &Path, settings: &Settings) -> Places {
    Places {
        directory: state_directory.join("children"),
        mounts: Mounts::of_this_host(),
        launcher: settings.launcher.clone(),
        leaving: settings.leaving.clone(),
    }
}
