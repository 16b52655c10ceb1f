//! Deleting messages that wait or are over, and deleting a conversation under every action.

use std::sync::Arc;

use anyhow::{Result, ensure};
use shared::{
    actions::{self, ActionError, Deleted, Prune},
    ids::{MessageId, TurnId},
    settings::Source,
};
use sqlx::PgConnection;
use std::time::Duration;
use tests::World;
use tokio::sync::Barrier;

use super::{claim_one, conversation, delete_now, failed, rows, settle, staff, talk, unread, world};
use crate::submit::{session, submit};

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_waits_leaves_its_turn_and_the_others_are_answered() -> Result<()> {
    let world = world().await?;
    let ids = talk(&world, "c1", &["a", "b", "c"]).await?;
    ensure!(delete_now(&world, &ids[1]).await? == Deleted::Deleted);
    ensure!(delete_now(&world, &ids[1]).await? == Deleted::Duplicate);
    let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
    let call = calls.next().await?;
    ensure!(call.read() == ["a", "c"], "{:?}", call.read());
    call.reply("re a c");
    world.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn without_its_last_message_a_lane_is_idle_and_the_id_stays_taken() -> Result<()> {
    let world = world().await?;
    let ids = talk(&world, "c1", &["a", "b"]).await?;
    for id in &ids {
        ensure!(world.lane("c1").await?.state == "waiting");
        delete_now(&world, id).await?;
    }
    ensure!(world.lane("c1").await?.state == "idle");
    ensure!(
        world.count("select count(*) from messages where content = '' and deleted_at is not null").await?
            == 2
    );
    let mut app = session(&world).await?;
    for content in ["a", ""] {
        let again = submit(&mut app, &ids[0], "c1", content).await;
        ensure!(again == "message_deleted (message_id)", "{again}");
    }
    world.create_conversation("c2").await?;
    let elsewhere = submit(&mut app, &ids[0], "c2", "a").await;
    ensure!(elsewhere.starts_with("message_id_conflict"), "{elsewhere}");
    let missing = actions::delete_message(&mut app, &MessageId::new("nobody")?).await;
    ensure!(matches!(missing, Err(ActionError::MessageNotFound)), "{missing:?}");
    ensure!(unread(&world, "c1").await? == 0);
    world.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_waits_behind_a_turn_goes_without_touching_it() -> Result<()> {
    let world = world().await?;
    let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
    talk(&world, "c1", &["a"]).await?;
    let call = calls.next().await?;
    let behind = world.submit("c1", "b").await?;
    let lane = world.lane("c1").await?;
    delete_now(&world, &behind).await?;
    ensure!(world.lane("c1").await? == lane);
    call.reply("re a");
    world.settled().await?;
    calls.none()
}

#[tokio::test(flavor = "multi_thread")]
async fn tombstones_are_not_shown_to_the_handler() -> Result<()> {
    let world = world().await?;
    let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
    let mut ids = talk(&world, "c1", &["a"]).await?;
    calls.next().await?.reply("re a");
    let replies = world.answered("c1", 1).await?;
    ids.push(world.submit("c1", "b").await?);
    calls.next().await?.reply("re b");
    world.answered("c1", 2).await?;
    for id in [&ids[0], &replies[0].id] {
        delete_now(&world, id).await?;
    }
    ensure!(unread(&world, "c1").await? == 1);
    world.submit("c1", "c").await?;
    let call = calls.next().await?;
    ensure!(call.read() == ["b", "re b", "c"], "{:?}", call.read());
    call.reply("re c");
    world.settled().await?;
    ensure!(rows(&world, "c1").await? == ["done 1 1", "done 1 1", "done 1 1"]);
    Ok(())
}

/// An action on `c1`, in which some message, turn and state stand as [`set`] made them.
async fn act(
    connection: &mut PgConnection,
    action: &str,
    message: &str,
    turn: TurnId,
) -> Result<(), ActionError> {
    match action {
        "retry" => actions::retry_turn(connection, turn, false).await.map(drop),
        "cancel" | "cancel running" => actions::cancel_turn(connection, turn).await.map(drop),
        "read" => match conversation("c1") {
            Ok(id) => actions::mark_read(connection, &id, 9).await.map(drop),
            Err(_) => Ok(()),
        },
        "prune" => {
            let mut prune = Prune::new(Duration::ZERO, 1);
            while prune.page(connection).await?.is_some() {}
            Ok(())
        }
        _ => match MessageId::new(message) {
            Ok(id) => actions::delete_message(connection, &id).await.map(drop),
            Err(_) => Ok(()),
        },
    }
}

async fn set(world: &World, action: &str) -> Result<(String, TurnId)> {
    let (mut ids, mut turn) = failed(world, "c1", &["a", "b"]).await?;
    if matches!(action, "cancel" | "cancel running" | "delete in flight" | "delete retried") {
        ids.push(world.submit("c1", "c").await?);
        world.submit("c1", "d").await?;
        let claimed = claim_one(world, (action != "cancel").then_some("spec")).await?;
        turn = claimed.turn_id;
        if action == "delete retried" {
            settle(&world.pool, &claimed, true).await?;
        }
    } else if action == "delete waiting" {
        ids.push(world.submit("c1", "c").await?);
    }
    Ok((ids.pop().unwrap_or_default(), turn))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_can_be_deleted_under_every_action() -> Result<()> {
    const ROUNDS: usize = 6;
    let world = world().await?;
    world.policy("lease = '1 min'").await?;
    let barrier = Arc::new(Barrier::new(2));
    for action in [
        "retry",
        "cancel",
        "cancel running",
        "read",
        "prune",
        "delete",
        "delete waiting",
        "delete in flight",
        "delete retried",
    ] {
        for round in 0..ROUNDS {
            let (message, turn) = set(&world, action).await?;
            let (mut app, mut owner) = (session(&world).await?, session(&world).await?);
            let user = tokio::spawn({
                let (barrier, message) = (barrier.clone(), message.clone());
                async move {
                    barrier.wait().await;
                    act(&mut app, action, &message, turn).await
                }
            });
            barrier.wait().await;
            sqlx::query("delete from conversations").execute(&mut owner).await?;
            match user.await? {
                Ok(())
                | Err(
                    ActionError::TurnNotFound
                    | ActionError::MessageNotFound
                    | ActionError::ConversationNotFound,
                ) => {}
                Err(error) => anyhow::bail!("{action}, round {round}: {error}"),
            }
            let left = "select (select count(*) from messages) + (select count(*) from agent_outbox)
                + (select count(*) from agent_lanes) + (select count(*) from agent_runs)";
            ensure!(world.count(left).await? == 0, "{action}: something is left");
            let again = act(&mut owner, action, &message, turn).await;
            ensure!(again.is_err() || action == "prune", "{action} after the deletion");
        }
    }
    world.settled().await
}
