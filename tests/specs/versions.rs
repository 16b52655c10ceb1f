//! The servers that are supported, oldest and newest: the whole life of a turn on each.

use anyhow::{Context, Result, ensure};
use consumer::{HandlerError, Reply, Turn, TurnHandler, handler_fn};
use serde_json::json;
use shared::{settings::Source, state::Effect};
use tests::{Server, Servers, Spec, World, programs};

use crate::load::{PATIENCE, said};

/// Does as it is told: `fail` fails for good, `twice` fails once, anything else is answered after a tool was called.
fn obedient() -> impl TurnHandler {
    handler_fn(|turn: Turn| async move {
        match said(&turn).join("+").as_str() {
            "fail" => Err(HandlerError::fatal("as told")),
            "twice" if turn.attempt == 1 => Err(HandlerError::retryable("as told")),
            text => {
                let failed = |error| HandlerError::fatal(format!("{error}"));
                let tool = turn.operations.start("tool", Effect::SideEffect, &json!({ "a": 1 })).await;
                let tool = tool.map_err(failed)?;
                tool.complete(&json!("done")).await.map_err(failed)?;
                Ok(Reply::new(format!("re {text}")))
            }
        }
    })
}

/// Submits and waits for the outcome.
async fn ask(world: &World, content: &str, expected: &str) -> Result<()> {
    let known = world.outcomes("c1").await?.len();
    world.submit("c1", content).await?;
    let answered = async || Ok(world.outcomes("c1").await?.len() > known);
    world.eventually_within(PATIENCE, "it is answered", answered).await?;
    let outcome = world.outcomes("c1").await?.pop().context("no outcome")?;
    ensure!(outcome.role == expected, "{content}: {outcome:?}");
    Ok(())
}

async fn whole_life(world: &World, source: Source) -> Result<()> {
    world
        .policy("debounce = '0', retry_backoff = '10 ms', dispatch_timeout = '500 ms', lease = '1 s'")
        .await?;
    world.create_conversation("c1").await?;
    let relay = if source == Source::Nats { Some(world.local_relay().await?) } else { None };
    let consumer = world.local_consumer(world.consumer_settings(source), obedient()).await?;
    ask(world, "hello", "assistant").await?;
    ask(world, "twice", "assistant").await?;
    ask(world, "fail", "error").await?;
    world.settled().await?;
    let attached = "select count(*) from operations where message_id is not null and status = 'completed'";
    ensure!(world.count(attached).await? == 2);
    consumer.stop().await?;

    // A consumer that dies, and one that comes after it.
    let name = if source == Source::Nats { "nats" } else { "postgres" };
    let victim = world.consumer().env("SOURCE", name).failpoints("before_finish=kill").start()?;
    world.submit("c1", "survive").await?;
    victim.ended().await?;
    let _successor = world.consumer().env("SOURCE", name).start()?;
    let answered = async || Ok(world.outcomes("c1").await?.len() == 4);
    world.eventually_within(PATIENCE, "it is answered", answered).await?;

    if let Some(relay) = relay {
        // A broker that forgets everything between publish and begin.
        world.servers.wipe_nats().await?;
        ask(world, "again", "assistant").await?;
        world.servers.restart(Server::Postgres).await?;
        ask(world, "and again", "assistant").await?;
        relay.stop().await?;
    }
    world.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_lives_its_whole_life_on_the_oldest_and_the_newest_servers() -> Result<()> {
    let oldest = programs::nats_server_oldest()?;
    let newest = programs::postgres_18_bin()?;
    // Each server that is installed here with each other: what is missing is said, and is an error in CI.
    let both = Spec { nats_bin: oldest.clone(), postgres_bin: newest.clone(), ..Spec::default() };
    let crossed = Spec::default();
    let lives = [both, crossed].map(|spec| async {
        let servers = Servers::private(spec).await?;
        for source in [Source::Nats, Source::Postgres] {
            whole_life(&World::on(servers.clone()).await?, source).await?;
        }
        anyhow::Ok(servers)
    });
    let [one, other] = lives;
    let (one, other) = tokio::try_join!(one, other)?;
    let version = async |servers: Servers| {
        let world = World::on(servers).await?;
        let major = world.count("select current_setting('server_version_num')::bigint / 10000").await?;
        // The client connects in the background.
        world.jetstream().query_account().await?;
        anyhow::Ok((major, world.nats.server_info().version))
    };
    let (newer, older) = (version(one).await?, version(other).await?);
    ensure!(newest.is_none() || newer.0 == 18, "{newer:?}");
    ensure!(oldest.is_none() || newer.1.starts_with("2.10.") && newer.1 != older.1, "{newer:?}, {older:?}");
    Ok(())
}
