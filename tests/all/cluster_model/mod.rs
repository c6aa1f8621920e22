//! A cluster of which everything is simulated but its decisions.

mod asking_etcd;
mod curator;
mod etcd;
mod fixture;
mod invariants;
mod node;
mod operators;
mod runs;
mod service;
mod sim;
mod world;
