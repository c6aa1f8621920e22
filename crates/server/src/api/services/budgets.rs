//! gRPC service Budgets: disruption budgets and brakes.

use tonic::{Request, Response, Status};

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::context::ApiContext;
use crate::api::convert::encode_timestamp;
use crate::api::incoming_order::IncomingOrder;
use bmdb::orders::budget::read_budgets_and_brakes;
use model::budget::{BrakeState, BudgetChange, BudgetKind, BudgetStatus};
use model::process::UnknownName;
use model::rpc_name::SET_BUDGET_RPC;
use proto::fleet::v1;
use proto::fleet::v1::budgets_server::Budgets;

/// The gRPC service `Budgets`.
pub struct BudgetsService {
    /// Context shared by all services.
    pub context: ApiContext,
}

#[tonic::async_trait]
impl Budgets for BudgetsService {
    async fn list(
        &self,
        _: Request<v1::ListBudgetsRequest>,
    ) -> Result<Response<v1::ListBudgetsResponse>, Status> {
        let bmdb = self.context.read_pool.bmdb();
        bmdb.read_policy().await.map_err(bmdb_status)?;
        let (_, policy) = bmdb.policy();
        let look = self
            .context
            .read_pool
            .read_with(policy, |tx, policy| Box::pin(read_budgets_and_brakes(tx, policy)));
        let found = look.await.map_err(bmdb_status)?;
        Ok(Response::new(v1::ListBudgetsResponse {
            budgets: found.budgets.into_iter().map(encode_budget).collect(),
            brakes: found.brakes.into_iter().map(encode_brake).collect(),
            read_at: Some(encode_timestamp(found.at)),
        }))
    }

    async fn set(
        &self,
        request: Request<v1::SetBudgetRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let kind: BudgetKind =
            body.kind.parse().map_err(|error: UnknownName| invalid_argument("kind", error.to_string()))?;
        let window = match body.window.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|_| {
                invalid_argument(
                    "window",
                    format!("{text:?} is not a duration; write for example 10m, 2h or 1d"),
                )
            })?),
        };
        let change = BudgetChange { max_count: body.max_count, window };
        IncomingOrder { rpc: SET_BUDGET_RPC, request: &request, order: body.order.as_ref() }
            .execute(kind.audit_target(), |order| self.context.bmdb.set_budget(order, kind, change))
            .await
    }
}

fn encode_budget(line: BudgetStatus) -> v1::Budget {
    v1::Budget {
        kind: line.budget,
        max_count: line.max_count,
        window: line.window.map(|window| window.to_string()),
        used: line.used,
        available: line.available,
        available_at: line.available_at.map(encode_timestamp),
    }
}

fn encode_brake(state: BrakeState) -> v1::BrakeState {
    v1::BrakeState {
        kind: state.kind,
        scope: state.scope,
        engaged: state.engaged,
        since: state.since.map(encode_timestamp),
        reason: state.reason,
        engages_when: state.engages_when,
    }
}
