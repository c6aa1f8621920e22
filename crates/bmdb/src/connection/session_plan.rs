//! Session plan: what every connection is set to, and whether that is in force.
//!
//! A setting that was requested is not a setting in force. A pooler that does not know connection options drops them:
//! `PgBouncer` does with `ignore_startup_parameters = options`, which its users write because it refuses them otherwise.
//! Without its limits a statement waits for a lock for ever. So the settings that correctness depends on are read on
//! each new connection, those that differ are set by a statement, and all are read again. A connection on which one still
//! differs is not used.
//!
//! `CockroachDB` writes its settings in another form, so that they are not compared there. What a connection is in spite of
//! its settings is read in both dialects (`session_state`).

use std::io;
use std::sync::Arc;

use futures::future::BoxFuture;
use sqlx::{Executor as _, PgConnection, Row as _};

use crate::connection::access::Access;
use crate::connection::dialect::Dialect;
use crate::connection::direct::ServerComparison;
use crate::connection::session_state::{SessionDemand, SessionFault, SessionState};
use crate::connection::settings::ConnectionSettings;

/// Reads every setting that a plan may have.
const READ_REQUESTED: &str = include_str!("../../../../sql/connection/read_requested_settings.sql");

/// What each connection of a handle must be; cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct SessionPlan {
    /// Names and values, in the form in which the server writes them.
    settings: Arc<[(&'static str, String)]>,
    demand: Arc<SessionDemand>,
    /// What a direct connection must show; `None` for those of the pool.
    comparison: Option<ServerComparison>,
}

/// A setting that cannot be brought into force.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} is {found:?} on a new connection, and cannot be set to {requested:?}")]
pub(super) struct UnmetSetting {
    pub(super) name: String,
    pub(super) requested: String,
    pub(super) found: String,
}

impl SessionPlan {
    pub(super) fn new(settings: &ConnectionSettings) -> Self {
        let requested = match settings.dialect {
            Dialect::Postgres => settings.session_settings(),
            Dialect::Cockroachdb => Vec::new(),
        };
        let demand = SessionDemand { access: settings.access, dialect: settings.dialect, schema: None };
        Self { settings: requested.into(), demand: demand.into(), comparison: None }
    }

    /// The same plan for connections that must also have the schema of the first one.
    pub(super) fn with_schema(&self, schema: Option<String>) -> Self {
        let demand = SessionDemand { schema, ..(*self.demand).clone() };
        Self { demand: demand.into(), ..self.clone() }
    }

    /// The same plan for connections that must also lead to the server of the pool.
    pub(super) fn with_comparison(&self, comparison: Option<ServerComparison>) -> Self {
        Self { comparison, ..self.clone() }
    }

    /// What the connections are for.
    pub(super) fn access(&self) -> Access {
        self.demand.access
    }

    /// What makes a connection of this state unusable; `None` if nothing does.
    pub(super) fn find_fault(&self, state: &SessionState) -> Option<SessionFault> {
        state.find_fault(&self.demand)
    }

    /// Prepares a new connection. Fails for one that cannot be used.
    pub(super) async fn prepare(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        if let Some(unmet) = self.apply(connection).await? {
            return Err(io::Error::other(unmet).into());
        }
        if let Some(fault) = self.find_fault(&SessionState::read(connection).await?) {
            return Err(io::Error::other(format!("the server {fault}")).into());
        }
        match &self.comparison {
            None => Ok(()),
            Some(comparison) => comparison.require_same_server(connection).await,
        }
    }

    /// What [`Self::prepare`] does, as a condition of a route.
    pub(super) fn acceptance(
        &self,
    ) -> impl for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<(), sqlx::Error>> + Send + Sync + 'static
    {
        let plan = self.clone();
        move |connection| {
            let plan = plan.clone();
            Box::pin(async move { plan.prepare(connection).await })
        }
    }

    /// Whether a new connection has all settings from its options. It is sent no prepared statement and no setting,
    /// which would stay in a session that a pooler gives to others.
    pub(super) async fn is_in_force(&self, connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
        if self.settings.is_empty() {
            return Ok(true);
        }
        let mut found: Vec<(String, Option<String>)> = Vec::new();
        for row in connection.fetch_all(sqlx::raw_sql(READ_REQUESTED)).await? {
            found.push((row.try_get(0)?, row.try_get(1)?));
        }
        Ok(list_unmet(&self.settings, &found).is_empty())
    }

    /// Brings the settings into force. Returns one that cannot be.
    pub(super) async fn apply(
        &self,
        connection: &mut PgConnection,
    ) -> Result<Option<UnmetSetting>, sqlx::Error> {
        let unmet = self.read_unmet(connection).await?;
        if unmet.is_empty() {
            return Ok(None);
        }
        let (names, values): (Vec<String>, Vec<String>) =
            unmet.into_iter().map(|setting| (setting.name, setting.requested)).unzip();
        sqlx::query_file!("../../sql/connection/apply_settings.sql", &names, &values)
            .fetch_all(&mut *connection)
            .await?;
        Ok(self.read_unmet(connection).await?.into_iter().next())
    }

    /// The settings that are not as requested.
    async fn read_unmet(&self, connection: &mut PgConnection) -> Result<Vec<UnmetSetting>, sqlx::Error> {
        if self.settings.is_empty() {
            return Ok(Vec::new());
        }
        let names: Vec<String> = self.settings.iter().map(|(name, _)| (*name).to_owned()).collect();
        let rows =
            sqlx::query_file!("../../sql/connection/read_settings.sql", &names).fetch_all(connection).await?;
        let found: Vec<(String, Option<String>)> =
            rows.into_iter().map(|row| (row.name, row.value)).collect();
        Ok(list_unmet(&self.settings, &found))
    }
}

/// The requested settings that the server reports with another value, or not at all.
fn list_unmet(requested: &[(&'static str, String)], found: &[(String, Option<String>)]) -> Vec<UnmetSetting> {
    let value_of = |name: &str| {
        let row = found.iter().find(|(known, _)| known == name);
        row.and_then(|(_, value)| value.clone()).unwrap_or_default()
    };
    requested
        .iter()
        .map(|(name, requested)| UnmetSetting {
            name: (*name).to_owned(),
            requested: requested.clone(),
            found: value_of(name),
        })
        .filter(|setting| setting.found != setting.requested)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_that_a_plan_may_have_is_read_in_one_statement() {
        let mut settings = ConnectionSettings::from_url("postgres://kim@db/bmdb", "test").unwrap();
        settings.search_path = Some("public".to_owned());
        let plan = SessionPlan::new(&settings);
        assert!(!plan.settings.is_empty());
        for (name, _) in &*plan.settings {
            assert!(READ_REQUESTED.contains(&format!("'{name}'")), "{name} is missing");
        }
    }

    #[test]
    fn setting_that_differs_or_is_missing_is_unmet() {
        let requested = [("lock_timeout", "5s".to_owned()), ("TimeZone", "UTC".to_owned())];
        let row = |name: &str, value: Option<&str>| (name.to_owned(), value.map(str::to_owned));
        for (found, unmet) in [
            (vec![row("lock_timeout", Some("5s")), row("TimeZone", Some("UTC"))], vec![]),
            (vec![row("TimeZone", Some("UTC")), row("lock_timeout", Some("0"))], vec!["lock_timeout"]),
            (vec![row("lock_timeout", None), row("TimeZone", Some("CET"))], vec!["lock_timeout", "TimeZone"]),
            (vec![], vec!["lock_timeout", "TimeZone"]),
        ] {
            let names: Vec<String> =
                list_unmet(&requested, &found).into_iter().map(|setting| setting.name).collect();
            assert_eq!(names, unmet, "{found:?}");
        }
    }
}
