//! Relays and consumers as real processes, which can be harmed in every way that production knows.

use std::{
    fs::File,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{LazyLock, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{sleep, timeout},
};

use super::{PATIENCE, POLL, World};
use crate::{programs, servers::tail};

/// A process that is about to be started.
#[derive(Debug)]
#[must_use]
pub struct Launch<'a> {
    world: &'a World,
    binary: String,
    name: String,
    args: Vec<String>,
    env: Vec<(String, String)>,
}

/// A running process. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Mutex<Child>,
    log: PathBuf,
}

/// What a command that ended by itself left.
#[derive(Debug)]
pub struct Output {
    /// Its exit code; `None`: a signal ended it.
    pub code: Option<i32>,
    /// What it printed.
    pub stdout: String,
    /// What it reported.
    pub stderr: String,
}

impl<'a> Launch<'a> {
    pub(super) fn new(world: &'a World, binary: &str) -> Self {
        Self { world, binary: binary.into(), name: binary.into(), args: vec![], env: vec![] }
    }

    pub(super) fn named(mut self, name: String) -> Self {
        self.name = name;
        self
    }

    /// Adds an argument.
    pub fn arg(mut self, arg: impl Into<String>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Adds arguments.
    pub fn args<T: Into<String>>(mut self, args: impl IntoIterator<Item = T>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets a variable, over the world's own.
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Sets its failpoints, such as `after_claim=kill*1`.
    pub fn failpoints(self, failpoints: &str) -> Self {
        self.env("FAILPOINTS", failpoints)
    }

    /// Reaches Postgres through `PgBouncer`.
    pub fn pooled(self) -> Result<Self> {
        let url = self.world.pooled_url()?;
        Ok(self.env("DATABASE_URL", url))
    }

    fn command(&self) -> Result<Command> {
        let mut command = programs::subordinate(&programs::workspace_binary(&self.binary)?, "KILL");
        // Nothing of this shell's reaches it but what finds programs and explains failures.
        let kept = ["PATH", "HOME", "RUST_LOG", "RUST_BACKTRACE"];
        let kept = kept.into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        command.args(&self.args).env_clear().envs(kept).envs(self.env.iter().cloned());
        Ok(command)
    }

    /// Starts it.
    pub fn start(self) -> Result<Process> {
        let mut command = self.command()?;
        let log = self.world.directory.path().join(format!("{}.log", super::number()));
        let output = File::create(&log)?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = from_lasting_thread(command)?;
        let logs = &self.world.logs;
        logs.lock().unwrap_or_else(PoisonError::into_inner).push((self.name.clone(), log.clone()));
        Ok(Process { name: self.name, child: Mutex::new(child), log })
    }

    /// Runs it to its end with `input`, and returns what it left.
    pub async fn output(self, input: &str) -> Result<Output> {
        let mut command = self.command()?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = from_lasting_thread(command)?;
        let (input, stdin) = (input.to_owned(), child.stdin.take());
        // A command that ends without reading its input breaks the pipe, as it may.
        let _writer = thread::spawn(move || {
            stdin.map(|mut pipe| std::io::Write::write_all(&mut pipe, input.as_bytes()))
        });
        let pid = Pid::from_child(&child);
        let ended = tokio::task::spawn_blocking(move || child.wait_with_output());
        let Ok(ended) = timeout(PATIENCE, ended).await else {
            kill_process(pid, Signal::KILL)?;
            bail!("{} {} did not end within {PATIENCE:?}", self.name, self.args.join(" "));
        };
        let ended = ended??;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok(Output { code: ended.status.code(), stdout: text(ended.stdout), stderr: text(ended.stderr) })
    }
}

impl Process {
    /// Its name, the one that it was given as a relay's or consumer's.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.child().id()
    }

    /// Everything that it has printed.
    pub fn log(&self) -> Result<String> {
        Ok(std::fs::read_to_string(&self.log)?)
    }

    /// Kills it, as a crash does.
    pub fn kill(&self) -> Result<()> {
        let mut child = self.child();
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Freezes it, as a stalled machine does.
    pub fn freeze(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// Lets it go on.
    pub fn thaw(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// Asks it to shut down.
    pub fn terminate(&self) -> Result<()> {
        self.signal(Signal::TERM)
    }

    /// Asks it to shut down, waits for it, and fails unless it exits with 0.
    pub async fn shut_down(&self) -> Result<()> {
        self.terminate()?;
        match self.ended().await?.code() {
            Some(0) => Ok(()),
            code => bail!("{} exited with {code:?}:\n{}", self.name, tail(&self.log, 20)),
        }
    }

    /// Waits until it has ended.
    pub async fn ended(&self) -> Result<ExitStatus> {
        let asked = Instant::now();
        while asked.elapsed() < PATIENCE {
            if let Some(status) = self.child().try_wait()? {
                return Ok(status);
            }
            sleep(POLL).await;
        }
        bail!("{} did not end within {PATIENCE:?}", self.name)
    }

    /// Waits until it is frozen, for failpoints that freeze it.
    pub async fn frozen(&self) -> Result<()> {
        let status = format!("/proc/{}/stat", self.pid());
        let asked = Instant::now();
        while asked.elapsed() < PATIENCE {
            // The state follows the name, which is the only field in parentheses.
            let text = std::fs::read_to_string(&status).context("it has ended")?;
            if text.rsplit(") ").next().is_some_and(|fields| fields.starts_with('T')) {
                return Ok(());
            }
            sleep(POLL).await;
        }
        bail!("{} was not frozen within {PATIENCE:?}", self.name)
    }

    /// Waits until it says that it is ready.
    pub async fn ready(&self) -> Result<()> {
        let asked = Instant::now();
        let mut answer = Ok((0, String::new()));
        while asked.elapsed() < PATIENCE {
            answer = self.get("/readyz").await;
            if matches!(answer, Ok((200, _))) {
                return Ok(());
            }
            if let Some(status) = self.child().try_wait()? {
                bail!("{} ended with {status}:\n{}", self.name, tail(&self.log, 20));
            }
            sleep(POLL).await;
        }
        bail!("{} was not ready within {PATIENCE:?}: {answer:?}", self.name)
    }

    /// Asks its admin server, and returns status and body.
    pub async fn get(&self, path: &str) -> Result<(u16, String)> {
        let exchange = async {
            let mut stream = TcpStream::connect(self.admin_address()?).await?;
            stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes()).await?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await?;
            anyhow::Ok(answer)
        };
        let answer =
            timeout(Duration::from_secs(5), exchange).await.context("the admin server does not answer")??;
        let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
        let status = head.split(' ').nth(1).context("no status")?.parse()?;
        Ok((status, body.to_owned()))
    }

    /// The address that its log names: the system chose the port.
    fn admin_address(&self) -> Result<String> {
        let log = self.log()?;
        let entries = log.lines().filter(|line| line.contains("admin server listens"));
        let mut entries = entries.filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let entry = entries.next().context("it has no admin server yet")?;
        let address = entry.get("addr").or_else(|| entry.get("fields")?.get("addr"));
        Ok(address.and_then(|addr| addr.as_str()).context("its log names no address")?.to_owned())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.child()), signal)?)
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already; there is nobody to tell.
        let _ended = self.kill();
    }
}

/// Starts a process from a thread that lives as long as this process: the kernel ends a child with the thread that
/// started it, and a runtime's threads come and go.
fn from_lasting_thread(command: Command) -> Result<Child> {
    type Request = (Command, mpsc::Sender<std::io::Result<Child>>);
    static REQUESTS: LazyLock<Mutex<mpsc::Sender<Request>>> = LazyLock::new(|| {
        let (requests, queue) = mpsc::channel::<Request>();
        thread::spawn(move || {
            for (mut command, reply) in queue {
                let _nobody_waits = reply.send(command.spawn());
            }
        });
        Mutex::new(requests)
    });
    let (reply, started) = mpsc::channel();
    REQUESTS.lock().unwrap_or_else(PoisonError::into_inner).send((command, reply))?;
    started.recv()?.context("cannot start it")
}
