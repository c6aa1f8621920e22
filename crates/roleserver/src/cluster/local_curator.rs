//! The curator of this node: a part of this process, beside its etcd.
//!
//! It shows a certificate of its own ([`curator_certificate`][crate::cluster::curator_certificate]). After a theft of the
//! authority's key, an order has it stopped while etcd gets another authority
//! ([`authority_order`][crate::cluster::authority_order]). The curator of a revoked node ends, and looks again from time to
//! time.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use curator::kubernetes::key_rotation::TOKEN_OVERLAP;
use curator::service::curator_error::CuratorError;
use curator::service::curator_server::{
    CLOCK_INTERVAL, Curator, CuratorSettings, FIRST_STATEMENT_WAIT, LEADER_TTL, SYNC_INTERVAL,
};
use etcd::client::Client;
use supervisor::context::{Runnable, Scope, Starting};
use supervisor::exit_reason::RunnableError;
use supervisor::watch_cell::WatchCell;
use transport::gate::open_files::available_files;

use crate::cluster::authority_order::must_be_closed;
use crate::cluster::beside_etcd::retry_beside_etcd;
use crate::cluster::control_plane_context::ControlPlaneContext;
use crate::cluster::curator_certificate::{prepare_curator_certificate, renew_curator_certificate};
use crate::cluster::files::ClusterFiles;
use crate::cluster::node_facts::{ControlPlane, CuratorConnection, NodeFacts};

/// TCP port that curators listen on.
pub const CURATOR_PORT: u16 = 7835;
/// How often the order that has the curator stopped is looked for.
const CLOSED_INTERVAL: Duration = Duration::from_secs(1);
/// How long the curator of a revoked node waits before it looks again.
const REVOKED_PAUSE: Duration = Duration::from_mins(1);

/// Starts the curator, and returns once it listens.
pub(super) async fn start_curator(
    starting: &Starting,
    scope: &Scope,
    host: &ControlPlaneContext,
    facts: &NodeFacts,
    connection: &CuratorConnection,
    client: Client,
    address: IpAddr,
) -> Result<(), RunnableError> {
    let preparing = || prepare_curator_certificate(&host.files, &client, &host.clock);
    let shown = retry_beside_etcd(scope, facts, preparing).await?;
    let settings = CuratorSettings {
        node_id: connection.id,
        client: client.clone(),
        listen: SocketAddr::new(address, CURATOR_PORT),
        server_certificate: Arc::new(shown.clone()),
        ttl: LEADER_TTL,
        sync_interval: SYNC_INTERVAL,
        first_statement_wait: FIRST_STATEMENT_WAIT,
        clock_interval: CLOCK_INTERVAL,
        token_overlap: TOKEN_OVERLAP,
        clock: host.clock.clone(),
        files: available_files(),
        gate: facts.curator_gate.clone(),
        statements: facts.statements.clone(),
        address_rule: host.address_rule,
    };
    let listening = WatchCell::new();
    let curator = {
        let (listening, files, closed) =
            (listening.clone(), host.files.clone(), facts.curator_closed.clone());
        Runnable::new(move |starting: Starting| {
            let (settings, listening) = (settings.clone(), listening.clone());
            let (files, closed) = (files.clone(), closed.clone());
            async move {
                while is_closed(&files) {
                    closed.set(true);
                    starting.scope().until_cancelled(tokio::time::sleep(CLOSED_INTERVAL)).await?;
                }
                closed.set(false);
                let curator = Curator::bind(settings).await?;
                listening.set(curator.address);
                let healthy = starting.mark_healthy();
                let running = healthy.scope().token().child_token();
                let mut run = Box::pin(curator.run(&running));
                let ended = tokio::select! {
                    ended = &mut run => ended,
                    () = wait_until_closed(&files) => {
                        running.cancel();
                        run.await?;
                        let sentence = "this node's curator is stopped until another authority of the cluster is in etcd";
                        return Err(RunnableError::msg(sentence));
                    }
                };
                if matches!(ended, Err(CuratorError::NodeRevoked(_))) {
                    // It was healthy, so that its next run would begin at once, and end at once.
                    healthy.scope().until_cancelled(tokio::time::sleep(REVOKED_PAUSE)).await?;
                }
                ended?;
                Err(healthy.scope().cancelled().await.into())
            }
        })
    };
    starting.start("curator", curator)?;
    let (files, clock) = (host.files.clone(), host.clock.clone());
    let renewing = renew_curator_certificate(files, facts.clone(), clock, client, shown);
    starting.start("curator_certificate", renewing)?;
    let at: SocketAddr = scope.until_cancelled(listening.watch().next()).await?;
    connection.curators.set_local(Some((connection.id, at.to_string())));
    facts.control_plane.set(Some(ControlPlane { port: at.port() }));
    Ok(())
}

/// Whether an order has this node's curator stopped, until another authority is in etcd. While the order cannot be read,
/// nothing is stopped.
fn is_closed(files: &ClusterFiles) -> bool {
    must_be_closed(files.read_next_authority().ok().flatten().as_ref())
}

async fn wait_until_closed(files: &ClusterFiles) {
    while !is_closed(files) {
        tokio::time::sleep(CLOSED_INTERVAL).await;
    }
}
