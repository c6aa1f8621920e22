//! The authority that replaces a stolen one: stored before anything is sent, and each step before it begins.
//!
//! What a step is, and when the next one begins, is decided elsewhere
//! ([`model::cluster::plan::authority_theft`]). Every write depends on the step before it, so a shepherd that was away
//! for too long makes no second authority and takes no step twice.

use serde_json::json;
use uuid::Uuid;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext as _};
use crate::engine::named_lease::NamedLease;
use model::cluster::authority_theft::AuthorityStep;
use model::cluster::state::MembershipOrder;
use model::ids::MachineId;

const TRUSTING: &str = "trusting the authority that replaces a stolen one";

impl Bmdb {
    /// Stores the authority that replaces a stolen one: its certificate and its sealed key. If one is stored, that stays.
    pub async fn store_next_authority(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        certificate: &[u8],
        sealed_key: &[u8],
    ) -> Result<(), BmdbError> {
        let (certificate, sealed_key) = (certificate.to_vec(), sealed_key.to_vec());
        self.execute_under_lease("storing the authority that replaces a stolen one", lease, move || {
            sqlx::query_file!(
                "../../sql/cluster/store_next_authority.sql",
                cluster,
                certificate.as_slice(),
                sealed_key.as_slice()
            )
        })
        .await
    }

    /// The sealed key of the authority that replaces a stolen one; `None` if there is none, or if the cluster has it.
    pub async fn sealed_next_authority(&self, cluster: Uuid) -> Result<Option<Vec<u8>>, BmdbError> {
        let row = self
            .statement("reading the authority that replaces a stolen one", move |connection| {
                Box::pin(
                    sqlx::query!("SELECT authority_rotation_key FROM cluster WHERE cluster_id = $1", cluster)
                        .fetch_optional(connection),
                )
            })
            .await?;
        Ok(row.and_then(|row| row.authority_rotation_key))
    }

    /// Records that this step begins, if the one before it is under way.
    pub async fn begin_authority_step(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        step: AuthorityStep,
    ) -> Result<(), BmdbError> {
        let number = step.number();
        self.execute_under_lease("beginning the next step of a stolen authority", lease, move || {
            sqlx::query!(
                "UPDATE cluster SET authority_rotation_step = $2, authority_rotation_since = clock_timestamp()
                 WHERE cluster_id = $1 AND authority_rotation = 'compromised' AND authority_rotation_step = $3",
                cluster,
                number,
                number - 1
            )
        })
        .await
    }

    /// Records that the cluster's records have the new authority, and that these are its curators and its epoch. If no
    /// curator is known, those stay that are stored. The orders that have its key are forgotten.
    pub async fn begin_authority_follow(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        (curators, epoch): (&[String], u64),
    ) -> Result<(), BmdbError> {
        let epoch = i64::try_from(epoch).unwrap_or(i64::MAX);
        let curators = (!curators.is_empty()).then(|| json!(curators));
        self.transact_under_lease(TRUSTING, lease, curators, move |tx, curators| {
            Box::pin(async move {
                let begun = sqlx::query_file!(
                    "../../sql/cluster/begin_authority_follow.sql",
                    cluster,
                    epoch,
                    curators.as_ref()
                )
                .execute(&mut *tx)
                .await
                .context(TRUSTING)?;
                if begun.rows_affected() == 0 {
                    return Ok(());
                }
                sqlx::query_file!("../../sql/cluster/forget_authority_orders.sql", cluster)
                    .execute(&mut *tx)
                    .await
                    .context(TRUSTING)
                    .map(drop)
            })
        })
        .await
    }

    /// Sends a machine the new authority; `sealed` is the order that has it.
    ///
    /// It is recorded as an order to join, for the reason that [`Bmdb::send_peer_certificate`] has.
    pub async fn send_next_authority(
        &self,
        lease: &NamedLease,
        machine: MachineId,
        (name, step): (&str, AuthorityStep),
        sealed: Vec<u8>,
    ) -> Result<(), BmdbError> {
        let detail = format!("the one that replaces the stolen one of cluster {name} ({step})");
        let order = (MembershipOrder::Join, sealed);
        self.place_recorded_order(lease, machine, order, ("ClusterAuthoritySent", detail)).await
    }

    /// Records that a stolen authority is replaced on every machine.
    pub async fn end_authority_theft(&self, lease: &NamedLease, cluster: Uuid) -> Result<(), BmdbError> {
        self.execute_under_lease("ending the order to replace a stolen authority", lease, move || {
            sqlx::query_file!("../../sql/cluster/end_authority_theft.sql", cluster)
        })
        .await
    }
}
