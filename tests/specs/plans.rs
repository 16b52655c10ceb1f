//! Plans: no statement of the pipeline reads more for a longer history or a deeper backlog, also where its plan was made
//! while the tables were empty, and whatever the statistics say.
//!
//! The plans are those that the pipeline's own sessions ran, as the server's `auto_explain` logged them.

mod explained;
mod volume;

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, ensure};
use consumer::{Reply, Turn, TurnHandler, handler_fn};
use shared::{
    claim::{self, Claim},
    ids::AgentName,
    recovery, release,
    settings::Source,
    wake::Sleeper,
};
use sqlx::PgPool;
use tests::{Local, World};
use tokio::sync::watch;

use self::{
    explained::{Explained, Log},
    volume::Producer,
};

/// Lanes that one claim takes here.
const BATCH: u32 = 100;
/// What one scan may read: a few rows for each lane of the largest page. The tables have hundreds of times as many.
const ROWS: f64 = 1000.0;
/// What one statement may touch: some tens of pages for each lane of a page, and never a table of thousands.
const BUFFERS: u64 = 12_000;

/// The statements that must be seen, each by words of its own.
const STATEMENTS: [(&str, &str); 16] = [
    ("claim: lock", "where l.state = 'waiting'"),
    ("claim of agents: lock", "as wanted (agent)"),
    ("claim: read rows", "as lane (conversation_id, turn_id, cap)"),
    ("claim: mark", "with taken as"),
    ("release", "attempts = o.attempts - 1"),
    ("begin and load", "and l.state = 'queued' and l.agent = $3"),
    ("load what was claimed", "as t (conversation_id, turn_id, run_id, attempt, suspect)"),
    ("heartbeat", "with mine as"),
    ("finish: lock conversations", "from conversations where id = any($1)"),
    ("finish: lock lanes", "and l.state = 'running' and not l.cancel_requested\n            for update"),
    ("finish: write", "), answered as ("),
    ("overdue", "where l.state = 'queued' and l.wake_at <="),
    ("expired", "where state = 'running' and wake_at <="),
    ("next due", "extract(epoch from least("),
    ("settle: retry", "), pause as ("),
    ("submit", "insert into messages (id, conversation_id, seq, role, content)"),
];

/// Holds every turn until the gate opens; then every eleventh fails once.
fn gated(gate: watch::Receiver<bool>) -> impl TurnHandler {
    handler_fn(move |turn: Turn| {
        let mut gate = gate.clone();
        async move {
            let _ = gate.wait_for(|open| *open).await;
            if turn.attempt == 1 && turn.turn_id.0.as_bytes()[0].is_multiple_of(11) {
                return Err(consumer::HandlerError::retryable("not yet"));
            }
            Ok(Reply::new("yes"))
        }
    })
}

/// A relay and a consumer of each source, with a handler that waits at a gate.
struct Pipeline {
    relay: Local,
    consumers: Vec<Local>,
    gate: watch::Sender<bool>,
}

impl Pipeline {
    async fn start(world: &World) -> Result<Self> {
        let (gate, closed) = watch::channel(false);
        let mut consumers = Vec::new();
        for source in [Source::Nats, Source::Postgres] {
            let settings =
                shared::settings::ConsumerSettings { concurrency: 32, ..world.consumer_settings(source) };
            consumers.push(world.local_consumer(settings, gated(closed.clone())).await?);
        }
        Ok(Self { relay: world.local_relay().await?, consumers, gate })
    }

    /// Submits, and lets turns run until as many more are answered, after every lease was renewed.
    async fn work(&self, world: &World, producer: &mut Producer, count: u32) -> Result<()> {
        const RENEWED: &str = "select count(*) from agent_lanes l join agents a on a.name = l.agent
             where l.state = 'running' and l.wake_at > l.started_at + a.lease";
        const ANSWERED: &str = "select count(*) from messages where role = 'assistant' and content = 'yes'";
        self.gate.send_replace(false);
        let wanted = world.count(ANSWERED).await? + i64::from(count);
        producer.submit(count).await?;
        world.eventually("a lease was renewed", async || Ok(world.count(RENEWED).await? > 0)).await?;
        self.gate.send_replace(true);
        let patience = Duration::from_mins(1);
        world
            .eventually_within(patience, "turns are answered", async || {
                tokio::time::sleep(Duration::from_millis(100)).await;
                Ok(world.count(ANSWERED).await? >= wanted)
            })
            .await
    }

    /// Works until every statement was seen: relay and direct consumer race for each claim, and either may win them all.
    async fn work_until_all_is_seen(
        &self,
        world: &World,
        producer: &mut Producer,
        log: &mut Log<'_>,
    ) -> Result<Vec<Explained>> {
        let mut seen = Vec::new();
        for _ in 0..8 {
            self.work(world, producer, 300).await?;
            seen.extend(log.read().await?);
            if all_seen(&seen).is_ok() {
                break;
            }
        }
        Ok(seen)
    }

    async fn stop(self) -> Result<()> {
        self.gate.send_replace(true);
        self.relay.stop().await?;
        for consumer in self.consumers {
            consumer.stop().await?;
        }
        Ok(())
    }
}

/// What a relay does now and then, by its own functions and in a session of its own.
async fn by_hand(pool: &PgPool) -> Result<()> {
    let every = Claim { batch: BATCH, agents: None, worker: None };
    let claims = claim::claim(pool, every).await?;
    let pause = Duration::from_millis(1);
    release::release_unbegun(pool, &claims.turns, pause).await?;
    let agents = [AgentName::default()];
    claim::claim(pool, Claim { agents: Some(&agents), ..every }).await?;
    recovery::recover_expired(pool).await?;
    let mut sleeper = Sleeper::new(pool.clone(), "by hand".into(), pause);
    sleeper.declare().await?;
    sleeper.wait().await;
    sleeper.rise().await;
    Ok(())
}

/// Fails unless every statement read by index, and no more than its batch.
fn bounded(statements: &[Explained]) -> Result<()> {
    let mut broken = BTreeMap::new();
    for statement in statements {
        let is_claim =
            statement.text.contains("where l.state = 'waiting'") && statement.text.contains(") due");
        for scan in &statement.scans {
            // Lanes that the other claimers hold are read, and skipped.
            let most = if is_claim && scan.table == "agent_lanes" { 4.0 * f64::from(BATCH) } else { ROWS };
            if !scan.by_index || scan.rows > most {
                let read =
                    format!("{} of {} by {} read {} rows", scan.kind, scan.table, scan.index, scan.rows);
                broken.insert(statement.text.as_str(), read);
            }
        }
        if statement.buffers > BUFFERS {
            broken.insert(&statement.text, format!("{} pages", statement.buffers));
        }
    }
    let list: Vec<String> = broken.iter().map(|(text, read)| format!("{read} in{text}")).collect();
    ensure!(list.is_empty(), "{} of {} statements: {}", list.len(), statements.len(), list.join("\n"));
    Ok(())
}

/// Fails unless each of [`STATEMENTS`] is among these.
fn all_seen(statements: &[Explained]) -> Result<()> {
    for (name, words) in STATEMENTS {
        ensure!(statements.iter().any(|statement| statement.text.contains(words)), "{name} was not seen");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_reads_more_for_a_longer_history_or_a_deeper_backlog() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0', lease = '2 s', retry_backoff = '0', dispatch_timeout = '1 s'").await?;
    volume::keep_statistics(&world).await?;
    let mut log = Log::open(&world).await?;

    // Plans are made while the tables are all but empty, and the statistics say so.
    let hand = shared::pool::connect(&world.database_settings(), "hand", 3).await?;
    let mut producer = Producer::start(&world).await?;
    producer.submit(1).await?;
    by_hand(&hand).await?;
    let pipeline = Pipeline::start(&world).await?;
    pipeline.work(&world, &mut producer, 1).await?;
    volume::analyze(&world).await?;
    by_hand(&hand).await?;
    pipeline.work(&world, &mut producer, 2).await?;

    // The same sessions, and tables that have grown behind their backs.
    log.skip().await?;
    volume::load(&world).await?;
    by_hand(&hand).await?;
    let cold = pipeline.work_until_all_is_seen(&world, &mut producer, &mut log).await?;
    bounded(&cold).context("with plans of empty tables")?;
    all_seen(&cold).context("with plans of empty tables")?;
    pipeline.stop().await?;

    // New sessions, once with statistics of empty tables, and once with true ones.
    for fresh in [false, true] {
        if fresh {
            volume::analyze(&world).await?;
        }
        let hand = shared::pool::connect(&world.database_settings(), "hand", 3).await?;
        let mut producer = Producer::start(&world).await?;
        by_hand(&hand).await?;
        let pipeline = Pipeline::start(&world).await?;
        let seen = pipeline.work_until_all_is_seen(&world, &mut producer, &mut log).await?;
        bounded(&seen).with_context(|| format!("with statistics that are fresh: {fresh}"))?;
        all_seen(&seen).with_context(|| format!("with statistics that are fresh: {fresh}"))?;
        pipeline.stop().await?;
    }
    Ok(())
}
