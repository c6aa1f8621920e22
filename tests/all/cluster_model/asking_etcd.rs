//! Calls of programs to the etcd on their machine.

use std::time::Duration;

use shepherd::curator::membership::EtcdMember;
use shepherd::curator::role_orders::MemberChange;
use shepherd::curator::service::error::ServiceError;
use shepherd::etcd::client::EtcdError;
use shepherd::etcd::guard::LeaderGuard;
use shepherd::etcd::members::MemberError;
use shepherd::proto::etcdserverpb as wire;

use super::invariants;
use super::store::{Done, Etcd, Listed};
use super::world::{State, World};

/// How long a caller waits for etcd.
const DEADLINE: Duration = Duration::from_secs(3);

fn away() -> ServiceError {
    EtcdError::Deadline { operation: "asking etcd".to_owned(), within: DEADLINE }.into()
}

impl World {
    /// Calls the etcd of this machine with a request that needs a quorum. A failed call may have taken effect all the
    /// same.
    pub(crate) async fn ask<T>(
        &self,
        machine: usize,
        what: impl FnOnce(&mut Etcd, Duration) -> T,
    ) -> Result<T, ServiceError> {
        self.reach_quorum(machine).await?;
        let answer = what(&mut self.change().etcd, self.sim.now());
        self.answered(machine).await?;
        Ok(answer)
    }

    async fn reach_quorum(&self, machine: usize) -> Result<(), ServiceError> {
        self.sim.step().await;
        if self.look().has_quorum(machine) {
            return Ok(());
        }
        self.sim.sleep(DEADLINE).await;
        self.count("etcd was away");
        Err(away())
    }

    /// Delivers the response to a call, unless the caller has been cut off from the quorum meanwhile.
    async fn answered(&self, machine: usize) -> Result<(), ServiceError> {
        self.refresh(machine);
        self.sim.step().await;
        if self.look().has_quorum(machine) {
            return Ok(());
        }
        self.count("answers of etcd lost");
        Err(away())
    }

    /// Makes the member of this machine apply all membership changes so far.
    pub(crate) fn refresh(&self, machine: usize) {
        let mut state = self.change();
        let members = state.etcd.members.clone();
        if let Some(etcd) = &mut state.machines[machine].etcd {
            etcd.seen = members;
        }
    }

    /// Runs one transaction and checks every invariant on it.
    ///
    /// `guard` is the election key by which the caller believes to lead; `None` if it does not lead.
    pub(crate) async fn transact(
        &self,
        machine: usize,
        request: &wire::TxnRequest,
        guard: Option<&LeaderGuard>,
    ) -> Result<Done, ServiceError> {
        self.reach_quorum(machine).await?;
        let done = self.change().etcd.transact(request);
        invariants::judge_write(self, machine, guard, &done);
        self.answered(machine).await?;
        Ok(done)
    }

    /// The members as the member of this machine last saw them, and which of them it reaches.
    pub(crate) async fn members(&self, machine: usize) -> Result<Vec<EtcdMember>, ServiceError> {
        self.sim.step().await;
        let mut state = self.change();
        let there = state.within_reach(machine);
        let Some(etcd) = &state.machines[machine].etcd else { return Err(away()) };
        let members = etcd.seen.iter().map(|listed: &Listed| EtcdMember {
            id: listed.id,
            name: listed.name.clone(),
            peer_urls: vec![listed.url.clone()],
            learner: listed.learner,
            reachable: there.contains(&listed.id),
        });
        let mut members: Vec<EtcdMember> = members.collect();
        members.sort_by_key(|member| member.id);
        state.listed.insert(machine, there);
        Ok(members)
    }

    /// Changes the members; as in the product, a change that was made before is no error.
    pub(crate) async fn change_members(
        &self,
        machine: usize,
        step: &MemberChange,
    ) -> Result<(), ServiceError> {
        let refused = |error: MemberError| Err(ServiceError::from(error));
        let doing = || format!("{step:?}");
        let id = self.sim.number();
        let all = self.all_voters_within_reach(machine);
        let answer = match step {
            MemberChange::AddLearner { peer_url } => {
                let learner = Listed { id, name: String::new(), url: peer_url.clone(), learner: true };
                self.ask(machine, |etcd, _| {
                    if etcd.members.iter().any(|member| member.url == learner.url) {
                        return Ok(());
                    }
                    if etcd.members.iter().any(|member| member.learner) {
                        return refused(MemberError::TooManyLearners { operation: doing() });
                    }
                    if !all {
                        return refused(MemberError::Unhealthy { operation: doing() });
                    }
                    etcd.members.push(learner);
                    Ok(())
                })
                .await
            }
            MemberChange::RemoveMember { member } => {
                let world = self.clone();
                let judged = invariants::removal_leaves_a_living_quorum(&self.look(), machine, *member);
                self.ask(machine, move |etcd, _| {
                    let Some(listed) = etcd.member(*member) else { return (false, Ok(())) };
                    if !listed.learner && !etcd.lets_go(*member) {
                        return (false, refused(MemberError::WouldLoseQuorum { operation: doing() }));
                    }
                    etcd.members.retain(|one| one.id != *member);
                    etcd.removed.insert(*member);
                    (true, Ok(()))
                })
                .await
                .map(|(made, answer)| {
                    if made {
                        world.demand(judged);
                        world.count("members removed");
                    }
                    answer
                })
            }
        };
        if matches!(answer, Ok(Ok(()))) {
            self.note(format_args!("machine {machine}: {step:?} (as {id})"));
        }
        answer?
    }

    fn all_voters_within_reach(&self, machine: usize) -> bool {
        let state = self.look();
        let there = state.within_reach(machine);
        state.etcd.voters().all(|member| there.contains(&member.id))
    }

    /// Gives a learner its vote, if it has caught up.
    pub(crate) async fn promote(&self, machine: usize, id: u64) -> Result<bool, ServiceError> {
        let _changing = self.begin_to_change();
        let learnt = {
            let state = self.look();
            let runs = |machine: &super::world::Machine| {
                machine.member() == Some(id)
                    && machine.etcd.as_ref().is_some_and(|etcd| {
                        self.sim.now().saturating_sub(etcd.since) > Duration::from_secs(2)
                    })
            };
            state.machines.iter().any(runs)
        };
        let given = self.ask(machine, |etcd, _| {
            let learner = etcd.members.iter_mut().find(|member| member.id == id && member.learner);
            learner.filter(|_| learnt).map(|learner| learner.learner = false).is_some()
        });
        let given = given.await?;
        if given {
            self.count("votes given");
            self.note(format_args!("machine {machine}: member {id} votes now"));
        }
        Ok(given)
    }
}

/// The etcd processes between calls: which one leads, which ones start and end, and when leases expire.
pub(crate) async fn keep_etcd_running(world: World) {
    loop {
        world.sim.sleep(Duration::from_millis(400)).await;
        elect(&world);
        for machine in 0..super::world::MACHINES {
            begin(&world, machine);
        }
        let (now, quorum) = {
            let state = world.look();
            (world.sim.now(), (0..super::world::MACHINES).any(|machine| state.has_quorum(machine)))
        };
        if quorum {
            let over = world.change().etcd.expire(now);
            (0..over).for_each(|_| world.count("leases ended"));
        }
        world.judge(invariants::voters_keep_a_quorum);
    }
}

/// When a leader has lost its quorum, a member that has a quorum is elected.
fn elect(world: &World) {
    let mut state = world.change();
    let majority = |state: &State, machine: usize| {
        let there = state.within_reach(machine);
        let voters: Vec<u64> = state.etcd.voters().map(|member| member.id).collect();
        let own = state.machines[machine].member().filter(|own| voters.contains(own))?;
        (voters.iter().filter(|id| there.contains(id)).count() > voters.len() / 2).then_some(own)
    };
    let able: Vec<u64> =
        (0..super::world::MACHINES).filter_map(|machine| majority(&state, machine)).collect();
    if state.etcd.leader.is_none_or(|leader| !able.contains(&leader)) {
        state.etcd.leader = if able.is_empty() { None } else { Some(able[world.sim.below(able.len())]) };
    }
}

/// A process that was started begins its membership, continues it, or finds that it has ended.
fn begin(world: &World, index: usize) {
    let mut state = world.change();
    let now = world.sim.now();
    let machine = &state.machines[index];
    let Some(program) = machine.etcd.clone().filter(|_| machine.power) else { return };
    if program.id.is_some() {
        // Its name is known from its first start on, as soon as it has published it to the leader.
        let (id, name) = (program.id, machine.id().map(|id| id.to_string()).unwrap_or_default());
        let there = state.within_reach(index);
        let received = state.etcd.leader.is_some_and(|leader| there.contains(&leader));
        if let Some(own) = state.etcd.members.iter_mut().find(|member| Some(member.id) == id && received) {
            own.name = name;
        } else if received && let Some(program) = &mut state.machines[index].etcd {
            // It was removed, and has just learnt so from the leader.
            program.id = None;
        }
        return;
    }
    if let Some(id) = machine.disk.etcd.get(&program.membership.data).copied() {
        if state.etcd.member(id).is_some() {
            let members = state.etcd.members.clone();
            if let Some(program) = &mut state.machines[index].etcd {
                (program.id, program.since) = (Some(id), now);
                program.seen = members;
            }
        }
        return;
    }
    let url = shepherd::curator::membership::peer_url(machine.address);
    let id = if program.membership.new_cluster {
        if !state.etcd.members.is_empty() {
            drop(state);
            return world.demand(Err(format!("machine {index} founds a second cluster")));
        }
        let id = world.sim.number();
        state.etcd.members.push(Listed { id, name: String::new(), url, learner: false });
        id
    } else {
        // A new member fetches the member list from a peer of its initial cluster, and starts only if both lists are
        // equal.
        let mut messages: Vec<&str> = program
            .membership
            .initial_cluster
            .split(',')
            .filter_map(|one| one.split_once('=').map(|(_, url)| url))
            .collect();
        let mut there: Vec<&str> = state.etcd.members.iter().map(|member| member.url.as_str()).collect();
        messages.sort_unstable();
        there.sort_unstable();
        let reaches = state.etcd.leader.is_some_and(|leader| state.within_reach(index).contains(&leader));
        let own = state.etcd.members.iter().find(|member| member.url == url && member.name.is_empty());
        match own.map(|own| own.id) {
            Some(id) if reaches && messages == there => id,
            _ => {
                *state.counts.entry("starts of etcd refused").or_default() += 1;
                return;
            }
        }
    };
    let members = state.etcd.members.clone();
    let machine = &mut state.machines[index];
    machine.disk.etcd.insert(program.membership.data.clone(), id);
    if let Some(program) = &mut machine.etcd {
        (program.id, program.since) = (Some(id), now);
        program.seen = members;
    }
}
