//! Roles that operators declare to clusters.
//!
//! A declaration is checked before it comes here, and kept as it is put to the curators. Whoever holds the cluster's lease
//! puts it there; a role that is withdrawn stays until no curator has it. It is no secret: whoever may look at clusters may
//! read it, and so may whoever reads the database.

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::action::Done;
use crate::bmdb::audit::{Carried, Order, begin_attempt, end_attempt, given_before, write_down};
use crate::bmdb::cluster::locked;
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::lease::{NamedLease, lock_lease};
use crate::model::cluster::declared::{DeclarationView, MOST_DECLARED, check_size, digest, encoded};
use crate::model::declaration::Declaration;

const WHAT: &str = "reading declarations";

/// Roles that were declared to a cluster, in order of their names.
pub(crate) async fn declarations(
    tx: &mut PgConnection,
    cluster: Uuid,
) -> Result<Vec<DeclarationView>, BmdbError> {
    let rows =
        sqlx::query_file!("sql/cluster/list_declarations.sql", cluster).fetch_all(tx).await.doing(WHAT)?;
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
    pub async fn declare_in_cluster(
        &self,
        order: Order,
        name: String,
        declaration: Declaration,
    ) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered("declaring a role", move |tx| {
                let (order, name, declaration) = (order.clone(), name.clone(), declaration.clone());
                Box::pin(async move { declare(tx, &order, &name, &declaration).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// Withdraws the declaration of a role that no worker is to have.
    pub async fn undeclare_in_cluster(
        &self,
        order: Order,
        name: String,
        role: String,
    ) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered("withdrawing a role", move |tx| {
                let (order, name, role) = (order.clone(), name.clone(), role.clone());
                Box::pin(async move { undeclare(tx, &order, &name, &role).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// A declaration as it is put to the curators; none when it is withdrawn.
    pub async fn declaration_for_curators(
        &self,
        cluster: Uuid,
        role: &str,
    ) -> Result<Option<Vec<u8>>, BmdbError> {
        let role = role.to_owned();
        self.statement(WHAT, move |pool| {
            let role = role.clone();
            Box::pin(async move {
                sqlx::query_file_scalar!("sql/cluster/read_declaration.sql", cluster, role)
                    .fetch_optional(pool)
                    .await
            })
        })
        .await
    }

    /// Forgets a withdrawn role.
    pub async fn forget_declaration(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        role: &str,
    ) -> Result<(), BmdbError> {
        let (lease, role, doing) = (lease.clone(), role.to_owned(), "forgetting a role");
        self.transact(doing, move |tx| {
            let (lease, role) = (lease.clone(), role.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                sqlx::query_file!("sql/cluster/delete_withdrawn_declaration.sql", cluster, role)
                    .execute(tx)
                    .await
                    .doing(doing)?;
                Ok(())
            })
        })
        .await
    }
}

async fn declare(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    declaration: &Declaration,
) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    check_size(declaration.to_wire())
        .map_err(|said| BmdbError::OrderRefused { reason: "DECLARATION_TOO_LARGE", said })?;
    let (id, spec) = locked(tx, name).await?;
    let role = declaration.role().to_string();
    let known = declarations(tx, id).await?;
    let before = known.iter().find(|known| known.role == role && !known.withdrawn);
    let digest = digest(declaration.to_wire());
    if before.is_some_and(|before| before.digest == hex::encode(digest)) {
        let said = format!("declares {role} so already; nothing was changed");
        let same = before.map(told);
        return write_down(tx, order, None, Done { changed: false, said }, same.clone(), same).await;
    }
    if before.is_none() && known.len() >= MOST_DECLARED {
        let said = format!("the cluster {name} has {MOST_DECLARED} roles declared, and can have no more");
        return Err(BmdbError::OrderRefused { reason: "TOO_MANY_ROLES", said });
    }
    begin_attempt(tx, order).await?;
    let services: Vec<&str> = declaration.in_start_order().map(|service| service.name.as_str()).collect();
    let encoded = encoded(declaration.to_wire());
    let kept = digest.as_slice();
    let by = &order.actor.name;
    sqlx::query_file!("sql/cluster/upsert_declaration.sql", id, role, encoded, kept, json!(services), by)
        .execute(&mut *tx)
        .await
        .doing("declaring a role")?;
    sqlx::query_file!("sql/cluster/increment_version.sql", id)
        .execute(&mut *tx)
        .await
        .doing("declaring a role")?;
    end_attempt(tx, order).await?;
    let next = if spec.roles.contains(&role) {
        format!(
            "its workers act on it once its curators were told; watch them with: shepherdctl cluster describe {name}"
        )
    } else {
        format!("have its workers run it with: shepherdctl cluster roles {name} --give {role}")
    };
    let said = format!("declares {role}, which runs {}; {next}", services.join(", "));
    let after = json!({ "cluster": name, "role": role, "services": services, "digest": hex::encode(digest) });
    write_down(tx, order, None, Done { changed: true, said }, before.map(told), Some(after)).await
}

async fn undeclare(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    role: &str,
) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let (id, spec) = locked(tx, name).await?;
    if spec.roles.contains(role) {
        let said = format!(
            "role {role} was not withdrawn: the workers of cluster {name} are to have it; take it first with: \
             shepherdctl cluster roles {name} --take {role}"
        );
        return Err(BmdbError::OrderRefused { reason: "ROLE_IN_USE", said });
    }
    let known = declarations(tx, id).await?;
    let Some(before) = known.iter().find(|known| known.role == role && !known.withdrawn) else {
        let said = format!("declares no role {role:?}; nothing was changed");
        return write_down(tx, order, None, Done { changed: false, said }, None, None).await;
    };
    begin_attempt(tx, order).await?;
    sqlx::query_file_scalar!("sql/cluster/withdraw_declaration.sql", id, role)
        .fetch_optional(&mut *tx)
        .await
        .doing("withdrawing a role")?;
    sqlx::query_file!("sql/cluster/increment_version.sql", id)
        .execute(&mut *tx)
        .await
        .doing("withdrawing a role")?;
    end_attempt(tx, order).await?;
    let said = format!("declares {role} no more; its curators forget it once no node has it");
    write_down(tx, order, None, Done { changed: true, said }, Some(told(before)), None).await
}

/// A declaration as the audit says it: its text may be long, and its digest tells it from every other one.
fn told(declared: &DeclarationView) -> Value {
    json!({ "role": declared.role, "services": declared.services, "digest": declared.digest })
}
