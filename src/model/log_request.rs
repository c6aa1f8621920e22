//! Requests for logs of machines: what may be asked, and how far one has come.
//!
//! A request waits for the machine's next heartbeat, is handed to it with the answer, and ends when the machine has brought
//! everything, when that cannot be expected any more, or when nobody reads it. Whoever waits is told at every moment what
//! for, and nothing waits without an end: a machine that does not call, one that calls and brings nothing, one that was
//! started anew in the middle, one whose role server does not know how. All of that is decided here, by times of the
//! database's clock.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::model::telling::{both, rough};
use crate::model::time::{Span, Timestamp, between};

/// The log of the role server itself.
pub const OWN: &str = "roleserver";
/// Lines that are brought unless somebody says how many.
pub const DEFAULT_LINES: u32 = 100;
/// Most lines of one request.
pub const MOST_LINES: u32 = 10_000;
/// Most bytes of lines in one part.
pub const PART_LIMIT: usize = 64 << 10;
/// Most bytes that a request without `follow` is answered with; and most that may lie unread of one that follows.
pub const ANSWER_LIMIT: usize = 1 << 20;
/// Most requests that one machine works on at a time, and that there are altogether.
pub const MOST_OF_A_MACHINE: i64 = 4;
/// See above.
pub const MOST: i64 = 64;
/// Most logs that a machine names.
pub const MOST_NAMES: usize = 500;
/// Longest name of a log, and longest sentence of a machine, in characters.
pub const LONGEST_NAME: usize = 150;
/// See above.
pub const LONGEST_SENTENCE: usize = 4000;
/// How long a request is kept that nobody reads.
pub const UNREAD: Duration = Duration::from_mins(1);
/// How long a log is followed.
pub const LONGEST_FOLLOW: Duration = Duration::from_hours(1);

/// How long a machine that was asked may bring nothing.
const STALLED: Duration = Duration::from_mins(1);
/// The least time that a machine has to call after it was asked for something.
const LEAST_PATIENCE: Duration = Duration::from_secs(15);
/// Heartbeats that may be late or lost before a machine counts as one that does not call.
const HEARTBEATS: u32 = 3;
/// Farthest back that can be asked.
const LONGEST_SINCE: Span = Span::hours(10 * 365 * 24);

/// What is wanted of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Which log; empty: which logs there are.
    pub log: String,
    /// Most lines.
    pub lines: u32,
    /// None that is older.
    pub since: Option<Span>,
    /// And what is added from then on.
    pub follow: bool,
}

impl Wanted {
    /// Whether it can be asked for; if not, which field is wrong, and how.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let named = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
        if self.log.chars().count() > LONGEST_NAME || !self.log.chars().all(named) {
            let said = format!("{:?} is no name of a log; they are as {OWN}, etcd or ROLE/SERVICE", self.log);
            return Err(("log", said));
        }
        if !(1..=MOST_LINES).contains(&self.lines) {
            return Err((
                "lines",
                format!("{} lines cannot be asked for; 1 to {MOST_LINES} can", self.lines),
            ));
        }
        if self.since.is_some_and(|since| since > LONGEST_SINCE || since.0 < Duration::from_secs(1)) {
            return Err(("since", "it is neither a second nor more, or longer than ten years".to_owned()));
        }
        if self.follow && self.log.is_empty() {
            return Err(("follow", "a list of logs cannot be followed; say which log".to_owned()));
        }
        Ok(())
    }

    /// What is asked for, as a part of a sentence.
    #[must_use]
    pub fn named(&self) -> String {
        if self.log.is_empty() { "which logs it has".to_owned() } else { format!("the log {}", self.log) }
    }
}

/// A log that there is on a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct There {
    /// As it is asked for.
    pub log: String,
    /// How long it is.
    pub bytes: u64,
}

/// A request, as far as it has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// What is wanted.
    pub wanted: Wanted,
    /// When it was asked.
    pub asked_at: Timestamp,
    /// By whom.
    pub asked_by: String,
    /// When whoever asked came for it last.
    pub read_at: Timestamp,
    /// When the machine was told, and which start of its role server.
    pub handed: Option<(Timestamp, String)>,
    /// When it brought something last.
    pub brought_at: Option<Timestamp>,
    /// How many parts it brought.
    pub parts: i64,
    /// How many bytes they are.
    pub bytes: i64,
    /// Why not all of it was brought; none within where all was.
    pub ended: Option<Option<String>>,
}

/// Where a request stands for whoever reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The machine does not know of it yet: a sentence.
    Waits(String),
    /// It knows, and brings it.
    Comes,
    /// Nothing more comes: all of it was brought, or not, with a sentence.
    Ended(Option<String>),
}

/// How long a machine may be unheard before nobody should wait for it.
fn patience(interval: Duration) -> Duration {
    (interval * HEARTBEATS).max(LEAST_PATIENCE)
}

fn last_heard(heard: Option<Timestamp>, now: Timestamp) -> String {
    heard.map_or_else(|| "it was never heard".to_owned(), |at| format!("it was last heard {}", both(at, now)))
}

/// Why a machine is not asked at all: a sentence that goes on after its name. `retired` is whether it was given back.
#[must_use]
pub fn unreachable(
    heard: Option<Timestamp>,
    retired: bool,
    interval: Duration,
    now: Timestamp,
) -> Option<String> {
    if retired {
        return Some("is retired: nobody listens to it any more, and it brings no logs".to_owned());
    }
    match heard {
        None => Some(
            "was never heard: no role server on it speaks to a shepherd, and nothing else brings its logs; see what \
             it waits for with shepherdctl why"
                .to_owned(),
        ),
        Some(at) if between(at, now) > patience(interval) => Some(format!(
            "is silent: it was last heard {}, and brings logs with its heartbeats alone; see what is done about it with \
             shepherdctl why, or read them on the machine: agent.log and children/*/output.log in the state directory of \
             its role server (/var/lib/roleserver)",
            both(at, now)
        )),
        Some(_) => None,
    }
}

/// Where a request stands at `now`. `interval` is that of heartbeats.
#[must_use]
pub fn state(request: &Request, heard: Option<Timestamp>, interval: Duration, now: Timestamp) -> State {
    if let Some(failed) = &request.ended {
        return State::Ended(failed.clone());
    }
    let Some((handed, _)) = request.handed else {
        let waited = between(request.asked_at, now);
        if waited <= patience(interval) {
            return State::Waits(format!(
                "it is asked with the answer to its next heartbeat; one comes every {}",
                rough(interval)
            ));
        }
        let said = if heard.is_some_and(|at| at > request.asked_at) {
            "it has called since, and nobody handed it on: the shepherd that hears it may be of an older release; \
             update it"
                .to_owned()
        } else {
            format!(
                "it has not called since it was asked; {}. Ask again when it is heard",
                last_heard(heard, now)
            )
        };
        return State::Ended(Some(said));
    };
    if between(request.brought_at.unwrap_or(handed).max(handed), now) > STALLED {
        return State::Ended(Some(format!(
            "it was asked, and has brought nothing for {}; {}. Ask again when it is heard",
            rough(STALLED),
            last_heard(heard, now)
        )));
    }
    if request.wanted.follow && between(request.asked_at, now) > LONGEST_FOLLOW {
        return State::Ended(Some(format!(
            "a log is followed for {} at the most; ask again to follow it further",
            rough(LONGEST_FOLLOW)
        )));
    }
    State::Comes
}

/// What a heartbeat of the machine makes of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hand {
    /// The machine is told, for the first time or anew.
    New,
    /// It is told once more: it may not have heard it.
    Again,
    /// It ends, with a sentence.
    End(String),
}

/// Decides what a heartbeat of that start of the role server makes of a request. `version` is what it says it is, and
/// `brings` whether it says that it brings logs.
#[must_use]
pub fn hand(request: &Request, incarnation: &str, brings: bool, version: &str, now: Timestamp) -> Hand {
    if between(request.read_at, now) > UNREAD {
        return Hand::End("nobody came for it".to_owned());
    }
    if !brings {
        return Hand::End(format!(
            "its role server ({version}) does not know how to bring logs; update it (shepherdctl update, or put it on \
             the machine anew), or read them on the machine"
        ));
    }
    match &request.handed {
        None => Hand::New,
        Some((_, to)) if to == incarnation => Hand::Again,
        // Nothing of what its predecessor read can be told twice.
        Some(_) if request.parts == 0 => Hand::New,
        Some(_) => Hand::End("its role server was started anew in the middle of it; ask again".to_owned()),
    }
}

/// What a machine brings, its form checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Brought {
    /// The start of the role server that brings it.
    pub incarnation: String,
    /// Which part.
    pub number: i64,
    /// Lines, each with its end.
    pub lines: String,
    /// Which logs there are.
    pub there: Vec<There>,
    /// Something to know of the lines.
    pub note: Option<String>,
    /// Why there is nothing more.
    pub error: Option<String>,
    /// Nothing follows.
    pub last: bool,
}

/// What is done with what a machine brings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Keep {
    /// It is kept.
    Take,
    /// It was kept before.
    Known,
    /// Too much lies here unread.
    Later,
    /// Nobody wants it any more.
    Over,
    /// Nobody wants it any more, and whoever asked is told why.
    End(String),
}

/// Decides what is done with a part. `unread` is how many bytes lie here that nobody has taken.
#[must_use]
pub fn keep(request: &Request, brought: &Brought, unread: i64, now: Timestamp) -> Keep {
    if request.ended.is_some() || request.handed.as_ref().is_none_or(|(_, to)| *to != brought.incarnation) {
        return Keep::Over;
    }
    if between(request.read_at, now) > UNREAD {
        return Keep::End("nobody came for it".to_owned());
    }
    let limit = i64::try_from(ANSWER_LIMIT).unwrap_or(i64::MAX);
    let bytes = i64::try_from(brought.lines.len()).unwrap_or(i64::MAX);
    if brought.number < request.parts {
        return Keep::Known;
    }
    if brought.number > request.parts {
        return Keep::End(format!(
            "it brought part {} where part {} comes next; ask again",
            brought.number, request.parts
        ));
    }
    if request.wanted.follow {
        if unread.saturating_add(bytes) > limit {
            return Keep::Later;
        }
    } else if request.bytes.saturating_add(bytes) > limit {
        return Keep::End(format!("it brought more than {} KiB; ask for fewer lines", ANSWER_LIMIT >> 10));
    }
    Keep::Take
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(30);

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn asked(follow: bool) -> Request {
        Request {
            wanted: Wanted { log: "etcd".to_owned(), lines: 100, since: None, follow },
            asked_at: at(0),
            asked_by: "kim".to_owned(),
            read_at: at(0),
            handed: None,
            brought_at: None,
            parts: 0,
            bytes: 0,
            ended: None,
        }
    }

    #[test]
    fn what_cannot_be_asked_is_refused_by_its_field() {
        let good =
            Wanted { log: "web/server".to_owned(), lines: 1, since: Some(Span::hours(2)), follow: true };
        assert_eq!(good.check(), Ok(()));
        for (field, odd) in [
            ("log", Wanted { log: "a b".to_owned(), ..good.clone() }),
            ("log", Wanted { log: "\n".to_owned(), ..good.clone() }),
            ("log", Wanted { log: "x".repeat(LONGEST_NAME + 1), ..good.clone() }),
            ("lines", Wanted { lines: 0, ..good.clone() }),
            ("lines", Wanted { lines: MOST_LINES + 1, ..good.clone() }),
            ("since", Wanted { since: Some(Span::seconds(0)), ..good.clone() }),
            ("since", Wanted { since: Some(Span::hours(1_000_000)), ..good.clone() }),
            ("follow", Wanted { log: String::new(), ..good.clone() }),
        ] {
            assert_eq!(odd.check().unwrap_err().0, field, "{odd:?}");
        }
    }

    #[test]
    fn silent_machine_is_not_asked() {
        for (heard, retired, now, expected) in [
            (None, false, 0, Some("was never heard")),
            (Some(0), false, 90, None),
            (Some(0), false, 91, Some("is silent: it was last heard 1m31s ago")),
            (Some(0), true, 1, Some("is retired")),
        ] {
            let said = unreachable(heard.map(at), retired, INTERVAL, at(now));
            match (&said, expected) {
                (Some(said), Some(expected)) => assert!(said.starts_with(expected), "{said}"),
                (said, expected) => assert_eq!(said.as_deref(), expected),
            }
        }
        assert_eq!(unreachable(Some(at(0)), false, Duration::from_secs(1), at(15)), None, "a busy host");
    }

    #[test]
    fn whoever_waits_is_told_what_for_and_not_for_ever() {
        let handed = |seconds| Some((at(seconds), "i".to_owned()));
        let with = |change: &dyn Fn(&mut Request)| {
            let mut request = asked(false);
            change(&mut request);
            request
        };
        let follow = |brought| Request { handed: handed(1), brought_at: Some(at(brought)), ..asked(true) };
        for (name, request, heard, now, expected) in [
            ("not called yet", asked(false), Some(-5), 90, "waits: it is asked with"),
            (
                "never called",
                asked(false),
                Some(-5),
                91,
                "ended: it has not called since it was asked; it was last heard",
            ),
            ("passed over", asked(false), Some(60), 91, "ended: it has called since, and nobody"),
            ("told", with(&|request| request.handed = handed(20)), Some(20), 80, "comes"),
            (
                "brings nothing",
                with(&|request| request.handed = handed(20)),
                Some(20),
                81,
                "ended: it was asked, and has",
            ),
            ("brings", follow(600), Some(600), 650, "comes"),
            ("stopped bringing", follow(600), Some(600), 661, "ended: it was asked, and has"),
            ("followed for long", follow(3600), Some(3600), 3601, "ended: a log is followed for 1h"),
            ("brought", with(&|request| request.ended = Some(None)), None, 9999, "ended: all"),
            ("failed", with(&|request| request.ended = Some(Some("no".to_owned()))), None, 9999, "ended: no"),
        ] {
            let said = match state(&request, heard.map(at), INTERVAL, at(now)) {
                State::Waits(said) => format!("waits: {said}"),
                State::Comes => "comes".to_owned(),
                State::Ended(said) => format!("ended: {}", said.unwrap_or_else(|| "all".to_owned())),
            };
            assert!(said.starts_with(expected), "{name}: {said}");
        }
    }

    #[test]
    fn heartbeat_hands_a_request_on_or_ends_it() {
        let handed =
            |to: &str, parts| Request { handed: Some((at(1), to.to_owned())), parts, ..asked(false) };
        for (name, request, brings, now, expected) in [
            ("new", asked(false), true, 5, Some(Hand::New)),
            ("told again", handed("i", 2), true, 5, Some(Hand::Again)),
            ("started anew before it began", handed("other", 0), true, 5, Some(Hand::New)),
            ("started anew in the middle", handed("other", 1), true, 5, None),
            ("does not know how", asked(false), false, 5, None),
            ("nobody reads it", asked(false), true, 61, None),
        ] {
            let is = hand(&request, "i", brings, "0.9", at(now));
            match expected {
                Some(expected) => assert_eq!(is, expected, "{name}"),
                None => assert!(matches!(is, Hand::End(_)), "{name}: {is:?}"),
            }
        }
        let Hand::End(said) = hand(&asked(false), "i", false, "0.9", at(5)) else { panic!() };
        assert!(
            said.starts_with("its role server (0.9) does not know how to bring logs; update it"),
            "{said}"
        );
    }

    #[test]
    fn no_more_is_kept_than_may_be() {
        let limit = i64::try_from(ANSWER_LIMIT).unwrap();
        let told = |follow, parts, bytes| Request {
            handed: Some((at(1), "i".to_owned())),
            parts,
            bytes,
            ..asked(follow)
        };
        let part = |number| Brought {
            incarnation: "i".to_owned(),
            number,
            lines: "1234567890".to_owned(),
            ..Brought::default()
        };
        for (name, request, number, unread, now, expected) in [
            ("the next", told(false, 3, limit - 10), 3, limit, 5, Some(Keep::Take)),
            ("more than may be", told(false, 3, limit - 9), 3, 0, 5, None),
            ("once more", told(false, 3, 0), 2, 0, 5, Some(Keep::Known)),
            ("with a gap", told(false, 3, 0), 4, 0, 5, None),
            ("followed, taken", told(true, 3, limit * 9), 3, limit - 10, 5, Some(Keep::Take)),
            ("followed, not taken", told(true, 3, limit * 9), 3, limit - 9, 5, Some(Keep::Later)),
            ("of nobody", asked(false), 0, 0, 5, Some(Keep::Over)),
            ("nobody reads it", told(false, 0, 0), 0, 0, 61, None),
        ] {
            let is = keep(&request, &part(number), unread, at(now));
            match expected {
                Some(expected) => assert_eq!(is, expected, "{name}"),
                None => assert!(matches!(is, Keep::End(_)), "{name}: {is:?}"),
            }
        }
        let other = Brought { incarnation: "j".to_owned(), ..part(0) };
        assert_eq!(keep(&told(false, 0, 0), &other, 0, at(5)), Keep::Over, "of another start");
        let ended = Request { ended: Some(None), ..told(false, 0, 0) };
        assert_eq!(keep(&ended, &part(0), 0, at(5)), Keep::Over);
    }
}
