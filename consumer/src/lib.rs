//! x

pub mod handler;
pub mod operations;

pub use handler::{HandlerError, Reply, Turn, TurnHandler, TurnMessage};
