//! Processes that stand still, are starved or have a wrong clock: a lease is kept by whoever works, lost by whoever does not,
//! and measured by Postgres alone.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use consumer::{Reply, Turn, handler_fn};
use serde_json::{Value, json};
use shared::{ids::OperationId, settings::Source};
use tests::{Process, World, programs};
use tokio::sync::watch;

use crate::{
    load::PATIENCE,
    outside::{Asked, Outside, reply},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_zombie_hangs_up_on_its_agent_starts_no_operation_and_commits_nothing() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0', retry_backoff = '10 ms', lease = '3 s'").await?;
    world.create_conversation("c1").await?;
    let (release, gate) = watch::channel(false);
    let outside = Outside::open(&world, move |asked: Asked| {
        let mut gate = gate.clone();
        async move {
            if asked.is_first_attempt() {
                gate.wait_for(|open| *open).await?;
            }
            match asked.act("mail", "side_effect", json!(1)).await? {
                Some(_) => Ok(reply(asked.told("run_id")?)),
                None => bail!("refused"),
            }
        }
    })
    .await?;
    let _relay = world.relay().start()?;
    let zombie = outside.asked_by(world.consumer()).start()?;
    world.submit("c1", "hello").await?;
    let called = async || Ok(!outside.calls("c1").is_empty());
    world.eventually("the model is called", called).await?;
    let lost = world.lane("c1").await?.run_id.context("no run")?;
    zombie.freeze()?;
    zombie.frozen().await?;
    world.policy("lease = '1 min'").await?;
    let _successor = outside.asked_by(world.consumer()).start()?;
    let outcomes = world.answered("c1", 1).await?;
    ensure!(outcomes[0].role == "assistant" && outcomes[0].run_id != Some(lost), "{outcomes:?}");
    ensure!(!outside.was_hung_up_on(lost), "who stands still hangs up on nobody");

    zombie.thaw()?;
    let hung_up = async || Ok(outside.was_hung_up_on(lost));
    world.eventually("the zombie hangs up on its agent", hung_up).await?;
    release.send_replace(true);
    let refused = async || Ok(outside.refusals(lost) == [409]);
    world.eventually("its operation is refused", refused).await?;
    zombie.shut_down().await?;
    world.settled().await?;
    outside.kept(&world).await?;
    ensure!(world.outcomes("c1").await? == outcomes, "the zombie has said something");
    Ok(())
}

/// Every run was the only one of its turn.
async fn one_run_each(world: &World, calls: &AtomicUsize, turns: usize) -> Result<()> {
    world.settled().await?;
    let runs = "select count(*) from agent_runs";
    let done = "select count(*) from agent_runs where outcome = 'done'";
    let (runs, done) = (world.count(runs).await?, world.count(done).await?);
    let turns = i64::try_from(turns)?;
    ensure!(runs == turns && done == turns, "{done} of {runs} runs are done, for {turns} turns");
    ensure!(i64::try_from(calls.load(Ordering::SeqCst))? == turns, "handlers were called twice");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handlers_that_block_every_thread_beyond_the_lease_keep_it() -> Result<()> {
    const TURNS: usize = 4;
    const LEASE: Duration = Duration::from_secs(2);
    let world = World::new().await?;
    world.policy("debounce = '0', lease = '2 s', retry_backoff = '10 ms'").await?;
    let calls = Arc::new(AtomicUsize::new(0));
    let handler = handler_fn({
        let calls = calls.clone();
        move |_turn: Turn| {
            let calls = calls.clone();
            async move {
                calls.fetch_add(1, Ordering::SeqCst);
                // The harm itself: two of these leave this runtime no thread.
                thread::sleep(2 * LEASE);
                Ok(Reply::new("done"))
            }
        }
    });
    for number in 0..TURNS {
        world.create_conversation(&format!("c{number}")).await?;
        world.submit(&format!("c{number}"), "hello").await?;
    }
    // A process of its own recovers whatever loses its lease.
    let relay = world.relay().start()?;
    relay.ready().await?;
    let _consumer = world.local_consumer(world.consumer_settings(Source::Nats), handler).await?;
    world.quiet().await?;
    one_run_each(&world, &calls, TURNS).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exhausted_pool_costs_no_lease() -> Result<()> {
    const HOGS: usize = 8;
    const BLOCKED: &str = "select count(*) from pg_stat_activity where datname = current_database()
        and wait_event_type = 'Lock' and application_name like 'consumer-%'";
    let world = World::new().await?;
    world.policy("debounce = '0', lease = '2 s', retry_backoff = '10 ms'").await?;
    let (release, gate) = watch::channel(false);
    let calls = Arc::new(AtomicUsize::new(0));
    let handler = handler_fn({
        let calls = calls.clone();
        move |turn: Turn| {
            let (calls, mut gate) = (calls.clone(), gate.clone());
            async move {
                calls.fetch_add(1, Ordering::SeqCst);
                if turn.conversation_id.as_str().starts_with("hog") {
                    let id = OperationId(uuid::Uuid::nil());
                    while !*gate.borrow() {
                        // Ends with an error after the lock's timeout, and is asked again.
                        let _waited = turn.operations.status(id).await;
                    }
                }
                let _open = gate.wait_for(|open| *open).await;
                Ok(Reply::new("done"))
            }
        }
    });
    let relay = world.relay().start()?;
    relay.ready().await?;
    let mut holder = world.pool.begin().await?;
    sqlx::query("lock table operations in access exclusive mode").execute(&mut *holder).await?;
    let _consumer = world.local_consumer(world.consumer_settings(Source::Nats), handler).await?;
    let conversations = (0..HOGS).map(|number| format!("hog-{number}")).chain(["quiet".into()]);
    for conversation in conversations {
        world.create_conversation(&conversation).await?;
        world.submit(&conversation, "hello").await?;
    }
    let exhausted = async || Ok(world.count(BLOCKED).await? >= 6 && calls.load(Ordering::SeqCst) == HOGS + 1);
    world.eventually_within(PATIENCE, "every connection of the pool waits", exhausted).await?;
    let since: String = sqlx::query_scalar("select clock_timestamp()::text").fetch_one(&world.pool).await?;
    let outlasted = async || {
        let over = sqlx::query_scalar("select clock_timestamp() > $1::timestamptz + interval '4 s'");
        Ok(over.bind(&since).fetch_one(&world.pool).await?)
    };
    world.eventually("two leases are over", outlasted).await?;
    ensure!(world.lane("quiet").await?.attempt == 1, "a lease was lost");
    release.send_replace(true);
    holder.rollback().await?;
    world.quiet().await?;
    one_run_each(&world, &calls, HOGS + 1).await
}

/// Skews the clock that a process reads; its monotonic clock goes on as it is, as it does where somebody sets a clock.
struct Skew<'a> {
    library: &'a str,
    relay: &'a str,
    consumer: &'a str,
}

impl Skew<'_> {
    fn of<'w>(&self, launch: tests::world::Launch<'w>, skew: &str) -> tests::world::Launch<'w> {
        launch
            .env("LD_PRELOAD", self.library)
            .env("FAKETIME", skew)
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .env("DONT_FAKE_MONOTONIC", "1")
    }
}

/// How far the first line of a process's log is from Postgres' clock, in minutes.
async fn minutes_off(world: &World, process: &Process) -> Result<i64> {
    let log = process.log()?;
    let line: Value = serde_json::from_str(log.lines().next().context("it logs nothing")?)?;
    let off = "select round(extract(epoch from $1::timestamptz - clock_timestamp()) / 60)::bigint";
    Ok(sqlx::query_scalar(off).bind(line["timestamp"].as_str()).fetch_one(&world.pool).await?)
}

#[tokio::test(flavor = "multi_thread")]
async fn clocks_that_are_an_hour_off_change_nothing() -> Result<()> {
    let Some(library) = programs::faketime()? else { return Ok(()) };
    let library = library.to_str().context("no path")?;
    let ahead = Skew { library, relay: "+1h", consumer: "-1h" };
    let behind = Skew { library, relay: "-1h", consumer: "+1h" };
    for (skew, minutes) in [(ahead, 60), (behind, -60)] {
        let world = World::new().await?;
        world
            .policy("debounce = '100 ms', lease = '3 s', retry_backoff = '10 ms', dispatch_timeout = '1 s'")
            .await?;
        for conversation in ["lost", "long", "plain"] {
            world.create_conversation(conversation).await?;
        }
        let began: String =
            sqlx::query_scalar("select clock_timestamp()::text").fetch_one(&world.pool).await?;
        let relay = skew.of(world.relay(), skew.relay).start()?;
        relay.ready().await?;
        // A crash, so that a lease is found to be over by a relay whose clock says something else.
        let victim = skew.of(world.consumer(), skew.consumer).failpoints("after_begin=kill").start()?;
        world.submit("lost", "hello").await?;
        victim.ended().await?;
        world.policy("lease = '4 s'").await?;
        // A handler that takes longer than its lease, so that a heartbeat has to keep it.
        let consumer = skew.of(world.consumer(), skew.consumer).env("ECHO_DELAY", "6s").start()?;
        consumer.ready().await?;
        ensure!(minutes_off(&world, &relay).await? == minutes, "the relay's clock is not skewed");
        ensure!(minutes_off(&world, &consumer).await? == -minutes, "the consumer's clock is not skewed");
        for conversation in ["long", "plain"] {
            world.submit(conversation, "hello").await?;
        }
        world.quiet().await?;
        world.settled().await?;
        let runs: Vec<(String, i32, String)> =
            sqlx::query_as("select conversation_id, attempt, outcome from agent_runs order by 1, 2")
                .fetch_all(&world.pool)
                .await?;
        let run = |conversation: &str, attempt, outcome: &str| (conversation.into(), attempt, outcome.into());
        let expected = [
            run("long", 1, "done"),
            run("lost", 1, "expired"),
            run("lost", 2, "done"),
            run("plain", 1, "done"),
        ];
        ensure!(runs == expected, "{runs:?}");
        let foreign: i64 = sqlx::query_scalar(
            "with t (at) as (
                select created_at from messages union all select processed_at from agent_outbox
                union all select claimed_at from agent_runs union all select started_at from agent_runs
                union all select ended_at from agent_runs union all select last_message_at from conversations)
             select count(*) from t where at is null or at < $1::timestamptz - interval '1 min' or at > clock_timestamp()",
        )
        .bind(&began)
        .fetch_one(&world.pool)
        .await?;
        ensure!(foreign == 0, "{foreign} times are of a process's clock");
        relay.shut_down().await?;
        consumer.shut_down().await?;
    }
    Ok(())
}
