//! What a member reports only among its metrics: which members it is connected to, and the quota of its database file.
//!
//! etcd serves its metrics beside gRPC on the same port. For each other member it counts the connections that carry
//! messages: a member that stopped, fell silent or was cut off has none within five seconds. (Over UNIX sockets it does
//! not notice silence; only tests have members there.) A node's heartbeats do not report whether its etcd member lives,
//! because each of the two runs without the other. etcd before 3.6 reports its quota nowhere else.

use std::collections::BTreeSet;
use std::io;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::client::{Client, EtcdError};
use crate::transport::open_connection;

/// etcd's metrics are about 60 KiB, and a little more for each member.
const MAX_RESPONSE_BYTES: u64 = 8 << 20;
const ACTIVE_PEERS_METRIC: &str = "etcd_network_active_peers{";
const QUOTA_METRIC: &str = "etcd_server_quota_backend_bytes ";

impl Client {
    /// The ids of all members that the responding member exchanges messages with, without its own id.
    pub async fn connected_peers(&self) -> Result<BTreeSet<u64>, EtcdError> {
        let doing = "reading from etcd which members it is connected to";
        Ok(parse_active_peers(&self.read_metrics(doing).await?))
    }

    /// The size of the database file from which the responding member accepts no writes; `None` if it does not report it.
    pub async fn database_quota(&self) -> Result<Option<u64>, EtcdError> {
        Ok(parse_quota(&self.read_metrics("reading the quota of etcd").await?))
    }

    /// The metrics of the responding member, as text.
    async fn read_metrics(&self, doing: &str) -> Result<String, EtcdError> {
        let doing = || doing.to_owned();
        let mut failure = io::Error::from(io::ErrorKind::NotFound);
        for endpoint in self.endpoints() {
            let requested = async {
                let mut stream = open_connection(endpoint).await?;
                stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: etcd\r\n\r\n").await?;
                let mut answer = Vec::new();
                stream.take(MAX_RESPONSE_BYTES).read_to_end(&mut answer).await?;
                Ok(answer)
            };
            match tokio::time::timeout(self.deadline(), requested).await {
                Ok(Ok(answer)) => {
                    let text = String::from_utf8_lossy(&answer);
                    return metrics_body(&text)
                        .map(str::to_owned)
                        .map_err(|reason| EtcdError::Rejected { operation: doing(), message: reason });
                }
                Ok(Err(error)) => failure = error,
                Err(_) => return Err(EtcdError::Deadline { operation: doing(), within: self.deadline() }),
            }
        }
        Err(EtcdError::Unavailable { operation: doing(), message: failure.to_string() })
    }
}

/// The metrics in an HTTP response; the error is etcd's own message.
fn metrics_body(answer: &str) -> Result<&str, String> {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
    let status = head.lines().next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("200") {
        return Err(format!(
            "the request for its metrics was answered with {:?}",
            status.chars().take(100).collect::<String>()
        ));
    }
    Ok(body)
}

/// The quota, which etcd writes as a floating-point number.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it is positive, and a cast of a float ends at the largest integer"
)]
fn parse_quota(metrics: &str) -> Option<u64> {
    let value = metrics.lines().find_map(|line| line.strip_prefix(QUOTA_METRIC))?;
    let bytes = value.trim().parse::<f64>().ok().filter(|bytes| *bytes >= 1.0)?;
    Some(bytes as u64)
}

/// The members with a connection.
fn parse_active_peers(metrics: &str) -> BTreeSet<u64> {
    let mut connected = BTreeSet::new();
    for line in metrics.lines().filter_map(|line| line.strip_prefix(ACTIVE_PEERS_METRIC)) {
        let Some((labels, count)) = line.split_once('}') else { continue };
        let remote =
            labels.split(',').find_map(|label| label.trim().strip_prefix("Remote=\"")?.strip_suffix('"'));
        let (Some(remote), Ok(count)) = (remote, count.trim().parse::<f64>()) else { continue };
        if let Ok(id) = u64::from_str_radix(remote, 16)
            && count > 0.0
        {
            connected.insert(id);
        }
    }
    connected
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connected_members_are_those_with_active_peers() {
        let answer = "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n\
                      # TYPE etcd_network_active_peers gauge\n\
                      etcd_network_active_peers{Local=\"8211f1d0f64f3269\",Remote=\"fd422379fda50e48\"} 1\n\
                      etcd_network_active_peers{Local=\"8211f1d0f64f3269\",Remote=\"91bc3c398fb3c146\"} 0\n\
                      etcd_network_active_peers{Local=\"8211f1d0f64f3269\",Remote=\"odd\"} 1\n\
                      etcd_network_peer_sent_bytes_total{To=\"91bc3c398fb3c146\"} 7\n";
        let metrics = metrics_body(answer).unwrap();
        assert_eq!(parse_active_peers(metrics), BTreeSet::from([0xfd42_2379_fda5_0e48]));
        let empty = metrics_body("HTTP/1.0 200 OK\r\n\r\n").unwrap();
        assert_eq!(parse_active_peers(empty), BTreeSet::new(), "a cluster of one");
        let error = metrics_body("HTTP/1.0 404 Not Found\r\n\r\n404").unwrap_err();
        assert!(error.contains("404 Not Found"), "{error}");
        assert!(metrics_body("").is_err());
    }

    #[test]
    fn quota_is_a_floating_point_number() {
        for (metrics, expected) in [
            (
                "# TYPE etcd_server_quota_backend_bytes gauge\netcd_server_quota_backend_bytes 1.6777216e+07\n",
                Some(16 << 20),
            ),
            ("etcd_server_quota_backend_bytes 2.147483648e+09", Some(2 << 30)),
            ("etcd_server_quota_backend_bytes 0", None),
            ("etcd_server_quota_backend_bytes many", None),
            ("etcd_server_version{server_version=\"3.4.23\"} 1", None),
        ] {
            assert_eq!(parse_quota(metrics), expected, "{metrics}");
        }
    }
}
