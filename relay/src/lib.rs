//! The relay: claims what is due in Postgres, publishes a trigger for each turn to NATS JetStream, and looks after what is
//! queued until a consumer has begun it.
//!
//! [`run`] is the whole of it: recover what lost its lease, claim a batch, publish it while the next one is claimed, ask the
//! broker for triggers that nobody has begun, and sleep when there is nothing to do. A broker that takes no triggers closes
//! the gate before the claim: no attempt is spent on it, and what was claimed is given back.
//!
//! Any number of relays run side by side on one database; none is special.

mod gate;
mod look_after;
mod pass;
mod publish;
mod queued;

pub use pass::{RelayError, Resources, run};
