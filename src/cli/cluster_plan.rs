//! `cluster plan`: what will be done to a cluster, step by step, before any of it is.
//!
//! It is foreseen by [`crate::model::cluster::foresee`]; here it is asked for and printed.

use std::fmt::Write as _;

use clap::Args;
use serde::Serialize;

use crate::bmdb::cluster::no_such;
use crate::bmdb::cluster_foresight::{Foresight, Supposed};
use crate::cli::error::CliError;
use crate::cli::get;
use crate::cli::output::{Format, table, width};
use crate::cli::remote::refused;
use crate::cli::remote_read::at;
use crate::cli::source::Source;
use crate::model::cluster::foresee::{ASSUMPTIONS, End, Foreseen, Foretold};
use crate::model::cluster::selector::Selector;
use crate::model::cluster::spec::Change;
use crate::model::layout::wrapped;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::clusters_client::ClustersClient;

/// A cluster to foresee, and what is supposed of it.
#[derive(Debug, Args)]
pub struct PlanCluster {
    /// Its name; where its control plane is said, it may be one that there is not yet
    #[arg(value_name = "NAME")]
    pub name: String,
    /// As if it was to have so many machines that run its control plane: 1, 3, 5 or 7
    #[arg(long = "control_plane", alias = "control-plane", value_name = "N")]
    pub control_plane: Option<u32>,
    /// As if it was to have so many more machines
    #[arg(long, value_name = "N")]
    pub workers: Option<u32>,
    /// As if every worker was to have this role; may be given several times
    #[arg(long, value_name = "ROLE")]
    pub give: Vec<String>,
    /// As if no worker was to have this role; may be given several times
    #[arg(long, value_name = "ROLE")]
    pub take: Vec<String>,
    /// As if it was to end
    #[arg(long)]
    pub delete: bool,
    /// Which machines could be chosen, of a cluster that there is not yet, as location=ams,memory>=64GiB
    #[arg(long, value_name = "TERMS")]
    pub select: Option<String>,
}

impl PlanCluster {
    fn change(&self) -> Change {
        Change {
            control_plane: self.control_plane,
            workers: self.workers,
            give: self.give.iter().cloned().collect(),
            take: self.take.iter().cloned().collect(),
        }
    }
}

#[derive(Serialize)]
struct Answer<'a> {
    exists: bool,
    #[serde(flatten)]
    foreseen: &'a Foreseen,
    assumptions: &'a [String],
}

/// What was foreseen, whoever was asked.
struct Told {
    exists: bool,
    foreseen: Foreseen,
    assumptions: Vec<String>,
}

/// `cluster plan`.
pub(super) async fn plan(source: &Source, asked: &PlanCluster, format: Format) -> Result<String, CliError> {
    let told = match source {
        Source::Direct(bmdb) => {
            let select = asked.select.as_deref().map(str::parse::<Selector>).transpose();
            let select = select.map_err(CliError::Wrong)?;
            let supposed = Supposed { change: asked.change(), select, delete: asked.delete };
            let foresight = bmdb.foresee_cluster(&asked.name, &supposed).await?;
            let exists = matches!(foresight, Foresight::Of(_));
            let (Foresight::Of(foreseen) | Foresight::IfAskedFor(foreseen)) = foresight else {
                return Err(no_such(&asked.name).into());
            };
            Told { exists, foreseen, assumptions: ASSUMPTIONS.map(str::to_owned).to_vec() }
        }
        Source::Api(remote) => {
            let request = v1::PlanClusterRequest {
                name: asked.name.clone(),
                control_plane: asked.control_plane,
                workers: asked.workers,
                give: asked.give.clone(),
                take: asked.take.clone(),
                delete: asked.delete,
                select: asked.select.clone().unwrap_or_default(),
            };
            let said = ClustersClient::new(remote.service()).plan(request).await;
            told(said.map_err(refused)?.into_inner())?
        }
    };
    if format == Format::Json {
        let Told { exists, foreseen, assumptions } = &told;
        return get::json(&Answer { exists: *exists, foreseen, assumptions });
    }
    Ok(rendered(&asked.name, &told))
}

fn told(said: v1::PlanClusterResponse) -> Result<Told, CliError> {
    let end = End::ALL.into_iter().find(|end| end.as_str() == said.end);
    let step = |step: v1::ClusterStep| Foretold { machine: step.machine, name: step.name, what: step.what };
    let foreseen = Foreseen {
        at: at(said.at, "its moment")?,
        steps: said.steps.into_iter().map(step).collect(),
        end: end.ok_or_else(|| {
            CliError::Wrong(format!("the plan ends in {:?}, which this shepherdctl does not know", said.end))
        })?,
        waits: said.waits,
        machines: said.machines.into_iter().map(|machine| (machine.name, machine.waits)).collect(),
    };
    Ok(Told { exists: said.exists, foreseen, assumptions: said.assumptions })
}

fn rendered(name: &str, told: &Told) -> String {
    let Foreseen { steps, end, waits, machines, .. } = &told.foreseen;
    let mut text = String::new();
    if !told.exists {
        let _ = writeln!(text, "there is no cluster {name} yet; this is what would become of it\n");
    }
    let number = |number: usize| (number + 1).to_string();
    let of = |step: &Foretold| step.name.clone().unwrap_or_else(|| "-".to_owned());
    let rows: Vec<Vec<String>> =
        steps.iter().enumerate().map(|(at, step)| vec![number(at), of(step), step.what.clone()]).collect();
    if !rows.is_empty() {
        text.push_str(&table(&["STEP", "MACHINE", "WHAT"], &rows, width()));
        text.push('\n');
    }
    let sentence = match (end, steps.is_empty()) {
        (End::Settled, true) => "it is as it is to be; nothing is to be done",
        (End::Settled, false) => "then it is as it is to be",
        (End::Waiting, true) => "nothing can be done now; it waits:",
        (End::Waiting, false) => "then it waits:",
        (End::Gone, _) => "then nothing of it is left",
        (End::Cut, _) => "there is so much to do that it is said no further",
    };
    let _ = writeln!(text, "{sentence}");
    let machines = machines.iter().map(|(machine, waits)| format!("{machine}: {waits}"));
    for wait in waits.iter().cloned().chain(machines) {
        let narrower = width().map(|width| width.saturating_sub(2));
        let _ = writeln!(text, "  {}", wrapped(&wait, narrower).join("\n  "));
    }
    if !steps.is_empty() {
        let assumed = "Assumed: what is asked for succeeds, nodes that are silent stay so, and nobody else changes \
                       anything. docs/clusters.md says it in full.";
        let _ = write!(text, "\n{}\n", wrapped(assumed, width()).join("\n"));
    }
    text
}
