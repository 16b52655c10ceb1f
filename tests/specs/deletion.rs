//! Conversations that are deleted at every step of a turn: nothing of them is left, and everybody else is served.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use consumer::{HandlerError, Reply, Turn, TurnHandler, handler_fn};
use serde_json::json;
use shared::{settings::Source, state::Effect};
use tests::{Process, World};
use tokio::sync::mpsc;

use crate::load::PATIENCE;

async fn world() -> Result<World> {
    let world = World::new().await?;
    world.policy("debounce = '0', lease = '1 s', dispatch_timeout = '500 ms'").await?;
    for conversation in ["doomed", "other"] {
        world.create_conversation(conversation).await?;
    }
    Ok(world)
}

async fn delete(world: &World) -> Result<()> {
    let deleted = sqlx::query("delete from conversations where id = 'doomed'").execute(&world.pool).await?;
    ensure!(deleted.rows_affected() == 1);
    Ok(())
}

async fn nothing_is_left(world: &World) -> Result<()> {
    let left = "select (select count(*) from messages where conversation_id = 'doomed')
        + (select count(*) from agent_outbox where conversation_id = 'doomed')
        + (select count(*) from agent_lanes where conversation_id = 'doomed')
        + (select count(*) from agent_runs where conversation_id = 'doomed')
        + (select count(*) from operations where conversation_id = 'doomed')";
    ensure!(world.count(left).await? == 0, "something of the conversation is left");
    Ok(())
}

/// Everybody else is served, the stream runs empty, and nobody complains again and again.
async fn life_goes_on(world: &World, processes: &[Process]) -> Result<()> {
    let answers = world.outcomes("other").await?.len();
    world.submit("other", "hello").await?;
    world.answered("other", answers + 1).await?;
    nothing_is_left(world).await?;
    let empty = async || {
        let mut stream = world.jetstream().get_stream(&world.stream).await?;
        Ok(stream.info().await?.state.messages == 0)
    };
    world.eventually_within(PATIENCE, "the stream is empty", empty).await?;
    for process in processes {
        let log = process.log()?;
        let complaints = log.lines().filter(|line| line.contains(r#""WARN""#) || line.contains(r#""ERROR""#));
        ensure!(complaints.count() <= 2, "{} complains:\n{log}", process.name());
    }
    world.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_can_be_deleted_while_it_waits() -> Result<()> {
    let world = world().await?;
    let processes = [world.relay().start()?, world.consumer().start()?];
    for process in &processes {
        process.ready().await?;
    }
    world.policy("debounce = '1 s'").await?;
    world.submit("doomed", "hello").await?;
    world.policy("debounce = '0'").await?;
    ensure!(world.lane("doomed").await?.state == "waiting");
    delete(&world).await?;
    life_goes_on(&world, &processes).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_can_be_deleted_between_claim_and_publish() -> Result<()> {
    let world = world().await?;
    world.submit("doomed", "hello").await?;
    let relay = world.relay().failpoints("after_claim=stop*1").start()?;
    relay.frozen().await?;
    ensure!(world.lane("doomed").await?.state == "queued");
    delete(&world).await?;
    relay.thaw()?;
    life_goes_on(&world, &[relay, world.consumer().start()?]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_can_be_deleted_while_it_is_queued() -> Result<()> {
    let world = world().await?;
    let relay = world.relay().start()?;
    world.submit("doomed", "hello").await?;
    let queued = async || Ok(world.lane("doomed").await?.state == "queued");
    world.eventually("it is queued", queued).await?;
    delete(&world).await?;
    life_goes_on(&world, &[relay, world.consumer().start()?]).await
}

/// Tells when it has begun `doomed` and recorded an operation, and when it was cancelled; answers everybody else.
fn waits_to_be_cancelled(events: mpsc::UnboundedSender<&'static str>) -> impl TurnHandler {
    let events = Arc::new(events);
    handler_fn(move |turn: Turn| {
        let events = events.clone();
        async move {
            if turn.conversation_id.as_str() != "doomed" {
                return Ok(Reply::new("served"));
            }
            let failed = |error| HandlerError::fatal(format!("{error}"));
            let _started = turn.operations.start("tool", Effect::Read, &json!({})).await.map_err(failed)?;
            let _ = events.send("begun");
            turn.cancelled.cancelled().await;
            if turn.operations.start("another", Effect::Read, &json!({})).await.is_err() {
                let _ = events.send("cancelled, and may start no operation");
            }
            Err(HandlerError::retryable("cancelled"))
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_handler_is_cancelled_soon_after_its_conversation_was_deleted() -> Result<()> {
    for source in [Source::Nats, Source::Postgres] {
        let world = world().await?;
        let relay = world.relay().start()?;
        relay.ready().await?;
        let (events, mut told) = mpsc::unbounded_channel();
        let handler = waits_to_be_cancelled(events);
        if source == Source::Postgres {
            relay.shut_down().await?;
        }
        let _consumer = world.local_consumer(world.consumer_settings(source), handler).await?;
        world.submit("doomed", "hello").await?;
        ensure!(told.recv().await == Some("begun"));
        delete(&world).await?;
        let cancelled = tokio::time::timeout(PATIENCE, told.recv()).await.context("it runs on")?;
        ensure!(cancelled == Some("cancelled, and may start no operation"));
        life_goes_on(&world, &[]).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_can_be_deleted_before_its_finish() -> Result<()> {
    let world = world().await?;
    // Longer than the spec: the finish finds the conversation gone, not its lease.
    world.policy("lease = '1 min'").await?;
    let relay = world.relay().start()?;
    let consumer = world.consumer().failpoints("before_finish=stop*1").start()?;
    world.submit("doomed", "hello").await?;
    consumer.frozen().await?;
    delete(&world).await?;
    consumer.thaw()?;
    life_goes_on(&world, &[relay, consumer]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_can_be_deleted_amid_its_finish() -> Result<()> {
    let world = world().await?;
    world.policy("lease = '1 min'").await?;
    let relay = world.relay().start()?;
    let consumer = world.consumer().failpoints("mid_finish=stop*1").start()?;
    world.submit("doomed", "hello").await?;
    consumer.frozen().await?;
    let waits = "select count(*) from pg_stat_activity where datname = current_database()
        and wait_event_type = 'Lock' and query like 'delete from conversations%'";
    let thaw = async {
        world.eventually("the deletion waits", async || Ok(world.count(waits).await? == 1)).await?;
        consumer.thaw()
    };
    tokio::try_join!(delete(&world), thaw)?;
    life_goes_on(&world, &[relay, consumer]).await
}
