//! Servers that go away under load, and come back with less than they had: everything is answered, once.

use std::time::Duration;

use anyhow::{Result, ensure};
use async_nats::jetstream::stream;
use tests::{Process, Server, Servers, Spec, World};

use crate::load::{Load, PATIENCE, no_attempt_was_lost};

const LOAD: Load = Load { conversations: 30, messages: 9 };

/// Relays and consumers of a world, two of each, all ready.
async fn pipeline(world: &World) -> Result<Vec<Process>> {
    world.policy("debounce = '0', dispatch_timeout = '1 s'").await?;
    LOAD.prepare(world).await?;
    let mut processes = Vec::new();
    for _ in 0..2 {
        processes.push(world.relay().start()?);
        processes.push(world.consumer().env("ECHO_DELAY", "5ms").start()?);
    }
    for process in &processes {
        process.ready().await?;
    }
    Ok(processes)
}

/// Whoever lived through the harm says that it is ready again, and leaves when told to.
async fn healthy(processes: Vec<Process>) -> Result<()> {
    for process in processes {
        process.ready().await?;
        process.shut_down().await?;
    }
    Ok(())
}

async fn private() -> Result<World> {
    World::on(Servers::private(Spec::default()).await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_restarts_costs_no_turn_and_no_attempt() -> Result<()> {
    let world = private().await?;
    let processes = pipeline(&world).await?;
    LOAD.around(&world, world.servers.restart(Server::Nats)).await?;
    no_attempt_was_lost(&world).await?;
    healthy(processes).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_loses_its_store_costs_no_turn_and_no_attempt() -> Result<()> {
    let world = private().await?;
    let processes = pipeline(&world).await?;
    LOAD.around(&world, world.servers.wipe_nats()).await?;
    no_attempt_was_lost(&world).await?;
    healthy(processes).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_stream_is_made_again_and_costs_no_turn_and_no_attempt() -> Result<()> {
    let world = World::new().await?;
    let processes = pipeline(&world).await?;
    let harm = async {
        world.jetstream().delete_stream(&world.stream).await?;
        Ok(())
    };
    LOAD.around(&world, harm).await?;
    no_attempt_was_lost(&world).await?;
    healthy(processes).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_durable_is_made_again_and_costs_no_turn_and_no_attempt() -> Result<()> {
    let world = World::new().await?;
    let processes = pipeline(&world).await?;
    let harm = async {
        let stream = world.jetstream().get_stream(&world.stream).await?;
        stream.delete_consumer("workers-default").await?;
        Ok(())
    };
    LOAD.around(&world, harm).await?;
    no_attempt_was_lost(&world).await?;
    healthy(processes).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_that_restarts_costs_no_turn() -> Result<()> {
    let world = private().await?;
    let processes = pipeline(&world).await?;
    LOAD.around(&world, world.servers.restart(Server::Postgres)).await?;
    healthy(processes).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_that_crashes_costs_no_turn() -> Result<()> {
    let world = private().await?;
    let processes = pipeline(&world).await?;
    let harm = async {
        world.servers.kill(Server::Postgres).await?;
        world.servers.resume(Server::Postgres).await
    };
    LOAD.around(&world, harm).await?;
    healthy(processes).await
}

/// Waits until a process says that it is not ready, and why.
async fn says(world: &World, process: &Process, why: &str) -> Result<()> {
    let what = format!("{} says: {why}", process.name());
    world
        .eventually(&what, async || {
            let (status, report) = process.get("/readyz").await?;
            Ok(status == 503 && report.contains(why))
        })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_broker_is_down_nothing_is_claimed_and_readiness_says_why() -> Result<()> {
    let world = private().await?;
    world.policy("debounce = '0'").await?;
    sqlx::query("insert into agents (name) values ('idle')").execute(&world.pool).await?;
    let idle = world.consumer().env("AGENT", "idle").start()?;
    let processes = [world.relay().start()?, world.consumer().start()?, idle];
    for process in &processes {
        process.ready().await?;
    }
    world.servers.stop(Server::Nats).await?;
    world.create_conversation("c1").await?;
    world.submit("c1", "hello").await?;
    for process in &processes {
        says(&world, process, "not connected to NATS").await?;
    }
    let lane = world.lane("c1").await?;
    ensure!(lane.state == "waiting" && lane.attempt == 0, "{lane:?}");
    ensure!(world.count("select attempts::bigint from agent_outbox").await? == 0);
    world.servers.resume(Server::Nats).await?;
    world.answered("c1", 1).await?;
    for process in &processes {
        process.ready().await?;
    }
    world.settled().await?;
    no_attempt_was_lost(&world).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_added_while_the_broker_is_down_is_served_when_it_is_back() -> Result<()> {
    let world = private().await?;
    let relay = world.relay().start()?;
    relay.ready().await?;
    world.servers.stop(Server::Nats).await?;
    says(&world, &relay, "not connected to NATS").await?;
    sqlx::query("insert into agents (name, debounce) values ('late', '0')").execute(&world.pool).await?;
    sqlx::query("select create_conversation('c1', 'late')").execute(&world.pool).await?;
    world.submit("c1", "hello").await?;
    world.servers.resume(Server::Nats).await?;
    let _consumer = world.consumer().env("AGENT", "late").start()?;
    world.answered("c1", 1).await?;
    world.settled().await?;
    no_attempt_was_lost(&world).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_stream_pauses_claiming_and_costs_no_attempt() -> Result<()> {
    const CONVERSATIONS: usize = 40;
    let world = World::new().await?;
    // Room for about ten triggers.
    let small = stream::Config {
        name: world.stream.clone(),
        subjects: vec![format!("{}.>", world.prefix)],
        retention: stream::RetentionPolicy::WorkQueue,
        discard: stream::DiscardPolicy::New,
        max_bytes: 4096,
        ..stream::Config::default()
    };
    world.jetstream().create_stream(small).await?;
    // A claim that is given back, and one that was published, stay unbegun for as long as this spec likes.
    world.policy("debounce = '0', dispatch_timeout = '1 min'").await?;
    let load = Load { conversations: CONVERSATIONS, messages: 1 };
    load.prepare(&world).await?;
    load.submit(&world, 0..1).await?;
    let relay = world.relay().start()?;
    says(&world, &relay, "maximum bytes").await?;
    // Full is where nothing more is published: what does not fit is given back each time, attempt and all.
    let waiting = "select count(*) from agent_lanes l join agent_outbox o using (conversation_id)
        where l.state = 'waiting' and l.attempt = 0 and o.attempts = 0";
    let queued = "select count(*) from agent_lanes where state = 'queued' and attempt = 1";
    world
        .eventually_within(PATIENCE, "what does not fit is given back", async || {
            let mut stream = world.jetstream().get_stream(&world.stream).await?;
            let held = i64::try_from(stream.info().await?.state.messages)?;
            let (waiting, queued) = (world.count(waiting).await?, world.count(queued).await?);
            Ok(held > 0 && queued == held && waiting + queued == i64::try_from(CONVERSATIONS)?)
        })
        .await?;
    let _consumer = world.consumer().start()?;
    load.answered(&world).await?;
    relay.ready().await?;
    no_attempt_was_lost(&world).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_trigger_is_sent_again_with_the_same_run() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0', dispatch_timeout = '500 ms'").await?;
    world.create_conversation("c1").await?;
    let relay = world.relay().start()?;
    relay.ready().await?;
    world.submit("c1", "hello").await?;
    world.eventually("it is queued", async || Ok(world.lane("c1").await?.state == "queued")).await?;
    let run = world.lane("c1").await?.run_id;
    let purged = async || {
        let stream = world.jetstream().get_stream(&world.stream).await?;
        Ok(stream.purge().await?.purged == 1)
    };
    world.eventually_within(Duration::from_mins(1), "its trigger is purged", purged).await?;
    let again = async || Ok(world.lane("c1").await?.dispatches == 2);
    world.eventually("it was sent again", again).await?;
    let _consumer = world.consumer().start()?;
    let outcomes = world.answered("c1", 1).await?;
    ensure!(outcomes[0].run_id == run, "it is the same run");
    world.settled().await?;
    no_attempt_was_lost(&world).await
}
