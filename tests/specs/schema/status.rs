//! What readers see of a conversation: the view `conversation_status`, which guesses nothing.

use anyhow::{Result, ensure};
use tests::World;

use super::execute;

/// How a lane gets there, what is shown, since when, and at which attempt.
type Status = (&'static str, &'static str, &'static str, i32);

const NOW: &str = "clock_timestamp()";

/// One after another, on the one conversation `c1`.
const LIFE: &[Status] = &[
    ("select create_conversation('c1')", "idle", "select created_at from conversations", 0),
    (
        "select submit_message('m1', 'c1', 'hello')",
        "waiting",
        "select waiting_since from agent_lanes",
        0,
    ),
    (
        "update agent_lanes set state = 'queued', wake_at = clock_timestamp(), turn_id = md5('t')::uuid,
             run_id = md5('r1')::uuid, attempt = 1, dispatches = 1, claimed_at = clock_timestamp()",
        "queued",
        "select claimed_at from agent_lanes",
        1,
    ),
    (
        "update agent_lanes set state = 'running', wake_at = clock_timestamp() + '1 hour', worker = 'w',
             started_at = clock_timestamp()",
        "thinking",
        "select started_at from agent_lanes",
        1,
    ),
    (
        "update agent_lanes set wake_at = clock_timestamp() - interval '1 s'",
        "recovering",
        "select wake_at from agent_lanes",
        1,
    ),
    (
        "insert into agent_runs (run_id, turn_id, conversation_id, attempt, claimed_at, outcome)
         select run_id, turn_id, conversation_id, attempt, claimed_at, 'expired' from agent_lanes;
         update agent_lanes set state = 'waiting', run_id = null, dispatches = 0, worker = null,
             claimed_at = null, started_at = null",
        "retrying",
        "select ended_at from agent_runs",
        1,
    ),
    (
        "update agent_lanes set state = 'idle', wake_at = null, waiting_since = null, turn_id = null, attempt = 0;
         insert into messages (id, conversation_id, seq, role, content, turn_id, reply_to_seq, error)
         values ('e1', 'c1', 2, 'error', 'it failed', md5('t')::uuid, 1, '{}')",
        "error",
        "select created_at from messages where id = 'e1'",
        0,
    ),
    (
        "select submit_message('m2', 'c1', 'again')",
        "waiting",
        "select waiting_since from agent_lanes",
        0,
    ),
    (
        "update agent_lanes set state = 'idle', wake_at = null, waiting_since = null;
         insert into messages (id, conversation_id, seq, role, content, turn_id, run_id, reply_to_seq)
         values ('r2', 'c1', 4, 'assistant', 'better', md5('u')::uuid, md5('r2')::uuid, 3)",
        "idle",
        "select created_at from messages where id = 'r2'",
        0,
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_shows_what_it_is_doing_since_when_and_at_which_attempt() -> Result<()> {
    let world = World::new().await?;
    for (step, status, since, attempt) in LIFE {
        execute(&world.pool, step).await?;
        execute(
            &world.pool,
            "update conversations set last_seq = (select coalesce(max(seq), 0) from messages)",
        )
        .await?;
        let question = format!(
            "select status, attempt, coalesce(since = ({since}), false), since <= {NOW}
             from conversation_status"
        );
        let shown: (String, i32, bool, bool) =
            sqlx::query_as(sqlx::AssertSqlSafe(question)).fetch_one(&world.pool).await?;
        ensure!(shown == ((*status).into(), *attempt, true, true), "after {step}: {shown:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_conversation_has_one_status() -> Result<()> {
    let world = World::new().await?;
    for conversation in ["c1", "c2", "c3"] {
        world.create_conversation(conversation).await?;
    }
    world.submit("c2", "hello").await?;
    world.submit("c2", "and more").await?;
    ensure!(world.count("select count(*) from conversation_status").await? == 3);
    ensure!(world.count("select count(*) from conversation_status where status = 'idle'").await? == 2);
    ensure!(world.count("select last_seq from conversation_status where status = 'waiting'").await? == 2);
    Ok(())
}
