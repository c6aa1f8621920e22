//! The limits of running children: they are applied without a restart, and set later if systemd did not take them.
//!
//! The record of a child has the limits that do not hold, so that they are reported until they do.
//!
//! A scope can also lose limits that held: an earlier release lost some when it moved a child into its scope. Who adopts a
//! child compares them. Children of the role server itself get theirs at each adoption
//! ([`adopt_or_start`][super::lifecycle::adopt_or_start]), and services by [`ChildContext::restore_limits`].

use std::sync::PoisonError;

use crate::child::cgroup::{Cgroup, CgroupError};
use crate::child::launch::{ChildRecord, read_record};
use crate::child::lifecycle::ChildContext;
use crate::child::limits::{find_missing_limits, missed_limits_message, scope_limits_message};
use crate::child::placement::{CreatedGroup, wait_for_limits};
use crate::child::scope::{ScopeRecord, limit_properties};
use crate::child::spec::ResourceLimits;

impl ChildContext {
    /// Applies limits to a running child.
    ///
    /// In a scope they are properties of the scope, so that they survive a `daemon-reload`. While systemd does not
    /// answer they are written to the group, which holds until the next `daemon-reload`, and are set as soon as it
    /// answers ([`Self::set_missed_limits`]).
    pub fn apply_limits(&self, name: &str, limits: &ResourceLimits) -> Result<(), CgroupError> {
        let record = read_record(&self.record_path(name));
        let scope = record.as_ref().and_then(|record| record.scope.clone());
        let Some(ScopeRecord { unit, control_group }) = scope else {
            let CreatedGroup { missed_limits, .. } = self.create_group(name, limits)?;
            // Without systemd there is no scope that could have them later.
            if let Some(record) = record {
                self.record_missed_limits(name, record, missed_limits.filter(|_| self.scopes.is_some()));
            }
            return Ok(());
        };
        if let Some(scopes) = &self.scopes {
            match scopes.manager.set_properties(&unit, &limit_properties(limits)) {
                Ok(()) => {
                    scopes.remember_missed(name, None);
                    let group = Cgroup::at_path(&self.mountinfo(), &control_group);
                    if let Some(record) = record {
                        let missed = wait_for_limits(&group, limits, scopes.manager.until);
                        self.record_missed_limits(name, record, missed);
                    }
                    return Ok(());
                }
                Err(error) => {
                    scopes.remember_missed(name, error.is_silence().then_some(*limits));
                    tracing::warn!(%error, unit, "the limits of a scope are written to its control group instead");
                }
            }
        }
        Cgroup::at_path(&self.mountinfo(), &control_group).set_limits(limits)
    }

    /// Sets the limits of a running child in a scope again if the group of the scope has lost one of them. Returns those
    /// that it had lost; `None` if there are none. A limit that the record has as one that does not hold is not lost: it is
    /// reported already. Blocks.
    ///
    /// # Errors
    ///
    /// As [`Self::apply_limits`].
    pub fn restore_limits(
        &self,
        name: &str,
        limits: &ResourceLimits,
    ) -> Result<Option<ResourceLimits>, CgroupError> {
        let record = read_record(&self.record_path(name)).filter(|record| record.instance.is_alive());
        let Some((scope, missed)) = record.and_then(|record| Some((record.scope?, record.missed_limits)))
        else {
            return Ok(None);
        };
        let present = Cgroup::at_path(&self.mountinfo(), &scope.control_group).read_limits();
        let missing = find_missing_limits(limits, &present);
        let lost = find_missing_limits(&missing, &missed.unwrap_or_default());
        if lost == ResourceLimits::default() {
            return Ok(None);
        }
        self.apply_limits(name, limits)?;
        Ok(Some(lost))
    }

    /// Records which limits of a running child do not hold, and warns if these are others than before.
    fn record_missed_limits(&self, name: &str, record: ChildRecord, missed_limits: Option<ResourceLimits>) {
        if record.missed_limits == missed_limits {
            return;
        }
        match &missed_limits {
            Some(missed) if record.scope.is_some() => {
                tracing::warn!("{}", scope_limits_message(name, missed));
            }
            Some(missed) => tracing::warn!("{}", missed_limits_message(name, missed)),
            None => {}
        }
        if let Err(error) = (ChildRecord { missed_limits, ..record }).write(&self.record_path(name)) {
            tracing::warn!(%error, name, "the record of a program does not have its new limits");
        }
    }

    /// Reads again which recorded limits of a running child its scope does not have; `None` if it has all of them.
    pub(super) fn refresh_missed_limits(&self, name: &str) -> Option<ResourceLimits> {
        let record = read_record(&self.record_path(name)).filter(|record| record.instance.is_alive())?;
        let (scope, missed) = record.scope.as_ref().zip(record.missed_limits)?;
        let group = Cgroup::at_path(&self.mountinfo(), &scope.control_group);
        let missing = find_missing_limits(&missed, &group.read_limits());
        let missing = Some(missing).filter(|missing| *missing != ResourceLimits::default());
        self.record_missed_limits(name, record, missing);
        missing
    }

    /// Sets the limits that systemd did not take. Stops at the first that it does not take now either, because each
    /// would take the whole deadline. Blocks.
    pub fn set_missed_limits(&self) {
        let Some(scopes) = &self.scopes else { return };
        while let Some((name, _)) = scopes.first_missed() {
            let lock = scopes.lock_of(&name);
            let _guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
            // Somebody may have set others before the lock was free.
            let Some((_, limits)) = scopes.first_missed().filter(|(first, _)| *first == name) else {
                continue;
            };
            let record = read_record(&self.record_path(&name));
            let record = record.filter(|record| record.instance.is_alive());
            if let Some((record, scope)) = record.and_then(|record| Some((record.clone(), record.scope?))) {
                match scopes.manager.set_properties(&scope.unit, &limit_properties(&limits)) {
                    Err(error) if error.is_silence() => return,
                    Err(error) => tracing::warn!(%error, name, "the limits of a scope were not set"),
                    Ok(()) => {
                        let group = Cgroup::at_path(&scopes.mountinfo, &scope.control_group);
                        let missed = wait_for_limits(&group, &limits, scopes.manager.until);
                        self.record_missed_limits(&name, record, missed);
                    }
                }
            }
            scopes.remember_missed(&name, None);
        }
    }
}
