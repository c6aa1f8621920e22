//! Certificates of people for API servers: orders for them, and what came of each.
//!
//! No key is ever here, and a certificate is no secret: whoever reads it can do nothing with it. An order only writes down
//! what is wanted; whoever holds the cluster's lease has it signed by the curators.

use serde_json::json;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::action::Done;
use crate::bmdb::audit::{Carried, Order, begin_attempt, end_attempt, given_before, write_down};
use crate::bmdb::cluster::{clusters, locked, no_such};
use crate::bmdb::cluster_kubernetes::{refused, running};
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect;
#[cfg(feature = "shepherd")]
use crate::bmdb::lease::{NamedLease, lock_lease};
use crate::model::cluster::credential::check_holder;
use crate::model::cluster::kubernetes_user::{
    Access, Issued, MOST, User, UserView, check_key, check_lifetime, to_forget, view,
};
use crate::model::time::{Span, Timestamp};

const WHAT: &str = "reading certificates for API servers";
const ASKING: &str = "asking for a certificate for API servers";

/// A certificate to ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewUser {
    /// The key, `SubjectPublicKeyInfo`, DER.
    pub public_key: Vec<u8>,
    /// Whose it is to be.
    pub holder: String,
    /// What that one may do.
    pub access: Access,
    /// How long it is to be good.
    pub lifetime: Span,
}

async fn read(tx: &mut PgConnection, cluster: Uuid) -> Result<Vec<User>, BmdbError> {
    let rows = sqlx::query_file!("sql/kubernetes/list_users.sql", cluster).fetch_all(tx).await.doing(WHAT)?;
    let read = rows.into_iter().map(|row| {
        let odd = |error: &dyn std::fmt::Display| {
            BmdbError::Corrupt(format!("the certificate {} for API servers: {error}", row.user_id))
        };
        let issued = match (row.certificate, row.servers, row.api_servers, row.expires_at) {
            (Some(certificate), Some(servers), Some(api_servers), Some(expires_at)) => {
                let servers: Vec<String> = serde_json::from_value(servers).map_err(|error| odd(&error))?;
                let servers = servers.iter().map(hex::decode).collect::<Result<_, _>>();
                Some(Issued {
                    certificate,
                    servers: servers.map_err(|error| odd(&error))?,
                    api_servers: serde_json::from_value(api_servers).map_err(|error| odd(&error))?,
                    expires_at,
                })
            }
            _ => None,
        };
        Ok(User {
            id: row.user_id,
            public_key: row.public_key,
            holder: row.holder,
            access: row.access.parse().map_err(|error| odd(&error))?,
            lifetime: Span::seconds(row.lifetime_seconds.try_into().unwrap_or(0)),
            asked_at: row.asked_at,
            asked_by: row.asked_by,
            issued,
            refused: row.refused,
        })
    });
    read.collect()
}

/// Those of the cluster of that name, newest first; and when they were read.
pub async fn kubernetes_users(
    tx: &mut PgConnection,
    name: &str,
) -> Result<(Vec<UserView>, Timestamp), BmdbError> {
    let cluster = clusters(tx, Some(name)).await?.pop().ok_or_else(|| no_such(name))?;
    let found = read(tx, cluster.id).await?;
    let at = inspect::now(tx).await?;
    Ok((found.iter().map(|user| view(user, at)).collect(), at))
}

impl Bmdb {
    /// Has a certificate for API servers signed soon for a person's key.
    pub async fn ask_for_kubernetes_user(
        &self,
        order: Order,
        name: String,
        new: NewUser,
    ) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered(ASKING, move |tx| {
                let (order, name, new) = (order.clone(), name.clone(), new.clone());
                Box::pin(async move { ask(tx, &order, &name, &new).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// The certificates of a cluster, and when they were read.
    #[cfg(feature = "shepherd")]
    pub async fn cluster_kubernetes_users(&self, cluster: Uuid) -> Result<(Vec<User>, Timestamp), BmdbError> {
        self.inspect(move |tx| {
            Box::pin(async move { Ok((read(tx, cluster).await?, inspect::now(tx).await?)) })
        })
        .await
    }

    /// Writes down what the curators signed.
    #[cfg(feature = "shepherd")]
    pub async fn kubernetes_user_issued(
        &self,
        lease: &NamedLease,
        user: Uuid,
        issued: Issued,
    ) -> Result<(), BmdbError> {
        let (lease, doing) = (lease.clone(), "keeping a certificate for API servers");
        self.transact(doing, move |tx| {
            let (lease, issued) = (lease.clone(), issued.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                let servers: Vec<String> = issued.servers.iter().map(hex::encode).collect();
                sqlx::query_file!(
                    "sql/kubernetes/record_user_issued.sql",
                    user,
                    issued.certificate,
                    json!(servers),
                    json!(issued.api_servers),
                    issued.expires_at
                )
                .execute(tx)
                .await
                .doing(doing)?;
                Ok(())
            })
        })
        .await
    }

    /// Writes down that the curators do not sign it, and why.
    #[cfg(feature = "shepherd")]
    pub async fn kubernetes_user_refused(
        &self,
        lease: &NamedLease,
        user: Uuid,
        said: &str,
    ) -> Result<(), BmdbError> {
        let doing = "writing down that no certificate for API servers is signed";
        let (lease, said) = (lease.clone(), said.to_owned());
        self.transact(doing, move |tx| {
            let (lease, said) = (lease.clone(), said.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                sqlx::query_file!("sql/kubernetes/record_user_rejected.sql", user, said)
                    .execute(tx)
                    .await
                    .doing(doing)?;
                Ok(())
            })
        })
        .await
    }
}

async fn ask(tx: &mut PgConnection, order: &Order, name: &str, new: &NewUser) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    check_key(&new.public_key).map_err(|said| refused("NO_KEY", said))?;
    check_holder(&new.holder).map_err(|said| refused("NO_HOLDER", said))?;
    check_lifetime(new.lifetime).map_err(|said| refused("NO_LIFETIME", said))?;
    let (cluster, _) = locked(tx, name).await?;
    running(tx, cluster, name).await?;
    let known = read(tx, cluster).await?;
    if let Some(known) = known.iter().find(|known| known.public_key == new.public_key) {
        let said = format!(
            "certificate {} was asked for with the same key; make another key for another certificate",
            known.id
        );
        return Err(refused("KEY_IN_USE", said));
    }
    let old = to_forget(&known, inspect::now(tx).await?);
    if known.len() - old.len() >= MOST {
        let said = format!(
            "the cluster {name} has {MOST} certificates for its API servers that are not forgotten yet, and can have no more; \
             each is forgotten a day after its end"
        );
        return Err(refused("TOO_MANY_CREDENTIALS", said));
    }
    begin_attempt(tx, order).await?;
    if !old.is_empty() {
        sqlx::query_file!("sql/kubernetes/delete_users_by_id.sql", &old)
            .execute(&mut *tx)
            .await
            .doing(ASKING)?;
    }
    let id = Uuid::now_v7();
    sqlx::query_file!(
        "sql/kubernetes/insert_user.sql",
        id,
        cluster,
        new.public_key,
        new.holder,
        new.access.as_str(),
        i64::try_from(new.lifetime.0.as_secs()).unwrap_or(i64::MAX),
        order.actor.name
    )
    .execute(&mut *tx)
    .await
    .doing(ASKING)?;
    end_attempt(tx, order).await?;
    let said = format!(
        "has a certificate for its API servers signed for {} ({}) as soon as its curators answer, good for {}",
        new.holder, new.access, new.lifetime
    );
    let after = json!({
        "user": id, "holder": new.holder, "access": new.access.as_str(),
        "public_key": hex::encode(&new.public_key), "lifetime": new.lifetime,
    });
    write_down(tx, order, None, Done { changed: true, said }, None, Some(after)).await
}
