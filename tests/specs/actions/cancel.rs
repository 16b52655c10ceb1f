//! Cancel: a turn ends by its user's wish, visibly and once, wherever it stands.

use std::time::Duration;

use anyhow::{Result, ensure};
use shared::{
    actions::{ActionError, Cancelled},
    ids::TurnId,
    recovery,
    settings::Source,
    settle::Settled,
};
use tests::World;
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use super::{cancel, claim_one, ends, rows, settle, staff, talk, unread, world};

/// The user sees the cancellation of the one turn of `c1`, and the lane goes on to what came meanwhile.
async fn is_cancelled(world: &World, turn: TurnId, attempts: i32, next: &str) -> Result<()> {
    let outcomes = world.outcomes("c1").await?;
    let [outcome] = outcomes.as_slice() else { anyhow::bail!("{outcomes:?}") };
    let error = outcome.error.clone().unwrap_or_default();
    ensure!(outcome.turn_id == turn.0 && outcome.reply_to_seq == 1, "{outcome:?}");
    ensure!(error["kind"] == "cancelled" && error["attempts"] == attempts, "{error}");
    ensure!(error["exhausted"] == false && error["operations"] == serde_json::json!([]), "{error}");
    ensure!(unread(world, "c1").await? == 1);
    ensure!(rows(world, "c1").await?[0] == format!("error 1 {attempts}"), "{:?}", rows(world, "c1").await?);
    ensure!(world.lane("c1").await?.state == next, "{:?}", world.lane("c1").await?);
    ensure!(cancel(world, turn).await? == Cancelled::NothingToCancel);
    tests::invariants::assert_consistent(&world.pool).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_waits_for_its_retry_is_cancelled() -> Result<()> {
    for next in ["idle", "waiting"] {
        let world = world().await?;
        world.policy("retry_backoff = '1 min'").await?;
        talk(&world, "c1", &["hello"]).await?;
        let claimed = claim_one(&world, Some("spec")).await?;
        ensure!(matches!(settle(&world.pool, &claimed, true).await?, Settled::Retried { .. }));
        if next == "waiting" {
            world.submit("c1", "another").await?;
        }
        ensure!(cancel(&world, claimed.turn_id).await? == Cancelled::Cancelled);
        is_cancelled(&world, claimed.turn_id, 1, next).await?;
        ensure!(world.count("select count(*) from agent_runs where outcome = 'cancelled'").await? == 0);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queued_turn_is_cancelled_and_its_trigger_finds_nothing() -> Result<()> {
    for broker in [false, true] {
        let world = world().await?;
        let relay = if broker { Some(world.local_relay().await?) } else { None };
        talk(&world, "c1", &["hello"]).await?;
        if broker {
            let held = async || {
                let mut stream = world.jetstream().get_stream(&world.stream).await?;
                Ok(stream.info().await?.state.messages == 1)
            };
            world.eventually("its trigger is with the broker", held).await?;
        } else {
            claim_one(&world, None).await?;
        }
        let turn = TurnId(world.lane("c1").await?.turn_id.unwrap_or_default());
        ensure!(cancel(&world, turn).await? == Cancelled::Cancelled);
        is_cancelled(&world, turn, 1, "idle").await?;
        ensure!(world.count("select count(*) from agent_runs where outcome = 'cancelled'").await? == 1);
        let source = if broker { Source::Nats } else { Source::Postgres };
        let (handler, mut calls) = super::directed();
        let _consumer = world.local_consumer(world.consumer_settings(source), handler).await?;
        world.submit("c1", "another").await?;
        let call = calls.next().await?;
        ensure!(call.said() == ["another"], "{:?}", call.said());
        call.reply("yes");
        world.settled().await?;
        calls.none()?;
        if let Some(relay) = relay {
            relay.stop().await?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_turn_is_stopped_within_a_heartbeat_and_its_reply_is_not_taken() -> Result<()> {
    for source in [Source::Postgres, Source::Nats] {
        let world = world().await?;
        let (_staff, mut calls) = staff(&world, source).await?;
        talk(&world, "c1", &["hello"]).await?;
        let call = calls.next().await?;
        let turn = call.turn.turn_id;
        world.submit("c1", "another").await?;
        ensure!(cancel(&world, turn).await? == Cancelled::Requested);
        let asked = Instant::now();
        if !matches!(cancel(&world, turn).await?, Cancelled::Requested | Cancelled::NothingToCancel) {
            anyhow::bail!("a second click did something else");
        }
        call.cancelled().await?;
        // A fifth of the lease, and as much again for a busy machine; the lease itself has not ended.
        ensure!(asked.elapsed() < Duration::from_secs(3), "{:?}", asked.elapsed());
        call.reply("too late");
        let next = calls.next().await?;
        is_cancelled(&world, turn, 1, "running").await?;
        ensure!(next.said() == ["another"]);
        next.reply("yes");
        world.settled().await?;
        ensure!(ends(&world, "c1").await? == ["error cancelled", "assistant"]);
        ensure!(unread(&world, "c1").await? == 2);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_is_ready_before_the_handler_hears_of_the_cancel_is_not_taken_either() -> Result<()> {
    let world = world().await?;
    world.policy("lease = '1 min'").await?;
    let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
    talk(&world, "c1", &["hello"]).await?;
    let call = calls.next().await?;
    let turn = call.turn.turn_id;
    ensure!(cancel(&world, turn).await? == Cancelled::Requested);
    let refused =
        call.turn.operations.start("tool", shared::state::Effect::Read, &serde_json::json!({})).await;
    ensure!(refused.is_err(), "an operation of a cancelled turn was started");
    call.reply("too late");
    world.answered("c1", 1).await?;
    is_cancelled(&world, turn, 1, "idle").await?;
    world.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_turn_whose_consumer_died_is_cancelled_by_its_recovery() -> Result<()> {
    let world = world().await?;
    world.policy("lease = '1 min'").await?;
    talk(&world, "c1", &["hello"]).await?;
    let claimed = claim_one(&world, Some("dead")).await?;
    ensure!(cancel(&world, claimed.turn_id).await? == Cancelled::Requested);
    ensure!(cancel(&world, claimed.turn_id).await? == Cancelled::Requested);
    recovery::recover_expired(&world.pool).await?;
    ensure!(world.outcomes("c1").await?.is_empty(), "its lease is not over");
    sqlx::query("update agent_lanes set wake_at = clock_timestamp()").execute(&world.pool).await?;
    timeout(Duration::from_secs(20), recovery::recover_expired(&world.pool)).await??;
    is_cancelled(&world, claimed.turn_id, 1, "idle").await?;
    let expired = "select count(*) from agent_runs where outcome = 'expired'";
    ensure!(world.count(expired).await? == 1, "the run is recorded as what it was");
    let unknown = cancel(&world, TurnId(Uuid::from_u128(1))).await;
    ensure!(matches!(unknown, Err(ActionError::TurnNotFound)), "{unknown:?}");
    world.settled().await
}
