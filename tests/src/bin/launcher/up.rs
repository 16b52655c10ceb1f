//! The whole project on this machine: durable servers, one relay and one consumer, in one directory.

use std::{
    fs::{self, File},
    io::{Read, Write},
    path::Path,
    process::Stdio,
    sync::mpsc::{Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use shared::{
    pool,
    schema::{self, SchemaError},
    settings::DatabaseSettings,
};
use sqlx::{Connection, PgConnection};
use tests::{
    programs,
    servers::{Addresses, Host, Spec},
};

use tokio::runtime::Runtime;

use crate::{
    events::{self, Event},
    program::{Deaths, Program, command, say},
};

const DATABASE: &str = "outbox";
/// How long `down` waits for `up` to end.
const PATIENCE: Duration = Duration::from_mins(1);
/// How often `up` looks whether its processes live.
const WATCH: Duration = Duration::from_millis(250);

/// Starts everything and keeps it until a signal, or until a process dies again and again.
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
    migrate(&environment)?;
    let relay = Program::start(home, "relay", &["run"], &environment)?;
    let consumer = Program::start(
        home,
        "consumer",
        &["run", "--handler", "echo", "--echo-delay", "500ms"],
        &environment,
    )?;
    let exports: Vec<String> =
        environment.iter().map(|(name, value)| format!("export {name}='{value}'")).collect();
    fs::write(home.join("env"), exports.join("\n"))?;

    let mut programs = [relay, consumer];
    let ended = watch(&mut host, &mut programs, &events);
    fs::remove_file(home.join("env"))?;
    // The consumer first: what it gives back, the relay still publishes.
    for program in programs.into_iter().rev() {
        program.stop()?;
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

/// The schema first and by itself: data that an earlier state of this repository has left needs words of its own. Then as
/// everywhere, the stream included.
fn migrate(environment: &[(&'static str, String)]) -> Result<()> {
    let url = environment.iter().find(|(name, _)| *name == "DATABASE_URL").map(|(_, url)| url.clone());
    let database = DatabaseSettings { url: url.unwrap_or_default() };
    match runtime()?.block_on(async {
        let pool = pool::connect(&database, "launcher", 1).await?;
        anyhow::Ok(schema::migrate(&pool).await)
    })? {
        Err(SchemaError::Edited(_) | SchemaError::Newer { .. }) => bail!(
            "The data of the last ./dev up belongs to another state of the migrations than this one.\n\
             ./dev reset removes it, and nothing else; then ./dev up starts afresh."
        ),
        migrated => migrated?,
    }
    let status = command("relay", environment)?.arg("migrate").stdout(Stdio::null()).status()?;
    if !status.success() {
        bail!("relay migrate failed");
    }
    Ok(())
}

fn runtime() -> Result<Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

fn create_database(addresses: &Addresses) -> Result<()> {
    runtime()?.block_on(async {
        let mut admin = PgConnection::connect(&format!("{}/postgres", addresses.postgres)).await?;
        let exists = sqlx::query_scalar("select exists (select from pg_database where datname = $1)");
        if !exists.bind(DATABASE).fetch_one(&mut admin).await? {
            sqlx::raw_sql("create database outbox").execute(&mut admin).await?;
        }
        Ok(())
    })
}

/// Waits for a signal, and starts again what dies before it; fails when something dies too often.
fn watch(host: &mut Host, programs: &mut [Program], events: &Receiver<Event>) -> Result<()> {
    let mut deaths = Deaths::default();
    while let Err(RecvTimeoutError::Timeout) = events.recv_timeout(WATCH) {
        for end in host.revive()? {
            if deaths.count() {
                bail!("{end}, and servers have died too often");
            }
            say(&format!("{end}; it runs again"));
        }
        programs.iter_mut().try_for_each(Program::look_after)?;
    }
    Ok(())
}
