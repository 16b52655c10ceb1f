//! Requeue: every failed turn that may be retried is, once, and the rest is counted.

use anyhow::{Result, ensure};
use consumer::{HandlerError, Reply, Turn, handler_fn};
use serde_json::{Value, json};
use shared::{settings::Source, state::Effect};
use sqlx::Connection;
use tests::World;

use super::{cancel, claim_one, rows, talk, world};
use crate::submit::{session, written};

/// Fails every first generation; pays before it fails where it is told to pay.
async fn fail_all(world: &World, conversations: usize) -> Result<()> {
    let handler = handler_fn(|turn: Turn| async move {
        if crate::load::said(&turn).join("") == "pay" {
            let failed = |error| HandlerError::fatal(format!("{error}"));
            let _paid = turn.operations.start("pay", Effect::SideEffect, &json!({})).await.map_err(failed)?;
        }
        Err(HandlerError::fatal("broken"))
    });
    let consumer = world.local_consumer(world.consumer_settings(Source::Postgres), handler).await?;
    for number in 0..conversations {
        let conversation = format!("c{number}");
        world.create_conversation(&conversation).await?;
        world.submit(&conversation, if number % 5 == 0 { "pay" } else { "hello" }).await?;
    }
    world.settled().await?;
    consumer.stop().await
}

async fn requeue(world: &World, args: &[&str]) -> Result<(Option<i32>, Value)> {
    let args = [&["requeue", "--all", "--json"], args].concat();
    let output = world.program("relay").args(args).output("").await?;
    let tally =
        serde_json::from_str(&output.stdout).map_err(|error| anyhow::anyhow!("{error} in {output:?}"))?;
    Ok((output.code, tally))
}

fn tally(dry_run: bool, retried: u64, needs_confirmation: u64) -> Value {
    json!({ "dry_run": dry_run, "retried": retried, "needs_confirmation": needs_confirmation, "cancelled": 0,
            "nothing_to_retry": 0, "busy": 0 })
}

#[tokio::test(flavor = "multi_thread")]
async fn all_that_may_be_retried_is_answered_and_the_rest_is_counted() -> Result<()> {
    let world = world().await?;
    fail_all(&world, 25).await?;
    let before = written(&world.pool).await?;
    ensure!(requeue(&world, &["--dry-run"]).await? == (Some(0), tally(true, 20, 5)));
    ensure!(requeue(&world, &["--dry-run", "--confirm-side-effects"]).await?.1 == tally(true, 25, 0));
    let kind = requeue(&world, &["--dry-run", "--kind", "side_effect_unknown"]).await?;
    ensure!(kind.1 == tally(true, 0, 5), "{kind:?}");
    ensure!(requeue(&world, &["--kind", "timeout"]).await?.1 == tally(false, 0, 0));
    ensure!(requeue(&world, &["--agent", "nobody"]).await?.1 == tally(false, 0, 0));
    ensure!(written(&world.pool).await? == before, "nothing was changed");

    ensure!(requeue(&world, &[]).await? == (Some(0), tally(false, 20, 5)));
    ensure!(requeue(&world, &[]).await?.1 == tally(false, 0, 5), "once");
    let answer = handler_fn(|_turn: Turn| async { Ok(Reply::new("yes")) });
    let _consumer = world.local_consumer(world.consumer_settings(Source::Postgres), answer).await?;
    world.settled().await?;
    ensure!(world.count("select count(*) from messages where role = 'assistant'").await? == 20);
    ensure!(requeue(&world, &["--confirm-side-effects"]).await?.1 == tally(false, 5, 0));
    world.settled().await?;
    ensure!(world.count("select count(*) from messages where role = 'assistant'").await? == 25);
    ensure!(requeue(&world, &[]).await?.1 == tally(false, 0, 0));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_again_is_not_retried_again_by_the_same_call() -> Result<()> {
    let world = world().await?;
    fail_all(&world, 30).await?;
    let broken = handler_fn(|_turn: Turn| async { Err(HandlerError::fatal("still broken")) });
    let _consumer = world.local_consumer(world.consumer_settings(Source::Postgres), broken).await?;
    ensure!(requeue(&world, &[]).await?.1 == tally(false, 24, 6));
    world.settled().await?;
    ensure!(world.count("select max(generation)::bigint from agent_outbox").await? == 2);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_somebody_holds_is_left_for_the_next_call() -> Result<()> {
    let world = world().await?;
    fail_all(&world, 4).await?;
    let mut app = session(&world).await?;
    let mut holder = app.begin().await?;
    sqlx::query("select from conversations where id = 'c2' for update").execute(&mut *holder).await?;
    let (code, counted) = requeue(&world, &[]).await?;
    ensure!(code == Some(1) && counted["retried"] == 2 && counted["busy"] == 1, "{counted}");
    holder.rollback().await?;
    ensure!(requeue(&world, &[]).await? == (Some(0), tally(false, 1, 1)));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_its_user_cancelled_stays_cancelled_unless_that_kind_is_asked_for() -> Result<()> {
    let world = world().await?;
    talk(&world, "c1", &["hello"]).await?;
    let claimed = claim_one(&world, None).await?;
    cancel(&world, claimed.turn_id).await?;
    let (code, counted) = requeue(&world, &[]).await?;
    ensure!(code == Some(0) && counted["retried"] == 0 && counted["cancelled"] == 1, "{counted}");
    ensure!(rows(&world, "c1").await? == ["error 1 1"]);
    ensure!(requeue(&world, &["--kind", "cancelled"]).await?.1 == tally(false, 1, 0));
    ensure!(rows(&world, "c1").await? == ["pending free 2 0"]);
    Ok(())
}
