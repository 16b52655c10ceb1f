//! The specifications: each test is a promise of the system, kept or broken on real servers and processes.

mod harness;
mod turn;
