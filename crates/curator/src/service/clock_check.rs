//! Compares the clock of the leader with those of the other consensus members' curators.
//!
//! What follows from the differences is decided in [`clock_comparison`](crate::clock_comparison). A curator sends its time
//! with the statement. Its certificate must be that of the called node, but it may have ended by the leader's clock:
//! otherwise a leader with a wrong clock would reach nobody to compare it with.

use std::time::Duration;

use curator_client::node::Node;
use curator_client::tls::CuratorCheck;
use model::time::Timestamp;
use proto::curator::v1 as wire;
use tokio::time::MissedTickBehavior;

use crate::clock_comparison::{find_wrong_clock, is_away};
use crate::service::error::ServiceError;
use crate::service::leader_context::LeaderContext;
use crate::service::statements::PROBE_TIMEOUT;

/// Two times at one moment: the clock of this curator is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WrongClock {
    /// By the clock of this curator.
    pub(super) own: Timestamp,
    /// By the clocks of most consensus members.
    pub(super) others: Timestamp,
}

impl LeaderContext {
    /// Compares the clocks at each interval, and returns once that of this curator is wrong.
    pub(super) async fn wait_for_wrong_clock(&self, interval: Duration) -> WrongClock {
        let mut tick = tokio::time::interval(interval);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            match self.compare_clocks().await {
                Ok(Some(wrong)) => return wrong,
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(%error, "the clocks of the consensus members were not compared");
                }
            }
        }
    }

    /// The number of all consensus members, and how far the clocks of the others are ahead of this one, in milliseconds, as
    /// far as they are known.
    pub(super) async fn measure_clocks(&self) -> Result<(usize, Vec<i64>), ServiceError> {
        let nodes = self.store.nodes().await?.nodes;
        let members: Vec<&Node> =
            nodes.values().filter(|node| node.roles.consensus_member.is_some()).collect();
        let others = members.iter().filter(|node| node.id != self.node_id);
        let offsets = futures::future::join_all(others.map(|node| self.measure_offset(node))).await;
        Ok((members.len(), offsets.into_iter().flatten().collect()))
    }

    /// The time by most consensus members, if the clock of this curator is wrong.
    async fn compare_clocks(&self) -> Result<Option<WrongClock>, ServiceError> {
        let (members, offsets) = self.measure_clocks().await?;
        let own = self.clock.now();
        if let Some(ahead) = find_wrong_clock(members, &offsets) {
            let others = Timestamp::from_timestamp_millis(own.timestamp_millis().saturating_add(ahead));
            return Ok(Some(WrongClock { own, others: others.unwrap_or(own) }));
        }
        if offsets.iter().any(|offset| is_away(*offset)) {
            tracing::warn!(
                time = %own,
                offsets_ms = ?offsets,
                "the clocks of consensus members differ: nodes reject what a leader with a wrong clock signs"
            );
        }
        Ok(None)
    }

    /// How far the clock of a node's curator is ahead of this one, in milliseconds; `None` if it is not known.
    async fn measure_offset(&self, node: &Node) -> Option<i64> {
        let mut client = self.dial_curator(node, CuratorCheck::CuratorAtAnyTime).ok()?;
        let answer = client.get_statement(wire::GetStatementRequest {});
        let response = tokio::time::timeout(PROBE_TIMEOUT, answer).await.ok()?.ok()?.into_inner();
        let is_sent = response.time_ms > 0;
        is_sent.then(|| response.time_ms.saturating_sub(self.clock.now().timestamp_millis()))
    }
}
