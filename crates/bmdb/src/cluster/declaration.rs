//! Operator-declared roles of a cluster: declare, withdraw, list.
//!
//! A declaration is checked before it is stored, and stored in the encoding that the curators receive, with its signature,
//! which machines may require. The holder of
//! the cluster's lease sends it to them. A withdrawn role stays until no curator has it any more. A declaration is no
//! secret: everybody who may read clusters may read it, and so may everybody who reads the database.
//!
//! A declaration that gives root on nodes is signed, or another admin approves it
//! ([`model::signed_artefact::declaration_proof`]).

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::cluster::lock::{increment_version, lock_cluster, order_target};
use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _};
use crate::engine::named_lease::NamedLease;
use crate::engine::policy::read_policy_in_tx;
use crate::orders::approval::{append_approver, require_second_approval};
use crate::orders::order::{Order, OrderEffect, OrderResult};
use model::cluster::declaration::{
    DeclarationView, MAX_DECLARED_ROLES, attach_signature, check_declaration_size, declaration_digest,
    encode_declaration,
};
use model::role_declaration::RoleDeclaration;
use model::signed_artefact::declaration_proof::{DeclarationProof, decide_declaration};
use model::signed_artefact::signature::ArtefactSignature;
use model::signed_artefact::signing_trust::SigningTrust;
use model::two_person_rule::SensitiveOrder;

const OPERATION: &str = "reading declarations";

/// A declaration to store, and who signed it.
#[derive(Clone, Debug)]
pub struct NewDeclaration {
    /// The role and its services.
    pub declaration: RoleDeclaration,
    /// Its signature, which the shepherd verified; `None` without one.
    pub signature: Option<ArtefactSignature>,
    /// The keys of the shepherd. Without any, no signature is required.
    pub trust: SigningTrust,
}

impl From<RoleDeclaration> for NewDeclaration {
    /// A declaration that nobody signed, for a shepherd without keys.
    fn from(declaration: RoleDeclaration) -> Self {
        Self { declaration, signature: None, trust: SigningTrust::default() }
    }
}

/// Declared roles of a cluster, in order of their names.
pub(crate) async fn list_declarations(
    tx: &mut PgConnection,
    cluster: Uuid,
) -> Result<Vec<DeclarationView>, BmdbError> {
    let rows = sqlx::query!(
        "SELECT role, digest, services, declared_at, declared_by, withdrawn_at
         FROM cluster_declaration WHERE cluster_id = $1
         ORDER BY role",
        cluster
    )
    .fetch_all(tx)
    .await
    .context(OPERATION)?;
    Ok(rows
        .into_iter()
        .map(|row| DeclarationView {
            role: row.role,
            services: serde_json::from_value(row.services).unwrap_or_default(),
            digest: hex::encode(row.digest),
            declared_at: row.declared_at,
            declared_by: row.declared_by,
            withdrawn: row.withdrawn_at.is_some(),
        })
        .collect())
}

impl Bmdb {
    /// Declares a role to a cluster, or replaces its declaration.
    pub async fn declare_cluster_role(
        &self,
        order: Order,
        name: String,
        new: NewDeclaration,
    ) -> Result<OrderResult, BmdbError> {
        let what = "declaring a role";
        self.execute_order(what, order, None, (name, new), |tx, order, (name, new)| {
            Box::pin(declare_role_in_tx(tx, order, name, new))
        })
        .await
    }

    /// Withdraws a declaration, so that no worker has the role any more.
    pub async fn undeclare_cluster_role(
        &self,
        order: Order,
        name: String,
        role: String,
    ) -> Result<OrderResult, BmdbError> {
        self.execute_order("withdrawing a role", order, None, (name, role), |tx, _, (name, role)| {
            Box::pin(undeclare_role_in_tx(tx, name, role))
        })
        .await
    }

    /// A declaration as it is sent to the curators; `None` if it is withdrawn.
    pub async fn encoded_declaration(&self, cluster: Uuid, role: &str) -> Result<Option<Vec<u8>>, BmdbError> {
        self.statement_with(OPERATION, role.to_owned(), move |pool, role| {
            Box::pin(
                sqlx::query_scalar!(
                    "SELECT declaration FROM cluster_declaration
                     WHERE cluster_id = $1 AND role = $2 AND withdrawn_at IS NULL",
                    cluster,
                    role
                )
                .fetch_optional(pool),
            )
        })
        .await
    }

    /// Deletes a withdrawn role.
    pub async fn delete_declaration(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        role: &str,
    ) -> Result<(), BmdbError> {
        let role = role.to_owned();
        self.execute_under_lease("forgetting a role", lease, move || {
            sqlx::query!(
                "DELETE FROM cluster_declaration
                 WHERE cluster_id = $1 AND role = $2 AND withdrawn_at IS NOT NULL",
                cluster,
                role
            )
        })
        .await
    }
}

async fn declare_role_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    new: &NewDeclaration,
) -> Result<OrderEffect, BmdbError> {
    let declaration = &new.declaration;
    // Only a signature that the shepherd verified is stored.
    let signature = new.signature.as_ref().map(ArtefactSignature::as_str).unwrap_or_default();
    let stored = attach_signature(declaration.to_wire(), signature);
    check_declaration_size(&stored).map_err(|reason| order_rejected("DECLARATION_TOO_LARGE", reason))?;
    let (id, spec) = lock_cluster(tx, name).await?;
    let role = declaration.role().to_string();
    let known = list_declarations(tx, id).await?;
    let before = known.iter().find(|known| known.role == role && !known.withdrawn);
    let digest = declaration_digest(&stored);
    if before.is_some_and(|before| before.digest == hex::encode(digest)) {
        let text = format!("already declares {role} in this way; nothing was changed");
        let same = before.map(audit_json);
        return Ok(OrderEffect::already(text, same));
    }
    if before.is_none() && known.len() >= MAX_DECLARED_ROLES {
        let text = format!("the cluster {name} declares {MAX_DECLARED_ROLES} roles, which is the maximum");
        return Err(order_rejected("TOO_MANY_ROLES", text));
    }
    let by = approve_privileges(tx, order, (id, name), new).await?;
    let services: Vec<&str> = declaration.in_start_order().map(|service| service.name.as_str()).collect();
    let encoded = encode_declaration(&stored);
    let kept = digest.as_slice();
    sqlx::query_file!(
        "../../sql/cluster/upsert_declaration.sql",
        id,
        role,
        encoded,
        kept,
        json!(services),
        order.actor.name
    )
    .execute(&mut *tx)
    .await
    .context("declaring a role")?;
    increment_version(tx, id, "declaring a role").await?;
    let next = if spec.roles.contains(&role) {
        format!(
            "its workers act on the declaration once its curators have received it; watch the workers with: \
             shepherdctl cluster describe {name}"
        )
    } else {
        format!("give it to the workers with: shepherdctl cluster roles {name} --add-role {role}")
    };
    let signed = new.signature.as_ref().map(|signature| format!(" signed with key {},", signature.key_id()));
    let signed = signed.unwrap_or_default();
    let output = format!("declares {role},{signed} which runs {}; {next}", services.join(", "));
    let output = append_approver(output, by.as_deref());
    let mut after =
        json!({ "cluster": name, "role": role, "services": services, "digest": hex::encode(digest) });
    if let Some(signature) = &new.signature {
        after["signing_key_id"] = json!(signature.key_id().to_string());
        after["signed_comment"] = json!(signature.fields().to_string());
    }
    Ok(OrderEffect::changed(output, before.map(audit_json), Some(after)))
}

/// A declaration that gives root on nodes is signed. Where the two-person rule is on, a second admin approves it otherwise,
/// who reads what it requests. Returns who approved it.
async fn approve_privileges(
    tx: &mut PgConnection,
    order: &Order,
    (cluster, name): (Uuid, &str),
    new: &NewDeclaration,
) -> Result<Option<String>, BmdbError> {
    let (role, privileges) = (new.declaration.role(), new.declaration.list_privileges());
    if privileges.is_empty() {
        return Ok(None);
    }
    let privileges = privileges.join(", ");
    let policy = read_policy_in_tx(tx).await?;
    let rule = policy.two_person_rule;
    let is_signed = new.signature.is_some();
    match decide_declaration(is_signed, &new.trust, rule.required, policy.allow_unsigned_releases) {
        DeclarationProof::Signed => return Ok(None),
        DeclarationProof::TwoPersonRule => {}
        DeclarationProof::SignatureRequired => {
            let text = format!(
                "role {role} was not declared: {privileges}, which gives root on nodes, and it is not signed; write what to \
                 sign with --output-file FILE, sign that file with minisign, and declare the role with --signature \
                 FILE.minisig"
            );
            return Err(order_rejected("NOT_SIGNED", text));
        }
    }
    let target = format!("{}: the role {role}, in which {privileges}", order_target(name));
    let shown = Order { target, ..order.clone() };
    // This cluster, and no later one of its name.
    require_second_approval(tx, &shown, SensitiveOrder::DeclarePrivileged, rule, cluster.as_bytes()).await
}

async fn undeclare_role_in_tx(
    tx: &mut PgConnection,
    name: &str,
    role: &str,
) -> Result<OrderEffect, BmdbError> {
    let (id, spec) = lock_cluster(tx, name).await?;
    if spec.roles.contains(role) {
        let text = format!(
            "role {role} was not withdrawn: the workers of cluster {name} have it; remove it from them first with: \
             shepherdctl cluster roles {name} --remove-role {role}"
        );
        return Err(order_rejected("ROLE_IN_USE", text));
    }
    let known = list_declarations(tx, id).await?;
    let Some(before) = known.iter().find(|known| known.role == role && !known.withdrawn) else {
        let text = format!("declares no role {role:?}; nothing was changed");
        return Ok(OrderEffect::already(text, None));
    };
    sqlx::query_scalar!(
        "UPDATE cluster_declaration SET withdrawn_at = clock_timestamp()
         WHERE cluster_id = $1 AND role = $2 AND withdrawn_at IS NULL
         RETURNING role",
        id,
        role
    )
    .fetch_optional(&mut *tx)
    .await
    .context("withdrawing a role")?;
    increment_version(tx, id, "withdrawing a role").await?;
    let text = format!("no longer declares {role}; its curators delete it once no node has it");
    Ok(OrderEffect::changed(text, Some(audit_json(before)), None))
}

/// A declaration as the audit stores it: its text may be long, and the digest distinguishes it from every other one.
fn audit_json(declared: &DeclarationView) -> Value {
    json!({ "role": declared.role, "services": declared.services, "digest": declared.digest })
}
