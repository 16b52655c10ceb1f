//! What the specifications stand on: real servers, real processes, and the promises that must hold afterwards.
//!
//! A spec opens a [`World`], which has a database, a stream and a subject prefix of its own on servers that the whole
//! test process shares. It starts relays and consumers as processes, does them harm, waits until everything is
//! answered, and asks [`invariants`] whether every promise was kept:
//!
//! ```no_run
//! # async fn spec() -> anyhow::Result<()> {
//! let world = tests::World::new().await?;
//! let _relay = world.relay().start()?;
//! let consumer = world.consumer().start()?;
//! world.create_conversation("c1").await?;
//! world.submit("c1", "hello").await?;
//! consumer.kill()?;
//! let _successor = world.consumer().start()?;
//! world.settled().await
//! # }
//! ```
//!
//! Nothing survives a test process, however it ends: servers are held by a guard process that ends with its standard
//! input, relays and consumers by the kernel's parent-death signal.

#![allow(
    clippy::must_use_candidate,
    reason = "a helper of tests whose result is not used is dead code in plain sight"
)]

pub mod guard;
pub mod invariants;
pub mod local;
pub mod programs;
pub mod servers;
pub mod world;

pub use guard::Servers;
pub use local::Local;
pub use servers::{Server, Spec};
pub use world::{Process, World};
