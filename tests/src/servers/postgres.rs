//! A private `PostgreSQL`.

use std::{
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;

use super::{
    daemon::{Daemon, Service, log_in},
    port::Port,
};
use crate::programs;

/// The backends of a killed server need a moment to notice; until then its data is still in use.
const ATTEMPTS: u32 = 50;

/// A cluster of its own in one directory, on one port.
#[derive(Debug)]
pub struct Postgres {
    bin: PathBuf,
    home: PathBuf,
    port: Port,
    durable: bool,
    daemon: Option<Daemon>,
}

impl Postgres {
    /// Makes the cluster in `home`, or finds the one that is there, and starts it. Only a durable one survives the
    /// machine's crash; the others are fast.
    pub fn start(bin: Option<&Path>, home: &Path, durable: bool) -> Result<Self> {
        let bin = bin.map_or_else(programs::postgres_bin, |bin| Ok(bin.to_owned()))?;
        programs::server_directory(home)?;
        let postgres = Self { bin, home: home.to_owned(), port: Port::claim()?, durable, daemon: None };
        postgres.init()?;
        postgres.started()
    }

    fn started(mut self) -> Result<Self> {
        self.resume()?;
        Ok(self)
    }

    fn data(&self) -> PathBuf {
        self.home.join("data")
    }

    fn init(&self) -> Result<()> {
        if self.data().join("PG_VERSION").exists() {
            return Ok(());
        }
        let output = programs::subordinate_server(&self.bin.join("initdb"), "KILL")
            .args(["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "-D"])
            .arg(self.data())
            .current_dir(&self.home)
            .output()
            .context("cannot run initdb")?;
        if !output.status.success() {
            bail!("initdb failed: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(())
    }

    fn command(&self) -> std::process::Command {
        // SIGQUIT: an immediate shutdown, which takes its children along.
        let mut command = programs::subordinate_server(&self.bin.join("postgres"), "QUIT");
        command.current_dir(&self.home).arg("-D").arg(self.data());
        let mut set = |name: &str, value: &str| {
            command.arg("-c").arg(format!("{name}={value}"));
        };
        set("port", &self.port.number().to_string());
        set("listen_addresses", "127.0.0.1");
        set("unix_socket_directories", "");
        set("max_connections", "400");
        set("shared_buffers", "256MB");
        set("max_wal_size", "4GB");
        set("log_line_prefix", "%m [%p] %d ");
        if !self.durable {
            set("fsync", "off");
            set("full_page_writes", "off");
        }
        if self.has_library("pg_stat_statements") {
            set("shared_preload_libraries", "pg_stat_statements");
        }
        command
    }

    fn has_library(&self, name: &str) -> bool {
        let library = format!("../lib/{name}.so");
        let embedded = format!("../lib/postgresql/{name}.so");
        [library, embedded].iter().any(|path| self.bin.join(path).exists())
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

fn written_since(log: &Path, length: usize) -> String {
    let bytes = std::fs::read(log).unwrap_or_default();
    String::from_utf8_lossy(bytes.get(length..).unwrap_or_default()).into_owned()
}

impl Service for Postgres {
    fn resume(&mut self) -> Result<()> {
        let log = log_in(&self.home);
        let status = self.data().join("postmaster.pid");
        for _ in 0..ATTEMPTS {
            // What pg_ctl reads: the first line is the server's pid, the eighth says that it accepts connections.
            let ready = |pid: u32| {
                let text = std::fs::read_to_string(&status).unwrap_or_default();
                let mut lines = text.lines();
                lines.next() == Some(&pid.to_string())
                    && lines.nth(6).is_some_and(|line| line.trim() == "ready")
            };
            let before = std::fs::read(&log).map_or(0, |log| log.len());
            match Daemon::start("PostgreSQL", self.command(), &log, ready) {
                Ok(daemon) => {
                    self.daemon = Some(daemon);
                    return Ok(());
                }
                // Anywhere since then: the former server's processes still write as they end.
                Err(_) if written_since(&log, before).contains("shared memory block") => {
                    thread::sleep(Duration::from_millis(100));
                }
                Err(error) => return Err(error),
            }
        }
        bail!("the processes of a former PostgreSQL do not end")
    }

    fn daemon(&mut self) -> &mut Option<Daemon> {
        &mut self.daemon
    }

    fn stop_signal(&self) -> Signal {
        Signal::INT
    }
}
