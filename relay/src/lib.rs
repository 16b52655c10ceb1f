//! x

mod gate;
mod look_after;
mod pass;
mod publish;
mod queued;

pub use pass::{RelayError, Resources, run};
