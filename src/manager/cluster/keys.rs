//! The shepherd's keys for a cluster: which of them its curators take, and how another one takes the place of the one in force.
//!
//! What is to be done is decided in [`crate::model::cluster::key`], from what is written down and from the key that was taken. A
//! frozen shepherd that goes on changes nothing for the worse: what it has the curators do is done already or is refused, as a
//! key that was removed never comes back, and what it writes down is refused with its lease.

use secrecy::{ExposeSecret as _, SecretSlice};
use tonic::Code;

use crate::bmdb::cluster_key::{former_secret, next_secret};
use crate::curator::identity::Identity;
use crate::manager::cluster::curators::{ANSWER, CuratorError, Way, owner_key};
use crate::manager::cluster::{COMPONENT, PassError, Tending};
use crate::manager::failpoint;
use crate::model::cluster::key::{Step, Which, next_step, to_try, waits};
use crate::model::cluster::state::Founded;

/// What it is sealed as until it has a name.
const NEXT: &str = "the next key for a cluster";
/// Steps of one pass at the most: what is left is done in the next.
const AT_ONCE: usize = 8;

impl Tending<'_> {
    /// The way to the curators by the first of the shepherd's keys that they take.
    pub(super) async fn claim(&self, founded: &Founded, epoch: u64) -> Result<Way, CuratorError> {
        let gone = || CuratorError::Odd("the cluster is gone".to_owned());
        let (keys, _) = self.bmdb.cluster_keys(self.cluster).await?.ok_or_else(gone)?;
        let mut tried = 0;
        for which in to_try(&keys) {
            // It is renewed soon, or it is over: whether they refuse all of them is found out later.
            if self.session.remaining() <= ANSWER {
                return Err(CuratorError::Order("the shepherd's keys for it are tried in the next pass"));
            }
            let Some(key) = self.key(which).await? else { continue };
            tried += 1;
            match Way::claim(founded, epoch, (which, &key)).await {
                Err(CuratorError::Said { status, .. }) if status.code() == Code::PermissionDenied => {}
                Err(error) => return Err(error),
                Ok(way) => {
                    if keys.refused_since.is_some() {
                        self.bmdb.cluster_keys_refused(&self.lease, self.cluster, false).await?;
                    }
                    if which != Which::Current {
                        tracing::warn!(
                            cluster = self.name,
                            ?which,
                            "curators take another key than the one in force"
                        );
                    }
                    return Ok(way);
                }
            }
        }
        if keys.refused_since.is_none() {
            self.bmdb.cluster_keys_refused(&self.lease, self.cluster, true).await?;
        }
        Err(CuratorError::AllRefused { tried })
    }

    /// One of the shepherd's keys; none where it is not sealed here any more.
    async fn key(&self, which: Which) -> Result<Option<Identity>, CuratorError> {
        let (bmdb, secrets) = (self.bmdb, &self.settings.secrets);
        let name = match which {
            Which::Current => return owner_key(bmdb, secrets, self.cluster).await.map(Some),
            Which::Next(_) => next_secret(self.cluster),
            Which::Former(key) => former_secret(self.cluster, key),
        };
        let sealed = secrets.get(bmdb, &name).await?;
        Ok(sealed.map(|sealed| Identity::from_pkcs8(sealed.expose_secret())).transpose()?)
    }

    /// Does what is due of the shepherd's keys. What is wanted and cannot be done for now comes back, for people.
    pub(super) async fn tend_keys(
        &mut self,
        founded: &Founded,
        epoch: u64,
    ) -> Result<Option<String>, PassError> {
        let every = self.bmdb.policy().1.cluster_key_rotation;
        let mut stands = None;
        for _ in 0..AT_ONCE {
            let Some((keys, now)) = self.bmdb.cluster_keys(self.cluster).await? else { return Ok(None) };
            let wanted = waits(&keys, every, now);
            let Some(by) = self.way.as_ref().map(|way| way.by) else {
                return Ok(wanted.map(|wanted| format!("{wanted}; that waits for its curators")));
            };
            if let Some(error) = stands {
                return Ok(wanted.map(|wanted| format!("{wanted}: {error}")));
            }
            let Some(step) = next_step(&keys, by, every, now) else { return Ok(None) };
            if self.session.remaining() <= ANSWER {
                return Ok(wanted);
            }
            tracing::info!(cluster = self.name, %step, "a step of the shepherd's key for a cluster");
            match self.take_key_step(step, (founded, epoch)).await {
                Ok(()) => {}
                Err(CuratorError::Bmdb(error)) => return Err(error.into()),
                Err(error) => stands = Some(error),
            }
        }
        Ok(None)
    }

    async fn take_key_step(
        &mut self,
        step: Step,
        (founded, epoch): (&Founded, u64),
    ) -> Result<(), CuratorError> {
        match step {
            Step::Make => {
                let key = Identity::generate()?;
                let plain = SecretSlice::from(key.pkcs8().to_vec());
                let sealed = self.settings.secrets.seal(NEXT, &plain)?;
                self.bmdb.keep_next_key(&self.lease, self.cluster, (key.public_key(), sealed)).await?;
                failpoint::pass(COMPONENT, "key-made");
            }
            Step::Introduce(which) => {
                let lost = || CuratorError::Odd("a key that is not sealed here any more".to_owned());
                let key = self.key(which).await?.ok_or_else(lost)?;
                if let Some(way) = &self.way {
                    way.add_owner_key(key.public_key()).await?;
                }
                failpoint::pass(COMPONENT, "key-added");
                if self.session.remaining() <= ANSWER {
                    return Err(CuratorError::Order("it is tried in the next pass"));
                }
                // Nothing goes before this one is seen to open the door.
                let way = Way::claim(founded, epoch, (which, &key)).await?;
                failpoint::pass(COMPONENT, "key-taken");
                self.way = Some(way);
            }
            Step::Switch(next) => {
                let before = owner_key(self.bmdb, &self.settings.secrets, self.cluster).await?.public_key();
                self.bmdb.switch_cluster_key(&self.lease, self.cluster, before, next).await?;
                failpoint::pass(COMPONENT, "key-switched");
                if let Some(way) = &mut self.way {
                    way.by = Which::Current;
                }
            }
            Step::Remove(key) => {
                if let Some(way) = &self.way {
                    way.remove_owner_key(key).await?;
                }
                failpoint::pass(COMPONENT, "key-refused");
                self.bmdb.former_key_removed(&self.lease, self.cluster, key).await?;
                failpoint::pass(COMPONENT, "key-removed");
            }
            Step::Forget(key) => self.bmdb.forget_former_key(&self.lease, self.cluster, key).await?,
        }
        Ok(())
    }
}
