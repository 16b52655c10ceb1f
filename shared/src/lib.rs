//! What relay and consumer share: the transitions of a turn that either may make, and the ground they stand on.
//!
//! An application commits a user's message and an outbox row in one transaction ([`submit`]). From there a turn goes
//! through one row, its conversation's *lane*, and every step is a guarded write:
//!
//! 1. [`claim`]: due rows become a turn, the turn gets a run (one attempt), and the attempt is counted. The relay publishes
//!    a [`trigger`] for it; a consumer without a broker begins it at once. What no broker took is given back ([`release`]).
//! 2. The consumer begins the run, runs the handler under a lease, and commits the reply: crate `consumer`.
//! 3. A run that ends without a reply is [settled](settle): retried, failed visibly, or cancelled. A run whose lease has
//!    expired is [recovered](recovery), which is a settle too.
//!
//! Beside that way stand the [`actions`] of users and operators: retry, cancel, read, delete, prune.
//!
//! Postgres decides and NATS wakes: [`broker`] and [`topology`] can cost latency, never correctness. Claimers that have
//! nothing to do sleep in [`wake`].
//!
//! The rest is a process's ground: [`settings`], [`logging`], [`process`], [`admin`], [`pool`], [`schema`], [`policy`],
//! [`backoff`], [`failpoint`].

pub mod actions;
pub mod admin;
pub mod backoff;
pub mod broker;
pub mod claim;
pub mod failpoint;
pub mod ids;
pub mod logging;
pub mod policy;
pub mod pool;
pub mod process;
pub mod recovery;
pub mod release;
pub mod schema;
pub mod settings;
pub mod settle;
pub mod sqlstate;
pub mod state;
pub mod submit;
pub mod topology;
pub mod trigger;
pub mod wake;
