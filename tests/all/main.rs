//! The integration tests: one binary, because each further one is linked against everything, and a
//! module per capability.

mod architecture;
mod bad_input;
mod bmdb_explain;
mod bmdb_invariants;
mod bmdb_kit;
mod bmdb_migrations;
mod bmdb_modes;
mod bmdb_outages;
mod bmdb_phase_twin;
mod bmdb_proxy;
mod bmdb_races;
mod bmdb_work;
mod callback;
mod checker;
mod cli;
mod command_line;
mod control_loops;
mod database_login;
mod demo;
mod dependencies;
mod harness;
mod heartbeats;
mod private_postgres;
mod providers;
mod provisioning;
mod recovery;
mod roleserver;
mod simulator;
mod sshd;
mod takeover;
mod test_database;
mod two_shepherds;
