//! The servers as tests see them: held by a guard process that ends them when this process ends, however it ends.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context, Result, anyhow};
use sqlx::{Connection, PgConnection, PgPool};
use tokio::{sync::OnceCell, task};

use crate::{
    programs,
    servers::{Addresses, Order, Server, Spec},
};

/// The database that every test's database is a copy of.
const TEMPLATE: &str = "migrated";

/// Servers under guard. The last clone to go ends them; those that are shared end with the process.
#[derive(Debug, Clone)]
pub struct Servers {
    guard: Arc<Mutex<Guard>>,
    addresses: Arc<Addresses>,
    template: Arc<OnceCell<()>>,
}

#[derive(Debug)]
struct Guard {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Servers {
    /// The servers that all tests of this process share. Whoever would harm them takes private ones.
    pub async fn shared() -> Result<Self> {
        static SHARED: OnceCell<Servers> = OnceCell::const_new();
        SHARED.get_or_try_init(|| Self::private(Spec::default())).await.cloned()
    }

    /// Servers of the caller's own.
    pub async fn private(spec: Spec) -> Result<Self> {
        task::spawn_blocking(move || {
            let mut guard = Guard::start(&spec)?;
            let addresses = Arc::new(guard.answer()?);
            Ok(Self { guard: Arc::new(Mutex::new(guard)), addresses, template: Arc::default() })
        })
        .await?
    }

    /// Where they are.
    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// The pid of the guard that holds them.
    pub fn guard_pid(&self) -> u32 {
        self.guard.lock().unwrap_or_else(PoisonError::into_inner).child.id()
    }

    /// Stops one cleanly.
    pub async fn stop(&self, server: Server) -> Result<()> {
        self.order(Order::Stop(server)).await
    }

    /// Kills one, as a crash does.
    pub async fn kill(&self, server: Server) -> Result<()> {
        self.order(Order::Kill(server)).await
    }

    /// Starts one after a stop or a kill, on the same port and data.
    pub async fn resume(&self, server: Server) -> Result<()> {
        self.order(Order::Resume(server)).await
    }

    /// Stops one cleanly and starts it again.
    pub async fn restart(&self, server: Server) -> Result<()> {
        self.stop(server).await?;
        self.resume(server).await
    }

    /// Kills NATS and starts it with an empty store.
    pub async fn wipe_nats(&self) -> Result<()> {
        self.order(Order::WipeNats).await
    }

    async fn order(&self, order: Order) -> Result<()> {
        let guard = Arc::clone(&self.guard);
        task::spawn_blocking(move || guard.lock().unwrap_or_else(PoisonError::into_inner).order(order))
            .await?
    }

    /// Makes a migrated database. The migrations run once; the rest are copies.
    pub(crate) async fn create_database(&self, name: &str) -> Result<()> {
        self.template.get_or_try_init(|| self.create_template()).await?;
        self.execute(&format!("create database \"{name}\" template \"{TEMPLATE}\"")).await
    }

    async fn create_template(&self) -> Result<()> {
        self.execute(&format!("create database \"{TEMPLATE}\"")).await?;
        let pool = PgPool::connect(&format!("{}/{TEMPLATE}", self.addresses.postgres)).await?;
        shared::schema::migrate(&pool).await?;
        // A copy is refused while anybody is connected to its template.
        pool.close().await;
        Ok(())
    }

    async fn execute(&self, sql: &str) -> Result<()> {
        let mut admin = PgConnection::connect(&format!("{}/postgres", self.addresses.postgres)).await?;
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut admin).await.with_context(|| sql.to_owned())?;
        Ok(admin.close().await?)
    }
}

impl Guard {
    fn start(spec: &Spec) -> Result<Self> {
        let mut child = Command::new(programs::workspace_binary("launcher")?)
            .arg("servers")
            .args(spec.to_args())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A terminal's Ctrl-C must not end the servers before the tests that use them.
            .process_group(0)
            .spawn()
            .context("cannot start the launcher")?;
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("the launcher has no output")?);
        Ok(Self { child, orders, answers })
    }

    fn order(&mut self, order: Order) -> Result<()> {
        let orders = self.orders.as_mut().context("the launcher has ended")?;
        writeln!(orders, "{}", serde_json::to_string(&order)?)?;
        self.answer().map(drop)
    }

    fn answer(&mut self) -> Result<Addresses> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        let reply: Result<Addresses, String> =
            serde_json::from_str(&line).context("the launcher has ended; its error stands above")?;
        reply.map_err(|error| anyhow!(error))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.orders.take());
        let _status = self.child.wait();
    }
}
