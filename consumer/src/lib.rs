//! The consumer: runs turns, and commits reply, tool calls and `done` in one transaction.
//!
//! Implement [`TurnHandler`] (or use [`handler_fn`], or the built-in [`handlers`]) and give it to [`run`]:
//!
//! ```no_run
//! use consumer::{HandlerError, Reply, Turn, TurnHandler};
//!
//! struct Parrot;
//!
//! impl TurnHandler for Parrot {
//!     async fn handle(&self, turn: Turn) -> Result<Reply, HandlerError> {
//!         let said = turn.messages.iter().filter(|message| message.in_turn);
//!         Ok(Reply::new(said.map(|message| message.content.as_str()).collect::<Vec<_>>().join("\n")))
//!     }
//! }
//! ```
//!
//! The way of a turn: a trigger is pulled (or a due lane claimed, with `--source postgres`), its run is *begun* under a lease
//! and its messages are loaded, the trigger is acknowledged, the handler runs with a deadline and a cancellation token while
//! a heartbeat renews the lease, and the reply is committed together with whatever else is ready. A run that has lost its
//! lane commits nothing, and its [`operations`] are refused.

mod begin;
mod consumer;
mod finish;
mod finisher;
pub mod handler;
pub mod handlers;
mod heartbeat;
mod history;
mod leases;
mod nats_source;
pub mod operations;
pub mod operations_api;
mod postgres_source;
mod pull;
mod run;

pub use consumer::{ConsumerError, Resources, run};
pub use handler::{HandlerError, Reply, Turn, TurnHandler, TurnMessage, handler_fn};
