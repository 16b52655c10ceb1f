//! One conversation with a hundred thousand messages waiting: it delays nobody, itself included.

use std::time::Duration;

use anyhow::{Result, ensure};
use consumer::{Reply, Turn, handler_fn};
use shared::settings::{RelaySettings, Source};
use tests::{World, invariants};

const PENDING: i64 = 100_000;
const NORMAL: usize = 50;

/// What submits would have left, without a hundred thousand of them.
const HOT: &str = "
    insert into conversations (id, last_seq) values ('hot', 100000);
    insert into messages (id, conversation_id, seq, role, content)
    select 'hot-' || n, 'hot', n, 'user', 'more' from generate_series(1, 100000) n;
    insert into agent_outbox (conversation_id, message_id)
    select 'hot', 'hot-' || n from generate_series(1, 100000) n;
    update agent_lanes set state = 'waiting', waiting_since = now(), wake_at = now() where conversation_id = 'hot'";

const HOT_TURNS: &str = "select count(*) from messages where conversation_id = 'hot' and role = 'assistant'";

#[tokio::test(flavor = "multi_thread")]
async fn a_hot_conversation_delays_nobody() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0'").await?;
    sqlx::raw_sql(HOT).execute(&world.pool).await?;
    for number in 0..NORMAL {
        world.create_conversation(&format!("c{number}")).await?;
    }
    // A small batch, so that the others do not all fit in one claim.
    let _relay = world.local_relay_with(RelaySettings { batch: 5, ..world.relay_settings() }).await?;
    let count = handler_fn(|turn: Turn| async move {
        Ok(Reply::new(turn.messages.iter().filter(|m| m.in_turn).count().to_string()))
    });
    let _consumer = world.local_consumer(world.consumer_settings(Source::Nats), count).await?;
    world.eventually("the hot one is busy", async || Ok(world.count(HOT_TURNS).await? >= 3)).await?;
    for number in 0..NORMAL {
        world.submit(&format!("c{number}"), "me too").await?;
    }
    let others = "select count(*) from messages where conversation_id <> 'hot' and role = 'assistant'";
    world
        .eventually_within(Duration::from_secs(30), "the others are answered", async || {
            Ok(world.count(others).await? == i64::try_from(NORMAL)?)
        })
        .await?;

    // The longest due comes first: a lane that was claimed a moment ago stands behind everybody who waits.
    let passed_over: Vec<i64> = sqlx::query_scalar(
        "select (select count(*) from agent_runs hot where hot.conversation_id = 'hot'
                    and hot.claimed_at between o.created_at and r.claimed_at)
         from agent_outbox o join agent_runs r on r.run_id = o.run_id where o.conversation_id <> 'hot'",
    )
    .fetch_all(&world.pool)
    .await?;
    ensure!(passed_over.len() == NORMAL && passed_over.iter().all(|turns| *turns <= 2), "{passed_over:?}");

    let turns = world.count(HOT_TURNS).await?;
    world.eventually("the hot one goes on", async || Ok(world.count(HOT_TURNS).await? > turns + 5)).await?;
    let sizes = "select count(*) from (select turn_id from agent_outbox
         where turn_id is not null and conversation_id = 'hot' group by turn_id having count(*) <> 50) t";
    ensure!(world.count(sizes).await? == 0, "a turn has as many rows as its agent allows");
    let answered = "select count(*) from agent_outbox where conversation_id = 'hot' and status = 'done'";
    ensure!(world.count(answered).await? < PENDING);
    invariants::assert_consistent(&world.pool).await
}
