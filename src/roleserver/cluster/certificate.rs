//! Another certificate in time.
//!
//! It is asked for when a third of the time is left. Where that fails it is asked for again, ever more rarely, for the
//! ten days that are left then.

use std::time::Duration;

use crate::curator::clock::Clock;
use crate::curator::pki::{Renewal, Validity, renewal};
use crate::curator::tls::certified;
use crate::model::time::between;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::nodes_client::NodesClient;
use crate::roleserver::cluster::facts::Facts;
use crate::roleserver::cluster::files::{Credentials, Files};
use crate::supervisor::context::{Runnable, Starting};
use crate::supervisor::outcome::Stop;

/// The longest that is slept at once: the clock of the machine may be put right meanwhile.
const LONGEST_SLEEP: Duration = Duration::from_hours(1);

/// The runnable.
#[must_use]
pub fn certificate(files: Files, facts: Facts, clock: Clock) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, clock) = (files.clone(), facts.clone(), clock.clone());
        async move {
            let scope = starting.scope().clone();
            let connection = scope.until_cancelled(facts.connection.watch().next()).await?;
            let mut starting = Some(starting);
            let mut healthy = None;
            loop {
                let shown = connection.shown.current();
                let validity = shown.cert.first().and_then(|certificate| Validity::read(certificate));
                let validity =
                    validity.ok_or_else(|| Stop::because("this node's certificate cannot be read"))?;
                match renewal(validity, clock.now()) {
                    Renewal::NotBefore(due) => {
                        if let Some(starting) = starting.take() {
                            healthy = Some(starting.healthy());
                        }
                        let _ = &healthy;
                        let pause = between(clock.now(), due).clamp(Duration::from_secs(1), LONGEST_SLEEP);
                        scope.until_cancelled(tokio::time::sleep(pause)).await?;
                    }
                    // Enrolment, or the control plane beside its etcd, sees to that.
                    Renewal::Expired => {
                        scope.until_cancelled(tokio::time::sleep(Duration::from_secs(5))).await?;
                    }
                    Renewal::Due => {
                        let mut nodes = NodesClient::new(connection.curators.channel());
                        let asking = nodes.renew_certificate(wire::RenewCertificateRequest {});
                        let answer = scope.until_cancelled(asking).await?.map_err(|status| {
                            Stop::because(format!("this node got no other certificate: {}", status.message()))
                        })?;
                        let certificate = answer.into_inner().certificate;
                        let key = files.key()?.ok_or_else(|| Stop::because("this node has no key"))?;
                        let next = certified(&certificate, key.pkcs8())?;
                        files.write_credentials(&Credentials {
                            certificate: hex::encode(&certificate),
                            ca_certificate: hex::encode(&connection.anchor.certificate),
                        })?;
                        connection.shown.replace(next);
                        tracing::info!("this node has another certificate");
                    }
                }
            }
        }
    })
}
