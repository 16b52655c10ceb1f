//! Where a process answers its operators.

use std::net::{Ipv4Addr, SocketAddr};

use super::Checks;

/// Flags and variables of [`AdminSettings`].
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Operation")]
pub struct AdminArgs {
    /// Address of /livez, /readyz and /version; port 0 takes a free one [default: 127.0.0.1, relay 9464, consumer 9465].
    #[arg(id = "admin-addr", long, env = "ADMIN_ADDR", value_name = "IP:PORT")]
    addr: Option<String>,
}

/// Where the admin server listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdminSettings {
    /// The address to bind; port 0 takes a free port.
    pub addr: SocketAddr,
}

impl AdminArgs {
    /// Checks the address; without one it is 127.0.0.1 and the process's own `default_port`.
    pub fn check(&self, checks: &mut Checks, default_port: u16) -> AdminSettings {
        let default = SocketAddr::from((Ipv4Addr::LOCALHOST, default_port));
        let parse = |given: &str| {
            given
                .parse()
                .map_err(|_| format!("must be an address such as 127.0.0.1:9464 or [::]:9464, not {given:?}"))
        };
        AdminSettings { addr: checks.or("ADMIN_ADDR", self.addr.as_ref(), default, parse) }
    }
}
