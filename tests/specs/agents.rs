//! Agents that come, pause and go on while everything runs.

use anyhow::{Result, ensure};
use shared::settings::{ConsumerSettings, Source};
use tests::World;

use crate::load::{PATIENCE, Witness, no_attempt_was_lost};

async fn add_agent(world: &World, name: &str) -> Result<()> {
    sqlx::query("insert into agents (name, debounce) values ($1, '0')")
        .bind(name)
        .execute(&world.pool)
        .await?;
    Ok(())
}

async fn create_conversation(world: &World, id: &str, agent: &str) -> Result<()> {
    sqlx::query("select create_conversation($1, $2)").bind(id).bind(agent).execute(&world.pool).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_added_while_everything_runs_gets_its_durable_and_is_served() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0'").await?;
    let relay = world.relay().start()?;
    let _consumer = world.consumer().start()?;
    relay.ready().await?;
    world.create_conversation("old").await?;
    add_agent(&world, "late").await?;
    create_conversation(&world, "new", "late").await?;
    world.submit("new", "hello").await?;
    // By the relay: nobody else is there to serve the agent yet.
    let made = async || {
        let stream = world.jetstream().get_stream(&world.stream).await?;
        Ok(stream.consumer_info("workers-late").await.is_ok())
    };
    world.eventually_within(PATIENCE, "its durable is made", made).await?;
    let _late = world.consumer().env("AGENT", "late").start()?;
    world.answered("new", 1).await?;
    world.submit("old", "hello").await?;
    world.answered("old", 1).await?;
    world.settled().await?;
    no_attempt_was_lost(&world).await
}

/// Waits until a claimer has looked for work once more, and sleeps.
async fn looked(world: &World, claimer: &str) -> Result<()> {
    let slept_since = async |moment: Option<String>| {
        let until = "select until::text from agent_sleepers where name = $1
            and until - interval '2 s' > coalesce($2::timestamptz, (select max(created_at) from messages))";
        let until: Option<String> =
            sqlx::query_scalar(until).bind(claimer).bind(moment).fetch_optional(&world.pool).await?;
        anyhow::Ok(until)
    };
    let mut since = None;
    // It says that it sleeps, looks again, and sleeps: the second word stands after a whole look.
    for _ in 0..2 {
        let said = async || {
            let until = slept_since(since.clone()).await?;
            since = until.clone().or(since.take());
            Ok(until.is_some())
        };
        world.eventually_within(PATIENCE, "it sleeps", said).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_agent_is_not_claimed_and_goes_on_when_it_is_unpaused() -> Result<()> {
    for source in [Source::Nats, Source::Postgres] {
        let world = World::new().await?;
        world.policy("debounce = '0'").await?;
        add_agent(&world, "busy").await?;
        create_conversation(&world, "busy", "busy").await?;
        let relay = if source == Source::Nats { Some(world.local_relay().await?) } else { None };
        let witness = Witness::default();
        let mut consumers = Vec::new();
        for agent in ["default", "busy"] {
            let settings = ConsumerSettings { agent: agent.parse()?, ..world.consumer_settings(source) };
            consumers.push(world.local_consumer(settings, witness.handler()).await?);
        }
        let claimer = relay.as_ref().unwrap_or(&consumers[0]).name();
        sqlx::query("update agents set paused = true where name = 'default'").execute(&world.pool).await?;

        // Once the pause is noticed, a message is left alone.
        let mut tries = 0;
        let noticed = async || {
            tries += 1;
            let conversation = format!("paused-{tries}");
            world.create_conversation(&conversation).await?;
            world.submit(&conversation, "hello").await?;
            looked(&world, claimer).await?;
            let lane = world.lane(&conversation).await?;
            Ok(lane.state == "waiting" && lane.attempt == 0)
        };
        world.eventually_within(PATIENCE, "the pause is noticed", noticed).await?;
        let calls = witness.calls();
        world.create_conversation("left-alone").await?;
        world.submit("left-alone", "hello").await?;
        world.submit("busy", "hello").await?;
        world.answered("busy", 1).await?;
        looked(&world, claimer).await?;
        ensure!(world.lane("left-alone").await?.state == "waiting");
        ensure!(witness.calls() == calls + 1, "only the other agent was called");

        sqlx::query("update agents set paused = false").execute(&world.pool).await?;
        world.settled().await?;
        no_attempt_was_lost(&world).await?;
    }
    Ok(())
}
