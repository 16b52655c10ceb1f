//! An idle system begins a turn because of the commit, and not because somebody polls: the poll interval is longer than
//! anybody here waits.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use consumer::{HandlerError, Reply, Turn, handler_fn};
use shared::settings::{ConsumerSettings, RelaySettings, Source};
use tests::{Local, World};
use tokio::sync::{mpsc, watch};

use super::measured;

/// Polls of this are of no help within [`PATIENCE`].
const POLL: Duration = Duration::from_mins(1);
const PATIENCE: Duration = Duration::from_secs(30);
const ROUNDS: u32 = 20;

/// One handler's start.
struct Started {
    at: Instant,
    attempt: i32,
}

/// A pipeline that only notifications can wake, and a handler that tells when it starts, fails the first attempt of `fail`
/// and holds the turns of `hold` until the gate opens.
struct Idle {
    world: World,
    started: mpsc::UnboundedReceiver<Started>,
    gate: watch::Sender<bool>,
    _processes: Vec<Local>,
}

impl Idle {
    async fn new(source: Source) -> Result<Self> {
        let world = World::new().await?;
        // No lane falls due by its lease or its dispatch either.
        world
            .policy("debounce = '0', retry_backoff = '0', lease = '1 hour', dispatch_timeout = '1 hour'")
            .await?;
        let (starts, started) = mpsc::unbounded_channel();
        let (gate, closed) = watch::channel(false);
        let handler = handler_fn(move |turn: Turn| {
            let (starts, mut closed) = (starts.clone(), closed.clone());
            async move {
                let _ = starts.send(Started { at: Instant::now(), attempt: turn.attempt });
                match turn.messages.iter().find(|m| m.in_turn).map(|m| m.content.as_str()) {
                    Some("fail") if turn.attempt == 1 => return Err(HandlerError::retryable("not yet")),
                    Some("hold") => drop(closed.wait_for(|open| *open).await),
                    _ => {}
                }
                Ok(Reply::new("yes"))
            }
        });
        let mut processes = Vec::new();
        if source == Source::Nats {
            let settings = RelaySettings { poll_interval: POLL, ..world.relay_settings() };
            processes.push(world.local_relay_with(settings).await?);
        }
        let settings = ConsumerSettings { poll_interval: POLL, ..world.consumer_settings(source) };
        processes.push(world.local_consumer(settings, handler).await?);
        world.create_conversation("c1").await?;
        Ok(Self { world, started, gate, _processes: processes })
    }

    /// Waits until the claimer has said that it sleeps: from then on every commit wakes it.
    async fn asleep(&self) -> Result<()> {
        let sleeping = "select count(*) from agent_sleepers where until > clock_timestamp()";
        self.world.eventually("the claimer sleeps", async || Ok(self.world.count(sleeping).await? > 0)).await
    }

    async fn start(&mut self) -> Result<Started> {
        let started = tokio::time::timeout(PATIENCE, self.started.recv()).await;
        started.context("nothing was started: it waits for a poll")?.context("no handler")
    }

    /// From the commit of a submit to the handler's start.
    async fn submit(&mut self, content: &str) -> Result<Duration> {
        self.asleep().await?;
        self.world.submit("c1", content).await?;
        let committed = Instant::now();
        Ok(self.start().await?.at.saturating_duration_since(committed))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_starts_its_turn_without_a_poll() -> Result<()> {
    for source in [Source::Nats, Source::Postgres] {
        let mut idle = Idle::new(source).await?;
        let mut latencies = Vec::new();
        for _ in 0..ROUNDS {
            latencies.push(idle.submit("hello").await?);
            idle.world.quiet().await?;
        }
        latencies.sort_unstable();
        let (median, most) = (latencies[latencies.len() / 2], latencies[latencies.len() - 1]);
        measured(&format!("{source:?}: commit to handler start {median:?}, at most {most:?}"))?;
        idle.world.settled().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finish_that_leaves_rows_waiting_starts_their_turn_without_a_poll() -> Result<()> {
    for source in [Source::Nats, Source::Postgres] {
        let mut idle = Idle::new(source).await?;
        idle.submit("hold").await?;
        idle.world.submit("c1", "and this").await?;
        idle.asleep().await?;
        idle.gate.send_replace(true);
        let released = Instant::now();
        let next = idle.start().await?.at.saturating_duration_since(released);
        measured(&format!("{source:?}: from one turn's end to the next one's start {next:?}"))?;
        idle.world.settled().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_starts_without_a_poll() -> Result<()> {
    for source in [Source::Nats, Source::Postgres] {
        for backoff in ["0", "50 ms"] {
            let mut idle = Idle::new(source).await?;
            idle.world.policy(&format!("retry_backoff = '{backoff}'")).await?;
            idle.submit("fail").await?;
            let failed = Instant::now();
            let again = idle.start().await?;
            ensure!(again.attempt == 2);
            let pause = again.at.saturating_duration_since(failed);
            measured(&format!(
                "{source:?}: from a failure to the next attempt {pause:?}, backoff {backoff}"
            ))?;
            idle.world.settled().await?;
        }
    }
    Ok(())
}
