//! x

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
