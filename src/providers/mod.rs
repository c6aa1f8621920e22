//! Providers: sources of machines, with power control and reboots.
//!
//! # Purpose
//!
//! [`provider::Provider`] is the interface between the control loops and a source of machines: a list of servers, or the
//! API of a hosting company. A provider lists machines and carries out orders for single machines. It decides nothing:
//! the [`manager`](crate::manager) decides when to create a machine, which one to reboot, and how often.
//!
//! * [`provider`]: the trait, its capabilities and errors, and the rules for every provider.
//! * [`static_provider`]: the machines of a device list, which operators write.
//! * [`simulated`]: the machines of a simulator, behind an HTTP API like that of a hosting company.
//! * [`http`]: the HTTP client of all kinds.
//! * [`field_checks`]: checks of texts from outside.
//!
//! # How it works
//!
//! A provider is built from its configuration, which makes no call. Each call then queries the source: a provider keeps
//! no list of machines, apart from a device list while its source reports that it is unchanged. A call that fails returns a
//! [`provider::ProviderError`]. Its class states whether a retry may help. Its endpoint states which address is slow or
//! fails, so that the circuit breaker can distinguish one slow endpoint from a slow fleet.
//!
//! # Invariants
//!
//! * A provider uses no SQL and no SSH. A reboot over SSH is an argument vector that the caller runs.
//! * A provider keeps nothing that must survive it. The caller records each order under an intent id before the call,
//!   and repeats it under the same id.
//! * Answers are not trusted. A list with one invalid entry is an error, because a partial list reads as machines that
//!   vanished. Texts are checked before they are stored, shown or connected to.
//! * No error shows a secret. URLs are shown without user, password and query.
//!
//! # For the next implementor
//!
//! Read the rules in [`provider`] first. Add a file, or a folder if the kind has parts, and implement only the
//! capabilities that the source has. A capability that it lacks is `None`, never a method that always fails.
//! The conformance suite in `tests/all/providers.rs` runs over every kind. `CONTRIBUTING.md` lists the other steps.

pub mod field_checks;
pub mod http;
pub mod provider;
pub mod simulated;
pub mod static_provider;
