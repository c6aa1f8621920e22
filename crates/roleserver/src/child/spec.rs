//! Child specification and resource limits.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use ring::digest;
use serde::{Deserialize, Serialize};
use supervisor::name::{RunnableName, RunnableNameError};

use crate::child::confinement::Confinement;

/// One program, with all that it is started with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChildSpec {
    /// Its name on this node, a valid runnable name. Two children of one name never run at once.
    pub name: String,
    /// The absolute path of the program file.
    pub program: PathBuf,
    /// The arguments, without the program's name.
    pub arguments: Vec<String>,
    /// Its whole environment: nothing of the role server's own is inherited.
    pub environment: BTreeMap<String, String>,
    /// Its working directory, an absolute path.
    pub directory: PathBuf,
    /// The user it runs as; `None` means the role server's own.
    pub user: Option<User>,
    /// Supplementary groups, used only together with `user`.
    #[serde(default)]
    pub groups: Vec<u32>,
    /// How it is confined; `None` for what the role server itself needs, which is not confined.
    #[serde(default)]
    pub confinement: Option<Confinement>,
    /// The limits of its control group.
    pub limits: ResourceLimits,
    /// Files that a killed program leaves behind and that would keep the next from starting, such as sockets. They are
    /// removed before a start, when no process of the child runs any more.
    pub stale_files: Vec<PathBuf>,
    /// File name prefix of programs that the child starts and that go on when it ends or is restarted. The next
    /// instance of the child recognizes them. If it is `None`, they are killed.
    #[serde(default)]
    pub survivor_prefix: Option<String>,
    /// How long it may take to end after SIGTERM before it is killed.
    pub stop_time: Duration,
    /// Digest of what operators and the cluster decide about the child. A running child is adopted as it runs while
    /// this is the same, although another release would start it in another way. `None` if the release adds nothing,
    /// so that [`digest`][Self::digest] alone decides.
    #[serde(default)]
    pub declared: Option<String>,
}

/// A user and a group, by number: a machine need not have names for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// Numeric user id (uid).
    pub uid: u32,
    /// Numeric group id (gid).
    pub gid: u32,
}

/// Limits of a control group. `None` means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceLimits {
    /// Bytes of memory; above it the kernel kills a process in the group.
    pub memory_bytes: Option<u64>,
    /// Processor time in thousandths of one processor.
    pub cpu_millis: Option<u64>,
    /// Highest number of processes and threads.
    pub tasks: Option<u64>,
}

/// Why a child specification is invalid.
#[derive(Debug, thiserror::Error)]
pub enum ChildSpecError {
    /// The name is not a valid runnable name.
    #[error(transparent)]
    Name(#[from] RunnableNameError),
    /// A path is relative, without a directory that it would be relative to.
    #[error("{what} of {name} is {path:?}, which is no absolute path; give one that begins with /")]
    RelativePath {
        /// The name of the child.
        name: String,
        /// The field with the path, for the message.
        what: &'static str,
        /// The path that was rejected.
        path: PathBuf,
    },
    /// A text with a zero byte, which the kernel does not take.
    #[error("{name} has a zero byte in its {what}")]
    NulByte {
        /// The name of the child.
        name: String,
        /// The field with the zero byte, for the message.
        what: &'static str,
    },
}

impl ChildSpec {
    /// Checks that the kernel can run this specification.
    pub fn validate(&self) -> Result<(), ChildSpecError> {
        RunnableName::new(&self.name)?;
        for (what, path) in [("the program", &self.program), ("the directory", &self.directory)] {
            if !path.is_absolute() {
                return Err(ChildSpecError::RelativePath {
                    name: self.name.clone(),
                    what,
                    path: path.clone(),
                });
            }
        }
        let zero = |text: &String| text.contains('\0');
        let environment =
            self.environment.iter().any(|(key, value)| zero(key) || zero(value) || key.contains('='));
        for (what, has) in [("arguments", self.arguments.iter().any(zero)), ("environment", environment)] {
            if has {
                return Err(ChildSpecError::NulByte { name: self.name.clone(), what });
            }
        }
        Ok(())
    }

    /// The digest of everything that the program is started with. The stop time and the survivor prefix are not part of
    /// it, nor the limits, which can be changed while the child runs, nor the supplementary groups, which follow from
    /// the host's configuration. Nor is the confinement: the default one is that of a release, and counts from the next
    /// start. What a declaration requests is in the digest of its service, which stops the service when it changes.
    #[must_use]
    pub fn digest(&self) -> String {
        let reported =
            (&self.name, &self.program, &self.arguments, &self.environment, &self.directory, self.user);
        // These are strings and numbers alone. A path that is not UTF-8 cannot be JSON, and is represented by its debug
        // text.
        let bytes = serde_json::to_vec(&reported).unwrap_or_else(|_| format!("{reported:?}").into_bytes());
        hex::encode(digest::digest(&digest::SHA256, &bytes))
    }
}

#[cfg(test)]
pub(super) fn sample(name: &str, program: &str, arguments: &[&str]) -> ChildSpec {
    ChildSpec {
        name: name.to_owned(),
        program: program.into(),
        arguments: arguments.iter().map(|&argument| argument.to_owned()).collect(),
        environment: BTreeMap::new(),
        directory: "/".into(),
        user: None,
        groups: Vec::new(),
        confinement: None,
        limits: ResourceLimits::default(),
        stale_files: Vec::new(),
        survivor_prefix: None,
        stop_time: Duration::from_secs(10),
        declared: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_changes_with_what_requires_a_restart() {
        let spec = sample("web", "/bin/web", &["a", "b"]);
        assert_eq!(spec.digest(), spec.clone().digest());
        let mut same = spec.clone();
        same.stop_time = Duration::from_secs(1);
        same.limits.memory_bytes = Some(1);
        same.confinement = Some(Confinement::default());
        assert_eq!(spec.digest(), same.digest());
        let others: [fn(&mut ChildSpec); 6] = [
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
    fn invalid_spec_is_rejected_with_a_reason() {
        let good = sample("web", "/bin/web", &[]);
        good.validate().unwrap();
        let reported = |change: fn(&mut ChildSpec)| {
            let mut spec = good.clone();
            change(&mut spec);
            spec.validate().unwrap_err().to_string()
        };
        assert!(reported(|spec| spec.name = "we.b".into()).contains("not a valid name"));
        assert!(reported(|spec| spec.program = "web".into()).contains("\"web\", which is no absolute path"));
        assert!(reported(|spec| spec.directory = "var".into()).contains("the directory of web"));
        assert!(reported(|spec| spec.arguments = vec!["a\0".into()]).contains("zero byte in its arguments"));
        assert!(
            reported(|spec| drop(spec.environment.insert("A=B".into(), String::new())))
                .contains("environment")
        );
    }
}
