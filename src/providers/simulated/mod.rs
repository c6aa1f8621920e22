//! Simulated provider: client of the simulator's HTTP API.
//!
//! It takes the place of a hosting company's API and is treated like one: a URL from the configuration, limits on every
//! call, and no trust in an answer that violates the contract ([`responses`] validates it). The contract is that of
//! `crates/simulator/src/api/mod.rs`. Nothing of it is imported, as nothing could be imported from a hosting company.

use async_trait::async_trait;
use reqwest::{Method, StatusCode, Url};
use serde_json::{Value, json};

use crate::model::adoption::AdoptionLimits;
use crate::model::ids::IntentId;
use crate::model::provider_status::PowerState;
use crate::providers::http;
use crate::providers::provider::{
    CreationControl, ErrorClass, PowerAction, PowerControl, PowerSupport, Provider, ProviderError,
    ProviderMachine, ProviderName, RebootControl, RebootMethod, ReleaseControl,
};
use crate::providers::simulated::responses::ResponseError;

pub mod responses;

const KIND: &str = "simulated";
/// What bounds the adoption of its machines, unless the configuration does, as for the API of a hosting company.
pub const ADOPTION_LIMITS: AdoptionLimits = AdoptionLimits::CAUTIOUS;
const CALLER_HEADER: &str = "shepherd-caller";

/// The configuration of a simulated provider.
#[derive(Clone, Debug)]
pub struct SimulatedConfig {
    /// The operator's name for this provider.
    pub name: ProviderName,
    /// `http://host:port` of its API.
    pub url: String,
    /// The name of this process in the simulator's journal; `None` sends none.
    pub caller: Option<String>,
}

/// The machines of a simulator.
pub struct SimulatedProvider {
    name: ProviderName,
    url: Url,
    caller: Option<String>,
    client: reqwest::Client,
}

impl SimulatedProvider {
    /// Checks the configuration; calls nothing yet.
    pub fn new(config: SimulatedConfig) -> Result<Self, ProviderError> {
        let SimulatedConfig { name, url, caller } = config;
        let wrong = |problem: String| {
            ProviderError::new(
                ErrorClass::Configuration,
                "simulator",
                format!("the URL of the simulated provider {name} {problem}; give http://host:port"),
            )
        };
        let url = Url::parse(&url).map_err(|error| wrong(format!("is none ({error})")))?;
        if !matches!(url.scheme(), "http" | "https") || url.cannot_be_a_base() {
            return Err(wrong(format!("begins with {}:", url.scheme())));
        }
        let client = http::build_client(&url)?;
        Ok(Self { name, url, caller, client })
    }

    fn machines_url(&self, path: &[&str]) -> Url {
        let mut url = self.url.clone();
        // Segments are escaped one by one, so an id is never more than one segment.
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().push("v1").push("machines").extend(path);
        }
        url
    }

    /// Makes one call. Returns status and body of the response.
    async fn call(
        &self,
        method: Method,
        url: &Url,
        body: Option<Value>,
    ) -> Result<(StatusCode, Vec<u8>), ProviderError> {
        let mut request = self.client.request(method, url.clone());
        if let Some(caller) = &self.caller {
            request = request.header(CALLER_HEADER, caller);
        }
        if let Some(body) = body {
            request = request.json(&body);
        }
        let response = request.send().await.map_err(|error| http::request_error(url, &error))?;
        Ok((response.status(), http::read_body(response, url).await?))
    }

    /// Sends an order for a machine.
    async fn send_order(&self, id: &str, what: &str, body: Value) -> Result<(), ProviderError> {
        let url = self.machines_url(&[id, what]);
        let (status, body) = self.call(Method::POST, &url, Some(body)).await?;
        self.map_response(&url, responses::parse_accepted(status, &body))?
            .ok_or_else(|| self.unknown_machine(&url, id))
    }

    fn unknown_machine(&self, url: &Url, id: &str) -> ProviderError {
        let sentence = format!("provider {} knows no machine {id:?}", self.name);
        ProviderError::new(ErrorClass::NotFound, http::endpoint(url), sentence)
    }

    fn map_response<T>(&self, url: &Url, answer: Result<T, ResponseError>) -> Result<T, ProviderError> {
        answer.map_err(|ResponseError { class, message: text }| {
            let sentence = format!("provider {} at {}: {text}", self.name, http::redact_url(url));
            ProviderError::new(class, http::endpoint(url), sentence)
        })
    }
}

#[async_trait]
impl Provider for SimulatedProvider {
    fn name(&self) -> &ProviderName {
        &self.name
    }

    fn kind(&self) -> &'static str {
        KIND
    }

    async fn list(&self) -> Result<Vec<ProviderMachine>, ProviderError> {
        let url = self.machines_url(&[]);
        let (status, body) = self.call(Method::GET, &url, None).await?;
        self.map_response(&url, responses::parse_list(status, &body))
    }

    async fn find_machine(&self, id: &str) -> Result<Option<ProviderMachine>, ProviderError> {
        let url = self.machines_url(&[id]);
        let (status, body) = self.call(Method::GET, &url, None).await?;
        self.map_response(&url, responses::parse_machine(status, &body, id))
    }

    fn creation(&self) -> Option<&dyn CreationControl> {
        Some(self)
    }

    fn power(&self) -> Option<&dyn PowerControl> {
        Some(self)
    }

    fn reboot(&self) -> Option<&dyn RebootControl> {
        Some(self)
    }

    fn release(&self) -> Option<&dyn ReleaseControl> {
        Some(self)
    }
}

#[async_trait]
impl ReleaseControl for SimulatedProvider {
    async fn release(&self, id: &str, intent: IntentId) -> Result<(), ProviderError> {
        self.send_order(id, "release", json!({ "intent": intent })).await
    }
}

#[async_trait]
impl CreationControl for SimulatedProvider {
    async fn create(
        &self,
        intent: IntentId,
        reservation: Option<&str>,
    ) -> Result<ProviderMachine, ProviderError> {
        let url = self.machines_url(&[]);
        let body = json!({ "intent": intent, "reservation": reservation });
        let (status, body) = self.call(Method::POST, &url, Some(body)).await?;
        self.map_response(&url, responses::parse_created(status, &body, intent))?.ok_or_else(|| {
            let sentence = format!("provider {} knows no reservation {reservation:?}", self.name);
            ProviderError::new(ErrorClass::NotFound, http::endpoint(&url), sentence)
        })
    }

    async fn find_by_intent(&self, intent: IntentId) -> Result<Option<ProviderMachine>, ProviderError> {
        let mut url = self.machines_url(&[]);
        url.query_pairs_mut().append_pair("intent", &intent.to_string());
        let (status, body) = self.call(Method::GET, &url, None).await?;
        self.map_response(&url, responses::parse_found(status, &body, intent))
    }
}

#[async_trait]
impl PowerControl for SimulatedProvider {
    async fn power_support(&self, _id: &str) -> Result<PowerSupport, ProviderError> {
        Ok(PowerSupport::Available)
    }

    async fn set_power(&self, id: &str, action: PowerAction, intent: IntentId) -> Result<(), ProviderError> {
        self.send_order(id, "power", json!({ "action": action, "intent": intent })).await
    }

    async fn power_state(&self, id: &str) -> Result<PowerState, ProviderError> {
        let url = self.machines_url(&[id, "power"]);
        let (status, body) = self.call(Method::GET, &url, None).await?;
        let state = self.map_response(&url, responses::parse_power_state(status, &body))?;
        state.ok_or_else(|| self.unknown_machine(&url, id))
    }
}

#[async_trait]
impl RebootControl for SimulatedProvider {
    async fn reboot_method(&self, _id: &str) -> Result<RebootMethod, ProviderError> {
        Ok(RebootMethod::Provider)
    }

    async fn reboot(&self, id: &str, intent: IntentId) -> Result<(), ProviderError> {
        self.send_order(id, "reboot", json!({ "intent": intent })).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn provider(url: &str) -> Result<SimulatedProvider, ProviderError> {
        let name = "sim".parse().unwrap();
        SimulatedProvider::new(SimulatedConfig { name, url: url.to_owned(), caller: None })
    }

    #[test]
    fn an_id_is_one_segment_whatever_is_in_it() {
        let url = provider("http://127.0.0.1:1").unwrap().machines_url(&["../../faults?x#y", "power"]);
        assert_eq!(url.as_str(), "http://127.0.0.1:1/v1/machines/..%2F..%2Ffaults%3Fx%23y/power");
        assert_eq!(
            provider("http://127.0.0.1:1/base/").unwrap().machines_url(&["a"]).path(),
            "/base/v1/machines/a"
        );
    }

    #[test]
    fn unsupported_url_is_rejected() {
        for url in ["", "sim", "file:///x", "mailto:a@b"] {
            assert_eq!(provider(url).err().unwrap().class, ErrorClass::Configuration, "{url}");
        }
    }
}
