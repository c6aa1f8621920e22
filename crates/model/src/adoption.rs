//! Adoption: how many machines of a provider's list are recorded here, and how fast.
//!
//! Each kind of provider declares its [`AdoptionLimits`]. The flags of a shepherd override them for all its providers,
//! and the keys of a `[[provider]]` table for one ([`AdoptionSettings`]). What a limit leaves out is counted
//! ([`limit_adoption`]). The number is recorded with the provider, so that the log, `get providers` and the issues show
//! it, and `--check` counts it in the same way.

use std::num::NonZeroU32;

use serde::Serialize;

use crate::time::{Rate, Span};

/// What an operator can do about machines that a limit leaves out, as a phrase that follows a semicolon.
pub const LIMIT_REMEDY: &str = "raise max_machines in its [[provider]] table, or --provisioner_max_machines (0 for no \
                                limit), or remove machines from the list";

/// What bounds the adoption of a provider's machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdoptionLimits {
    /// Most machines of the provider that are recorded and not retired; `None` for no limit.
    pub max_machines: Option<usize>,
    /// How often a machine is requested; `None` for as fast as the provider answers.
    pub creation_rate: Option<Rate>,
}

impl AdoptionLimits {
    /// No limit, and all machines at once: for a list that an operator has written.
    pub const UNLIMITED: Self = Self { max_machines: None, creation_rate: None };
    /// 50 machines, one every 5 seconds: for a provider that may offer any number of machines, and take money for each.
    pub const CAUTIOUS: Self = Self {
        max_machines: Some(50),
        creation_rate: Some(Rate { period: Span::seconds(5), burst: NonZeroU32::MIN }),
    };

    /// The limits with these settings in place of their own values.
    #[must_use]
    pub fn override_with(self, settings: AdoptionSettings) -> Self {
        let max_machines = settings.max_machines.map(|max| (max > 0).then_some(max));
        Self {
            max_machines: max_machines.unwrap_or(self.max_machines),
            creation_rate: settings.creation_rate.or(self.creation_rate),
        }
    }
}

/// What flags, or the keys of a `[[provider]]` table, set of the limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdoptionSettings {
    /// Most machines of a provider, 0 for no limit; `None` where it is not set.
    pub max_machines: Option<usize>,
    /// How often a machine is requested; `None` where it is not set.
    pub creation_rate: Option<Rate>,
}

/// Machines of a provider's list that are not adopted, because of its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct NotAdopted {
    /// How many there are, never 0.
    pub machines: usize,
    /// Most machines of the provider that may be adopted.
    pub limit: usize,
}

impl NotAdopted {
    /// The machines and the limit, as the BMDB and the API store numbers.
    #[must_use]
    pub fn to_numbers(self) -> (i64, i64) {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        (number(self.machines), number(self.limit))
    }

    /// The value with these numbers; `None` if there are no such machines.
    #[must_use]
    pub fn from_numbers(machines: i64, limit: i64) -> Option<Self> {
        let machines = usize::try_from(machines).ok().filter(|count| *count > 0)?;
        Some(Self { machines, limit: usize::try_from(limit).unwrap_or(0) })
    }

    /// In a cell of a table: `5 (limit 50)`.
    #[must_use]
    pub fn format_cell(self) -> String {
        format!("{} (limit {})", self.machines, self.limit)
    }

    /// Why they are not adopted, as a sentence without its full stop.
    #[must_use]
    pub fn reason(self) -> String {
        format!("at most {} machines of this provider are adopted", self.limit)
    }

    /// The finding, as a sentence without its full stop.
    #[must_use]
    pub fn describe(self) -> String {
        let (noun, verb) = if self.machines == 1 { ("machine", "is") } else { ("machines", "are") };
        format!("{} {noun} of its list {verb} not adopted (limit {})", self.machines, self.limit)
    }
}

/// Counts the machines that a limit leaves out: of `candidates` that could be adopted, beside `adopted` that already
/// count towards the limit. `None` if there is room for all of them.
#[must_use]
pub fn limit_adoption(candidates: usize, adopted: usize, max_machines: Option<usize>) -> Option<NotAdopted> {
    let limit = max_machines?;
    let machines = candidates.saturating_sub(limit.saturating_sub(adopted));
    (machines > 0).then_some(NotAdopted { machines, limit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_override_the_limits_of_the_kind() {
        let rate: Rate = "1s,2".parse().unwrap();
        let settings = |max_machines, creation_rate| AdoptionSettings { max_machines, creation_rate };
        for (kind, given, expected) in [
            (AdoptionLimits::UNLIMITED, settings(None, None), (None, None)),
            (AdoptionLimits::UNLIMITED, settings(Some(7), Some(rate)), (Some(7), Some(rate))),
            (AdoptionLimits::CAUTIOUS, settings(None, None), (Some(50), Some("5s,1".parse().unwrap()))),
            (AdoptionLimits::CAUTIOUS, settings(Some(7), Some(rate)), (Some(7), Some(rate))),
            (AdoptionLimits::CAUTIOUS, settings(Some(0), Some(rate)), (None, Some(rate))),
        ] {
            let limits = kind.override_with(given);
            assert_eq!((limits.max_machines, limits.creation_rate), expected, "{given:?}");
        }
    }

    #[test]
    fn limit_leaves_out_what_it_has_no_room_for() {
        for (candidates, adopted, max, expected) in [
            (55, 0, None, None),
            (50, 0, Some(50), None),
            (55, 0, Some(50), Some(5)),
            // The number is the same while machines are being adopted.
            (35, 20, Some(50), Some(5)),
            (5, 50, Some(50), Some(5)),
            (0, 50, Some(50), None),
            // The limit was lowered.
            (1, 50, Some(10), Some(1)),
        ] {
            let found = limit_adoption(candidates, adopted, max);
            assert_eq!(found.map(|found| found.machines), expected, "{candidates} {adopted} {max:?}");
            assert!(found.is_none_or(|found| Some(found.limit) == max));
        }
    }

    #[test]
    fn numbers_are_read_as_they_were_stored() {
        let found = NotAdopted { machines: 5, limit: 50 };
        let (machines, limit) = found.to_numbers();
        assert_eq!(NotAdopted::from_numbers(machines, limit), Some(found));
        assert_eq!(NotAdopted::from_numbers(0, 50), None);
        assert_eq!(found.format_cell(), "5 (limit 50)");
        assert_eq!(found.describe(), "5 machines of its list are not adopted (limit 50)");
        assert_eq!(
            NotAdopted { machines: 1, limit: 2 }.describe(),
            "1 machine of its list is not adopted (limit 2)"
        );
    }
}
