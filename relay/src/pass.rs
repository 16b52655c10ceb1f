//! The relay's pass: recover what was lost, claim what is due, hand it to the broker; sleep when there is nothing to do.

use std::{sync::Arc, time::Duration};

use shared::{
    admin::Readiness,
    backoff::Delays,
    broker::Broker,
    claim::{self, Claim, Claims},
    failpoint,
    ids::AgentName,
    policy::{self, Policies},
    process::Shutdown,
    recovery,
    settings::RelaySettings,
    sqlstate, topology,
    wake::{Look, Rest, Sleeper, Woken},
};
use sqlx::PgPool;
use tokio::{
    sync::{Semaphore, watch},
    time::Instant,
};
use tokio_util::task::TaskTracker;

use crate::{
    gate::{self, Gate},
    look_after,
    publish::Publisher,
};

/// A busy relay looks after what is in flight this often, not with every claim.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// The name of the readiness check on Postgres.
const CHECK: &str = "postgres";

/// What a relay works with.
#[derive(Debug)]
pub struct Resources {
    /// Connections of the pipeline ([`shared::pool::connect`]); at least 4.
    pub pool: PgPool,
    /// The connected broker; its stream may be missing.
    pub broker: Broker,
    /// Where the relay says how it is.
    pub readiness: Readiness,
}

/// Why a relay ended.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// Policy could not be read at the start.
    #[error("cannot read the agents' policy: {}", sqlstate::safe_text(.0))]
    Policy(#[source] sqlx::Error),
    /// The stream or a durable could not be made at the start.
    #[error("cannot set up the stream: {0}")]
    Topology(#[source] shared::broker::BrokerError),
}

/// Runs a relay until told to stop; then awaits what is in flight, or gives it back at the cut.
///
/// Faults at run time never end it: they pause it, and readiness says why. Any number of relays may run side by side.
pub async fn run(
    resources: Resources,
    settings: RelaySettings,
    shutdown: Shutdown,
) -> Result<(), RelayError> {
    let Resources { pool, broker, readiness } = resources;
    readiness.register(CHECK);
    readiness.register(gate::CHECK);
    let known = policy::read(&pool).await.map_err(RelayError::Policy)?;
    for difference in topology::ensure(&broker, &names(&known)).await.map_err(RelayError::Topology)? {
        tracing::warn!(%difference, "the broker's configuration differs");
    }
    let (policies, watched) = watch::channel(known);
    let refreshing =
        tokio::spawn(policy::refresh(pool.clone(), policies, readiness.clone(), shutdown.stop.clone()));
    let gate = Arc::new(Gate::new(readiness.clone()));
    let sleeper = Sleeper::new(pool.clone(), settings.name.clone(), settings.poll_interval);
    let mut relay = Relay {
        publisher: Publisher { pool: pool.clone(), broker, gate: gate.clone() },
        in_flight: Arc::new(Semaphore::new(settings.max_in_flight)),
        publishing: TaskTracker::new(),
        pool,
        gate,
        sleeper,
        policies: watched,
        looked_at: None,
        turn: 0,
        settings,
        readiness,
        shutdown,
    };
    relay.serve().await;
    relay.drain().await;
    let _ = refreshing.await;
    Ok(())
}

/// Why a pass failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    #[error("Postgres: {}", sqlstate::safe_text(.0))]
    Postgres(#[from] sqlx::Error),
    #[error(transparent)]
    Failpoint(#[from] failpoint::Hit),
}

fn names(policies: &Policies) -> Vec<AgentName> {
    policies.keys().cloned().collect()
}

struct Relay {
    pool: PgPool,
    publisher: Publisher,
    gate: Arc<Gate>,
    in_flight: Arc<Semaphore>,
    publishing: TaskTracker,
    sleeper: Sleeper,
    policies: watch::Receiver<Policies>,
    /// When it last looked after what is in flight and found nothing.
    looked_at: Option<Instant>,
    /// Which agent is claimed for first while some are paused.
    turn: usize,
    settings: RelaySettings,
    readiness: Readiness,
    shutdown: Shutdown,
}

/// How much a pass found to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    /// The broker takes triggers, and this was claimed or looked after.
    Looked(Look),
    /// The broker takes nothing now; look again after this.
    Closed(Duration),
}

impl Relay {
    /// Passes until told to stop. A fault of Postgres ends a pass, never the relay.
    async fn serve(&mut self) {
        let mut faults = Delays::new(Duration::from_millis(100), Duration::from_secs(5));
        let stop = self.shutdown.stop.clone();
        let mut started = false;
        // A pass is never cut in two: what it has claimed it publishes, told to stop or not.
        while !stop.is_cancelled() {
            let passed = match self.pass(&mut started).await {
                Ok(found) => self.rest(found).await,
                Err(fault) => Err(fault),
            };
            match passed {
                Ok(()) => {
                    faults.reset();
                    self.readiness.set_ready(CHECK);
                }
                Err(fault) => {
                    let pause = faults.next();
                    tracing::warn!(%fault, pause_ms = pause.as_millis(), "a pass failed");
                    self.readiness.set_not_ready(CHECK, fault);
                    stop.run_until_cancelled(tokio::time::sleep(pause)).await;
                }
            }
        }
    }

    async fn pass(&mut self, started: &mut bool) -> Result<Found, Fault> {
        let look = self.looked_at.is_none_or(|looked_at| looked_at.elapsed() >= LOOK_INTERVAL);
        let expired = if look { recovery::recover_expired(&self.pool).await? } else { 0 };
        self.make_durables_of_new_agents();
        let agents = names(&self.policies.borrow());
        if let Some(pause) = self.gate.try_open(&self.publisher.broker, &agents).await {
            return Ok(Found::Closed(pause));
        }
        if !*started {
            let asked = look_after::ask_for_all(&self.publisher, &self.shutdown.stop).await?;
            tracing::info!(asked, "looked at what was in flight");
            *started = true;
        }
        let claimed = self.claim().await?;
        let overdue = if look { look_after::ask_for_overdue(&self.publisher).await? } else { 0 };
        if look {
            // A full page may have more behind it.
            self.looked_at = (expired + overdue == 0).then(Instant::now);
        }
        Ok(Found::Looked(match claimed {
            _ if claimed >= self.batch() as usize || expired + overdue > 0 => Look::Full,
            0 => Look::Nothing,
            _ => Look::Some,
        }))
    }

    /// Lanes that one claim takes: never more than may be in flight.
    fn batch(&self) -> u32 {
        self.settings.batch.min(u32::try_from(self.settings.max_in_flight).unwrap_or(u32::MAX))
    }

    /// Claims one batch and starts to publish it; never more than may be in flight. Returns how many lanes were due.
    async fn claim(&mut self) -> Result<usize, Fault> {
        let batch = self.batch();
        let room = self.in_flight.clone().acquire_many_owned(batch);
        let Some(Ok(mut permit)) = self.shutdown.stop.run_until_cancelled(room).await else { return Ok(0) };
        failpoint::reach("before_claim").await?;
        let agents = self.claimable();
        let claim = Claim { batch, agents: agents.as_deref(), worker: None };
        let Claims { turns, empty, .. } = claim::claim(&self.pool, claim).await?;
        failpoint::reach("after_claim").await?;
        let mut due = turns.len();
        for conversation in &empty {
            due += usize::from(claim::close_empty_lane(&self.pool, conversation).await?);
        }
        if !turns.is_empty()
            && let Some(in_flight) = permit.split(turns.len())
        {
            self.publishing.spawn(self.publisher.clone().publish(turns, in_flight));
        }
        Ok(due)
    }

    /// `None`: every agent's lanes, by the one index. While some agents are paused: the others, each in turn first.
    fn claimable(&mut self) -> Option<Vec<AgentName>> {
        let policies = self.policies.borrow();
        if policies.values().all(|policy| !policy.paused) {
            return None;
        }
        let mut agents: Vec<AgentName> =
            policies.iter().filter(|(_, policy)| !policy.paused).map(|(name, _)| name.clone()).collect();
        drop(policies);
        if !agents.is_empty() {
            self.turn = (self.turn + 1) % agents.len();
            agents.rotate_left(self.turn);
        }
        Some(agents)
    }

    /// An agent that was added while the relay runs gets its durable before its first trigger waits for one.
    fn make_durables_of_new_agents(&mut self) {
        if self.policies.has_changed().unwrap_or(false) {
            let agents = names(&self.policies.borrow_and_update());
            let Publisher { broker, gate, .. } = self.publisher.clone();
            self.publishing.spawn(async move {
                if let Err(error) = topology::ensure(&broker, &agents).await {
                    // The gate opens again when every agent has its durable.
                    gate.close(&error);
                }
            });
        }
    }

    /// After work: on at once. After none: awake for a moment, then asleep until something is due.
    async fn rest(&mut self, found: Found) -> Result<(), Fault> {
        let nap = match found {
            Found::Closed(pause) => pause.min(self.settings.poll_interval),
            Found::Looked(look) => match self.sleeper.after_pass(look).await {
                Rest::None => return Ok(()),
                Rest::Blink(nap) => nap,
                Rest::Sleep => return self.sleep().await,
            },
        };
        self.shutdown.stop.run_until_cancelled(tokio::time::sleep(nap)).await;
        Ok(())
    }

    /// Says that it sleeps, looks once more, and only then waits.
    async fn sleep(&mut self) -> Result<(), Fault> {
        self.sleeper.declare().await?;
        if self.claim().await? == 0 {
            let stop = self.shutdown.stop.clone();
            let woken = stop.run_until_cancelled(self.sleeper.wait()).await;
            // It may have slept until a lease or a trigger's time was over.
            self.looked_at = None;
            tracing::trace!(notified = woken == Some(Woken::Notified), "woken");
        }
        Ok(())
    }

    /// Awaits the acknowledgements of what was claimed; at the cut, what is left is found by the next relay's look-after.
    async fn drain(mut self) {
        self.sleeper.rise().await;
        self.publishing.close();
        if self.shutdown.cut.run_until_cancelled(self.publishing.wait()).await.is_none() {
            tracing::warn!(batches = self.publishing.len(), "cut short while publishing");
        }
        self.publisher.broker.close().await;
    }
}
