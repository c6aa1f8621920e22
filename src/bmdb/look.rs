//! Looking at the BMDB for somebody on the network, so that it costs the fleet nothing it would notice.
//!
//! What is read for the API goes through a pool of its own, of few connections: who asks too much waits for
//! others who ask, and never for the loops, nor they for him. A look is one moment of the database, takes
//! no locks, and holds its snapshot for five seconds at the most: it may take half of that, and the
//! statement that is under way then, or the silence of a host that stalls, as long again.
//!
//! What is computed of all machines is read by the same handle in pages, each a statement that ends as soon
//! ([`Looks::bmdb`], `fleet_view.rs`).
//!
//! A look that takes longer is given up, and begun anew with another snapshot. Its limit is one of the clock
//! on the wall, and a host that is busy for a moment must not make the API say that it cannot answer.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use sqlx::{Executor as _, PgConnection};
use tokio::time::Instant;

use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;

pub mod reached;

const BEGIN: &str = include_str!("../../sql/inspect/begin_read_only_short.sql");
const WHAT: &str = "reading what to show";
/// How long a look may take, the limit that `inspect/begin_read_only_short.sql` sets for each of its statements.
const LIMIT: Duration = Duration::from_millis(2500);
/// How often a look that took longer is begun anew.
const TRIED_AGAIN: u32 = 3;

/// A handle that looks and never writes; cheap to clone.
#[derive(Clone, Debug)]
pub struct Looks {
    bmdb: Bmdb,
}

impl Looks {
    /// A pool of `most` connections to the database of `bmdb`.
    pub async fn connect(bmdb: &Bmdb, most: u32) -> Result<Self, BmdbError> {
        let mut settings = bmdb.settings().clone();
        settings.application.push_str(" api");
        settings.max_connections = most;
        settings.brief = true;
        Ok(Self { bmdb: Bmdb::connect(settings).await? })
    }

    /// Looks by a handle that was connected for it.
    pub(crate) const fn of(bmdb: Bmdb) -> Self {
        Self { bmdb }
    }

    /// The handle itself, for what remembers the policy and for what reads in pages.
    #[must_use]
    pub fn bmdb(&self) -> &Bmdb {
        &self.bmdb
    }

    /// Runs `body` at one moment of the database. It may run several times.
    pub async fn look<T, F>(&self, body: F) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, BmdbError>> + Send + Sync + 'static,
    {
        let body = Arc::new(body);
        let mut again = 0;
        loop {
            match self.look_once(body.clone()).await {
                Err(error) if again < TRIED_AGAIN && took_too_long(&error) => again += 1,
                looked => return looked,
            }
        }
    }

    async fn look_once<T, F>(&self, body: Arc<F>) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, BmdbError>> + Send + Sync + 'static,
    {
        self.bmdb
            .transact(WHAT, move |tx| {
                let body = body.clone();
                Box::pin(async move {
                    tx.execute(sqlx::raw_sql(BEGIN)).await.doing(WHAT)?;
                    let began = Instant::now();
                    match tokio::time::timeout(LIMIT, body(tx)).await {
                        Err(_) => Err(BmdbError::LookedTooLong { limit: LIMIT }),
                        // The server hangs up on a client that stalls, which the client may hear of as an
                        // error of its connection.
                        Ok(Err(error)) if began.elapsed() >= LIMIT && error.is_transient() => {
                            Err(BmdbError::LookedTooLong { limit: LIMIT })
                        }
                        Ok(looked) => looked,
                    }
                })
            })
            .await
    }
}

/// Codes of what the server ended for taking too long: a statement, and a transaction in which nothing was
/// said.
const ENDED: [&str; 2] = ["57014", "25P03"];

/// Whether a look was given up because it took too long.
fn took_too_long(error: &BmdbError) -> bool {
    match error {
        BmdbError::LookedTooLong { .. } => true,
        BmdbError::Statement { source: sqlx::Error::Database(error), .. } => {
            error.code().is_some_and(|code| ENDED.contains(&&*code))
        }
        _ => false,
    }
}

/// A server of the API that is alive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiPlace {
    /// `HOST:PORT` under which it is reached.
    pub endpoints: Vec<String>,
    /// What it is verified against, DER in base64. Empty: the trust store of whoever calls.
    pub ca_certificates: Vec<String>,
}

impl Bmdb {
    /// Every server of the API that is alive, as they say of themselves.
    pub async fn api_servers(&self) -> Result<Vec<ApiPlace>, BmdbError> {
        let found = self
            .statement("looking for servers of the API", |connection| {
                Box::pin(async move {
                    sqlx::query_file_scalar!("sql/session/list_api_servers.sql").fetch_all(connection).await
                })
            })
            .await?;
        let texts = |info: &serde_json::Value, key: &str| -> Vec<String> {
            let listed = info.get(key).and_then(serde_json::Value::as_array).into_iter().flatten();
            listed.filter_map(|text| text.as_str().map(str::to_owned)).collect()
        };
        Ok(found
            .iter()
            .map(|info| ApiPlace {
                endpoints: texts(info, "endpoints"),
                ca_certificates: texts(info, "ca_certificates"),
            })
            .collect())
    }
}
