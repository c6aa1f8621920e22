//! What `shepherdctl top` draws at several widths, with names that take other columns than they have characters. Drawing is
//! a pure function, so no server is needed. The golden pages are in `golden/top`.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::Context as _;
use shepherd::cli::loops::LoopSummary;
use shepherd::cli::object::list::Column;
use shepherd::cli::output::color::SeverityColors;
use shepherd::cli::target_flags::TargetFlags;
use shepherd::cli::top::data::{Content, ReadRequest, TopAnswer, TopData, TopList, TopRow};
use shepherd::cli::top::draw::{FetchStatus, screen_lines};
use shepherd::cli::top::fleet_summary::{FleetSummary, LoopStats, PhaseSummary};
use shepherd::cli::top::state::{Key, ScreenSize, TopState, next_state};
use shepherd::model::machine_view::{EngagedBrake, MachineName};
use shepherd::model::phase::Phase;
use shepherd::model::time::Timestamp;
use shepherd::model::why::{Advice, Explanation};
use uuid::Uuid;

use crate::harness::aloud::TestResult;

const WIDTHS: [usize; 4] = [40, 80, 120, 200];
const ROWS: usize = 26;

/// Names of machines: Japanese, Hebrew, and one with an emoji of several characters.
const NAMES: [&str; 3] = ["サーバー-東京-0001", "שרת-תל-אביב-2", "serveur-👩‍💻-été-3"];

const MACHINE_COLUMNS: [Column; 7] = [
    Column::always("NAME"),
    Column::always("PHASE"),
    Column::always("SINCE"),
    Column::always("HEARTBEAT"),
    Column::if_any("LOCATION"),
    Column::if_any("HOLD"),
    Column::always("WHY"),
];
const CLUSTER_COLUMNS: [Column; 4] =
    [Column::always("NAME"), Column::always("STAGE"), Column::always("HEALTHY"), Column::always("AGE")];

fn at(text: &str) -> anyhow::Result<Timestamp> {
    Ok(text.parse()?)
}

fn rows(rows: &[&[&str]]) -> Vec<TopRow> {
    let row = |cells: &&[&str]| TopRow {
        name: cells[0].to_owned(),
        cells: cells.iter().map(|cell| (*cell).to_owned()).collect(),
    };
    rows.iter().map(row).collect()
}

fn summary() -> anyhow::Result<FleetSummary> {
    let phase = |phase: Phase, machines, oldest_seconds, over_deadline| PhaseSummary {
        phase: phase.as_str().to_owned(),
        machines,
        at_least: false,
        oldest_seconds: Some(oldest_seconds),
        over_deadline: Some(over_deadline),
    };
    let recoverer = LoopSummary { name: "recoverer".to_owned(), workers: 2, pauses: Vec::new() };
    Ok(FleetSummary {
        at: at("2026-03-02T06:40:00Z")?,
        phases: vec![phase(Phase::Ready, 17, 7200.0, 0), phase(Phase::NeedsHuman, 3, 600.0, 1)],
        loops: vec![LoopStats {
            summary: recoverer,
            under_way: 1,
            waiting: Some(4),
            waiting_seconds: Some(30.0),
            throughput: None,
        }],
        work: Vec::new(),
        more_work: false,
        brakes: vec![EngagedBrake {
            kind: "recovery".to_owned(),
            scope: "ラック".to_owned(),
            reason: "brake: 5 of 9 machines of provider ラック fell silent".to_owned(),
            engaged_at: at("2026-03-02T06:37:00Z")?,
            confirmed_at: at("2026-03-02T06:39:59Z")?,
        }],
        providers: Vec::new(),
        counted_at: Some(at("2026-03-02T06:39:15Z")?),
        not_permitted: None,
    })
}

fn explanation() -> anyhow::Result<Explanation> {
    Ok(Explanation {
        name: MachineName {
            machine: Uuid::from_u128(7),
            provider: Some("sim".to_owned()),
            provider_id: Some(NAMES[1].to_owned()),
        },
        phase: Phase::NeedsHuman.as_str(),
        since: Some(at("2026-03-02T06:30:00Z")?),
        at: at("2026-03-02T06:40:00Z")?,
        waits_for: "a person: its disk in 東京 3F is full, and its agent last reported 12m ago".to_owned(),
        obstacle: None,
        decided_at: "crates/model/src/schedule.rs:1".to_owned(),
        next: None,
        deadline: None,
        failures: Vec::new(),
        work: Vec::new(),
        notes: vec!["held by kim: a new disk".to_owned()],
        advice: vec![Advice {
            command: format!("shepherdctl retry sim/{} --reason 'its disk was cleared'", NAMES[1]),
            when: "when there is space on it again".to_owned(),
        }],
        recovery: None,
        power: None,
    })
}

/// What is read for a request.
fn content(request: &ReadRequest) -> anyhow::Result<Content> {
    Ok(match request {
        ReadRequest::Overview => Content::Overview,
        ReadRequest::Machines { .. } => Content::List(TopList {
            columns: &MACHINE_COLUMNS,
            rows: rows(&[
                &[NAMES[0], "Ready", "2h05m", "just now", "東京 3F", "-", ""],
                &[
                    NAMES[1],
                    "NeedsHuman",
                    "10m",
                    "12m ago",
                    "東京 3F",
                    "-",
                    "waits for a person: its disk is full",
                ],
                &[NAMES[2], "Ready", "3m", "1s ago", "-", "power, ends in 2h00m", "held by kim: a new disk"],
            ]),
            next_token: "more".to_owned(),
        }),
        ReadRequest::Clusters => Content::List(TopList {
            columns: &CLUSTER_COLUMNS,
            rows: rows(&[
                &["ams", "converged", "5/5", "4d3h"],
                &["大阪", "changing its control plane", "2/3", "9m"],
            ]),
            next_token: String::new(),
        }),
        ReadRequest::Why { .. } => Content::Why(Box::new(explanation()?)),
    })
}

/// The page after these keys, at each width, as text.
fn pages(keys: &[Key]) -> anyhow::Result<String> {
    let status = FetchStatus { backend_name: "192.0.2.7:7443".to_owned(), ..FetchStatus::default() };
    let mut text = String::new();
    for columns in WIDTHS {
        let size = ScreenSize { columns, rows: ROWS };
        let (mut state, mut data) = (TopState::new(size), TopData::new(TargetFlags::default()));
        let read = |state: &TopState, data: &mut TopData| -> anyhow::Result<()> {
            let request = state.request();
            let content = Ok(content(&request)?);
            data.record(TopAnswer { request, summary: summary()?, content });
            Ok(())
        };
        read(&state, &mut data)?;
        for key in keys {
            state = next_state(state, *key, &data);
            read(&state, &mut data)?;
        }
        let lines = screen_lines(&state, &data, &status, size);
        assert_eq!(lines.len(), ROWS, "{columns}");
        writeln!(text, "{columns} columns:")?;
        for line in lines {
            assert!(line.width() <= columns, "{columns}: {line}");
            writeln!(text, "|{}", line.to_string().trim_end())?;
        }
        // Colours add nothing to the text.
        let colored = FetchStatus { colors: SeverityColors::On, ..status.clone() };
        let colored = screen_lines(&state, &data, &colored, size);
        let plain = screen_lines(&state, &data, &status, size);
        assert_eq!(texts(&colored), texts(&plain));
    }
    Ok(text)
}

fn texts(lines: &[impl ToString]) -> Vec<String> {
    lines.iter().map(ToString::to_string).collect()
}

fn golden(name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../golden/top");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_snapshot!(name, text));
}

fn typed(text: &str) -> Vec<Key> {
    text.chars().map(|typed| if typed == '\n' { Key::Enter } else { Key::Char(typed) }).collect()
}

#[test]
fn pages_fit_every_width() -> TestResult {
    for (name, keys) in [
        ("width_overview", ""),
        ("width_machines", "2j"),
        ("width_machines_sorted", "2sssS"),
        ("width_clusters", "3"),
        ("width_why", "2j\n"),
        ("width_keys", "?"),
        ("width_filter", "2/phase=Redy\n"),
    ] {
        golden(name, &pages(&typed(keys))?);
    }
    Ok(())
}

/// The words of pages, without the margin and the mark of what does not fit.
fn words(pages: &str) -> impl Iterator<Item = &str> {
    pages.split_whitespace().map(|word| word.trim_start_matches('|').trim_end_matches('…'))
}

/// Words of a page are those of what was read: none is split, except one that is wider than the screen.
#[test]
fn no_word_is_split() -> TestResult {
    for keys in ["", "2j", "3", "2j\n", "?"] {
        let text = pages(&typed(keys))?;
        let (_, widest) = text.split_once("200 columns:").context("the widest page")?;
        let known: BTreeSet<&str> = words(widest).collect();
        for word in words(&text) {
            let is_number = word.chars().all(|c| c.is_ascii_digit());
            let is_known = is_number || word == "columns:" || word == "\\" || known.contains(word);
            assert!(is_known, "{keys}: {word:?} was split");
        }
    }
    Ok(())
}
