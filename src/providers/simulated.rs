//! The simulated provider: a client of the simulator's HTTP API.
//!
//! It stands where a hosting company's API would, and is treated like one: a URL
//! from the configuration, limits on every call, and no trust in an answer that
//! is not what the contract says ([`simulated_answers`] judges it). The contract
//! is `simulator/api.rs`'s; nothing of it is imported, as nothing could be from a
//! hosting company.

use async_trait::async_trait;
use reqwest::{Method, StatusCode, Url};
use serde_json::{Value, json};

use crate::model::ids::IntentId;
use crate::model::provider_status::PowerState;
use crate::providers::http;
use crate::providers::provider::{
    Creation, ErrorClass, PowerAction, PowerControl, PowerSupport, Provider, ProviderError, ProviderMachine,
    ProviderName, RebootControl, RebootMethod, Release,
};
use crate::providers::simulated_answers::{self, Refusal};

const KIND: &str = "simulated";
const CALLER_HEADER: &str = "shepherd-caller";

/// What an operator says of a simulator.
#[derive(Clone, Debug)]
pub struct SimulatedConfig {
    /// The provider's name.
    pub name: ProviderName,
    /// `http://host:port` of its API.
    pub url: String,
    /// What this process calls itself in the simulator's journal.
    pub caller: Option<String>,
}

/// Machines of a simulator.
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
        let client = http::client(&url)?;
        Ok(Self { name, url, caller, client })
    }

    fn at(&self, path: &[&str]) -> Url {
        let mut url = self.url.clone();
        // Segments are escaped one by one: an id is never more than one of them.
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().push("v1").push("machines").extend(path);
        }
        url
    }

    /// One call: status and body of what was answered.
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
        let response = request.send().await.map_err(|error| http::failed(url, &error))?;
        Ok((response.status(), http::body(response, url).await?))
    }

    /// Gives a machine an order.
    async fn order(&self, id: &str, what: &str, body: Value) -> Result<(), ProviderError> {
        let url = self.at(&[id, what]);
        let (status, body) = self.call(Method::POST, &url, Some(body)).await?;
        self.told(&url, simulated_answers::taken(status, &body))?.ok_or_else(|| self.unknown(&url, id))
    }

    fn unknown(&self, url: &Url, id: &str) -> ProviderError {
        let sentence = format!("provider {} knows no machine {id:?}", self.name);
        ProviderError::new(ErrorClass::NotFound, http::endpoint(url), sentence)
    }

    fn told<T>(&self, url: &Url, answer: Result<T, Refusal>) -> Result<T, ProviderError> {
        answer.map_err(|Refusal { class, said }| {
            let sentence = format!("provider {} at {}: {said}", self.name, http::shown(url));
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
        let url = self.at(&[]);
        let (status, body) = self.call(Method::GET, &url, None).await?;
        self.told(&url, simulated_answers::list(status, &body))
    }

    async fn look_at(&self, id: &str) -> Result<Option<ProviderMachine>, ProviderError> {
        let url = self.at(&[id]);
        let (status, body) = self.call(Method::GET, &url, None).await?;
        self.told(&url, simulated_answers::looked_at(status, &body, id))
    }

    fn creation(&self) -> Option<&dyn Creation> {
        Some(self)
    }

    fn power(&self) -> Option<&dyn PowerControl> {
        Some(self)
    }

    fn reboot(&self) -> Option<&dyn RebootControl> {
        Some(self)
    }

    fn release(&self) -> Option<&dyn Release> {
        Some(self)
    }
}

#[async_trait]
impl Release for SimulatedProvider {
    async fn release(&self, id: &str, intent: IntentId) -> Result<(), ProviderError> {
        self.order(id, "release", json!({ "intent": intent })).await
    }
}

#[async_trait]
impl Creation for SimulatedProvider {
    async fn create(
        &self,
        intent: IntentId,
        reservation: Option<&str>,
    ) -> Result<ProviderMachine, ProviderError> {
        let url = self.at(&[]);
        let body = json!({ "intent": intent, "reservation": reservation });
        let (status, body) = self.call(Method::POST, &url, Some(body)).await?;
        self.told(&url, simulated_answers::made(status, &body, intent))?.ok_or_else(|| {
            let sentence = format!("provider {} knows no reservation {reservation:?}", self.name);
            ProviderError::new(ErrorClass::NotFound, http::endpoint(&url), sentence)
        })
    }

    async fn find_by_intent(&self, intent: IntentId) -> Result<Option<ProviderMachine>, ProviderError> {
        let mut url = self.at(&[]);
        url.query_pairs_mut().append_pair("intent", &intent.to_string());
        let (status, body) = self.call(Method::GET, &url, None).await?;
        self.told(&url, simulated_answers::found(status, &body, intent))
    }
}

#[async_trait]
impl PowerControl for SimulatedProvider {
    async fn support(&self, _id: &str) -> Result<PowerSupport, ProviderError> {
        Ok(PowerSupport::Available)
    }

    async fn power(&self, id: &str, action: PowerAction, intent: IntentId) -> Result<(), ProviderError> {
        self.order(id, "power", json!({ "action": action, "intent": intent })).await
    }

    async fn power_state(&self, id: &str) -> Result<PowerState, ProviderError> {
        let url = self.at(&[id, "power"]);
        let (status, body) = self.call(Method::GET, &url, None).await?;
        let state = self.told(&url, simulated_answers::power_state(status, &body))?;
        state.ok_or_else(|| self.unknown(&url, id))
    }
}

#[async_trait]
impl RebootControl for SimulatedProvider {
    async fn method(&self, _id: &str) -> Result<RebootMethod, ProviderError> {
        Ok(RebootMethod::Provider)
    }

    async fn reboot(&self, id: &str, intent: IntentId) -> Result<(), ProviderError> {
        self.order(id, "reboot", json!({ "intent": intent })).await
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
        let url = provider("http://127.0.0.1:1").unwrap().at(&["../../faults?x#y", "power"]);
        assert_eq!(url.as_str(), "http://127.0.0.1:1/v1/machines/..%2F..%2Ffaults%3Fx%23y/power");
        assert_eq!(provider("http://127.0.0.1:1/base/").unwrap().at(&["a"]).path(), "/base/v1/machines/a");
    }

    #[test]
    fn a_url_of_another_kind_is_refused() {
        for url in ["", "sim", "file:///x", "mailto:a@b"] {
            assert_eq!(provider(url).err().unwrap().class, ErrorClass::Configuration, "{url}");
        }
    }
}
