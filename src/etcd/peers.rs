//! Which members a member exchanges messages with at this moment.
//!
//! etcd answers this nowhere but among its metrics, beside gRPC on the same port. It counts there, for each other member,
//! the connections that carry messages: a member that stopped, fell silent or was cut off has none within five seconds.
//! (Over UNIX sockets it does not notice silence; only tests have members there.) Whether a member of etcd lives is not what its node's heartbeats say; each runs without the other.

use std::collections::BTreeSet;
use std::io;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::etcd::client::{Client, EtcdError};
use crate::etcd::transport::open;

/// etcd's metrics have some 60 KiB, and a little more for each member.
const ANSWER_LIMIT: u64 = 8 << 20;
const METRIC: &str = "etcd_network_active_peers{";

impl Client {
    /// The ids of all members that the member which answers exchanges messages with; itself is not among them.
    pub async fn connected_peers(&self) -> Result<BTreeSet<u64>, EtcdError> {
        let doing = || "asking etcd which members it is connected to".to_owned();
        let mut failure = io::Error::from(io::ErrorKind::NotFound);
        for endpoint in self.endpoints() {
            let asked = async {
                let mut stream = open(endpoint).await?;
                stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: etcd\r\n\r\n").await?;
                let mut answer = Vec::new();
                stream.take(ANSWER_LIMIT).read_to_end(&mut answer).await?;
                Ok(answer)
            };
            match tokio::time::timeout(self.deadline(), asked).await {
                Ok(Ok(answer)) => {
                    let text = String::from_utf8_lossy(&answer);
                    return read(&text).map_err(|said| EtcdError::Refused { doing: doing(), said });
                }
                Ok(Err(error)) => failure = error,
                Err(_) => return Err(EtcdError::Deadline { doing: doing(), within: self.deadline() }),
            }
        }
        Err(EtcdError::Away { doing: doing(), said: failure.to_string() })
    }
}

/// The members with a connection, in an answer of HTTP; the error is what etcd said.
fn read(answer: &str) -> Result<BTreeSet<u64>, String> {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
    let status = head.lines().next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("200") {
        return Err(format!(
            "its metrics were answered with {:?}",
            status.chars().take(100).collect::<String>()
        ));
    }
    let mut connected = BTreeSet::new();
    for line in body.lines().filter_map(|line| line.strip_prefix(METRIC)) {
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
    fn members_with_a_connection_are_told_from_those_without() {
        let answer = "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n\
                      # TYPE etcd_network_active_peers gauge\n\
                      etcd_network_active_peers{Local=\"8211f1d0f64f3269\",Remote=\"fd422379fda50e48\"} 1\n\
                      etcd_network_active_peers{Local=\"8211f1d0f64f3269\",Remote=\"91bc3c398fb3c146\"} 0\n\
                      etcd_network_active_peers{Local=\"8211f1d0f64f3269\",Remote=\"odd\"} 1\n\
                      etcd_network_peer_sent_bytes_total{To=\"91bc3c398fb3c146\"} 7\n";
        assert_eq!(read(answer), Ok(BTreeSet::from([0xfd42_2379_fda5_0e48])));
        assert_eq!(read("HTTP/1.0 200 OK\r\n\r\n"), Ok(BTreeSet::new()), "a cluster of one");
        let error = read("HTTP/1.0 404 Not Found\r\n\r\n404").unwrap_err();
        assert!(error.contains("404 Not Found"), "{error}");
        assert!(read("").is_err());
    }
}
