//! What programs ask of the etcd on their machine.

use std::time::Duration;

use shepherd::curator::membership::Member;
use shepherd::curator::roles::Step;
use shepherd::curator::service::failure::Failure;
use shepherd::etcd::client::EtcdError;
use shepherd::etcd::guard::Guard;
use shepherd::etcd::members::MemberError;
use shepherd::proto::etcdserverpb as wire;

use super::invariants;
use super::store::{Done, Etcd, Listed};
use super::world::{State, World};

/// How long etcd is waited for.
const DEADLINE: Duration = Duration::from_secs(3);

fn away() -> Failure {
    EtcdError::Deadline { doing: "asking etcd".to_owned(), within: DEADLINE }.into()
}

impl World {
    /// Asks the etcd of this machine something that needs a quorum. When this fails it may have been done all the same.
    pub(crate) async fn ask<T>(
        &self,
        machine: usize,
        what: impl FnOnce(&mut Etcd, Duration) -> T,
    ) -> Result<T, Failure> {
        self.reach_quorum(machine).await?;
        let answer = what(&mut self.change().etcd, self.sim.now());
        self.answered(machine).await?;
        Ok(answer)
    }

    async fn reach_quorum(&self, machine: usize) -> Result<(), Failure> {
        self.sim.step().await;
        if self.look().has_quorum(machine) {
            return Ok(());
        }
        self.sim.sleep(DEADLINE).await;
        self.count("etcd was away");
        Err(away())
    }

    /// What was done is answered, unless whoever did it is cut off by now.
    async fn answered(&self, machine: usize) -> Result<(), Failure> {
        self.refresh(machine);
        self.sim.step().await;
        if self.look().has_quorum(machine) {
            return Ok(());
        }
        self.count("answers of etcd lost");
        Err(away())
    }

    /// The member of this machine has applied all that was decided so far.
    pub(crate) fn refresh(&self, machine: usize) {
        let mut state = self.change();
        let members = state.etcd.members.clone();
        if let Some(etcd) = &mut state.machines[machine].etcd {
            etcd.seen = members;
        }
    }

    /// One transaction, and what every invariant says of it.
    ///
    /// `guard` is what whoever asks believes to lead by, if he does.
    pub(crate) async fn transact(
        &self,
        machine: usize,
        asked: &wire::TxnRequest,
        guard: Option<&Guard>,
    ) -> Result<Done, Failure> {
        self.reach_quorum(machine).await?;
        let done = self.change().etcd.transact(asked);
        invariants::judge_write(self, machine, guard, &done);
        self.answered(machine).await?;
        Ok(done)
    }

    /// The members, as the one of this machine last heard of them, and whom it reaches.
    pub(crate) async fn members(&self, machine: usize) -> Result<Vec<Member>, Failure> {
        self.sim.step().await;
        let mut state = self.change();
        let there = state.within_reach(machine);
        let Some(etcd) = &state.machines[machine].etcd else { return Err(away()) };
        let members = etcd.seen.iter().map(|listed: &Listed| Member {
            id: listed.id,
            name: listed.name.clone(),
            peer_urls: vec![listed.url.clone()],
            learner: listed.learner,
            reachable: there.contains(&listed.id),
        });
        let mut members: Vec<Member> = members.collect();
        members.sort_by_key(|member| member.id);
        state.listed.insert(machine, there);
        Ok(members)
    }

    /// Changes the members; a change that was made before is no fault, as for the product.
    pub(crate) async fn change_members(&self, machine: usize, step: &Step) -> Result<(), Failure> {
        let refused = |error: MemberError| Err(Failure::from(error));
        let doing = || format!("{step:?}");
        let id = self.sim.number();
        let all = self.all_voters_within_reach(machine);
        let answer = match step {
            Step::AddLearner { peer_url } => {
                let learner = Listed { id, name: String::new(), url: peer_url.clone(), learner: true };
                self.ask(machine, |etcd, _| {
                    if etcd.members.iter().any(|member| member.url == learner.url) {
                        return Ok(());
                    }
                    if etcd.members.iter().any(|member| member.learner) {
                        return refused(MemberError::TooManyLearners { doing: doing() });
                    }
                    if !all {
                        return refused(MemberError::Unhealthy { doing: doing() });
                    }
                    etcd.members.push(learner);
                    Ok(())
                })
                .await
            }
            Step::Remove { member } => {
                let world = self.clone();
                let judged = invariants::removal_leaves_a_living_quorum(&self.look(), machine, *member);
                self.ask(machine, move |etcd, _| {
                    let Some(listed) = etcd.member(*member) else { return (false, Ok(())) };
                    if !listed.learner && !etcd.lets_go(*member) {
                        return (false, refused(MemberError::WouldLoseQuorum { doing: doing() }));
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

    /// Gives a learner its vote, if it has learnt enough.
    pub(crate) async fn promote(&self, machine: usize, id: u64) -> Result<bool, Failure> {
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

/// The programs etcd, as far as nobody asks them: who leads them, who begins, who has ended, and what leases have.
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

/// A leader that lost its quorum is followed by one that has it.
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

/// A program that was started begins its membership, goes on with it, or finds that it is over.
fn begin(world: &World, index: usize) {
    let mut state = world.change();
    let now = world.sim.now();
    let machine = &state.machines[index];
    let Some(program) = machine.etcd.clone().filter(|_| machine.power) else { return };
    if program.id.is_some() {
        // Its name is known from its first start on, as soon as it has told the others.
        let (id, name) = (program.id, machine.id().map(|id| id.to_string()).unwrap_or_default());
        let there = state.within_reach(index);
        let heard = state.etcd.leader.is_some_and(|leader| there.contains(&leader));
        if let Some(own) = state.etcd.members.iter_mut().find(|member| Some(member.id) == id && heard) {
            own.name = name;
        } else if heard && let Some(program) = &mut state.machines[index].etcd {
            // It was removed, and has just heard of it.
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
        // etcd asks a member that it was told of who the members are, and starts only where it was told the same.
        let mut told: Vec<&str> = program
            .membership
            .initial_cluster
            .split(',')
            .filter_map(|one| one.split_once('=').map(|(_, url)| url))
            .collect();
        let mut there: Vec<&str> = state.etcd.members.iter().map(|member| member.url.as_str()).collect();
        told.sort_unstable();
        there.sort_unstable();
        let reaches = state.etcd.leader.is_some_and(|leader| state.within_reach(index).contains(&leader));
        let own = state.etcd.members.iter().find(|member| member.url == url && member.name.is_empty());
        match own.map(|own| own.id) {
            Some(id) if reaches && told == there => id,
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
