//! Pages of text: the keys, and why a machine is as it is. Each is lines that fit a width.

use crate::output::zone::current_zone;
use crate::target_flags::TargetFlags;
use model::text_layout::{fit_text, format_labelled};
use model::why::Explanation;
use model::why::render::{ExplanationDetail, render_explanation};

/// The keys, each with what it does: see [`crate::top::state::next_state`].
const KEYS: [(&str, &str); 14] = [
    ("tab, 1 2 3", "the next page; overview, machines, clusters"),
    ("up, down, k, j", "select the row before or after"),
    ("page up, page down", "select a row that is a screen away"),
    ("home, end, g, G", "select the first or the last row"),
    ("enter", "open why of the selected machine, or the machines of the selected cluster"),
    ("esc", "back; on machines, first drop the filter"),
    ("/", "filter machines by a selector, such as phase=Silent,location=ams*"),
    ("s", "sort the rows of this page by the next column"),
    ("S", "reverse the order"),
    ("n, p", "the next or the previous page of machines"),
    ("space, r", "read again at once"),
    ("?", "this list of keys"),
    ("q", "quit"),
    ("ctrl-c", "quit, with exit code 130"),
];

/// The list of keys.
#[must_use]
pub fn help_lines(width: usize) -> Vec<String> {
    let keys: Vec<(String, String)> =
        KEYS.iter().map(|(key, meaning)| ((*key).to_owned(), (*meaning).to_owned())).collect();
    let title = "Keys. This page gives no orders; the commands that `why` prints do.\n\n";
    fit_lines(&format!("{title}{}", format_labelled(2, &keys, Some(width))), width)
}

/// What `why` prints about a machine. Commands in it have the flags that name the fleet.
#[must_use]
pub fn explanation_lines(why: &Explanation, flags: &TargetFlags, width: usize) -> Vec<String> {
    fit_lines(&flags.qualify(&render_explanation(why, Some(width), ExplanationDetail::Short)), width)
}

/// A text in lines of this width, with its times in the zone of the user.
#[must_use]
pub fn fit_lines(text: &str, width: usize) -> Vec<String> {
    fit_text(&current_zone().localize(text), Some(width)).lines().map(str::to_owned).collect()
}
