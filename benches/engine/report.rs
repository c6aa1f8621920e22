//! Numbers, what was promised of them, and the page that shows both.
//!
//! The page is for somebody who has never seen the project: it says what is measured and against what, first in
//! one table of all that was promised, then by sections with everything else.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::plot::{Series, line_chart};

/// The target that was promised for a number.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// No target was promised.
    None,
    /// At least this much.
    AtLeast(f64),
    /// At most this much.
    AtMost(f64),
}

/// One number, measured several times.
#[derive(Clone, Debug)]
struct Row {
    what: String,
    unit: &'static str,
    median: f64,
    least: f64,
    most: f64,
    times: usize,
    target: Target,
    /// What was tried, should the target not be reached.
    attempted_remedy: &'static str,
}

/// Numbers that were made in one way.
struct Section {
    title: String,
    how: String,
    rows: Vec<Row>,
}

/// What a page is about, and where it goes.
pub(crate) struct Page {
    /// Below the directory that the report is written to.
    pub(crate) path: &'static str,
    pub(crate) title: &'static str,
    pub(crate) introduction: &'static str,
}

/// What a plot shows, against the number of machines.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plot {
    pub(crate) title: &'static str,
    pub(crate) unit: &'static str,
}

/// Everything that was measured.
pub(crate) struct Report {
    /// Whether numbers are held against what was promised. Those of a quick run are none.
    judges: bool,
    versions: Vec<(&'static str, String)>,
    sections: Vec<Section>,
    plots: Vec<(Plot, Vec<Series>)>,
}

/// The middle one of what was measured; of an even number, the lower of the two in the middle.
pub(crate) fn median(samples: &[f64]) -> f64 {
    quantile(samples, 0.5)
}

/// The value that so great a share of what was measured does not exceed.
pub(crate) fn quantile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a place in a list"
    )]
    let place = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(place.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

/// Prints the current activity for the person who waits.
pub(crate) fn progress(doing: &str) -> Result<()> {
    writeln!(std::io::stdout(), "… {doing}").context("writing to standard output")
}

impl Report {
    pub(crate) fn new(versions: Vec<(&'static str, String)>, judges: bool) -> Self {
        Self { judges, versions, sections: Vec::new(), plots: Vec::new() }
    }

    /// Adds a line to the description of the host and the run.
    pub(crate) fn say(&mut self, name: &'static str, value: String) {
        self.versions.push((name, value));
    }

    /// Begins a section, with what a reader must know of how its numbers were made.
    pub(crate) fn section(&mut self, title: impl Into<String>, how: impl Into<String>) -> Result<()> {
        let section = Section { title: title.into(), how: how.into(), rows: Vec::new() };
        writeln!(std::io::stdout(), "\n{}", section.title).context("writing to standard output")?;
        self.sections.push(section);
        Ok(())
    }

    /// Adds a number to the section begun last, and prints it.
    pub(crate) fn add(
        &mut self,
        what: impl Into<String>,
        unit: &'static str,
        samples: &[f64],
        target: Target,
    ) -> Result<()> {
        let row = Row {
            what: what.into(),
            unit,
            median: median(samples),
            least: quantile(samples, 0.0),
            most: quantile(samples, 1.0),
            times: samples.len(),
            target: if self.judges { target } else { Target::None },
            attempted_remedy: "",
        };
        writeln!(
            std::io::stdout(),
            "  {}: {} {}{}",
            row.what,
            row.value(),
            row.spread(),
            row.held_in_words()
        )?;
        let section = self.sections.last_mut().context("a number stands in a section")?;
        section.rows.push(row);
        Ok(())
    }

    /// Says what was tried to reach the target of the number added last. Shown when it is not reached.
    pub(crate) fn record_attempted_remedy(&mut self, what: &'static str) -> Result<()> {
        let row = self.sections.last_mut().and_then(|section| section.rows.last_mut());
        let row = row.context("what was tried belongs to a number")?;
        row.attempted_remedy = what;
        if row.meets_target() == Some(false) {
            writeln!(std::io::stdout(), "    tried: {what}").context("writing to standard output")?;
        }
        Ok(())
    }

    /// Adds a point to a plot of how something grows with the fleet.
    pub(crate) fn point(&mut self, plot: &Plot, series: &'static str, at: f64, value: f64) {
        let place = self.plots.iter().position(|(known, _)| known.title == plot.title).unwrap_or_else(|| {
            self.plots.push((*plot, Vec::new()));
            self.plots.len() - 1
        });
        let lines = &mut self.plots[place].1;
        match lines.iter_mut().find(|line| line.name == series) {
            Some(line) => line.points.push((at, value)),
            None => lines.push(Series { name: series, points: vec![(at, value)] }),
        }
    }

    /// Writes a page and its plots below `directory`.
    pub(crate) fn write(&self, directory: &Path, page: &Page) -> Result<()> {
        let path = directory.join(page.path);
        let text = self.text(page, &self.draw(directory, page)?)?;
        fs::write(&path, text).with_context(|| path.display().to_string())?;
        writeln!(std::io::stdout(), "\nwritten to {}", path.display()).context("writing to standard output")
    }

    /// Draws the plots, and returns title and place of each as seen from the page.
    fn draw(&self, directory: &Path, page: &Page) -> Result<Vec<(&'static str, String)>> {
        let plots = directory.join("docs/benchmarks");
        fs::create_dir_all(&plots).with_context(|| plots.display().to_string())?;
        let from_page = if page.path.contains('/') { "" } else { "docs/benchmarks/" };
        let mut drawn = Vec::new();
        for (Plot { title, unit }, lines) in &self.plots {
            let name =
                format!("{}.svg", title.replace(|c: char| !c.is_ascii_alphanumeric(), "-").to_lowercase());
            fs::write(plots.join(&name), line_chart(title, "machines", unit, lines)?)?;
            drawn.push((*title, format!("{from_page}{name}")));
        }
        Ok(drawn)
    }

    fn text(&self, page: &Page, plots: &[(&'static str, String)]) -> Result<String> {
        let quick = if self.judges { "" } else { "\n\n**This was a quick run, which measures nothing.**" };
        let mut text = format!("# {}\n\n{}{quick}\n\n## Host and run\n\n", page.title, page.introduction);
        for (name, value) in &self.versions {
            writeln!(text, "* {name}: {value}")?;
        }
        let rows = || self.sections.iter().flat_map(|section| section.rows.iter());
        if rows().any(|row| row.meets_target().is_some()) {
            let reached = rows().filter(|row| row.meets_target() == Some(true)).count();
            let all = rows().filter(|row| row.meets_target().is_some()).count();
            writeln!(
                text,
                "\n## What was promised\n\n{reached} of {all} are reached. Below, each stands again among the \
                 numbers that it was measured with.\n\n\
                 | what | measured | promised | reached |\n| --- | ---: | ---: | --- |"
            )?;
            for row in rows().filter(|row| row.meets_target().is_some()) {
                let reached = row.reached();
                writeln!(
                    text,
                    "| {} | {} | {} | {reached} |",
                    row.what,
                    row.value(),
                    row.target.format_target()
                )?;
            }
        }
        for (title, place) in plots {
            writeln!(text, "\n## How it grows: {}\n\n![{title}]({place})", title.to_lowercase())?;
        }
        for section in &self.sections {
            section.write(&mut text)?;
        }
        Ok(text.trim_end().to_owned() + "\n")
    }
}

impl Section {
    fn write(&self, text: &mut String) -> Result<()> {
        writeln!(
            text,
            "\n## {}\n\n{}\n\n| what | median | least – most | promised | reached |\n| --- | ---: | ---: | ---: | --- |",
            self.title, self.how
        )?;
        for row in &self.rows {
            let (value, spread, promised) = (row.value(), row.spread(), row.target.format_target());
            writeln!(text, "| {} | {value} | {spread} | {promised} | {} |", row.what, row.reached())?;
        }
        for row in &self.rows {
            if row.meets_target() == Some(false) {
                let tried =
                    if row.attempted_remedy.is_empty() { "nothing so far." } else { row.attempted_remedy };
                writeln!(text, "\nNot reached, *{}*. What was tried: {tried}", row.what)?;
            }
        }
        Ok(())
    }
}

impl Row {
    fn value(&self) -> String {
        format!("{} {}", number(self.median), self.unit).trim_end().to_owned()
    }

    fn spread(&self) -> String {
        if self.times < 2 {
            return "once".to_owned();
        }
        format!("{} – {}, {}×", number(self.least), number(self.most), self.times)
    }

    fn meets_target(&self) -> Option<bool> {
        match self.target {
            Target::None => None,
            Target::AtLeast(least) => Some(self.median >= least),
            Target::AtMost(most) => Some(self.median <= most),
        }
    }

    fn reached(&self) -> &'static str {
        match self.meets_target() {
            None => "",
            Some(true) => "yes",
            Some(false) => "**no**",
        }
    }

    fn held_in_words(&self) -> String {
        match self.meets_target() {
            None => String::new(),
            Some(true) => format!("; target {}", self.target.format_target()),
            Some(false) => format!("; NOT REACHED, target {}", self.target.format_target()),
        }
    }
}

impl Target {
    fn format_target(self) -> String {
        match self {
            Self::None => String::new(),
            Self::AtLeast(least) => format!("≥ {}", number(least)),
            Self::AtMost(most) => format!("≤ {}", number(most)),
        }
    }
}

/// Three digits that count.
fn number(value: f64) -> String {
    let text = match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    };
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}
