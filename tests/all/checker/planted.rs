//! Records without a violation, in which one fault is planted.

use super::{Call, Records};

/// Another worker enrols a machine while the first one does.
pub(crate) fn overlapping_work(good: &Records) -> Option<Records> {
    let mut records = good.clone();
    let during = records.calls.iter().find(|call| call.what == "enroll-command")?.clone();
    records.calls.push(Call { start: during.start + 1, end: during.end + 1, ..during });
    Some(records)
}

/// A machine that exists is created again under another intent, as by a second provisioner.
pub(crate) fn machine_twice(good: &Records) -> Option<Records> {
    let mut records = good.clone();
    let made = records.calls.iter().find(|call| call.what == "create" && call.outcome == "ok")?.clone();
    let other = records.creations.iter().map(|creation| creation.intent_id.to_string());
    let intent = other.into_iter().find(|id| Some(id) != made.intent.as_ref())?;
    records.calls.push(Call { intent: Some(intent), ..made });
    Some(records)
}

/// The history row of a lost lease is missing.
pub(crate) fn missing_expired(good: &Records) -> Option<Records> {
    let mut records = good.clone();
    let lost = records.edges.iter().position(|edge| edge.event == "Expired")?;
    records.edges.remove(lost);
    Some(records)
}

/// Events that are allowed: a shepherd repeats a request to the provider under the same intent, and a
/// shepherd dies in the middle of an upload.
pub(crate) fn nothing(good: &Records) -> Option<Records> {
    let mut records = good.clone();
    let last = records.calls.iter().map(|call| call.end).filter(|end| *end < u64::MAX).max()?;
    let made = records.calls.iter().find(|call| call.what == "create" && call.outcome == "ok")?.clone();
    records.calls.push(Call { start: last + 1, end: last + 2, ..made });
    let upload = records.calls.iter().find(|call| call.what == "upload")?.clone();
    let outcome = "dropped".to_owned();
    records.calls.push(Call { start: last + 3, end: last + 4, outcome, ..upload });
    Some(records)
}
