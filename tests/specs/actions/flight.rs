//! Deleting a message that is in flight: its turn ends, and the others are answered without it, unless that could double
//! what was done for it.

use anyhow::{Context, Result, ensure};
use consumer::HandlerError;
use serde_json::json;
use shared::{
    actions::{self, ActionError, Cancelled, Deleted, Retried},
    ids::TurnId,
    settings::Source,
    state::Effect,
};

use super::{cancel, claim_one, delete_now, ends, retry, rows, settle, staff, talk, unread, world};

#[tokio::test(flavor = "multi_thread")]
async fn a_running_turn_that_loses_a_message_ends_and_the_others_form_a_new_one() -> Result<()> {
    for source in [Source::Postgres, Source::Nats] {
        let world = world().await?;
        let ids = talk(&world, "c1", &["a", "b", "c"]).await?;
        let (_staff, mut calls) = staff(&world, source).await?;
        let old = calls.next().await?;
        ensure!(old.said() == ["a", "b", "c"]);
        let read = old.turn.operations.start("look", Effect::Read, &json!({})).await?;
        ensure!(delete_now(&world, &ids[1]).await? == Deleted::Deleted);
        old.cancelled().await?;
        let refused = old.turn.operations.start("look", Effect::Read, &json!({})).await;
        ensure!(refused.is_err(), "a run that has lost its lane starts no operation");
        drop(read);
        let (turn, run) = (old.turn.turn_id, old.turn.run_id);
        old.reply("too late");
        let new = calls.next().await?;
        ensure!(new.read() == ["a", "c"] && new.said() == ["a", "c"], "{:?}", new.read());
        ensure!(new.turn.turn_id != turn && new.turn.run_id != run && new.turn.attempt == 1);
        new.reply("re a c");
        world.settled().await?;
        let outcomes = world.outcomes("c1").await?;
        ensure!(outcomes.len() == 1 && outcomes[0].content == "re a c" && outcomes[0].turn_id != turn.0);
        ensure!(unread(&world, "c1").await? == 1);
        // The old turn is known still, and over.
        ensure!(retry(&world, turn).await? == Retried::NothingToRetry);
        ensure!(cancel(&world, turn).await? == Cancelled::NothingToCancel);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_is_queued_or_waits_for_its_retry_loses_a_message_in_the_same_way() -> Result<()> {
    for state in ["queued", "waiting"] {
        let world = world().await?;
        world.policy("retry_backoff = '1 min'").await?;
        let ids = talk(&world, "c1", &["a", "b"]).await?;
        let old = claim_one(&world, (state == "waiting").then_some("spec")).await?;
        if state == "waiting" {
            settle(&world.pool, &old, true).await?;
        }
        ensure!(world.lane("c1").await?.state == state);
        delete_now(&world, &ids[0]).await?;
        ensure!(rows(&world, "c1").await? == ["pending free 1 0"], "{:?}", rows(&world, "c1").await?);
        tests::invariants::assert_consistent(&world.pool).await?;
        let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
        let new = calls.next().await?;
        ensure!(new.read() == ["b"] && new.turn.attempt == 1 && new.turn.turn_id != old.turn_id);
        new.reply("re b");
        world.settled().await?;
        ensure!(ends(&world, "c1").await? == ["assistant"]);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_loses_its_only_message_ends_without_a_word() -> Result<()> {
    for state in ["queued", "running", "waiting"] {
        let world = world().await?;
        world.policy("retry_backoff = '1 min'").await?;
        let ids = talk(&world, "c1", &["a"]).await?;
        let claimed = claim_one(&world, (state != "queued").then_some("spec")).await?;
        if state == "waiting" {
            settle(&world.pool, &claimed, true).await?;
        }
        ensure!(world.lane("c1").await?.state == state);
        delete_now(&world, &ids[0]).await?;
        world.settled().await?;
        ensure!(ends(&world, "c1").await?.is_empty() && unread(&world, "c1").await? == 0);
        world.submit("c1", "b").await?;
        let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
        let call = calls.next().await?;
        ensure!(call.read() == ["b"], "{:?}", call.read());
        call.reply("re b");
        world.settled().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_with_a_started_side_effect_is_cancelled_as_a_whole_when_it_loses_a_message() -> Result<()> {
    let world = world().await?;
    let ids = talk(&world, "c1", &["a", "b"]).await?;
    let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
    let old = calls.next().await?;
    let turn = old.turn.turn_id;
    let paid = old.turn.operations.start("pay", Effect::SideEffect, &json!({})).await?;
    delete_now(&world, &ids[0]).await?;
    old.cancelled().await?;
    paid.complete(&json!({})).await?;
    old.reply("too late");
    let outcomes = world.answered("c1", 1).await?;
    world.settled().await?;
    calls.none()?;
    let error = outcomes[0].error.clone().context("no error")?;
    ensure!(error["kind"] == "cancelled" && error["retryable"] == false, "{error}");
    ensure!(error["operations"][0]["name"] == "pay" && outcomes[0].content.contains("pay"), "{outcomes:?}");
    ensure!(rows(&world, "c1").await? == ["error 1 1", "error 1 1"]);
    let refused = retry(&world, turn).await;
    ensure!(matches!(refused, Err(ActionError::NeedsConfirmation)), "{refused:?}");
    let retried = actions::retry_turn(&mut *world.pool.acquire().await?, turn, true).await?;
    ensure!(retried == Retried::Retried);
    let new = calls.next().await?;
    ensure!(new.read() == ["b"], "what was deleted is not answered: {:?}", new.read());
    new.reply("re b");
    world.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_user_has_cancelled_is_not_answered_by_another_turn_when_it_loses_a_message() -> Result<()> {
    let world = world().await?;
    world.policy("lease = '1 min'").await?;
    let ids = talk(&world, "c1", &["a", "b"]).await?;
    let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
    let call = calls.next().await?;
    ensure!(cancel(&world, call.turn.turn_id).await? == Cancelled::Requested);
    delete_now(&world, &ids[0]).await?;
    call.fail(HandlerError::retryable("whatever"));
    world.answered("c1", 1).await?;
    world.settled().await?;
    calls.none()?;
    ensure!(ends(&world, "c1").await? == ["error cancelled"]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_turn_that_loses_a_message_stays_apart_from_other_retried_ones() -> Result<()> {
    let world = world().await?;
    let (ids, first) = super::failed(&world, "c1", &["a", "b"]).await?;
    world.submit("c1", "c").await?;
    let second = claim_one(&world, Some("spec")).await?;
    settle(&world.pool, &second, false).await?;
    ensure!(retry(&world, first).await? == Retried::Retried);
    let flying = claim_one(&world, Some("spec")).await?;
    ensure!(retry(&world, second.turn_id).await? == Retried::Retried);
    delete_now(&world, &ids[1]).await?;
    let mut turns: Vec<TurnId> = vec![first, second.turn_id, flying.turn_id];
    let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
    for expected in ["a", "c"] {
        let call = calls.next().await?;
        ensure!(call.said() == [expected], "{:?}", call.said());
        ensure!(!turns.contains(&call.turn.turn_id));
        turns.push(call.turn.turn_id);
        call.reply("yes");
    }
    world.settled().await
}
