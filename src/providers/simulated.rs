//! The simulated provider: a client of the simulator's HTTP API.
//!
//! It stands where a hosting company's API would, and is treated like one: a URL
//! from the configuration, limits on every call, and no trust in an answer that
//! is not what the contract says. The contract is `simulator/api.rs`'s; nothing
//! of it is imported, as nothing could be from a hosting company.

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::{Method, StatusCode, Url};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::model::host_key::HostKey;
use crate::model::ids::IntentId;
use crate::model::provider_status::{PowerState, ProviderStatus, Usage};
use crate::providers::http;
use crate::providers::provider::{
    Creation, ErrorClass, PowerAction, PowerControl, PowerSupport, Provider, ProviderError, ProviderMachine,
    ProviderName, RebootControl, RebootMethod,
};

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

#[derive(Deserialize)]
struct ListAnswer {
    machines: Vec<MachineAnswer>,
}

#[derive(Deserialize)]
struct MachineAnswer {
    id: String,
    usage: UsageAnswer,
    reservation: String,
    address: Option<String>,
    port: Option<u16>,
    user: Option<String>,
    location: Option<String>,
    status: String,
    host_keys: Vec<HostKeyAnswer>,
    intent: Option<IntentId>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum UsageAnswer {
    Unused,
    Used,
}

#[derive(Deserialize)]
struct HostKeyAnswer {
    algorithm: String,
    blob: String,
}

#[derive(Deserialize)]
struct PowerAnswer {
    power: String,
}

#[derive(Deserialize)]
struct ErrorAnswer {
    error: String,
}

#[derive(Deserialize)]
struct Nothing {}

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

    /// One call. `Ok(None)` is a 404.
    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        url: Url,
        body: Option<Value>,
    ) -> Result<Option<T>, ProviderError> {
        let mut request = self.client.request(method, url.clone());
        if let Some(caller) = &self.caller {
            request = request.header(CALLER_HEADER, caller);
        }
        if let Some(body) = body {
            request = request.json(&body);
        }
        let response = request.send().await.map_err(|error| http::failed(&url, &error))?;
        let status = response.status();
        let body = http::body(response, &url).await?;
        if status.is_success() {
            return serde_json::from_slice(&body).map(Some).map_err(|error| {
                self.error(ErrorClass::Unreadable, &url, &format!("the answer cannot be read: {error}"))
            });
        }
        let said = serde_json::from_slice::<ErrorAnswer>(&body);
        if status == StatusCode::NOT_FOUND {
            // Any web server says 404. Believing a wrong one would make every machine vanish.
            return match said {
                Ok(_) => Ok(None),
                Err(_) => {
                    Err(self.error(ErrorClass::Configuration, &url, "there is no simulator's API (404)"))
                }
            };
        }
        let said = match said {
            Ok(answer) => format!("{} ({})", answer.error, status.as_u16()),
            Err(_) => format!("it answered {status}"),
        };
        let class = if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
            ErrorClass::Transient
        } else {
            ErrorClass::Permanent
        };
        Err(self.error(class, &url, &said))
    }

    async fn about<T: DeserializeOwned>(
        &self,
        id: &str,
        what: &str,
        body: Option<Value>,
    ) -> Result<T, ProviderError> {
        let method = if body.is_some() { Method::POST } else { Method::GET };
        let url = self.at(&[id, what]);
        self.call(method, url.clone(), body).await?.ok_or_else(|| self.unknown(&url, id))
    }

    fn unknown(&self, url: &Url, id: &str) -> ProviderError {
        let sentence = format!("provider {} knows no machine {id:?}", self.name);
        ProviderError::new(ErrorClass::NotFound, http::endpoint(url), sentence)
    }

    fn error(&self, class: ErrorClass, url: &Url, said: &str) -> ProviderError {
        let sentence = format!("provider {} at {}: {said}", self.name, http::shown(url));
        ProviderError::new(class, http::endpoint(url), sentence)
    }

    fn machine(&self, answer: MachineAnswer) -> Result<ProviderMachine, ProviderError> {
        let mut host_keys = Vec::with_capacity(answer.host_keys.len());
        for key in answer.host_keys {
            let blob = STANDARD.decode(&key.blob).map_err(|error| {
                let said = format!("a host key of {} is not base64: {error}", answer.id);
                self.error(ErrorClass::Unreadable, &self.url, &said)
            })?;
            host_keys.push(HostKey { algorithm: key.algorithm, key: blob });
        }
        Ok(ProviderMachine {
            usage: match answer.usage {
                UsageAnswer::Unused => Usage::KnownUnused { reservation: answer.reservation },
                UsageAnswer::Used => Usage::KnownUsed,
            },
            id: answer.id,
            address: answer.address,
            ssh_port: answer.port,
            ssh_user: answer.user,
            location: answer.location,
            status: ProviderStatus::from(answer.status.as_str()),
            host_keys,
            intent: answer.intent,
        })
    }

    async fn listed(&self, url: Url) -> Result<Vec<ProviderMachine>, ProviderError> {
        let answer: Option<ListAnswer> = self.call(Method::GET, url.clone(), None).await?;
        let answer = answer.ok_or_else(|| {
            self.error(ErrorClass::Configuration, &url, "there is no simulator's API (404)")
        })?;
        answer.machines.into_iter().map(|machine| self.machine(machine)).collect()
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
        self.listed(self.at(&[])).await
    }

    async fn look_at(&self, id: &str) -> Result<Option<ProviderMachine>, ProviderError> {
        let answer: Option<MachineAnswer> = self.call(Method::GET, self.at(&[id]), None).await?;
        answer.map(|answer| self.machine(answer)).transpose()
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
        let made: Option<MachineAnswer> = self.call(Method::POST, url.clone(), Some(body)).await?;
        let made = made.ok_or_else(|| {
            let sentence = format!("provider {} knows no reservation {reservation:?}", self.name);
            ProviderError::new(ErrorClass::NotFound, http::endpoint(&url), sentence)
        })?;
        self.machine(made)
    }

    async fn find_by_intent(&self, intent: IntentId) -> Result<Option<ProviderMachine>, ProviderError> {
        let mut url = self.at(&[]);
        url.query_pairs_mut().append_pair("intent", &intent.to_string());
        let mut found = self.listed(url.clone()).await?;
        let first = found.pop();
        match &first {
            // An API that ignores the question answers with everything it has.
            _ if !found.is_empty() => {
                Err(self.error(ErrorClass::Unreadable, &url, "more than one machine has one intent"))
            }
            Some(machine) if machine.intent != Some(intent) => {
                Err(self.error(ErrorClass::Unreadable, &url, "the machine found has another intent"))
            }
            _ => Ok(first),
        }
    }
}

#[async_trait]
impl PowerControl for SimulatedProvider {
    async fn support(&self, _id: &str) -> Result<PowerSupport, ProviderError> {
        Ok(PowerSupport::Available)
    }

    async fn power(&self, id: &str, action: PowerAction, intent: IntentId) -> Result<(), ProviderError> {
        let body = json!({ "action": action, "intent": intent });
        let _: Nothing = self.about(id, "power", Some(body)).await?;
        Ok(())
    }

    async fn power_state(&self, id: &str) -> Result<PowerState, ProviderError> {
        let answer: PowerAnswer = self.about(id, "power", None).await?;
        Ok(PowerState::from(answer.power.as_str()))
    }
}

#[async_trait]
impl RebootControl for SimulatedProvider {
    async fn method(&self, _id: &str) -> Result<RebootMethod, ProviderError> {
        Ok(RebootMethod::Provider)
    }

    async fn reboot(&self, id: &str, intent: IntentId) -> Result<(), ProviderError> {
        let _: Nothing = self.about(id, "reboot", Some(json!({ "intent": intent }))).await?;
        Ok(())
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
