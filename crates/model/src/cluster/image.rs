//! When an image of the whole etcd of a cluster is taken.
//!
//! Objects of Kubernetes are in the etcd of a cluster, and in none of its records. So the last snapshot of a cluster with
//! Kubernetes gets an image of the whole etcd. A cluster without Kubernetes has nothing in its etcd that a snapshot lacks.
//!
//! An image is taken after its snapshot, which does not wait for it: it takes minutes, and may fail where the snapshot did
//! not.

use std::time::Duration;

use uuid::Uuid;

use crate::cluster::snapshot::LastSnapshot;
use crate::cluster::state::MAX_ETCD_BYTES;
use crate::time::{Timestamp, between};

/// The largest image in bytes: the largest database file of etcd, and the SHA-256 of it.
pub const MAX_IMAGE_BYTES: u64 = MAX_ETCD_BYTES + 32;
/// The pause after an attempt that failed.
pub const IMAGE_RETRY: Duration = Duration::from_mins(5);

/// An attempt to take an image that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedImage {
    /// The snapshot that the image would belong to.
    pub snapshot: Uuid,
    /// When it failed, by the database's clock.
    pub at: Timestamp,
    /// Why, as a sentence.
    pub reason: String,
}

/// The snapshot that an image is to be taken for now; `None` if none is due. `failed` is the last attempt, if it failed.
#[must_use]
pub fn image_due(
    last: Option<&LastSnapshot>,
    has_kubernetes: bool,
    failed: Option<&FailedImage>,
    now: Timestamp,
) -> Option<Uuid> {
    let last = last.filter(|last| has_kubernetes && !last.has_image)?;
    let waits = failed.is_some_and(|failed| between(failed.at, now) < IMAGE_RETRY);
    (!waits).then_some(last.id)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn last_snapshot_of_a_cluster_with_kubernetes_gets_an_image() {
        let at = |second| Timestamp::from_timestamp(second, 0).unwrap();
        let id = Uuid::from_u128(1);
        let last =
            |has_image| LastSnapshot { id, at: at(0), voters: BTreeSet::new(), authority: None, has_image };
        let failed =
            |second| Some(FailedImage { snapshot: Uuid::nil(), at: at(second), reason: String::new() });
        for (what, last, has_kubernetes, failed, expected) in [
            ("no snapshot", None, true, None, None),
            ("it has none", Some(last(false)), true, None, Some(id)),
            ("it has one", Some(last(true)), true, None, None),
            ("no Kubernetes", Some(last(false)), false, None, None),
            ("an attempt failed a moment ago", Some(last(false)), true, failed(1_000 - 299), None),
            ("an attempt failed a while ago", Some(last(false)), true, failed(1_000 - 300), Some(id)),
        ] {
            let due = image_due(last.as_ref(), has_kubernetes, failed.as_ref(), at(1_000));
            assert_eq!(due, expected, "{what}");
        }
    }
}
