//! Names of events of a machine's history that more than one place writes or reads.
//!
//! The BMDB stores them, the timeline shows them, and clients compare them, so no name changes. An event that only one place
//! writes and none compares is named there.

/// Start of a work item.
pub const STARTED: &str = "Started";
/// End of a work item that succeeded.
pub const FINISHED: &str = "Finished";
/// End of a work item that failed.
pub const FAILED: &str = "Failed";
/// End of a work item that is tried again later without a failure.
pub const POSTPONED: &str = "PutOff";
/// An operator orders a reboot or a switch of the power.
pub const POWER_ORDERED: &str = "PowerOrdered";
/// An order about power ends because of another order.
pub const POWER_ORDER_CANCELLED: &str = "PowerOrderCancelled";
/// An order about power ends, and is not known to have been carried out. A client that waits for its end reads this.
pub const POWER_ORDER_GIVEN_UP: &str = "PowerOrderGivenUp";
/// A retirement ends, and the machine stays in the fleet.
pub const RETIREMENT_CANCELLED: &str = "RetirementCancelled";
