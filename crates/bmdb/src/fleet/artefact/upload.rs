//! Uploading an artefact: beginning, storing pieces, checking the digest, discarding.

use ring::digest::{Context, SHA256};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _};
use crate::engine::policy::lock_policy;
use crate::fleet::artefact::measure_artefacts;
use model::artefact::{
    MAX_ARTEFACTS, MAX_INCOMPLETE, check_size, check_storage, missing_pieces, piece_count, piece_length,
};
use model::kubernetes::archive::read_bundle_manifest;
use model::kubernetes::bundle_manifest::BundleManifest;
use model::role_declaration::Sha256;
use model::signed_artefact::compare_content;
use model::signed_artefact::signature::{ArtefactSignature, FileVerification};
use model::signed_artefact::signing_key::SigningKey;

const OPERATION: &str = "reading artefacts";
const UPLOADING: &str = "bringing an artefact";

/// How far an upload has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UploadState {
    /// Every piece of it is stored.
    Complete,
    /// Pieces of these numbers are missing.
    Missing(Vec<u64>),
}

/// What the stored pieces of an upload amount to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UploadCheck {
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

/// The stored pieces of an upload, as far as they were read.
pub(super) struct UploadContent {
    /// What they amount to.
    pub(super) check: UploadCheck,
    /// Version of Kubernetes, if they are a bundle.
    pub(super) kubernetes: Option<String>,
    /// Whether the signature that was given is one of them; the error is a sentence.
    pub(super) signature: Result<(), String>,
}

/// The signature of an upload, and the key of the shepherd to verify it with.
#[derive(Clone, Debug)]
pub struct SignedUpload {
    /// The signature as it was uploaded.
    pub signature: ArtefactSignature,
    /// A key with the id in the signature.
    pub key: SigningKey,
}

impl Bmdb {
    /// Begins an upload, or continues one.
    pub async fn begin_artefact_upload(&self, sha256: Sha256, size: u64) -> Result<UploadState, BmdbError> {
        check_size(size).map_err(|reason| order_rejected("WRONG_SIZE", reason))?;
        self.transact(UPLOADING, move |tx| Box::pin(begin_upload_in_tx(tx, sha256, size))).await
    }

    /// Stores a piece of an upload.
    pub async fn store_artefact_piece(
        &self,
        sha256: Sha256,
        number: u64,
        piece: Vec<u8>,
    ) -> Result<(), BmdbError> {
        self.transact_with(UPLOADING, piece, move |tx, piece| {
            Box::pin(store_piece_in_tx(tx, sha256, number, piece))
        })
        .await
    }

    /// What the stored pieces amount to. With a signature, also whether it is one of this content.
    pub(super) async fn check_upload(
        &self,
        sha256: Sha256,
        signed: Option<&SignedUpload>,
    ) -> Result<UploadContent, BmdbError> {
        let row = self
            .transact(OPERATION, move |tx| {
                Box::pin(async move {
                    let digest = sha256.0.as_slice();
                    let row = sqlx::query_file!("../../sql/artefact/find_by_digest.sql", digest)
                        .fetch_optional(&mut *tx)
                        .await
                        .context(OPERATION)?;
                    let there = list_piece_numbers(tx, digest, OPERATION).await?;
                    Ok(row.map(|row| (row.size, row.upload, row.added_at.is_some(), there)))
                })
            })
            .await?;
        let unread = |check| Ok(UploadContent { check, kubernetes: None, signature: Ok(()) });
        let Some((size, upload, whole, there)) = row else { return unread(UploadCheck::NotStarted) };
        if whole && signed.is_none() {
            return unread(UploadCheck::AlreadyAdded);
        }
        let size = u64::try_from(size).unwrap_or_default();
        let missing = missing_pieces(size, &there).len();
        let less = |missing| UploadCheck::Incomplete { missing, total: piece_count(size) };
        if missing > 0 {
            return unread(less(missing));
        }
        let (mut context, mut bundle) = (Context::new(&SHA256), None);
        let mut verification =
            signed.map(|signed| FileVerification::begin(&signed.signature, &signed.key)).transpose();
        for number in 0..piece_count(size) {
            // Another process may have removed the pieces since.
            let Some(piece) = self.artefact_piece(sha256, number).await? else { return unread(less(1)) };
            if number == 0 {
                bundle = read_bundle_manifest(&piece).ok();
                for finding in bundle.iter().flat_map(BundleManifest::version_faults) {
                    if finding.is_certain {
                        tracing::warn!("a bundle was uploaded in which {finding}");
                    } else {
                        tracing::info!("a bundle was uploaded in which {finding}");
                    }
                }
            }
            context.update(&piece);
            if let Ok(Some(verification)) = &mut verification {
                verification.update(&piece);
            }
        }
        let right = context.finish().as_ref() == sha256.0;
        let check = match (whole, right) {
            (true, _) => UploadCheck::AlreadyAdded,
            (false, true) => UploadCheck::Verified(upload),
            (false, false) => return unread(UploadCheck::DigestMismatch(upload)),
        };
        let verified = verification.and_then(|begun| begun.map_or(Ok(()), FileVerification::finish));
        let content = bundle.as_ref().map(|manifest| (manifest.name.as_str(), manifest.kubernetes));
        let signature = match signed {
            None => Ok(()),
            Some(signed) => verified.map_err(|error| error.to_string()).and_then(|()| {
                compare_content(signed.signature.fields(), content).map_err(|error| error.to_string())
            }),
        };
        let kubernetes = bundle.map(|manifest| manifest.kubernetes.to_string());
        Ok(UploadContent { check, kubernetes, signature })
    }
}

/// Lists the numbers of the stored pieces of an artefact, as a part of the operation `what`.
async fn list_piece_numbers(
    tx: &mut PgConnection,
    digest: &[u8],
    what: &'static str,
) -> Result<Vec<u64>, BmdbError> {
    let found =
        sqlx::query_scalar!("SELECT number FROM artefact_chunk WHERE sha256 = $1 ORDER BY number", digest)
            .fetch_all(tx)
            .await
            .context(what)?;
    Ok(found.into_iter().filter_map(|number| u64::try_from(number).ok()).collect())
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
            // An upload that is still in progress must not count as too old.
            sqlx::query!(
                "UPDATE artefact SET begun_at = clock_timestamp() WHERE sha256 = $1 AND added_at IS NULL",
                digest
            )
            .execute(&mut *tx)
            .await
            .context(UPLOADING)?;
            let there = list_piece_numbers(tx, digest, UPLOADING).await?;
            return Ok(UploadState::Missing(missing_pieces(size, &there)));
        }
        None => {}
    }
    // Uploads begin one after the other, so that two of them cannot both use the last room. The row of the policy serves
    // as the lock, and has the limit.
    let limit = lock_policy(tx).await?.artefact_storage_limit;
    let counts = sqlx::query!(
        r#"SELECT count(*) AS "artefacts!", count(*) FILTER (WHERE added_at IS NULL) AS "begun!"
           FROM artefact"#
    )
    .fetch_one(&mut *tx)
    .await
    .context(UPLOADING)?;
    if counts.artefacts >= MAX_ARTEFACTS {
        let text = format!(
            "there are {MAX_ARTEFACTS} artefacts, which is the maximum; remove one with: shepherdctl artefacts delete"
        );
        return Err(order_rejected("TOO_MANY_ARTEFACTS", text));
    }
    if counts.begun >= MAX_INCOMPLETE {
        let text = format!(
            "{MAX_INCOMPLETE} uploads of artefacts are incomplete; an incomplete upload is deleted after a \
             day, or with shepherdctl artefacts delete (get artefacts lists them)"
        );
        return Err(order_rejected("TOO_MANY_ARTEFACTS", text));
    }
    check_storage(measure_artefacts(tx).await?, size, limit)
        .map_err(|reason| order_rejected("STORAGE_FULL", format!("it was not uploaded: {reason}")))?;
    sqlx::query!(
        "INSERT INTO artefact (sha256, size, upload, begun_at) VALUES ($1, $2, $3, clock_timestamp())
         ON CONFLICT (sha256) DO NOTHING",
        digest,
        bytes,
        Uuid::new_v4()
    )
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
    sqlx::query!(
        "INSERT INTO artefact_chunk (sha256, number, bytes)
         SELECT a.sha256, $2, $3 FROM artefact a WHERE a.sha256 = $1 AND a.added_at IS NULL
         ON CONFLICT (sha256, number) DO NOTHING",
        digest,
        number,
        piece
    )
    .execute(tx)
    .await
    .context(UPLOADING)?;
    Ok(())
}

pub(super) async fn delete_artefact_rows(tx: &mut PgConnection, sha256: Sha256) -> Result<(), BmdbError> {
    let digest = sha256.0.as_slice();
    sqlx::query!("DELETE FROM artefact_chunk WHERE sha256 = $1", digest)
        .execute(&mut *tx)
        .await
        .context(UPLOADING)?;
    sqlx::query!("DELETE FROM artefact WHERE sha256 = $1", digest).execute(tx).await.context(UPLOADING)?;
    Ok(())
}

/// Removes an upload whose pieces have another digest.
pub(super) async fn discard_upload(
    tx: &mut PgConnection,
    sha256: Sha256,
    upload: Uuid,
) -> Result<(), BmdbError> {
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
