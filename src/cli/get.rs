//! `get`: lists.

use std::fmt::Write as _;

use serde::Serialize;
use uuid::Uuid;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect::{self, Cursor, MachineLine, ProviderLine, SessionLine, WorkLine, order_of};
use crate::cli::command::Machines;
use crate::cli::error::CliError;
use crate::cli::output::{Format, table, width};
use crate::model::machine_view::{BrakeLine, MachineName};
use crate::model::telling::{relative, rough};
use crate::model::time::{Timestamp, between};

/// Largest page read at once, so that no single statement is long.
const PAGE: i64 = 1000;

#[derive(Serialize)]
struct MachinesAnswer {
    machines: Vec<MachineLine>,
    /// Value for `--after` that goes on with the list; `null` at its end.
    next: Option<String>,
}

/// `get machines`: by phase in the order of a machine's life, then provider, then id.
pub async fn machines(bmdb: &Bmdb, filters: &Machines, format: Format) -> Result<String, CliError> {
    let limit = i64::from(filters.limit);
    let after = filters.after.as_deref().map(read_cursor).transpose()?;
    let (phases, wanted) = (filters.phase.clone(), filters.provider.clone());
    let (mut machines, now) = bmdb
        .inspect(move |tx| {
            let (after, phases, wanted) = (after.clone(), phases.clone(), wanted.clone());
            Box::pin(async move {
                let now = inspect::now(tx).await?;
                let mut machines: Vec<MachineLine> = Vec::new();
                for (phase, provider) in inspect::classes(tx).await? {
                    let asked = (phases.is_empty()
                        || phases.iter().any(|asked| asked.eq_ignore_ascii_case(&phase)))
                        && (wanted.is_empty() || wanted.contains(&provider));
                    let Some(mut from) = start_of(&phase, &provider, after.as_ref()).filter(|_| asked) else {
                        continue;
                    };
                    // One more than asked for tells whether there are more.
                    loop {
                        let missing = limit + 1 - i64::try_from(machines.len()).unwrap_or(i64::MAX);
                        let page =
                            inspect::machines_of_class(tx, (&phase, &provider), from, missing.min(PAGE));
                        let page = page.await?;
                        let full = page.len() == usize::try_from(missing.min(PAGE)).unwrap_or(0);
                        from = page.last().map_or(from, |line| line.name.machine);
                        machines.extend(page);
                        if !full || machines.len() > usize::try_from(limit).unwrap_or(usize::MAX) {
                            break;
                        }
                    }
                    if machines.len() > usize::try_from(limit).unwrap_or(usize::MAX) {
                        break;
                    }
                }
                Ok::<_, BmdbError>((machines, now))
            })
        })
        .await?;
    let more = machines.len() > usize::try_from(limit).unwrap_or(usize::MAX);
    machines.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
    let next = machines.last().filter(|_| more).map(write_cursor);
    if format == Format::Json {
        return json(&MachinesAnswer { machines, next });
    }
    if machines.is_empty() {
        return Ok("no machines\n".to_owned());
    }
    let rows: Vec<Vec<String>> = machines.iter().map(|line| machine_row(line, now)).collect();
    let headers = ["MACHINE", "NAME", "PHASE", "SINCE", "HEARTBEAT", "ADDRESS", "WHY"];
    let mut text = table(&headers, &rows, width());
    if let Some(next) = next {
        let _ = write!(
            text,
            "\nfirst {limit}, and there are more: raise --limit, narrow with --phase or --provider, or go on with\n  \
             --after '{next}'\n"
        );
    }
    Ok(text)
}

fn machine_row(line: &MachineLine, now: Timestamp) -> Vec<String> {
    vec![
        line.name.machine.to_string()[..8].to_owned(),
        match &line.name.provider_id {
            Some(_) => line.name.short(),
            None => "-".to_owned(),
        },
        line.phase.clone(),
        rough(between(line.phase_since, now)),
        line.heartbeat_at.map_or_else(|| "-".to_owned(), |at| relative(at, now)),
        line.address.clone().unwrap_or_else(|| "-".to_owned()),
        match &line.working {
            Some(process) => format!("{process} is under way"),
            None => line.reason.clone(),
        },
    ]
}

/// Where to begin in a class, or `None` when the list has passed it.
fn start_of(phase: &str, provider: &str, after: Option<&Cursor>) -> Option<Uuid> {
    let Some(cursor) = after else { return Some(Uuid::nil()) };
    let class = (order_of(phase), phase, provider);
    match class.cmp(&(order_of(&cursor.phase), cursor.phase.as_str(), cursor.provider.as_str())) {
        std::cmp::Ordering::Less => None,
        std::cmp::Ordering::Equal => Some(cursor.machine),
        std::cmp::Ordering::Greater => Some(Uuid::nil()),
    }
}

fn write_cursor(line: &MachineLine) -> String {
    let provider = line.name.provider.as_deref().unwrap_or_default();
    format!("{}/{provider}/{}", line.phase, line.name.machine)
}

/// A provider's name may hold anything, the other two parts no slash.
fn read_cursor(text: &str) -> Result<Cursor, CliError> {
    text.split_once('/')
        .and_then(|(phase, rest)| {
            let (provider, machine) = rest.rsplit_once('/')?;
            let machine = Uuid::try_parse(machine).ok()?;
            Some(Cursor { phase: phase.to_owned(), provider: provider.to_owned(), machine })
        })
        .ok_or_else(|| {
            CliError::Wrong(format!(
                "{text:?} is no place in a list; --after takes what an earlier `get machines` ended with"
            ))
        })
}

#[derive(Serialize)]
struct SessionsAnswer {
    sessions: Vec<SessionLine>,
    more: bool,
}

/// `get sessions`.
pub async fn sessions(bmdb: &Bmdb, limit: u32, format: Format) -> Result<String, CliError> {
    let (mut sessions, now) = bmdb
        .inspect(move |tx| {
            Box::pin(async move {
                Ok::<_, BmdbError>((
                    inspect::sessions(tx, i64::from(limit) + 1).await?,
                    inspect::now(tx).await?,
                ))
            })
        })
        .await?;
    let more = drop_surplus(&mut sessions, limit);
    if format == Format::Json {
        return json(&SessionsAnswer { sessions, more });
    }
    if sessions.is_empty() {
        return Ok("no open sessions: no shepherd works on this BMDB\n".to_owned());
    }
    let rows: Vec<Vec<String>> = sessions
        .iter()
        .map(|line| {
            vec![
                line.session.to_string(),
                line.component.clone(),
                or_dash(line.host.as_deref()),
                or_dash(line.pid.map(|pid| pid.to_string()).as_deref()),
                or_dash(line.version.as_deref()),
                rough(between(line.started_at, now)),
                relative(line.deadline, now),
                line.work.to_string(),
            ]
        })
        .collect();
    let headers = ["SESSION", "COMPONENT", "HOST", "PID", "VERSION", "AGE", "ENDS", "WORK"];
    Ok(table(&headers, &rows, width()) + &more_note(more, limit))
}

#[derive(Serialize)]
struct WorkAnswer {
    work: Vec<WorkLine>,
    more: bool,
}

/// `get work`.
pub async fn work(bmdb: &Bmdb, limit: u32, format: Format) -> Result<String, CliError> {
    let (mut work, now) = bmdb
        .inspect(move |tx| {
            Box::pin(async move {
                Ok::<_, BmdbError>((inspect::work(tx, i64::from(limit) + 1).await?, inspect::now(tx).await?))
            })
        })
        .await?;
    let more = drop_surplus(&mut work, limit);
    if format == Format::Json {
        return json(&WorkAnswer { work, more });
    }
    if work.is_empty() {
        return Ok("no live work\n".to_owned());
    }
    let rows: Vec<Vec<String>> = work
        .iter()
        .map(|line| {
            let who = &line.work;
            vec![
                line.name.machine.to_string()[..8].to_owned(),
                name_or_dash(&line.name),
                who.process.clone(),
                rough(between(who.since, now)),
                who.fence.to_string(),
                or_dash(who.component.as_deref()),
                or_dash(who.host.as_deref()),
                or_dash(who.pid.map(|pid| pid.to_string()).as_deref()),
                match (who.session_closed_at, who.session_deadline) {
                    (Some(at), _) => format!("lost {}", relative(at, now)),
                    (None, Some(at)) => relative(at, now),
                    (None, None) => "-".to_owned(),
                },
            ]
        })
        .collect();
    let headers = ["MACHINE", "NAME", "PROCESS", "FOR", "FENCE", "COMPONENT", "HOST", "PID", "SESSION ENDS"];
    Ok(table(&headers, &rows, width()) + &more_note(more, limit))
}

#[derive(Serialize)]
struct ProvidersAnswer {
    providers: Vec<ProviderLine>,
    brakes: Vec<BrakeLine>,
}

/// `get providers`.
pub async fn providers(bmdb: &Bmdb, format: Format) -> Result<String, CliError> {
    let (providers, brakes, now) = bmdb
        .inspect(|tx| {
            Box::pin(async move {
                Ok::<_, BmdbError>((
                    inspect::providers(tx).await?,
                    inspect::brakes(tx).await?,
                    inspect::now(tx).await?,
                ))
            })
        })
        .await?;
    if format == Format::Json {
        return json(&ProvidersAnswer { providers, brakes });
    }
    let mut text = if providers.is_empty() {
        "no provider was asked yet\n".to_owned()
    } else {
        let rows: Vec<Vec<String>> = providers.iter().map(|line| provider_row(line, now)).collect();
        table(&["PROVIDER", "KIND", "MACHINES", "LISTED", "STATE"], &rows, width())
    };
    if !brakes.is_empty() {
        let rows: Vec<Vec<String>> = brakes
            .iter()
            .map(|line| {
                vec![
                    line.kind.clone(),
                    line.scope.clone(),
                    rough(between(line.engaged_at, now)),
                    line.reason.clone(),
                ]
            })
            .collect();
        text.push('\n');
        text.push_str(&table(&["BRAKE", "OF", "FOR", "REASON"], &rows, width()));
    }
    Ok(text)
}

fn provider_row(line: &ProviderLine, now: Timestamp) -> Vec<String> {
    let failed = line.error.as_ref().map(|error| match line.error_at {
        Some(at) => format!("failed {}: {error}", relative(at, now)),
        None => format!("failed: {error}"),
    });
    let braked = line.brake.as_ref().map(|brake| match line.brake_since {
        Some(since) => format!("takes no machines for {}: {brake}", rough(between(since, now))),
        None => format!("takes no machines: {brake}"),
    });
    let states: Vec<String> = failed.into_iter().chain(braked).collect();
    vec![
        line.provider.clone(),
        line.kind.clone(),
        or_dash(line.machines.map(|count| count.to_string()).as_deref()),
        line.listed_at.map_or_else(|| "never".to_owned(), |at| relative(at, now)),
        if states.is_empty() { "ok".to_owned() } else { states.join("; ") },
    ]
}

fn or_dash(text: Option<&str>) -> String {
    text.unwrap_or("-").to_owned()
}

fn name_or_dash(name: &MachineName) -> String {
    if name.provider_id.is_some() { name.short() } else { "-".to_owned() }
}

/// Cuts the line that was read too many, and says whether there was one.
fn drop_surplus<T>(lines: &mut Vec<T>, limit: u32) -> bool {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let more = lines.len() > limit;
    lines.truncate(limit);
    more
}

fn more_note(more: bool, limit: u32) -> String {
    if more { format!("\nfirst {limit}, and there are more: raise --limit\n") } else { String::new() }
}

/// An answer for programs.
pub fn json(answer: &impl Serialize) -> Result<String, CliError> {
    let mut text = serde_json::to_string_pretty(answer)?;
    text.push('\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursor_reads_back_whatever_the_provider_is_called() {
        let machine = Uuid::from_u128(7);
        for provider in ["sim", "", "rack/a", "é"] {
            let cursor = read_cursor(&format!("Ready/{provider}/{machine}")).unwrap();
            assert_eq!(cursor, Cursor { phase: "Ready".into(), provider: provider.into(), machine });
        }
        for text in ["", "Ready", "Ready/sim", "Ready/sim/7"] {
            assert!(read_cursor(text).is_err(), "{text}");
        }
    }

    #[test]
    fn list_goes_on_after_its_cursor() {
        let machine = Uuid::from_u128(7);
        let cursor = Cursor { phase: "Provided".into(), provider: "b".into(), machine };
        for (phase, provider, expected) in [
            ("New", "z", None),
            ("Provided", "a", None),
            ("Provided", "b", Some(machine)),
            ("Provided", "c", Some(Uuid::nil())),
            ("Ready", "a", Some(Uuid::nil())),
            ("AsYetUnknown", "a", Some(Uuid::nil())),
        ] {
            assert_eq!(start_of(phase, provider, Some(&cursor)), expected, "{phase} {provider}");
        }
        assert_eq!(start_of("New", "a", None), Some(Uuid::nil()));
    }
}
