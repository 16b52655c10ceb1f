//! Producers whose transactions keep their first snapshot: a submit works, or fails with 40001, which they expect.

use anyhow::{Context, Result, ensure};
use consumer::{Reply, Turn, handler_fn};
use shared::settings::Source;
use sqlx::{Connection, PgConnection};
use tests::World;
use tokio::sync::mpsc;

use super::{session, submit, written};

const LEVELS: [&str; 2] = ["begin isolation level repeatable read", "begin isolation level serializable"];

/// Begins, and takes the snapshot.
async fn begin<'a>(app: &'a mut PgConnection, level: &'static str) -> Result<sqlx::PgTransaction<'a>> {
    let mut transaction = app.begin_with(level).await?;
    sqlx::query("select from conversations").execute(&mut *transaction).await?;
    Ok(transaction)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_submit_under_an_old_snapshot_works_or_fails_with_a_serialization_failure() -> Result<()> {
    for level in LEVELS {
        let world = World::new().await?;
        for conversation in ["c1", "c2", "c3"] {
            world.create_conversation(conversation).await?;
        }
        let (mut app, mut other) = (session(&world).await?, session(&world).await?);
        let mut transaction = begin(&mut app, level).await?;
        ensure!(submit(&mut other, "m1", "c1", "hello").await == "created");
        ensure!(submit(&mut transaction, "m2", "c2", "hello").await == "created", "nobody touched c2");
        transaction.commit().await?;

        for (id, conversation, why) in [
            ("m4", "c1", "the conversation has changed"),
            ("m3", "c1", "a duplicate that it cannot see"),
            ("m3", "c3", "an id that somebody has taken since"),
        ] {
            let mut transaction = begin(&mut app, level).await?;
            let newer = submit(&mut other, "m3", "c1", "hello").await;
            ensure!(newer == "created", "{newer}");
            let answer = submit(&mut transaction, id, conversation, "hello").await;
            ensure!(answer.starts_with("40001"), "{why}: {answer}");
            transaction.rollback().await?;
            sqlx::raw_sql("delete from messages where id = 'm3'").execute(&world.pool).await?;
        }
        let before = written(&world.pool).await?;
        let mut transaction = begin(&mut app, level).await?;
        ensure!(submit(&mut transaction, "m4", "c3", "hello").await == "created", "tried again");
        transaction.rollback().await?;
        ensure!(written(&world.pool).await? == before);
    }
    Ok(())
}

/// A turn whose messages are deleted ends without an outcome, and without a change of its conversation.
#[tokio::test(flavor = "multi_thread")]
async fn a_submit_under_a_snapshot_of_a_busy_lane_is_not_stranded_when_the_lane_falls_idle() -> Result<()> {
    for level in LEVELS {
        let world = World::new().await?;
        world.policy("debounce = '0'").await?;
        let (seen, mut turns) = mpsc::unbounded_channel();
        let (go, gate) = tokio::sync::watch::channel(false);
        let handler = handler_fn(move |turn: Turn| {
            let (seen, mut gate) = (seen.clone(), gate.clone());
            async move {
                let _ = seen.send(turn.turn_id);
                let _ = gate.wait_for(|open| *open).await;
                Ok(Reply::new("yes"))
            }
        });
        let _consumer = world.local_consumer(world.consumer_settings(Source::Postgres), handler).await?;
        world.create_conversation("c1").await?;
        let first = world.submit("c1", "first").await?;
        turns.recv().await.context("the first turn")?;
        let mut app = session(&world).await?;
        let mut transaction = begin(&mut app, level).await?;
        sqlx::query("delete from messages where id = $1").bind(first).execute(&world.pool).await?;
        go.send_replace(true);
        world.eventually("the lane is idle", async || Ok(world.lane("c1").await?.state == "idle")).await?;
        let answer = submit(&mut transaction, "m2", "c1", "second").await;
        if answer == "created" {
            transaction.commit().await?;
            world.answered("c1", 1).await?;
        } else {
            ensure!(answer == "40001", "{answer}");
            transaction.rollback().await?;
            ensure!(submit(&mut app, "m2", "c1", "second").await == "created", "tried again");
        }
        world.settled().await?;
        ensure!(world.outcomes("c1").await?.len() == 1);
    }
    Ok(())
}
