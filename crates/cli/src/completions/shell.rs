//! Shells that complete command lines: the script that registers this program, and the form of candidates.

use clap::ValueEnum;
use clap_complete::env::{Bash, EnvCompleter, Fish, Zsh};

const PROGRAM: &str = "shepherdctl";
/// The variable with the name of the shell, in the environment of a process that completes.
pub(super) const SHELL_VARIABLE: &str = "COMPLETE";

/// Completes at once when zsh loads the script by its name, from a directory of `fpath`. The script is then the body of
/// the function that zsh calls.
const ZSH_AUTOLOAD: &str = "\
if [[ \"${funcstack[1]}\" = \"_shepherdctl\" ]]; then
    _clap_dynamic_completer_shepherdctl \"$@\"
fi
";

/// A shell that can complete command lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CompletionShell {
    /// Bash, the GNU shell
    Bash,
    /// Zsh, the Z shell
    Zsh,
    /// Fish, the friendly interactive shell
    Fish,
}

/// A word that a shell may offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The word, not quoted.
    pub word: String,
    /// One line about it, for shells that show such; `None` for names.
    pub help: Option<String>,
}

impl Candidate {
    /// A word without a description.
    #[must_use]
    pub const fn of_word(word: String) -> Self {
        Self { word, help: None }
    }
}

impl CompletionShell {
    /// The shell that the environment of a process names.
    pub(super) fn find(name: &str) -> Option<Self> {
        Self::from_str(name, false).ok()
    }

    /// The script that registers this program with the shell.
    #[must_use]
    pub fn registration_script(self) -> String {
        let (completer, appendix): (&dyn EnvCompleter, &str) = match self {
            Self::Bash => (&Bash, ""),
            Self::Zsh => (&Zsh, ZSH_AUTOLOAD),
            Self::Fish => (&Fish, ""),
        };
        let mut script = Vec::new();
        // Writing to memory does not fail.
        let _ = completer.write_registration(SHELL_VARIABLE, PROGRAM, PROGRAM, PROGRAM, &mut script);
        format!("{}{appendix}", String::from_utf8_lossy(&script).trim_start())
    }

    /// A candidate as the shell reads it. `is_quoted` is whether the user has begun the word with a quote.
    pub(super) fn format(self, candidate: &Candidate, is_quoted: bool) -> String {
        let Candidate { word, help } = candidate;
        match (self, help) {
            (Self::Bash, _) if is_quoted => word.clone(),
            (Self::Bash, _) => escape_for_bash(word),
            (Self::Zsh, None) => escape_for_zsh(word).replace(':', "\\:"),
            (Self::Zsh, Some(help)) => {
                format!("{}:{}", escape_for_zsh(word).replace(':', "\\:"), escape_for_zsh(help))
            }
            (Self::Fish, None) => word.clone(),
            (Self::Fish, Some(help)) => format!("{word}\t{help}"),
        }
    }
}

/// Bash puts a candidate into the line as it is, so what it would expand or split gets a backslash.
fn escape_for_bash(word: &str) -> String {
    let mut escaped = String::with_capacity(word.len());
    for c in word.chars() {
        if c.is_ascii() && !c.is_ascii_alphanumeric() && !"-_./:=,@%+~^".contains(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

/// Zsh quotes candidates itself, and reads a colon as the end of one.
fn escape_for_zsh(text: &str) -> String {
    text.replace('\\', "\\\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn script_registers_the_program_by_its_name() {
        for (shell, registers) in [
            (CompletionShell::Bash, "-F _clap_complete_shepherdctl shepherdctl\n"),
            (CompletionShell::Zsh, "compdef _clap_dynamic_completer_shepherdctl shepherdctl\n"),
            (CompletionShell::Fish, "--command shepherdctl "),
        ] {
            let script = shell.registration_script();
            assert!(script.contains(registers), "{shell:?}: {script}");
            let name = format!("{shell:?}").to_lowercase();
            let variable = format!("COMPLETE={name}");
            assert!(
                script.contains(&variable) || script.contains(&format!("COMPLETE=\"{name}\"")),
                "{script}"
            );
            assert_eq!(CompletionShell::find(&name), Some(shell));
        }
        let zsh = CompletionShell::Zsh.registration_script();
        assert!(zsh.starts_with("#compdef shepherdctl\n"), "compinit reads the first line: {zsh}");
        for other in ["", "0", "1", "/bin/bash", "powershell"] {
            assert_eq!(CompletionShell::find(other), None, "{other}");
        }
    }

    #[test]
    fn candidate_is_one_word_for_each_shell() {
        let artefact = Candidate::of_word("roleserver 1.4".to_owned());
        let flag = Candidate { word: "--bmdb-url".to_owned(), help: Some("Where: URL".to_owned()) };
        let key = Candidate::of_word("SHA256:a$b".to_owned());
        for (shell, candidate, is_quoted, expected) in [
            (CompletionShell::Bash, &artefact, false, "roleserver\\ 1.4"),
            (CompletionShell::Bash, &artefact, true, "roleserver 1.4"),
            (CompletionShell::Bash, &flag, false, "--bmdb-url"),
            (CompletionShell::Bash, &key, false, "SHA256:a\\$b"),
            (CompletionShell::Zsh, &artefact, false, "roleserver 1.4"),
            (CompletionShell::Zsh, &flag, false, "--bmdb-url:Where: URL"),
            (CompletionShell::Zsh, &key, false, "SHA256\\:a$b"),
            (CompletionShell::Fish, &artefact, false, "roleserver 1.4"),
            (CompletionShell::Fish, &flag, false, "--bmdb-url\tWhere: URL"),
        ] {
            assert_eq!(shell.format(candidate, is_quoted), expected, "{shell:?}");
        }
    }
}
