//! A private NATS server with `JetStream`.

use std::{
    io::{BufRead, BufReader},
    net::TcpStream,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use rustix::process::Signal;

use super::{
    daemon::{Daemon, Service, log_in},
    port::Port,
};
use crate::programs;

/// A server of its own in one directory, on one port.
#[derive(Debug)]
pub struct Nats {
    bin: PathBuf,
    home: PathBuf,
    port: Port,
    daemon: Option<Daemon>,
}

impl Nats {
    /// Starts a server whose configuration ends with `extra`; its store is the one that `home` holds.
    pub fn start(bin: Option<&Path>, home: &Path, extra: &str) -> Result<Self> {
        let bin = bin.map_or_else(programs::nats_server, |bin| Ok(bin.to_owned()))?;
        std::fs::create_dir_all(home).with_context(|| format!("cannot make {}", home.display()))?;
        let mut nats = Self { bin, home: home.to_owned(), port: Port::claim()?, daemon: None };
        // Streams reserve their max_bytes, which is more than a disk has when many tests make one each.
        let config = format!(
            "listen: \"127.0.0.1:{}\"\nmax_payload: 8MB\njetstream {{ store_dir: \"{}\", max_file: 16TB }}\n{extra}\n",
            nats.port(),
            nats.store().display(),
        );
        std::fs::write(nats.config(), config)?;
        nats.resume()?;
        Ok(nats)
    }

    fn store(&self) -> PathBuf {
        self.home.join("store")
    }

    fn config(&self) -> PathBuf {
        self.home.join("nats.conf")
    }

    /// Kills it and starts it again with an empty store: every stream is gone.
    pub fn wipe(&mut self) -> Result<()> {
        self.kill()?;
        std::fs::remove_dir_all(self.store())?;
        self.resume()
    }

    /// Its port.
    pub const fn port(&self) -> u16 {
        self.port.number()
    }

    /// Its address.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port())
    }
}

impl Service for Nats {
    fn resume(&mut self) -> Result<()> {
        let mut command = programs::subordinate(&self.bin, "KILL");
        command.arg("--config").arg(self.config());
        let port = self.port();
        self.daemon = Some(Daemon::start("nats-server", command, &log_in(&self.home), |_| greets(port))?);
        Ok(())
    }

    fn daemon(&mut self) -> &mut Option<Daemon> {
        &mut self.daemon
    }

    fn stop_signal(&self) -> Signal {
        Signal::TERM
    }
}

/// Whether a server greets on `port` with `JetStream` enabled: it opens the port when its streams are recovered.
fn greets(port: u16) -> bool {
    let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) else { return false };
    let mut line = String::new();
    stream.set_read_timeout(Some(Duration::from_secs(1))).is_ok()
        && BufReader::new(stream).read_line(&mut line).is_ok()
        && line.contains("\"jetstream\":true")
}
