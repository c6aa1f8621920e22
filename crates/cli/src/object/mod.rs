//! Objects of all kinds: `get KIND [NAME…]` and `describe KIND NAME`.
//!
//! [`kind`][] is the table of kinds, and [`command`][] the grammar that follows from it. [`fetch`][] calls the function
//! of a kind, in the file of its noun, which returns an [`ObjectList`][list::ObjectList]. The rest is the same for every
//! kind: [`list`][] selects objects by name and makes a table of them, `sort` puts them in another order, [`document`][]
//! has their JSON, [`page`][] the page of a kind that has no page of its own, and [`get`][] and [`describe`][] print.
//! [`watch`][] prints what changes, in the columns of [`watch_table`][]. `resolve` finds the id that an order of the API
//! requires.
//!
//! # Notes for the next implementor
//!
//! A new kind is a variant of [`ObjectKind`][kind::ObjectKind], its row in the table, a function in the file of its noun,
//! and an arm in [`fetch`][].

pub mod command;
pub mod describe;
pub mod document;
pub mod fetch;
pub mod get;
pub mod kind;
pub mod list;
pub mod page;
pub(crate) mod resolve;
pub mod sort;
pub mod watch;
pub mod watch_table;
