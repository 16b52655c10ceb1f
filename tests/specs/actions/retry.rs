//! Retry: a failed turn is answered as a turn of its own, and nothing happens twice that was not confirmed.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use consumer::HandlerError;
use serde_json::json;
use shared::{
    actions::{self, ActionError, Retried},
    ids::TurnId,
    settings::Source,
    state::Effect,
};
use sqlx::Connection;
use tests::World;
use tokio::sync::Barrier;
use uuid::Uuid;

use super::{
    Calls, claim_one, delete, delete_now, ends, failed, retry, rows, settle, staff, talk, unread, world,
};
use crate::submit::{session, written};

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_turn_is_answered_as_a_turn_of_its_own_and_its_error_stays() -> Result<()> {
    for source in [Source::Postgres, Source::Nats] {
        let world = world().await?;
        let (_staff, mut calls) = staff(&world, source).await?;
        talk(&world, "c1", &["hello"]).await?;
        let call = calls.next().await?;
        let old = (call.turn.turn_id, call.turn.run_id);
        let first = call.turn.operations.start("set", Effect::Idempotent, &json!({ "a": 1 })).await?;
        let old_key = first.idempotency_key;
        first.complete(&json!({})).await?;
        call.fail(HandlerError::fatal("broken"));
        let error = world.answered("c1", 1).await?.remove(0);

        ensure!(retry(&world, old.0).await? == Retried::Retried);
        let call = calls.next().await?;
        ensure!(call.said() == ["hello"] && call.read() == ["hello"], "it is read as if for the first time");
        ensure!(call.turn.turn_id != old.0 && call.turn.run_id != old.1 && call.turn.attempt == 1);
        let again = call.turn.operations.start("set", Effect::Idempotent, &json!({ "a": 1 })).await?;
        ensure!(again.idempotency_key != old_key, "the same call of a new turn has a new key");
        again.complete(&json!({})).await?;
        let new = call.turn.turn_id;
        call.reply("hi");
        let outcomes = world.answered("c1", 2).await?;
        world.settled().await?;
        ensure!(outcomes[0] == error && outcomes[1].content == "hi" && outcomes[1].turn_id == new.0);
        ensure!(rows(&world, "c1").await? == ["done 2 1"], "{:?}", rows(&world, "c1").await?);
        ensure!(unread(&world, "c1").await? == 2);
        for over in [old.0, new] {
            ensure!(retry(&world, over).await? == Retried::NothingToRetry);
        }
        calls.none()?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_retries_at_once_exactly_one_retries() -> Result<()> {
    const ROUNDS: usize = 20;
    let world = world().await?;
    let mut turns = Vec::new();
    for round in 0..ROUNDS {
        turns.push(failed(&world, &format!("c{round}"), &["hello"]).await?.1);
    }
    let barrier = Arc::new(Barrier::new(2));
    let mut users = Vec::new();
    for _ in 0..2 {
        let (mut app, barrier, turns) = (session(&world).await?, barrier.clone(), turns.clone());
        users.push(tokio::spawn(async move {
            let mut answers = Vec::new();
            for turn in turns {
                barrier.wait().await;
                answers.push(actions::retry_turn(&mut app, turn, false).await?);
            }
            anyhow::Ok(answers)
        }));
    }
    let (first, second) = (users.remove(0).await??, users.remove(0).await??);
    for (one, other) in first.into_iter().zip(second) {
        ensure!(
            (one == Retried::Retried) != (other == Retried::Retried),
            "one retried and one found nothing: {one:?} {other:?}"
        );
    }
    let retried =
        "select count(*) from agent_outbox where status = 'pending' and generation = 2 and attempts = 0";
    ensure!(world.count(retried).await? == i64::try_from(ROUNDS)?);
    Ok(())
}

/// Fails a turn after a call of a tool that ended like this.
async fn fail_after(world: &World, calls: &mut Calls, conversation: &str, end: &str) -> Result<TurnId> {
    talk(world, conversation, &["pay"]).await?;
    let call = calls.next().await?;
    let operation = call.turn.operations.start("pay", Effect::SideEffect, &json!({})).await?;
    match end {
        "completed" => operation.complete(&json!({})).await?,
        "failed" => operation.fail(&json!({})).await?,
        _ => {}
    }
    let turn = call.turn.turn_id;
    call.fail(HandlerError::fatal("broken"));
    world.answered(conversation, 1).await?;
    Ok(turn)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_side_effect_that_may_have_happened_is_repeated_only_with_a_confirmation() -> Result<()> {
    let world = world().await?;
    let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
    for end in ["started", "completed"] {
        let turn = fail_after(&world, &mut calls, end, end).await?;
        let before = written(&world.pool).await?;
        let refused = retry(&world, turn).await;
        ensure!(matches!(refused, Err(ActionError::NeedsConfirmation)), "{end}: {refused:?}");
        ensure!(written(&world.pool).await? == before, "a refusal writes nothing");
        let confirmed = actions::retry_turn(&mut *world.pool.acquire().await?, turn, true).await?;
        ensure!(confirmed == Retried::Retried);
        calls.next().await?.reply("paid");
        world.answered(end, 2).await?;
    }
    let turn = fail_after(&world, &mut calls, "failed", "failed").await?;
    ensure!(retry(&world, turn).await? == Retried::Retried, "a known failure has no effect");
    calls.next().await?.reply("paid");
    world.answered("failed", 2).await?;
    world.settled().await?;
    let unknown = retry(&world, TurnId(Uuid::from_u128(1))).await;
    ensure!(matches!(unknown, Err(ActionError::TurnNotFound)), "{unknown:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_that_is_busy_is_left_alone_and_each_retried_turn_is_answered_by_itself() -> Result<()> {
    let world = world().await?;
    let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
    world.create_conversation("c1").await?;
    let mut turns = Vec::new();
    for content in ["a", "b"] {
        world.submit("c1", content).await?;
        let call = calls.next().await?;
        turns.push(call.turn.turn_id);
        call.fail(HandlerError::fatal("broken"));
        world.answered("c1", turns.len()).await?;
    }
    world.submit("c1", "busy").await?;
    let busy = calls.next().await?;
    let lane = world.lane("c1").await?;
    world.submit("c1", "later").await?;
    for turn in turns {
        ensure!(retry(&world, turn).await? == Retried::Retried);
    }
    ensure!(world.lane("c1").await? == lane, "the lane is left alone");
    busy.reply("done");
    for expected in ["a", "b", "later"] {
        let call = calls.next().await?;
        ensure!(call.said() == [expected], "{:?} and not {expected}", call.said());
        call.reply(&format!("re {expected}"));
    }
    world.settled().await?;
    let said: Vec<_> = world.outcomes("c1").await?.into_iter().map(|outcome| outcome.content).collect();
    ensure!(said[2..] == ["done", "re a", "re b", "re later"], "{said:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_message_is_not_retried() -> Result<()> {
    let world = world().await?;
    let (ids, turn) = failed(&world, "c1", &["keep", "drop"]).await?;
    delete_now(&world, &ids[1]).await?;
    ensure!(retry(&world, turn).await? == Retried::Retried);
    ensure!(rows(&world, "c1").await? == ["pending free 2 0", "error 1 1"]);
    ensure!(retry(&world, turn).await? == Retried::NothingToRetry);
    let claimed = claim_one(&world, Some("spec")).await?;
    settle(&world.pool, &claimed, false).await?;
    delete_now(&world, &ids[0]).await?;
    let still = "select count(*) from messages where role = 'error' and agent_turn_is_failed(conversation_id, turn_id)";
    ensure!(world.count(still).await? == 0, "a turn without messages is not failed");
    ensure!(retry(&world, claimed.turn_id).await? == Retried::NothingToRetry);
    world.settled().await?;
    ensure!(ends(&world, "c1").await? == ["error handler", "error handler"]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn who_decides_under_an_older_snapshot_fails_instead_of_missing_a_retry() -> Result<()> {
    let world = world().await?;
    let (_, turn) = failed(&world, "c1", &["a"]).await?;
    let waiting = world.submit("c1", "b").await?;
    let mut app = session(&world).await?;
    let mut old = app.begin_with("begin isolation level repeatable read").await?;
    sqlx::query("select from conversations").execute(&mut *old).await?;
    ensure!(retry(&world, turn).await? == Retried::Retried);
    // It sees one row only, whose deletion would make the lane idle.
    let refused = delete(&mut old, &waiting).await.err().context("it went through")?;
    ensure!(format!("{refused:#}").contains("40001"), "{refused:#}");
    old.rollback().await?;
    let claimed = claim_one(&world, Some("spec")).await?;
    settle(&world.pool, &claimed, false).await?;
    let claimed = claim_one(&world, Some("spec")).await?;
    settle(&world.pool, &claimed, false).await?;
    world.settled().await
}
