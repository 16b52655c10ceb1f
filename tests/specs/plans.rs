//! Plans: no statement of the pipeline reads more for a longer history or a deeper backlog, also where its plan was made
//! while the tables were empty, and whatever the statistics say.
//!
//! The plans are those that the pipeline's own sessions ran, as the server's `auto_explain` logged them.

mod explained;
mod volume;

use std::time::Duration;

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

use self::explained::{Explained, Log};

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
    ("begin", "l.state = 'queued' and l.agent = $3"),
    ("load", "array_agg(id) as ids"),
    ("heartbeat", "with mine as"),
    ("finish: lock conversations", "from conversations where id = any($1)"),
    ("finish: lock lanes", "and not l.cancel_requested\n        order by"),
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

    /// Lets turns run until `count` more are answered, after every lease was renewed.
    async fn work(&self, world: &World, count: i64) -> Result<()> {
        const RENEWED: &str =
            "select count(*) from agent_lanes l join agents a on a.name = l.agent
             where l.state = 'running' and l.wake_at > l.started_at + a.lease";
        const ANSWERED: &str = "select count(*) from messages where role = 'assistant' and content = 'yes'";
        self.gate.send_replace(false);
        world.eventually("a lease was renewed", async || Ok(world.count(RENEWED).await? > 0)).await?;
        let wanted = world.count(ANSWERED).await? + count;
        self.gate.send_replace(true);
        let patience = Duration::from_secs(60);
        world
            .eventually_within(patience, "turns are answered", async || {
                tokio::time::sleep(Duration::from_millis(100)).await;
                Ok(world.count(ANSWERED).await? >= wanted)
            })
            .await
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
    ensure!(claims.turns.len() <= BATCH as usize && !claims.turns.is_empty());
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
    for statement in statements {
        for scan in &statement.scans {
            ensure!(
                scan.by_index && scan.rows <= ROWS,
                "{} of {} read {} rows in {}\n{}",
                scan.kind,
                scan.table,
                scan.rows,
                statement.text,
                statement.plan
            );
        }
        ensure!(statement.buffers <= BUFFERS, "{} pages in {}\n{}", statement.buffers, statement.text, statement.plan);
    }
    let claims = statements.iter().filter(|s| s.text.contains("for update skip locked") && s.text.contains("due"));
    for claim in claims {
        for scan in claim.scans.iter().filter(|scan| scan.table == "agent_lanes") {
            ensure!(scan.rows <= f64::from(BATCH), "a claim read {} lanes\n{}", scan.rows, claim.plan);
        }
    }
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
    let hand = shared::pool::connect(&world.database_settings(), "hand", 1).await?;
    let mut producer = volume::Producer::start(&world).await?;
    let pipeline = Pipeline::start(&world).await?;
    producer.submit(200).await?;
    pipeline.work(&world, 20).await?;
    producer.submit(50).await?;
    by_hand(&hand).await?;
    volume::analyze(&world).await?;
    producer.submit(50).await?;
    pipeline.work(&world, 20).await?;

    // The same sessions, and tables that have grown behind their backs.
    log.skip().await?;
    volume::load(&world).await?;
    by_hand(&hand).await?;
    producer.submit(50).await?;
    pipeline.work(&world, 300).await?;
    let cold = log.read().await?;
    bounded(&cold).context("with plans of empty tables")?;
    all_seen(&cold)?;
    pipeline.stop().await?;

    // New sessions, once with statistics of empty tables, and once with true ones.
    for fresh in [false, true] {
        if fresh {
            volume::analyze(&world).await?;
        }
        let hand = shared::pool::connect(&world.database_settings(), "hand", 1).await?;
        let mut producer = volume::Producer::start(&world).await?;
        let pipeline = Pipeline::start(&world).await?;
        by_hand(&hand).await?;
        producer.submit(50).await?;
        pipeline.work(&world, 300).await?;
        let seen = log.read().await?;
        bounded(&seen).with_context(|| format!("with statistics that are fresh: {fresh}"))?;
        all_seen(&seen)?;
        pipeline.stop().await?;
    }
    Ok(())
}
