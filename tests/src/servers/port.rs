//! Ports of loopback that are ours while we live, also while their server is down.

use std::{
    hash::{BuildHasher, RandomState},
    net::TcpListener,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
};

use anyhow::{Context, Result};

/// Below the range that the kernel gives to outgoing connections, so that nobody gets one by chance.
const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;

/// A claimed port. The claim is an abstract socket named for it: no two processes hold the same, and none outlives its
/// process.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _claim: UnixListener,
}

impl Port {
    /// Claims a port on which nobody listens.
    pub fn claim() -> Result<Self> {
        let start = u16::try_from(RandomState::new().hash_one(std::process::id()) % u64::from(COUNT))?;
        (0..COUNT).find_map(|step| Self::try_claim(FIRST + (start + step) % COUNT)).context("no port is free")
    }

    fn try_claim(number: u16) -> Option<Self> {
        let name = SocketAddr::from_abstract_name(format!("outbox-tests-port-{number}")).ok()?;
        let claim = UnixListener::bind_addr(&name).ok()?;
        TcpListener::bind(("127.0.0.1", number)).ok()?;
        Some(Self { number, _claim: claim })
    }

    /// The number.
    pub const fn number(&self) -> u16 {
        self.number
    }
}
