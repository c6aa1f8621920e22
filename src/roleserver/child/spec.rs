//! What is to run.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use ring::digest;
use serde::{Deserialize, Serialize};

use crate::supervisor::name::{Name, NameError};

/// One program, with all that it is started with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Its name on this node, as that of a runnable. Two of one name never run at once.
    pub name: String,
    /// The file to run.
    pub program: PathBuf,
    /// What follows the program's name on its command line.
    pub arguments: Vec<String>,
    /// All of its environment: nothing of the role server's own.
    pub environment: BTreeMap<String, String>,
    /// Where it runs.
    pub directory: PathBuf,
    /// As whom it runs; as the role server itself when none is named.
    pub user: Option<User>,
    /// Further groups that it is in, where a user is named.
    #[serde(default)]
    pub groups: Vec<u32>,
    /// How much it may use.
    pub limits: Limits,
    /// Files that one which was killed leaves behind, and that would keep the next from starting: its sockets. They are
    /// removed before it starts, when nothing of it runs any more.
    pub stale: Vec<PathBuf>,
    /// What the names begin with of programs that it starts and that go on when it ends or is started again. The next one
    /// of it knows them; whoever forgets it ends them.
    #[serde(default)]
    pub spared: Option<String>,
    /// How long it may take to end after SIGTERM, before it is killed.
    pub stop_time: Duration,
}

/// A user and a group, by number: there need not be names for them on a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// Limits of a control group. What is none is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of memory; beyond that the kernel ends something in the group.
    pub memory_bytes: Option<u64>,
    /// Thousandths of one processor.
    pub cpu_millis: Option<u64>,
    /// Processes and threads.
    pub tasks: Option<u64>,
}

/// Why something cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The name is none.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A path is relative: to what, nobody could say.
    #[error("{what} of {name} is {path:?}, which is no absolute path; give one that begins with /")]
    Relative {
        /// Whose.
        name: String,
        /// Which path.
        what: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// Something that the kernel takes no zero byte in has one.
    #[error("{name} has a zero byte in its {what}")]
    Zero {
        /// Whose.
        name: String,
        /// In what.
        what: &'static str,
    },
}

impl Spec {
    /// Whether this can be run at all.
    pub fn check(&self) -> Result<(), SpecError> {
        Name::new(&self.name)?;
        for (what, path) in [("the program", &self.program), ("the directory", &self.directory)] {
            if !path.is_absolute() {
                return Err(SpecError::Relative { name: self.name.clone(), what, path: path.clone() });
            }
        }
        let zero = |text: &String| text.contains('\0');
        let environment =
            self.environment.iter().any(|(key, value)| zero(key) || zero(value) || key.contains('='));
        for (what, has) in [("arguments", self.arguments.iter().any(zero)), ("environment", environment)] {
            if has {
                return Err(SpecError::Zero { name: self.name.clone(), what });
            }
        }
        Ok(())
    }

    /// Tells two of them apart: what runs with one digest is not what another digest asks for. The time that it may take
    /// to end is not part of it, nor what is spared, and neither are limits, which can be changed while it runs, nor further
    /// groups, which are the host's affair.
    #[must_use]
    pub fn digest(&self) -> String {
        let told =
            (&self.name, &self.program, &self.arguments, &self.environment, &self.directory, self.user);
        // Of strings and numbers alone; a path that is no UTF-8 is told by what stands for it.
        let bytes = serde_json::to_vec(&told).unwrap_or_else(|_| format!("{told:?}").into_bytes());
        hex::encode(digest::digest(&digest::SHA256, &bytes))
    }
}

#[cfg(test)]
pub(super) fn sample(name: &str, program: &str, arguments: &[&str]) -> Spec {
    Spec {
        name: name.to_owned(),
        program: program.into(),
        arguments: arguments.iter().map(|&argument| argument.to_owned()).collect(),
        environment: BTreeMap::new(),
        directory: "/".into(),
        user: None,
        groups: Vec::new(),
        limits: Limits::default(),
        stale: Vec::new(),
        spared: None,
        stop_time: Duration::from_secs(10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_tells_apart_what_would_have_to_be_started_anew() {
        let spec = sample("web", "/bin/web", &["a", "b"]);
        assert_eq!(spec.digest(), spec.clone().digest());
        let mut same = spec.clone();
        same.stop_time = Duration::from_secs(1);
        same.limits.memory_bytes = Some(1);
        assert_eq!(spec.digest(), same.digest());
        let others: [fn(&mut Spec); 6] = [
            |spec| spec.name = "web2".into(),
            |spec| spec.program = "/bin/other".into(),
            |spec| spec.arguments = vec!["a b".into()],
            |spec| drop(spec.environment.insert("A".into(), "1".into())),
            |spec| spec.directory = "/tmp".into(),
            |spec| spec.user = Some(User { uid: 1, gid: 1 }),
        ];
        for (number, change) in others.into_iter().enumerate() {
            let mut other = spec.clone();
            change(&mut other);
            assert_ne!(spec.digest(), other.digest(), "{number}");
        }
    }

    #[test]
    fn what_cannot_be_run_is_said() {
        let good = sample("web", "/bin/web", &[]);
        good.check().unwrap();
        let said = |change: fn(&mut Spec)| {
            let mut spec = good.clone();
            change(&mut spec);
            spec.check().unwrap_err().to_string()
        };
        assert!(said(|spec| spec.name = "we.b".into()).contains("no name"));
        assert!(said(|spec| spec.program = "web".into()).contains("\"web\", which is no absolute path"));
        assert!(said(|spec| spec.directory = "var".into()).contains("the directory of web"));
        assert!(said(|spec| spec.arguments = vec!["a\0".into()]).contains("zero byte in its arguments"));
        assert!(
            said(|spec| drop(spec.environment.insert("A=B".into(), String::new()))).contains("environment")
        );
    }
}
