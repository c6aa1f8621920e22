//! How many machines one order may be about: the blast radius of operators.
//!
//! An order about machines that a filter means names how many it expects, because filters are easily wrong and
//! fleets change between a look and an order. It is bounded twice: how many one order may be about, and how
//! many such orders may be about within an hour, all operators together. An admin may go beyond both, and
//! about all machines at once, by saying so in the order; the audit has it.

use serde::{Deserialize, Serialize};

/// Bounds of orders about many machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OrderLimits {
    /// Most machines that one order may be about.
    pub machines: u32,
    /// Most machines that such orders may be about within an hour.
    pub machines_per_hour: u32,
}

impl Default for OrderLimits {
    fn default() -> Self {
        Self { machines: 50, machines_per_hour: 200 }
    }
}

/// Most machines that an order may be about, whoever gives it.
pub const MOST: usize = 10_000;

/// An order about the machines that a filter means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// How many it means now; [`MOST`] and one stands for all that are more.
    pub found: usize,
    /// How many whoever orders expects.
    pub expected: Option<usize>,
    /// Whether the filter leaves out nobody.
    pub everybody: bool,
    /// Whether it is said to go beyond the limits.
    pub beyond_limits: bool,
    /// Whether whoever orders may say so.
    pub admin: bool,
    /// Machines that such orders were about within the last hour.
    pub within_hour: u64,
}

/// Why an order is not carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Its name, for programs.
    pub reason: &'static str,
    /// The sentence.
    pub said: String,
}

/// Whether such an order may be carried out; if not, why.
pub fn admit(asked: &Asked, limits: OrderLimits) -> Result<(), Refusal> {
    let refuse = |reason, said| Err(Refusal { reason, said });
    let found = count(asked.found);
    if asked.found > MOST {
        return refuse(
            "TOO_MANY",
            format!("the filter means {found}, and no order is about more than {MOST}; narrow it"),
        );
    }
    if asked.beyond_limits && !asked.admin {
        return refuse(
            "NOT_AN_ADMIN",
            "only an admin may order beyond the limits; order without that, or ask one".to_owned(),
        );
    }
    if !asked.beyond_limits {
        within(asked, limits)?;
    }
    match asked.expected {
        None => refuse(
            "NOT_COUNTED",
            format!("the filter means {found}; say how many you expect, so that no wrong filter is obeyed"),
        ),
        Some(expected) if expected != asked.found => refuse(
            "OTHER_COUNT",
            format!(
                "the filter means {found}, and {expected} were expected; look again. Nothing was changed"
            ),
        ),
        Some(_) => Ok(()),
    }
}

/// Whether such an order goes beyond the limits, and not only may.
#[must_use]
pub fn goes_beyond(asked: &Asked, limits: OrderLimits) -> bool {
    asked.beyond_limits && within(asked, limits).is_err()
}

fn within(asked: &Asked, limits: OrderLimits) -> Result<(), Refusal> {
    let found = count(asked.found);
    let refuse = |reason, said| Err(Refusal { reason, said });
    if asked.everybody {
        return refuse(
            "EVERYBODY",
            "the filter leaves out nobody; an order about all machines goes beyond the limits, which an admin may"
                .to_owned(),
        );
    }
    let (most, per_hour) = (limits.machines, limits.machines_per_hour);
    if asked.found > usize::try_from(most).unwrap_or(usize::MAX) {
        return refuse(
            "TOO_MANY",
            format!(
                "the filter means {found}, and one order may be about {most}; narrow it, or let an admin order beyond \
                 the limits (the policy's order_limits)"
            ),
        );
    }
    let after = asked.within_hour.saturating_add(u64::try_from(asked.found).unwrap_or(u64::MAX));
    if after > u64::from(per_hour) {
        return refuse(
            "TOO_MANY_IN_AN_HOUR",
            format!(
                "the filter means {found}, and such orders were about {} within the last hour, of {per_hour} that \
                 may be; wait, or let an admin order beyond the limits (the policy's order_limits)",
                asked.within_hour
            ),
        );
    }
    Ok(())
}

/// So many machines, in words.
#[must_use]
pub fn count(machines: usize) -> String {
    match machines {
        0 => "no machine".to_owned(),
        1 => "1 machine".to_owned(),
        more if more > MOST => format!("more than {MOST} machines"),
        more => format!("{more} machines"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_about_many_is_bounded_counted_and_an_admins_beyond_that() {
        let asked = Asked {
            found: 50,
            expected: Some(50),
            everybody: false,
            beyond_limits: false,
            admin: false,
            within_hour: 150,
        };
        let beyond = Asked { beyond_limits: true, admin: true, within_hour: 1_000, ..asked };
        for (asked, expected) in [
            (asked, None),
            (Asked { found: 0, expected: Some(0), ..asked }, None),
            (Asked { expected: None, ..asked }, Some("NOT_COUNTED")),
            (Asked { expected: Some(49), ..asked }, Some("OTHER_COUNT")),
            (Asked { expected: Some(51), ..asked }, Some("OTHER_COUNT")),
            (Asked { found: 51, expected: Some(51), within_hour: 0, ..asked }, Some("TOO_MANY")),
            (Asked { within_hour: 151, ..asked }, Some("TOO_MANY_IN_AN_HOUR")),
            (Asked { within_hour: u64::MAX, ..asked }, Some("TOO_MANY_IN_AN_HOUR")),
            (Asked { everybody: true, found: 1, expected: Some(1), ..asked }, Some("EVERYBODY")),
            // An admin is bound like anybody, unless they say otherwise, and only they may.
            (Asked { admin: true, everybody: true, ..asked }, Some("EVERYBODY")),
            (Asked { beyond_limits: true, ..asked }, Some("NOT_AN_ADMIN")),
            (Asked { everybody: true, ..beyond }, None),
            (Asked { found: MOST, expected: Some(MOST), ..beyond }, None),
            // And they count, too.
            (Asked { expected: None, ..beyond }, Some("NOT_COUNTED")),
            (Asked { found: MOST + 1, expected: Some(MOST + 1), ..beyond }, Some("TOO_MANY")),
        ] {
            let refusal = admit(&asked, OrderLimits::default()).err();
            assert_eq!(refusal.as_ref().map(|refusal| refusal.reason), expected, "{asked:?}: {refusal:?}");
        }
        let limits = OrderLimits::default();
        assert!(goes_beyond(&beyond, limits) && goes_beyond(&Asked { everybody: true, ..beyond }, limits));
        let room = Asked { within_hour: 0, ..beyond };
        assert!(!goes_beyond(&room, limits), "it may, and does not");
        assert!(!goes_beyond(&Asked { within_hour: 1_000, ..asked }, limits), "that is refused anyhow");
        let none = OrderLimits { machines: 0, machines_per_hour: 0 };
        let one = Asked { found: 1, expected: Some(1), within_hour: 0, ..asked };
        assert_eq!(admit(&one, none).err().map(|refusal| refusal.reason), Some("TOO_MANY"));
    }

    #[test]
    fn machines_are_counted_in_words() {
        for (machines, said) in [
            (0, "no machine"),
            (1, "1 machine"),
            (2, "2 machines"),
            (MOST, "10000 machines"),
            (MOST + 1, "more than 10000 machines"),
        ] {
            assert_eq!(count(machines), said);
        }
    }
}
