//! `cluster rotate-secrets-key`: replace the key of a cluster's Kubernetes Secrets, and show how far that is.

use std::fmt::Write as _;

use crate::cluster::ClusterOrderArgs;
use crate::cluster::outcome::send_cluster_order;
use crate::cluster::view::{ClusterView, SecretsEncryptionView};
use crate::context::CommandContext;
use crate::error::CliError;
use model::humanize::humanize_duration;
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

pub(crate) const ROTATE_SECRETS_KEY_EXAMPLES: &str = "\
Example:
  shepherdctl cluster rotate-secrets-key ams --reason 'a controller left with its disk'

Every controller reads with the new key before any of them writes with it. Then every Secret is written
again, and the former key is dropped. API servers restart one at a time, three times. A controller that is
silent holds the rotation.";

/// Orders another key for a cluster's Kubernetes Secrets.
pub(super) async fn rotate_secrets_key(
    context: &CommandContext,
    args: &ClusterOrderArgs,
) -> Result<String, CliError> {
    let give = async |service, order| {
        let request = v1::RotateSecretsKeyRequest { name: args.name.clone(), order: Some(order) };
        ClustersClient::new(service).rotate_secrets_key(request).await
    };
    send_cluster_order(context, args, give).await
}

/// Describes the encryption of Secrets for `cluster describe`; `None` for a cluster without Kubernetes.
pub(super) fn format_secrets_status(cluster: &ClusterView, now: Timestamp) -> Option<String> {
    let (secrets, _) = cluster.secrets_encryption.as_ref().zip(cluster.kubernetes.as_ref())?;
    Some(format_encryption(secrets, now))
}

fn format_encryption(secrets: &SecretsEncryptionView, now: Timestamp) -> String {
    let lasts = humanize_duration(between(secrets.since, now));
    let mut text = match (secrets.stage.as_str(), &secrets.key) {
        ("new", _) => "not encrypted: each controller needs a role server that knows it".to_owned(),
        ("prepared", _) => {
            "not encrypted; the first key comes an hour after each controller knows the order".to_owned()
        }
        ("settled", Some(key)) => format!("encrypted with {key}"),
        ("reading", Some(key)) => {
            format!("encrypted with {key}; controllers begin to read with the next key")
        }
        ("reading", None) => "not encrypted yet; controllers begin to read with the first key".to_owned(),
        ("writing", Some(key)) => format!("controllers begin to write with {key}"),
        ("rewriting", Some(key)) => format!("all Secrets are written again with {key}"),
        (stage, _) => stage.to_owned(),
    };
    let _ = write!(text, ", for {lasts}");
    if let Some(by) = &secrets.rotation_ordered_by {
        let _ = write!(text, "; to be replaced, as {by} ordered");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use model::time::after;

    #[test]
    fn each_stage_states_what_is_encrypted() {
        let since = Timestamp::from_timestamp(1_800_000_000, 0).unwrap();
        for (stage, key, expected) in [
            ("new", None, "not encrypted: each controller needs a role server that knows it"),
            (
                "prepared",
                None,
                "not encrypted; the first key comes an hour after each controller knows the order",
            ),
            ("reading", None, "not encrypted yet; controllers begin to read with the first key"),
            ("writing", Some("key1-a"), "controllers begin to write with key1-a"),
            ("rewriting", Some("key1-a"), "all Secrets are written again with key1-a"),
            ("settled", Some("key1-a"), "encrypted with key1-a"),
        ] {
            let secrets = SecretsEncryptionView {
                stage: stage.to_owned(),
                since,
                key: key.map(str::to_owned),
                rotation_ordered_by: Some("kim".to_owned()),
            };
            let text = format_encryption(&secrets, after(since, Duration::from_mins(2)));
            assert!(text.starts_with(&format!("{expected}, for 2")), "{text}");
            assert!(text.ends_with("; to be replaced, as kim ordered"), "{text}");
        }
    }
}
