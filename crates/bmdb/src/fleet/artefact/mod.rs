//! Artefact store: files uploaded in pieces and fetched by machines from any shepherd.
//!
//! Uploading ([`upload`]) needs no order: an upload has no effect yet, is bounded in number and size, and is deleted
//! after a day. Adding the artefact is an order (`orders`). The digest of its pieces is computed right before that
//! transaction, piece by piece, so that no snapshot of the database is held for as long as that takes; the transaction
//! only checks that they are still the pieces of the same upload. Pieces never change, so nothing else can have
//! happened to them.
//!
//! This file lists artefacts and reads their pieces for machines that fetch them.

use sqlx::PgConnection;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext as _, database_now};
use model::artefact::{ArtefactView, piece_count};
use model::byte_size::ByteSize;
use model::ids::MachineId;
use model::phase::Phase;
use model::role_declaration::Sha256;
use model::signed_artefact::signature::ArtefactSignature;
use model::time::Timestamp;

mod orders;
pub mod upload;

const OPERATION: &str = "reading artefacts";

/// The target of orders about artefacts, for people.
#[must_use]
pub fn order_target(artefact: &str) -> String {
    format!("the artefact {artefact}")
}

/// The owner of an agent key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentKeyOwner {
    /// The key of the machine's current agent.
    Agent,
    /// The key of the agent of a retired machine.
    RetiredAgent,
    /// No agent of that machine has this key.
    Unknown,
}

/// All artefacts, and the database's clock when they were read.
pub async fn list_artefacts(tx: &mut PgConnection) -> Result<(Vec<ArtefactView>, Timestamp), BmdbError> {
    let rows =
        sqlx::query_file!("../../sql/artefact/list.sql").fetch_all(&mut *tx).await.context(OPERATION)?;
    let count = |count: i64| u64::try_from(count).unwrap_or_default();
    let found = rows.into_iter().map(|row| {
        let signature = row.signature.as_deref().and_then(|text| ArtefactSignature::parse(text).ok());
        ArtefactView {
            sha256: hex::encode(row.sha256),
            size: count(row.size),
            name: row.name,
            upload_started_at: row.begun_at,
            added_at: row.added_at,
            added_by: row.added_by,
            pieces: row.pieces.map_or_else(|| piece_count(count(row.size)), count),
            kubernetes: row.kubernetes,
            signing_key_id: signature.as_ref().map(|signature| signature.key_id().to_string()),
            signed_comment: signature.as_ref().map(|signature| signature.fields().to_string()),
        }
    });
    Ok((found.collect(), database_now(tx).await?))
}

/// The size of all artefacts together. Unfinished uploads count in full: their pieces are still to come. It reads one
/// small row for each artefact, and no piece.
pub(crate) async fn measure_artefacts(tx: &mut PgConnection) -> Result<ByteSize, BmdbError> {
    let bytes = sqlx::query_scalar!(r#"SELECT COALESCE(sum(size), 0)::INT8 AS "bytes!" FROM artefact"#)
        .fetch_one(tx)
        .await
        .context("measuring the artefacts")?;
    Ok(ByteSize(u64::try_from(bytes).unwrap_or_default()))
}

impl Bmdb {
    /// Size of an artefact in bytes; `None` unless it is complete.
    pub async fn artefact_size(&self, sha256: Sha256) -> Result<Option<u64>, BmdbError> {
        let row = self
            .statement(OPERATION, move |connection| {
                Box::pin(
                    sqlx::query_file!("../../sql/artefact/find_by_digest.sql", sha256.0.as_slice())
                        .fetch_optional(connection),
                )
            })
            .await?;
        Ok(row.filter(|row| row.added_at.is_some()).and_then(|row| u64::try_from(row.size).ok()))
    }

    /// The signature of an artefact; `None` if it is not signed, or does not exist.
    pub async fn artefact_signature(&self, sha256: Sha256) -> Result<Option<String>, BmdbError> {
        let found = self
            .statement("reading the signature of an artefact", move |connection| {
                Box::pin(
                    sqlx::query_scalar!(
                        "SELECT signature FROM artefact WHERE sha256 = $1",
                        sha256.0.as_slice()
                    )
                    .fetch_optional(connection),
                )
            })
            .await?;
        Ok(found.flatten())
    }

    /// A piece of an artefact; `None` if it does not exist.
    pub async fn artefact_piece(&self, sha256: Sha256, number: u64) -> Result<Option<Vec<u8>>, BmdbError> {
        let number = i64::try_from(number).unwrap_or(i64::MAX);
        self.statement("reading a piece of an artefact", move |connection| {
            Box::pin(
                sqlx::query_scalar!(
                    "SELECT bytes FROM artefact_chunk WHERE sha256 = $1 AND number = $2",
                    sha256.0.as_slice(),
                    number
                )
                .fetch_optional(connection),
            )
        })
        .await
    }

    /// Looks up whether this is the key of the machine's agent.
    pub async fn agent_key_owner(
        &self,
        machine: MachineId,
        public_key: [u8; 32],
    ) -> Result<AgentKeyOwner, BmdbError> {
        let phase = self
            .statement("looking whose a key is", move |connection| {
                Box::pin(
                    sqlx::query_file_scalar!(
                        "../../sql/artefact/find_agent_phase.sql",
                        machine.0,
                        public_key.as_slice()
                    )
                    .fetch_optional(connection),
                )
            })
            .await?;
        Ok(match phase.map(|phase| phase.parse::<Phase>()) {
            None => AgentKeyOwner::Unknown,
            Some(Ok(Phase::Retired)) => AgentKeyOwner::RetiredAgent,
            Some(_) => AgentKeyOwner::Agent,
        })
    }
}
