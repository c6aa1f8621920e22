//! Carries out the steps that replace the authority of a cluster after a theft of its key.
//!
//! [`crate::model::cluster::plan::authority_theft`] plans them. The shepherd makes the new authority and seals its key
//! in the BMDB before it sends anything. Machines get it as orders over their agent channel; no call to a curator has a
//! part in it.
//!
//! # A crash between any two steps
//!
//! * An authority that was made but not stored is lost, and the next holder of the lease makes another one. The first
//!   one that is stored stays.
//! * An order that was built but not stored is built again, with another certificate for etcd.
//! * A step that was begun is not begun again: the write depends on the step before it.
//!
//! # When the shepherd trusts the new authority
//!
//! When each machine of the control plane reports that it does. Until then the shepherd follows the curators by the
//! former one. In between, none of them passes its checks, and the plan continues: it needs no curator. From then on, it
//! has the epoch and the addresses of the curators from these reports: a thief may have served others before. A
//! connection of before is closed.

use std::net::IpAddr;

use prost::Message as _;
use secrecy::{ExposeSecret as _, SecretSlice};

use crate::curator_client::certificate::{Serial, Validity};
use crate::curator_client::clock::Clock;
use crate::curator_client::identity::Identity;
use crate::curator_client::node_id::PublicKey;
use crate::curator_client::pki::{AUTHORITY_LIFETIME, Authority, PEER_LIFETIME};
use crate::curator_client::statement_trust::StatementTrust;
use crate::manager::cluster::curators::{CuratorCallError, curator_endpoint};
use crate::manager::cluster::steps::{CURATOR_PORT, ORDER_SEAL_PURPOSE};
use crate::manager::cluster::{COMPONENT, ClusterWorker};
use crate::manager::failpoint;
use crate::model::cluster::authority_theft::{AuthorityStep, TheftStage};
use crate::model::cluster::owner_key::{OwnerKeySlot, keys_to_try};
use crate::model::cluster::plan::authority_theft::installed_control_plane;
use crate::model::cluster::state::{Cluster, ClusterMember};
use crate::model::ids::MachineId;
use crate::proto::agent::v1 as wire;
use crate::proto::agent::v1::cluster_order::Operation;

/// Purpose that the key of the new authority is sealed with.
const SEAL_PURPOSE: &str = "the authority that replaces a stolen one";

impl ClusterWorker<'_> {
    /// Makes the authority that replaces the stolen one, and stores it.
    pub(super) async fn create_next_authority(&self) -> Result<(), CuratorCallError> {
        let (key, now) = (Identity::generate()?, Clock::system().now());
        let validity = Validity::starting(now, AUTHORITY_LIFETIME);
        let authority = Authority::create(self.cluster, key.pkcs8(), Serial::new(rand::random()), validity)?;
        let plain = SecretSlice::from(authority.pkcs8().to_vec());
        let sealed = self.settings.secrets.seal(SEAL_PURPOSE, &plain)?;
        let certificate = &authority.anchor().certificate;
        self.bmdb.store_next_authority(&self.lease, self.cluster, certificate, &sealed).await?;
        tracing::warn!(cluster = self.name, "the authority that replaces a stolen one is made");
        failpoint::hit(COMPONENT, "next-authority-stored");
        Ok(())
    }

    /// Sends this machine the new authority for this step.
    pub(super) async fn send_next_authority(
        &self,
        cluster: &Cluster,
        machine: MachineId,
        step: AuthorityStep,
    ) -> Result<(), CuratorCallError> {
        let stage = cluster.authority_theft.as_ref().and_then(|theft| theft.stage.as_ref());
        let stage = stage.filter(|stage| stage.step == step);
        let member = cluster.members.iter().find(|member| member.machine == machine);
        let (Some(stage), Some(member)) = (stage, member) else {
            return Err(CuratorCallError::OrderUnavailable("the step is over, or the machine is gone"));
        };
        let replace = match step {
            AuthorityStep::Follow => self.build_follow_order(cluster, stage),
            _ => self.build_member_order(cluster, stage, member).await?,
        };
        let operation = Some(Operation::ReplaceAuthority(replace));
        let order = wire::ClusterOrder { operation, machine_id: machine.to_string(), ..Default::default() };
        let plain = SecretSlice::from(order.encode_to_vec());
        let sealed = self.settings.secrets.seal(ORDER_SEAL_PURPOSE, &plain)?;
        self.bmdb.send_next_authority(&self.lease, machine, (self.name, step), sealed).await?;
        tracing::warn!(cluster = self.name, %machine, %step, "a machine is sent the new authority of its cluster");
        failpoint::hit(COMPONENT, "next-authority-sent");
        Ok(())
    }

    /// The order for a machine of the control plane.
    async fn build_member_order(
        &self,
        cluster: &Cluster,
        stage: &TheftStage,
        member: &ClusterMember,
    ) -> Result<wire::ReplaceAuthority, CuratorCallError> {
        let mut replace = wire::ReplaceAuthority {
            step: stage.step.to_wire().into(),
            ca_certificate: stage.certificate.clone(),
            epoch: cluster.epoch,
            ..Default::default()
        };
        if stage.step == AuthorityStep::Accept {
            return Ok(replace);
        }
        let gone = CuratorCallError::OrderUnavailable(
            "the key of the new authority is not sealed in this BMDB any more",
        );
        let sealed = self.bmdb.sealed_next_authority(self.cluster).await?.ok_or(gone)?;
        let key = self.settings.secrets.unseal(SEAL_PURPOSE, &sealed)?;
        let authority = Authority::load(&stage.certificate, key.expose_secret())?;
        let address: Option<IpAddr> =
            member.report.as_ref().and_then(|report| report.address.as_ref()?.parse().ok());
        let (Some(node_key), Some(address)) = (member.key(), address) else {
            return Err(CuratorCallError::OrderUnavailable(
                "the machine has not reported its key and its address, so its member of etcd gets no certificate",
            ));
        };
        let validity = Validity::starting(Clock::system().now(), PEER_LIFETIME);
        let serial = Serial::new(rand::random());
        let issued =
            authority.issue_etcd_peer_certificate(&PublicKey(node_key), address, serial, validity)?;
        replace.peer_certificate = issued.certificate;
        if stage.step == AuthorityStep::Install {
            replace.private_key = authority.pkcs8().to_vec();
            replace.owner_keys = self.list_own_keys().await?;
        }
        Ok(replace)
    }

    /// The order for any other machine.
    fn build_follow_order(&self, cluster: &Cluster, stage: &TheftStage) -> wire::ReplaceAuthority {
        let trust = self.statements.as_ref();
        let trust = trust.filter(|trust| trust.anchor().certificate == stage.certificate);
        let statement = trust.and_then(StatementTrust::current);
        let founded = cluster.identity.as_ref();
        wire::ReplaceAuthority {
            step: stage.step.to_wire().into(),
            ca_certificate: stage.certificate.clone(),
            epoch: cluster.epoch,
            curators: founded.map(|founded| founded.curators.clone()).unwrap_or_default(),
            statement: statement.map(|signed| signed.to_wire().encode_to_vec()).unwrap_or_default(),
            ..Default::default()
        }
    }

    /// The public keys by which the shepherd is an owner of the cluster: the current one, and the next one if there is one.
    async fn list_own_keys(&self) -> Result<Vec<Vec<u8>>, CuratorCallError> {
        let gone = || CuratorCallError::InvalidResponse("the cluster is gone".to_owned());
        let (keys, _) = self.bmdb.cluster_keys(self.cluster).await?.ok_or_else(gone)?;
        let mut owners = Vec::new();
        for slot in keys_to_try(&keys) {
            if matches!(slot, OwnerKeySlot::Former(_)) {
                continue;
            }
            if let Some(key) = self.load_key(slot).await? {
                owners.push(key.public_key().to_vec());
            }
        }
        Ok(owners)
    }

    /// Records that the next step begins.
    pub(super) async fn begin_authority_step(
        &self,
        cluster: &Cluster,
        step: AuthorityStep,
    ) -> Result<(), CuratorCallError> {
        if step == AuthorityStep::Follow {
            let stage = cluster.authority_theft.as_ref().and_then(|theft| theft.stage.as_ref());
            let Some(stage) = stage else { return Ok(()) };
            let (epoch, addresses) = installed_control_plane(cluster, &stage.certificate);
            let endpoint = |address: &String| curator_endpoint(address, CURATOR_PORT);
            let curators: Vec<String> = addresses.iter().filter_map(endpoint).collect();
            self.bmdb.begin_authority_follow(&self.lease, self.cluster, (&curators, epoch)).await?;
        } else {
            self.bmdb.begin_authority_step(&self.lease, self.cluster, step).await?;
        }
        tracing::warn!(cluster = self.name, %step, "the replacement of a stolen authority takes its next step");
        failpoint::hit(COMPONENT, "authority-step-begun");
        Ok(())
    }
}
