//! The gate before the claim: while the broker cannot take triggers, nothing is claimed, no attempt is spent, and
//! readiness says why. It heals by itself.

use std::{sync::Mutex, time::Duration};

use shared::{
    admin::Readiness,
    backoff::Delays,
    broker::{Broker, BrokerError},
    ids::AgentName,
    topology,
};
use tokio::time::Instant;

/// The first and the longest pause after a fault of the broker.
const PAUSE: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The name of the gate's readiness check.
pub(crate) const CHECK: &str = "broker";

/// Open while the broker takes triggers.
#[derive(Debug)]
pub(crate) struct Gate {
    state: Mutex<State>,
    readiness: Readiness,
}

#[derive(Debug)]
struct State {
    closed_until: Option<Instant>,
    pauses: Delays,
}

impl Gate {
    /// An open gate.
    pub(crate) fn new(readiness: Readiness) -> Self {
        readiness.set_ready(CHECK);
        let state = State { closed_until: None, pauses: Delays::new(PAUSE, PAUSE_MAX) };
        Self { state: Mutex::new(state), readiness }
    }

    /// A publish failed: claiming pauses, longer with every failure until one succeeds.
    pub(crate) fn close(&self, error: &BrokerError) {
        let mut state = self.lock();
        if state.closed_until.is_none() {
            let pause = state.pauses.next();
            state.closed_until = Some(Instant::now() + pause);
            tracing::error!(%error, pause_ms = pause.as_millis(), "the broker takes no triggers; claiming is paused");
        }
        drop(state);
        self.readiness.set_not_ready(CHECK, error);
    }

    /// A publish succeeded.
    pub(crate) fn works(&self) {
        let mut state = self.lock();
        if state.closed_until.is_none() {
            state.pauses.reset();
            drop(state);
            self.readiness.set_ready(CHECK);
        }
    }

    /// Tries to open a closed gate. `None`: it is open; else how long to wait before the next try.
    pub(crate) async fn try_open(&self, broker: &Broker, agents: &[AgentName]) -> Option<Duration> {
        if let Err(error) = broker.require_connected() {
            self.close(&error);
        }
        let until = self.lock().closed_until?;
        let now = Instant::now();
        if now < until {
            return Some(until - now);
        }
        match probe(broker, agents).await {
            Ok(()) => {
                self.lock().closed_until = None;
                tracing::info!("the broker is back; claiming goes on");
                self.readiness.set_ready(CHECK);
                None
            }
            Err(error) => {
                let mut state = self.lock();
                let pause = state.pauses.next();
                state.closed_until = Some(Instant::now() + pause);
                drop(state);
                tracing::warn!(%error, pause_ms = pause.as_millis(), "the broker is not back yet");
                self.readiness.set_not_ready(CHECK, error);
                Some(pause)
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The broker is back when it has the stream and the durables; what it lost is made again.
async fn probe(broker: &Broker, agents: &[AgentName]) -> Result<(), BrokerError> {
    broker.require_connected()?;
    let differences = topology::ensure(broker, agents).await?;
    for difference in differences {
        tracing::warn!(%difference, "the broker's configuration differs");
    }
    Ok(())
}
