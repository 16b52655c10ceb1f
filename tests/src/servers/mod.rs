//! Private servers: each in a directory of its own, on a free loopback port, ended by its own pid.
//!
//! Everything here blocks and starts processes from the calling thread; that thread must live as long as they do,
//! since the kernel ends them with it. The launcher's main thread does.

mod daemon;
mod host;
mod nats;
mod pgbouncer;
mod port;
mod postgres;

pub use daemon::{Daemon, Service, tail};
pub use host::{Addresses, Host, Order, Server, Spec};
pub use nats::Nats;
pub use pgbouncer::PgBouncer;
pub use port::Port;
pub use postgres::Postgres;
