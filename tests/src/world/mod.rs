//! A database, a stream and a subject prefix of one test's own, and the processes that work on them.

mod process;
mod state;

use std::{
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use async_nats::jetstream;
use sqlx::{
    PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tempfile::TempDir;
use tokio::time::sleep;

pub use process::{Launch, Output, Process};
pub use state::{Lane, Outcome};

use crate::{Servers, invariants, servers::tail};

/// How long [`World::eventually`] waits.
const PATIENCE: Duration = Duration::from_mins(2);
const POLL: Duration = Duration::from_millis(10);
/// Lines of each process's log that a failed test shows.
const SHOWN: usize = 40;

static NUMBER: AtomicU64 = AtomicU64::new(1);

pub(crate) fn number() -> u64 {
    NUMBER.fetch_add(1, Ordering::Relaxed)
}

/// One test's world.
///
/// When it goes, it prints the end of the log of every process that it started; the test harness shows that for
/// failed tests only.
#[derive(Debug)]
pub struct World {
    /// The servers that it lives on.
    pub servers: Servers,
    /// Its database, with the planner and timeouts of an ordinary client.
    pub pool: PgPool,
    /// A client of its NATS.
    pub nats: async_nats::Client,
    /// The name of its stream, which the first process makes.
    pub stream: String,
    /// What its subjects begin with.
    pub prefix: String,
    database: String,
    directory: TempDir,
    logs: Mutex<Vec<(String, PathBuf)>>,
}

impl World {
    /// A world on the servers that all tests share.
    pub async fn new() -> Result<Self> {
        Self::on(Servers::shared().await?).await
    }

    /// A world on given servers: private ones, for tests that restart, kill or wipe them.
    pub async fn on(servers: Servers) -> Result<Self> {
        let number = number();
        let database = format!("world_{number}");
        servers.create_database(&database).await.context("cannot make the world's database")?;
        let url = format!("{}/{database}", servers.addresses().postgres);
        let options: PgConnectOptions = url.parse()?;
        let pool =
            PgPoolOptions::new().max_connections(8).connect_with(options.application_name("test")).await?;
        let nats = async_nats::ConnectOptions::new()
            .retry_on_initial_connect()
            .connect(&servers.addresses().nats)
            .await?;
        // With the servers' data, so that it goes with them when this process is killed.
        let directory = tempfile::Builder::new().prefix("world-").tempdir_in(&servers.addresses().home)?;
        Ok(Self {
            servers,
            pool,
            nats,
            stream: format!("WORLD_{number}"),
            prefix: format!("world{number}.turns"),
            database,
            directory,
            logs: Mutex::default(),
        })
    }

    /// The address of its database.
    pub fn database_url(&self) -> String {
        format!("{}/{}", self.servers.addresses().postgres, self.database)
    }

    /// The address of its database through `PgBouncer`, if its servers have one. Statements are not kept: the next
    /// transaction may have another session.
    pub fn pooled_url(&self) -> Result<String> {
        let pooler =
            self.servers.addresses().pgbouncer.as_ref().context("these servers have no PgBouncer")?;
        Ok(format!("{pooler}/{}?statement-cache-capacity=0", self.database))
    }

    /// Its `JetStream`.
    pub fn jetstream(&self) -> jetstream::Context {
        jetstream::new(self.nats.clone())
    }

    /// A relay, to be started.
    pub fn relay(&self) -> Launch<'_> {
        let name = format!("relay-{}", number());
        self.program("relay").arg("run").env("RELAY_NAME", &name).named(name)
    }

    /// A consumer with the echo handler, to be started.
    pub fn consumer(&self) -> Launch<'_> {
        let name = format!("consumer-{}", number());
        self.program("consumer").arg("run").env("HANDLER", "echo").env("CONSUMER_NAME", &name).named(name)
    }

    /// A command of a binary in this world, such as `relay`, without arguments yet.
    pub fn program(&self, binary: &str) -> Launch<'_> {
        Launch::new(self, binary)
            .env("DATABASE_URL", self.database_url())
            .env("NATS_URL", &self.servers.addresses().nats)
            .env("STREAM", &self.stream)
            .env("SUBJECT_PREFIX", &self.prefix)
            .env("ADMIN_ADDR", "127.0.0.1:0")
            .env("LOG_FORMAT", "json")
    }

    /// Makes a conversation of the agent `default`.
    pub async fn create_conversation(&self, id: &str) -> Result<()> {
        sqlx::query("select create_conversation($1)").bind(id).execute(&self.pool).await?;
        Ok(())
    }

    /// Submits a message of its own transaction, and returns its id.
    pub async fn submit(&self, conversation: &str, content: &str) -> Result<String> {
        let message = format!("message-{}", number());
        sqlx::query("select submit_message($1, $2, $3)")
            .bind(&message)
            .bind(conversation)
            .bind(content)
            .execute(&self.pool)
            .await?;
        Ok(message)
    }

    /// Changes the policy of every agent: the assignments of an `update`, such as `debounce = '0'`.
    pub async fn policy(&self, assignments: &str) -> Result<()> {
        let update = format!("update agents set {assignments}");
        sqlx::query(sqlx::AssertSqlSafe(update)).execute(&self.pool).await?;
        Ok(())
    }

    /// Waits until `condition` is true; a condition that fails is not true yet.
    pub async fn eventually(&self, what: &str, condition: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
        self.eventually_within(PATIENCE, what, condition).await
    }

    /// The same with a patience of one's own.
    pub async fn eventually_within(
        &self,
        patience: Duration,
        what: &str,
        mut condition: impl AsyncFnMut() -> Result<bool>,
    ) -> Result<()> {
        let started = Instant::now();
        loop {
            let found = condition().await;
            if let Ok(true) = found {
                return Ok(());
            }
            if started.elapsed() > patience {
                let error = found.err().map(|error| format!(" (last error: {error:#})")).unwrap_or_default();
                bail!(
                    "waited {patience:?} in vain until {what}{error}\n{}",
                    state::describe(&self.pool).await
                );
            }
            sleep(POLL).await;
        }
    }

    /// Waits until a conversation has `count` outcomes, and returns them.
    pub async fn answered(&self, conversation: &str, count: usize) -> Result<Vec<Outcome>> {
        let what = format!("{conversation} has {count} outcomes");
        self.eventually(&what, async || Ok(self.outcomes(conversation).await?.len() >= count)).await?;
        self.outcomes(conversation).await
    }

    /// Waits until nothing is left to do.
    pub async fn quiet(&self) -> Result<()> {
        self.eventually("nothing is left to do", async || state::is_quiet(&self.pool).await).await
    }

    /// Waits until nothing is left to do, then fails unless every promise was kept.
    pub async fn settled(&self) -> Result<()> {
        self.quiet().await?;
        invariants::assert_invariants(&self.pool).await
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for (name, log) in self.logs.get_mut().unwrap_or_else(PoisonError::into_inner).iter() {
            print_log(name, &tail(log, SHOWN));
        }
    }
}

/// Captured by the test harness, which shows it for failed tests only.
#[expect(clippy::print_stdout, reason = "the harness captures what the print macros write, and nothing else")]
fn print_log(name: &str, text: &str) {
    println!("--- {name} ---\n{text}");
}
