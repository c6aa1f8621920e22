//! The service `Budgets`.

use tonic::{Request, Response, Status};

use crate::bmdb::budget::bounds;
use crate::model::budget::{BrakeState, BudgetChange, BudgetKind, BudgetLine};
use crate::model::process::UnknownName;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::budgets_server::Budgets;
use crate::server::api::convert::at;
use crate::server::api::door::caller;
use crate::server::api::orders::{Said, answer, of_no_version};
use crate::server::api::refusal::{of_bmdb, wrong};
use crate::server::api::site::Site;

const SET: &str = "shepherd.fleet.v1.Budgets/Set";

/// The service.
pub struct BudgetsService {
    /// What it stands on.
    pub site: Site,
}

#[tonic::async_trait]
impl Budgets for BudgetsService {
    async fn list(
        &self,
        _: Request<v1::ListBudgetsRequest>,
    ) -> Result<Response<v1::ListBudgetsResponse>, Status> {
        let bmdb = self.site.looks.bmdb();
        bmdb.read_policy().await.map_err(of_bmdb)?;
        let (_, policy) = bmdb.policy();
        let look = self.site.looks.look(move |tx| {
            let policy = policy.clone();
            Box::pin(async move { bounds(tx, &policy).await })
        });
        let found = look.await.map_err(of_bmdb)?;
        Ok(Response::new(v1::ListBudgetsResponse {
            budgets: found.budgets.into_iter().map(budget).collect(),
            brakes: found.brakes.into_iter().map(brake).collect(),
            at: Some(at(found.at)),
        }))
    }

    async fn set(
        &self,
        request: Request<v1::SetBudgetRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let kind: BudgetKind =
            asked.kind.parse().map_err(|error: UnknownName| wrong("kind", error.to_string()))?;
        let window = match asked.window.as_str() {
            "" => None,
            said => Some(said.parse().map_err(|_| {
                wrong("window", format!("{said:?} is no length of time; write for example 10m, 2h or 1d"))
            })?),
        };
        let change = BudgetChange { most: asked.most, window };
        let order = Said { rpc: SET, request: asked, order: asked.order.as_ref() }
            .read(&caller, kind.target())
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let carried = self.site.bmdb.set_budget(order, kind, change).await.map_err(of_bmdb)?;
        Ok(Response::new(answer(None, dry_run, &carried)))
    }
}

fn budget(line: BudgetLine) -> v1::Budget {
    v1::Budget {
        kind: line.budget,
        most: line.most,
        window: line.window.map(|window| window.to_string()),
        used: line.used,
        free: line.free,
        free_at: line.free_at.map(at),
    }
}

fn brake(state: BrakeState) -> v1::BrakeState {
    v1::BrakeState {
        kind: state.kind,
        scope: state.scope,
        holds: state.holds,
        since: state.since.map(at),
        reason: state.reason,
        engaged_by: state.engaged_by,
    }
}
