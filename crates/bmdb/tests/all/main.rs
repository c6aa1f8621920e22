//! The engine, orders and the connection to the database, tested against a real PostgreSQL.

mod authority_orders;
mod authority_rotation_orders;
mod authority_theft;
mod cluster_images;
mod cluster_observations;
mod cluster_upgrades;
mod connections;
mod database_limits;
mod dialects;
mod invariants;
mod many;
mod member_approval;
mod migrations;
mod newer_fence;
mod outages;
mod peer_renewal_orders;
mod phase_twin;
mod priority;
mod proxy;
mod races;
mod restore_orders;
mod second_person;
mod session_state;
mod several_hosts;
mod signed_declarations;
mod work;
