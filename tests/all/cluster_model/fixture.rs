//! What decisions of a node carry along without looking into it: a way to the leader, and a cluster to be founded.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use shepherd::curator::bootstrap::{Founding, new_authority};
use shepherd::curator::clock::Clock;
use shepherd::curator::identity::Identity;
use shepherd::curator::node_id::PublicKey;
use shepherd::curator::pki::{NODE_LIFETIME, Serial, Validity};
use shepherd::model::time::Timestamp;
use shepherd::roleserver::cluster::facts::{Connection, ToFound};
use shepherd::roleserver::cluster::files::{Credentials, Files};

#[derive(Debug)]
pub(crate) struct Fixture {
    pub(crate) connection: Connection,
    pub(crate) to_found: ToFound,
}

impl Fixture {
    pub(crate) fn new() -> Result<Self> {
        let now = Timestamp::from_timestamp(1_900_000_000, 0).unwrap_or_default();
        let authority = new_authority(uuid::Uuid::from_u128(7), now)?;
        let key = Identity::generate()?;
        let node_key = PublicKey(key.public_key());
        let validity = Validity::starting(now, NODE_LIFETIME);
        let issued = authority.issue_node(&node_key, Serial::new([7; 16]), validity)?;
        let credentials = Credentials {
            certificate: hex::encode(&issued.certificate),
            ca_certificate: hex::encode(&authority.anchor().certificate),
        };
        // Nothing is there, and nothing is asked of it.
        let files = Files::of(Path::new("/nonexistent"));
        let founding = Founding {
            authority: Arc::new(authority),
            name: "model".to_owned(),
            owner_keys: vec![node_key],
            node_key,
            machine: None,
            labels: shepherd::model::label::Labels::new(),
            address: None,
            restoring: None,
        };
        Ok(Self {
            connection: Connection::new(&key, &credentials, &files, &Clock::host())?,
            to_found: ToFound { founding: Arc::new(founding), address: "10.0.0.1".parse()? },
        })
    }
}
