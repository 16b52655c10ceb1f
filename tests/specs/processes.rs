//! Processes that die at the worst moment: whatever they had in hand, a successor answers, once.

use anyhow::{Context, Result, ensure};
use tests::{Process, World};

use crate::load::no_attempt_was_lost;

/// What was lost is noticed soon.
const IMPATIENT: &str = "debounce = '0', dispatch_timeout = '500 ms', lease = '1 s', retry_backoff = '10 ms'";

async fn world() -> Result<World> {
    let world = World::new().await?;
    world.policy(IMPATIENT).await?;
    world.create_conversation("c1").await?;
    Ok(world)
}

/// Waits until a failpoint has killed it.
async fn killed(process: &Process) -> Result<()> {
    let status = process.ended().await?;
    ensure!(status.code().is_none(), "{} was not killed, but exited: {status}", process.name());
    Ok(())
}

async fn triggers_held(world: &World) -> Result<u64> {
    let mut stream = world.jetstream().get_stream(&world.stream).await?;
    Ok(stream.info().await?.state.messages)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_relay_claimed_and_never_published_is_published_by_another() -> Result<()> {
    let world = world().await?;
    world.submit("c1", "hello").await?;
    let victim = world.relay().failpoints("after_claim=kill").start()?;
    killed(&victim).await?;
    let lane = world.lane("c1").await?;
    ensure!(lane.state == "queued" && lane.dispatches == 1, "{lane:?}");
    ensure!(triggers_held(&world).await? == 0, "nothing was published");
    let _consumer = world.consumer().start()?;
    let _successor = world.relay().start()?;
    let outcomes = world.answered("c1", 1).await?;
    ensure!(outcomes[0].run_id == lane.run_id, "it is the same run");
    world.settled().await?;
    no_attempt_was_lost(&world).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_relay_had_published_is_begun_without_it() -> Result<()> {
    let world = world().await?;
    world.submit("c1", "hello").await?;
    let victim = world.relay().failpoints("after_publish=kill").start()?;
    killed(&victim).await?;
    ensure!(triggers_held(&world).await? == 1);
    let _consumer = world.consumer().start()?;
    world.answered("c1", 1).await?;
    world.settled().await?;
    no_attempt_was_lost(&world).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_killed_while_it_sends_a_lost_trigger_again_leaves_it_to_another() -> Result<()> {
    let world = world().await?;
    world.submit("c1", "hello").await?;
    killed(&world.relay().failpoints("after_claim=kill").start()?).await?;
    killed(&world.relay().failpoints("mid_reconcile=kill").start()?).await?;
    let _consumer = world.consumer().start()?;
    let _successor = world.relay().start()?;
    world.answered("c1", 1).await?;
    world.settled().await?;
    no_attempt_was_lost(&world).await
}

/// Kills a consumer at a failpoint, lets a successor answer, and returns how many attempts it took.
async fn consumer_killed_at(failpoint: &str) -> Result<i64> {
    let world = world().await?;
    let relay = world.relay().start()?;
    let victim = world.consumer().failpoints(&format!("{failpoint}=kill")).start()?;
    world.submit("c1", "hello").await?;
    killed(&victim).await.with_context(|| failpoint.to_owned())?;
    let successor = world.consumer().start()?;
    let outcomes = world.answered("c1", 1).await?;
    ensure!(outcomes[0].content == "echo: hello", "{outcomes:?}");
    // The successor serves whatever else comes, the same conversation too.
    world.submit("c1", "again").await?;
    world.answered("c1", 2).await?;
    world.settled().await?;
    successor.shut_down().await?;
    relay.shut_down().await?;
    world.count("select max(attempts)::bigint from agent_outbox").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_killed_before_its_begin_costs_no_attempt() -> Result<()> {
    ensure!(consumer_killed_at("after_receive").await? == 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_killed_after_its_begin_costs_one_attempt() -> Result<()> {
    ensure!(consumer_killed_at("after_begin").await? == 2);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_killed_before_its_commit_has_said_nothing() -> Result<()> {
    let (before, amid) =
        tokio::try_join!(consumer_killed_at("before_finish"), consumer_killed_at("mid_finish"))?;
    ensure!(before == 2 && amid == 2, "attempts: {before} and {amid}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_killed_after_its_commit_has_answered() -> Result<()> {
    ensure!(consumer_killed_at("after_finish").await? == 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_stood_still_beyond_its_lease_commits_nothing() -> Result<()> {
    let world = world().await?;
    let _relay = world.relay().start()?;
    let zombie = world.consumer().failpoints("before_finish=stop*1").start()?;
    world.submit("c1", "hello").await?;
    zombie.frozen().await?;
    let _successor = world.consumer().start()?;
    let outcomes = world.answered("c1", 1).await?;
    zombie.thaw()?;
    // It goes on: what it had is somebody else's, and what comes next it may answer.
    zombie.shut_down().await?;
    world.settled().await?;
    ensure!(world.outcomes("c1").await? == outcomes, "the zombie has said something");
    Ok(())
}
