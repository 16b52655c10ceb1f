//! The claim's statements: lock the lanes that are due, read their rows, write both.

use sqlx::PgConnection;

use super::draft::Draft;
use crate::ids::{AgentName, ConversationId, MessageId, RunId, TurnId};

/// A lane whose time has come, locked.
pub(super) struct DueLane {
    pub(super) conversation_id: ConversationId,
    pub(super) agent: AgentName,
    pub(super) turn_id: Option<TurnId>,
    pub(super) max_turn_messages: i32,
    pub(super) suspect: bool,
}

/// A row that the lane's next turn consists of.
pub(super) struct FreeRow {
    pub(super) conversation_id: ConversationId,
    pub(super) id: i64,
    pub(super) message_id: MessageId,
    pub(super) seq: i64,
    pub(super) generation: i32,
    pub(super) trace_context: Option<String>,
}

/// A lane that now holds a run.
pub(super) struct Marked {
    pub(super) conversation_id: ConversationId,
    pub(super) attempt: i32,
    pub(super) suspect: bool,
}

pub(super) async fn lock_due_lanes(
    connection: &mut PgConnection,
    batch: u32,
) -> Result<Vec<DueLane>, sqlx::Error> {
    sqlx::query_as!(
        DueLane,
        r#"
        select due.conversation_id as "conversation_id: ConversationId",
               due.agent as "agent: AgentName",
               due.turn_id as "turn_id: TurnId",
               a.max_turn_messages,
               false as "suspect!"
        from (
            select l.conversation_id, l.agent, l.turn_id
            from agent_lanes l
            where l.state = 'waiting'
              -- a sub-select, since a volatile function is no index condition
              and l.wake_at <= (select clock_timestamp())
            order by l.wake_at
            limit $1
            for update skip locked
        ) due
        join agents a on a.name = due.agent
        "#,
        i64::from(batch),
    )
    .fetch_all(connection)
    .await
}

pub(super) async fn lock_due_lanes_of(
    connection: &mut PgConnection,
    agents: &[AgentName],
    batch: u32,
) -> Result<Vec<DueLane>, sqlx::Error> {
    sqlx::query_as!(
        DueLane,
        r#"
        select due.conversation_id as "conversation_id: ConversationId",
               due.agent as "agent: AgentName",
               due.turn_id as "turn_id: TurnId",
               a.max_turn_messages,
               due.attempt > 0 and exists (
                   select from agent_runs r
                   where r.turn_id = due.turn_id and r.attempt = due.attempt and r.outcome = 'expired'
               ) as "suspect!"
        from unnest($1::text[]) as wanted (agent)
        join agents a on a.name = wanted.agent
        cross join lateral (
            select l.conversation_id, l.agent, l.turn_id, l.attempt
            from agent_lanes l
            where l.agent = wanted.agent
              and l.state = 'waiting'
              and l.wake_at <= (select clock_timestamp())
            order by l.wake_at
            limit $2
            for update skip locked
        ) due
        limit $2
        "#,
        agents as &[AgentName],
        i64::from(batch),
    )
    .fetch_all(connection)
    .await
}

pub(super) async fn read_free_rows(
    connection: &mut PgConnection,
    lanes: &[DueLane],
) -> Result<Vec<FreeRow>, sqlx::Error> {
    let conversations: Vec<&str> = lanes.iter().map(|lane| lane.conversation_id.as_str()).collect();
    let turns: Vec<Option<TurnId>> = lanes.iter().map(|lane| lane.turn_id).collect();
    let caps: Vec<i32> = lanes.iter().map(|lane| lane.max_turn_messages).collect();
    sqlx::query_as!(
        FreeRow,
        r#"
        select lane.conversation_id as "conversation_id!: ConversationId",
               o.id as "id!",
               o.message_id as "message_id!: MessageId",
               m.seq,
               o.generation as "generation!",
               o.trace_context
        from unnest($1::text[], $2::uuid[], $3::int[]) as lane (conversation_id, turn_id, cap)
        cross join lateral (
            -- a new turn: the oldest free rows of one generation. Null turn_ids lie together in the index, by id.
            (select o.id, o.message_id, o.generation, o.trace_context
             from agent_outbox o
             where lane.turn_id is null
               and o.conversation_id = lane.conversation_id
               and o.turn_id is null
               and o.generation = (
                   select oldest.generation from agent_outbox oldest
                   where oldest.conversation_id = lane.conversation_id and oldest.turn_id is null
                   order by oldest.turn_id, oldest.id limit 1)
             order by o.turn_id, o.id
             limit lane.cap)
            union all
            -- a retry: the rows of the lane's own turn, all of them and no others
            (select o.id, o.message_id, o.generation, o.trace_context
             from agent_outbox o
             where o.conversation_id = lane.conversation_id
               and o.turn_id = lane.turn_id
               and o.status = 'pending')
        ) o
        join messages m on m.id = o.message_id
        "#,
        &conversations as &[&str],
        &turns as &[Option<TurnId>],
        &caps,
    )
    .fetch_all(connection)
    .await
}

pub(super) async fn mark(
    connection: &mut PgConnection,
    draft: &Draft,
    worker: Option<&str>,
) -> Result<Vec<Marked>, sqlx::Error> {
    let conversations: Vec<&str> = draft.turns.keys().map(ConversationId::as_str).collect();
    let turns: Vec<TurnId> = draft.turns.values().map(|turn| turn.turn_id).collect();
    let runs: Vec<RunId> = draft.turns.values().map(|turn| turn.run_id).collect();
    let each_row = || draft.turns.values().flat_map(|turn| turn.rows.iter().map(move |row| (row, turn)));
    let rows: Vec<i64> = each_row().map(|(row, _)| *row).collect();
    let row_turns: Vec<TurnId> = each_row().map(|(_, turn)| turn.turn_id).collect();
    let row_runs: Vec<RunId> = each_row().map(|(_, turn)| turn.run_id).collect();
    sqlx::query_as!(
        Marked,
        r#"
        with taken as (
            update agent_outbox o
            set status = 'processing', attempts = o.attempts + 1, turn_id = t.turn_id, run_id = t.run_id
            from unnest($4::bigint[], $5::uuid[], $6::uuid[]) as t (id, turn_id, run_id)
            where o.id = t.id
              and o.status = 'pending'
              and (o.turn_id is null or o.turn_id = t.turn_id)
            returning o.run_id
        )
        update agent_lanes l
        set state = case when $7::text is null then 'queued' else 'running' end,
            wake_at = clock_timestamp() + case when $7::text is null then a.dispatch_timeout else a.lease end,
            turn_id = t.turn_id,
            run_id = t.run_id,
            attempt = l.attempt + 1,
            dispatches = 1,
            claimed_at = clock_timestamp(),
            started_at = case when $7::text is not null then clock_timestamp() end,
            worker = $7
        from unnest($1::text[], $2::uuid[], $3::uuid[]) as t (conversation_id, turn_id, run_id), agents a
        where l.conversation_id = t.conversation_id
          and l.state = 'waiting'
          and a.name = l.agent
          -- rows that were deleted since they were read leave their lane as it is
          and t.run_id in (select run_id from taken)
        returning l.conversation_id as "conversation_id: ConversationId", l.attempt,
                  l.attempt > 1 and exists (
                      select from agent_runs r
                      where r.turn_id = l.turn_id and r.attempt = l.attempt - 1 and r.outcome = 'expired'
                  ) as "suspect!"
        "#,
        &conversations as &[&str],
        &turns as &[TurnId],
        &runs as &[RunId],
        &rows,
        &row_turns as &[TurnId],
        &row_runs as &[RunId],
        worker,
    )
    .fetch_all(connection)
    .await
}
