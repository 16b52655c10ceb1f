//! Leaving: a process that is told to stop loses nothing, repeats nothing, and keeps nobody waiting.

use anyhow::{Result, ensure};
use shared::settings::Source;
use tests::{Process, Server, Servers, Spec, World};

use crate::load::{Load, Witness, no_attempt_was_lost};

const LOAD: Load = Load { conversations: 20, messages: 9 };

#[tokio::test(flavor = "multi_thread")]
async fn relays_and_consumers_that_leave_under_load_lose_and_repeat_nothing() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0', dispatch_timeout = '1 s'").await?;
    LOAD.prepare(&world).await?;
    let (mut leaving, mut staying) = (Vec::new(), Vec::new());
    for processes in [&mut leaving, &mut staying] {
        processes.push(world.relay().start()?);
        processes.push(world.consumer().env("ECHO_DELAY", "30ms").start()?);
    }
    for process in leaving.iter().chain(&staying) {
        process.ready().await?;
    }
    let leave = async {
        let busy = "select count(*) from agent_runs";
        world.eventually("all are at work", async || Ok(world.count(busy).await? > 0)).await?;
        for process in &leaving {
            process.shut_down().await?;
        }
        Ok(())
    };
    LOAD.around(&world, leave).await?;
    // A handler is called once a run: every run ended well, and each turn has one.
    no_attempt_was_lost(&world).await?;
    for process in staying {
        process.shut_down().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_handlers_of_consumers_that_leave_are_called_once_a_turn() -> Result<()> {
    for source in [Source::Nats, Source::Postgres] {
        let world = World::new().await?;
        world.policy("debounce = '0', dispatch_timeout = '1 s'").await?;
        LOAD.prepare(&world).await?;
        let witness = Witness::default();
        let relay = if source == Source::Nats { Some(world.local_relay().await?) } else { None };
        let leaving = world.local_consumer(world.consumer_settings(source), witness.handler()).await?;
        let _staying = world.local_consumer(world.consumer_settings(source), witness.handler()).await?;
        let leave = async {
            let work = async || Ok(witness.calls() > 0);
            world.eventually("it is at work", work).await?;
            leaving.stop().await
        };
        LOAD.around(&world, leave).await?;
        no_attempt_was_lost(&world).await?;
        witness.saw_all_in_order(LOAD)?;
        let turns = world.count("select count(*) from messages where role = 'assistant'").await?;
        ensure!(i64::try_from(witness.calls())? == turns, "{} calls for {turns} turns", witness.calls());
        if let Some(relay) = relay {
            relay.stop().await?;
        }
    }
    Ok(())
}

/// A consumer whose handler is at work on `c1` and will be for a minute.
async fn busy_consumer(world: &World, source: &str, drain_timeout: &str) -> Result<Process> {
    let consumer = world
        .consumer()
        .env("SOURCE", source)
        .env("ECHO_DELAY", "1m")
        .env("DRAIN_TIMEOUT", drain_timeout)
        .start()?;
    world.create_conversation("c1").await?;
    world.submit("c1", "hello").await?;
    world.eventually("it runs", async || Ok(world.lane("c1").await?.state == "running")).await?;
    Ok(consumer)
}

/// The run was given back, counted as an attempt, and another consumer answers.
async fn released_and_answered_by_another(world: &World, source: &str) -> Result<()> {
    let lane = world.lane("c1").await?;
    ensure!(lane.state != "running", "{lane:?}");
    let released = "select count(*) from agent_runs where outcome = 'released' and attempt = 1";
    ensure!(world.count(released).await? == 1);
    let successor = world.consumer().env("SOURCE", source).start()?;
    world.answered("c1", 1).await?;
    world.settled().await?;
    ensure!(world.count("select attempts::bigint from agent_outbox").await? == 2);
    successor.shut_down().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_longer_than_the_drain_timeout_is_released_to_another_consumer() -> Result<()> {
    for source in ["nats", "postgres"] {
        let world = World::new().await?;
        world.policy("debounce = '0'").await?;
        let _relay = if source == "nats" { Some(world.relay().start()?) } else { None };
        let consumer = busy_consumer(&world, source, "200ms").await?;
        consumer.shut_down().await?;
        released_and_answered_by_another(&world, source).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_cuts_a_shutdown_short() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0'").await?;
    let _relay = world.relay().start()?;
    let consumer = busy_consumer(&world, "nats", "10m").await?;
    consumer.terminate()?;
    // Two signals at once are one.
    let noticed = async || Ok(consumer.log()?.contains("letting what runs end"));
    world.eventually("the first is noticed", noticed).await?;
    ensure!(world.lane("c1").await?.state == "running", "the first signal lets it run");
    consumer.shut_down().await?;
    released_and_answered_by_another(&world, "nats").await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_process_leaves_at_once() -> Result<()> {
    let world = World::new().await?;
    let processes = [
        world.relay().start()?,
        world.consumer().start()?,
        world.consumer().env("SOURCE", "postgres").start()?,
    ];
    for process in &processes {
        process.ready().await?;
    }
    for process in &processes {
        process.shut_down().await?;
    }
    world.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_leave_in_time_while_their_servers_are_away() -> Result<()> {
    let world = World::on(Servers::private(Spec::default()).await?).await?;
    world.policy("debounce = '0', lease = '1 s', dispatch_timeout = '500 ms'").await?;
    let relay = world.relay().start()?;
    relay.ready().await?;
    let busy = busy_consumer(&world, "nats", "200ms").await?;
    let idle = world.consumer().env("SOURCE", "postgres").start()?;
    idle.ready().await?;
    world.servers.kill(Server::Nats).await?;
    world.servers.kill(Server::Postgres).await?;
    tokio::try_join!(relay.shut_down(), busy.shut_down(), idle.shut_down())?;
    world.servers.resume(Server::Postgres).await?;
    world.servers.resume(Server::Nats).await?;
    // The busy one could not give back what it had: its lease expires.
    let _relay = world.relay().start()?;
    let _successor = world.consumer().start()?;
    world.answered("c1", 1).await?;
    world.settled().await?;
    ensure!(world.count("select count(*) from agent_runs where outcome = 'expired'").await? == 1);
    Ok(())
}
