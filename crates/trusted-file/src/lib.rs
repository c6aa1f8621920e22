//! Files that a program trusts: who may read or change them.
//!
//! A program believes some files without a check of their content: a key or password file because nobody else knows
//! it, a list of commands because nobody else wrote it. Both are only true as long as the permissions of the file say
//! so. This crate is the one place that decides about permissions:
//!
//! * [`private_file`]: reads a key or password, and refuses a file that other users can read or write.
//! * [`unchangeable_path`]: checks that no other user can change a file, or any directory or link on the way to it.
//! * [`private_group`]: finds the group that only one user is in.
//!
//! *Other users* are all but the user of the process and root. Each decision is a pure function of the owner and mode
//! of a file. A group counts as others, because this program does not know who is in it. The path of a configuration is
//! the exception: there a private group is the user, unless a file has an access list.

mod access_list;
pub mod private_file;
pub mod private_group;
pub mod unchangeable_path;
