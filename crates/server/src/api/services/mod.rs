//! Services of the fleet API behind one entrance: a call goes to the service that its path names.
//!
//! The listener puts this behind TLS, authentication and JSON. A process that is logged in to the database calls it
//! directly ([`in_process`](crate::api::in_process)). Both have the same services, and there is no other way to one.
//! Authentication comes before: a call without a [`Caller`](crate::api::caller::Caller) is rejected by each service.
//!
//! A file implements one service, or several small ones ([`fleet`], [`plan_service`]). A method validates the request,
//! calls the BMDB and encodes the result. An order also passes through
//! [`IncomingOrder`](crate::api::incoming_order::IncomingOrder), which checks its reason and its idempotency key, has
//! it carried out and encodes its result.
//! Fields and messages that several services have are in `order_fields`, `machine_filter` and `kubernetes_messages`, so
//! that they have the same errors everywhere. `order_confirmation` has what a person types before an order that nothing
//! undoes. `cluster_messages` encodes a cluster.

pub mod approvals;
pub mod artefacts;
pub mod audits;
pub mod budgets;
pub mod bulk_orders;
pub mod cluster_credentials;
pub mod cluster_kubernetes;
mod cluster_messages;
pub mod clusters;
pub mod credentials;
pub mod fleet;
mod kubernetes_messages;
pub mod logs;
pub mod loops;
mod machine_filter;
pub mod machines;
mod order_confirmation;
mod order_fields;
pub mod plan_service;
pub mod updates;

use std::convert::Infallible;
use std::task::{Context, Poll};

use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Body as HttpBody, BoxFuture, Service, StdError, http};

use crate::api::context::ApiContext;
use crate::api::fleet_stream::FleetQueries;
use crate::api::services::approvals::ApprovalsService;
use crate::api::services::artefacts::{ArtefactsService, PUT_LIMIT};
use crate::api::services::audits::AuditService;
use crate::api::services::budgets::BudgetsService;
use crate::api::services::bulk_orders::BulkOrdersService;
use crate::api::services::cluster_credentials::ClusterCredentialsService;
use crate::api::services::cluster_kubernetes::ClusterKubernetesService;
use crate::api::services::clusters::ClustersService;
use crate::api::services::credentials::CredentialsService;
use crate::api::services::fleet::FleetService;
use crate::api::services::logs::LogsService;
use crate::api::services::loops::LoopsService;
use crate::api::services::machines::MachinesService;
use crate::api::services::plan_service::PlanService;
use crate::api::services::updates::UpdatesService;
use model::cluster::declaration::MAX_DECLARATION_BYTES;
use model::rpc_name::{DECLARE_ROLE_RPC, PUT_ARTEFACT_PIECE_RPC};
use proto::fleet::v1::about_server::{self, AboutServer};
use proto::fleet::v1::approvals_server::{self, ApprovalsServer};
use proto::fleet::v1::artefacts_server::{self, ArtefactsServer};
use proto::fleet::v1::audit_server::{self, AuditServer};
use proto::fleet::v1::backoffs_server::{self, BackoffsServer};
use proto::fleet::v1::budgets_server::{self, BudgetsServer};
use proto::fleet::v1::bulk_orders_server::{self, BulkOrdersServer};
use proto::fleet::v1::cluster_credentials_server::{self, ClusterCredentialsServer};
use proto::fleet::v1::cluster_kubernetes_server::{self, ClusterKubernetesServer};
use proto::fleet::v1::clusters_server::{self, ClustersServer};
use proto::fleet::v1::credentials_server::{self, CredentialsServer};
use proto::fleet::v1::issues_server::{self, IssuesServer};
use proto::fleet::v1::logs_server::{self, LogsServer};
use proto::fleet::v1::loops_server::{self, LoopsServer};
use proto::fleet::v1::machines_server::{self, MachinesServer};
use proto::fleet::v1::plan_server::{self, PlanServer};
use proto::fleet::v1::policy_server::{self, PolicyServer};
use proto::fleet::v1::providers_server::{self, ProvidersServer};
use proto::fleet::v1::schedule_server::{self, ScheduleServer};
use proto::fleet::v1::sessions_server::{self, SessionsServer};
use proto::fleet::v1::shepherds_server::{self, ShepherdsServer};
use proto::fleet::v1::statistics_server::{self, StatisticsServer};
use proto::fleet::v1::updates_server::{self, UpdatesServer};
use proto::fleet::v1::work_server::{self, WorkServer};

/// Largest request of most calls, in bytes.
const REQUEST_LIMIT: usize = 64 << 10;
/// Largest request that declares a role: the declaration, which may be twice as long in JSON, and the order.
const DECLARE_LIMIT: usize = 2 * MAX_DECLARATION_BYTES + REQUEST_LIMIT;

/// Largest request of a call, in bytes, in JSON or encoded.
#[must_use]
pub fn request_limit(rpc: &str) -> usize {
    match rpc {
        PUT_ARTEFACT_PIECE_RPC => PUT_LIMIT,
        DECLARE_ROLE_RPC => DECLARE_LIMIT,
        _ => REQUEST_LIMIT,
    }
}

/// All services of `shepherd.fleet.v1`; cheap to clone.
#[derive(Clone)]
pub struct FleetServices {
    about: AboutServer<FleetService>,
    approvals: ApprovalsServer<ApprovalsService>,
    artefacts: ArtefactsServer<ArtefactsService>,
    audit: AuditServer<AuditService>,
    backoffs: BackoffsServer<FleetService>,
    budgets: BudgetsServer<BudgetsService>,
    cluster_credentials: ClusterCredentialsServer<ClusterCredentialsService>,
    cluster_kubernetes: ClusterKubernetesServer<ClusterKubernetesService>,
    clusters: ClustersServer<ClustersService>,
    credentials: CredentialsServer<CredentialsService>,
    issues: IssuesServer<PlanService>,
    logs: LogsServer<LogsService>,
    loops: LoopsServer<LoopsService>,
    machines: MachinesServer<MachinesService>,
    bulk_orders: BulkOrdersServer<BulkOrdersService>,
    plan: PlanServer<PlanService>,
    policy: PolicyServer<FleetService>,
    providers: ProvidersServer<FleetService>,
    schedule: ScheduleServer<FleetService>,
    sessions: SessionsServer<FleetService>,
    shepherds: ShepherdsServer<FleetService>,
    statistics: StatisticsServer<FleetService>,
    updates: UpdatesServer<UpdatesService>,
    work: WorkServer<FleetService>,
}

impl FleetServices {
    /// All services with their common context.
    #[must_use]
    pub fn new(context: &ApiContext) -> Self {
        let context = || context.clone();
        let fleet = || FleetService { context: context() };
        // Plans and issues share the limit on queries over the whole fleet.
        let plan = PlanService { fleet_queries: FleetQueries::new(context()) };
        Self {
            about: AboutServer::new(fleet()).max_decoding_message_size(REQUEST_LIMIT),
            approvals: ApprovalsServer::new(ApprovalsService { context: context() })
                .max_decoding_message_size(REQUEST_LIMIT),
            artefacts: ArtefactsServer::new(ArtefactsService { context: context() })
                .max_decoding_message_size(PUT_LIMIT),
            audit: AuditServer::new(AuditService { context: context() })
                .max_decoding_message_size(REQUEST_LIMIT),
            backoffs: BackoffsServer::new(fleet()).max_decoding_message_size(REQUEST_LIMIT),
            budgets: BudgetsServer::new(BudgetsService { context: context() })
                .max_decoding_message_size(REQUEST_LIMIT),
            cluster_credentials: ClusterCredentialsServer::new(ClusterCredentialsService {
                context: context(),
            })
            .max_decoding_message_size(REQUEST_LIMIT),
            cluster_kubernetes: ClusterKubernetesServer::new(ClusterKubernetesService { context: context() })
                .max_decoding_message_size(REQUEST_LIMIT),
            clusters: ClustersServer::new(ClustersService { context: context() })
                .max_decoding_message_size(DECLARE_LIMIT),
            credentials: CredentialsServer::new(CredentialsService { context: context() })
                .max_decoding_message_size(REQUEST_LIMIT),
            issues: IssuesServer::new(plan.clone()).max_decoding_message_size(REQUEST_LIMIT),
            logs: LogsServer::new(LogsService { context: context() })
                .max_decoding_message_size(REQUEST_LIMIT),
            loops: LoopsServer::new(LoopsService { context: context() })
                .max_decoding_message_size(REQUEST_LIMIT),
            machines: MachinesServer::new(MachinesService { context: context() })
                .max_decoding_message_size(REQUEST_LIMIT),
            bulk_orders: BulkOrdersServer::new(BulkOrdersService { context: context() })
                .max_decoding_message_size(REQUEST_LIMIT),
            plan: PlanServer::new(plan).max_decoding_message_size(REQUEST_LIMIT),
            policy: PolicyServer::new(fleet()).max_decoding_message_size(REQUEST_LIMIT),
            providers: ProvidersServer::new(fleet()).max_decoding_message_size(REQUEST_LIMIT),
            schedule: ScheduleServer::new(fleet()).max_decoding_message_size(REQUEST_LIMIT),
            sessions: SessionsServer::new(fleet()).max_decoding_message_size(REQUEST_LIMIT),
            shepherds: ShepherdsServer::new(fleet()).max_decoding_message_size(REQUEST_LIMIT),
            statistics: StatisticsServer::new(fleet()).max_decoding_message_size(REQUEST_LIMIT),
            updates: UpdatesServer::new(UpdatesService { context: context() })
                .max_decoding_message_size(REQUEST_LIMIT),
            work: WorkServer::new(fleet()).max_decoding_message_size(REQUEST_LIMIT),
        }
    }
}

impl<B> Service<http::Request<B>> for FleetServices
where
    B: HttpBody + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // Each generated server is always ready.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        // The path is `/SERVICE/METHOD`.
        match request.uri().path().split('/').nth(1).unwrap_or_default() {
            about_server::SERVICE_NAME => self.about.call(request),
            approvals_server::SERVICE_NAME => self.approvals.call(request),
            artefacts_server::SERVICE_NAME => self.artefacts.call(request),
            audit_server::SERVICE_NAME => self.audit.call(request),
            backoffs_server::SERVICE_NAME => self.backoffs.call(request),
            budgets_server::SERVICE_NAME => self.budgets.call(request),
            cluster_credentials_server::SERVICE_NAME => self.cluster_credentials.call(request),
            cluster_kubernetes_server::SERVICE_NAME => self.cluster_kubernetes.call(request),
            clusters_server::SERVICE_NAME => self.clusters.call(request),
            credentials_server::SERVICE_NAME => self.credentials.call(request),
            issues_server::SERVICE_NAME => self.issues.call(request),
            logs_server::SERVICE_NAME => self.logs.call(request),
            loops_server::SERVICE_NAME => self.loops.call(request),
            machines_server::SERVICE_NAME => self.machines.call(request),
            bulk_orders_server::SERVICE_NAME => self.bulk_orders.call(request),
            plan_server::SERVICE_NAME => self.plan.call(request),
            policy_server::SERVICE_NAME => self.policy.call(request),
            providers_server::SERVICE_NAME => self.providers.call(request),
            schedule_server::SERVICE_NAME => self.schedule.call(request),
            sessions_server::SERVICE_NAME => self.sessions.call(request),
            shepherds_server::SERVICE_NAME => self.shepherds.call(request),
            statistics_server::SERVICE_NAME => self.statistics.call(request),
            updates_server::SERVICE_NAME => self.updates.call(request),
            work_server::SERVICE_NAME => self.work.call(request),
            other => {
                let status = Status::unimplemented(format!("there is no service {other}"));
                Box::pin(std::future::ready(Ok(status.into_http())))
            }
        }
    }
}
