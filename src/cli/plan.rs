//! `plan`: what the loops would do, and when, before they do it.
//!
//! The plan is [`crate::model::plan`]'s; here it is asked for and printed. Of a configuration file only what it
//! says of the policy is read, and sent: the rest may be secret.

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::find::id_of;
use crate::cli::command;
use crate::cli::error::CliError;
use crate::cli::get::json;
use crate::cli::machine::find;
use crate::cli::output::{Format, table, width};
use crate::cli::remote_outlook;
use crate::cli::source::Source;
use crate::model::access::Scope;
use crate::model::layout::wrapped;
use crate::model::machine_view::MachineName;
use crate::model::pause::Pause;
use crate::model::plan::diff::Difference;
use crate::model::plan::foreseen::{Foreseen, Question, What, foresee};
use crate::model::plan::{ASSUMPTIONS, Row};
use crate::model::policy_flags::PolicyFlags;
use crate::model::process::Process;
use crate::model::telling::{absolute, relative};
use crate::model::time::Timestamp;

/// What was foreseen, whoever was asked.
pub struct Told {
    /// The machine that was asked about.
    pub name: Option<MachineName>,
    /// All that is to be shown of it; it may be less than there is.
    pub foreseen: Foreseen,
    /// How many rows or differences there are.
    pub total: usize,
    /// What is taken for granted.
    pub assumptions: Vec<String>,
}

#[derive(Serialize)]
struct PlanAnswer<'a> {
    at: Timestamp,
    until: Timestamp,
    cut: bool,
    rows: &'a [Row],
    /// Pauses of loops: what those would begin is left out.
    paused: &'a [Pause],
    assumptions: &'a [String],
}

#[derive(Serialize)]
struct DiffAnswer<'a> {
    at: Timestamp,
    until: Timestamp,
    differences: &'a [Difference],
    assumptions: &'a [String],
}

/// `plan`.
pub async fn plan(source: &Source, asked: &command::Plan, format: Format) -> Result<String, CliError> {
    let change = asked.diff.as_deref().map(configuration).transpose()?;
    let told = match source {
        Source::Direct(bmdb) => read(bmdb, asked, change.as_deref()).await?,
        Source::Api(remote) => {
            // A table ends at its limit; what is for programs is whole.
            let limit = if format == Format::Table { asked.limit } else { 0 };
            remote_outlook::plan(remote, asked, change, limit).await?
        }
    };
    let (at, until, assumptions) = (told.foreseen.at, told.foreseen.until, &told.assumptions[..]);
    match (&told.foreseen.what, format) {
        (What::Rows(rows), Format::Json) => {
            let (cut, paused) = (told.foreseen.cut, &told.foreseen.paused[..]);
            json(&PlanAnswer { at, until, cut, rows, paused, assumptions })
        }
        (What::Differences(differences), Format::Json) => {
            json(&DiffAnswer { at, until, differences, assumptions })
        }
        (What::Rows(rows), Format::Table) if rows.is_empty() => {
            Ok(nothing(&told, asked) + &pauses(&told.foreseen))
        }
        (What::Rows(rows), Format::Table) => Ok(render(&told, rows, asked)),
        (What::Differences(found), Format::Table) => Ok(diff(found, told.total, asked)),
    }
}

async fn read(bmdb: &Bmdb, asked: &command::Plan, change: Option<&str>) -> Result<Told, CliError> {
    let name = match &asked.machine {
        Some(machine) => Some(find(bmdb, machine).await?),
        None => None,
    };
    let question = Question {
        machine: name.as_ref().map(id_of),
        process: asked.process.as_deref().and_then(|process| process.parse::<Process>().ok()),
        horizon: asked.horizon,
        change: change.map(PolicyFlags::of_configuration).transpose().map_err(CliError::Wrong)?,
        scope: Scope::Everything,
    };
    let foreseen = foresee(bmdb.fleet_view().await?, &question);
    let total = match &foreseen.what {
        What::Rows(rows) => rows.len(),
        What::Differences(found) => found.len(),
    };
    Ok(Told { name, foreseen, total, assumptions: ASSUMPTIONS.map(str::to_owned).to_vec() })
}

/// What a configuration file says of the policy, once that can be read.
fn configuration(path: &Path) -> Result<String, CliError> {
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| CliError::Wrong(format!("cannot read the configuration file {shown}: {error}")))?;
    let part = PolicyFlags::of_configuration(&text).and_then(|_| PolicyFlags::part_of_configuration(&text));
    part.map_err(|problem| CliError::Wrong(format!("the configuration file {shown}: {problem}")))
}

fn render(told: &Told, rows: &[Row], asked: &command::Plan) -> String {
    let limit = usize::try_from(asked.limit).unwrap_or(usize::MAX);
    let rows: Vec<Vec<String>> = rows.iter().take(limit).map(|row| line(row, told.foreseen.at)).collect();
    let mut text = table(&["AT (UTC)", "IN", "MACHINE", "PROCESS", "WHAT"], &rows, width());
    if told.total > limit {
        let _ = writeln!(text, "\nthe first {limit} of {}: raise --limit", told.total);
    }
    if told.foreseen.cut {
        let _ =
            writeln!(text, "\nthere is so much to do that this ends at {}", absolute(told.foreseen.until));
    }
    text.push_str(&pauses(&told.foreseen));
    text.push('\n');
    text.push_str(&assumed());
    text
}

/// What is left out because loops are paused.
fn pauses(foreseen: &Foreseen) -> String {
    let mut text = String::new();
    for pause in &foreseen.paused {
        let sentence = format!("{}; what it would begin is left out", pause.sentence(foreseen.at));
        let _ = write!(text, "\n{}\n", wrapped(&sentence, width()).join("\n"));
    }
    text
}

fn line(row: &Row, now: Timestamp) -> Vec<String> {
    let when = if row.under_way {
        "under way".to_owned()
    } else {
        relative(row.at, now).trim_start_matches("in ").replace("just now", "now")
    };
    let what = row.what.clone();
    vec![moment(row.at), when, row.name.short(), row.process.to_owned(), what]
}

fn moment(at: Timestamp) -> String {
    at.format("%Y-%m-%d %H:%M:%S").to_string()
}

fn assumed() -> String {
    let sentence = "Assumed: what is tried succeeds, silent agents stay silent until then, and nobody else changes \
                    anything. docs/plan.md says it in full.";
    let mut text = wrapped(sentence, width()).join("\n");
    text.push('\n');
    text
}

/// That nothing is due, and of one machine why.
fn nothing(told: &Told, asked: &command::Plan) -> String {
    let horizon = asked.horizon;
    let what =
        asked.process.as_deref().map_or_else(|| "nothing".to_owned(), |process| format!("no {process}"));
    let Some(name) = &told.name else { return format!("{what} is due within {horizon}\n") };
    let mut text = format!("{what} is due on {} within {horizon}\n", name.short());
    for wait in &told.foreseen.waits {
        let _ = writeln!(text, "  {}: {}", wait.lane, wait.reason);
    }
    text
}

fn diff(found: &[Difference], total: usize, asked: &command::Plan) -> String {
    if found.is_empty() {
        return format!("it would change nothing within {}\n", asked.horizon);
    }
    let limit = usize::try_from(asked.limit).unwrap_or(usize::MAX);
    let shown = |at: Option<Timestamp>| at.map_or_else(|| "-".to_owned(), moment);
    let rows: Vec<Vec<String>> = found
        .iter()
        .take(limit)
        .map(|one| {
            let process = one.process.to_owned();
            vec![shown(one.before), shown(one.after), one.name.short(), process, one.what.clone()]
        })
        .collect();
    let mut text = table(&["AS IT IS (UTC)", "AS IT WOULD BE", "MACHINE", "PROCESS", "WHAT"], &rows, width());
    if total > limit {
        let _ = writeln!(text, "\nthe first {limit} of {total} differences: raise --limit");
    }
    text.push('\n');
    text.push_str(&assumed());
    text
}
