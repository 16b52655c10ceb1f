//! The deletion of a conversation: nothing of it is left, and it waits for locks in everybody's order.

use anyhow::{Result, ensure};
use sqlx::{Connection, PgConnection, PgPool};
use tests::World;

use super::execute;

/// A conversation with everything that hangs on one.
const FURNISHED: &str = "
    select create_conversation('c1'), submit_message('m1', 'c1', 'hello');
    insert into messages (id, conversation_id, seq, role, content, turn_id, run_id, reply_to_seq)
    values ('r1', 'c1', 2, 'assistant', 'hi', gen_random_uuid(), gen_random_uuid(), 1);
    insert into agent_runs (run_id, turn_id, conversation_id, attempt, claimed_at, outcome)
    select run_id, turn_id, 'c1', 1, now(), 'done' from messages where id = 'r1';
    insert into operations
        (id, run_id, turn_id, conversation_id, ordinal, name, effect, status, idempotency_key, message_id)
    select gen_random_uuid(), run_id, turn_id, 'c1', 1, 'look', 'read', 'started', gen_random_uuid(), 'r1'
    from messages where id = 'r1'";

const LEFT: &str = "
    select (select count(*) from conversations) + (select count(*) from messages)
         + (select count(*) from agent_outbox) + (select count(*) from agent_lanes)
         + (select count(*) from agent_runs) + (select count(*) from operations)";

/// Whether nobody holds the rows of a statement, which must skip those that are held.
async fn free(pool: &PgPool, sql: &'static str) -> Result<bool> {
    Ok(sqlx::query(sql).fetch_optional(pool).await?.is_some())
}

async fn delete_waits(world: &World) -> Result<()> {
    world
        .eventually("the deletion waits for a lock", async || {
            let waiting = "select count(*) from pg_stat_activity
                 where datname = current_database() and query like 'delete from conversations%'
                   and wait_event_type = 'Lock'";
            Ok(world.count(waiting).await? == 1)
        })
        .await
}

const CONVERSATION: &str = "select 1 from conversations for update skip locked";
const LANE: &str = "select 1 from agent_lanes for update skip locked";
const MESSAGES: &str = "select 1 from messages where id = 'm1' for update skip locked";
const OPERATIONS: &str = "select 1 from operations for update skip locked";

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_conversation_leaves_nothing_behind() -> Result<()> {
    let world = World::new().await?;
    execute(&world.pool, FURNISHED).await?;
    execute(&world.pool, "delete from messages where id = 'r1'").await?;
    ensure!(
        world.count("select count(*) from operations where message_id is null").await? == 1,
        "an operation outlives the message that shows it"
    );
    execute(&world.pool, "delete from conversations").await?;
    ensure!(world.count(LEFT).await? == 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_takes_the_conversation_then_the_lane_and_then_the_rest() -> Result<()> {
    let world = World::new().await?;
    execute(&world.pool, FURNISHED).await?;
    for (held, behind) in
        [(CONVERSATION, [LANE, MESSAGES, OPERATIONS].as_slice()), (LANE, [MESSAGES, OPERATIONS].as_slice())]
    {
        let mut holder = PgConnection::connect(&world.database_url()).await?;
        let mut holding = holder.begin().await?;
        ensure!(sqlx::query(held).fetch_optional(&mut *holding).await?.is_some());
        let pool = world.pool.clone();
        let deletion = tokio::spawn(async move {
            let mut transaction = pool.begin().await?;
            sqlx::query("delete from conversations").execute(&mut *transaction).await?;
            transaction.rollback().await
        });
        delete_waits(&world).await?;
        for lock in behind {
            ensure!(free(&world.pool, lock).await?, "{lock}: taken before {held}");
        }
        ensure!(!free(&world.pool, CONVERSATION).await?, "the conversation comes first");
        holding.rollback().await?;
        deletion.await??;
    }
    Ok(())
}
