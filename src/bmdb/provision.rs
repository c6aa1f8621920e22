//! Machines coming into the BMDB, and what their providers were last heard saying.

use uuid::Uuid;

use crate::bmdb::change::{FactChange, ProviderDetails, apply};
use crate::bmdb::connection::{Bmdb, Doing};
use crate::bmdb::error::BmdbError;
use crate::bmdb::lease::{NamedLease, lock_lease};
use crate::bmdb::schedule::{lock, reschedule, tell};
use crate::model::ids::{IntentId, MachineId};
use crate::model::process::Lane;
use crate::model::provider_status::ProviderStatus;
use crate::model::schedule::{BUCKETS, RULES_VERSION};

/// A machine of a provider, as the BMDB knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownMachine {
    /// Which.
    pub machine: MachineId,
    /// The provider's name for it.
    pub provider_id: String,
    /// Its state when the provider was last asked about it.
    pub status: ProviderStatus,
    /// Why it is left alone, if it is.
    pub quarantine: Option<String>,
    /// Whether it is on its way out, or out.
    pub retiring: bool,
}

/// A machine to record.
#[derive(Clone, Debug, PartialEq)]
pub struct NewMachine {
    /// The provider's name for it.
    pub provider_id: String,
    /// What the provider says of it.
    pub details: ProviderDetails,
    /// Further facts, known from the start.
    pub changes: Vec<FactChange>,
    /// Why, for history.
    pub detail: String,
}

impl Bmdb {
    /// Every machine of a provider that the BMDB knows.
    pub async fn known_machines(&self, provider: &str) -> Result<Vec<KnownMachine>, BmdbError> {
        let rows = sqlx::query_file!("sql/provision/known.sql", provider)
            .fetch_all(self.pool())
            .await
            .doing("reading a provider's machines")?;
        Ok(rows
            .into_iter()
            .map(|row| KnownMachine {
                machine: MachineId(row.machine_id),
                provider_id: row.provider_id,
                status: ProviderStatus::from(row.status.as_str()),
                quarantine: row.quarantine,
                retiring: row.retirement.is_some(),
            })
            .collect())
    }

    /// Records a machine under its provisioner's lease, settling the intent it came from in the
    /// same commit. A machine that is recorded already is left as it is; its id is returned.
    pub async fn record_machine(
        &self,
        lease: &NamedLease,
        intent: Option<IntentId>,
        new: &NewMachine,
    ) -> Result<MachineId, BmdbError> {
        let (bmdb, lease, new) = (self.clone(), lease.clone(), new.clone());
        self.transact("recording a machine", move |tx| {
            let (bmdb, lease, new) = (bmdb.clone(), lease.clone(), new.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                let what = "recording a machine";
                let found = sqlx::query_file_scalar!("sql/provision/find.sql", lease.name, new.provider_id)
                    .fetch_optional(&mut *tx)
                    .await
                    .doing(what)?;
                let machine = match found {
                    Some(known) => MachineId(known),
                    None => insert(&bmdb, tx, &lease, &new).await?,
                };
                if let Some(intent) = intent {
                    sqlx::query_file!("sql/intent/settle.sql", intent.0, format!("machine {machine}"))
                        .fetch_optional(tx)
                        .await
                        .doing("settling an intent")?;
                }
                Ok(machine)
            })
        })
        .await
    }

    /// Writes down that a provider gave a whole list.
    pub async fn provider_listed(
        &self,
        provider: &str,
        kind: &str,
        machines: usize,
    ) -> Result<(), BmdbError> {
        let machines = i64::try_from(machines).unwrap_or(i64::MAX);
        sqlx::query_file!("sql/provision/listed.sql", provider, kind, machines)
            .execute(self.pool())
            .await
            .doing("recording a provider's list")?;
        Ok(())
    }

    /// Writes down that a provider gave no list.
    pub async fn provider_list_failed(
        &self,
        provider: &str,
        kind: &str,
        error: &str,
    ) -> Result<(), BmdbError> {
        sqlx::query_file!("sql/provision/list_failed.sql", provider, kind, error)
            .execute(self.pool())
            .await
            .doing("recording a provider's error")?;
        Ok(())
    }

    /// Writes down why creation from a provider is stopped, or that it is not. Says whether that
    /// is another statement than before.
    pub async fn set_provisioner_brake(
        &self,
        provider: &str,
        brake: Option<&str>,
    ) -> Result<bool, BmdbError> {
        let done = match brake {
            Some(reason) => {
                sqlx::query_file!("sql/provision/brake.sql", provider, reason).execute(self.pool()).await
            }
            None => sqlx::query_file!("sql/provision/release_brake.sql", provider).execute(self.pool()).await,
        };
        Ok(done.doing("recording a brake")?.rows_affected() > 0)
    }
}

async fn insert(
    bmdb: &Bmdb,
    tx: &mut sqlx::PgConnection,
    lease: &NamedLease,
    new: &NewMachine,
) -> Result<MachineId, BmdbError> {
    let what = "recording a machine";
    let machine = MachineId::generate();
    sqlx::query_file!("sql/provision/insert_machine.sql", machine.0).execute(&mut *tx).await.doing(what)?;
    for lane in Lane::ALL {
        sqlx::query_file!(
            "sql/schedule/insert.sql",
            machine.0,
            lane.as_str(),
            lease.name,
            bucket_of(machine.0),
            i64::from(RULES_VERSION)
        )
        .execute(&mut *tx)
        .await
        .doing(what)?;
    }
    let rows = lock(tx, machine).await?;
    let provided = FactChange::Provided {
        provider: lease.name.clone(),
        provider_id: new.provider_id.clone(),
        details: new.details.clone(),
    };
    apply(tx, machine, &provided).await?;
    for change in &new.changes {
        apply(tx, machine, change).await?;
    }
    reschedule(bmdb, tx, machine, &rows).await?;
    tell(tx, machine, "Provided", &new.detail).await?;
    Ok(machine)
}

/// The bucket a machine's due rows are in, for ever.
fn bucket_of(machine: Uuid) -> i64 {
    let low = machine.as_bytes()[15];
    i64::from(low) % i64::from(BUCKETS)
}
