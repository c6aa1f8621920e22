//! The table of a gate: which connections exist, and which one gives way. Pure: time is a parameter.
//!
//! The essay of the [module](crate::gate) explains the rules. A closed connection leaves the table in the call that
//! decided it, so the numbers are right before its stream has ended.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use tokio::time::Instant;

use crate::gate::limits::{Expectation, GateLimits};
use crate::gate::queue::{ConnectionId, Queue};
use crate::gate::source::Source;

/// Why a gate closes a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// A newer connection without a credential needed its place.
    Displaced,
    /// Its TLS handshake or its first request did not come in time.
    TimedOut,
    /// Its credential is good, and connections with one occupied all their places. It was refused.
    Full,
}

impl CloseReason {
    /// All reasons.
    pub const ALL: [Self; 3] = [Self::Displaced, Self::TimedOut, Self::Full];

    /// Its name in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Displaced => "evicted",
            Self::TimedOut => "timeout",
            Self::Full => "full",
        }
    }
}

/// A connection that the table has closed, or that ended after it was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed {
    pub(super) id: ConnectionId,
    /// Where it came from.
    pub source: Source,
    /// Why it has ended.
    pub reason: CloseReason,
    /// Whether its TLS handshake was in progress.
    pub in_handshake: bool,
}

/// Numbers of connections in a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GateCounts {
    /// TLS handshakes in progress.
    pub handshakes: usize,
    /// Connections without a credential, those with a handshake in progress among them.
    pub unproven: usize,
    /// Connections with a credential.
    pub proven: usize,
}

/// The class of a connection without a credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// It has sent nothing.
    Silent,
    /// It has sent something, and no request of it is being answered.
    Spoken,
    /// A request of it is being answered.
    Answered,
}

/// Whether a connection has a place for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Admission {
    /// No credential of it was accepted.
    Unproven,
    /// Its credential was accepted.
    Proven,
    /// Its credential was accepted, and there was no place for it.
    Refused,
}

#[derive(Debug)]
struct Connection {
    source: Source,
    in_handshake: bool,
    spoken: bool,
    admission: Admission,
    open_requests: usize,
    deadline: Option<Instant>,
}

impl Connection {
    /// `None` for a connection with a credential, which never gives way.
    const fn class(&self) -> Option<Class> {
        match self {
            Self { admission: Admission::Proven, .. } => None,
            Self { open_requests: 1.., .. } => Some(Class::Answered),
            Self { spoken: true, .. } => Some(Class::Spoken),
            _ => Some(Class::Silent),
        }
    }
}

/// The connections to one listener.
#[derive(Debug)]
pub struct GateTable {
    limits: GateLimits,
    next: ConnectionId,
    connections: HashMap<ConnectionId, Connection>,
    silent: Queue,
    spoken: Queue,
    answered: Queue,
    /// Deadlines of the connections of which no request is being answered.
    deadlines: BTreeSet<(Instant, ConnectionId)>,
    handshakes: usize,
    proven: usize,
}

impl GateTable {
    /// An empty table.
    #[must_use]
    pub fn new(limits: GateLimits) -> Self {
        Self {
            limits,
            next: 0,
            connections: HashMap::new(),
            silent: Queue::default(),
            spoken: Queue::default(),
            answered: Queue::default(),
            deadlines: BTreeSet::new(),
            handshakes: 0,
            proven: 0,
        }
    }

    /// The numbers of connections.
    #[must_use]
    pub fn counts(&self) -> GateCounts {
        GateCounts {
            handshakes: self.handshakes,
            unproven: self.connections.len() - self.proven,
            proven: self.proven,
        }
    }

    /// Admits a new connection. Returns those that give way to it; it never gives way itself.
    pub fn admit(&mut self, source: Source, now: Instant) -> (u64, Vec<Closed>) {
        let id = self.next;
        self.next += 1;
        let time = self.limits.handshake.unwrap_or(self.limits.first_request);
        let connection = Connection {
            source,
            in_handshake: self.limits.handshake.is_some(),
            spoken: false,
            admission: Admission::Unproven,
            open_requests: 0,
            deadline: Some(now + time),
        };
        self.insert(id, connection);
        (id, self.displace_silent(source))
    }

    /// Records that a connection has sent something. Returns those that give way to it.
    pub fn record_bytes(&mut self, id: u64) -> Vec<Closed> {
        let Some(mut connection) = self.take(id) else { return Vec::new() };
        let source = connection.source;
        connection.spoken = true;
        self.insert(id, connection);
        self.displace_spoken(source)
    }

    /// Records that the handshake of a connection has succeeded: the time for its first request begins.
    pub fn finish_handshake(&mut self, id: u64, now: Instant) {
        let deadline = now + self.limits.first_request;
        self.update(id, |connection| {
            connection.in_handshake = false;
            if connection.admission == Admission::Unproven {
                connection.deadline = Some(deadline);
            }
        });
    }

    /// Records that a request is being answered. Meanwhile its connection gives way last, and has no deadline.
    pub fn begin_request(&mut self, id: u64) {
        let expectation = self.limits.expectation;
        self.update(id, |connection| {
            connection.open_requests += 1;
            if expectation == Expectation::Request && connection.admission != Admission::Refused {
                connection.deadline = None;
            }
        });
    }

    /// Records that a request was answered.
    pub fn end_request(&mut self, id: u64) {
        self.update(id, |connection| connection.open_requests = connection.open_requests.saturating_sub(1));
    }

    /// Records that the credential of a connection was accepted. Returns whether it has a place. One without a place is
    /// to be refused: it stays without a credential, for long enough to read the refusal.
    #[must_use]
    pub fn prove(&mut self, id: u64, now: Instant) -> bool {
        // The answer to a connection that has ended reaches nobody.
        let Some(mut connection) = self.take(id) else { return true };
        let has_place = connection.admission == Admission::Proven || self.proven < self.limits.proven;
        if has_place {
            (connection.admission, connection.deadline) = (Admission::Proven, None);
        } else if connection.admission == Admission::Unproven {
            let deadline = now + self.limits.after_refusal;
            (connection.admission, connection.deadline) = (Admission::Refused, Some(deadline));
        }
        self.insert(id, connection);
        has_place
    }

    /// Records that the credential of a connection could not be checked, through no fault of the peer.
    pub fn defer(&mut self, id: u64, now: Instant) {
        let deadline = now + self.limits.after_deferral;
        self.update(id, |connection| {
            if connection.admission == Admission::Unproven {
                connection.deadline = Some(deadline);
            }
        });
    }

    /// Removes a connection that has ended. Returns it if it was refused.
    pub fn remove(&mut self, id: u64) -> Option<Closed> {
        let connection = self.take(id).filter(|connection| connection.admission == Admission::Refused)?;
        Some(closed(id, &connection, CloseReason::Full))
    }

    /// Closes the connections that are past their deadline.
    pub fn expire(&mut self, now: Instant) -> Vec<Closed> {
        let mut expired = Vec::new();
        while let Some((deadline, id)) = self.deadlines.first().copied()
            && deadline <= now
        {
            let Some(connection) = self.take(id) else { break };
            expired.push(closed(id, &connection, CloseReason::TimedOut));
        }
        expired
    }

    /// Closes the oldest connection of the busiest source of the larger class: the process can open no more files.
    pub fn relieve(&mut self) -> Option<Closed> {
        let spoken = self.spoken.count() + self.answered.count();
        let id = if self.silent.count() >= spoken {
            self.silent.oldest_of_busiest()
        } else {
            self.spoken.oldest_of_busiest().or_else(|| self.answered.oldest_of_busiest())
        };
        self.displace(id?)
    }

    /// How long no deadline ends, at most a second; `None` without one.
    #[must_use]
    pub fn until_deadline(&self, now: Instant) -> Option<Duration> {
        // A request that was just answered brings its deadline back, so the longest sleep is a second.
        let (deadline, _) = self.deadlines.first()?;
        Some(deadline.saturating_duration_since(now).min(Duration::from_secs(1)))
    }

    /// Most connections of each of the two classes: connections with a credential may occupy places of the others, but
    /// not the last ones.
    fn class_limit(&self) -> usize {
        let free = self.limits.total.saturating_sub(self.proven);
        (self.limits.unproven.min(free) / 2).max(1)
    }

    fn displace_silent(&mut self, source: Source) -> Vec<Closed> {
        let mut displaced = Vec::new();
        while self.silent.count_of(source) > self.limits.per_source.max(1)
            && let Some(id) = self.silent.oldest_of(source)
        {
            displaced.extend(self.displace(id));
        }
        while self.silent.count() > self.class_limit()
            && let Some(id) = self.silent.oldest_of_busiest()
        {
            displaced.extend(self.displace(id));
        }
        displaced
    }

    fn displace_spoken(&mut self, source: Source) -> Vec<Closed> {
        let mut displaced = Vec::new();
        while self.spoken.count_of(source) + self.answered.count_of(source) > self.limits.per_source.max(1)
            && let Some(id) = self.spoken.oldest_of(source).or_else(|| self.answered.oldest_of(source))
        {
            displaced.extend(self.displace(id));
        }
        while self.spoken.count() + self.answered.count() > self.class_limit() {
            // Otherwise requests that are answered for long could take all places of the class.
            let queue =
                if self.answered.count() > self.class_limit() / 2 { &self.answered } else { &self.spoken };
            let Some(id) = queue.oldest_of_busiest().or_else(|| self.answered.oldest_of_busiest()) else {
                break;
            };
            displaced.extend(self.displace(id));
        }
        displaced
    }

    fn displace(&mut self, id: ConnectionId) -> Option<Closed> {
        self.take(id).map(|connection| closed(id, &connection, CloseReason::Displaced))
    }

    fn update(&mut self, id: ConnectionId, change: impl FnOnce(&mut Connection)) {
        let Some(mut connection) = self.take(id) else { return };
        change(&mut connection);
        self.insert(id, connection);
    }

    fn queue(&mut self, class: Class) -> &mut Queue {
        match class {
            Class::Silent => &mut self.silent,
            Class::Spoken => &mut self.spoken,
            Class::Answered => &mut self.answered,
        }
    }

    fn insert(&mut self, id: ConnectionId, connection: Connection) {
        match connection.class() {
            Some(class) => self.queue(class).insert(connection.source, id),
            None => self.proven += 1,
        }
        self.handshakes += usize::from(connection.in_handshake);
        if let Some(deadline) = connection.deadline.filter(|_| connection.open_requests == 0) {
            self.deadlines.insert((deadline, id));
        }
        self.connections.insert(id, connection);
    }

    fn take(&mut self, id: ConnectionId) -> Option<Connection> {
        let connection = self.connections.remove(&id)?;
        match connection.class() {
            Some(class) => self.queue(class).remove(connection.source, id),
            None => self.proven -= 1,
        }
        self.handshakes -= usize::from(connection.in_handshake);
        if let Some(deadline) = connection.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        Some(connection)
    }
}

/// A connection that was refused ends for that reason, even if it is closed for another one.
const fn closed(id: ConnectionId, connection: &Connection, reason: CloseReason) -> Closed {
    let reason = if matches!(connection.admission, Admission::Refused) { CloseReason::Full } else { reason };
    Closed { id, source: connection.source, reason, in_handshake: connection.in_handshake }
}

#[cfg(test)]
mod tests;
