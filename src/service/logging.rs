//! Sets up logging: text or JSON, with tracing.
//!
//! Values are fields of a log line, not parts of its sentence.

use std::io::IsTerminal;

use opentelemetry_sdk::trace::SdkTracer;
use tracing::Metadata;
use tracing_subscriber::filter::{FilterExt as _, LevelFilter, filter_fn};
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, fmt, registry};

use crate::service::flags::LogFormat;
use crate::service::traces::layer::build_layer;

/// Starts logging to standard error, and tracing if a tracer is given. `RUST_LOG` sets the log filter; `default` is
/// used without it. A second call changes nothing.
pub fn start_logging(format: LogFormat, default: &str, tracer: Option<SdkTracer>) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let filter = filter.and(filter_fn(has_no_secret).with_max_level_hint(LevelFilter::TRACE));
    let log = fmt::layer()
        .with_writer(std::io::stderr)
        // A failed write would be reported by `eprintln!`, which panics if standard error cannot be written to: a full
        // disk under the log would end the task that wants to log.
        .log_internal_errors(false);
    let ansi = std::io::stderr().is_terminal();
    // An error means that a subscriber is installed already, as in a test.
    let registry = registry().with(tracer.map(build_layer));
    let _ = match format {
        LogFormat::Text => registry.with(log.with_ansi(ansi).with_filter(filter)).try_init(),
        LogFormat::Json => registry.with(log.json().with_filter(filter)).try_init(),
    };
}

/// Whether log lines of this kind have no secret. sqlx quotes a line of `.pgpass` that it cannot read.
fn has_no_secret(metadata: &Metadata<'_>) -> bool {
    !metadata.target().starts_with("sqlx_postgres::options") || metadata.fields().field("line").is_none()
}
