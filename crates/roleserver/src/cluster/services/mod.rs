//! Services of the roles that operators declare: desired state, planner, service manager.
//!
//! A role is a declaration that the curator stores ([`model::role_declaration`]); a node with the role runs its
//! services. The desired and the observed services are two tables. A pure function derives the next actions from both,
//! and is called again after every event. So the first start, a restart of the role server, a reboot and a changed
//! declaration use the same code.
//!
//! Services are children of the role server, each in its own control group, and outlive it. The role server may be
//! replaced, crash or be killed; the next one adopts the running processes. Services are not runnables of the
//! supervisor: a runnable starts its children once, and restarts dead ones by one rule, while services come and go with
//! declarations and each has its own restart policy.
//!
//! # How the files fit
//!
//! * [`curator_watch`][]: watches declarations from the curator. [`persisted`][]: stores them.
//! * [`desired`][]: declarations rendered with this node's facts (pure). [`render`][]: collects the facts.
//! * [`service_state`][]: the state of a service. [`plan`][]: the next actions (pure). [`status`][]: the reported
//!   status (pure).
//! * [`service_manager`][]: the loop that executes the plan. [`service_process`][]: the process of a service, with its
//!   tasks. [`service_stop`][]: stops a service beside the loop.
//! * [`service_runtime`][]: blocking operations on the host. [`record_files`][]: the files that record a service.
//! * [`artefact_store`][]: programs by their digest, downloaded from a URL ([`http_fetch`][crate::http_fetch]) or from
//!   a shepherd ([`server_pool`][crate::server_pool]).
//! * [`rootfs`][]: a service's own root filesystem. [`archive_entry`][]: what an entry of its archive means. [`oci_config`][]: the configuration of runc for it. [`seccomp`][]: its
//!   filter of system calls.
//! * [`workdir`][]: the files of a service. [`users`][]: its user and groups. [`probe`][]: health probes.
//!
//! # On the disk
//!
//! Below `children/ROLE_SERVICE/`: `service.json`, the run record, written before the service starts; `files.json`, which
//! files were written for it, for when a loss of power damages the run record ([`record_files`][]); `process.json`,
//! which identifies its process and is written by that process before it executes the program; its output. Below
//! `cluster/services/ROLE_SERVICE/`: its own directory. All of it is removed when the node loses the role, and the run
//! record last.
//!
//! # Invariants
//!
//! * A declaration that gives root runs only if a pinned key signed it, on a machine that requires that.
//! * While the desired services are unknown, what runs continues and nothing starts.
//! * A running service is restarted only if the digest of what it is started with has changed.
//! * The run record is durable before a service starts, and is removed last. So whatever runs is known, and leftovers
//!   are found again.
//! * One operation at a time works on a service. A run of the manager waits for the operations of its own before it
//!   ends.
//! * In a directory that a service's user can write to, no link is followed.
//! * An artefact is used only if its digest was verified in this life of the role server.
//!
//! # Notes for the next implementor
//!
//! * The Kubernetes components of a node run in a second service manager, side by side with this one.
//!   [`service_runtime::ServiceOwner`][] distinguishes the services of the two, and [`service_runtime::ServiceHooks`][]
//!   do what a component needs on the host.
//! * A new property of a service either belongs to [`desired::RenderedService`][], where a change restarts it, or to
//!   [`service_state::RunRecord::adjusted`][], where a change applies to the running service.
//! * A new phase has to be handled by [`plan`][], by [`status`][] and by
//!   [`service_state::ObservedService::is_healthy`][].

use std::sync::Arc;

use curator_client::clock::Clock;
use supervisor::context::{Runnable, Starting};
use supervisor::watch_cell::WatchCell;

use crate::child::lifecycle::ChildContext;
use crate::cluster::files::ClusterFiles;
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::services::artefact_store::ArtefactStore;
use crate::cluster::services::service_manager::ServiceManagerInputs;
use crate::cluster::services::service_runtime::{ServiceHooks, ServiceOwner, ServiceRuntime};
use crate::server_pool::ServerPool;
use crate::signing_store::SigningStore;

pub mod archive_entry;
pub mod artefact_store;
pub mod curator_watch;
pub mod desired;
pub mod oci_config;
pub mod persisted;
pub mod plan;
pub mod probe;
pub mod record_files;
pub mod render;
pub mod rootfs;
pub mod seccomp;
pub mod service_manager;
pub mod service_process;
pub mod service_runtime;
pub mod service_state;
pub mod service_stop;
pub mod status;
pub mod users;
pub mod workdir;

/// Makes the runnable that starts all parts. It publishes the stored declarations once in each life of the process.
#[must_use]
pub fn run_services(
    (files, server_pool, signing): (ClusterFiles, ServerPool, SigningStore),
    facts: NodeFacts,
    children: Arc<ChildContext>,
    clock: Clock,
    boot_id: String,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, children) = (files.clone(), facts.clone(), children.clone());
        let (server_pool, signing) = (server_pool.clone(), signing.clone());
        let (clock, boot_id) = (clock.clone(), boot_id.clone());
        async move {
            if facts.declarations.latest().is_none()
                && let Some((declared, retained)) = persisted::read_declarations(&files)
            {
                let roles: Vec<String> = declared.keys().map(ToString::to_string).collect();
                tracing::info!(?roles, "this node starts with the stored declarations of these roles");
                facts.retained_roles.set(retained);
                facts.declarations.set(declared);
            }
            let (wanted, retained) = (WatchCell::new(), facts.retained_roles.clone());
            let held = WatchCell::new();
            let store = ArtefactStore(files.artefacts_directory());
            let runtime = ServiceRuntime {
                owner: ServiceOwner::Declared,
                hooks: ServiceHooks::NONE,
                children,
                directory: files.services_directory(),
                store: store.clone(),
            };
            starting
                .start("follow", curator_watch::watch_declarations(files.clone(), facts.clone(), signing))?;
            starting.start(
                "render",
                render::render_services(files, facts.clone(), clock.clone(), wanted.clone()),
            )?;
            starting.start(
                "artefacts",
                artefact_store::fetch_artefacts(store, server_pool, wanted.clone(), held.clone()),
            )?;
            starting.start(
                "manager",
                service_manager::run_service_manager(
                    runtime,
                    facts.services,
                    ServiceManagerInputs { desired: wanted, retained, artefacts: held },
                    clock,
                    boot_id,
                ),
            )?;
            Err(starting.mark_healthy().scope().cancelled().await.into())
        }
    })
}
