//! Replacing this program by another release of it, and coming back from one that is no good.
//!
//! The program at the *stable path*, which the init system or the supervisor starts, stays the proven release until the
//! other one has proven itself. The other one, the *candidate*, is put beside it, and this process becomes it by `execve`:
//! pid and arguments stay, and so does everything that runs beside a role server, which finds it as after any restart. It
//! has proven itself when a shepherd has answered a heartbeat of it; then it takes the stable path's name, in one step.
//! Until then whatever ends it brings the former one back: the supervisor starts what is at the stable path.
//!
//! * [`decision`][]: what a role server does when it starts, and what with an order (pure).
//! * [`files`][]: what is written down, and which file has which name.
//! * [`release`][]: the role server's side: hears orders, fetches, hands over, proves itself.
//! * [`watch`][]: the process of the former release that ends a candidate which says nothing.
//!
//! # A crash after each step
//!
//! | what is done | what a start then finds |
//! | --- | --- |
//! | the candidate lies beside the stable program | the former release, and nothing on trial |
//! | `update.json` says what is on trial | the former release: the candidate has failed |
//! | the watchdog runs, the process is the candidate | the same; it was not heard |
//! | the candidate has the stable path's name | the candidate, which is proven and says so |
//! | `release.json` says how it ended | the same |
//! | `update.json` is gone | nothing on trial |

pub mod decision;
pub mod files;
pub mod release;
pub mod watch;
