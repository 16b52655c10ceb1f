//! A database that has seen much: a long history, a deep backlog, and some turns in every state.

use anyhow::{Result, ensure};
use sqlx::{Connection, PgConnection};
use tests::World;

/// Conversations that were answered, lanes that are due, and lanes in flight of each kind.
const SETTLED: i32 = 50_000;
const DUE: i32 = 25_000;
const IN_FLIGHT: i32 = 300;

/// The loaded rows are what the triggers and statements of the pipeline would have left.
const LOAD: &str = "
    create function pg_temp.u(kind text, n int) returns uuid language sql immutable
        return md5(kind || n)::uuid;

    insert into conversations (id, last_seq, unread_count) select 'settled-' || n, 2, 1 from generate_series(1, $S) n;
    insert into messages (id, conversation_id, seq, role, content)
    select 'asked-' || n, 'settled-' || n, 1, 'user', 'hello' from generate_series(1, $S) n;
    insert into messages (id, conversation_id, seq, role, content, turn_id, run_id, reply_to_seq)
    select 'said-' || n, 'settled-' || n, 2, 'assistant', 'hi', pg_temp.u('turn', n), pg_temp.u('run', n), 1
    from generate_series(1, $S) n;
    insert into agent_outbox (conversation_id, message_id, status, attempts, turn_id, run_id, processed_at)
    select 'settled-' || n, 'asked-' || n, 'done', 1, pg_temp.u('turn', n), pg_temp.u('run', n), now()
    from generate_series(1, $S) n;
    insert into agent_runs (run_id, turn_id, conversation_id, attempt, claimed_at, outcome)
    select pg_temp.u('run', n), pg_temp.u('turn', n), 'settled-' || n, 1, now(), 'done'
    from generate_series(1, $S) n;

    insert into conversations (id, last_seq) select 'due-' || n, 1 from generate_series(1, $D) n;
    insert into messages (id, conversation_id, seq, role, content)
    select 'waits-' || n, 'due-' || n, 1, 'user', 'hello' from generate_series(1, $D) n;
    insert into agent_outbox (conversation_id, message_id)
    select 'due-' || n, 'waits-' || n from generate_series(1, $D) n;
    update agent_lanes set state = 'waiting', waiting_since = now(), wake_at = clock_timestamp()
    where conversation_id like 'due-%';

    -- In flight: queued for longer than may be, and running with a lease that is over.
    update agent_outbox set status = 'processing', attempts = 1, turn_id = pg_temp.u('flight', id::int),
        run_id = pg_temp.u('flying', id::int)
    where message_id in (select 'waits-' || n from generate_series(1, 2 * $F) n);
    update agent_lanes l
    set state = case when m.n <= $F then 'queued' else 'running' end,
        turn_id = o.turn_id, run_id = o.run_id, attempt = 1, dispatches = 1,
        claimed_at = now() - interval '1 min', wake_at = now(),
        worker = case when m.n > $F then 'gone' end, started_at = case when m.n > $F then now() end
    from generate_series(1, 2 * $F) m (n) join agent_outbox o on o.message_id = 'waits-' || m.n
    where l.conversation_id = 'due-' || m.n";

/// Nothing but [`analyze`] makes statistics here.
pub(super) async fn keep_statistics(world: &World) -> Result<()> {
    for table in ["conversations", "messages", "agent_outbox", "agent_lanes", "agent_runs", "operations"] {
        let alter = format!("alter table {table} set (autovacuum_enabled = off)");
        sqlx::query(sqlx::AssertSqlSafe(alter)).execute(&world.pool).await?;
    }
    analyze(world).await
}

/// Statistics of the moment.
pub(super) async fn analyze(world: &World) -> Result<()> {
    sqlx::raw_sql("analyze").execute(&world.pool).await?;
    Ok(())
}

/// Writes it all in one transaction.
pub(super) async fn load(world: &World) -> Result<()> {
    let sql = LOAD
        .replace("$S", &SETTLED.to_string())
        .replace("$D", &DUE.to_string())
        .replace("$F", &IN_FLIGHT.to_string());
    sqlx::raw_sql(sqlx::AssertSqlSafe(format!("begin; {sql}; commit"))).execute(&world.pool).await?;
    ensure!(world.count("select count(*) from conversations").await? > 75_000);
    Ok(())
}

/// An application's session, with the planner as it comes.
pub(super) struct Producer {
    session: PgConnection,
    number: u32,
    name: String,
}

impl Producer {
    pub(super) async fn start(world: &World) -> Result<Self> {
        let mut session = PgConnection::connect(&world.database_url()).await?;
        let name = sqlx::query_scalar("select 'p' || pg_backend_pid()").fetch_one(&mut session).await?;
        Ok(Self { session, number: 0, name })
    }

    /// Submits to conversations of its own: to new ones, and to those that it had before.
    pub(super) async fn submit(&mut self, count: u32) -> Result<()> {
        for _ in 0..count {
            self.number += 1;
            let conversation = format!("{}-{}", self.name, self.number);
            for (conversation, message) in [
                (&conversation, format!("{conversation}-m")),
                (&format!("{}-{}", self.name, 1 + self.number / 2), format!("{conversation}-n")),
            ] {
                sqlx::query("select create_conversation($1), submit_message($2, $1, 'hello')")
                    .bind(conversation)
                    .bind(message)
                    .execute(&mut self.session)
                    .await?;
            }
        }
        Ok(())
    }
}
