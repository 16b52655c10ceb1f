//! Runs that lost their lease: who may not be recovered now, and who waits to be tried alone.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use consumer::{Reply, Turn, handler_fn};
use shared::settings::Source;
use tests::World;
use tokio::sync::{Semaphore, mpsc};

use crate::load::PATIENCE;

/// A lease that ends when the spec says so.
const PATIENT: &str = "debounce = '0', lease = '1 min', retry_backoff = '0'";

/// A run of `suspect` whose consumer died: its lease has not expired yet.
async fn left_behind(world: &World) -> Result<()> {
    world.policy(PATIENT).await?;
    world.create_conversation("suspect").await?;
    let victim = world.consumer().failpoints("after_begin=kill").start()?;
    world.submit("suspect", "hello").await?;
    victim.ended().await?;
    ensure!(world.lane("suspect").await?.state == "running");
    Ok(())
}

async fn expire_lease(world: &World) -> Result<()> {
    sqlx::query("update agent_lanes set wake_at = clock_timestamp() where conversation_id = 'suspect'")
        .execute(&world.pool)
        .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_that_cannot_be_recovered_now_is_looked_at_again_with_the_polls_only() -> Result<()> {
    let world = World::new().await?;
    let relay = world.relay().start()?;
    left_behind(&world).await?;
    let mut holder = world.pool.begin().await?;
    sqlx::query("select from conversations for update").execute(&mut *holder).await?;
    expire_lease(&world).await?;
    // A relay that finds work does not sleep: it sleeps twice with the lane in its way.
    let mut slept: Option<String> = None;
    for _ in 0..2 {
        let sleeps = async || {
            let until = "select until::text from agent_sleepers where until - interval '2 s' >
                coalesce($1::timestamptz, (select wake_at from agent_lanes))";
            let until: Option<String> =
                sqlx::query_scalar(until).bind(slept.clone()).fetch_optional(&world.pool).await?;
            let is_new = until.is_some();
            slept = until.or(slept.take());
            Ok(is_new)
        };
        world.eventually("the relay sleeps", sleeps).await?;
    }
    ensure!(world.lane("suspect").await?.state == "running", "somebody holds its conversation");
    holder.rollback().await?;
    let _successor = world.consumer().start()?;
    world.answered("suspect", 1).await?;
    world.settled().await?;
    relay.shut_down().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_stopped_while_it_waits_to_run_alone_never_starts() -> Result<()> {
    let world = World::new().await?;
    let _relay = world.relay().start()?;
    left_behind(&world).await?;
    for conversation in ["long", "other"] {
        world.create_conversation(conversation).await?;
    }
    let (events, mut begun) = mpsc::unbounded_channel();
    let go = Arc::new(Semaphore::new(0));
    let handler = handler_fn({
        let go = go.clone();
        move |turn: Turn| {
            let (events, go) = (events.clone(), go.clone());
            async move {
                let _ = events.send(turn.conversation_id.to_string());
                if turn.conversation_id.as_str() == "long" {
                    let _permit = go.acquire().await;
                }
                Ok(Reply::new("done"))
            }
        }
    });
    // Long enough for a busy machine, and its fifth, the heartbeat, short enough to wait for.
    world.policy("lease = '5 s'").await?;
    let _consumer = world.local_consumer(world.consumer_settings(Source::Nats), handler).await?;
    world.submit("long", "hello").await?;
    ensure!(begun.recv().await.context("no handler")? == "long");
    expire_lease(&world).await?;
    let waits = async || {
        let lane = world.lane("suspect").await?;
        Ok(lane.state == "running" && lane.attempt == 2)
    };
    world.eventually("the suspect waits for the long run", waits).await?;
    sqlx::query("delete from conversations where id = 'suspect'").execute(&world.pool).await?;
    // It gives up its place in the queue: the consumer takes new turns while the long one goes on.
    world.submit("other", "hello").await?;
    let served = async || Ok(world.outcomes("other").await?.len() == 1);
    world.eventually_within(PATIENCE, "the other is served", served).await?;
    ensure!(world.lane("long").await?.state == "running");
    go.add_permits(1);
    world.settled().await?;
    while let Ok(conversation) = begun.try_recv() {
        ensure!(conversation != "suspect", "the suspect has started");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_starts_again_under_its_name_takes_back_what_it_left() -> Result<()> {
    for source in ["nats", "postgres"] {
        let world = World::new().await?;
        world.policy(PATIENT).await?;
        let _relay = if source == "nats" { Some(world.relay().start()?) } else { None };
        world.create_conversation("c1").await?;
        let named = || world.consumer().env("CONSUMER_NAME", "steady").env("SOURCE", source);
        let victim = named().failpoints("after_begin=kill").start()?;
        world.submit("c1", "hello").await?;
        victim.ended().await?;
        let lost = world.lane("c1").await?.run_id;
        let _again = named().start()?;
        // The lease lasts a minute: nothing but the name can have told that the run was lost.
        world.answered("c1", 1).await?;
        world.settled().await?;
        let expired: Option<uuid::Uuid> =
            sqlx::query_scalar("select run_id from agent_runs where outcome = 'expired'")
                .fetch_optional(&world.pool)
                .await?;
        ensure!(expired.is_some() && expired == lost, "{source}: {expired:?} {lost:?}");
    }
    Ok(())
}
