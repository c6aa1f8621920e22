//! Providers: recording their machines, and the state of their lists.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext};
use crate::engine::fact_change::{FactChange, ProviderDetails, apply_fact_change};
use crate::engine::intent::resolve_intent_in_tx;
use crate::engine::named_lease::NamedLease;
use crate::engine::schedule::{lock_due_rows, record_event, reschedule_machine};
use model::adoption::NotAdopted;
use model::ids::{IntentId, MachineId};
use model::process::Lane;
use model::provider_status::ProviderStatus;
use model::schedule::{BUCKETS, RULES_VERSION};
use model::time::Timestamp;

const OPERATION: &str = "reading what to show";

/// A machine of a provider as the BMDB has recorded it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedMachine {
    /// Id of the machine.
    pub machine: MachineId,
    /// The provider's name for it.
    pub provider_id: String,
    /// Its state when the provider was last queried.
    pub status: ProviderStatus,
    /// Why it is quarantined; `None` if it is not.
    pub quarantine: Option<String>,
    /// Whether it is being retired, or is retired.
    pub retiring: bool,
    /// Whether it is retired: a record of a machine that was released to this provider.
    pub retired: bool,
    /// Whether the provider's list contained it although it is retired, when the list was last compared.
    pub listed: bool,
}

/// A machine to record.
#[derive(Clone, Debug, PartialEq)]
pub struct NewMachine {
    /// The provider's name for it.
    pub provider_id: String,
    /// The provider's details of it.
    pub details: ProviderDetails,
    /// Further facts that are known from the start.
    pub changes: Vec<FactChange>,
    /// Detail of the line in its history.
    pub detail: String,
}

impl Bmdb {
    /// Every machine of a provider that the BMDB has recorded.
    pub async fn list_recorded_machines(&self, provider: &str) -> Result<Vec<RecordedMachine>, BmdbError> {
        let rows = self
            .statement_with("reading a provider's machines", provider.to_owned(), move |pool, provider| {
                Box::pin(sqlx::query_file!("../../sql/provision/list_machines.sql", provider).fetch_all(pool))
            })
            .await?;
        Ok(rows
            .into_iter()
            .map(|row| RecordedMachine {
                machine: MachineId(row.machine_id),
                provider_id: row.provider_id,
                status: ProviderStatus::from(row.status.as_str()),
                quarantine: row.quarantine,
                retiring: row.retirement.is_some(),
                retired: row.retired.is_some(),
                listed: row.listed_since.is_some(),
            })
            .collect())
    }

    /// Records a machine under its provisioner's lease, and resolves the intent it came from in the same commit. A
    /// machine that is recorded already is left unchanged; its id is returned.
    pub async fn record_machine(
        &self,
        lease: &NamedLease,
        intent: Option<IntentId>,
        new: &NewMachine,
    ) -> Result<MachineId, BmdbError> {
        let what = "recording a machine";
        let arguments = (self.clone(), lease.name.clone(), new.clone());
        self.transact_under_lease(what, lease, arguments, move |tx, (bmdb, provider, new)| {
            Box::pin(async move {
                let found = sqlx::query_scalar!(
                    "SELECT machine_id FROM machine_provided WHERE provider = $1 AND provider_id = $2",
                    provider,
                    new.provider_id
                )
                .fetch_optional(&mut *tx)
                .await
                .context(what)?;
                let machine = match found {
                    Some(known) => MachineId(known),
                    None => insert_machine(bmdb, tx, provider, new).await?,
                };
                if let Some(intent) = intent {
                    resolve_intent_in_tx(tx, intent, &format!("machine {machine}")).await?;
                }
                Ok(machine)
            })
        })
        .await
    }

    /// Records that a provider returned a complete list, under its provisioner's lease.
    pub async fn record_provider_list(
        &self,
        lease: &NamedLease,
        kind: &str,
        machines: usize,
    ) -> Result<(), BmdbError> {
        let (provider, kind) = (lease.name.clone(), kind.to_owned());
        let machines = i64::try_from(machines).unwrap_or(i64::MAX);
        self.execute_under_lease("recording a provider's list", lease, move || {
            sqlx::query_file!("../../sql/provision/record_list.sql", provider, kind, machines)
        })
        .await
    }

    /// Records that a provider returned no list, under its provisioner's lease.
    pub async fn record_provider_list_failure(
        &self,
        lease: &NamedLease,
        kind: &str,
        error: &str,
    ) -> Result<(), BmdbError> {
        let (provider, kind, error) = (lease.name.clone(), kind.to_owned(), error.to_owned());
        self.execute_under_lease("recording a provider's error", lease, move || {
            sqlx::query!(
                "INSERT INTO provider_state (provider, kind, error, error_at)
                 VALUES ($1, $2, $3, clock_timestamp()) ON CONFLICT (provider) DO UPDATE
                 SET kind = EXCLUDED.kind, error = EXCLUDED.error, error_at = EXCLUDED.error_at",
                provider,
                kind,
                error
            )
        })
        .await
    }

    /// Records how many machines of a provider's list its limit leaves out, under its provisioner's lease; `None` if it
    /// leaves out none. Returns whether that changed the number or the limit.
    pub async fn record_not_adopted(
        &self,
        lease: &NamedLease,
        not_adopted: Option<NotAdopted>,
    ) -> Result<bool, BmdbError> {
        let what = "recording how many machines are not adopted";
        let arguments = (lease.name.clone(), not_adopted.map(NotAdopted::to_numbers).unzip());
        self.transact_under_lease(what, lease, arguments, move |tx, (provider, (machines, limit))| {
            Box::pin(async move {
                let statement = sqlx::query_file!(
                    "../../sql/provision/record_not_adopted.sql",
                    provider,
                    *machines,
                    *limit
                );
                Ok(statement.execute(tx).await.context(what)?.rows_affected() > 0)
            })
        })
        .await
    }

    /// Why creation at a provider is stopped: its list is implausible, or cannot be read; `None` without a brake.
    pub async fn provisioner_brake(&self, provider: &str) -> Result<Option<String>, BmdbError> {
        let brake = self
            .statement_with("reading a provider's brake", provider.to_owned(), move |pool, provider| {
                Box::pin(
                    sqlx::query_scalar!("SELECT brake FROM provider_state WHERE provider = $1", provider)
                        .fetch_optional(pool),
                )
            })
            .await?;
        Ok(brake.flatten())
    }

    /// Records why creation at a provider is stopped, or that it is not, under its provisioner's lease: a list that a
    /// shepherd read before it lost the lease releases no brake that another list engaged. Returns whether that changed
    /// the brake.
    pub async fn set_provisioner_brake(
        &self,
        lease: &NamedLease,
        brake: Option<&str>,
    ) -> Result<bool, BmdbError> {
        let what = "recording a brake";
        let arguments = (lease.name.clone(), brake.map(str::to_owned));
        self.transact_under_lease(what, lease, arguments, move |tx, (provider, brake)| {
            Box::pin(async move {
                let statement = match brake {
                    Some(reason) => sqlx::query!(
                        "UPDATE provider_state SET brake = $2,
                             brake_since = CASE WHEN brake IS NULL THEN clock_timestamp() ELSE brake_since END
                         WHERE provider = $1 AND brake IS DISTINCT FROM $2",
                        provider,
                        reason
                    ),
                    None => sqlx::query!(
                        "UPDATE provider_state SET brake = NULL, brake_since = NULL
                         WHERE provider = $1 AND brake IS NOT NULL",
                        provider
                    ),
                };
                Ok(statement.execute(tx).await.context(what)?.rows_affected() > 0)
            })
        })
        .await
    }
}

async fn insert_machine(
    bmdb: &Bmdb,
    tx: &mut sqlx::PgConnection,
    provider: &str,
    new: &NewMachine,
) -> Result<MachineId, BmdbError> {
    let what = "recording a machine";
    let machine = MachineId::generate();
    sqlx::query!("INSERT INTO machine (machine_id, created_at) VALUES ($1, clock_timestamp())", machine.0)
        .execute(&mut *tx)
        .await
        .context(what)?;
    for lane in Lane::ALL {
        sqlx::query_file!(
            "../../sql/schedule/insert_due_row.sql",
            machine.0,
            lane.as_str(),
            provider,
            bucket_of(machine.0),
            i64::from(RULES_VERSION)
        )
        .execute(&mut *tx)
        .await
        .context(what)?;
    }
    let rows = lock_due_rows(tx, machine).await?;
    let provided = FactChange::Provided {
        provider: provider.to_owned(),
        provider_id: new.provider_id.clone(),
        details: new.details.clone(),
    };
    apply_fact_change(tx, machine, &provided).await?;
    for change in &new.changes {
        apply_fact_change(tx, machine, change).await?;
    }
    reschedule_machine(bmdb, tx, machine, &rows).await?;
    record_event(tx, machine, "Recorded", &new.detail).await?;
    Ok(machine)
}

/// The bucket of a machine's due rows; it never changes.
fn bucket_of(machine: Uuid) -> i64 {
    let low = machine.as_bytes()[15];
    i64::from(low) % i64::from(BUCKETS)
}

/// The last answers of a provider.
#[derive(Clone, Debug, PartialEq)]
pub struct ProviderSummary {
    /// Name of the provider.
    pub provider: String,
    /// Kind of the provider.
    pub kind: String,
    /// When it last returned a list.
    pub listed_at: Option<Timestamp>,
    /// Machines in that list.
    pub machines: Option<i64>,
    /// The error of its last failed list, if that is newer.
    pub error: Option<String>,
    /// When that error occurred.
    pub error_at: Option<Timestamp>,
    /// Why no machine is created at it; `None` without a brake.
    pub brake: Option<String>,
    /// Since when the brake is engaged.
    pub brake_since: Option<Timestamp>,
    /// Machines of its list that its limit leaves out; `None` if it leaves out none.
    pub not_adopted: Option<NotAdopted>,
    /// Since when it leaves out any.
    pub not_adopted_since: Option<Timestamp>,
}

/// The last answers of every provider.
pub async fn list_providers(tx: &mut PgConnection) -> Result<Vec<ProviderSummary>, BmdbError> {
    let rows =
        sqlx::query_file!("../../sql/provision/list_providers.sql").fetch_all(tx).await.context(OPERATION)?;
    let providers = rows.into_iter().map(|row| ProviderSummary {
        provider: row.provider,
        kind: row.kind,
        listed_at: row.listed_at,
        machines: row.machines,
        error: row.error,
        error_at: row.error_at,
        brake: row.brake,
        brake_since: row.brake_since,
        not_adopted: row
            .not_adopted
            .zip(row.machine_limit)
            .and_then(|(machines, limit)| NotAdopted::from_numbers(machines, limit)),
        not_adopted_since: row.not_adopted_since,
    });
    Ok(providers.collect())
}
