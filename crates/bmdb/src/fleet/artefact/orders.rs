//! Orders about artefacts: add an upload, delete an artefact that nothing uses.

use std::sync::Arc;

use serde_json::{Value, json};
use sqlx::PgConnection;

use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _};
use crate::fleet::artefact::list_artefacts;
use crate::fleet::artefact::upload::{
    SignedUpload, UploadCheck, UploadContent, delete_artefact_rows, discard_upload,
};
use crate::orders::order::{Order, OrderEffect, OrderResult};
use model::artefact::{check_name, find_artefact};
use model::role_declaration::Sha256;
use model::signed_artefact::signature::ArtefactSignature;

const UPLOADING: &str = "bringing an artefact";

impl Bmdb {
    /// Adds an artefact whose pieces are all stored, if its digest is right. If it is wrong, the pieces are removed.
    pub async fn add_artefact(
        &self,
        order: Order,
        sha256: Sha256,
        name: String,
    ) -> Result<OrderResult, BmdbError> {
        self.add_signed_artefact(order, sha256, name, None).await
    }

    /// The same with a signature, if there is one. It must be one of the content. An artefact that exists gets it.
    pub async fn add_signed_artefact(
        &self,
        order: Order,
        sha256: Sha256,
        name: String,
        signed: Option<SignedUpload>,
    ) -> Result<OrderResult, BmdbError> {
        check_name(&name).map_err(|reason| order_rejected("WRONG_NAME", reason))?;
        let content = self.check_upload(sha256, signed.as_ref()).await?;
        let made = content.check;
        let signature = signed.map(|signed| signed.signature);
        let (order, new) = (Arc::new(order), NewArtefact { sha256, name, content, signature });
        let carried = self
            .try_order("adding an artefact", &order, None, new, |tx, order, new| {
                Box::pin(add_artefact_in_tx(tx, order, new))
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
        self.audit_rejection(carried, &order, None).await
    }

    /// Removes an artefact, by its digest or its name.
    pub async fn delete_artefact(&self, order: Order, artefact: String) -> Result<OrderResult, BmdbError> {
        self.execute_order("removing an artefact", order, None, artefact, |tx, _, artefact| {
            Box::pin(delete_artefact_in_tx(tx, artefact))
        })
        .await
    }
}

/// An artefact to add, after its pieces were read.
struct NewArtefact {
    sha256: Sha256,
    name: String,
    content: UploadContent,
    signature: Option<ArtefactSignature>,
}

impl NewArtefact {
    /// The artefact as the audit records it.
    fn describe(&self, name: &str, size: i64) -> Value {
        let mut value = json!({ "sha256": hex::encode(self.sha256.0), "name": name, "size": size });
        if let Some(signature) = &self.signature {
            value["signing_key_id"] = json!(signature.key_id().to_string());
            value["signed_comment"] = json!(signature.fields().to_string());
        }
        value
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
    new: &NewArtefact,
) -> Result<OrderEffect, BmdbError> {
    let (digest, name, made) = (new.sha256.0.as_slice(), new.name.as_str(), new.content.check);
    let signature = new.signature.as_ref().map(ArtefactSignature::as_str);
    let known = sqlx::query_file!("../../sql/artefact/lock.sql", digest)
        .fetch_optional(&mut *tx)
        .await
        .context(UPLOADING)?;
    if order.dry_run
        && let Some(text) = missing_upload_message(made)
    {
        return Ok(OrderEffect::changed(text, None, None));
    }
    let Some(known) = known else {
        let output =
            "it was not added: nothing of it was uploaded; upload it with: shepherdctl artefacts add FILE";
        return Err(order_rejected("NOT_BEGUN", output));
    };
    let reported = |name: &str| new.describe(name, known.size);
    if let (UploadCheck::AlreadyAdded | UploadCheck::Verified(_), Err(reason)) =
        (made, &new.content.signature)
    {
        let text = format!(
            "it was not added: {reason}; to add it without a signature, run: shepherdctl artefacts add FILE --without-signature"
        );
        return Err(order_rejected("WRONG_SIGNATURE", text));
    }
    if let (Some(_), Some(before)) = (known.added_at, &known.name) {
        if signature.is_some() && made != UploadCheck::AlreadyAdded {
            let text = "it was not signed: it was added at this moment; try again";
            return Err(order_rejected("INCOMPLETE", text));
        }
        let is_new_signature = signature.is_some() && signature != known.signature.as_deref();
        let text = match (before == name, is_new_signature) {
            (true, false) => {
                return Ok(OrderEffect::already("exists already; nothing was changed", Some(reported(name))));
            }
            (true, true) => "exists already, and gets this signature".to_owned(),
            (false, false) => format!("exists already, and gets this name in place of {before}"),
            (false, true) => {
                format!("exists already, and gets this signature, and this name in place of {before}")
            }
        };
        sqlx::query!(
            "UPDATE artefact SET name = $2, signature = COALESCE($3, signature)
             WHERE sha256 = $1 AND added_at IS NOT NULL",
            digest,
            name,
            signature
        )
        .execute(&mut *tx)
        .await
        .context(UPLOADING)?;
        return Ok(OrderEffect::changed(text, Some(reported(before)), Some(reported(name))));
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
    sqlx::query_file_scalar!(
        "../../sql/artefact/complete_upload.sql",
        digest,
        upload,
        name,
        order.actor.name,
        new.content.kubernetes,
        signature
    )
    .fetch_optional(&mut *tx)
    .await
    .context(UPLOADING)?;
    let kubernetes = new.content.kubernetes.as_ref();
    let what = kubernetes.map(|version| format!(" as a bundle of Kubernetes {version}")).unwrap_or_default();
    let signed = new.signature.as_ref().map(|signature| format!(", signed with key {}", signature.key_id()));
    let signed = signed.unwrap_or_default();
    let text =
        format!("is added{what}{signed}, {} bytes; every shepherd has it for its machines", known.size);
    Ok(OrderEffect::changed(text, None, Some(reported(name))))
}

async fn delete_artefact_in_tx(tx: &mut PgConnection, artefact: &str) -> Result<OrderEffect, BmdbError> {
    let (all, _) = list_artefacts(tx).await?;
    let found = find_artefact(&all, artefact).map_err(|reason| order_rejected("NO_SUCH_ARTEFACT", reason))?;
    let sha256 = model::artefact::parse_digest(&found.sha256)
        .map_err(|reason| BmdbError::Corrupt(format!("an artefact: {reason}")))?;
    sqlx::query_file!("../../sql/artefact/lock.sql", sha256.0.as_slice())
        .fetch_optional(&mut *tx)
        .await
        .context("removing an artefact")?;
    let used = sqlx::query_scalar!(
        "SELECT roll_out_id FROM roll_out WHERE ended_at IS NULL AND sha256 = $1 LIMIT 1",
        sha256.0.as_slice()
    )
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
    delete_artefact_rows(tx, sha256).await?;
    let before: Value = json!({ "sha256": found.sha256, "name": found.name, "size": found.size });
    let text = format!("is removed ({}); machines that have fetched it keep it", found.sha256);
    Ok(OrderEffect::changed(text, Some(before), None))
}
