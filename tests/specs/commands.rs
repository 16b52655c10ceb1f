//! What somebody at a terminal, or a script, can rely on: outputs, exit codes, and that a mistake changes nothing.

mod logs;
mod options;
mod policy;
mod status;
mod submit;

use anyhow::{Result, ensure};
use serde_json::Value;
use tests::{World, world::Output};

/// Runs a command of the relay, with an input.
async fn relay(world: &World, args: &[&str], input: &str) -> Result<Output> {
    world.program("relay").args(args.iter().copied()).output(input).await
}

/// Fails unless the command ended with this code; shows what it said otherwise.
fn ended(output: &Output, code: i32) -> Result<()> {
    ensure!(output.code == Some(code), "{output:?}");
    Ok(())
}

fn lines(output: &Output) -> Result<Vec<Value>> {
    Ok(output.stdout.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
}

/// A world whose turns are answered at once.
async fn answering(world: &World) -> Result<(tests::Process, tests::Process)> {
    world.policy("debounce = '0'").await?;
    Ok((world.relay().start()?, world.consumer().start()?))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_problem_of_a_configuration_is_reported_at_once() -> Result<()> {
    let world = World::new().await?;
    let relay = world.program("relay").args([
        "run",
        "--batch",
        "0",
        "--database-url",
        "postgres://app:hunter2@db/app",
    ]);
    let refused = relay.env("POLL_INTERVAL", "1h").env("NATS_KEY", "/nowhere").output("").await?;
    ended(&refused, 64)?;
    for setting in ["RELAY_BATCH", "DATABASE_URL", "POLL_INTERVAL", "NATS_KEY", "NATS_CERT"] {
        ensure!(refused.stderr.contains(&format!("\n  {setting}: ")), "{setting}: {}", refused.stderr);
    }
    ensure!(!refused.stderr.contains("hunter2"), "{}", refused.stderr);

    let consumer = world.program("consumer").args(["run", "--concurrency", "0"]).output("").await?;
    ended(&consumer, 64)?;
    ensure!(
        consumer.stderr.contains("HANDLER: ") && consumer.stderr.contains("CONCURRENCY: "),
        "{consumer:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_start_says_why_once() -> Result<()> {
    let world = World::new().await?;
    let without_nats = world.relay().env("NATS_URL", "nats://127.0.0.1:1").output("").await?;
    ended(&without_nats, 1)?;
    ensure!(without_nats.stderr.matches("cannot connect to NATS").count() == 1, "{without_nats:?}");
    let without_postgres =
        world.relay().env("DATABASE_URL", "postgres://127.0.0.1:1/none").output("").await?;
    ended(&without_postgres, 1)?;
    ensure!(
        without_postgres.stderr.matches("cannot connect to Postgres").count() == 1,
        "{without_postgres:?}"
    );
    sqlx::query("drop table _sqlx_migrations").execute(&world.pool).await?;
    for binary in [world.relay(), world.consumer()] {
        let unmigrated = binary.output("").await?;
        ended(&unmigrated, 1)?;
        ensure!(unmigrated.stderr.matches("relay migrate").count() == 1, "{unmigrated:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_cuts_short_and_gives_back_what_runs() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0'").await?;
    world.create_conversation("c1").await?;
    let _relay = world.relay().start()?;
    let slow = world.consumer().env("ECHO_DELAY", "1h").env("DRAIN_TIMEOUT", "1h").start()?;
    world.submit("c1", "hello").await?;
    world.eventually("it runs", async || Ok(world.lane("c1").await?.state == "running")).await?;
    slow.terminate()?;
    // It waits for what runs, and says that it takes no more.
    world
        .eventually("it is stopping", async || {
            Ok(slow.get("/readyz").await?.1.contains(r#""stopping":true"#))
        })
        .await?;
    ensure!(world.lane("c1").await?.state == "running");
    slow.shut_down().await?;
    ensure!(world.count("select count(*) from agent_runs where outcome = 'released'").await? == 1);
    let _successor = world.consumer().start()?;
    world.answered("c1", 1).await?;
    world.settled().await
}
