//! Cases: a change of the healthy inputs, and the issues that follow.

use crate::issues::inputs::IssueInputs;

mod clusters;
mod database;
mod fleet;
mod machines;

/// A case: a change of the healthy inputs, and the issues that follow from it, with their subjects.
type Case = (&'static str, fn(&mut IssueInputs), &'static [(&'static str, &'static str)]);

/// The cases of each subject.
pub(super) const CASES: [&[Case]; 4] = [clusters::CASES, database::CASES, fleet::CASES, machines::CASES];
