//! Values that the decisions of a node pass on without reading them: a connection to the leader, and a cluster to
//! found.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use shepherd::curator::bootstrap::{BootstrapRequest, create_authority};
use shepherd::curator_client::certificate::{Serial, Validity};
use shepherd::curator_client::clock::Clock;
use shepherd::curator_client::identity::Identity;
use shepherd::curator_client::node_id::PublicKey;
use shepherd::curator_client::pki::NODE_LIFETIME;
use shepherd::model::time::Timestamp;
use shepherd::roleserver::cluster::files::{ClusterFiles, Credentials};
use shepherd::roleserver::cluster::node_facts::{ClusterFounding, CuratorConnection};

#[derive(Debug)]
pub(crate) struct Fixture {
    pub(crate) connection: CuratorConnection,
    pub(crate) to_found: ClusterFounding,
}

impl Fixture {
    pub(crate) fn new() -> Result<Self> {
        let now = Timestamp::from_timestamp(1_900_000_000, 0).unwrap_or_default();
        let authority = create_authority(uuid::Uuid::from_u128(7), now)?;
        let key = Identity::generate()?;
        let node_key = PublicKey(key.public_key());
        let validity = Validity::starting(now, NODE_LIFETIME);
        let issued = authority.issue_node_certificate(&node_key, Serial::new([7; 16]), validity)?;
        let credentials = Credentials {
            certificate: hex::encode(&issued.certificate),
            ca_certificate: hex::encode(&authority.anchor().certificate),
        };
        // The directory is empty, and nothing reads it.
        let files = ClusterFiles::in_state_directory(Path::new("/nonexistent"));
        let founding = BootstrapRequest {
            authority: Arc::new(authority),
            name: "model".to_owned(),
            owner_keys: vec![node_key],
            node_key,
            machine: None,
            labels: shepherd::model::label::Labels::new(),
            address: None,
            restore: None,
        };
        Ok(Self {
            connection: CuratorConnection::new(&key, &credentials, &files, &Clock::system())?,
            to_found: ClusterFounding {
                founding: Arc::new(founding),
                address: "10.0.0.1".parse()?,
                image: None,
            },
        })
    }
}
