//! Backend selection: the fleet API of a context, or the same services in this process, over a connection to the BMDB.
//!
//! The BMDB is used if the command names it (`--direct`, or a URL without a context). Then nothing but the database
//! has to be up. With a named context, or with a current one, the command uses the API.

use crate::error::CliError;

/// Where the name of the context comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContextSource {
    /// Neither flag nor environment names a context.
    Unset,
    /// The environment names it, for every command alike.
    ByEnvironment,
    /// `--context` names it, for this command.
    ByFlag,
}

/// The choice of a backend in flags and environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendFlags {
    /// Whether `--direct` is given.
    pub direct: bool,
    /// Whether a BMDB URL is given, by flag or environment.
    pub bmdb: bool,
    /// Where the name of the context comes from.
    pub context: ContextSource,
    /// Whether the contexts file has a current context.
    pub has_current_context: bool,
}

/// The kind of backend that [`choose_backend`] selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendKind {
    /// The BMDB, accessed directly.
    Direct,
    /// The fleet API of a context.
    Api,
}

/// Selects the backend. The error names what is missing.
pub fn choose_backend(args: BackendFlags) -> Result<BackendKind, CliError> {
    match args {
        BackendFlags { direct: true, context: ContextSource::ByFlag, .. } => Err(CliError::Invalid(
            "--direct uses the database and --context an API; give only one of them".to_owned(),
        )),
        BackendFlags { direct: true, bmdb: false, .. } => Err(CliError::Invalid(
            "--direct uses the database; name it by --bmdb-url postgres://USER@HOST:5432/DATABASE, or in the \
             environment as SHEPHERD_BMDB_URL"
                .to_owned(),
        )),
        BackendFlags { direct: true, .. } => Ok(BackendKind::Direct),
        BackendFlags { context: ContextSource::ByFlag | ContextSource::ByEnvironment, .. } => Ok(BackendKind::Api),
        BackendFlags { bmdb: true, .. } => Ok(BackendKind::Direct),
        BackendFlags { has_current_context: true, .. } => Ok(BackendKind::Api),
        _ => Err(CliError::Invalid(
            "no BMDB is named: give --bmdb-url postgres://USER@HOST:5432/DATABASE, or the same in the environment \
             as SHEPHERD_BMDB_URL, or create a context with `shepherdctl tokens bootstrap --save-context NAME`"
                .to_owned(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explicit_flags_decide_the_backend() {
        for (direct, bmdb, context, current, expected) in [
            (true, true, ContextSource::Unset, true, Some(BackendKind::Direct)),
            (true, false, ContextSource::Unset, true, None),
            (true, true, ContextSource::ByFlag, true, None),
            // The environment is for every command, `--direct` for this one.
            (true, true, ContextSource::ByEnvironment, true, Some(BackendKind::Direct)),
            (true, false, ContextSource::ByEnvironment, true, None),
            (false, true, ContextSource::ByFlag, false, Some(BackendKind::Api)),
            (false, true, ContextSource::ByEnvironment, false, Some(BackendKind::Api)),
            (false, true, ContextSource::Unset, true, Some(BackendKind::Direct)),
            (false, false, ContextSource::Unset, true, Some(BackendKind::Api)),
            (false, false, ContextSource::Unset, false, None),
        ] {
            let args = BackendFlags { direct, bmdb, context, has_current_context: current };
            assert_eq!(choose_backend(args).ok(), expected, "{args:?}");
        }
    }
}
