//! Parse the fields of orders: scopes, power actions, priorities, labels and expiry.
//!
//! An order for one machine and an order for many have the same fields, and so the same errors.

use tonic::Status;

use crate::api::api_error::invalid_argument;
use crate::api::convert::decode_timestamp;
use bmdb::orders::machine_order::MachineOrder;
use bmdb::orders::order::Expiry;
use model::facts::HoldScope;
use model::label::{Labels, check_label_key, check_label_value};
use model::power_order::PowerOrderKind;
use model::priority::PriorityLevel;
use model::process::UnknownName;
use model::time::Span;

/// Most labels in one request.
const MAX_LABELS: usize = 64;

/// Parses the scope of a hold.
pub(super) fn parse_hold_scope(text: &str) -> Result<HoldScope, Status> {
    match text {
        "" => Ok(HoldScope::Everything),
        text => HoldScope::ALL.into_iter().find(|scope| scope.as_str() == text).ok_or_else(|| {
            invalid_argument(
                "scope",
                format!("{text:?} is not a scope of a hold; write everything, power or recovery"),
            )
        }),
    }
}

/// Parses a power action. A reboot is none, because it is an order of its own.
pub(super) fn parse_power_action(text: &str) -> Result<PowerOrderKind, Status> {
    text.parse().ok().filter(|switch| *switch != PowerOrderKind::Reboot).ok_or_else(|| {
        invalid_argument(
            "action",
            format!("{text:?} is nothing that can be done to power; write on, off or cycle"),
        )
    })
}

/// Parses the level of a priority.
pub(super) fn parse_priority_level(text: &str) -> Result<PriorityLevel, Status> {
    text.parse().map_err(|error: UnknownName| invalid_argument("level", error.to_string()))
}

/// Parses the time at which a hold, a priority, a pause, a credential or a certificate ends.
pub(super) fn parse_expiry_at(time: prost_types::Timestamp) -> Result<Expiry, Status> {
    let ends = decode_timestamp(time)
        .ok_or_else(|| invalid_argument("expires_at", "expires_at is no valid time"))?;
    Ok(Expiry::At(ends))
}

/// Parses the duration after which a hold, a priority or a pause ends.
pub(super) fn parse_expiry_after(text: &str) -> Result<Expiry, Status> {
    let span = text.parse().map_err(|_| {
        invalid_argument(
            "expires_after",
            format!("{text:?} is not a duration; write for example 2h, 30m or 1d"),
        )
    })?;
    Ok(Expiry::After(span))
}

/// Parses the lifetime of a certificate, which `check` accepts. An empty text is `default`.
pub(super) fn parse_lifetime(
    text: &str,
    default: Span,
    check: fn(Span) -> Result<(), String>,
) -> Result<Expiry, Status> {
    let lifetime = match text {
        "" => default,
        text => text.parse::<Span>().map_err(|_| {
            invalid_argument("lifetime", format!("{text:?} is not a duration; write for example 8h or 7d"))
        })?,
    };
    check(lifetime).map_err(|reason| invalid_argument("lifetime", reason))?;
    Ok(Expiry::After(lifetime))
}

/// Builds an order that changes labels; an error if a label is invalid.
pub(super) fn parse_label_order(set: Labels, remove: Vec<String>) -> Result<MachineOrder, Status> {
    if set.is_empty() && remove.is_empty() {
        return Err(invalid_argument("set", "the request names no label to set, and none to remove"));
    }
    if set.len() > MAX_LABELS || remove.len() > MAX_LABELS {
        return Err(invalid_argument("set", format!("the request names more than {MAX_LABELS} labels")));
    }
    for (key, value) in &set {
        check_label_key(key)
            .and_then(|()| check_label_value(value))
            .map_err(|reason| invalid_argument("set", reason))?;
    }
    for key in &remove {
        check_label_key(key).map_err(|reason| invalid_argument("remove", reason))?;
    }
    Ok(MachineOrder::Label { set, remove })
}
