//! The whole project on this machine: durable servers, one relay and one consumer, in one directory.

use std::{
    fs::{self, File},
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    process::Command,
    sync::mpsc::{Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{Connection, PgConnection};
use tests::{
    programs,
    servers::{Addresses, Daemon, Host, Port, Spec},
};

use crate::events::{self, Event};

const DATABASE: &str = "outbox";
/// How long `down` waits for `up` to end.
const PATIENCE: Duration = Duration::from_mins(1);
/// How often `up` looks whether its processes live.
const WATCH: Duration = Duration::from_secs(1);

/// Starts everything and keeps it until a signal, or until a process ends by itself.
///
/// The file `env` appears in `home` when all is ready, with the variables that the commands need.
pub(crate) fn up(home: &Path) -> Result<()> {
    programs::server_directory(home)?;
    let mut lock =
        File::options().create(true).truncate(false).read(true).write(true).open(home.join("lock"))?;
    if lock.try_lock().is_err() {
        bail!("It already runs here: ./dev say, ./dev status, or ./dev down.");
    }
    lock.set_len(0)?;
    write!(lock, "{}", std::process::id())?;

    let (_, events) = events::signals()?;
    let mut host = Host::start(&Spec { home: Some(home.to_owned()), durable: true, ..Spec::default() })?;
    let environment = environment(&host.addresses());
    create_database(&host.addresses())?;
    let status = program("relay", &environment)?.arg("migrate").status()?;
    if !status.success() {
        bail!("relay migrate failed");
    }
    let relay = start(home, "relay", &["run"], &environment)?;
    let consumer =
        start(home, "consumer", &["run", "--handler", "echo", "--echo-delay", "500ms"], &environment)?;
    let exports: Vec<String> =
        environment.iter().map(|(name, value)| format!("export {name}='{value}'")).collect();
    fs::write(home.join("env"), exports.join("\n"))?;

    let mut processes = [relay, consumer];
    let ended = watch(&mut processes, &events);
    fs::remove_file(home.join("env"))?;
    // The consumer first: what it gives back, the relay still publishes.
    for process in processes.into_iter().rev() {
        process.stop(Signal::TERM)?;
    }
    host.stop()?;
    ended
}

/// Ends what `up` has started in `home`.
pub(crate) fn down(home: &Path) -> Result<()> {
    let Ok(mut lock) = File::open(home.join("lock")) else { bail!("Nothing runs here.") };
    if lock.try_lock().is_ok() {
        bail!("Nothing runs here.");
    }
    let mut pid = String::new();
    lock.read_to_string(&mut pid)?;
    kill_process(Pid::from_raw(pid.parse()?).context("no pid")?, Signal::TERM)?;
    let asked = Instant::now();
    while lock.try_lock().is_err() {
        if asked.elapsed() > PATIENCE {
            bail!("It did not end within {PATIENCE:?}.");
        }
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn environment(addresses: &Addresses) -> Vec<(&'static str, String)> {
    vec![
        ("DATABASE_URL", format!("{}/{DATABASE}", addresses.postgres)),
        ("NATS_URL", addresses.nats.clone()),
        ("LAUNCHER", std::process::id().to_string()),
    ]
}

fn create_database(addresses: &Addresses) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut admin = PgConnection::connect(&format!("{}/postgres", addresses.postgres)).await?;
        let exists = sqlx::query_scalar("select exists (select from pg_database where datname = $1)");
        if !exists.bind(DATABASE).fetch_one(&mut admin).await? {
            sqlx::raw_sql("create database outbox").execute(&mut admin).await?;
        }
        Ok(())
    })
}

fn program(name: &str, environment: &[(&'static str, String)]) -> Result<Command> {
    let mut command = programs::subordinate(&programs::workspace_binary(name)?, "TERM");
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    Ok(command)
}

fn start(
    home: &Path,
    name: &'static str,
    args: &[&str],
    environment: &[(&'static str, String)],
) -> Result<Daemon> {
    let port = Port::claim()?.number();
    let mut command = program(name, environment)?;
    command.args(args).env("ADMIN_ADDR", format!("127.0.0.1:{port}"));
    let log = home.join(name).with_extension("log");
    Daemon::start(name, command, &log, |_| TcpStream::connect(("127.0.0.1", port)).is_ok())
}

/// Waits for a signal; fails when a process ends before it.
fn watch(processes: &mut [Daemon], events: &Receiver<Event>) -> Result<()> {
    while let Err(RecvTimeoutError::Timeout) = events.recv_timeout(WATCH) {
        for process in processes.iter_mut() {
            if let Some(end) = process.ended()? {
                bail!("{end}: see ./dev logs");
            }
        }
    }
    Ok(())
}
