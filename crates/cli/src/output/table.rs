//! Tables, as wide as the terminal.
//!
//! On a terminal that is too narrow, columns of sentences shrink first: a sentence ends behind a whole word, with an
//! ellipsis. If that is not enough, columns give way, the least important one first, and an ellipsis ends the line of
//! headers. A word is never split, and the first column always stays. When standard output is no terminal, a table is
//! complete. Widths are columns of a terminal and not characters: `unicode-width` knows which characters take two
//! columns, and which none.

use unicode_width::UnicodeWidthStr as _;

use crate::output::terminal::terminal_columns;
use crate::output::zone::current_zone;

/// Columns between two cells.
const GAP: usize = 2;
/// Width to which a column of sentences shrinks before others give way, in columns of the terminal.
const LEAST_SENTENCE: usize = 16;
/// Least number of words of a sentence. A time has two, and does not shrink.
const SENTENCE_WORDS: usize = 3;
/// Marks the part that does not fit.
pub(crate) const ELLIPSIS: &str = "…";

/// Columns of the terminal on standard output; `None` if that is no terminal, or if its width is not known.
#[must_use]
pub fn terminal_width() -> Option<usize> {
    terminal_columns(&std::io::stdout())
}

/// Formats rows under headers, as wide as necessary and as the terminal allows.
#[must_use]
pub fn format_table(headers: &[&str], rows: &[Vec<String>], width: Option<usize>) -> String {
    let heads: Vec<String> = headers.iter().map(|header| (*header).to_owned()).collect();
    let layout = TableLayout::new(headers, true, rows, width);
    layout.format_head(&heads) + &layout.format_rows(rows)
}

/// Formats rows in the same way, without the line of headers.
#[must_use]
pub fn format_rows(headers: &[&str], rows: &[Vec<String>], width: Option<usize>) -> String {
    TableLayout::new(headers, false, rows, width).format_rows(rows)
}

/// The text, followed by spaces up to this number of columns.
pub(crate) fn pad_right(text: &str, columns: usize) -> String {
    format!("{text}{:1$}", "", columns.saturating_sub(text.width()))
}

pub(crate) fn or_dash(text: Option<&str>) -> String {
    text.unwrap_or("-").to_owned()
}

/// A column before it is laid out.
#[derive(Clone, Copy, Debug)]
struct ColumnSize {
    /// Its place in a row.
    index: usize,
    /// The width of its widest cell.
    natural: usize,
    /// The least width that it can have.
    least: usize,
    /// Whether a cell has several words.
    has_words: bool,
    /// How long it stays: the lowest gives way first.
    priority: u8,
}

/// The columns that a table shows, each with its place in a row and its width.
#[derive(Debug)]
pub(crate) struct TableLayout {
    columns: Vec<(usize, usize)>,
    is_complete: bool,
}

impl TableLayout {
    /// The layout for these rows, and for the headers if they are printed.
    pub(crate) fn new(headers: &[&str], has_head: bool, rows: &[Vec<String>], width: Option<usize>) -> Self {
        let count = rows.iter().map(Vec::len).chain([headers.len()]).max().unwrap_or_default();
        let sizes: Vec<ColumnSize> = (0..count)
            .map(|index| {
                let header = headers.get(index).copied().unwrap_or_default();
                measure_column(index, header, if has_head { header.width() } else { 0 }, rows)
            })
            .collect();
        match width {
            Some(width) => fit_columns(sizes, width),
            None => Self {
                columns: sizes.iter().map(|size| (size.index, size.natural)).collect(),
                is_complete: true,
            },
        }
    }

    /// The line of headers. An ellipsis ends it if columns gave way.
    pub(crate) fn format_head(&self, headers: &[String]) -> String {
        let line = self.format_row(headers);
        if self.is_complete { line } else { format!("{}  {ELLIPSIS}\n", line.trim_end()) }
    }

    fn format_rows(&self, rows: &[Vec<String>]) -> String {
        rows.iter().map(|row| self.format_row(row)).collect()
    }

    fn format_row(&self, row: &[String]) -> String {
        let cells = self.columns.iter().map(|(index, width)| {
            let cell = row.get(*index).map(|cell| one_line(cell)).unwrap_or_default();
            pad_right(&shorten(&cell, *width), *width)
        });
        let line = cells.collect::<Vec<_>>().join(&" ".repeat(GAP));
        format!("{}\n", line.trim_end())
    }

    /// The place in a row of the last column that is shown.
    pub(crate) fn last_column(&self) -> Option<usize> {
        self.columns.last().map(|(index, _)| *index)
    }

    /// A row that the layout was perhaps not made for. A word that is wider than its column moves the rest of the line,
    /// and the last column has what is left of `width`.
    pub(crate) fn format_later_row(&self, row: &[String], width: Option<usize>) -> String {
        let last = self.columns.len().saturating_sub(1);
        let mut line = String::new();
        for (place, (index, column)) in self.columns.iter().enumerate() {
            if place > 0 {
                line.push_str(&" ".repeat(GAP));
            }
            let cell = row.get(*index).map(|cell| one_line(cell)).unwrap_or_default();
            let is_sentence = cell.split_whitespace().count() >= SENTENCE_WORDS;
            let shown = match width {
                Some(width) if place == last => shorten(&cell, width.saturating_sub(line.width())),
                Some(_) if is_sentence => shorten(&cell, LEAST_SENTENCE.max(*column)),
                _ => cell,
            };
            line.push_str(&pad_right(&shown, *column));
        }
        format!("{}\n", line.trim_end())
    }
}

fn measure_column(index: usize, header: &str, head_width: usize, rows: &[Vec<String>]) -> ColumnSize {
    let cells = rows.iter().filter_map(|row| row.get(index));
    let (mut natural, mut words) = (head_width, 1);
    for cell in cells {
        let cell = one_line(cell);
        natural = natural.max(cell.width());
        words = words.max(cell.split_whitespace().count());
    }
    let shrunk = natural.min(LEAST_SENTENCE.max(head_width));
    let least = if words >= SENTENCE_WORDS { shrunk } else { natural };
    ColumnSize { index, natural, least, has_words: words > 1, priority: column_priority(index, header) }
}

/// How long a column stays while the terminal gets narrower.
fn column_priority(index: usize, header: &str) -> u8 {
    match header {
        _ if index == 0 => u8::MAX,
        "PHASE" | "STATE" | "STATUS" | "STAGE" | "ISSUE" | "ABOUT" | "EVENT" | "MACHINE" => 4,
        "WHY" | "REASON" | "EVIDENCE" | "DETAIL" | "BECAUSE" | "WHAT" | "OUTCOME" => 3,
        "LABELS" | "ADDRESS" | "LOCATION" | "PRIORITY" | "VERSION" | "RELEASE" => 1,
        "UUID" | "ID" | "AUDIT" | "SESSION" | "FENCE" | "PID" | "SHA-256" | "TOKEN" => 0,
        _ => 2,
    }
}

/// The columns that fit a width, and how wide each is. The first one always does.
fn fit_columns(mut sizes: Vec<ColumnSize>, width: usize) -> TableLayout {
    let (mut available, mut is_complete) = (width + GAP, true);
    while sizes.len() > 1 && total_width(sizes.iter().map(|size| size.least)) > available {
        // Of those that are equally important, the last one.
        let lowest = sizes.iter().enumerate().rev().min_by_key(|(_, size)| size.priority);
        let Some((place, _)) = lowest else { break };
        sizes.remove(place);
        if is_complete {
            available = available.saturating_sub(GAP + ELLIPSIS.width());
            is_complete = false;
        }
    }
    let mut widths: Vec<usize> = sizes.iter().map(|size| size.natural).collect();
    while total_width(widths.iter().copied()) > available {
        let shrinks = |place: &usize| sizes.get(*place).is_some_and(|size| widths[*place] > size.least);
        let Some(widest) = (0..widths.len()).filter(shrinks).max_by_key(|place| widths[*place]) else {
            break;
        };
        widths[widest] -= 1;
    }
    // A column that is alone cannot give way.
    if let ([size], [only]) = (sizes.as_slice(), widths.as_mut_slice())
        && size.has_words
    {
        *only = (*only).min(available.saturating_sub(GAP).max(1));
    }
    TableLayout { columns: sizes.iter().map(|size| size.index).zip(widths).collect(), is_complete }
}

/// The width of columns, with a gap behind each.
fn total_width(widths: impl Iterator<Item = usize>) -> usize {
    widths.map(|width| width + GAP).sum()
}

/// A cell on one line, with its times in the zone of the user: a line that is cut may contain half of a time.
fn one_line(cell: &str) -> String {
    current_zone().localize(cell).replace(['\n', '\r', '\t'], " ")
}

/// The whole words of a text that fit a width, with an ellipsis if there are more. A single word is not shortened.
pub(crate) fn shorten(text: &str, width: usize) -> String {
    if text.width() <= width || !text.contains(' ') {
        return text.to_owned();
    }
    let mut short = String::new();
    for word in text.split(' ') {
        let gap = usize::from(!short.is_empty());
        if short.width() + gap + word.width() + ELLIPSIS.width() > width {
            break;
        }
        short.push_str(&" "[..gap]);
        short.push_str(word);
    }
    short.push_str(ELLIPSIS);
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(rows: &[&[&str]]) -> Vec<Vec<String>> {
        rows.iter().map(|row| row.iter().map(|cell| (*cell).to_owned()).collect()).collect()
    }

    #[test]
    fn table_without_a_terminal_is_complete() {
        let rows = rows(&[&["a", "some long\nreason"], &["longer", "b"]]);
        let headers = ["NAME", "WHY"];
        assert_eq!(format_table(&headers, &rows, None), "NAME    WHY\na       some long reason\nlonger  b\n");
        assert_eq!(format_rows(&headers, &rows[..1], None), "a  some long reason\n");
        assert_eq!(format_rows(&headers, &[], None), "");
    }

    #[test]
    fn sentences_shrink_to_whole_words_and_then_columns_give_way() {
        let rows = rows(&[
            &["sim-1", "Ready", "192.0.2.1", "it waits for a person who looks at it"],
            &["sim-20", "New", "192.0.2.20", "-"],
        ]);
        let headers = ["NAME", "PHASE", "ADDRESS", "WHY"];
        for (width, expected) in [
            (
                80,
                "NAME    PHASE  ADDRESS     WHY\nsim-1   Ready  192.0.2.1   it waits for a person who looks at it\n\
                 sim-20  New    192.0.2.20  -\n",
            ),
            (
                50,
                "NAME    PHASE  ADDRESS     WHY\nsim-1   Ready  192.0.2.1   it waits for a person…\n\
                 sim-20  New    192.0.2.20  -\n",
            ),
            (40, "NAME    PHASE  WHY  …\nsim-1   Ready  it waits for a person…\nsim-20  New    -\n"),
            (24, "NAME    PHASE  …\nsim-1   Ready\nsim-20  New\n"),
            (10, "NAME  …\nsim-1\nsim-20\n"),
            (3, "NAME  …\nsim-1\nsim-20\n"),
        ] {
            assert_eq!(format_table(&headers, &rows, Some(width)), expected, "{width}");
        }
    }

    #[test]
    fn columns_are_those_of_the_terminal() {
        let rows = rows(&[&["東京", "東京都 は 大きい 都市"], &["e\u{301}", "b"], &["שלום", "👩 👩"]]);
        let headers = ["AT", "WHY"];
        let whole = "AT    WHY\n東京  東京都 は 大きい 都市\ne\u{301}     b\nשלום  👩 👩\n";
        assert_eq!(format_table(&headers, &rows, None), whole);
        assert_eq!(format_table(&headers, &rows, Some(27)), whole);
        let narrow = "AT    WHY\n東京  東京都 は 大きい…\ne\u{301}     b\nשלום  👩 👩\n";
        assert_eq!(format_table(&headers, &rows, Some(26)), narrow);
    }

    #[test]
    fn no_line_is_wider_than_the_terminal_unless_one_word_is() {
        let rows = rows(&[
            &[
                "rack-a/sim-0001",
                "NeedsHuman",
                "東京 2",
                "row=7,owner=kim",
                "tried in vain: restart-agent, reboot",
            ],
            &["rack-a/sim-0002", "Ready", "ams 1", "-", ""],
            &["שלום-עולם-0003", "Silent", "👩", "-", "its agent last reported 12m ago"],
        ]);
        let headers = ["NAME", "PHASE", "LOCATION", "LABELS", "WHY"];
        let whole = format_table(&headers, &rows, None);
        for width in 1..120 {
            let table = format_table(&headers, &rows, Some(width));
            for line in table.lines() {
                let is_one_word = line.trim_end_matches(['…', ' ']).split_whitespace().count() == 1;
                assert!(line.width() <= width || is_one_word, "{width}: {line}");
                for word in line.split_whitespace().map(|word| word.trim_end_matches('…')) {
                    let is_word = word.is_empty() || whole.split_whitespace().any(|known| known == word);
                    assert!(is_word, "{width}: {word} was split: {line}");
                }
            }
        }
    }
}
