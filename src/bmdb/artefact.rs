//! Artefacts: files that machines fetch from any shepherd, kept in pieces.
//!
//! Bringing one needs no order: what is brought is nothing yet, bounded in number and size, and forgotten after a day. The
//! order is to add it. What its pieces make is read and found right before that transaction, piece by piece, so that no
//! snapshot is held for as long as that takes; the transaction asks only whether they are still the pieces of the same
//! upload. Pieces never change, so nothing else can have become of them.

use ring::digest::{Context, SHA256};
use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::action::Done;
use crate::bmdb::audit::{Carried, Order, begin_attempt, end_attempt, given_before, write_down};
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect;
use crate::model::artefact::{
    ArtefactView, MOST, MOST_BEGUN, check_name, check_size, find, missing, piece_length, pieces,
};
use crate::model::declaration::Sha256;
use crate::model::ids::MachineId;
use crate::model::kubernetes::archive::manifest;
use crate::model::phase::Phase;
use crate::model::time::Timestamp;

const WHAT: &str = "reading artefacts";
const BRINGING: &str = "bringing an artefact";

/// What orders about artefacts are about, for people.
#[must_use]
pub fn target(artefact: &str) -> String {
    format!("the artefact {artefact}")
}

/// How far an artefact has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Begun {
    /// It is there.
    Whole,
    /// Pieces of these numbers are missing.
    Missing(Vec<u64>),
}

/// Whose a key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keyed {
    /// The machine's agent's.
    Agent,
    /// The agent's of a machine that is retired.
    Retired,
    /// Not that machine's.
    Nobody,
}

/// What the pieces of an upload make together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Made {
    /// Nothing was begun under this digest.
    Nothing,
    /// It was whole before.
    Whole,
    /// So many pieces of it are missing.
    Less { missing: usize, of: u64 },
    /// Another file.
    Other(Uuid),
    /// What it is to be.
    Right(Uuid),
}

/// All of them, and the database's clock then.
pub async fn artefacts(tx: &mut PgConnection) -> Result<(Vec<ArtefactView>, Timestamp), BmdbError> {
    let rows = sqlx::query_file!("sql/artefact/list.sql").fetch_all(&mut *tx).await.doing(WHAT)?;
    let count = |count: i64| u64::try_from(count).unwrap_or_default();
    let found = rows.into_iter().map(|row| ArtefactView {
        sha256: hex::encode(row.sha256),
        size: count(row.size),
        name: row.name,
        begun_at: row.begun_at,
        added_at: row.added_at,
        added_by: row.added_by,
        pieces: row.pieces.map_or_else(|| pieces(count(row.size)), count),
        kubernetes: row.kubernetes,
    });
    Ok((found.collect(), inspect::now(tx).await?))
}

fn refused(reason: &'static str, said: impl Into<String>) -> BmdbError {
    BmdbError::OrderRefused { reason, said: said.into() }
}

fn numbers(found: Vec<i64>) -> Vec<u64> {
    found.into_iter().filter_map(|number| u64::try_from(number).ok()).collect()
}

impl Bmdb {
    /// Begins to bring an artefact, or goes on.
    pub async fn begin_artefact(&self, sha256: Sha256, size: u64) -> Result<Begun, BmdbError> {
        check_size(size).map_err(|said| refused("WRONG_SIZE", said))?;
        self.transact(BRINGING, move |tx| Box::pin(async move { begin(tx, sha256, size).await })).await
    }

    /// Keeps a piece of an artefact that was begun.
    pub async fn put_piece(&self, sha256: Sha256, number: u64, piece: Vec<u8>) -> Result<(), BmdbError> {
        self.transact(BRINGING, move |tx| {
            let piece = piece.clone();
            Box::pin(async move { put(tx, sha256, number, &piece).await })
        })
        .await
    }

    /// Adds an artefact whose pieces are all there, if its digest is right; if it is not, they are removed.
    pub async fn add_artefact(
        &self,
        order: Order,
        sha256: Sha256,
        name: String,
    ) -> Result<Carried, BmdbError> {
        check_name(&name).map_err(|said| refused("WRONG_NAME", said))?;
        let (made, kubernetes) = self.made(sha256).await?;
        let given = order.clone();
        let carried = self
            .ordered("adding an artefact", move |tx| {
                let (order, name, kubernetes) = (order.clone(), name.clone(), kubernetes.clone());
                Box::pin(async move { add(tx, &order, sha256, (&name, kubernetes), made).await })
            })
            .await;
        // Refused, that transaction changed nothing.
        if let (Made::Other(upload), Err(BmdbError::OrderRefused { reason: "OTHER_DIGEST", .. })) =
            (made, &carried)
        {
            self.transact(BRINGING, move |tx| Box::pin(async move { discard(tx, sha256, upload).await }))
                .await?;
        }
        self.note_refusal(carried, &given, None).await
    }

    /// Removes an artefact, by its digest or its name.
    pub async fn delete_artefact(&self, order: Order, artefact: String) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered("removing an artefact", move |tx| {
                let (order, artefact) = (order.clone(), artefact.clone());
                Box::pin(async move { delete(tx, &order, &artefact).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// How large an artefact is; none when it is not there, whole.
    pub async fn artefact_size(&self, sha256: Sha256) -> Result<Option<u64>, BmdbError> {
        let row = self
            .statement(WHAT, move |connection| {
                Box::pin(async move {
                    sqlx::query_file!("sql/artefact/find_by_digest.sql", sha256.0.as_slice())
                        .fetch_optional(connection)
                        .await
                })
            })
            .await?;
        Ok(row.filter(|row| row.added_at.is_some()).and_then(|row| u64::try_from(row.size).ok()))
    }

    /// A piece of an artefact; none when it is not there.
    pub async fn artefact_piece(&self, sha256: Sha256, number: u64) -> Result<Option<Vec<u8>>, BmdbError> {
        let number = i64::try_from(number).unwrap_or(i64::MAX);
        self.statement("reading a piece of an artefact", move |connection| {
            Box::pin(async move {
                sqlx::query_file_scalar!("sql/artefact/read_piece.sql", sha256.0.as_slice(), number)
                    .fetch_optional(connection)
                    .await
            })
        })
        .await
    }

    /// Whose agent's key this is.
    pub async fn keyed(&self, machine: MachineId, public_key: [u8; 32]) -> Result<Keyed, BmdbError> {
        let phase = self
            .statement("looking whose a key is", move |connection| {
                Box::pin(async move {
                    sqlx::query_file_scalar!(
                        "sql/artefact/find_agent_phase.sql",
                        machine.0,
                        public_key.as_slice()
                    )
                    .fetch_optional(connection)
                    .await
                })
            })
            .await?;
        Ok(match phase.map(|phase| phase.parse::<Phase>()) {
            None => Keyed::Nobody,
            Some(Ok(Phase::Retired)) => Keyed::Retired,
            Some(_) => Keyed::Agent,
        })
    }

    /// What the pieces that are there make together; and where that is a bundle of Kubernetes, the version in it, which
    /// stands in the first of them.
    async fn made(&self, sha256: Sha256) -> Result<(Made, Option<String>), BmdbError> {
        let row = self
            .transact(WHAT, move |tx| {
                Box::pin(async move {
                    let digest = sha256.0.as_slice();
                    let row = sqlx::query_file!("sql/artefact/find_by_digest.sql", digest)
                        .fetch_optional(&mut *tx)
                        .await
                        .doing(WHAT)?;
                    let there = sqlx::query_file_scalar!("sql/artefact/list_piece_numbers.sql", digest)
                        .fetch_all(tx)
                        .await
                        .doing(WHAT)?;
                    Ok(row.map(|row| (row.size, row.upload, row.added_at.is_some(), numbers(there))))
                })
            })
            .await?;
        let Some((size, upload, whole, there)) = row else { return Ok((Made::Nothing, None)) };
        if whole {
            return Ok((Made::Whole, None));
        }
        let size = u64::try_from(size).unwrap_or_default();
        let missing = missing(size, &there).len();
        let less = |missing| (Made::Less { missing, of: pieces(size) }, None);
        if missing > 0 {
            return Ok(less(missing));
        }
        let (mut context, mut kubernetes) = (Context::new(&SHA256), None);
        for number in 0..pieces(size) {
            match self.artefact_piece(sha256, number).await? {
                Some(piece) => {
                    if number == 0 {
                        kubernetes = manifest(&piece).ok().map(|manifest| manifest.kubernetes.to_string());
                    }
                    context.update(&piece);
                }
                // Somebody has removed them since.
                None => return Ok(less(1)),
            }
        }
        let right = context.finish().as_ref() == sha256.0;
        Ok(if right { (Made::Right(upload), kubernetes) } else { (Made::Other(upload), None) })
    }
}

async fn begin(tx: &mut PgConnection, sha256: Sha256, size: u64) -> Result<Begun, BmdbError> {
    let digest = sha256.0.as_slice();
    let bytes = i64::try_from(size).unwrap_or(i64::MAX);
    let known =
        sqlx::query_file!("sql/artefact/lock.sql", digest).fetch_optional(&mut *tx).await.doing(BRINGING)?;
    match known {
        Some(known) if known.added_at.is_some() => {
            if known.size != bytes {
                let said = format!("the artefact of this digest has {} bytes, and not {size}", known.size);
                return Err(refused("WRONG_SIZE", said));
            }
            return Ok(Begun::Whole);
        }
        // One of the two sizes was wrong, and so is everything that was brought for it.
        Some(known) if known.size != bytes => remove(tx, sha256).await?,
        Some(_) => {
            sqlx::query_file!("sql/artefact/touch_upload.sql", digest)
                .execute(&mut *tx)
                .await
                .doing(BRINGING)?;
            let there = sqlx::query_file_scalar!("sql/artefact/list_piece_numbers.sql", digest)
                .fetch_all(&mut *tx)
                .await
                .doing(BRINGING)?;
            return Ok(Begun::Missing(missing(size, &numbers(there))));
        }
        None => {}
    }
    let counts =
        sqlx::query_file!("sql/artefact/count_artefacts.sql").fetch_one(&mut *tx).await.doing(BRINGING)?;
    if counts.artefacts >= MOST {
        let said = format!(
            "there are {MOST} artefacts, and can be no more; shepherdctl artefacts delete removes one"
        );
        return Err(refused("TOO_MANY_ARTEFACTS", said));
    }
    if counts.begun >= MOST_BEGUN {
        let said = format!(
            "{MOST_BEGUN} artefacts were begun and not brought to their end; they are forgotten after a day, or when they \
             are deleted (shepherdctl artefacts get lists them)"
        );
        return Err(refused("TOO_MANY_ARTEFACTS", said));
    }
    sqlx::query_file!("sql/artefact/insert_upload.sql", digest, bytes, Uuid::new_v4())
        .execute(&mut *tx)
        .await
        .doing(BRINGING)?;
    Ok(Begun::Missing(missing(size, &[])))
}

async fn put(tx: &mut PgConnection, sha256: Sha256, number: u64, piece: &[u8]) -> Result<(), BmdbError> {
    let digest = sha256.0.as_slice();
    let known = sqlx::query_file!("sql/artefact/find_by_digest.sql", digest).fetch_optional(&mut *tx).await;
    let Some(known) = known.doing(BRINGING)? else {
        return Err(refused("NOT_BEGUN", "no artefact of this digest was begun; begin with it first"));
    };
    let length = piece_length(u64::try_from(known.size).unwrap_or_default(), number);
    if length != u64::try_from(piece.len()).ok() {
        let said = match length {
            Some(length) => {
                format!("piece {number} of this artefact has {length} bytes, and not {}", piece.len())
            }
            None => format!("this artefact has no piece {number}"),
        };
        return Err(refused("WRONG_PIECE", said));
    }
    let number = i64::try_from(number).unwrap_or(i64::MAX);
    sqlx::query_file!("sql/artefact/insert_piece.sql", digest, number, piece)
        .execute(tx)
        .await
        .doing(BRINGING)?;
    Ok(())
}

async fn remove(tx: &mut PgConnection, sha256: Sha256) -> Result<(), BmdbError> {
    let digest = sha256.0.as_slice();
    sqlx::query_file!("sql/artefact/delete_pieces.sql", digest).execute(&mut *tx).await.doing(BRINGING)?;
    sqlx::query_file!("sql/artefact/delete.sql", digest).execute(tx).await.doing(BRINGING)?;
    Ok(())
}

/// Removes an upload that made another file.
async fn discard(tx: &mut PgConnection, sha256: Sha256, upload: Uuid) -> Result<(), BmdbError> {
    let known = sqlx::query_file!("sql/artefact/lock.sql", sha256.0.as_slice())
        .fetch_optional(&mut *tx)
        .await
        .doing(BRINGING)?;
    match known {
        Some(known) if known.upload == upload && known.added_at.is_none() => remove(tx, sha256).await,
        _ => Ok(()),
    }
}

/// What is said of one that is not all there when somebody tries out to add it: they have not brought it for that.
fn yet_to_bring(made: Made) -> Option<String> {
    match made {
        Made::Nothing => Some("is added once it was brought; nothing of it is there".to_owned()),
        Made::Less { missing, of } => {
            Some(format!("is added once all of it was brought; {missing} of its {of} pieces are missing"))
        }
        Made::Whole | Made::Other(_) | Made::Right(_) => None,
    }
}

async fn add(
    tx: &mut PgConnection,
    order: &Order,
    sha256: Sha256,
    (name, kubernetes): (&str, Option<String>),
    made: Made,
) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let digest = sha256.0.as_slice();
    let known =
        sqlx::query_file!("sql/artefact/lock.sql", digest).fetch_optional(&mut *tx).await.doing(BRINGING)?;
    if order.dry_run
        && let Some(said) = yet_to_bring(made)
    {
        return write_down(tx, order, None, Done { changed: true, said }, None, None).await;
    }
    let Some(known) = known else {
        let said = "it was not added: nothing of it was brought; shepherdctl artefacts add FILE does that";
        return Err(refused("NOT_BEGUN", said));
    };
    let told = |name: &str| json!({ "sha256": hex::encode(sha256.0), "name": name, "size": known.size });
    if let (Some(_), Some(before)) = (known.added_at, &known.name) {
        if before == name {
            let done = Done { changed: false, said: "is there; nothing was changed".to_owned() };
            return write_down(tx, order, None, done, Some(told(name)), Some(told(name))).await;
        }
        begin_attempt(tx, order).await?;
        sqlx::query_file!("sql/artefact/rename.sql", digest, name).execute(&mut *tx).await.doing(BRINGING)?;
        end_attempt(tx, order).await?;
        let done = Done { changed: true, said: format!("is there, and was called {before} before") };
        return write_down(tx, order, None, done, Some(told(before)), Some(told(name))).await;
    }
    let upload = match made {
        Made::Right(upload) if upload == known.upload => upload,
        Made::Other(upload) if upload == known.upload => {
            let said = "it was not added: what was brought is another file, its digest is not this one; it is removed, so \
                        bring it anew";
            return Err(refused("OTHER_DIGEST", said));
        }
        Made::Less { missing, of } => {
            let said =
                format!("it was not added: {missing} of its {of} pieces are missing; bring them first");
            return Err(refused("INCOMPLETE", said));
        }
        Made::Nothing | Made::Whole | Made::Right(_) | Made::Other(_) => {
            let said = "it was not added: somebody else began anew with it at this moment; try again";
            return Err(refused("INCOMPLETE", said));
        }
    };
    begin_attempt(tx, order).await?;
    sqlx::query_file_scalar!(
        "sql/artefact/mark_added.sql",
        digest,
        upload,
        name,
        order.actor.name,
        kubernetes
    )
    .fetch_optional(&mut *tx)
    .await
    .doing(BRINGING)?;
    end_attempt(tx, order).await?;
    let what = kubernetes.map(|version| format!(" as a bundle of Kubernetes {version}")).unwrap_or_default();
    let said = format!("is added{what}, {} bytes; every shepherd has it for its machines", known.size);
    write_down(tx, order, None, Done { changed: true, said }, None, Some(told(name))).await
}

async fn delete(tx: &mut PgConnection, order: &Order, artefact: &str) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let (all, _) = artefacts(tx).await?;
    let found = find(&all, artefact).map_err(|said| refused("NO_SUCH_ARTEFACT", said))?;
    let sha256 = crate::model::artefact::read_digest(&found.sha256)
        .map_err(|said| BmdbError::Corrupt(format!("an artefact: {said}")))?;
    sqlx::query_file!("sql/artefact/lock.sql", sha256.0.as_slice())
        .fetch_optional(&mut *tx)
        .await
        .doing("removing an artefact")?;
    let used = sqlx::query_file_scalar!("sql/roll_out/find_active_by_digest.sql", sha256.0.as_slice())
        .fetch_optional(&mut *tx)
        .await
        .doing("removing an artefact")?;
    if let Some(update) = used {
        let said = format!(
            "{artefact} was not removed: the update {update} rolls it out; wait for its end, or: shepherdctl update \
             abort {update}"
        );
        return Err(refused("IN_USE", said));
    }
    let runs = sqlx::query_file!("sql/artefact/find_kubernetes_cluster.sql", sha256.0.as_slice())
        .fetch_optional(&mut *tx)
        .await
        .doing("removing an artefact")?;
    if let Some(runs) = runs {
        let (name, how) = (
            runs.name.unwrap_or_default(),
            match runs.what.as_str() {
                "bundle" => "is the bundle of Kubernetes of the cluster",
                "add-on" => "is an add-on of the cluster",
                _ => "is a bundle that an upgrade concerns of the cluster",
            },
        );
        let said = format!(
            "{artefact} was not removed: it {how} {name}, and nodes that come or come back fetch it; see: shepherdctl cluster \
             describe {name}"
        );
        return Err(refused("IN_USE", said));
    }
    let digits = hex::encode(sha256.0);
    let named = sqlx::query_file!("sql/artefact/find_declaring_role.sql", digits.as_bytes())
        .fetch_optional(&mut *tx)
        .await
        .doing("removing an artefact")?;
    if let Some(named) = named {
        let said = format!(
            "{artefact} was not removed: the role {} of the cluster {} is declared with it, and nodes that are given \
             the role fetch it; declare the role without it, or: shepherdctl cluster undeclare {} {}",
            named.role, named.name, named.name, named.role
        );
        return Err(refused("IN_USE", said));
    }
    begin_attempt(tx, order).await?;
    remove(tx, sha256).await?;
    end_attempt(tx, order).await?;
    let before: Value = json!({ "sha256": found.sha256, "name": found.name, "size": found.size });
    let said = format!("is removed ({}); machines that have fetched it keep it", found.sha256);
    write_down(tx, order, None, Done { changed: true, said }, Some(before), None).await
}
