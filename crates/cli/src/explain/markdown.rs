//! A page of the documentation as text for a terminal.
//!
//! Paragraphs and items are wrapped once, at the width of the terminal. Code is not: half a command does something else. A
//! row of a table becomes its first cell with the others below it, each behind its header, because cells are sentences. The
//! target of a link is left out: a terminal cannot follow it.

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};
use unicode_width::UnicodeWidthStr as _;

use model::text_layout::wrap_text;

/// The text of a page, in lines of at most `width` columns.
#[must_use]
pub fn render_page(markdown: &str, width: Option<usize>) -> String {
    let mut page = PageText { width, ..PageText::default() };
    for event in Parser::new_ext(markdown, Options::ENABLE_TABLES) {
        page.add(event);
    }
    let mut text = page.text.trim_end().to_owned();
    text.push('\n');
    text
}

/// A page that is being written.
#[derive(Default)]
struct PageText {
    width: Option<usize>,
    text: String,
    /// The block that is being read.
    block: String,
    /// The lists around it, each with the next number if its items have numbers.
    lists: Vec<Option<u64>>,
    /// What begins the next line of an item.
    marker: Option<String>,
    /// Headers of a table.
    headers: Vec<String>,
    /// Cells of its row.
    cells: Vec<String>,
}

impl PageText {
    fn add(&mut self, event: Event<'_>) {
        match event {
            Event::Text(text) => self.block.push_str(&text),
            Event::Code(code) => {
                self.block.push('`');
                self.block.push_str(&code);
                self.block.push('`');
            }
            Event::SoftBreak => self.block.push(' '),
            Event::HardBreak => self.block.push('\n'),
            Event::Start(tag) => self.start(&tag),
            Event::End(tag) => self.end(tag),
            _ => {}
        }
    }

    fn start(&mut self, tag: &Tag<'_>) {
        match tag {
            Tag::List(first) => {
                self.write_block();
                self.lists.push(*first);
            }
            Tag::Item => {
                self.marker = Some(match self.lists.last_mut() {
                    Some(Some(number)) => {
                        *number += 1;
                        format!("{}. ", *number - 1)
                    }
                    _ => "* ".to_owned(),
                });
            }
            Tag::CodeBlock(_) => self.write_block(),
            _ => {}
        }
    }

    fn end(&mut self, tag: TagEnd) {
        match tag {
            TagEnd::Paragraph | TagEnd::Heading(_) => {
                self.write_block();
                self.write_blank_line();
            }
            TagEnd::Item => self.write_block(),
            TagEnd::List(_) => {
                self.lists.pop();
                if self.lists.is_empty() {
                    self.write_blank_line();
                }
            }
            TagEnd::CodeBlock => self.write_code(),
            TagEnd::TableCell => self.cells.push(std::mem::take(&mut self.block)),
            TagEnd::TableHead => self.headers = std::mem::take(&mut self.cells),
            TagEnd::TableRow => self.write_row(),
            TagEnd::Table => self.write_blank_line(),
            _ => {}
        }
    }

    /// Writes a paragraph, a heading or an item.
    fn write_block(&mut self) {
        let block = std::mem::take(&mut self.block);
        if block.trim().is_empty() {
            return;
        }
        let margin = 2 * self.lists.len();
        let first = match self.marker.take() {
            Some(marker) => format!("{:1$}{marker}", "", margin.saturating_sub(2)),
            None => " ".repeat(margin),
        };
        self.write_wrapped(&first, block.trim());
    }

    /// Writes lines: `first` begins the first one, and the others are indented as much.
    fn write_wrapped(&mut self, first: &str, text: &str) {
        let margin = first.width();
        let mut prefix = first.to_owned();
        for line in wrap_text(text, self.width.map(|width| width.saturating_sub(margin))) {
            self.text.push_str(format!("{prefix}{line}").trim_end());
            self.text.push('\n');
            prefix = " ".repeat(margin);
        }
    }

    /// Writes a block of code as it is.
    fn write_code(&mut self) {
        for line in std::mem::take(&mut self.block).lines() {
            self.text.push_str(format!("    {line}").trim_end());
            self.text.push('\n');
        }
        self.write_blank_line();
    }

    fn write_row(&mut self) {
        let cells = std::mem::take(&mut self.cells);
        let headers = std::mem::take(&mut self.headers);
        for (number, cell) in cells.iter().enumerate().filter(|(_, cell)| !cell.is_empty()) {
            match headers.get(number).filter(|_| number > 0) {
                Some(header) => self.write_wrapped("    ", &format!("{header}: {cell}")),
                None => self.write_wrapped("", cell),
            }
        }
        self.headers = headers;
    }

    fn write_blank_line(&mut self) {
        if !self.text.is_empty() && !self.text.ends_with("\n\n") {
            self.text.push('\n');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
# brake: a *brake* is on

One [link
over lines](other.md#part), and `code` in
**a paragraph**.

* an item
  of two lines
* another:
  1. first
  2. second

```
SELECT 1;
```

| state | phase | then |
| --- | --- | --- |
| it hangs | Provided | the `next` step |
";

    #[test]
    fn page_is_text_without_marks() {
        let expected = "\
brake: a brake is on

One link over lines, and `code` in a paragraph.

* an item of two lines
* another:
  1. first
  2. second

    SELECT 1;

it hangs
    phase: Provided
    then: the `next` step
";
        assert_eq!(render_page(PAGE, None), expected);
    }

    #[test]
    fn paragraphs_and_items_are_wrapped_under_themselves() {
        let text = render_page(PAGE, Some(24));
        assert!(text.contains("One link over lines, and\n`code` in a paragraph.\n"), "{text}");
        let text = render_page("* one two three four five six seven\n", Some(24));
        assert_eq!(text, "* one two three four\n  five six seven\n");
    }
}
