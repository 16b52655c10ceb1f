//! What `./dev up` does while people try things on it.

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::{Child, Command, Output},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{Connection, PgConnection};
use tests::programs;
use tokio::time::sleep;

/// How long anything here may take.
const PATIENCE: Duration = Duration::from_mins(1);

/// A launcher that runs everything in one directory. Dropping it ends it.
struct Up {
    child: Child,
    home: PathBuf,
}

async fn until(what: &str, mut is_so: impl FnMut() -> bool) -> Result<()> {
    let started = Instant::now();
    while !is_so() {
        ensure!(started.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

impl Up {
    /// Starts it, and returns once everything runs or it has ended.
    async fn start(home: &Path) -> Result<Self> {
        let mut command = programs::subordinate(&programs::workspace_binary("launcher")?, "TERM");
        let child = command.arg("up").arg(home).stderr(File::create(home.join("said"))?).spawn()?;
        let mut up = Self { child, home: home.to_owned() };
        let env = up.home.join("env");
        until("it runs", || env.exists() || up.has_ended()).await?;
        Ok(up)
    }

    fn has_ended(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|ended| ended.is_some())
    }

    /// What it has told the terminal.
    fn said(&self) -> Result<String> {
        Ok(std::fs::read_to_string(self.home.join("said"))?)
    }

    /// The pid of a program that it has started.
    fn pid_of(&self, name: &str) -> Option<Pid> {
        let launcher = self.child.id();
        let children = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).ok()?;
        let is_it = |pid: &&str| {
            std::fs::read_to_string(Path::new("/proc").join(pid).join("comm"))
                .is_ok_and(|comm| comm.trim() == name)
        };
        Pid::from_raw(children.split_whitespace().find(is_it)?.parse().ok()?)
    }

    /// Kills a program, and waits until it is said to run again, or nothing does any more.
    async fn kill(&mut self, name: &str) -> Result<()> {
        let again =
            [format!("{name} runs again"), format!("{name} ended with signal: 9 (SIGKILL); it runs again")];
        let revived = |up: &Self| {
            let said = up.said().unwrap_or_default();
            again.iter().map(|words| said.matches(words).count()).sum::<usize>()
        };
        let before = revived(self);
        // One that starts while its server is away ends by itself, and is started again as well.
        until(&format!("{name} runs"), || self.has_ended() || self.pid_of(name).is_some()).await?;
        if let Some(victim) = self.pid_of(name) {
            kill_process(victim, Signal::KILL)?;
        }
        until(&format!("{name} runs again"), || self.has_ended() || revived(self) > before).await
    }

    /// A connection to its database.
    async fn database(&self) -> Result<PgConnection> {
        let env = std::fs::read_to_string(self.home.join("env"))?;
        let url = env.split('\'').nth(1).context("no DATABASE_URL")?;
        Ok(PgConnection::connect(url).await?)
    }

    /// Ends it as Ctrl-C does.
    async fn end(mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::INT)?;
        until("it has ended", || self.has_ended()).await
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // It may have ended already. What it started ends with it.
        let _ended = self.child.kill();
        let _waited = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_killed_is_started_again_until_it_dies_too_often() -> Result<()> {
    let home = tempfile::tempdir()?;
    let mut up = Up::start(home.path()).await?;
    for name in ["consumer", "nats-server", "relay"] {
        up.kill(name).await?;
        ensure!(!up.has_ended(), "{}", up.said()?);
        ensure!(up.said()?.contains(&format!("{name} ended with signal: 9 (SIGKILL); it")), "{}", up.said()?);
    }
    for _ in 0..4 {
        up.kill("relay").await?;
    }
    until("it has ended", || up.has_ended()).await?;
    let said = up.said()?;
    ensure!(said.contains("the 5th time within 60 s. Its log ends with:"), "{said}");
    ensure!(said.contains("admin server listens"), "{said}");
    // Also for who looks later.
    let log = std::fs::read_to_string(home.path().join("relay.log"))?;
    ensure!(log.matches("launcher: relay ended").count() == 5, "{log}");
    ensure!(!home.path().join("env").exists());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn data_of_an_edited_migration_is_told_how_to_be_removed() -> Result<()> {
    let home = tempfile::tempdir()?;
    let up = Up::start(home.path()).await?;
    sqlx::query("update _sqlx_migrations set checksum = '\\x00' where version = 3")
        .execute(&mut up.database().await?)
        .await?;
    up.end().await?;
    let mut again = Up::start(home.path()).await?;
    until("it has ended", || again.has_ended()).await?;
    let said = again.said()?;
    ensure!(said.contains("./dev reset removes it") && said.lines().count() == 2, "{said}");
    Ok(())
}

/// Runs `./dev`, which these commands need nothing of but itself.
fn dev(args: &[&str]) -> Result<Output> {
    Ok(Command::new(programs::root().join("dev")).args(args).output()?)
}

#[test]
fn a_wrong_use_of_the_workbench_is_told_and_has_its_own_exit_code() -> Result<()> {
    for args in
        [&[][..], &["sya"], &["say"], &["say", ""], &["up", "now"], &["reset", "all"], &["prepare", "--chek"]]
    {
        let refused = dev(args)?;
        ensure!(refused.status.code() == Some(64) && !refused.stderr.is_empty(), "{args:?}: {refused:?}");
    }
    Ok(())
}
