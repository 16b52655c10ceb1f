//! Prune: records of what was settled long ago go. What is open, what was said and what is known of ids stay.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use consumer::HandlerError;
use shared::{
    actions::{self, Prune, Pruned, Retried},
    settings::Source,
};
use sqlx::Connection;
use tests::World;
use tokio::sync::Barrier;

use super::{claim_one, failed, retry, rows, settle, staff, talk, world};
use crate::submit::{session, submit};

/// Prunes it all, a few at a time.
async fn prune(world: &World, older_than: Duration, batch: u32) -> Result<Pruned> {
    let (mut sum, mut walk) = (Pruned::default(), Prune::new(older_than, batch));
    let mut connection = world.pool.acquire().await?;
    while let Some(page) = walk.page(&mut connection).await? {
        sum.rows += page.rows;
        sum.runs += page.runs;
    }
    Ok(sum)
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_is_settled_and_old_is_pruned() -> Result<()> {
    for batch in [1, 3, 1000] {
        let world = world().await?;
        world.policy("retry_backoff = '1 min', lease = '1 min'").await?;
        let (ids, turn) = failed(&world, "failed", &["a", "b", "c"]).await?;
        talk(&world, "again", &["a", "b"]).await?;
        settle(&world.pool, &claim_one(&world, Some("spec")).await?, true).await?;
        talk(&world, "running", &["a"]).await?;
        claim_one(&world, Some("spec")).await?;
        talk(&world, "queued", &["a"]).await?;
        claim_one(&world, None).await?;
        talk(&world, "waiting", &["a"]).await?;

        ensure!(prune(&world, Duration::from_hours(1), batch).await? == Pruned::default());
        let said = "select count(*) from messages";
        let before = world.count(said).await?;
        ensure!(prune(&world, Duration::ZERO, batch).await? == Pruned { rows: 3, runs: 1 });
        ensure!(world.count(said).await? == before, "messages stay");
        ensure!(rows(&world, "failed").await?.is_empty());
        ensure!(rows(&world, "again").await? == ["pending 1 1", "pending 1 1"]);
        ensure!(rows(&world, "running").await? == ["processing 1 1"]);
        ensure!(rows(&world, "queued").await? == ["processing 1 1"]);
        ensure!(rows(&world, "waiting").await? == ["pending free 1 0"]);
        let kept = "select count(*) from agent_runs where conversation_id = 'again'";
        ensure!(world.count(kept).await? == 1, "the attempts of a turn in flight stay");
        tests::invariants::assert_consistent(&world.pool).await?;

        let mut app = session(&world).await?;
        ensure!(submit(&mut app, &ids[0], "failed", "a").await == "duplicate");
        ensure!(retry(&world, turn).await? == Retried::NothingToRetry);
        ensure!(prune(&world, Duration::ZERO, batch).await? == Pruned::default());
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_reads_the_same_history_after_pruning() -> Result<()> {
    let world = world().await?;
    let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
    talk(&world, "c1", &["a"]).await?;
    let first = calls.next().await?;
    // Comes while the first one runs, so that the order of seq is not the order of turns.
    world.submit("c1", "b").await?;
    first.reply("re a");
    calls.next().await?.fail(HandlerError::fatal("broken"));
    world.answered("c1", 2).await?;
    world.submit("c1", "c").await?;
    let before = calls.next().await?;
    let read: Vec<_> = before.turn.messages.iter().map(|m| (m.id.clone(), m.in_turn)).collect();
    ensure!(before.read()[..3] == ["a", "re a", "b"] && before.read()[4] == "c", "{:?}", before.read());
    ensure!(prune(&world, Duration::ZERO, 10).await? == Pruned { rows: 2, runs: 2 });
    before.fail(HandlerError::retryable("once more"));
    let after = calls.next().await?;
    ensure!(after.turn.attempt == 2);
    ensure!(read == after.turn.messages.iter().map(|m| (m.id.clone(), m.in_turn)).collect::<Vec<_>>());
    after.reply("re c");
    world.settled().await?;
    ensure!(prune(&world, Duration::ZERO, 10).await? == Pruned { rows: 1, runs: 2 });
    world.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn prune_waits_for_nobody_and_leaves_a_turn_whole() -> Result<()> {
    let world = world().await?;
    let (_, turn) = failed(&world, "held", &["a", "b"]).await?;
    failed(&world, "free", &["a", "b"]).await?;
    let mut app = session(&world).await?;
    let mut holder = app.begin().await?;
    sqlx::query("select from agent_outbox where conversation_id = 'held' order by id limit 1 for update")
        .execute(&mut *holder)
        .await?;
    let pruned = tokio::time::timeout(Duration::from_secs(4), prune(&world, Duration::ZERO, 1));
    ensure!(pruned.await.context("it waits for a lock")?? == Pruned { rows: 2, runs: 1 });
    ensure!(rows(&world, "held").await?.len() == 2 && rows(&world, "free").await?.is_empty());
    holder.rollback().await?;
    ensure!(retry(&world, turn).await? == Retried::Retried);
    // The first attempts are of a turn that has no rows any more: they are old, and go.
    ensure!(prune(&world, Duration::ZERO, 1).await? == Pruned { rows: 0, runs: 1 });
    ensure!(rows(&world, "held").await? == ["pending free 2 0", "pending free 2 0"]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_is_pruned_or_retried_and_never_half_of_each() -> Result<()> {
    const ROUNDS: usize = 30;
    let world = world().await?;
    let barrier = Arc::new(Barrier::new(2));
    for round in 0..ROUNDS {
        let conversation = format!("c{round}");
        let (_, turn) = failed(&world, &conversation, &["a", "b", "c", "d"]).await?;
        let mut app = session(&world).await?;
        let user = tokio::spawn({
            let barrier = barrier.clone();
            async move {
                barrier.wait().await;
                anyhow::Ok(actions::retry_turn(&mut app, turn, false).await?)
            }
        });
        barrier.wait().await;
        prune(&world, Duration::ZERO, 2).await?;
        let answer = user.await??;
        let left = rows(&world, &conversation).await?;
        match answer {
            Retried::Retried => {
                ensure!(left == ["pending free 2 0"; 4], "{left:?}");
                settle(&world.pool, &claim_one(&world, Some("spec")).await?, false).await?;
            }
            Retried::NothingToRetry => ensure!(left.is_empty(), "{left:?}"),
        }
    }
    world.settled().await
}
