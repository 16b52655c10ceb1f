//! One server process: started, awaited, signalled and ended by its own pid.

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

/// How long a server may take to answer, or to stop before it is killed.
const LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(10);

/// A server that can be ended and started again, on the same port and data.
pub trait Service {
    /// Starts it again after a stop or a kill.
    fn resume(&mut self) -> Result<()>;

    /// Its process; `None`: it does not run.
    fn daemon(&mut self) -> &mut Option<Daemon>;

    /// What asks it to stop cleanly, without waiting for its clients.
    fn stop_signal(&self) -> Signal;

    /// Stops it cleanly.
    fn stop(&mut self) -> Result<()> {
        let signal = self.stop_signal();
        self.daemon().take().map_or(Ok(()), |daemon| daemon.stop(signal))
    }

    /// Kills it, as a crash does.
    fn kill(&mut self) -> Result<()> {
        self.daemon().take().map_or(Ok(()), |mut daemon| daemon.kill())
    }
}

/// A running server. Dropping it kills it.
#[derive(Debug)]
pub struct Daemon {
    name: &'static str,
    child: Child,
}

impl Daemon {
    /// Starts `command` with its output appended to `log`, and returns once `ready` says so.
    pub fn start(
        name: &'static str,
        mut command: Command,
        log: &Path,
        ready: impl Fn(u32) -> bool,
    ) -> Result<Self> {
        let output = File::options().create(true).append(true).open(log)?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        let mut daemon = Self { name, child };
        let started = Instant::now();
        while !ready(daemon.pid()) {
            if let Some(status) = daemon.child.try_wait()? {
                bail!("{name} ended at once with {status}:\n{}", tail(log, 15));
            }
            if started.elapsed() > LIMIT {
                bail!("{name} does not answer after {LIMIT:?}:\n{}", tail(log, 15));
            }
            thread::sleep(POLL);
        }
        Ok(daemon)
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Says how it ended, if it has.
    pub fn ended(&mut self) -> Result<Option<String>> {
        let status = self.child.try_wait()?;
        Ok(status.map(|status| format!("{} ended with {status}", self.name)))
    }

    /// Asks it to stop with `signal`, and kills it if it does not.
    pub fn stop(mut self, signal: Signal) -> Result<()> {
        if self.child.try_wait()?.is_some() {
            return Ok(());
        }
        kill_process(Pid::from_child(&self.child), signal)?;
        let asked = Instant::now();
        while asked.elapsed() < LIMIT {
            if self.child.try_wait()?.is_some() {
                return Ok(());
            }
            thread::sleep(POLL);
        }
        self.kill()?;
        bail!("{} did not stop within {LIMIT:?} and was killed", self.name)
    }

    /// Kills it, as a crash does.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already; there is nobody to tell.
        let _ended = self.kill();
    }
}

/// The last lines of a log.
pub fn tail(log: &Path, lines: usize) -> String {
    let bytes = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// Where a server keeps its log, inside its home.
pub(crate) fn log_in(home: &Path) -> PathBuf {
    home.join("log")
}
