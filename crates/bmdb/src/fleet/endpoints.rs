//! Endpoints of the API servers and callback servers that are alive, as their sessions registered them.

use crate::connection::Bmdb;
use crate::connection::error::BmdbError;

/// An API server that is alive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiServerEndpoint {
    /// `HOST:PORT` pairs under which it is reachable.
    pub endpoints: Vec<String>,
    /// CA certificates that verify it, DER in base64. Empty: the client's own trust store.
    pub ca_certificates: Vec<String>,
}

impl Bmdb {
    /// Every API server that is alive, with the endpoints that it registered.
    pub async fn list_api_servers(&self) -> Result<Vec<ApiServerEndpoint>, BmdbError> {
        let found = self
            .statement("looking for servers of the API", |connection| {
                Box::pin(
                    sqlx::query_scalar!(
                        "SELECT runtime_info FROM session
                         WHERE component = 'api' AND closed_at IS NULL AND deadline > clock_timestamp()
                         ORDER BY session_id DESC"
                    )
                    .fetch_all(connection),
                )
            })
            .await?;
        let texts = |info: &serde_json::Value, key: &str| -> Vec<String> {
            let listed = info.get(key).and_then(serde_json::Value::as_array).into_iter().flatten();
            listed.filter_map(|text| text.as_str().map(str::to_owned)).collect()
        };
        Ok(found
            .iter()
            .map(|info| ApiServerEndpoint {
                endpoints: texts(info, "endpoints"),
                ca_certificates: texts(info, "ca_certificates"),
            })
            .collect())
    }
}

impl Bmdb {
    /// Where agents can report: the endpoints of every callback server alive, sorted, each once.
    pub async fn live_callback_endpoints(&self) -> Result<Vec<String>, BmdbError> {
        let found = self
            .statement("looking for callback servers", |pool| {
                Box::pin(
                    sqlx::query_scalar!(
                        "SELECT runtime_info FROM session
                         WHERE component = 'callback' AND closed_at IS NULL AND deadline > clock_timestamp()"
                    )
                    .fetch_all(pool),
                )
            })
            .await?;
        let mut endpoints: Vec<String> = found
            .iter()
            .filter_map(|info| info.get("endpoints")?.as_array())
            .flatten()
            .filter_map(|endpoint| endpoint.as_str().map(str::to_owned))
            .collect();
        endpoints.sort_unstable();
        endpoints.dedup();
        Ok(endpoints)
    }
}
