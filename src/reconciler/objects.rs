//! The built-in objects, as whoever leads has them made.
//!
//! # How the files fit
//!
//! What is wanted: [`built_in`][] of the release, [`wishes`][] of the cluster, of which [`manifest`][] and [`add_ons`][] read
//! what its add-ons declare. Decisions: [`compare`][] whether an object is as it should be, [`plan`][] what is done about
//! it, [`nodes`][] what is done about those of nodes, [`answers`][] what a refusal means, [`sight`][] what of others' changes
//! is news, [`trouble`][] what a person is told. I/O: [`kubernetes`][] the requests, [`workers`][] those about nodes,
//! [`served`][] which kinds there are, `watch` what is told in between, `node_pass` what is done about nodes, and
//! [`pass`][], which brings all of it together and is an [`Objects`].

use std::fmt;

pub mod add_ons;
pub mod answers;
pub mod built_in;
pub mod compare;
pub mod kind;
pub mod kubernetes;
pub mod manifest;
mod node_pass;
pub mod nodes;
pub mod pass;
pub mod plan;
pub mod served;
pub mod sight;
pub mod trouble;
mod watch;
pub mod wishes;
pub mod workers;

/// The objects of one release in one Kubernetes.
///
/// What is asked for is the same each time. Two that reconcile at once, because one of them does not know yet that it
/// leads no longer, may fail by each other; the next pass puts it right.
pub trait Objects: Send + Sync {
    /// Compares all objects with what this release wants, and changes what differs.
    ///
    /// May be dropped at any await, and must send nothing from then on: whoever dropped it may no longer lead.
    fn pass(&self) -> impl Future<Output = Result<Passed, PassError>> + Send;

    /// Waits until objects were changed by somebody else since the last pass began.
    ///
    /// Cancel-safe: what is noticed is told by the next call, if not by this one.
    fn changed(&self) -> impl Future<Output = ()> + Send;
}

/// What a pass has changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// Objects that were not there.
    pub created: usize,
    /// Objects that differed.
    pub updated: usize,
    /// Objects that differed in what cannot be changed, and were made anew.
    pub replaced: usize,
    /// Objects that no release wants any more.
    pub deleted: usize,
}

impl Passed {
    /// Whether everything was as it should be.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Passed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { created, updated, replaced, deleted } = self;
        write!(f, "{created} created, {updated} updated, {replaced} replaced, {deleted} deleted")
    }
}

/// Why a pass came to no end; what it did until then is done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the built-in objects of Kubernetes are not all as this release wants them: {0}")]
pub struct PassError(pub String);
