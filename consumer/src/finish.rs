//! Finish: reply, operations, rows and lane in one transaction, for one run or for many that ended at the same time.
//!
//! Two statements take the locks, conversations before lanes, and a third decides and writes everything under a new
//! snapshot: rows that were submitted while the run ran are seen by exactly one of submit and finish.

use std::collections::{HashMap, HashSet};

use shared::{
    failpoint,
    ids::{ConversationId, MessageId, RunId},
    sqlstate, wake,
};
use sqlx::{PgConnection, PgPool};

/// A reply to commit.
#[derive(Clone)]
pub(crate) struct Output {
    pub(crate) conversation_id: ConversationId,
    pub(crate) run_id: RunId,
    /// Made once for a reply, so that a finish that is tried again writes the same message.
    pub(crate) message_id: MessageId,
    pub(crate) content: String,
}

/// What became of a finish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finished {
    /// The reply is committed.
    Done,
    /// Its messages had all been deleted: nothing was said, the run is recorded as cancelled.
    Void,
    /// The lane is not this run's any more, or it is to be cancelled: nothing was written.
    Fenced,
    /// The conversation was deleted: nothing was written.
    Gone,
    /// Somebody holds the conversation or the lane: finish it alone, which waits. Only a group returns this.
    Busy,
}

/// Why a finish failed. Nothing was written, unless it is ambiguous.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FinishError {
    #[error("{}", sqlstate::safe_text(.0))]
    Database(#[from] sqlx::Error),
    #[error(transparent)]
    Failpoint(#[from] failpoint::Hit),
}

impl FinishError {
    /// Postgres refuses the reply itself.
    pub(crate) fn is_rejected_content(&self) -> bool {
        matches!(self, Self::Database(error) if sqlstate::is_rejected_content(error))
    }
}

/// Commits several replies together; never waits for a lock. One answer for each, in order.
pub(crate) async fn finish_group(pool: &PgPool, outputs: &[Output]) -> Result<Vec<Finished>, FinishError> {
    let mut transaction = pool.begin().await?;
    let mut conversations: Vec<&str> = outputs.iter().map(|output| output.conversation_id.as_str()).collect();
    conversations.sort_unstable();
    let free: HashSet<String> = sqlx::query_scalar!(
        "select id from conversations where id = any($1) order by id for no key update skip locked",
        &conversations as &[&str],
    )
    .fetch_all(&mut *transaction)
    .await?
    .into_iter()
    .collect();
    let locked: Vec<&Output> =
        outputs.iter().filter(|output| free.contains(output.conversation_id.as_str())).collect();
    let held = lock_lanes(&mut transaction, &locked).await?;
    let ours: Vec<&Output> = locked.into_iter().filter(|output| held.contains(&output.run_id)).collect();
    let written = write(&mut transaction, &ours).await?;
    failpoint::reach("mid_finish").await?;
    transaction.commit().await?;
    written.wake(pool).await;
    Ok(outputs.iter().map(|output| written.fate(output.run_id).unwrap_or(Finished::Busy)).collect())
}

/// Commits one reply; waits for the locks.
pub(crate) async fn finish_one(pool: &PgPool, output: &Output) -> Result<Finished, FinishError> {
    let mut transaction = pool.begin().await?;
    let conversation = sqlx::query_scalar!(
        "select 1 from conversations where id = $1 for no key update",
        output.conversation_id.as_str(),
    )
    .fetch_optional(&mut *transaction)
    .await?;
    if conversation.is_none() {
        transaction.rollback().await?;
        return Ok(Finished::Gone);
    }
    let lane = sqlx::query_scalar!(
        r#"
        select 1 from agent_lanes
        where conversation_id = $1 and run_id = $2 and state = 'running' and not cancel_requested
        for update
        "#,
        output.conversation_id.as_str(),
        output.run_id as RunId,
    )
    .fetch_optional(&mut *transaction)
    .await?;
    if lane.is_none() {
        transaction.rollback().await?;
        return Ok(Finished::Fenced);
    }
    let written = write(&mut transaction, &[output]).await?;
    failpoint::reach("mid_finish").await?;
    transaction.commit().await?;
    written.wake(pool).await;
    Ok(written.fate(output.run_id).unwrap_or(Finished::Fenced))
}

/// After a commit whose answer was lost: did this run's reply get in? The run's record is written with the reply.
pub(crate) async fn was_committed(pool: &PgPool, run: RunId) -> Result<Option<Finished>, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    let outcome = sqlx::query_scalar!(
        "select outcome from agent_runs where run_id = $1 and outcome in ('done', 'cancelled')",
        run as RunId,
    )
    .fetch_optional(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(outcome.map(|outcome| if outcome == "done" { Finished::Done } else { Finished::Void }))
}

async fn lock_lanes(
    connection: &mut PgConnection,
    outputs: &[&Output],
) -> Result<HashSet<RunId>, sqlx::Error> {
    let conversations: Vec<&str> = outputs.iter().map(|output| output.conversation_id.as_str()).collect();
    let runs: Vec<RunId> = outputs.iter().map(|output| output.run_id).collect();
    let held = sqlx::query_scalar!(
        r#"
        select l.run_id as "run_id!: RunId"
        from (
            select * from unnest($1::text[], $2::uuid[]) as t (conversation_id, run_id)
            order by conversation_id
        ) t
        -- a look by key for each, in their order: a join would be free to read every lane, which is in order too
        cross join lateral (
            select l.run_id from agent_lanes l
            where l.conversation_id = t.conversation_id and l.run_id = t.run_id
              and l.state = 'running' and not l.cancel_requested
            for update skip locked
        ) l
        "#,
        &conversations as &[&str],
        &runs as &[RunId],
    )
    .fetch_all(connection)
    .await?;
    Ok(held.into_iter().collect())
}

/// What a finish has written, once it is committed.
#[derive(Default)]
struct Written {
    fates: HashMap<RunId, Finished>,
    /// Rows that came meanwhile wait in one of the lanes.
    waiting: bool,
}

impl Written {
    fn fate(&self, run: RunId) -> Option<Finished> {
        self.fates.get(&run).copied()
    }

    async fn wake(&self, pool: &PgPool) {
        if self.waiting {
            wake::notify(pool).await;
        }
    }
}

/// Writes the finishes of runs whose conversations and lanes this transaction holds.
async fn write(connection: &mut PgConnection, outputs: &[&Output]) -> Result<Written, sqlx::Error> {
    if outputs.is_empty() {
        return Ok(Written::default());
    }
    let conversations: Vec<&str> = outputs.iter().map(|output| output.conversation_id.as_str()).collect();
    let runs: Vec<RunId> = outputs.iter().map(|output| output.run_id).collect();
    let messages: Vec<&str> = outputs.iter().map(|output| output.message_id.as_str()).collect();
    let contents: Vec<&str> = outputs.iter().map(|output| output.content.as_str()).collect();
    let written = sqlx::query!(
        r#"
        with lane as (
            select l.conversation_id, l.turn_id, l.run_id, l.attempt, l.worker, l.claimed_at, l.started_at,
                   t.message_id, t.content
            from unnest($1::text[], $2::uuid[], $3::text[], $4::text[])
                as t (conversation_id, run_id, message_id, content)
            join agent_lanes l on l.conversation_id = t.conversation_id and l.run_id = t.run_id
        ), closed as (
            update agent_outbox o
            set status = 'done', processed_at = clock_timestamp()
            from lane
            where o.conversation_id = lane.conversation_id
              and o.turn_id = lane.turn_id
              and o.run_id = lane.run_id
              and o.status = 'processing'
            returning o.conversation_id, o.message_id
        ), answered as (
            select closed.conversation_id, max(m.seq) as last_seq
            from closed join messages m on m.id = closed.message_id
            group by closed.conversation_id
        ), raised as (
            update conversations c
            set last_seq = c.last_seq + 1,
                unread_count = c.unread_count + 1,
                last_message_at = clock_timestamp()
            from answered
            where c.id = answered.conversation_id
            returning c.id, c.last_seq, answered.last_seq as reply_to_seq
        ), said as (
            insert into messages (id, conversation_id, seq, role, content, turn_id, run_id, reply_to_seq)
            select lane.message_id, lane.conversation_id, raised.last_seq, 'assistant', lane.content,
                   lane.turn_id, lane.run_id, raised.reply_to_seq
            from lane join raised on raised.id = lane.conversation_id
            returning id, run_id
        ), shown as (
            -- by run, never by "not attached yet": another attempt's operations are not this reply's
            update operations o set message_id = said.id
            from said
            where o.run_id = said.run_id and o.message_id is null
        ), recorded as (
            insert into agent_runs
                (run_id, turn_id, conversation_id, attempt, worker, claimed_at, started_at, outcome)
            select lane.run_id, lane.turn_id, lane.conversation_id, lane.attempt, lane.worker, lane.claimed_at,
                   lane.started_at, case when said.id is null then 'cancelled' else 'done' end
            from lane left join said on said.run_id = lane.run_id
            returning run_id, outcome
        )
        update agent_lanes l
        set state = case when next.created_at is null then 'idle' else 'waiting' end,
            wake_at = case when next.created_at is not null then clock_timestamp() end,
            waiting_since = next.created_at,
            turn_id = null, run_id = null, attempt = 0, dispatches = 0,
            worker = null, claimed_at = null, started_at = null
        from lane
        join recorded on recorded.run_id = lane.run_id
        left join lateral (
            select o.created_at from agent_outbox o
            where o.conversation_id = lane.conversation_id and o.turn_id is null
            order by o.turn_id, o.id limit 1
        ) next on true
        where l.conversation_id = lane.conversation_id
          and l.run_id = lane.run_id
          and l.state = 'running'
          and not l.cancel_requested
        returning recorded.run_id as "run_id!: RunId", recorded.outcome as "outcome!",
                  l.state = 'waiting' as "waiting!"
        "#,
        &conversations as &[&str],
        &runs as &[RunId],
        &messages as &[&str],
        &contents as &[&str],
    )
    .fetch_all(connection)
    .await?;
    let waiting = written.iter().any(|run| run.waiting);
    let fate = |outcome: &str| if outcome == "done" { Finished::Done } else { Finished::Void };
    let fates = written.into_iter().map(|run| (run.run_id, fate(&run.outcome))).collect();
    Ok(Written { fates, waiting })
}
