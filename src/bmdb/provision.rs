//! Machines coming into the BMDB, and what their providers were last heard saying.

use uuid::Uuid;

use crate::bmdb::change::{FactChange, ProviderDetails, apply};
use crate::bmdb::connection::{Bmdb, Doing};
use crate::bmdb::error::BmdbError;
use crate::bmdb::intent::settle;
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
    /// Whether it is out: a record of something that this provider has given back.
    pub retired: bool,
    /// Whether that was seen in the provider's list all the same, the last time that the list was compared.
    pub listed: bool,
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
        let provider = provider.to_owned();
        let rows = self
            .statement("reading a provider's machines", move |pool| {
                let provider = provider.clone();
                Box::pin(async move {
                    sqlx::query_file!("sql/provision/list_machines.sql", provider).fetch_all(pool).await
                })
            })
            .await?;
        Ok(rows
            .into_iter()
            .map(|row| KnownMachine {
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
                let found =
                    sqlx::query_file_scalar!("sql/provision/find_machine.sql", lease.name, new.provider_id)
                        .fetch_optional(&mut *tx)
                        .await
                        .doing(what)?;
                let machine = match found {
                    Some(known) => MachineId(known),
                    None => insert(&bmdb, tx, &lease, &new).await?,
                };
                if let Some(intent) = intent {
                    settle(tx, intent, &format!("machine {machine}")).await?;
                }
                Ok(machine)
            })
        })
        .await
    }

    /// Writes down that a provider gave a whole list, under its provisioner's lease.
    pub async fn provider_listed(
        &self,
        lease: &NamedLease,
        kind: &str,
        machines: usize,
    ) -> Result<(), BmdbError> {
        let machines = i64::try_from(machines).unwrap_or(i64::MAX);
        let (lease, kind, what) = (lease.clone(), kind.to_owned(), "recording a provider's list");
        self.transact(what, move |tx| {
            let (lease, kind) = (lease.clone(), kind.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                sqlx::query_file!("sql/provision/record_list.sql", lease.name, kind, machines)
                    .execute(tx)
                    .await
                    .doing(what)?;
                Ok(())
            })
        })
        .await
    }

    /// Writes down that a provider gave no list, under its provisioner's lease.
    pub async fn provider_list_failed(
        &self,
        lease: &NamedLease,
        kind: &str,
        error: &str,
    ) -> Result<(), BmdbError> {
        let (lease, kind, error) = (lease.clone(), kind.to_owned(), error.to_owned());
        let what = "recording a provider's error";
        self.transact(what, move |tx| {
            let (lease, kind, error) = (lease.clone(), kind.clone(), error.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                sqlx::query_file!("sql/provision/record_list_failure.sql", lease.name, kind, error)
                    .execute(tx)
                    .await
                    .doing(what)?;
                Ok(())
            })
        })
        .await
    }

    /// Why creation from a provider is stopped, if it is: its list cannot be right, or cannot be read.
    pub async fn provisioner_brake(&self, provider: &str) -> Result<Option<String>, BmdbError> {
        let provider = provider.to_owned();
        let brake = self
            .statement("reading a provider's brake", move |pool| {
                let provider = provider.clone();
                Box::pin(async move {
                    sqlx::query_file_scalar!("sql/provision/read_brake.sql", provider)
                        .fetch_optional(pool)
                        .await
                })
            })
            .await?;
        Ok(brake.flatten())
    }

    /// Writes down why creation from a provider is stopped, or that it is not, under its provisioner's
    /// lease: a list that somebody read before he lost it releases no brake that another list engaged.
    /// Says whether that is another statement than before.
    pub async fn set_provisioner_brake(
        &self,
        lease: &NamedLease,
        brake: Option<&str>,
    ) -> Result<bool, BmdbError> {
        let (lease, brake, what) = (lease.clone(), brake.map(str::to_owned), "recording a brake");
        self.transact(what, move |tx| {
            let (lease, brake) = (lease.clone(), brake.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                let done = match brake {
                    Some(reason) => {
                        sqlx::query_file!("sql/provision/set_brake.sql", lease.name, reason).execute(tx).await
                    }
                    None => {
                        sqlx::query_file!("sql/provision/release_brake.sql", lease.name).execute(tx).await
                    }
                };
                Ok(done.doing(what)?.rows_affected() > 0)
            })
        })
        .await
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
            "sql/schedule/insert_due_row.sql",
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
    tell(tx, machine, "Recorded", &new.detail).await?;
    Ok(machine)
}

/// The bucket a machine's due rows are in, for ever.
fn bucket_of(machine: Uuid) -> i64 {
    let low = machine.as_bytes()[15];
    i64::from(low) % i64::from(BUCKETS)
}
