//! Mark as read: what the user has seen is read, and nothing else.

use anyhow::{Result, ensure};
use shared::actions::{self, ActionError};
use sqlx::{Connection, PgConnection};
use tests::World;

use super::{claim_one, conversation, delete_now, failed, settle, unread, world};
use crate::submit::{blocked, session};

async fn read(connection: &mut PgConnection, up_to: i64) -> Result<i32> {
    Ok(actions::mark_read(connection, &conversation("c1")?, up_to).await?)
}

/// Another turn of `c1` fails: an outcome is written.
async fn another(world: &World) -> Result<()> {
    world.submit("c1", "another").await?;
    let claimed = claim_one(world, Some("spec")).await?;
    settle(&world.pool, &claimed, false).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn reading_counts_again_and_never_goes_back() -> Result<()> {
    const LAST: &str = "select last_read_seq from conversations";
    let world = world().await?;
    let mut app = session(&world).await?;
    failed(&world, "c1", &["hello"]).await?;
    another(&world).await?;
    ensure!(unread(&world, "c1").await? == 2);
    ensure!(read(&mut app, 2).await? == 1, "the outcome at 4 has not been read");
    ensure!(read(&mut app, 0).await? == 1 && read(&mut app, -7).await? == 1);
    ensure!(world.count(LAST).await? == 2, "it never goes back");
    ensure!(read(&mut app, i64::MAX).await? == 0);
    ensure!(world.count(LAST).await? == 4, "nobody has read what is not there yet");
    another(&world).await?;
    ensure!(unread(&world, "c1").await? == 1, "what comes later is unread");
    let missing = actions::mark_read(&mut app, &conversation("nobody")?, 1).await;
    ensure!(matches!(missing, Err(ActionError::ConversationNotFound)), "{missing:?}");
    world.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_that_lands_while_the_user_reads_stays_unread() -> Result<()> {
    for outcome_first in [true, false] {
        let world = world().await?;
        failed(&world, "c1", &["hello"]).await?;
        world.submit("c1", "another").await?;
        let claimed = claim_one(&world, Some("spec")).await?;
        let (mut app, mut holder) = (session(&world).await?, session(&world).await?);
        let mut held = holder.begin().await?;
        sqlx::query("select from conversations for update").execute(&mut *held).await?;
        let pool = world.pool.clone();
        let landing = || tokio::spawn(async move { settle(&pool, &claimed, false).await });
        let reading = || tokio::spawn(async move { read(&mut app, 2).await });
        let (landed, known) = if outcome_first {
            let landed = landing();
            blocked(&world, "for no key update", 1).await?;
            let known = reading();
            blocked(&world, "mark_read", 1).await?;
            (landed, known)
        } else {
            let known = reading();
            blocked(&world, "mark_read", 1).await?;
            let landed = landing();
            blocked(&world, "for no key update", 1).await?;
            (landed, known)
        };
        held.rollback().await?;
        landed.await??;
        ensure!(known.await?? == i32::from(outcome_first));
        ensure!(unread(&world, "c1").await? == 1);
        world.settled().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_outcome_is_not_unread_and_not_the_status() -> Result<()> {
    let world = world().await?;
    let mut app = session(&world).await?;
    failed(&world, "c1", &["hello"]).await?;
    another(&world).await?;
    let status = async || {
        let status = sqlx::query_scalar::<_, String>("select status from conversation_status");
        anyhow::Ok(status.fetch_one(&world.pool).await?)
    };
    ensure!(status().await? == "error");
    let outcomes = world.outcomes("c1").await?;
    delete_now(&world, &outcomes[1].id).await?;
    ensure!(unread(&world, "c1").await? == 1 && read(&mut app, 0).await? == 1);
    delete_now(&world, &outcomes[0].id).await?;
    ensure!(unread(&world, "c1").await? == 0 && status().await? == "idle");
    read(&mut app, 4).await?;
    world.settled().await
}
