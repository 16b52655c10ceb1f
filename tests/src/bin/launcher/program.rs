//! A relay or a consumer that is started again when it dies, as whoever runs them for real would have it: killing one is how
//! people try what recovery does. One that dies again and again is not.

use std::{
    collections::VecDeque,
    fs::File,
    io::Write,
    net::TcpStream,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use rustix::process::Signal;
use tests::{
    programs,
    servers::{Daemon, Port, tail},
};

/// Deaths within [`WHILE`] after which nothing is started again.
const DEATHS: usize = 5;
const WHILE: Duration = Duration::from_mins(1);
/// Lines of a log that say why.
const LINES: usize = 20;

/// What is said when something died.
pub(crate) fn say(what: &str) {
    // Nobody is left to tell when standard error is closed.
    let _told = writeln!(std::io::stderr(), "{what}");
}

/// The last deaths.
#[derive(Debug, Default)]
pub(crate) struct Deaths(VecDeque<Instant>);

impl Deaths {
    /// Counts one; true: that was one too many.
    pub(crate) fn count(&mut self) -> bool {
        let now = Instant::now();
        self.0.push_back(now);
        while self.0.front().is_some_and(|death| now.duration_since(*death) > WHILE) {
            self.0.pop_front();
        }
        self.0.len() >= DEATHS
    }
}

/// A program that is to run.
pub(crate) struct Program {
    name: &'static str,
    args: &'static [&'static str],
    environment: Vec<(&'static str, String)>,
    log: PathBuf,
    daemon: Option<Daemon>,
    deaths: Deaths,
}

/// A binary of this workspace, with these variables.
pub(crate) fn command(name: &str, environment: &[(&'static str, String)]) -> Result<Command> {
    let mut command = programs::subordinate(&programs::workspace_binary(name)?, "TERM");
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    Ok(command)
}

impl Program {
    /// Starts it.
    pub(crate) fn start(
        home: &Path,
        name: &'static str,
        args: &'static [&'static str],
        environment: &[(&'static str, String)],
    ) -> Result<Self> {
        let log = home.join(name).with_extension("log");
        let environment = environment.to_vec();
        let mut program = Self { name, args, environment, log, daemon: None, deaths: Deaths::default() };
        program.daemon = Some(program.run()?);
        Ok(program)
    }

    fn run(&self) -> Result<Daemon> {
        let port = Port::claim()?.number();
        let mut command = command(self.name, &self.environment)?;
        command.args(self.args).env("ADMIN_ADDR", format!("127.0.0.1:{port}"));
        Daemon::start(self.name, command, &self.log, |_| TcpStream::connect(("127.0.0.1", port)).is_ok())
    }

    /// Starts it again where it has died.
    ///
    /// # Errors
    ///
    /// When it has died too often.
    pub(crate) fn look_after(&mut self) -> Result<()> {
        let end = match &mut self.daemon {
            Some(daemon) => daemon.ended()?,
            None => match self.run() {
                Ok(daemon) => {
                    say(&format!("{} runs again", self.name));
                    self.daemon = Some(daemon);
                    None
                }
                Err(error) => error.to_string().lines().next().map(str::to_owned),
            },
        };
        let Some(end) = end else { return Ok(()) };
        self.daemon = None;
        self.note(&end);
        if self.deaths.count() {
            bail!(
                "{end}, the {DEATHS}th time within {} s. Its log ends with:\n\n{}\n\nAll of it: ./dev logs",
                WHILE.as_secs(),
                tail(&self.log, LINES)
            );
        }
        say(&format!("{end}; it is started again"));
        Ok(())
    }

    /// Its log cannot tell of its own death.
    fn note(&self, end: &str) {
        let log = File::options().append(true).open(&self.log);
        // The log is not what matters here.
        let _noted = log.and_then(|mut log| writeln!(log, "launcher: {end}"));
    }

    /// Asks it to stop, where it runs.
    pub(crate) fn stop(self) -> Result<()> {
        self.daemon.map_or(Ok(()), |daemon| daemon.stop(Signal::TERM))
    }
}
