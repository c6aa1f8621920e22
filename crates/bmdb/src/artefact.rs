//! Artefact store: files uploaded in pieces and fetched by machines from any shepherd.
//!
//! Uploading needs no order: an upload has no effect yet, is bounded in number and size, and is deleted after a day.
//! Adding the artefact is an order. The digest of its pieces is computed right before that transaction, piece by piece,
//! so that no snapshot of the database is held for as long as that takes; the transaction only checks that they are
//! still the pieces of the same upload. Pieces never change, so nothing else can have happened to them.

use ring::digest::{Context, SHA256};
use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::action::OrderOutcome;
use crate::audit::{
    Order, OrderResult, begin_dry_run, find_by_idempotency_key, record_audit, roll_back_dry_run,
};
use crate::connection::{Bmdb, DbContext as _};
use crate::error::BmdbError;
use crate::inspect;
use model::artefact::{
    ArtefactView, MAX_ARTEFACTS, MAX_INCOMPLETE, check_name, check_size, find_artefact, missing_pieces,
    piece_count, piece_length,
};
use model::ids::MachineId;
use model::kubernetes::archive::read_bundle_manifest;
use model::phase::Phase;
use model::role_declaration::Sha256;
use model::time::Timestamp;

const OPERATION: &str = "reading artefacts";
const UPLOADING: &str = "bringing an artefact";

/// The target of orders about artefacts, for people.
#[must_use]
pub fn order_target(artefact: &str) -> String {
    format!("the artefact {artefact}")
}

/// How far an upload has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UploadState {
    /// Every piece of it is stored.
    Complete,
    /// Pieces of these numbers are missing.
    Missing(Vec<u64>),
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

/// What the stored pieces of an upload amount to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UploadCheck {
    /// No upload was begun under this digest.
    NotStarted,
    /// The artefact was added before.
    AlreadyAdded,
    /// So many pieces of it are missing.
    Incomplete { missing: usize, total: u64 },
    /// The pieces of this upload have another digest than it was begun under.
    DigestMismatch(Uuid),
    /// The pieces of this upload have the expected digest.
    Verified(Uuid),
}

/// All artefacts, and the database's clock when they were read.
pub async fn list_artefacts(tx: &mut PgConnection) -> Result<(Vec<ArtefactView>, Timestamp), BmdbError> {
    let rows =
        sqlx::query_file!("../../sql/artefact/list.sql").fetch_all(&mut *tx).await.context(OPERATION)?;
    let count = |count: i64| u64::try_from(count).unwrap_or_default();
    let found = rows.into_iter().map(|row| ArtefactView {
        sha256: hex::encode(row.sha256),
        size: count(row.size),
        name: row.name,
        upload_started_at: row.begun_at,
        added_at: row.added_at,
        added_by: row.added_by,
        pieces: row.pieces.map_or_else(|| piece_count(count(row.size)), count),
        kubernetes: row.kubernetes,
    });
    Ok((found.collect(), inspect::database_now(tx).await?))
}

fn order_rejected(reason: &'static str, text: impl Into<String>) -> BmdbError {
    BmdbError::OrderRejected { reason, message: text.into() }
}

fn piece_numbers(found: Vec<i64>) -> Vec<u64> {
    found.into_iter().filter_map(|number| u64::try_from(number).ok()).collect()
}

impl Bmdb {
    /// Begins an upload, or continues one.
    pub async fn begin_artefact_upload(&self, sha256: Sha256, size: u64) -> Result<UploadState, BmdbError> {
        check_size(size).map_err(|reason| order_rejected("WRONG_SIZE", reason))?;
        self.transact(UPLOADING, move |tx| {
            Box::pin(async move { begin_upload_in_tx(tx, sha256, size).await })
        })
        .await
    }

    /// Stores a piece of an upload.
    pub async fn store_artefact_piece(
        &self,
        sha256: Sha256,
        number: u64,
        piece: Vec<u8>,
    ) -> Result<(), BmdbError> {
        self.transact(UPLOADING, move |tx| {
            let piece = piece.clone();
            Box::pin(async move { store_piece_in_tx(tx, sha256, number, &piece).await })
        })
        .await
    }

    /// Adds an artefact whose pieces are all stored, if its digest is right. If it is wrong, the pieces are removed.
    pub async fn add_artefact(
        &self,
        order: Order,
        sha256: Sha256,
        name: String,
    ) -> Result<OrderResult, BmdbError> {
        check_name(&name).map_err(|reason| order_rejected("WRONG_NAME", reason))?;
        let (made, kubernetes) = self.check_upload(sha256).await?;
        let given = order.clone();
        let carried = self
            .run_order_transaction("adding an artefact", move |tx| {
                let (order, name, kubernetes) = (order.clone(), name.clone(), kubernetes.clone());
                Box::pin(
                    async move { add_artefact_in_tx(tx, &order, sha256, (&name, kubernetes), made).await },
                )
            })
            .await;
        // The order was rejected, so its transaction changed nothing.
        if let (
            UploadCheck::DigestMismatch(upload),
            Err(BmdbError::OrderRejected { reason: "OTHER_DIGEST", .. }),
        ) = (made, &carried)
        {
            self.transact(UPLOADING, move |tx| {
                Box::pin(async move { discard_upload(tx, sha256, upload).await })
            })
            .await?;
        }
        self.audit_rejection(carried, &given, None).await
    }

    /// Removes an artefact, by its digest or its name.
    pub async fn delete_artefact(&self, order: Order, artefact: String) -> Result<OrderResult, BmdbError> {
        let given = order.clone();
        let carried = self
            .run_order_transaction("removing an artefact", move |tx| {
                let (order, artefact) = (order.clone(), artefact.clone());
                Box::pin(async move { delete_artefact_in_tx(tx, &order, &artefact).await })
            })
            .await;
        self.audit_rejection(carried, &given, None).await
    }

    /// Size of an artefact in bytes; `None` unless it is complete.
    pub async fn artefact_size(&self, sha256: Sha256) -> Result<Option<u64>, BmdbError> {
        let row = self
            .statement(OPERATION, move |connection| {
                Box::pin(async move {
                    sqlx::query_file!("../../sql/artefact/find_by_digest.sql", sha256.0.as_slice())
                        .fetch_optional(connection)
                        .await
                })
            })
            .await?;
        Ok(row.filter(|row| row.added_at.is_some()).and_then(|row| u64::try_from(row.size).ok()))
    }

    /// A piece of an artefact; `None` if it does not exist.
    pub async fn artefact_piece(&self, sha256: Sha256, number: u64) -> Result<Option<Vec<u8>>, BmdbError> {
        let number = i64::try_from(number).unwrap_or(i64::MAX);
        self.statement("reading a piece of an artefact", move |connection| {
            Box::pin(async move {
                sqlx::query_file_scalar!("../../sql/artefact/read_piece.sql", sha256.0.as_slice(), number)
                    .fetch_optional(connection)
                    .await
            })
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
                Box::pin(async move {
                    sqlx::query_file_scalar!(
                        "../../sql/artefact/find_agent_phase.sql",
                        machine.0,
                        public_key.as_slice()
                    )
                    .fetch_optional(connection)
                    .await
                })
            })
            .await?;
        Ok(match phase.map(|phase| phase.parse::<Phase>()) {
            None => AgentKeyOwner::Unknown,
            Some(Ok(Phase::Retired)) => AgentKeyOwner::RetiredAgent,
            Some(_) => AgentKeyOwner::Agent,
        })
    }

    /// What the stored pieces amount to. For a bundle of Kubernetes also its version, which the first piece contains.
    async fn check_upload(&self, sha256: Sha256) -> Result<(UploadCheck, Option<String>), BmdbError> {
        let row = self
            .transact(OPERATION, move |tx| {
                Box::pin(async move {
                    let digest = sha256.0.as_slice();
                    let row = sqlx::query_file!("../../sql/artefact/find_by_digest.sql", digest)
                        .fetch_optional(&mut *tx)
                        .await
                        .context(OPERATION)?;
                    let there = sqlx::query_file_scalar!("../../sql/artefact/list_piece_numbers.sql", digest)
                        .fetch_all(tx)
                        .await
                        .context(OPERATION)?;
                    Ok(row.map(|row| (row.size, row.upload, row.added_at.is_some(), piece_numbers(there))))
                })
            })
            .await?;
        let Some((size, upload, whole, there)) = row else { return Ok((UploadCheck::NotStarted, None)) };
        if whole {
            return Ok((UploadCheck::AlreadyAdded, None));
        }
        let size = u64::try_from(size).unwrap_or_default();
        let missing = missing_pieces(size, &there).len();
        let less = |missing| (UploadCheck::Incomplete { missing, total: piece_count(size) }, None);
        if missing > 0 {
            return Ok(less(missing));
        }
        let (mut context, mut kubernetes) = (Context::new(&SHA256), None);
        for number in 0..piece_count(size) {
            match self.artefact_piece(sha256, number).await? {
                Some(piece) => {
                    if number == 0 {
                        kubernetes =
                            read_bundle_manifest(&piece).ok().map(|manifest| manifest.kubernetes.to_string());
                    }
                    context.update(&piece);
                }
                // Another process has removed the pieces since.
                None => return Ok(less(1)),
            }
        }
        let right = context.finish().as_ref() == sha256.0;
        Ok(if right {
            (UploadCheck::Verified(upload), kubernetes)
        } else {
            (UploadCheck::DigestMismatch(upload), None)
        })
    }
}

async fn begin_upload_in_tx(
    tx: &mut PgConnection,
    sha256: Sha256,
    size: u64,
) -> Result<UploadState, BmdbError> {
    let digest = sha256.0.as_slice();
    let bytes = i64::try_from(size).unwrap_or(i64::MAX);
    let known = sqlx::query_file!("../../sql/artefact/lock.sql", digest)
        .fetch_optional(&mut *tx)
        .await
        .context(UPLOADING)?;
    match known {
        Some(known) if known.added_at.is_some() => {
            if known.size != bytes {
                let text = format!("the artefact of this digest has {} bytes, and not {size}", known.size);
                return Err(order_rejected("WRONG_SIZE", text));
            }
            return Ok(UploadState::Complete);
        }
        // One of the two sizes was wrong, and so is every piece uploaded for it.
        Some(known) if known.size != bytes => delete_artefact_rows(tx, sha256).await?,
        Some(_) => {
            sqlx::query_file!("../../sql/artefact/touch_upload.sql", digest)
                .execute(&mut *tx)
                .await
                .context(UPLOADING)?;
            let there = sqlx::query_file_scalar!("../../sql/artefact/list_piece_numbers.sql", digest)
                .fetch_all(&mut *tx)
                .await
                .context(UPLOADING)?;
            return Ok(UploadState::Missing(missing_pieces(size, &piece_numbers(there))));
        }
        None => {}
    }
    let counts = sqlx::query_file!("../../sql/artefact/count_artefacts.sql")
        .fetch_one(&mut *tx)
        .await
        .context(UPLOADING)?;
    if counts.artefacts >= MAX_ARTEFACTS {
        let text = format!(
            "there are {MAX_ARTEFACTS} artefacts, and can be no more; shepherdctl artefacts delete removes one"
        );
        return Err(order_rejected("TOO_MANY_ARTEFACTS", text));
    }
    if counts.begun >= MAX_INCOMPLETE {
        let text = format!(
            "{MAX_INCOMPLETE} uploads of artefacts are incomplete; an incomplete upload is deleted after a \
             day, or with shepherdctl artefacts delete (artefacts get lists them)"
        );
        return Err(order_rejected("TOO_MANY_ARTEFACTS", text));
    }
    sqlx::query_file!("../../sql/artefact/insert_upload.sql", digest, bytes, Uuid::new_v4())
        .execute(&mut *tx)
        .await
        .context(UPLOADING)?;
    Ok(UploadState::Missing(missing_pieces(size, &[])))
}

async fn store_piece_in_tx(
    tx: &mut PgConnection,
    sha256: Sha256,
    number: u64,
    piece: &[u8],
) -> Result<(), BmdbError> {
    let digest = sha256.0.as_slice();
    let known =
        sqlx::query_file!("../../sql/artefact/find_by_digest.sql", digest).fetch_optional(&mut *tx).await;
    let Some(known) = known.context(UPLOADING)? else {
        return Err(order_rejected("NOT_BEGUN", "no artefact of this digest was begun; begin with it first"));
    };
    let length = piece_length(u64::try_from(known.size).unwrap_or_default(), number);
    if length != u64::try_from(piece.len()).ok() {
        let text = match length {
            Some(length) => {
                format!("piece {number} of this artefact has {length} bytes, and not {}", piece.len())
            }
            None => format!("this artefact has no piece {number}"),
        };
        return Err(order_rejected("WRONG_PIECE", text));
    }
    let number = i64::try_from(number).unwrap_or(i64::MAX);
    sqlx::query_file!("../../sql/artefact/insert_piece.sql", digest, number, piece)
        .execute(tx)
        .await
        .context(UPLOADING)?;
    Ok(())
}

async fn delete_artefact_rows(tx: &mut PgConnection, sha256: Sha256) -> Result<(), BmdbError> {
    let digest = sha256.0.as_slice();
    sqlx::query_file!("../../sql/artefact/delete_pieces.sql", digest)
        .execute(&mut *tx)
        .await
        .context(UPLOADING)?;
    sqlx::query_file!("../../sql/artefact/delete.sql", digest).execute(tx).await.context(UPLOADING)?;
    Ok(())
}

/// Removes an upload whose pieces have another digest.
async fn discard_upload(tx: &mut PgConnection, sha256: Sha256, upload: Uuid) -> Result<(), BmdbError> {
    let known = sqlx::query_file!("../../sql/artefact/lock.sql", sha256.0.as_slice())
        .fetch_optional(&mut *tx)
        .await
        .context(UPLOADING)?;
    match known {
        Some(known) if known.upload == upload && known.added_at.is_none() => {
            delete_artefact_rows(tx, sha256).await
        }
        _ => Ok(()),
    }
}

/// The message for a dry run of adding an artefact whose upload is incomplete: nobody uploads it for a dry run. `None`
/// when it is complete.
fn missing_upload_message(made: UploadCheck) -> Option<String> {
    match made {
        UploadCheck::NotStarted => Some("is added once it is uploaded; nothing of it is here".to_owned()),
        UploadCheck::Incomplete { missing, total: of } => {
            Some(format!("is added once all of it is uploaded; {missing} of its {of} pieces are missing"))
        }
        UploadCheck::AlreadyAdded | UploadCheck::DigestMismatch(_) | UploadCheck::Verified(_) => None,
    }
}

async fn add_artefact_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    sha256: Sha256,
    (name, kubernetes): (&str, Option<String>),
    made: UploadCheck,
) -> Result<OrderResult, BmdbError> {
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        return Ok(carried);
    }
    let digest = sha256.0.as_slice();
    let known = sqlx::query_file!("../../sql/artefact/lock.sql", digest)
        .fetch_optional(&mut *tx)
        .await
        .context(UPLOADING)?;
    if order.dry_run
        && let Some(text) = missing_upload_message(made)
    {
        return record_audit(tx, order, None, OrderOutcome { changed: true, message: text }, None, None)
            .await;
    }
    let Some(known) = known else {
        let output =
            "it was not added: nothing of it was uploaded; upload it with: shepherdctl artefacts add FILE";
        return Err(order_rejected("NOT_BEGUN", output));
    };
    let reported = |name: &str| json!({ "sha256": hex::encode(sha256.0), "name": name, "size": known.size });
    if let (Some(_), Some(before)) = (known.added_at, &known.name) {
        if before == name {
            let done = OrderOutcome { changed: false, message: "is there; nothing was changed".to_owned() };
            return record_audit(tx, order, None, done, Some(reported(name)), Some(reported(name))).await;
        }
        begin_dry_run(tx, order).await?;
        sqlx::query_file!("../../sql/artefact/rename.sql", digest, name)
            .execute(&mut *tx)
            .await
            .context(UPLOADING)?;
        roll_back_dry_run(tx, order).await?;
        let done =
            OrderOutcome { changed: true, message: format!("is there, and was called {before} before") };
        return record_audit(tx, order, None, done, Some(reported(before)), Some(reported(name))).await;
    }
    let upload = match made {
        UploadCheck::Verified(upload) if upload == known.upload => upload,
        UploadCheck::DigestMismatch(upload) if upload == known.upload => {
            let text = "it was not added: the uploaded file is another one, its digest is not this one; it is \
                        removed, so upload it again";
            return Err(order_rejected("OTHER_DIGEST", text));
        }
        UploadCheck::Incomplete { missing, total: of } => {
            let text =
                format!("it was not added: {missing} of its {of} pieces are missing; upload them first");
            return Err(order_rejected("INCOMPLETE", text));
        }
        UploadCheck::NotStarted
        | UploadCheck::AlreadyAdded
        | UploadCheck::Verified(_)
        | UploadCheck::DigestMismatch(_) => {
            let text = "it was not added: another client began its upload again at this moment; try again";
            return Err(order_rejected("INCOMPLETE", text));
        }
    };
    begin_dry_run(tx, order).await?;
    sqlx::query_file_scalar!(
        "../../sql/artefact/mark_added.sql",
        digest,
        upload,
        name,
        order.actor.name,
        kubernetes
    )
    .fetch_optional(&mut *tx)
    .await
    .context(UPLOADING)?;
    roll_back_dry_run(tx, order).await?;
    let what = kubernetes.map(|version| format!(" as a bundle of Kubernetes {version}")).unwrap_or_default();
    let text = format!("is added{what}, {} bytes; every shepherd has it for its machines", known.size);
    record_audit(tx, order, None, OrderOutcome { changed: true, message: text }, None, Some(reported(name)))
        .await
}

async fn delete_artefact_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    artefact: &str,
) -> Result<OrderResult, BmdbError> {
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        return Ok(carried);
    }
    let (all, _) = list_artefacts(tx).await?;
    let found = find_artefact(&all, artefact).map_err(|reason| order_rejected("NO_SUCH_ARTEFACT", reason))?;
    let sha256 = model::artefact::parse_digest(&found.sha256)
        .map_err(|reason| BmdbError::Corrupt(format!("an artefact: {reason}")))?;
    sqlx::query_file!("../../sql/artefact/lock.sql", sha256.0.as_slice())
        .fetch_optional(&mut *tx)
        .await
        .context("removing an artefact")?;
    let used = sqlx::query_file_scalar!("../../sql/roll_out/find_active_by_digest.sql", sha256.0.as_slice())
        .fetch_optional(&mut *tx)
        .await
        .context("removing an artefact")?;
    if let Some(update) = used {
        let text = format!(
            "{artefact} was not removed: the update {update} rolls it out; wait for its end, or: shepherdctl update \
             abort {update}"
        );
        return Err(order_rejected("IN_USE", text));
    }
    let runs = sqlx::query_file!("../../sql/artefact/find_kubernetes_cluster.sql", sha256.0.as_slice())
        .fetch_optional(&mut *tx)
        .await
        .context("removing an artefact")?;
    if let Some(runs) = runs {
        let (name, how) = (
            runs.name.unwrap_or_default(),
            match runs.what.as_str() {
                "bundle" => "is the bundle of Kubernetes of the cluster",
                "add-on" => "is an add-on of the cluster",
                _ => "is a bundle that an upgrade concerns of the cluster",
            },
        );
        let text = format!(
            "{artefact} was not removed: it {how} {name}, and nodes that come or come back fetch it; see: shepherdctl cluster \
             describe {name}"
        );
        return Err(order_rejected("IN_USE", text));
    }
    let digits = hex::encode(sha256.0);
    let named = sqlx::query_file!("../../sql/artefact/find_declaring_role.sql", digits.as_bytes())
        .fetch_optional(&mut *tx)
        .await
        .context("removing an artefact")?;
    if let Some(named) = named {
        let text = format!(
            "{artefact} was not removed: the role {} of the cluster {} is declared with it, and nodes that are given \
             the role fetch it; declare the role without it, or: shepherdctl cluster undeclare {} {}",
            named.role, named.name, named.name, named.role
        );
        return Err(order_rejected("IN_USE", text));
    }
    begin_dry_run(tx, order).await?;
    delete_artefact_rows(tx, sha256).await?;
    roll_back_dry_run(tx, order).await?;
    let before: Value = json!({ "sha256": found.sha256, "name": found.name, "size": found.size });
    let text = format!("is removed ({}); machines that have fetched it keep it", found.sha256);
    record_audit(tx, order, None, OrderOutcome { changed: true, message: text }, Some(before), None).await
}
