//! Services of the roles that operators declare.
//!
//! A role is a declaration that the curator keeps ([`crate::model::declaration`]); a node that has the role runs its
//! services. What is to run, and how everything is, are two tables; what to do follows from both by a pure function that
//! is asked anew after everything that happens. So the first start, a restart of the role server, a reboot and a changed
//! declaration go through the same code.
//!
//! Services are programs beside the role server, each in a control group of its own, and outlive it: it may be replaced,
//! crash or be killed, and the next one goes on with the processes that it finds. They are not runnables of the
//! supervisor: a runnable starts its children once, and starts again what died by one rule, while services come and go
//! with declarations and each says itself what its end means.
//!
//! # How the files fit
//!
//! * [`follow`][]: what is declared, from the disk first and from the curator then; [`kept`][]: on the disk.
//! * [`wanted`][]: declarations with this node's facts put into them (pure). [`render`][]: where the facts come from.
//! * [`state`][]: how a service is. [`plan`][]: what to do next (pure). [`told`][]: what is said of it (pure).
//! * [`keeper`][]: the loop that does it. [`work`][]: what takes time. [`hands`][]: what is done on the host.
//! * [`artefacts`][]: programs by their digest; [`fetch`][]: from a URL, or from shepherds
//!   ([`shepherds`][crate::roleserver::shepherds]).
//! * [`root`][]: a root filesystem of its own, and what runc is told.
//! * [`placing`][]: the files of a service. [`users`][]: as whom it runs. [`probe`][]: whether it is well.
//!
//! # What there is on the disk
//!
//! Below `children/ROLE_SERVICE/`: `service.json`, what it was started with, written before it starts; `process.json`,
//! which process it is, written by that process before it becomes the program; what it writes. Below
//! `cluster/services/ROLE_SERVICE/`: its own directory. All of it goes when the role is taken, the first of these last.

use std::sync::Arc;

use crate::curator::clock::Clock;
use crate::roleserver::child::keep::Places;
use crate::roleserver::cluster::facts::Facts;
use crate::roleserver::cluster::files::Files;
use crate::roleserver::cluster::services::artefacts::Store;
use crate::roleserver::cluster::services::hands::{Hands, Particulars, Whose};
use crate::roleserver::cluster::services::keeper::Inputs;
use crate::roleserver::shepherds::Shepherds;
use crate::supervisor::context::{Runnable, Starting};
use crate::supervisor::value::Value;

pub mod artefacts;
pub mod fetch;
pub mod follow;
pub mod hands;
pub mod keeper;
pub mod kept;
pub mod placing;
pub mod plan;
pub mod probe;
pub mod render;
pub mod root;
pub mod state;
pub mod told;
pub mod users;
pub mod wanted;
pub mod work;

/// The runnable: all of it. Declarations from the disk are said once in each life.
#[must_use]
pub fn services(
    (files, shepherds): (Files, Shepherds),
    facts: Facts,
    places: Arc<Places>,
    clock: Clock,
    boot_id: String,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, places) = (files.clone(), facts.clone(), places.clone());
        let shepherds = shepherds.clone();
        let (clock, boot_id) = (clock.clone(), boot_id.clone());
        async move {
            if facts.declarations.latest().is_none()
                && let Some(declared) = kept::declarations(&files)
            {
                let roles: Vec<String> = declared.keys().map(ToString::to_string).collect();
                tracing::info!(?roles, "whose services this node was last to run");
                facts.declarations.set(declared);
            }
            let wanted = Value::new();
            let held = Value::new();
            let store = Store(files.artefacts());
            let hands = Hands {
                whose: Whose::Declared,
                particulars: Particulars::NONE,
                places,
                directory: files.services(),
                store: store.clone(),
            };
            starting.start("follow", follow::follow(files.clone(), facts.clone()))?;
            starting.start("render", render::render(files, facts.clone(), clock.clone(), wanted.clone()))?;
            starting
                .start("artefacts", artefacts::artefacts(store, shepherds, wanted.clone(), held.clone()))?;
            starting.start(
                "keeper",
                keeper::keeper(hands, facts.services, Inputs { wanted, held }, clock, boot_id),
            )?;
            Err(starting.healthy().scope().cancelled().await.into())
        }
    })
}
