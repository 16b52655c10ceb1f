//! `relay status`: what is known of the pipeline and of one conversation, and who would have to do something.

use anyhow::{Result, ensure};
use serde_json::Value;
use tests::World;

use super::{answering, ended, lines, relay};

/// The page of a conversation, for people and for programs.
async fn page(world: &World, conversation: &str) -> Result<(String, Value)> {
    let page = relay(world, &["status", conversation], "").await?;
    ended(&page, 0)?;
    Ok((page.stdout, lines(&relay(world, &["status", conversation, "--json"], "").await?)?.remove(0)))
}

/// Makes a lane look as if nothing had happened to it for a while.
async fn age_lanes(world: &World) -> Result<()> {
    let age = "update agent_lanes set wake_at = wake_at - interval '40 s', claimed_at = claimed_at - interval '40 s'
        where state <> 'idle'";
    sqlx::query(age).execute(&world.pool).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn status_tells_what_is_known_of_a_conversation_and_of_the_pipeline() -> Result<()> {
    let world = World::new().await?;
    world.create_conversation("c1").await?;
    world.submit("c1", "red \u{1b}[31m\nline").await?;
    let page = relay(&world, &["status", "c1"], "").await?;
    ended(&page, 0)?;
    ensure!(page.stdout.contains("status        waiting for"), "{}", page.stdout);
    ensure!(
        page.stdout.contains("red \\u{1b}[31m\\nline"),
        "a message must not steer the terminal: {}",
        page.stdout
    );

    let pipeline = lines(&relay(&world, &["status", "--json"], "").await?)?;
    ensure!(pipeline[0]["agents"]["default"]["waiting"] == 1, "{pipeline:?}");
    let conversation = lines(&relay(&world, &["status", "c1", "--json"], "").await?)?;
    ensure!(
        conversation[0]["status"] == "waiting" && conversation[0]["messages"][0]["seq"] == 1,
        "{conversation:?}"
    );

    let missing = relay(&world, &["status", "c2"], "").await?;
    ended(&missing, 1)?;
    ensure!(missing.stderr == "error: there is no conversation c2\n", "{missing:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_agent_is_named_as_what_its_conversations_wait_for() -> Result<()> {
    let world = World::new().await?;
    world.policy("paused = true").await?;
    world.create_conversation("c1").await?;
    world.submit("c1", "hello").await?;
    age_lanes(&world).await?;
    let (text, json) = page(&world, "c1").await?;
    ensure!(text.contains("agent         default (paused)"), "{text}");
    ensure!(text.contains("its agent, which is paused: relay agent set default paused=false"), "{text}");
    ensure!(json["paused"] == true && json["waits_for"].is_string(), "{json}");
    let pipeline = relay(&world, &["status"], "").await?.stdout;
    ensure!(pipeline.contains("paused: relay agent set default paused=false"), "{pipeline}");
    ensure!(!pipeline.contains("does a relay run"), "{pipeline}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_claims_and_what_nobody_begins_is_told_apart() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0'").await?;
    world.create_conversation("c1").await?;
    world.submit("c1", "hello").await?;
    age_lanes(&world).await?;
    ensure!(page(&world, "c1").await?.0.contains("does a relay run?"));
    ensure!(
        relay(&world, &["status"], "").await?.stdout.contains("nobody has claimed it: does a relay run?")
    );

    let claimer = world.relay().start()?;
    world.eventually("it is queued", async || Ok(world.lane("c1").await?.state == "queued")).await?;
    drop(claimer);
    age_lanes(&world).await?;
    let (text, _) = page(&world, "c1").await?;
    ensure!(text.contains("nobody has begun it: does a consumer of default run, and is it free?"), "{text}");
    ensure!(text.contains("asked for     due for"), "{text}");
    let pipeline = relay(&world, &["status"], "").await?.stdout;
    ensure!(pipeline.contains("nobody has begun it: does a consumer of default run?"), "{pipeline}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_turns_of_a_conversation_stay_named_when_they_are_over() -> Result<()> {
    let world = World::new().await?;
    let _processes = answering(&world).await?;
    world.create_conversation("c1").await?;
    world.submit("c1", "hello").await?;
    let turn = world.answered("c1", 1).await?[0].turn_id.to_string();
    let (text, json) = page(&world, "c1").await?;
    ensure!(text.contains(&format!("last turn     {turn}")), "{text}");
    ensure!(json["last_turn_id"] == turn.as_str() && json["runs"][0]["turn_id"] == turn.as_str(), "{json}");
    ensure!(json["waits_for"].is_null(), "{json}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_called_a_lease_and_its_loss_a_loss() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0', lease = '1 min'").await?;
    world.create_conversation("c1").await?;
    let _relay = world.relay().start()?;
    let consumer = world.consumer().env("ECHO_DELAY", "1h").start()?;
    world.submit("c1", "hello").await?;
    world.eventually("it runs", async || Ok(world.lane("c1").await?.state == "running")).await?;
    let (text, json) = page(&world, "c1").await?;
    ensure!(text.contains("\nlease         for 5") && !text.contains("\ndue "), "{text}");
    let answer = format!("the answer of {}", consumer.name());
    ensure!(json["waits_for"] == answer.as_str(), "{json}");
    let pipeline = lines(&relay(&world, &["status", "--json"], "").await?)?.remove(0);
    let agent = &pipeline["agents"]["default"];
    ensure!(agent["running"] == 1 && agent["workers"] == 1 && agent["recovering"] == 0, "{agent}");
    Ok(())
}
