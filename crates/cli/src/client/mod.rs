//! Client of the fleet API: which API a command calls, how it is connected, and how responses are decoded.
//!
//! [`backend`][] decides between the API of a context ([`contexts`][]) and the same services in this process, over a
//! connection to the BMDB. [`fleet_client`][] hides the difference: a command gets a channel and does not know what is
//! at the other end. [`pagination`][] reads lists that are longer than one response, and [`decode`][] has what the
//! decoders of all nouns share. The decoder of a message is in the file of its noun. [`reconnect`][] is for commands that
//! run for longer than a server lives.
//!
//! A response of another release may lack a field that a command needs. The error names the field
//! ([`decode::missing_field`][]).

pub mod backend;
pub mod contexts;
pub mod decode;
pub mod fleet_client;
pub mod pagination;
pub mod reconnect;
