//! Limits of bulk orders: machines per order and per hour.
//!
//! An order with a selector must give the number of machines that it expects, because selectors are easily wrong and fleets
//! change between a look and an order. An order that names its machines gives it only if nothing undoes the order. Two
//! limits apply: machines per order, and machines of such orders within an hour, of all operators together. An admin may
//! exceed both, or order about all machines at once, with a flag in the
//! order. The audit log records that.

use serde::{Deserialize, Serialize};

/// Limits of orders for several machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OrderLimits {
    /// Most machines per order.
    pub machines: u32,
    /// Most machines of such orders within an hour.
    pub machines_per_hour: u32,
}

impl Default for OrderLimits {
    fn default() -> Self {
        Self { machines: 50, machines_per_hour: 200 }
    }
}

/// Most machines per order, even for an admin.
pub const MAX_MACHINES: usize = 10_000;

/// Most machines that an order looks at to find those of its selector: twice the largest fleet that the benchmarks
/// measure.
///
/// The search is part of one transaction, because the order is about all machines that match, and their number is compared
/// with the one that the operator expects. A search without a bound would hold that transaction open for as long as the
/// fleet is large.
pub const MAX_EXAMINED_MACHINES: usize = 200_000;

/// An order for the machines that match a selector, or that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "they are independent properties of one order")]
pub struct BulkOrder {
    /// How many machines match now; [`MAX_MACHINES`] plus one stands for any larger number.
    pub matched: usize,
    /// Whether the order names its machines, in place of a selector.
    pub is_named: bool,
    /// Whether it must give the number of its machines.
    pub must_be_counted: bool,
    /// How many machines the operator expects, if given.
    pub expected: Option<usize>,
    /// Whether the selector matches every machine, because it has no terms.
    pub matches_all: bool,
    /// Whether the order requests to exceed the limits.
    pub overrides_limits: bool,
    /// Whether the operator is an admin, who may request that.
    pub is_admin: bool,
    /// Machines of such orders within the last hour.
    pub ordered_last_hour: u64,
}

/// Why an order is rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrderLimitRejection {
    /// Name of the reason, for programs.
    pub reason: &'static str,
    /// The reason as a sentence.
    pub message: String,
}

/// Whether such an order may be carried out. The error is why not.
pub fn check_order_limits(order: &BulkOrder, limits: OrderLimits) -> Result<(), OrderLimitRejection> {
    let refuse = |reason, text| Err(OrderLimitRejection { reason, message: text });
    let found = describe_machines(order);
    if order.matched > MAX_MACHINES {
        return refuse(
            "TOO_MANY",
            format!("{found}, and no order is about more than {MAX_MACHINES}; narrow it"),
        );
    }
    if order.overrides_limits && !order.is_admin {
        return refuse(
            "NOT_AN_ADMIN",
            "only an admin may exceed the limits; order without --beyond-limits, or ask an admin".to_owned(),
        );
    }
    if !order.overrides_limits {
        check_limits(order, limits)?;
    }
    match order.expected {
        None if !order.must_be_counted => Ok(()),
        None => {
            let purpose = if order.is_named {
                "because nothing undoes it"
            } else {
                "so that no wrong selector is obeyed"
            };
            refuse("NOT_COUNTED", format!("{found}; give the number that you expect, {purpose}"))
        }
        Some(expected) if expected != order.matched => refuse(
            "OTHER_COUNT",
            format!("{found}, and {expected} were expected; look again. Nothing was changed"),
        ),
        Some(_) => Ok(()),
    }
}

/// Why an order is rejected if the machines of its selector were not found among the first `examined` ones.
#[must_use]
pub fn reject_unfinished_search(examined: usize) -> OrderLimitRejection {
    OrderLimitRejection {
        reason: "TOO_MANY_EXAMINED",
        message: format!(
            "an order looks at no more than {examined} machines to find those of its selector, and there are more to look \
             at; add provider= or phase= to the selector, and give an order for each part. Nothing was changed"
        ),
    }
}

/// The machines of an order, as the beginning of a sentence.
fn describe_machines(order: &BulkOrder) -> String {
    let found = format_machine_count(order.matched);
    if order.is_named { format!("the order names {found}") } else { format!("the selector matches {found}") }
}

/// Whether such an order requests to exceed the limits and really does.
#[must_use]
pub fn exceeds_limits(order: &BulkOrder, limits: OrderLimits) -> bool {
    order.overrides_limits && check_limits(order, limits).is_err()
}

fn check_limits(order: &BulkOrder, limits: OrderLimits) -> Result<(), OrderLimitRejection> {
    let found = describe_machines(order);
    let refuse = |reason, text| Err(OrderLimitRejection { reason, message: text });
    if order.matches_all {
        return refuse(
            "EVERYBODY",
            "the selector matches every machine, which exceeds the limits; narrow it, or let an admin order it with \
             --beyond-limits"
                .to_owned(),
        );
    }
    let (most, per_hour) = (limits.machines, limits.machines_per_hour);
    if order.matched > usize::try_from(most).unwrap_or(usize::MAX) {
        return refuse(
            "TOO_MANY",
            format!(
                "{found}, and the policy's order_limits permit {most} in one order; narrow it, or let an admin order it \
                 with --beyond-limits"
            ),
        );
    }
    let after = order.ordered_last_hour.saturating_add(u64::try_from(order.matched).unwrap_or(u64::MAX));
    if after > u64::from(per_hour) {
        return refuse(
            "TOO_MANY_IN_AN_HOUR",
            format!(
                "{found}; orders of the last hour were about {}, and the policy's order_limits permit {per_hour} within \
                 an hour; wait, or let an admin order it with --beyond-limits",
                order.ordered_last_hour
            ),
        );
    }
    Ok(())
}

/// The number of machines, in words.
#[must_use]
pub fn format_machine_count(machines: usize) -> String {
    match machines {
        0 => "no machine".to_owned(),
        1 => "1 machine".to_owned(),
        more if more > MAX_MACHINES => format!("more than {MAX_MACHINES} machines"),
        more => format!("{more} machines"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bulk_order_is_counted_bounded_and_overridable_by_admins() {
        let order = BulkOrder {
            matched: 50,
            is_named: false,
            must_be_counted: true,
            expected: Some(50),
            matches_all: false,
            overrides_limits: false,
            is_admin: false,
            ordered_last_hour: 150,
        };
        let beyond = BulkOrder { overrides_limits: true, is_admin: true, ordered_last_hour: 1_000, ..order };
        for (order, expected) in [
            (order, None),
            (BulkOrder { matched: 0, expected: Some(0), ..order }, None),
            (BulkOrder { expected: None, ..order }, Some("NOT_COUNTED")),
            // Names need no number, unless nothing undoes the order. The limits are the same.
            (BulkOrder { expected: None, is_named: true, must_be_counted: false, ..order }, None),
            (BulkOrder { expected: None, is_named: true, ..order }, Some("NOT_COUNTED")),
            (
                BulkOrder { matched: 51, expected: None, is_named: true, must_be_counted: false, ..order },
                Some("TOO_MANY"),
            ),
            (
                BulkOrder { expected: Some(49), is_named: true, must_be_counted: false, ..order },
                Some("OTHER_COUNT"),
            ),
            (BulkOrder { expected: Some(49), ..order }, Some("OTHER_COUNT")),
            (BulkOrder { expected: Some(51), ..order }, Some("OTHER_COUNT")),
            (BulkOrder { matched: 51, expected: Some(51), ordered_last_hour: 0, ..order }, Some("TOO_MANY")),
            (BulkOrder { ordered_last_hour: 151, ..order }, Some("TOO_MANY_IN_AN_HOUR")),
            (BulkOrder { ordered_last_hour: u64::MAX, ..order }, Some("TOO_MANY_IN_AN_HOUR")),
            (BulkOrder { matches_all: true, matched: 1, expected: Some(1), ..order }, Some("EVERYBODY")),
            // Limits bind an admin too, unless the order says otherwise, and only an admin may do that.
            (BulkOrder { is_admin: true, matches_all: true, ..order }, Some("EVERYBODY")),
            (BulkOrder { overrides_limits: true, ..order }, Some("NOT_AN_ADMIN")),
            (BulkOrder { matches_all: true, ..beyond }, None),
            (BulkOrder { matched: MAX_MACHINES, expected: Some(MAX_MACHINES), ..beyond }, None),
            // An admin's order must give the expected number too.
            (BulkOrder { expected: None, ..beyond }, Some("NOT_COUNTED")),
            (
                BulkOrder { matched: MAX_MACHINES + 1, expected: Some(MAX_MACHINES + 1), ..beyond },
                Some("TOO_MANY"),
            ),
        ] {
            let refusal = check_order_limits(&order, OrderLimits::default()).err();
            assert_eq!(refusal.as_ref().map(|refusal| refusal.reason), expected, "{order:?}: {refusal:?}");
        }
        let limits = OrderLimits::default();
        assert!(
            exceeds_limits(&beyond, limits)
                && exceeds_limits(&BulkOrder { matches_all: true, ..beyond }, limits)
        );
        let room = BulkOrder { ordered_last_hour: 0, ..beyond };
        assert!(!exceeds_limits(&room, limits), "it may, and does not");
        assert!(
            !exceeds_limits(&BulkOrder { ordered_last_hour: 1_000, ..order }, limits),
            "that is refused anyhow"
        );
        let none = OrderLimits { machines: 0, machines_per_hour: 0 };
        let one = BulkOrder { matched: 1, expected: Some(1), ordered_last_hour: 0, ..order };
        assert_eq!(check_order_limits(&one, none).err().map(|refusal| refusal.reason), Some("TOO_MANY"));
    }

    #[test]
    fn rejection_says_whether_a_selector_or_names_chose_the_machines() {
        let order = BulkOrder {
            matched: 2,
            is_named: true,
            must_be_counted: true,
            expected: None,
            matches_all: false,
            overrides_limits: false,
            is_admin: false,
            ordered_last_hour: 0,
        };
        for (order, expected) in [
            (order, "the order names 2 machines; give the number that you expect, because nothing undoes it"),
            (
                BulkOrder { is_named: false, ..order },
                "the selector matches 2 machines; give the number that you expect, so that no wrong selector is obeyed",
            ),
        ] {
            let refusal = check_order_limits(&order, OrderLimits::default()).err();
            assert_eq!(refusal.map(|refusal| refusal.message).as_deref(), Some(expected));
        }
    }

    #[test]
    fn unfinished_search_names_the_way_out() {
        let refusal = reject_unfinished_search(MAX_EXAMINED_MACHINES);
        assert_eq!(refusal.reason, "TOO_MANY_EXAMINED");
        assert!(refusal.message.contains("no more than 200000 machines"), "{}", refusal.message);
        assert!(refusal.message.contains("add provider= or phase="), "{}", refusal.message);
    }

    #[test]
    fn machines_are_counted_in_words() {
        for (machines, text) in [
            (0, "no machine"),
            (1, "1 machine"),
            (2, "2 machines"),
            (MAX_MACHINES, "10000 machines"),
            (MAX_MACHINES + 1, "more than 10000 machines"),
        ] {
            assert_eq!(format_machine_count(machines), text);
        }
    }
}
