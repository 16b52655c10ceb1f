//! `PgBouncer` in transaction mode, in front of a private `PostgreSQL`: no session outlives a transaction.
//!
//! Before 1.21 it does not know prepared statements, so each transaction leaves its session clean: then the names that
//! one client gave to its statements are free for the next.

use std::{
    net::TcpStream,
    path::{Path, PathBuf},
};

use anyhow::Result;
use rustix::process::Signal;

use super::{
    daemon::{Daemon, Service, log_in},
    port::Port,
};
use crate::programs;

/// A pooler of its own in one directory, on one port.
#[derive(Debug)]
pub struct PgBouncer {
    bin: PathBuf,
    home: PathBuf,
    port: Port,
    daemon: Option<Daemon>,
}

impl PgBouncer {
    /// Starts a pooler for every database of the server at `postgres`.
    pub fn start(home: &Path, postgres: u16) -> Result<Self> {
        programs::server_directory(home)?;
        let mut pooler =
            Self { bin: programs::pgbouncer()?, home: home.to_owned(), port: Port::claim()?, daemon: None };
        let config = format!(
            "[databases]\n* = host=127.0.0.1 port={postgres}\n[pgbouncer]\n\
             listen_addr = 127.0.0.1\nlisten_port = {}\nunix_socket_dir =\n\
             auth_type = trust\nauth_file = {}\npool_mode = transaction\n\
             server_reset_query_always = 1\n\
             max_client_conn = 500\ndefault_pool_size = 20\n\
             ignore_startup_parameters = extra_float_digits,options\n",
            pooler.port(),
            home.join("users").display(),
        );
        std::fs::write(home.join("users"), "\"postgres\" \"\"\n")?;
        std::fs::write(pooler.config(), config)?;
        pooler.resume()?;
        Ok(pooler)
    }

    fn config(&self) -> PathBuf {
        self.home.join("pgbouncer.ini")
    }

    /// Its port.
    pub const fn port(&self) -> u16 {
        self.port.number()
    }

    /// Its address, without a database.
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}", self.port())
    }
}

impl Service for PgBouncer {
    fn resume(&mut self) -> Result<()> {
        let mut command = programs::subordinate_server(&self.bin, "KILL");
        command.arg(self.config());
        let port = self.port();
        let listens = |_| TcpStream::connect(("127.0.0.1", port)).is_ok();
        self.daemon = Some(Daemon::start("PgBouncer", command, &log_in(&self.home), listens)?);
        Ok(())
    }

    fn daemon(&mut self) -> &mut Option<Daemon> {
        &mut self.daemon
    }

    fn stop_signal(&self) -> Signal {
        Signal::TERM
    }
}
