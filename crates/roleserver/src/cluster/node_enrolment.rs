//! Node enrolment: found a cluster, join one, or rejoin after a restart.
//!
//! The next step follows from the files on the disk alone, so that a node that was interrupted anywhere continues
//! there. A machine with a certificate is a node and rejoins. A machine with an order to found a cluster founds it,
//! from the beginning or from where it was interrupted. A machine with an order to join requests to join again.
//! Transient errors are retried here. Any other error ends this runnable with a sentence. The supervisor restarts it
//! after a backoff, because an operator may have fixed the cause.

use std::sync::Arc;
use std::time::Duration;

use curator_client::certificate::{Renewal, RenewalPoint, Validity, decide_renewal};
use curator_client::clock::Clock;
use curator_client::identity::Identity;
use curator_client::status_text::describe_status;
use curator_client::tls::certified_key;
use proto::curator::v1 as wire;
use proto::curator::v1::commit_response::Result as Committed;
use proto::curator::v1::registration_client::RegistrationClient;
use supervisor::context::{Runnable, Scope, Starting};
use supervisor::exit_reason::RunnableError;
use tonic::{Code, Status};

use crate::child::lifecycle::ChildContext;
use crate::cluster::files::{ClusterFiles, Credentials};
use crate::cluster::member_address::running_member_address;
use crate::cluster::node_address::{host_has, node_address, restart_address};
use crate::cluster::node_facts::{
    CuratorConnection, CurrentCertificate, NodeFacts, check_own_certificate, curator_channel, node_id_of_key,
};
use crate::cluster::node_order::{NodeOrder, OrderKind, parse_anchor, parse_statement, parse_ticket};
use crate::cluster::node_problems::NodePart;
use crate::cluster::order_inbox::adopt_epoch;
use crate::cluster::services::persisted::read_node_info;
use crate::cluster::stored_authorities::authorities_above;
use crate::server_pool::ServerPool;

mod founding;

/// Pause between two attempts, and the shortest pause that a curator can request.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The next step of enrolment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnrolmentStep {
    /// Wait: there is no order to found or to join.
    Wait,
    /// Found a cluster, or continue founding it.
    Found,
    /// Request to join a cluster, or request it again.
    Join,
    /// Rejoin as the node that it is.
    Rejoin {
        /// Whether the certificate has expired, so that a new one is needed before others accept the node.
        expired: bool,
    },
}

/// The stored state that the step follows from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EnrolmentState {
    /// The order: found (`true`), join (`false`), or neither.
    pub to_found: Option<bool>,
    /// What is due for the certificate; `None` if there is no certificate.
    pub certificate: Option<Renewal>,
}

/// Decides the next step.
#[must_use]
pub fn decide_step(kept: &EnrolmentState) -> EnrolmentStep {
    match (kept.certificate, kept.to_found) {
        (Some(renewal), _) => EnrolmentStep::Rejoin { expired: renewal == Renewal::Expired },
        (None, Some(true)) => EnrolmentStep::Found,
        (None, Some(false)) => EnrolmentStep::Join,
        (None, None) => EnrolmentStep::Wait,
    }
}

/// Makes the runnable that enrols this machine, and then stays healthy until it is cancelled.
#[must_use]
pub fn enroll_node(
    files: ClusterFiles,
    children: Arc<ChildContext>,
    facts: NodeFacts,
    clock: Clock,
    server_pool: ServerPool,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, clock) = (files.clone(), facts.clone(), clock.clone());
        let (children, server_pool) = (children.clone(), server_pool.clone());
        async move {
            let scope = starting.scope().clone();
            let problems = facts.problems.clone();
            let doing = NodeEnroller { files, children, facts, clock, server_pool, scope: scope.clone() };
            let done = loop {
                match Box::pin(doing.execute_order()).await {
                    Ok(EnrolmentResult::Superseded) => {}
                    Ok(EnrolmentResult::Complete) => break Ok(()),
                    Err(stop) => break Err(stop),
                }
            };
            // The result is also reported to the shepherd or operator who gave the order, not only in this machine's
            // log.
            if !scope.token().is_cancelled() {
                problems.set(NodePart::Enrolment, done.as_ref().err().map(ToString::to_string));
            }
            done?;
            // Not healthy earlier, so that the backoff grows when requests are rejected again and again.
            let healthy = starting.mark_healthy();
            Err(healthy.scope().cancelled().await.into())
        }
    })
}

struct NodeEnroller {
    files: ClusterFiles,
    children: Arc<ChildContext>,
    facts: NodeFacts,
    clock: Clock,
    server_pool: ServerPool,
    scope: Scope,
}

/// Result of executing an order.
enum EnrolmentResult {
    /// The machine is what the order describes.
    Complete,
    /// There is another order now; nothing that the old one began has to be undone.
    Superseded,
}

impl NodeEnroller {
    async fn execute_order(&self) -> Result<EnrolmentResult, RunnableError> {
        let order = self.files.read_order()?;
        if let Some(order) = &order {
            order
                .validate()
                .map_err(|error| RunnableError::msg(format!("the order of this node is invalid: {error}")))?;
        }
        let credentials = self.files.read_credentials()?;
        let validity = credentials
            .as_ref()
            .and_then(|kept| Validity::from_der(&hex::decode(&kept.certificate).unwrap_or_default()));
        let kept = EnrolmentState {
            to_found: order.as_ref().and_then(|order| match order.what {
                OrderKind::Found { .. } => Some(true),
                OrderKind::Join { .. } => Some(false),
                OrderKind::Leave {} => None,
            }),
            certificate: validity
                .map(|validity| decide_renewal(validity, RenewalPoint::ThirdLeft, self.clock.now())),
        };
        let step = decide_step(&kept);
        tracing::info!(?step, "this node's part in a cluster");
        match (step, order, credentials) {
            (EnrolmentStep::Rejoin { .. }, order, Some(credentials)) => {
                // An order that an operator wrote by hand counts too.
                if let Some(order) = &order {
                    adopt_epoch(order, &self.files, &self.facts).map_err(RunnableError::msg)?;
                }
                self.rejoin_cluster(order.as_ref(), &credentials).await.map(|()| EnrolmentResult::Complete)
            }
            (EnrolmentStep::Found, Some(order), _) => {
                self.found_cluster(&order).await.map(|()| EnrolmentResult::Complete)
            }
            (EnrolmentStep::Join, Some(order), _) => Box::pin(self.join_cluster(&order)).await,
            // The order was withdrawn in the meantime.
            _ => Err(RunnableError::msg("this machine has no order any more")),
        }
    }

    async fn join_cluster(&self, order: &NodeOrder) -> Result<EnrolmentResult, RunnableError> {
        let OrderKind::Join { ticket, ca_certificate, curators, statement, .. } = &order.what else {
            return Ok(EnrolmentResult::Complete);
        };
        let key = self.files.read_or_create_key()?;
        let anchor = parse_anchor(ca_certificate)?;
        // Before anything is dialled: the first curator that answers may be a revoked one that denies that there is a
        // statement.
        if let Some(statement) = statement {
            // A stored one may be that of an authority that was stolen since an order of before.
            self.files.replace_statement(&anchor, Some(&parse_statement(statement, &anchor)?))?;
        }
        let request = wire::RegisterRequest {
            ticket: parse_ticket(ticket)?.reveal().to_vec(),
            machine_id: order.machine.map(|machine| machine.to_string()).unwrap_or_default(),
            labels: order.labels.clone(),
        };
        let shown = CurrentCertificate::new(certified_key(key.certificate_der(), key.pkcs8())?);
        let leaders = curator_channel(&anchor, &shown, &self.files, &self.clock)?;
        leaders.set_directory(curators.iter().cloned().chain(self.files.read_curators()));
        let registration = RegistrationClient::new(leaders.channel());
        let becoming = async {
            let registered = retry_call("registering this node", || {
                let (mut registration, request) = (registration.clone(), request.clone());
                async move { registration.register(request).await }
            })
            .await?;
            if let Some(directory) = registered.directory {
                leaders.set_directory(directory.curators);
            }
            loop {
                let answer = retry_call("becoming a node", || {
                    let mut registration = registration.clone();
                    async move { registration.commit(wire::CommitRequest {}).await }
                })
                .await?;
                match answer.result {
                    Some(Committed::Membership(membership)) => return Ok::<_, RunnableError>(membership),
                    Some(Committed::AwaitingApproval(waiting)) => {
                        tracing::info!(node = %node_id_of_key(&key), "this node waits to be approved");
                        tokio::time::sleep(Duration::from_millis(waiting.retry_after_ms).max(RETRY_INTERVAL))
                            .await;
                    }
                    None => {
                        return Err(RunnableError::msg(
                            "the curator answered the request to join without a result",
                        ));
                    }
                }
            }
        };
        // A new order may arrive meanwhile, for example because the cluster was restored elsewhere.
        let becoming = async {
            tokio::select! {
                membership = becoming => membership.map(Some),
                again = self.wait_for_new_order(order) => again.map(|()| None),
            }
        };
        match Box::pin(self.with_leader(&leaders, becoming)).await?? {
            Some(membership) => {
                self.accept_membership(order, &key, &membership).await.map(|()| EnrolmentResult::Complete)
            }
            None => Ok(EnrolmentResult::Superseded),
        }
    }

    /// Waits until the stored order differs from this one.
    async fn wait_for_new_order(&self, order: &NodeOrder) -> Result<(), RunnableError> {
        let mut ordered = self.facts.order_changed.watch();
        while self.files.read_order()?.as_ref() == Some(order) {
            ordered.next().await;
        }
        Ok(())
    }

    async fn rejoin_cluster(
        &self,
        order: Option<&NodeOrder>,
        credentials: &Credentials,
    ) -> Result<(), RunnableError> {
        let key = self.files.read_key()?.ok_or_else(|| {
            RunnableError::msg("this node has a certificate and no key: look for what removed node_key.pk8")
        })?;
        // Left over if founding was interrupted before its last step.
        self.files.remove_authority()?;
        self.files.remove_snapshot()?;
        self.files.remove_image()?;
        let connection = CuratorConnection::new(&key, credentials, &self.files, &self.clock)?;
        // The connection is published even if the certificate has expired, because only requests as a node need a valid
        // one. This node's own etcd and curator start, and may be needed to issue the new certificate;
        // `certificate_renewal.rs` does that.
        let running = running_member_address(&self.files, &self.children);
        let running = self.scope.until_cancelled(running).await??;
        let former = read_node_info(&self.files).address;
        let decided = running.or_else(|| restart_address(order, former, host_has));
        let address = if let Some(address) = decided {
            address
        } else {
            let detecting = node_address(None, connection.curators.directory());
            self.scope.until_cancelled(detecting).await??
        };
        self.facts.address.set(address);
        self.facts.connection.set(connection);
        Ok(())
    }

    /// Tracks the leader while a request is pending.
    async fn with_leader<T>(
        &self,
        leaders: &curator_client::leader_channel::LeaderTracker,
        call: impl Future<Output = T>,
    ) -> Result<T, RunnableError> {
        let requested = async {
            tokio::select! {
                answer = call => answer,
                never = leaders.track_leader() => match never {},
            }
        };
        Ok(self.scope.until_cancelled(requested).await?)
    }

    /// Stores what a node needs to rejoin, and only then publishes its connection.
    async fn accept_membership(
        &self,
        order: &NodeOrder,
        key: &Identity,
        membership: &wire::Membership,
    ) -> Result<(), RunnableError> {
        let anchor = match &order.what {
            OrderKind::Join { ca_certificate, .. } => parse_anchor(ca_certificate)?,
            OrderKind::Found { .. } | OrderKind::Leave {} => {
                return Err(RunnableError::msg("only a node that joins is given a membership"));
            }
        };
        let authorities = authorities_above(&self.files, &anchor)?;
        check_own_certificate(&membership.certificate, node_id_of_key(key), &authorities)?;
        let credentials = self.store_membership(membership, &anchor.certificate)?;
        let connection = CuratorConnection::new(key, &credentials, &self.files, &self.clock)?;
        let detecting = node_address(Some(order), connection.curators.directory());
        self.facts.address.set(self.scope.until_cancelled(detecting).await??);
        tracing::info!(node = %connection.id, "this machine is a node of cluster {}", connection.anchor.cluster);
        self.facts.connection.set(connection);
        Ok(())
    }

    fn store_membership(
        &self,
        membership: &wire::Membership,
        ca_certificate: &[u8],
    ) -> Result<Credentials, RunnableError> {
        let curators = membership.directory.iter().flat_map(|directory| directory.curators.iter().cloned());
        let curators: std::collections::BTreeSet<String> =
            curators.chain(self.files.read_curators()).collect();
        self.files.write_curators(&curators)?;
        let credentials = Credentials {
            certificate: hex::encode(&membership.certificate),
            ca_certificate: hex::encode(ca_certificate),
        };
        self.files.write_credentials(&credentials)?;
        Ok(credentials)
    }
}

/// Repeats a call until it succeeds; returns an error that is not transient.
async fn retry_call<T, Calling>(doing: &str, call: impl Fn() -> Calling) -> Result<T, RunnableError>
where
    Calling: Future<Output = Result<tonic::Response<T>, Status>>,
{
    loop {
        match call().await {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) if is_transient(status.code()) => {
                tracing::info!(
                    operation = doing,
                    error = describe_status(&status),
                    "the curator was not reached; trying again"
                );
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
            Err(status) => {
                return Err(RunnableError::msg(format!("{doing} was refused: {}", describe_status(&status))));
            }
        }
    }
}

/// Whether a call that failed with this code may succeed later without intervention.
const fn is_transient(code: Code) -> bool {
    matches!(
        code,
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown | Code::Unimplemented
    )
}

#[cfg(test)]
mod tests {
    use model::time::Timestamp;

    use super::*;

    #[test]
    fn step_follows_from_the_files_on_disk() {
        let later = Renewal::NotBefore(Timestamp::MAX_UTC);
        for (to_found, certificate, expected) in [
            (None, None, EnrolmentStep::Wait),
            (Some(true), None, EnrolmentStep::Found),
            (Some(false), None, EnrolmentStep::Join),
            // The certificate is stored last, so every step before it is done, whatever the order is.
            (Some(true), Some(later), EnrolmentStep::Rejoin { expired: false }),
            (Some(false), Some(later), EnrolmentStep::Rejoin { expired: false }),
            (None, Some(later), EnrolmentStep::Rejoin { expired: false }),
            (None, Some(Renewal::Due), EnrolmentStep::Rejoin { expired: false }),
            (Some(true), Some(Renewal::Expired), EnrolmentStep::Rejoin { expired: true }),
        ] {
            assert_eq!(
                decide_step(&EnrolmentState { to_found, certificate }),
                expected,
                "{to_found:?} {certificate:?}"
            );
        }
    }
}
