//! Notifications: a producer pays for one only while somebody sleeps.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shared::wake::{Look, Rest, Sleeper};
use sqlx::postgres::PgListener;
use tests::World;

const MARK: &str = "mark";

/// Everything that was notified since the last call.
async fn heard(world: &World, listener: &mut PgListener) -> Result<usize> {
    // Notifications come in the order of their commits: all that came before the mark is there.
    sqlx::query("select pg_notify('agent_lanes', $1)").bind(MARK).execute(&world.pool).await?;
    let mut heard = 0;
    while listener.recv().await?.payload() != MARK {
        heard += 1;
    }
    Ok(heard)
}

async fn listener(world: &World) -> Result<PgListener> {
    let mut listener = PgListener::connect(&world.database_url()).await?;
    listener.listen("agent_lanes").await?;
    Ok(listener)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_submit_notifies_only_while_somebody_sleeps() -> Result<()> {
    let world = World::new().await?;
    let mut listener = listener(&world).await?;
    for conversation in ["c1", "c2", "c3"] {
        world.create_conversation(conversation).await?;
    }
    world.submit("c1", "nobody sleeps").await?;
    ensure!(heard(&world, &mut listener).await? == 0, "nobody sleeps");

    let sleep = "insert into agent_sleepers values ('relay', clock_timestamp() + $1::text::interval)
                 on conflict (name) do update set until = excluded.until";
    sqlx::query(sleep).bind("-1 ms").execute(&world.pool).await?;
    world.submit("c1", "its sleep is over").await?;
    ensure!(heard(&world, &mut listener).await? == 0, "a sleeper that looks by itself needs nobody");

    sqlx::query(sleep).bind("1 hour").execute(&world.pool).await?;
    world.submit("c1", "a lane that waits already").await?;
    world.submit("c2", "one that was idle").await?;
    ensure!(heard(&world, &mut listener).await? == 2, "a sleeper is woken");

    let message = world.submit("c3", "again").await?;
    let repeat = sqlx::query_scalar("select submit_message($1, 'c3', 'again')").bind(message);
    let verdict: String = repeat.fetch_one(&world.pool).await?;
    ensure!(verdict == "duplicate" && heard(&world, &mut listener).await? == 1, "a duplicate wakes nobody");

    sqlx::raw_sql("begin; select submit_message('m', 'c1', 'no'); rollback").execute(&world.pool).await?;
    ensure!(heard(&world, &mut listener).await? == 0, "a rolled back submit wakes nobody");
    sqlx::raw_sql(
        "update agent_lanes set state = 'queued', turn_id = gen_random_uuid(), run_id = gen_random_uuid(),
             attempt = 1, dispatches = 1, claimed_at = now() where conversation_id = 'c1'",
    )
    .execute(&world.pool)
    .await?;
    world.submit("c1", "a lane that is busy").await?;
    ensure!(heard(&world, &mut listener).await? == 0, "its settle looks for pending rows");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claimer_that_finds_work_takes_its_word_back() -> Result<()> {
    let world = World::new().await?;
    let mut listener = listener(&world).await?;
    world.create_conversation("c1").await?;
    let pool = shared::pool::connect(&world.database_settings(), "sleeper", 2).await?;
    let mut sleeper = Sleeper::new(pool, "sleeper".into(), Duration::from_mins(1));
    ensure!(sleeper.after_pass(Look::Nothing).await == Rest::Sleep);
    sleeper.declare().await?;
    world.submit("c1", "wake up").await?;
    ensure!(heard(&world, &mut listener).await? == 1);
    ensure!(sleeper.after_pass(Look::Full).await == Rest::None, "work is followed by a look for more");
    world.submit("c1", "awake").await?;
    ensure!(heard(&world, &mut listener).await? == 0, "an awake system sends nothing");
    sleeper.declare().await?;
    sleeper.rise().await;
    world.submit("c1", "gone").await?;
    ensure!(heard(&world, &mut listener).await? == 0, "who leaves says so");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_after_the_word_ends_the_sleep() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0'").await?;
    world.create_conversation("c1").await?;
    let pool = shared::pool::connect(&world.database_settings(), "sleeper", 2).await?;
    let mut sleeper = Sleeper::new(pool, "sleeper".into(), Duration::from_mins(1));
    sleeper.declare().await?;
    let sleeping = tokio::spawn(async move { sleeper.wait().await });
    world.submit("c1", "wake up").await?;
    let woken = tokio::time::timeout(Duration::from_secs(30), sleeping).await.context("it sleeps on")??;
    ensure!(woken == shared::wake::Woken::Notified);
    Ok(())
}
