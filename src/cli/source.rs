//! Whom a command asks: a fleet's API, or the BMDB itself.
//!
//! The BMDB is asked where it is named (`--direct`, or a URL without a context): then nothing but the
//! database has to be up. A context that is named, or the current one, is asked through the API.

use crate::bmdb::connection::Bmdb;
use crate::cli::error::CliError;
use crate::cli::remote::Remote;

/// Whom a command asks; cheap to clone.
#[derive(Clone)]
pub enum Source {
    /// The database.
    Direct(Bmdb),
    /// The API.
    Api(Remote),
}

/// How a context is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    /// By nobody.
    Not,
    /// In the environment, for every command alike.
    ByEnvironment,
    /// By `--context`, for this command.
    ByFlag,
}

/// What was said of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// `--direct`.
    pub direct: bool,
    /// A BMDB is named.
    pub bmdb: bool,
    /// A context is named.
    pub context: Named,
    /// There is a current context.
    pub current: bool,
}

/// Whom to ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whom {
    /// The database.
    Direct,
    /// The API.
    Api,
}

/// Decides whom to ask; an error says what is missing.
pub fn whom(asked: Asked) -> Result<Whom, CliError> {
    match asked {
        Asked { direct: true, context: Named::ByFlag, .. } => Err(CliError::Wrong(
            "--direct asks the database, and --context an API; give one of them".to_owned(),
        )),
        Asked { direct: true, bmdb: false, .. } => Err(CliError::Wrong(
            "--direct asks the database itself; name it by --bmdb_url postgres://USER@HOST:5432/DATABASE, or in the \
             environment as SHEPHERD_BMDB_URL"
                .to_owned(),
        )),
        Asked { direct: true, .. } => Ok(Whom::Direct),
        Asked { context: Named::ByFlag | Named::ByEnvironment, .. } => Ok(Whom::Api),
        Asked { bmdb: true, .. } => Ok(Whom::Direct),
        Asked { current: true, .. } => Ok(Whom::Api),
        _ => Err(CliError::Wrong(
            "no BMDB was named: give --bmdb_url postgres://USER@HOST:5432/DATABASE, or the same in the environment \
             as SHEPHERD_BMDB_URL; nor is there a context, which `shepherdctl tokens bootstrap --save_context` makes"
                .to_owned(),
        )),
    }
}

impl Source {
    /// The database, for what only it can be asked.
    pub fn direct(&self, what: &str) -> Result<&Bmdb, CliError> {
        match self {
            Self::Direct(bmdb) => Ok(bmdb),
            Self::Api(_) => Err(CliError::Wrong(format!(
                "{what} is asked of the database itself: give --direct and --bmdb_url postgres://USER@HOST:5432/DATABASE"
            ))),
        }
    }

    /// Ends it.
    pub async fn close(&self) {
        if let Self::Direct(bmdb) = self {
            bmdb.close().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_named_is_asked() {
        for (direct, bmdb, context, current, expected) in [
            (true, true, Named::Not, true, Some(Whom::Direct)),
            (true, false, Named::Not, true, None),
            (true, true, Named::ByFlag, true, None),
            // The environment speaks of every command; `--direct` of this one.
            (true, true, Named::ByEnvironment, true, Some(Whom::Direct)),
            (true, false, Named::ByEnvironment, true, None),
            (false, true, Named::ByFlag, false, Some(Whom::Api)),
            (false, true, Named::ByEnvironment, false, Some(Whom::Api)),
            (false, true, Named::Not, true, Some(Whom::Direct)),
            (false, false, Named::Not, true, Some(Whom::Api)),
            (false, false, Named::Not, false, None),
        ] {
            let asked = Asked { direct, bmdb, context, current };
            assert_eq!(whom(asked).ok(), expected, "{asked:?}");
        }
    }
}
