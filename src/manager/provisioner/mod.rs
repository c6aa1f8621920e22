//! Provisioner: reconciles providers' machine lists with the BMDB.
//!
//! Each provider gets one pass a minute under a named lease, so that only one of any number of shepherds makes it. A
//! pass (`pass.rs`) reads the provider's whole list and what the BMDB knows, decides ([`plan`]), and executes the plan:
//!
//! * Before a machine is created, the intent is recorded, and its id is passed to the provider. A crash between the two
//!   leaves an open intent. The next pass queries the provider for what was made under it and adopts that, so that
//!   creation is exactly-once. A shepherd that was frozen between the two creates nothing when it resumes: by then
//!   another shepherd has resolved its intent.
//! * A list that cannot be read, or cannot be right, engages a brake: nothing is created until a list looks right
//!   again.
//! * A paused provisioner makes no pass, and one that is paused in the middle of a pass creates nothing more.

mod pass;
pub mod plan;

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::connection::error::BmdbError;
use crate::bmdb::engine::named_lease::NamedLease;
use crate::bmdb::engine::session::{Session, Sessions};
use crate::bmdb::orders::loop_pause::PauseCache;
use crate::manager::catch_panic::catch_panic;
use crate::manager::failpoint;
use crate::manager::limiter::Limiter;
use crate::manager::metrics::ManagerMetrics;
use crate::manager::provider_breakers::ProviderBreaker;
use crate::manager::provisioner::pass::{ProvisionerPassError, run_pass};
use crate::manager::provisioner::plan::ProvisionerLimits;
use crate::providers::provider::Provider;

/// Component name of its sessions.
const COMPONENT: &str = "provisioner";
/// Kind of the named lease; its name is the provider's.
const LEASE: &str = "provisioner";

/// How machines are provisioned.
#[derive(Clone)]
pub struct ProvisionerSettings {
    /// Bounds of one pass.
    pub limits: ProvisionerLimits,
    /// Limits how often a provider's list is compared.
    pub reconciler: Limiter,
    /// Limits how often a machine is created; `None` for as fast as the provider answers.
    pub creation: Option<Limiter>,
    /// Decides whether the provider may be called at all.
    pub breaker: ProviderBreaker,
    /// Metrics that count its sessions.
    pub metrics: ManagerMetrics,
}

/// Provisions from one provider until `stop`. Releases the lease before it returns.
pub async fn run_provisioner(
    sessions: Sessions,
    provider: Arc<dyn Provider>,
    settings: ProvisionerSettings,
    stop: CancellationToken,
) {
    let name = provider.name().as_str().to_owned();
    while !stop.is_cancelled() {
        let details = serde_json::json!({ "provider": name });
        // Never cancelled half-way: the statement would continue, and a session that commits after this task has
        // stopped would stay open until the reaper finds it.
        let session = sessions.start(COMPONENT, details).await;
        match session {
            Ok(session) => {
                settings.metrics.record_session_start(COMPONENT);
                run_under_session(sessions.bmdb(), &session, &*provider, &settings, &stop).await;
                if !session.lost().is_cancelled()
                    && let Err(error) = sessions.close(&session, "the provisioner stopped").await
                {
                    tracing::warn!(provider = name, %error, "cannot close a session; the reaper will");
                }
            }
            Err(error) => {
                tracing::warn!(provider = name, %error, "cannot start a session; trying again in a second");
            }
        }
        sleep_unless_stopped(&stop, Duration::from_secs(1)).await;
    }
}

async fn sleep_unless_stopped(stop: &CancellationToken, duration: Duration) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = tokio::time::sleep(duration) => {}
    }
}

/// Makes passes under one session until the session ends or until `stop`.
async fn run_under_session(
    bmdb: &Bmdb,
    session: &Session,
    provider: &dyn Provider,
    settings: &ProvisionerSettings,
    stop: &CancellationToken,
) {
    let name = provider.name().as_str();
    while !stop.is_cancelled() && !session.lost().is_cancelled() {
        // Never cancelled half-way either: the statement would continue, and the lease would then be taken by a session
        // that is already closed.
        match bmdb.acquire_named_lease(session, LEASE, name).await {
            Ok(Some(lease)) => {
                tracing::info!(provider = name, fence = lease.fence, "provisioning");
                failpoint::hit(LEASE, "leased");
                run_passes(bmdb, session, &lease, provider, settings, stop).await;
                if let Err(error) = bmdb.release_named_lease(&lease).await {
                    tracing::warn!(provider = name, %error, "cannot release a lease; the reaper will");
                }
                return;
            }
            Ok(None) => sleep_unless_stopped(stop, Duration::from_secs(1)).await,
            Err(error) => {
                tracing::warn!(provider = name, %error, "cannot take the provisioner's lease; trying again in a second");
                sleep_unless_stopped(stop, Duration::from_secs(1)).await;
            }
        }
    }
}

async fn run_passes(
    bmdb: &Bmdb,
    session: &Session,
    lease: &NamedLease,
    provider: &dyn Provider,
    settings: &ProvisionerSettings,
    stop: &CancellationToken,
) {
    let mut pauses = PauseCache::default();
    loop {
        // A pass is dropped at its next await when the session ends. What it had started is an open intent, which the
        // next holder of the lease resolves.
        let pass = catch_panic(run_pass(bmdb, session, lease, provider, settings, &mut pauses));
        let more = tokio::select! {
            () = stop.cancelled() => return,
            result = session.run_while_open(pass) => match result {
                None | Some(Ok(Err(ProvisionerPassError::Bmdb(BmdbError::SessionEnded | BmdbError::LeaseLost)))) => return,
                Some(Ok(Ok(more))) => more,
                Some(Ok(Err(error))) => {
                    tracing::warn!(provider = lease.name, %error, "a provisioning pass failed");
                    false
                }
                // If a panic ended this task, it would hold its lease for as long as the process lives, and nobody
                // would provision.
                Some(Err(text)) => {
                    tracing::error!(provider = lease.name, text, "a provisioning pass panicked; the next one is made");
                    false
                }
            },
        };
        if more {
            continue;
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = session.lost().cancelled() => return,
            () = settings.reconciler.ready() => {}
        }
    }
}
