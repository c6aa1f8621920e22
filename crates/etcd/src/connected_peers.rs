//! Which etcd members a member is connected to, from its metrics.
//!
//! etcd reports this only among its metrics, which it serves beside gRPC on the same port. For each other member it
//! counts the connections that carry messages: a member that stopped, fell silent or was cut off has none within five
//! seconds. (Over UNIX sockets it does not notice silence; only tests have members there.) A node's heartbeats do not
//! report whether its etcd member lives, because each of the two runs without the other.

use std::collections::BTreeSet;
use std::io;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::client::{Client, EtcdError};
use crate::transport::open_connection;

/// etcd's metrics are about 60 KiB, and a little more for each member.
const MAX_RESPONSE_BYTES: u64 = 8 << 20;
const ACTIVE_PEERS_METRIC: &str = "etcd_network_active_peers{";

impl Client {
    /// The ids of all members that the responding member exchanges messages with, without its own id.
    pub async fn connected_peers(&self) -> Result<BTreeSet<u64>, EtcdError> {
        let doing = || "reading from etcd which members it is connected to".to_owned();
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
                    return parse_metrics(&text)
                        .map_err(|reason| EtcdError::Rejected { operation: doing(), message: reason });
                }
                Ok(Err(error)) => failure = error,
                Err(_) => return Err(EtcdError::Deadline { operation: doing(), within: self.deadline() }),
            }
        }
        Err(EtcdError::Unavailable { operation: doing(), message: failure.to_string() })
    }
}

/// The members with a connection, from an HTTP response; the error is etcd's own message.
fn parse_metrics(answer: &str) -> Result<BTreeSet<u64>, String> {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
    let status = head.lines().next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("200") {
        return Err(format!(
            "the request for its metrics was answered with {:?}",
            status.chars().take(100).collect::<String>()
        ));
    }
    let mut connected = BTreeSet::new();
    for line in body.lines().filter_map(|line| line.strip_prefix(ACTIVE_PEERS_METRIC)) {
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
    Ok(connected)
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
        assert_eq!(parse_metrics(answer), Ok(BTreeSet::from([0xfd42_2379_fda5_0e48])));
        assert_eq!(parse_metrics("HTTP/1.0 200 OK\r\n\r\n"), Ok(BTreeSet::new()), "a cluster of one");
        let error = parse_metrics("HTTP/1.0 404 Not Found\r\n\r\n404").unwrap_err();
        assert!(error.contains("404 Not Found"), "{error}");
        assert!(parse_metrics("").is_err());
    }
}
