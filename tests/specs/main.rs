//! The specifications: each test is a promise of the system, kept or broken on real servers and processes.

mod actions;
mod agents;
mod commands;
mod deletion;
mod faults;
mod guarantees;
mod harness;
mod http_handler;
mod kill_matrix;
mod load;
mod operations;
mod order;
mod outside;
mod plans;
mod poison;
mod processes;
mod recovery;
mod rejected;
mod scale;
mod schema;
mod shutdown;
mod sources;
mod submit;
mod turn;
mod versions;
mod zombies;
