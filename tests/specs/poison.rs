//! Turns that end their process every time: they reach their visible error at the cap, and cost others one attempt at most.

use anyhow::{Result, ensure};
use shared::recovery;
use tests::World;

const INNOCENTS: usize = 6;
const MAX_ATTEMPTS: i64 = 4;

/// Restarts a consumer, as a supervisor does, until nothing is left to do; each time it finds all that it has left, and
/// somebody new, in one batch. Returns how often it died.
async fn supervise(world: &World, source: &str) -> Result<i64> {
    let mut deaths = 0;
    loop {
        let late = format!("late-{deaths}");
        world.create_conversation(&late).await?;
        world.submit(&late, "hello").await?;
        gather(world, source).await?;
        let consumer = world.program("poisonable").env("HANDLER", "echo").env("SOURCE", source).start()?;
        tokio::select! {
            ended = consumer.ended() => {
                ensure!(ended?.code().is_none(), "it left by itself:\n{}", consumer.log()?);
                deaths += 1;
            }
            quiet = world.quiet() => {
                quiet?;
                return Ok(deaths);
            }
        }
        ensure!(deaths <= MAX_ATTEMPTS, "it dies for ever");
    }
}

/// Waits until every turn that is not over is ready to be begun.
async fn gather(world: &World, source: &str) -> Result<()> {
    let expire = "update agent_lanes set wake_at = clock_timestamp() where state = 'running'";
    sqlx::query(expire).execute(&world.pool).await?;
    let not_ready = if source == "nats" {
        "select count(*) from agent_lanes where state not in ('idle', 'queued')"
    } else {
        "select count(*) from agent_lanes where state = 'running' or wake_at > clock_timestamp()"
    };
    let ready = async || {
        recovery::recover_expired(&world.pool).await?;
        Ok(world.count(not_ready).await? == 0)
    };
    world.eventually("all are ready", ready).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_ends_its_process_every_time_fails_visibly_and_costs_others_one_attempt_at_most()
-> Result<()> {
    for source in ["nats", "postgres"] {
        let world = World::new().await?;
        // Leases end when the spec says so, however long a busy machine takes.
        let policy = format!(
            "debounce = '0', lease = '1 min', retry_backoff = '10 ms', max_attempts = {MAX_ATTEMPTS}"
        );
        world.policy(&policy).await?;
        for number in 0..INNOCENTS {
            let innocent = format!("innocent-{number}");
            world.create_conversation(&innocent).await?;
            world.submit(&innocent, "hello").await?;
            if number == 1 {
                world.create_conversation("poisoned").await?;
                world.submit("poisoned", "poison").await?;
            }
        }
        let _relay = if source == "nats" { Some(world.relay().start()?) } else { None };
        let deaths = supervise(&world, source).await?;
        world.settled().await?;
        ensure!(deaths == MAX_ATTEMPTS, "{source}: it died {deaths} times");

        let outcomes = world.outcomes("poisoned").await?;
        let error = outcomes[0].error.clone().unwrap_or_default();
        let at_cap =
            error["kind"] == "crash" && error["attempts"] == MAX_ATTEMPTS && error["exhausted"] == true;
        ensure!(outcomes.len() == 1 && at_cap, "{source}: {outcomes:?}");
        let unserved = "select count(*) from conversations c where id <> 'poisoned' and not exists (
            select from messages m where m.conversation_id = c.id and m.role = 'assistant')";
        ensure!(world.count(unserved).await? == 0, "{source}: somebody innocent was not served");
        let attempts: Vec<(String, i32)> = sqlx::query_as(
            "select conversation_id, attempts from agent_outbox where attempts > 1 order by 1",
        )
        .fetch_all(&world.pool)
        .await?;
        // Those who were beside it the first time, when nobody could know.
        let dear = |(conversation, attempts): &(String, i32)| {
            conversation.starts_with("late-") && conversation != "late-0" || *attempts > 2
        };
        let unlucky: Vec<_> = attempts.iter().filter(|row| row.0 != "poisoned" && dear(row)).collect();
        ensure!(unlucky.is_empty(), "{source}: {unlucky:?}");
        ensure!(attempts.len() > 1, "{source}: nobody was beside it, so nothing was shown");
    }
    Ok(())
}
