//! Command line of `shepherd`: the arguments of the process, and those of the configuration file that they name.

use std::ffi::OsString;

use crate::model::configuration_value::locate_problem;
use crate::model::usage_error::{flag_name, format_usage_error};
use crate::service::configuration::{self, ConfigurationFile};
use crate::service::failure::ExitFailure;
use crate::service::flags::{self, ShepherdFlags};

/// Parses the command line and the configuration file that it names. Arguments of the file come before those of the
/// command line. Returns `None` after help or the version was printed.
pub(super) fn parse_command_line(
    given: &[OsString],
) -> Result<Option<(ShepherdFlags, ConfigurationFile)>, ExitFailure> {
    let command = flags::build_command();
    let mut file = ConfigurationFile::default();
    let mut arguments = given.to_vec();
    // A subcommand is only valid as the first argument: flags of the service cannot be combined with it.
    let is_service = given.get(1).is_none_or(|word| command.find_subcommand(word).is_none());
    let path = if is_service { configuration::configuration_path(given) } else { None };
    if let Some(path) = &path {
        file = configuration::read_configuration(path, given)?;
        arguments.splice(1.min(given.len())..1.min(given.len()), file.arguments.iter().cloned());
    }
    match flags::parse_flags(arguments) {
        Ok(flags) => Ok(Some((flags, file))),
        Err(error) if !error.use_stderr() => {
            // --help and --version. A reader that closes the pipe early is no failure.
            let _ = error.print();
            Ok(None)
        }
        Err(error) => {
            let problem = format_usage_error(&error, &command, given);
            let problem = match path.filter(|_| is_from_file(&error, &file, given)) {
                None => problem,
                Some(path) => {
                    let flag = flag_name(&error).unwrap_or_default();
                    let located = locate_problem(&file.lines, flag.trim_start_matches('-'), &problem);
                    format!("the configuration file {}: {located}", path.display())
                }
            };
            Err(ExitFailure::usage(problem))
        }
    }
}

/// Whether the flag that an error is about was set by the file and not on the command line.
fn is_from_file(error: &clap::Error, file: &ConfigurationFile, given: &[OsString]) -> bool {
    let names = |arguments: &[OsString], flag: &str| {
        arguments.iter().any(|argument| {
            argument.to_str().and_then(|text| text.split('=').next()).is_some_and(|name| name == flag)
        })
    };
    flag_name(error).is_some_and(|flag| names(&file.arguments, &flag) && !names(given, &flag))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_is_the_files_only_if_the_file_alone_sets_the_flag() {
        let wrong = OsString::from("--shutdown_grace=soon");
        let program = OsString::from("shepherd");
        let file = ConfigurationFile { arguments: vec![wrong.clone()], ..ConfigurationFile::default() };
        let without_flag = [program.clone()];
        let with_flag = [program, wrong];
        let error = flags::parse_flags(with_flag.to_vec()).unwrap_err();
        assert!(is_from_file(&error, &file, &without_flag));
        assert!(!is_from_file(&error, &file, &with_flag));
        assert!(!is_from_file(&error, &ConfigurationFile::default(), &without_flag));
    }
}
