//! The view of one machine: everything that decides about it, at one moment.
//!
//! It is computed from the machine's facts, unlike lists, which show an index that may lag behind by a moment. It also
//! reads what is not the machine's own and decides about it all the same: the policy, brakes, pauses, its cluster and
//! its roll-out.

use sqlx::PgConnection;

use crate::cluster::reading::membership_of_machine;
use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext};
use crate::engine::facts::read_snapshot;
use crate::engine::host_findings::read_findings;
use crate::engine::policy::policy_at_version;
use crate::engine::session::RuntimeInfo;
use crate::engine::unknown_fence::read_unknown_fence;
use crate::fleet::brake::list_brakes;
use crate::fleet::roll_out::read_roll_out_note;
use crate::machine::host_key::read_host_keys;
use crate::machine::recent_steps::list_recent_steps;
use crate::orders::loop_pause::list_pauses;
use model::ids::MachineId;
use model::machine_view::{LaneView, MachineView, WorkHolder};

const OPERATION: &str = "reading what to show";

impl Bmdb {
    /// Everything that decides about one machine, at one moment.
    pub async fn machine_view(&self, machine: MachineId) -> Result<MachineView, BmdbError> {
        self.transact_read_only_with(self.clone(), move |tx, bmdb| {
            Box::pin(read_machine_view(bmdb, tx, machine))
        })
        .await
    }
}

/// Everything that decides about one machine, at the moment of this transaction.
pub async fn read_machine_view(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    machine: MachineId,
) -> Result<MachineView, BmdbError> {
    let snapshot = read_snapshot(tx, machine).await?;
    let policy = policy_at_version(bmdb, tx, snapshot.policy_version).await?;
    let lanes = list_lanes(tx, machine).await?;
    let host_keys = read_host_keys(tx, machine).await?;
    let brakes = list_brakes(tx).await?;
    let pauses = list_pauses(tx).await?;
    let open_sessions = sqlx::query_scalar!(
        r#"SELECT count(*) AS "count!" FROM (SELECT 1 FROM session WHERE closed_at IS NULL LIMIT 1000) s"#
    )
    .fetch_one(&mut *tx)
    .await
    .context(OPERATION)?;
    let newer_fence = read_unknown_fence(tx, machine).await?;
    let cluster = membership_of_machine(tx, machine).await?;
    let release = read_roll_out_note(tx, machine).await?;
    let placed = sqlx::query_file!("../../sql/inspect/read_agent_placement.sql", machine.0)
        .fetch_optional(&mut *tx)
        .await
        .context(OPERATION)?;
    let (placement, findings) =
        placed.map_or_else(Default::default, |row| (row.placement, read_findings(row.findings)));
    let recent_steps = list_recent_steps(tx, machine, snapshot.now).await?;
    Ok(MachineView {
        facts: snapshot.facts,
        at: snapshot.now,
        policy,
        policy_version: snapshot.policy_version,
        lanes,
        host_keys,
        brakes,
        pauses,
        open_sessions,
        unknown_fence: newer_fence,
        cluster,
        roll_out_note: release,
        placement,
        findings,
        recent_steps,
    })
}

async fn list_lanes(tx: &mut PgConnection, machine: MachineId) -> Result<Vec<LaneView>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/inspect/list_lanes.sql", machine.0)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let about = RuntimeInfo::of(row.runtime_info.as_ref());
            let held = row.work_process.zip(row.work_fence).zip(row.work_started_at).zip(row.session_id);
            let work = held.map(|(((process, fence), since), session)| WorkHolder {
                process,
                fence,
                since,
                session,
                component: row.component,
                host: about.host,
                pid: about.pid,
                session_deadline: row.session_deadline,
                session_closed_at: row.session_closed_at,
            });
            LaneView {
                lane: row.lane,
                process: row.process,
                ready_at: row.ready_at,
                timer: row.timer,
                reason: row.reason,
                decided_at: row.decided_at,
                deadline: row.deadline,
                priority: row.priority,
                fence: row.fence,
                losses: row.losses,
                not_before: row.not_before,
                phase_index: row.phase_index,
                phase_since: row.phase_since,
                rules_version: row.rules_version,
                policy_version: row.policy_version,
                work,
            }
        })
        .collect())
}
