//! Cancel and delete against what ends a run: exactly one of them decides, in either order, and nothing is said twice.

use std::sync::Arc;

use anyhow::{Result, ensure};
use consumer::HandlerError;
use serde_json::json;
use shared::{
    actions::{self, Cancelled},
    claim::{self, Claim},
    ids::{AgentName, TurnId},
    recovery,
    settings::Source,
    settle::Settled,
    state::Effect,
};
use sqlx::Connection;
use tests::World;
use tokio::{sync::Barrier, task::JoinHandle};

use super::{Call, claim_one, delete, ends, settle, staff, talk, unread, world};
use crate::submit::{blocked, session};

/// What a finish or a settle waits with.
const END: &str = "select 1 from conversations where id = $1 for no key update";

fn cancelling(mut app: sqlx::PgConnection, turn: TurnId) -> JoinHandle<Result<Cancelled>> {
    tokio::spawn(async move { Ok(actions::cancel_turn(&mut app, turn).await?) })
}

/// Ends a run by `end` and cancels its turn, in this order or the other: both wait for the conversation, and are let
/// through as they came.
async fn in_order(
    world: &World,
    call: Call,
    cancel_first: bool,
    end: impl FnOnce(Call),
) -> Result<Cancelled> {
    let turn = call.turn.turn_id;
    let (app, mut holder) = (session(world).await?, session(world).await?);
    let mut held = holder.begin().await?;
    sqlx::query("select from conversations where id = $1 for update")
        .bind(call.turn.conversation_id.as_str())
        .execute(&mut *held)
        .await?;
    let cancelled = if cancel_first {
        let cancelled = cancelling(app, turn);
        blocked(world, "cancel_turn", 1).await?;
        end(call);
        blocked(world, END, 1).await?;
        cancelled
    } else {
        end(call);
        blocked(world, END, 1).await?;
        let cancelled = cancelling(app, turn);
        blocked(world, "cancel_turn", 1).await?;
        cancelled
    };
    held.rollback().await?;
    cancelled.await?
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_cancel_and_a_finish_the_first_one_wins() -> Result<()> {
    let world = world().await?;
    world.policy("lease = '1 min'").await?;
    let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
    for round in 0..10 {
        let (conversation, cancel_first) = (format!("c{round}"), round % 2 == 0);
        talk(&world, &conversation, &["hello"]).await?;
        let call = calls.next().await?;
        let answer = in_order(&world, call, cancel_first, |call| call.reply("hi")).await?;
        world.answered(&conversation, 1).await?;
        let (expected, end) = if cancel_first {
            (Cancelled::Requested, "error cancelled")
        } else {
            (Cancelled::NothingToCancel, "assistant")
        };
        ensure!(answer == expected, "cancel first: {cancel_first}: {answer:?}");
        ensure!(ends(&world, &conversation).await? == [end], "cancel first: {cancel_first}");
        ensure!(unread(&world, &conversation).await? == 1);
    }
    world.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_and_a_finish_at_the_same_moment_end_a_turn_once() -> Result<()> {
    const ROUNDS: usize = 60;
    let world = world().await?;
    world.policy("lease = '1 min'").await?;
    let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
    let barrier = Arc::new(Barrier::new(2));
    for round in 0..ROUNDS {
        let conversation = format!("c{round}");
        talk(&world, &conversation, &["hello"]).await?;
        let call = calls.next().await?;
        let (turn, mut app) = (call.turn.turn_id, session(&world).await?);
        let user = tokio::spawn({
            let barrier = barrier.clone();
            async move {
                barrier.wait().await;
                anyhow::Ok(actions::cancel_turn(&mut app, turn).await?)
            }
        });
        barrier.wait().await;
        call.reply("hi");
        let expected = match user.await?? {
            Cancelled::Requested => "error cancelled",
            Cancelled::NothingToCancel => "assistant",
            Cancelled::Cancelled => anyhow::bail!("a running turn was cancelled without its run"),
        };
        world.answered(&conversation, 1).await?;
        world.quiet().await?;
        ensure!(ends(&world, &conversation).await? == [expected], "{expected}");
    }
    world.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_cancel_and_a_failed_attempt_the_cancel_ends_the_turn_in_either_order() -> Result<()> {
    let world = world().await?;
    world.policy("lease = '1 min', retry_backoff = '1 min'").await?;
    let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
    for round in 0..6 {
        let (conversation, cancel_first) = (format!("c{round}"), round % 2 == 0);
        talk(&world, &conversation, &["hello"]).await?;
        let call = calls.next().await?;
        let fail = |call: Call| call.fail(HandlerError::retryable("not now"));
        let answer = in_order(&world, call, cancel_first, fail).await?;
        let expected = if cancel_first { Cancelled::Requested } else { Cancelled::Cancelled };
        ensure!(answer == expected, "cancel first: {cancel_first}: {answer:?}");
        world.answered(&conversation, 1).await?;
        ensure!(ends(&world, &conversation).await? == ["error cancelled"]);
        ensure!(unread(&world, &conversation).await? == 1);
    }
    world.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_cancel_and_a_recovery_the_cancel_ends_the_turn_in_either_order() -> Result<()> {
    for cancel_first in [true, false] {
        let world = world().await?;
        talk(&world, "c1", &["hello"]).await?;
        let claimed = claim_one(&world, Some("dead")).await?;
        sqlx::query("update agent_lanes set wake_at = clock_timestamp()").execute(&world.pool).await?;
        if cancel_first {
            let mut app = session(&world).await?;
            let mut open = app.begin().await?;
            ensure!(actions::cancel_turn(&mut open, claimed.turn_id).await? == Cancelled::Requested);
            ensure!(recovery::recover_expired(&world.pool).await? == 0, "somebody holds its conversation");
            open.commit().await?;
        }
        ensure!(recovery::recover_expired(&world.pool).await? == 1);
        if !cancel_first {
            ensure!(super::cancel(&world, claimed.turn_id).await? == Cancelled::Cancelled);
        }
        world.settled().await?;
        ensure!(ends(&world, "c1").await? == ["error cancelled"]);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_and_a_claim_at_the_same_moment_end_a_turn_once() -> Result<()> {
    const ROUNDS: usize = 50;
    let world = world().await?;
    let barrier = Arc::new(Barrier::new(2));
    for round in 0..ROUNDS {
        let (conversation, worker) = (format!("c{round}"), (round % 2 == 0).then_some("spec"));
        talk(&world, &conversation, &["hello"]).await?;
        let first = claim_one(&world, Some("spec")).await?;
        ensure!(matches!(settle(&world.pool, &first, true).await?, Settled::Retried { .. }));
        let (turn, mut app) = (first.turn_id, session(&world).await?);
        let user = tokio::spawn({
            let barrier = barrier.clone();
            async move {
                barrier.wait().await;
                anyhow::Ok(actions::cancel_turn(&mut app, turn).await?)
            }
        });
        barrier.wait().await;
        let agents = [AgentName::default()];
        let claims = claim::claim(&world.pool, Claim { batch: 10, agents: Some(&agents), worker }).await?;
        let answer = user.await??;
        if answer == Cancelled::Requested {
            ensure!(worker.is_some() && claims.turns.len() == 1, "only a running turn is asked to stop");
            settle(&world.pool, &claims.turns[0], true).await?;
        }
        world.quiet().await?;
        ensure!(ends(&world, &conversation).await? == ["error cancelled"], "{answer:?}");
    }
    world.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_deletion_and_a_finish_the_first_one_wins() -> Result<()> {
    let world = world().await?;
    world.policy("lease = '1 min'").await?;
    let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
    for round in 0..6 {
        let (conversation, delete_first) = (format!("c{round}"), round % 2 == 0);
        let ids = talk(&world, &conversation, &["hello"]).await?;
        let call = calls.next().await?;
        let (mut app, mut holder) = (session(&world).await?, session(&world).await?);
        let mut held = holder.begin().await?;
        sqlx::query("select from conversations where id = $1 for update")
            .bind(&conversation)
            .execute(&mut *held)
            .await?;
        let deleting = || tokio::spawn(async move { delete(&mut app, &ids[0]).await });
        let deleted = if delete_first {
            let deleted = deleting();
            blocked(&world, "delete_message", 1).await?;
            call.reply("hi");
            blocked(&world, END, 1).await?;
            deleted
        } else {
            call.reply("hi");
            blocked(&world, END, 1).await?;
            let deleted = deleting();
            blocked(&world, "delete_message", 1).await?;
            deleted
        };
        held.rollback().await?;
        deleted.await??;
        world.quiet().await?;
        let expected: &[&str] = if delete_first { &[] } else { &["assistant"] };
        ensure!(ends(&world, &conversation).await? == expected, "delete first: {delete_first}");
    }
    world.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_side_effect_that_starts_while_its_message_is_deleted_is_refused_or_shown() -> Result<()> {
    const ROUNDS: usize = 30;
    let world = world().await?;
    let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
    let barrier = Arc::new(Barrier::new(2));
    for round in 0..ROUNDS {
        let conversation = format!("c{round}");
        let ids = talk(&world, &conversation, &["pay"]).await?;
        let call = calls.next().await?;
        let mut app = session(&world).await?;
        let user = tokio::spawn({
            let barrier = barrier.clone();
            async move {
                barrier.wait().await;
                delete(&mut app, &ids[0]).await
            }
        });
        barrier.wait().await;
        let started = call.turn.operations.start("pay", Effect::SideEffect, &json!({})).await;
        user.await??;
        world.quiet().await?;
        let outcomes = world.outcomes(&conversation).await?;
        if started.is_ok() {
            let error = outcomes.first().and_then(|outcome| outcome.error.clone()).unwrap_or_default();
            ensure!(error["kind"] == "cancelled" && error["retryable"] == false, "{error}");
            ensure!(error["operations"][0]["name"] == "pay", "{error}");
        } else {
            ensure!(outcomes.is_empty(), "{outcomes:?}");
        }
    }
    world.settled().await
}
