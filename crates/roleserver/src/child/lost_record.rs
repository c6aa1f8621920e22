//! Find the process of a child again after its record was damaged.
//!
//! Without a record, nothing says which process of a group is the child itself. In a scope it can be recognized: the
//! launcher became the program of the specification, with exactly its arguments and its environment, and what the child
//! starts has a parent in the same group. If exactly one process is such, it is adopted, with a new record. In all other
//! cases the processes are ended before a new start: a program that changes its own arguments, a script, a child with
//! other arguments than the specification has now, a child outside scopes.
//!
//! A service in a root filesystem is not looked for: its container is deleted before its start, so its runc ends soon.
//!
//! What arguments and environment do not show, such as confinement, counts as unchanged. The user is compared.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::child::cgroup::Cgroup;
use crate::child::existing_cgroup::own_pids;
use crate::child::launch::ChildRecord;
use crate::child::lifecycle::ChildContext;
use crate::child::scope::{LEAF, ScopeRecord};
use crate::child::spec::ChildSpec;
use crate::process::ProcessInstance;

/// What `/proc` shows of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ProcessFacts {
    parent: i32,
    uid: u32,
    program: PathBuf,
    /// Each argument, and then each variable, ends with a zero byte.
    command_line: Vec<u8>,
    environment: Vec<u8>,
}

impl ProcessFacts {
    fn read(proc: &Path, pid: i32) -> Option<Self> {
        let directory = proc.join(pid.to_string());
        let status = fs::read_to_string(directory.join("status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        Some(Self {
            parent: field("PPid:")?.trim().parse().ok()?,
            // The real one, and then the effective one.
            uid: field("Uid:")?.split_whitespace().nth(1)?.parse().ok()?,
            program: fs::read_link(directory.join("exe")).ok()?,
            command_line: fs::read(directory.join("cmdline")).ok()?,
            environment: fs::read(directory.join("environ")).ok()?,
        })
    }
}

/// Whether this is the process that a start with this specification makes (pure). `program` is the path of its program
/// without links, `uid` the user that it runs as, and `members` are the processes of all groups of the child.
fn is_own_process(
    facts: &ProcessFacts,
    spec: &ChildSpec,
    (program, uid): (&Path, u32),
    members: &BTreeSet<i32>,
) -> bool {
    let command_line = std::iter::once(spec.program.as_os_str().as_encoded_bytes())
        .chain(spec.arguments.iter().map(String::as_bytes))
        .flat_map(|argument| argument.iter().copied().chain([0]));
    let mut wanted: Vec<Vec<u8>> =
        spec.environment.iter().map(|(name, value)| format!("{name}={value}\0").into_bytes()).collect();
    let mut found: Vec<&[u8]> = facts.environment.split_inclusive(|byte| *byte == 0).collect();
    wanted.sort_unstable();
    found.sort_unstable();
    facts.program == program
        && facts.uid == uid
        && facts.command_line == command_line.collect::<Vec<u8>>()
        && found == wanted
        && !members.contains(&facts.parent)
}

impl ChildContext {
    /// The record of the process that runs this specification in a scope of the child; `None` if there is none, or more
    /// than one.
    pub(super) fn recover_record(&self, spec: &ChildSpec) -> Option<ChildRecord> {
        if self.directory.join(&spec.name).join("bundle").exists() {
            return None;
        }
        // The launcher is in that directory when it executes the program.
        let program = match spec.program.strip_prefix("/proc/self/cwd") {
            Ok(below) => fs::canonicalize(spec.directory.join(below)).ok()?,
            Err(_) => fs::canonicalize(&spec.program).ok()?,
        };
        let uid = spec.user.map_or_else(|| rustix::process::geteuid().as_raw(), |user| user.uid);
        let members = self.find_group(&spec.name).pids().ok()?;
        let mut own: Option<(ProcessInstance, ScopeRecord)> = None;
        for scope in self.find_scopes(&spec.name).into_values() {
            for pid in own_group_pids(&self.mountinfo(), &scope) {
                // The start time is read first and compared last, so all facts are of the same process.
                let Some(instance) = ProcessInstance::of_pid(pid) else { continue };
                let facts = ProcessFacts::read(Path::new("/proc"), pid);
                let is_own = facts
                    .is_some_and(|facts| is_own_process(&facts, spec, (program.as_path(), uid), &members));
                if !is_own || !matches!(instance.open_pidfd(), Ok(Some(_))) {
                    continue;
                }
                if own.is_some() {
                    return None;
                }
                own = Some((instance, scope.clone()));
            }
        }
        let (instance, scope) = own?;
        Some(ChildRecord {
            instance,
            spec_sha256: spec.digest(),
            declared_sha256: spec.declared.clone(),
            scope: Some(scope),
            missed_limits: None,
            unfinished_move: None,
            unfinished_groups: Vec::new(),
        })
    }
}

/// The processes in the group of a scope that a new child joins.
fn own_group_pids(mountinfo: &str, scope: &ScopeRecord) -> BTreeSet<i32> {
    let group = Cgroup::at_path(mountinfo, &scope.control_group).with_leaf(LEAF);
    let joined = |top: &PathBuf| group.leaf.as_ref().map_or_else(|| top.clone(), |leaf| top.join(leaf));
    group.directories().flat_map(|top| own_pids(&joined(top)).unwrap_or_default()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::spec::sample;

    #[test]
    fn only_a_process_as_the_specification_starts_it_is_the_own_one() {
        let spec = ChildSpec {
            environment: [("A".to_owned(), "1".to_owned()), ("B".to_owned(), String::new())].into(),
            ..sample("web", "/bin/web", &["-a", ""])
        };
        let program = Path::new("/usr/bin/web");
        let facts = ProcessFacts {
            parent: 1,
            uid: 7,
            program: program.to_owned(),
            command_line: b"/bin/web\0-a\0\0".to_vec(),
            environment: b"B=\0A=1\0".to_vec(),
        };
        let members = BTreeSet::from([12, 13]);
        let is_own = |facts: &ProcessFacts| is_own_process(facts, &spec, (program, 7), &members);
        assert!(is_own(&facts));
        for (what, other) in [
            ("a process that a member has started", ProcessFacts { parent: 12, ..facts.clone() }),
            ("another user", ProcessFacts { uid: 0, ..facts.clone() }),
            ("another program", ProcessFacts { program: "/usr/bin/web (deleted)".into(), ..facts.clone() }),
            ("fewer arguments", ProcessFacts { command_line: b"/bin/web\0-a\0".to_vec(), ..facts.clone() }),
            ("another variable", ProcessFacts { environment: b"A=1\0B=\0C=\0".to_vec(), ..facts.clone() }),
            ("no variables", ProcessFacts { environment: Vec::new(), ..facts.clone() }),
        ] {
            assert!(!is_own(&other), "{what}");
        }
    }
}
