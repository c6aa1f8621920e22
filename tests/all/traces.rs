//! Traces of work that a receiver of OTLP gets from real shepherds.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use tokio::time::Instant;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::harness::aloud::TestResult;
use crate::harness::fleet::{ALL_READY, Fleet, Otherwise, PATIENCE, endpoint};
use crate::harness::port::reserved;

/// The spans that were received.
#[derive(Clone, Default)]
struct Received {
    spans: Arc<Mutex<Vec<Span>>>,
    requests: Arc<Mutex<Vec<ReceivedRequest>>>,
}

/// What a request has besides spans: a header, and the attributes of the process.
#[derive(Clone)]
struct ReceivedRequest {
    authorization: Option<String>,
    resource: BTreeMap<String, String>,
}

impl Received {
    fn spans(&self) -> Vec<Span> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn requests(&self) -> Vec<ReceivedRequest> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The spans that begin a trace.
    fn roots(&self) -> Vec<Span> {
        self.spans().into_iter().filter(|span| span.parent_span_id.is_empty()).collect()
    }
}

#[tonic::async_trait]
impl TraceService for Received {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let authorization = request.metadata().get("authorization");
        let authorization = authorization.and_then(|value| value.to_str().ok()).map(str::to_owned);
        for of in request.into_inner().resource_spans {
            let attributes = of.resource.map(|resource| resource.attributes).unwrap_or_default();
            let named = attributes.iter().any(|attribute| attribute.key == "service.name");
            if !named {
                return Err(Status::invalid_argument("spans of nobody"));
            }
            let resource = attributes.into_iter().filter_map(|attribute| match attribute.value?.value? {
                Value::StringValue(text) => Some((attribute.key, text)),
                _ => None,
            });
            let received =
                ReceivedRequest { authorization: authorization.clone(), resource: resource.collect() };
            self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(received);
            let spans = of.scope_spans.into_iter().flat_map(|scope| scope.spans);
            self.spans.lock().unwrap_or_else(PoisonError::into_inner).extend(spans);
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// Receives at an address until it is stopped.
async fn receive(at: SocketAddr, into: &Received, stop: &CancellationToken) -> Result<()> {
    let listener = tokio::net::TcpListener::bind(at).await?;
    let server = Server::builder().add_service(TraceServiceServer::new(into.clone()));
    let served =
        server.serve_with_incoming_shutdown(TcpListenerStream::new(listener), stop.clone().cancelled_owned());
    tokio::spawn(served);
    Ok(())
}

fn attribute<'a>(span: &'a Span, key: &str) -> Option<&'a Value> {
    span.attributes.iter().find(|attribute| attribute.key == key)?.value.as_ref()?.value.as_ref()
}

fn text<'a>(span: &'a Span, key: &str) -> &'a str {
    match attribute(span, key) {
        Some(Value::StringValue(text)) => text,
        _ => "",
    }
}

/// A shepherd with these variables in its environment.
fn with_variables(variables: &[(&'static str, &str)]) -> Otherwise {
    let environment = variables.iter().map(|(name, value)| (*name, OsString::from(value))).collect();
    Otherwise { environment, ..Otherwise::default() }
}

/// A work item as a trace and as history have it: machine, process, fence.
type Item = (String, String, i64);

fn item(root: &Span) -> Item {
    let fence = match attribute(root, "fence") {
        Some(Value::IntValue(fence)) => *fence,
        _ => -1,
    };
    (text(root, "machine").to_owned(), text(root, "process").to_owned(), fence)
}

async fn ended(fleet: &Fleet) -> Result<BTreeMap<Item, String>> {
    let rows: Vec<(uuid::Uuid, String, i64, String)> =
        sqlx::query_as("SELECT machine_id, process, fence, event FROM history WHERE edge = 'end'")
            .fetch_all(&fleet.pool)
            .await?;
    Ok(rows
        .into_iter()
        .map(|(machine, process, fence, event)| ((machine.to_string(), process, fence), event))
        .collect())
}

async fn until(what: &str, mut is: impl FnMut() -> bool) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !is() {
        ensure!(Instant::now() < end, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

const SIMULATOR: [&str; 6] =
    ["--machine_count", "3", "--boot_seconds", "0.5", "--persistent_agent_percent", "100"];
const LIMITS: [&str; 3] =
    ["--heartbeat_interval=1s", "--agent_start_backoff_initial=10m", "--agent_start_backoff_maximum=1h"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_work_item_is_one_trace_from_its_claim_to_its_end() -> TestResult {
    let fleet = Fleet::start("traces", &SIMULATOR).await?;
    let (at, received, stop) = (reserved()?, Received::default(), CancellationToken::new());
    receive(at, &received, &stop).await?;
    let receiver = format!("--otlp_endpoint=http://{at}");
    // The log level is as low as possible: traces do not depend on it.
    let quiet = "--log_format=json";
    let flags = [&LIMITS[..], &[&receiver, quiet]].concat();
    // The flag takes precedence: nobody receives there.
    let elsewhere = format!("http://{}", reserved()?);
    let variables = with_variables(&[("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", &elsewhere)]);
    let mut maker = fleet.shepherd(
        "maker",
        &[endpoint()?],
        &[&flags[..], &["--components=provisioner,updater"]].concat(),
    )?;
    let made = "SELECT count(*) = 3 FROM machine_due WHERE lane = 'access' AND phase_index = 'Provided'";
    fleet.until("all are made", made).await?;
    assert!(maker.terminate().await?.success());
    fleet.strike("sim-0002", "disk-full").await?;
    let mut shepherd = fleet.shepherd_otherwise(variables, "shepherd", &[endpoint()?], &flags)?;
    let two = "SELECT count(*) = 2 FROM machine_due WHERE lane = 'access' AND phase_index = 'Ready'";
    fleet.until("two are Ready", two).await?;
    fleet
        .until("the third failed", "SELECT count(*) = 1 FROM work_backoff WHERE process = 'AgentStart'")
        .await?;
    // The spans that are still queued are sent when it ends.
    assert!(shepherd.terminate().await?.success());

    let ended = ended(&fleet).await?;
    let roots = received.roots();
    let reports: BTreeMap<Item, String> =
        roots.iter().map(|root| (item(root), text(root, "result").to_owned())).collect();
    assert_eq!(reports.len(), roots.len(), "an item has two traces");
    let result = |event: &str| match event {
        "Finished" => "finished",
        "Failed" => "failed",
        "PutOff" => "requeued",
        "Cancelled" => "cancelled",
        _ => "lost",
    };
    let expected: BTreeMap<Item, String> =
        ended.iter().map(|(item, event)| (item.clone(), result(event).to_owned())).collect();
    assert_eq!(reports, expected, "history and traces tell of the same work");

    let spans = received.spans();
    for span in &spans {
        assert!(
            span.start_time_unix_nano <= span.end_time_unix_nano && span.end_time_unix_nano > 0,
            "{span:?}"
        );
        if span.parent_span_id.is_empty() {
            continue;
        }
        let parent =
            spans.iter().find(|parent| parent.span_id == span.parent_span_id).context("its parent")?;
        assert_eq!(parent.trace_id, span.trace_id);
        assert!(parent.start_time_unix_nano <= span.start_time_unix_nano, "{span:?} {parent:?}");
        assert!(span.end_time_unix_nano <= parent.end_time_unix_nano, "{span:?} {parent:?}");
    }
    let inside = |root: &Span, name: &str| {
        spans.iter().filter(|span| span.trace_id == root.trace_id && span.name == name).count()
    };
    let of = |process: &str, result: &str| -> Vec<&Span> {
        roots
            .iter()
            .filter(|root| text(root, "process") == process && text(root, "result") == result)
            .collect()
    };
    let (taken_over, failed, looked) =
        (of("AgentStart", "finished"), of("AgentStart", "failed"), of("Update", "finished"));
    assert_eq!(taken_over.len(), 2);
    assert!(looked.len() >= 3, "{}", looked.len());
    for root in taken_over {
        assert_eq!(
            (inside(root, "ssh connect"), inside(root, "ssh exec")),
            (1, 3),
            "probed, uploaded, enrolled"
        );
        assert_eq!(inside(root, "write the end"), 1);
    }
    for exec in spans.iter().filter(|span| span.name == "ssh exec") {
        assert!(matches!(attribute(exec, "sent_bytes"), Some(Value::IntValue(_))), "{exec:?}");
    }
    for root in looked {
        assert!(inside(root, "provider call") >= 1, "the provider got a request");
    }
    let [failed] = failed.as_slice() else { panic!("{} failed", failed.len()) };
    let status = failed.status.as_ref().context("a status")?;
    assert_eq!(status.code(), StatusCode::Error);
    assert!(status.message.contains("no space left"), "{}", status.message);
    let kinds: BTreeSet<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(kinds, BTreeSet::from(["provider call", "ssh connect", "ssh exec", "work", "write the end"]));
    stop.cancel();
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn receiver_that_is_away_is_reported_once_and_gets_what_waited_when_it_is_back() -> TestResult {
    let fleet = Fleet::start("traces_away", &SIMULATOR).await?;
    let (at, received, stop) = (reserved()?, Received::default(), CancellationToken::new());
    // All of it from the environment, without a flag.
    let receiver = format!("http://{at}");
    let variables = with_variables(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &receiver),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret-of-the-receiver"),
        ("OTEL_SERVICE_NAME", "fleet-a"),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.name=overridden"),
    ]);
    let mut shepherd = fleet.shepherd_otherwise(variables, "shepherd", &[endpoint()?], &LIMITS)?;
    fleet.until("all are Ready all the same", ALL_READY).await?;
    let log = || std::fs::read_to_string(fleet.log_of("shepherd"));
    until("it says why", || log().is_ok_and(|log| log.contains("cannot send traces"))).await?;
    let message = log()?;
    let line = message.lines().find(|line| line.contains("cannot send traces")).context("the line")?;
    assert!(line.contains("refused") && line.contains(&at.to_string()), "{line}");

    receive(at, &received, &stop).await?;
    until("what waited came", || {
        received.roots().iter().filter(|root| text(root, "process") == "AgentStart").count() == 3
    })
    .await?;
    until("it says so", || log().is_ok_and(|log| log.contains("the receiver accepts traces again"))).await?;
    assert!(shepherd.terminate().await?.success());
    let message = log()?;
    assert_eq!(message.matches("cannot send traces").count(), 1);
    assert!(!message.contains("secret-of-the-receiver"), "the log has the header");
    for request in received.requests() {
        assert_eq!(request.authorization.as_deref(), Some("Bearer secret-of-the-receiver"));
        let resource = |name: &str| request.resource.get(name).map(String::as_str);
        assert_eq!(resource("service.name"), Some("fleet-a"));
        assert_eq!(resource("deployment.environment.name"), Some("test"));
        assert_eq!(resource("service.version"), Some(env!("CARGO_PKG_VERSION")));
    }
    stop.cancel();
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sampler_of_the_environment_decides_what_is_sent() -> TestResult {
    let fleet = Fleet::start("traces_unsampled", &SIMULATOR).await?;
    let (at, received, stop) = (reserved()?, Received::default(), CancellationToken::new());
    receive(at, &received, &stop).await?;
    let receiver = format!("--otlp_endpoint=http://{at}");
    let variables = with_variables(&[("OTEL_TRACES_SAMPLER", "always_off")]);
    let flags = [&LIMITS[..], &[&receiver]].concat();
    let mut shepherd = fleet.shepherd_otherwise(variables, "shepherd", &[endpoint()?], &flags)?;
    fleet.until("all are Ready", ALL_READY).await?;
    assert!(shepherd.terminate().await?.success());
    assert!(received.spans().is_empty(), "{:?}", received.spans());
    stop.cancel();
    Ok(())
}
