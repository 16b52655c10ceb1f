//! The consumer: a source of begun turns, the runs, their leases and their commits, put together and taken apart in order.

use std::{sync::Arc, time::Duration};

use shared::{
    admin::Readiness,
    broker::Broker,
    ids::AgentName,
    policy::{self, Policies},
    pool,
    process::Shutdown,
    recovery,
    settings::{ConsumerSettings, DatabaseSettings, Source},
    sqlstate,
};
use sqlx::PgPool;
use tokio::{
    sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, OwnedSemaphorePermit, RwLock, Semaphore, watch},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    begin::Begun,
    finisher::Finisher,
    handler::{AnyHandler, TurnHandler},
    heartbeat::{self, Heartbeat},
    leases::{Leases, Term},
    nats_source, postgres_source,
    run::Runner,
};

/// A busy consumer waits this long for half of its slots, so that one begin takes many turns.
const GATHER: Duration = Duration::from_millis(10);
/// How long runs may take to settle after they were told to leave.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(10);

/// What a consumer works with.
#[derive(Debug)]
pub struct Resources {
    /// Connections of the pipeline ([`shared::pool::connect`]); 8 serve a busy consumer.
    pub pool: PgPool,
    /// Where the heartbeat makes a connection of its own.
    pub database: DatabaseSettings,
    /// The connected broker; not needed with `--source postgres`.
    pub broker: Option<Broker>,
    /// Where the consumer says how it is.
    pub readiness: Readiness,
}

/// Why a consumer ended.
#[derive(Debug, thiserror::Error)]
pub enum ConsumerError {
    /// Policy could not be read at the start.
    #[error("cannot read the agents' policy: {}", sqlstate::safe_text(.0))]
    Policy(#[source] sqlx::Error),
    /// There is no such agent.
    #[error("there is no agent {0}; `relay agent set {0}` makes it")]
    UnknownAgent(AgentName),
    /// `--source nats` without a broker.
    #[error("the source is nats, but there is no connection to NATS")]
    NoBroker,
    /// The heartbeat's connection options are no good.
    #[error(transparent)]
    Connect(#[from] pool::ConnectError),
    /// The heartbeat's thread could not be started.
    #[error("cannot start the heartbeat")]
    Thread(#[source] std::io::Error),
    /// The heartbeat ended by itself: without it every lease would be lost.
    #[error("the heartbeat ended")]
    HeartbeatEnded,
}

/// What the sources and the runs share.
pub(crate) struct Pipeline {
    pub(crate) pool: PgPool,
    pub(crate) settings: ConsumerSettings,
    pub(crate) readiness: Readiness,
    pub(crate) stop: CancellationToken,
    pub(crate) slots: Arc<Semaphore>,
    pub(crate) policies: watch::Receiver<Policies>,
    /// Shared by runs, taken whole by one that may kill the process: it runs alone, and takes no innocent turn with it.
    company: Arc<RwLock<()>>,
    /// Taken by the one suspect that is begun, from its begin on: while it waits to run alone, nobody else is begun.
    suspect: Arc<Semaphore>,
    leases: Leases,
    runner: Arc<Runner>,
    runs: TaskTracker,
    /// Fires when nobody waits for the runs any more: their leases will expire.
    left_behind: CancellationToken,
}

/// Runs turns with `handler` until told to stop; then lets what runs end, and gives back the rest at the cut.
///
/// Faults of Postgres and NATS at run time never end it: they pause it, and readiness says why.
pub async fn run<H: TurnHandler>(
    resources: Resources,
    settings: ConsumerSettings,
    handler: H,
    shutdown: Shutdown,
) -> Result<(), ConsumerError> {
    run_any(resources, settings, Arc::new(handler), shutdown).await
}

async fn run_any(
    resources: Resources,
    settings: ConsumerSettings,
    handler: Arc<dyn AnyHandler>,
    shutdown: Shutdown,
) -> Result<(), ConsumerError> {
    let Resources { pool, database, broker, readiness } = resources;
    readiness.register("postgres");
    if settings.source == Source::Nats {
        readiness.register("broker");
    }
    let known = policy::read(&pool).await.map_err(ConsumerError::Policy)?;
    if !known.contains_key(&settings.agent) {
        return Err(ConsumerError::UnknownAgent(settings.agent));
    }
    readiness.set_ready("postgres");
    let (policies, watched) = watch::channel(known);
    let background = CancellationToken::new();
    let refreshing =
        tokio::spawn(policy::refresh(pool.clone(), policies, readiness.clone(), background.clone()));
    if settings.is_named {
        take_back(&pool, &settings.name).await;
    }
    let leases = Leases::default();
    let heartbeat = Heartbeat {
        options: pool::options(&database, &format!("{} heartbeat", settings.name))?,
        leases: leases.clone(),
        policies: watched.clone(),
        agent: settings.agent.clone(),
        stop: background.clone(),
    };
    let mut heartbeat = heartbeat.spawn().map_err(ConsumerError::Thread)?;
    let commits = TaskTracker::new();
    let finisher = Finisher::start(&pool, settings.concurrency, &commits);
    let pipeline = Pipeline {
        runner: Arc::new(Runner { handler, pool: pool.clone(), finisher }),
        slots: Arc::new(Semaphore::new(settings.concurrency)),
        company: Arc::default(),
        suspect: Arc::new(Semaphore::new(1)),
        runs: TaskTracker::new(),
        left_behind: CancellationToken::new(),
        stop: shutdown.stop.clone(),
        policies: watched,
        pool,
        settings,
        readiness,
        leases,
    };
    let served = tokio::select! {
        served = pipeline.serve(broker.as_ref()) => served,
        _ = &mut heartbeat => Err(ConsumerError::HeartbeatEnded),
    };
    // Without a heartbeat no lease lasts: then nothing is waited for.
    let patience = if served.is_ok() { shutdown.cut } else { CancellationToken::new() };
    if served.is_err() {
        patience.cancel();
    }
    pipeline.drain(&patience).await;
    commits.close();
    commits.wait().await;
    background.cancel();
    let _ = refreshing.await;
    let _ = heartbeat.await;
    if let Some(broker) = broker {
        broker.close().await;
    }
    served
}

/// Takes back what a former process of this name left. Only under a name that somebody has chosen: a made-up one may be
/// another's, whose runs would be lost by it.
async fn take_back(pool: &PgPool, name: &str) {
    match recovery::take_back(pool, name).await {
        Ok(0) => {}
        Ok(runs) => tracing::info!(runs, "took back what a former process left"),
        Err(error) => {
            tracing::warn!(
                error = sqlstate::safe_text(&error),
                "what a former process left waits for its leases"
            );
        }
    }
}

impl Pipeline {
    async fn serve(&self, broker: Option<&Broker>) -> Result<(), ConsumerError> {
        match (self.settings.source, broker) {
            (Source::Postgres, _) => postgres_source::serve(self).await,
            (Source::Nats, Some(broker)) => Box::pin(nats_source::serve(self, broker.clone())).await,
            (Source::Nats, None) => return Err(ConsumerError::NoBroker),
        }
        Ok(())
    }

    /// Waits for a free slot and takes what else is free, up to `most`. `None`: told to stop.
    pub(crate) async fn free_slots(&self, most: usize) -> Option<OwnedSemaphorePermit> {
        let first = self.stop.run_until_cancelled(self.slots.clone().acquire_owned()).await?;
        let mut slots = first.ok()?;
        // While a suspect runs or waits to run alone, other consumers are the better place for new turns.
        drop(self.stop.run_until_cancelled(self.suspect.acquire()).await?);
        let half = (self.settings.concurrency / 2).min(most).saturating_sub(1);
        if self.slots.available_permits() < half {
            let half = u32::try_from(half).unwrap_or(u32::MAX);
            let gathered = tokio::time::timeout(GATHER, self.slots.clone().acquire_many_owned(half)).await;
            if let Ok(Ok(gathered)) = gathered {
                slots.merge(gathered);
            }
        }
        let more = self.slots.available_permits().min(most.saturating_sub(slots.num_permits()));
        let more = u32::try_from(more).unwrap_or(u32::MAX);
        if let Ok(rest) = self.slots.clone().try_acquire_many_owned(more) {
            slots.merge(rest);
        }
        Some(slots)
    }

    /// The term of leases that are taken from now on.
    pub(crate) fn term(&self) -> Term {
        let lease = heartbeat::lease_of(&self.policies.borrow(), &self.settings.agent);
        Term { since: Instant::now(), lease }
    }

    /// Starts begun runs, one slot each. `term`: that of their leases.
    pub(crate) fn start(&self, mut begun: Vec<Begun>, slots: &mut OwnedSemaphorePermit, term: Term) {
        let timeout = self.policies.borrow().get(&self.settings.agent).map(|policy| policy.turn_timeout);
        let timeout = timeout.unwrap_or(Duration::from_mins(10));
        // Whoever is beyond suspicion has company at once, so that a suspect waits for all who were begun with it.
        begun.sort_by_key(|run| run.suspect);
        for begun in begun {
            let beside = if begun.suspect { None } else { Company::others_now(&self.company) };
            let suspect = begun.suspect.then(|| self.suspect.clone().try_acquire_owned());
            let slot = slots.split(1);
            let lease = self.leases.hold(begun.conversation_id.clone(), begun.run_id, term);
            let (runner, company) = (self.runner.clone(), self.company.clone());
            let left_behind = self.left_behind.clone();
            let run = async move {
                lease.stands().await;
                // Stopped while it waits for its turn to start, a run never starts.
                let company = tokio::select! {
                    biased;
                    () = lease.stop.token().cancelled() => None,
                    company = Company::of(begun.suspect, company, beside) => Some(company),
                };
                runner.run(begun, lease, timeout).await;
                // In this order: whoever is begun from now on finds no suspect.
                drop((company, suspect, slot));
            };
            self.runs.spawn(async move { left_behind.run_until_cancelled(run).await });
        }
    }

    /// Lets what runs end; at the cut, gives the rest back.
    async fn drain(self, cut: &CancellationToken) {
        self.runs.close();
        if self.runs.is_empty() {
            return;
        }
        tracing::info!(running = self.runs.len(), "letting what runs end");
        if cut.run_until_cancelled(self.runs.wait()).await.is_none() {
            tracing::warn!(running = self.runs.len(), "giving back what still runs");
            self.leases.leave();
            if tokio::time::timeout(LEAVE_TIMEOUT, self.runs.wait()).await.is_err() {
                tracing::error!(running = self.runs.len(), "left runs behind; their leases will expire");
                self.left_behind.cancel();
                self.runs.wait().await;
            }
        }
    }
}

/// Who may run beside a run, for as long as this is held.
enum Company {
    Nobody { _guard: OwnedRwLockWriteGuard<()> },
    Others { _guard: OwnedRwLockReadGuard<()> },
}

impl Company {
    /// Among others, where nobody runs or waits to run alone.
    fn others_now(company: &Arc<RwLock<()>>) -> Option<Self> {
        company.clone().try_read_owned().ok().map(|guard| Self::Others { _guard: guard })
    }

    async fn of(suspect: bool, company: Arc<RwLock<()>>, already: Option<Self>) -> Self {
        if let Some(company) = already {
            company
        } else if suspect {
            Self::Nobody { _guard: company.write_owned().await }
        } else {
            Self::Others { _guard: company.read_owned().await }
        }
    }
}
