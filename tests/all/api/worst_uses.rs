//! The table of worst uses in `docs/security.md`: a row for each call, with its role and its effect.
//!
//! The role is that of the authorization. The effect is compared with the contracts, where what reads takes no order, and
//! with the authorization, where root needs a deployer and rights need an admin.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context as _;
use prost_reflect::DescriptorPool;
use shepherd::model::access::AccessRole;
use shepherd::proto::fleet::DESCRIPTORS;
use shepherd::server::api::authorization::{RULES, RequiredAuth, find_rule};

use crate::harness::aloud::TestResult;
use crate::harness::source;

const PAGE: &str = "docs/security.md";
const TABLE: &str = "| call | role | effect | worst use |\n| --- | --- | --- | --- |\n";
/// Calls that change something without an order: they upload what an order names later.
const UPLOADS: [&str; 2] =
    ["shepherd.fleet.v1.Artefacts/BeginUpload", "shepherd.fleet.v1.Artefacts/PutPiece"];

/// What a call does, by the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    Reads,
    Changes,
    GivesRoot,
    GivesRights,
}

impl Effect {
    /// The effect with this name in the table.
    fn parse(name: &str) -> anyhow::Result<Self> {
        Ok(match name {
            "reads" => Self::Reads,
            "changes" => Self::Changes,
            "gives root" => Self::GivesRoot,
            "gives rights" => Self::GivesRights,
            other => anyhow::bail!("{other:?} is no effect"),
        })
    }

    /// The least role that a call with this effect may require.
    const fn least_role(self) -> AccessRole {
        match self {
            Self::Reads => AccessRole::Viewer,
            Self::Changes => AccessRole::Operator,
            Self::GivesRoot => AccessRole::Deployer,
            Self::GivesRights => AccessRole::Admin,
        }
    }
}

/// A row of the table of worst uses.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WorstUse {
    /// Path of the call, as in the table of authorization.
    pub(super) rpc: String,
    /// The least role that may make the call; `None` if no credential is needed.
    pub(super) role: Option<AccessRole>,
    /// What the call does.
    pub(super) effect: Effect,
    /// The worst use of the call.
    text: String,
}

/// The table of `docs/security.md`.
pub(super) fn read_worst_uses() -> anyhow::Result<Vec<WorstUse>> {
    worst_uses(&source::read(Path::new(PAGE))?)
}

/// The table of worst uses on this page.
fn worst_uses(page: &str) -> anyhow::Result<Vec<WorstUse>> {
    let (_, rows) = page.split_once(TABLE).context("the page has no table of worst uses")?;
    let rows = rows.lines().map_while(|line| line.strip_prefix("| "));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_end_matches('|').split(" | ").map(str::trim).collect();
        let [call, role, effect, text] = cells[..] else { anyhow::bail!("not four cells: {row}") };
        let call = call.trim_matches('`');
        let (service, method) = call.rsplit_once('.').with_context(|| format!("no call: {row}"))?;
        let package = if service.contains('.') { "" } else { "shepherd.fleet.v1." };
        let role = match role {
            "anybody" => None,
            name => Some(name.parse::<AccessRole>().with_context(|| row.to_owned())?),
        };
        let effect = Effect::parse(effect).with_context(|| row.to_owned())?;
        Ok(WorstUse { rpc: format!("{package}{service}/{method}"), role, effect, text: text.to_owned() })
    })
    .collect()
}

/// The role that a call requires; `None` if it needs no credential.
pub(super) const fn role_of(required: RequiredAuth) -> Option<AccessRole> {
    match required {
        RequiredAuth::Public => None,
        RequiredAuth::Role(role) => Some(role),
    }
}

/// A call that the server answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Call {
    /// The role that it requires; `None` if it needs no credential.
    role: Option<AccessRole>,
    /// Whether its request takes an order, or uploads.
    writes: bool,
}

/// Every call that the server answers: those of the descriptors, and the public ones.
fn all_calls() -> anyhow::Result<BTreeMap<String, Call>> {
    let public = RULES.iter().filter(|rule| rule.required == RequiredAuth::Public);
    let of_anybody = Call { role: None, writes: false };
    let mut calls: BTreeMap<_, _> = public.map(|rule| (rule.rpc.to_owned(), of_anybody)).collect();
    for service in DescriptorPool::decode(DESCRIPTORS)?.services() {
        for method in service.methods() {
            let rpc = format!("{}/{}", service.full_name(), method.name());
            let rule = find_rule(&rpc).with_context(|| format!("{rpc} has no rule"))?;
            let takes_order = method.input().get_field_by_name("order").is_some();
            let writes = takes_order || UPLOADS.contains(&rpc.as_str());
            calls.insert(rpc, Call { role: role_of(rule.required), writes });
        }
    }
    Ok(calls)
}

/// What is wrong with the table, as sentences.
fn differences(rows: &[WorstUse], calls: &BTreeMap<String, Call>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (rpc, call) in calls {
        match rows.iter().filter(|row| row.rpc == *rpc).collect::<Vec<_>>()[..] {
            [] => wrong.push(format!("{rpc} is not in the table")),
            [row] if row.role != call.role => {
                wrong.push(format!("{rpc} requires {:?}, and the table has {:?}", call.role, row.role));
            }
            [row] if row.text.is_empty() => wrong.push(format!("{rpc} has no worst use")),
            [row] => wrong.extend(wrong_effect(row, *call)),
            _ => wrong.push(format!("{rpc} has more than one row")),
        }
    }
    let unknown = rows.iter().filter(|row| !calls.contains_key(&row.rpc));
    wrong.extend(unknown.map(|row| format!("{} is no call", row.rpc)));
    wrong
}

/// What is wrong with the effect of a row, as a sentence.
fn wrong_effect(row: &WorstUse, call: Call) -> Option<String> {
    let (rpc, effect) = (&row.rpc, row.effect);
    if call.writes == (effect == Effect::Reads) {
        let takes = if call.writes { "takes an order" } else { "takes no order" };
        return Some(format!("{rpc} {takes}, and the table has {effect:?}"));
    }
    let role = call.role?;
    (role < effect.least_role()).then(|| format!("{rpc} requires {role}, and the table has {effect:?}"))
}

#[test]
fn table_has_every_call_with_its_role_and_effect() -> TestResult {
    let rows = read_worst_uses()?;
    assert_eq!(differences(&rows, &all_calls()?), Vec::<String>::new(), "{PAGE}");
    assert!(rows.len() > 80, "only {} rows were found", rows.len());

    let page = format!(
        "# X\n\n{TABLE}| `A.One` | admin | reads | all |\n| `A.Two` | viewer | reads | x |\n\
         | `A.Two` | viewer | reads | x |\n| `A.Three` | viewer | reads |  |\n\
         | `b.v1.B.Check` | anybody | reads | health |\n| `A.Gone` | viewer | reads | x |\n\
         | `A.Order` | operator | reads | x |\n| `A.Read` | operator | changes | x |\n\
         | `A.Root` | operator | gives root | x |\n| `A.Rights` | deployer | gives rights | x |\n\
         | `A.Good` | deployer | gives root | x |\n\n| `A.Six` |\n"
    );
    let calls = [
        ("One", AccessRole::Operator, false),
        ("Two", AccessRole::Viewer, false),
        ("Three", AccessRole::Viewer, false),
        ("Six", AccessRole::Viewer, false),
        ("Order", AccessRole::Operator, true),
        ("Read", AccessRole::Operator, false),
        ("Root", AccessRole::Operator, true),
        ("Rights", AccessRole::Deployer, true),
        ("Good", AccessRole::Deployer, true),
    ];
    let calls = calls.map(|(name, role, writes)| {
        (format!("shepherd.fleet.v1.A/{name}"), Call { role: Some(role), writes })
    });
    let mut calls = BTreeMap::from(calls);
    calls.insert("b.v1.B/Check".to_owned(), Call { role: None, writes: false });
    assert_eq!(
        differences(&worst_uses(&page)?, &calls),
        [
            "shepherd.fleet.v1.A/One requires Some(Operator), and the table has Some(Admin)",
            "shepherd.fleet.v1.A/Order takes an order, and the table has Reads",
            "shepherd.fleet.v1.A/Read takes no order, and the table has Changes",
            "shepherd.fleet.v1.A/Rights requires deployer, and the table has GivesRights",
            "shepherd.fleet.v1.A/Root requires operator, and the table has GivesRoot",
            "shepherd.fleet.v1.A/Six is not in the table",
            "shepherd.fleet.v1.A/Three has no worst use",
            "shepherd.fleet.v1.A/Two has more than one row",
            "shepherd.fleet.v1.A/Gone is no call",
        ]
    );
    assert!(worst_uses("# X\n").is_err());
    for row in
        ["| `A.One` | root | reads | all |", "| `A.One` | admin | all | all |", "| `A.One` | admin | all |"]
    {
        assert!(worst_uses(&format!("{TABLE}{row}\n")).is_err(), "{row}");
    }
    Ok(())
}
