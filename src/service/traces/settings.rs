//! Settings of traces: the flag, and the environment variables of OpenTelemetry.
//!
//! The names and units of the variables are those of
//! <https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/>. Two of them are read by the
//! library: `OTEL_RESOURCE_ATTRIBUTES`, and the sampler. It replaces a wrong sampler by its default without notice, so
//! the value is checked here as well.
//!
//! The specification says to warn about a wrong value and to use the default. Here it is a mistake of the caller, like
//! a wrong flag, and `--check` reports it; `OTEL_RESOURCE_ATTRIBUTES` is not checked. Without a receiver, no variable matters
//! and none is checked.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::{EnvResourceDetector, TelemetryResourceDetector};
use percent_encoding::percent_decode_str;
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue, MetadataMap};

use crate::service::os_process::hostname;
use crate::service::traces::receiver::TraceReceiver;

const FLAG: &str = "--otlp_endpoint";
/// Variables of the URL. Of these lists, the first variable that is set applies.
const ENDPOINT: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
const PROTOCOL: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
const HEADERS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"];
const TIMEOUT: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"];

/// Time limit of one request, in milliseconds.
const DEFAULT_TIMEOUT: u64 = 10_000;
/// How long spans are gathered before they are sent, in milliseconds.
const DEFAULT_BATCH_DELAY: u64 = 500;
/// Longest time that a variable can set, in milliseconds.
const MAX_MILLISECONDS: u64 = 3_600_000;
/// Most spans that wait to be sent.
const DEFAULT_QUEUE_CAPACITY: usize = 4096;
/// Most spans in one request.
const DEFAULT_MAX_BATCH: usize = 512;
/// The largest queue that a variable can set.
const MAX_QUEUE_CAPACITY: usize = 1_000_000;
/// The largest batch that a variable can set. Receivers reject messages above a limit, which is often 4 MB.
const MAX_MAX_BATCH: usize = 4096;

/// Where and how traces are sent.
#[derive(Debug)]
pub struct TraceSettings {
    /// The endpoint of the receiver.
    pub receiver: TraceReceiver,
    /// Sent with each request. The values are marked as sensitive, because they are often credentials.
    pub headers: MetadataMap,
    /// Describes this process to the receiver.
    pub resource: Resource,
    /// Most spans that wait to be sent.
    pub queue_capacity: usize,
    /// Most spans in one request.
    pub max_batch: usize,
    /// How long spans are gathered before they are sent.
    pub batch_delay: Duration,
}

impl TraceSettings {
    /// Reads the settings from the flag and from variables. `None` if none names a receiver. The error is a
    /// sentence.
    pub fn read(
        flag: Option<&str>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, String> {
        let variables = Variables(variable);
        let Some((source, url)) = variables.endpoint(flag)? else { return Ok(None) };
        let timeout = variables.milliseconds(&TIMEOUT, DEFAULT_TIMEOUT)?;
        variables.check_sampler()?;
        let queue_capacity = variables.number(
            &["OTEL_BSP_MAX_QUEUE_SIZE"],
            &(1..=MAX_QUEUE_CAPACITY),
            DEFAULT_QUEUE_CAPACITY,
        )?;
        let max_batch =
            variables.number(&["OTEL_BSP_MAX_EXPORT_BATCH_SIZE"], &(1..=MAX_MAX_BATCH), DEFAULT_MAX_BATCH)?;
        Ok(Some(Self {
            receiver: TraceReceiver::parse(source, &url, timeout)?,
            headers: variables.headers()?,
            resource: variables.resource(),
            queue_capacity,
            max_batch: max_batch.min(queue_capacity),
            batch_delay: variables.milliseconds(&["OTEL_BSP_SCHEDULE_DELAY"], DEFAULT_BATCH_DELAY)?,
        }))
    }
}

/// Environment variables, or those of a test.
struct Variables<F>(F);

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    /// The name and the value of the first of these variables that is set. An empty one is not set.
    fn first(&self, names: &[&'static str]) -> Option<(&'static str, String)> {
        names.iter().copied().find_map(|name| {
            let value = (self.0)(name).filter(|value| !value.is_empty())?;
            Some((name, value))
        })
    }

    fn number<T>(&self, names: &[&'static str], valid: &RangeInclusive<T>, default: T) -> Result<T, String>
    where
        T: FromStr + PartialOrd + Display,
    {
        let Some((name, value)) = self.first(names) else { return Ok(default) };
        value.parse::<T>().ok().filter(|number| valid.contains(number)).ok_or_else(|| {
            format!(
                "{name} is {value:?}; write a number from {} to {}, or unset it",
                valid.start(),
                valid.end()
            )
        })
    }

    fn milliseconds(&self, names: &[&'static str], default: u64) -> Result<Duration, String> {
        self.number(names, &(1..=MAX_MILLISECONDS), default).map(Duration::from_millis)
    }

    /// The URL of the receiver, and the flag or the variable that gives it.
    fn endpoint(&self, flag: Option<&str>) -> Result<Option<(&'static str, String)>, String> {
        if let Some(url) = flag {
            return Ok(Some((FLAG, url.to_owned())));
        }
        let has_value = |name, wanted: &str| {
            self.first(&[name]).is_some_and(|(_, value)| value.eq_ignore_ascii_case(wanted))
        };
        if has_value("OTEL_SDK_DISABLED", "true") || has_value("OTEL_TRACES_EXPORTER", "none") {
            return Ok(None);
        }
        let Some((source, url)) = self.first(&ENDPOINT) else { return Ok(None) };
        match self.first(&PROTOCOL) {
            Some((name, protocol)) if protocol != "grpc" => Err(format!(
                "{name} is {protocol:?}, and traces are sent by gRPC only; set it to grpc, and {source} to the \
                 receiver's URL for gRPC, for example http://collector.example:4317"
            )),
            _ => Ok(Some((source, url))),
        }
    }

    fn headers(&self) -> Result<MetadataMap, String> {
        let mut headers = MetadataMap::new();
        let Some((variable, list)) = self.first(&HEADERS) else { return Ok(headers) };
        for (index, header) in list.split(',').enumerate() {
            // No error quotes the header, because it may be a credential.
            let wrong = || {
                format!(
                    "header {} of {variable} is not valid; write NAME=VALUE,NAME=VALUE, and percent-encode spaces, \
                     commas and characters that are not ASCII",
                    index + 1
                )
            };
            let (name, value) = header.split_once('=').ok_or_else(wrong)?;
            let name = name.trim().parse::<AsciiMetadataKey>().map_err(|_| wrong())?;
            let value = percent_decode_str(value.trim()).decode_utf8().map_err(|_| wrong())?;
            let mut value = value.parse::<AsciiMetadataValue>().map_err(|_| wrong())?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        Ok(headers)
    }

    /// Checks the sampler, which the library reads.
    fn check_sampler(&self) -> Result<(), String> {
        let Some((name, sampler)) = self.first(&["OTEL_TRACES_SAMPLER"]) else { return Ok(()) };
        match sampler.strip_prefix("parentbased_").unwrap_or(&sampler) {
            "always_on" | "always_off" => Ok(()),
            "traceidratio" => {
                self.number(&["OTEL_TRACES_SAMPLER_ARG"], &(0.0..=1.0), 1.0)?;
                Ok(())
            }
            _ => Err(format!(
                "{name} is {sampler:?}; write always_on, always_off or traceidratio, each also with parentbased_ \
                 before it, or unset it"
            )),
        }
    }

    fn resource(&self) -> Resource {
        let resource = Resource::builder_empty()
            .with_service_name("shepherd")
            .with_attributes([
                KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
                KeyValue::new("host.name", hostname()),
                KeyValue::new("process.pid", i64::from(std::process::id())),
            ])
            .with_detectors(&[Box::new(TelemetryResourceDetector), Box::new(EnvResourceDetector::new())]);
        match self.first(&["OTEL_SERVICE_NAME"]) {
            Some((_, name)) => resource.with_service_name(name).build(),
            None => resource.build(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(flag: Option<&str>, variables: &[(&str, &str)]) -> Result<Option<TraceSettings>, String> {
        TraceSettings::read(flag, |name| {
            let set = variables.iter().find(|(set, _)| *set == name);
            set.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn flag_wins_over_variables_and_variable_of_traces_over_common_one() {
        let url = |flag, variables: &[(&str, &str)]| {
            read(flag, variables).unwrap().map(|settings| settings.receiver.url)
        };
        let common = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://common:4317");
        let traces = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:4317");
        let none = [("OTEL_TRACES_EXPORTER", "none"), common];
        let http = [("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"), common];
        assert_eq!(url(None, &[]), None);
        assert_eq!(url(None, &[common]).as_deref(), Some("http://common:4317"));
        assert_eq!(url(None, &[common, traces]).as_deref(), Some("http://traces:4317"));
        assert_eq!(url(None, &[common, (traces.0, "")]).as_deref(), Some("http://common:4317"));
        assert_eq!(url(None, &[common, ("OTEL_SDK_DISABLED", "TRUE")]), None);
        assert_eq!(url(None, &none), None);
        for variables in [&[common, traces][..], &none, &http] {
            assert_eq!(url(Some("http://flag:4317"), variables).as_deref(), Some("http://flag:4317"));
        }
    }

    #[test]
    fn numbers_are_read_and_have_defaults() {
        let flag = Some("http://collector:4317");
        let numbers = |variables: &[(&str, &str)]| {
            let settings = read(flag, variables).unwrap().unwrap();
            (settings.queue_capacity, settings.max_batch, settings.batch_delay.as_millis())
        };
        assert_eq!(numbers(&[]), (4096, 512, 500));
        let given = [
            ("OTEL_BSP_MAX_QUEUE_SIZE", "100"),
            ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "50"),
            ("OTEL_BSP_SCHEDULE_DELAY", "20"),
        ];
        assert_eq!(numbers(&given), (100, 50, 20));
        assert_eq!(numbers(&given[..1]), (100, 100, 500), "a batch is no larger than the queue");
    }

    #[test]
    fn headers_are_decoded_and_not_shown() {
        let flag = Some("http://collector:4317");
        let common = ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20s3cret, x-tenant = a=b");
        let settings = read(flag, &[common]).unwrap().unwrap();
        assert_eq!(settings.headers.get("authorization").unwrap().to_str().unwrap(), "Bearer s3cret");
        assert_eq!(settings.headers.get("x-tenant").unwrap().to_str().unwrap(), "a=b");
        assert!(!format!("{settings:?}").contains("s3cret"), "{settings:?}");
        let traces = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-tenant=traces");
        let settings = read(flag, &[common, traces]).unwrap().unwrap();
        assert_eq!(settings.headers.get("x-tenant").unwrap().to_str().unwrap(), "traces");
        assert!(settings.headers.get("authorization").is_none());
    }

    #[test]
    fn resource_names_the_service() {
        let name = |variables: &[(&str, &str)]| {
            let settings = read(Some("http://collector:4317"), variables).unwrap().unwrap();
            settings.resource.get(&"service.name".into()).unwrap().to_string()
        };
        assert_eq!(name(&[]), "shepherd");
        assert_eq!(name(&[("OTEL_SERVICE_NAME", "fleet-a")]), "fleet-a");
    }

    #[test]
    fn wrong_values_are_errors_that_say_what_to_write() {
        for (name, value, text) in [
            (
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
                "collector:4317",
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT \"coll",
            ),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "sent by gRPC only; set it to grpc"),
            (
                "OTEL_EXPORTER_OTLP_TIMEOUT",
                "10s",
                "OTEL_EXPORTER_OTLP_TIMEOUT is \"10s\"; write a number from 1",
            ),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "from 1 to 1000000"),
            ("OTEL_BSP_SCHEDULE_DELAY", "-1", "from 1 to 3600000"),
            ("OTEL_TRACES_SAMPLER", "jaeger_remote", "always_off or traceidratio"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "a=b,s3cret", "header 2 of OTEL_EXPORTER_OTLP_HEADERS"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "s3cret name=b", "header 1"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "a=s3cret%0A", "header 1"),
        ] {
            let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317");
            let error = read(None, &[(name, value), endpoint]).unwrap_err();
            assert!(error.contains(text) && !error.contains("s3cret"), "{error}");
            // Without a receiver, the variable does not matter.
            if !name.ends_with("ENDPOINT") {
                assert!(read(None, &[(name, value)]).unwrap().is_none(), "{name}");
            }
        }
        let ratio = [("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "1.5")];
        let error = read(Some("http://collector:4317"), &ratio).unwrap_err();
        assert!(error.contains("OTEL_TRACES_SAMPLER_ARG is \"1.5\"; write a number from 0 to 1"), "{error}");
        let known = [("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "0.1")];
        assert!(read(Some("http://collector:4317"), &known).is_ok());
    }
}
