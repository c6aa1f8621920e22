//! The engine and the connection to the database, tested against a real PostgreSQL: races, failures, invariants.

mod dialects;
mod invariants;
mod outages;
mod phase_twin;
mod proxy;
mod races;
mod work;
