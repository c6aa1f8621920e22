//! Confinement of a declared service that runs on the host: a bounded set of capabilities, and `no_new_privs`.
//!
//! A container runtime gives root fewer capabilities than root has, and lets no program gain more by `execve`. A
//! declared service that runs without a container is confined in the same way. What it requests beyond that is in its
//! declaration ([`Privileges`]).
//!
//! * The bounding set is [`DEFAULT_CAPABILITIES`] and what the declaration requests. A service of root has all of them.
//! * A service of another user has only what its declaration requests, as ambient capabilities: `execve` would take
//!   others from it.
//! * A role server that is not root cannot change the bounding set. Its services have no capabilities, and gain none,
//!   because of `no_new_privs`. A service of root gives up what is beyond the set also where a role server lacks
//!   `CAP_SETPCAP` to change it, and `execve` does not bring it back then.
//!
//! `plan_confinement` decides, and `begin` and `finish` are the system calls before and after the change of
//! the user (capabilities(7), prctl(2)). They belong to the thread, and the launcher has one.

use model::role_declaration::privileges::{Capability, Privileges};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set, clear_ambient_capability_set,
    configure_capability_in_ambient_set, remove_capability_from_bounding_set, set_capabilities,
    set_keep_capabilities, set_no_new_privs,
};
use serde::{Deserialize, Serialize};

/// The capabilities of a service of root: those that containerd gives to root in a container.
pub const DEFAULT_CAPABILITIES: CapabilitySet = CapabilitySet::AUDIT_WRITE
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SYS_CHROOT);

/// How a declared service is confined.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement(pub Privileges);

/// The system calls that confine a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConfinementPlan {
    /// Capabilities that a service of root may have.
    permitted: CapabilitySet,
    /// Whether to take all others out of the bounding set, which this process may be unable to change.
    is_bounded: bool,
    /// Capabilities of a service of another user than root.
    ambient: CapabilitySet,
    no_new_privileges: bool,
}

/// Decides how to confine a service of the user `uid`, started by a process that has the capabilities `own`. The error
/// is a sentence.
pub(super) fn plan_confinement(
    confinement: &Confinement,
    uid: u32,
    own: CapabilitySet,
) -> Result<ConfinementPlan, String> {
    let Privileges { capabilities, new_privileges, .. } = &confinement.0;
    let requested: CapabilitySet = capabilities.iter().copied().map(bit).collect();
    check_requested(&confinement.0, own)?;
    Ok(ConfinementPlan {
        permitted: DEFAULT_CAPABILITIES | requested,
        is_bounded: own.contains(CapabilitySet::SETPCAP),
        ambient: if uid == 0 { CapabilitySet::empty() } else { requested },
        no_new_privileges: !new_privileges,
    })
}

/// Checks that a process with the capabilities `own` can give a service those that it requests. The error is a sentence.
pub fn check_requested(privileges: &Privileges, own: CapabilitySet) -> Result<(), String> {
    let requested = privileges.capabilities.iter();
    let missing: Vec<String> =
        requested.filter(|name| !own.contains(bit(**name))).map(ToString::to_string).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!(
        "its declaration requests the capabilities {}, which the role server of this node does not have itself; run it \
         as root, or take them out of the declaration (in some containers, and in a unit with CapabilityBoundingSet=, \
         root lacks them, too)",
        missing.join(", ")
    ))
}

const fn bit(capability: Capability) -> CapabilitySet {
    CapabilitySet::from_bits_retain(1 << capability.number())
}

/// The capabilities that this thread may use, which are those of the process.
pub fn own_capabilities() -> std::io::Result<CapabilitySet> {
    Ok(capabilities(None)?.permitted)
}

/// The part before the change of the user, which takes the privilege for it away.
pub(super) fn begin(plan: &ConfinementPlan) -> std::io::Result<()> {
    if plan.is_bounded {
        for number in 0..u64::BITS {
            let one = CapabilitySet::from_bits_retain(1 << number);
            match capability_is_in_bounding_set(one) {
                Ok(true) if !plan.permitted.contains(one) => remove_capability_from_bounding_set(one)?,
                Ok(_) => {}
                // The kernel has no capability of this number, nor of a higher one.
                Err(rustix::io::Errno::INVAL) => break,
                Err(error) => return Err(error.into()),
            }
        }
    }
    clear_ambient_capability_set()?;
    if !plan.ambient.is_empty() {
        set_keep_capabilities(true)?;
    }
    Ok(())
}

/// The part after the change of the user, right before `execve`.
pub(super) fn finish(plan: &ConfinementPlan) -> std::io::Result<()> {
    if plan.ambient.is_empty() {
        let now = capabilities(None)?;
        let kept = CapabilitySets {
            effective: now.effective & plan.permitted,
            permitted: now.permitted & plan.permitted,
            inheritable: CapabilitySet::empty(),
        };
        set_capabilities(None, kept)?;
    } else {
        let only = plan.ambient;
        set_capabilities(None, CapabilitySets { effective: only, permitted: only, inheritable: only })?;
        for one in only.iter() {
            configure_capability_in_ambient_set(one, true)?;
        }
    }
    if plan.no_new_privileges {
        set_no_new_privs(true)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requesting(names: &[&str], new_privileges: bool) -> Confinement {
        Confinement(Privileges {
            capabilities: names.iter().map(|name| name.parse().unwrap()).collect(),
            new_privileges,
            ..Privileges::default()
        })
    }

    #[test]
    fn plan_bounds_capabilities_by_default_and_request() {
        let (all, none) = (CapabilitySet::all(), CapabilitySet::empty());
        let net = CapabilitySet::NET_ADMIN;
        let plan = |permitted, is_bounded, ambient, no_new_privileges| ConfinementPlan {
            permitted,
            is_bounded,
            ambient,
            no_new_privileges,
        };
        let (default, with_net) = (DEFAULT_CAPABILITIES, DEFAULT_CAPABILITIES | net);
        for (confinement, uid, own, expected) in [
            (requesting(&[], false), 0, all, plan(default, true, none, true)),
            (requesting(&[], false), 1000, all, plan(default, true, none, true)),
            (requesting(&["NET_ADMIN"], false), 0, all, plan(with_net, true, none, true)),
            (requesting(&["NET_ADMIN"], true), 7, all, plan(with_net, true, net, false)),
            (requesting(&[], false), 1000, none, plan(default, false, none, true)),
            (requesting(&[], true), 1000, none, plan(default, false, none, false)),
            (requesting(&["NET_ADMIN"], false), 1000, net, plan(with_net, false, net, true)),
        ] {
            assert_eq!(
                plan_confinement(&confinement, uid, own),
                Ok(expected),
                "{confinement:?} {uid} {own:?}"
            );
        }
        for unsafe_one in ["SYS_ADMIN", "SYS_MODULE", "SYS_PTRACE", "NET_ADMIN", "DAC_READ_SEARCH", "BPF"] {
            assert!(!DEFAULT_CAPABILITIES.contains(bit(unsafe_one.parse().unwrap())), "{unsafe_one}");
        }
    }

    /// As root has them without `CAP_SETPCAP`. Capabilities are those of a thread, so the test has one for itself.
    #[test]
    fn capabilities_beyond_the_plan_are_given_up_where_the_bounding_set_stays() {
        let plan = ConfinementPlan {
            permitted: CapabilitySet::CHOWN,
            is_bounded: false,
            ambient: CapabilitySet::empty(),
            no_new_privileges: false,
        };
        let confined = std::thread::spawn(move || {
            finish(&plan).unwrap();
            capabilities(None).unwrap()
        });
        let left = confined.join().unwrap();
        assert!(CapabilitySet::CHOWN.contains(left.permitted | left.effective), "{left:?}");
        assert_eq!(left.inheritable, CapabilitySet::empty());
    }

    #[test]
    fn capability_that_the_role_server_lacks_is_refused_by_name() {
        let requested = requesting(&["NET_ADMIN", "SYS_TIME", "CHOWN"], false);
        let error = plan_confinement(&requested, 0, CapabilitySet::CHOWN).unwrap_err();
        assert!(error.contains("requests the capabilities NET_ADMIN, SYS_TIME, which"), "{error}");
    }
}
