//! Begin and load: a delivered trigger becomes a running attempt with its messages, or is found to be over. Both are one
//! statement for a whole batch, in one transaction.

use std::{collections::HashMap, sync::Arc};

use shared::{
    ids::{AgentName, ConversationId, MessageId, RunId, TurnId},
    state::Role,
};
use sqlx::{PgConnection, PgPool};

use crate::{handler::TurnMessage, history};

/// Which run a begin is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) conversation_id: ConversationId,
    pub(crate) run_id: RunId,
    pub(crate) trace_context: Option<String>,
}

/// A run that holds its lane: begun, leased, and loaded.
#[derive(Debug, Clone)]
pub(crate) struct Begun {
    pub(crate) conversation_id: ConversationId,
    pub(crate) agent: AgentName,
    pub(crate) turn_id: TurnId,
    pub(crate) run_id: RunId,
    pub(crate) attempt: i32,
    /// The attempt before this one lost its lease: it may have killed its process.
    pub(crate) suspect: bool,
    pub(crate) trace_context: Option<String>,
    pub(crate) messages: Arc<[TurnMessage]>,
}

/// A run that holds its lane, before its messages are loaded.
#[derive(Debug)]
pub(crate) struct Leased {
    pub(crate) conversation_id: ConversationId,
    pub(crate) turn_id: TurnId,
    pub(crate) run_id: RunId,
    pub(crate) attempt: i32,
    pub(crate) suspect: bool,
}

/// Begins every candidate whose run is queued for this agent, and loads it. Who is not in the answer is over: begun
/// already, settled, released, or another agent's.
pub(crate) async fn begin_queued(
    pool: &PgPool,
    agent: &AgentName,
    worker: &str,
    history_limit: u32,
    candidates: &[Candidate],
) -> Result<Vec<Begun>, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    let leased = lease_queued(&mut transaction, agent, worker, candidates).await?;
    let messages = load(&mut transaction, &leased, history_limit).await?;
    transaction.commit().await?;
    let traces =
        candidates.iter().map(|candidate| (candidate.run_id, candidate.trace_context.clone())).collect();
    Ok(assemble(leased, messages, agent, &traces))
}

/// Loads runs that this process has claimed for itself.
pub(crate) async fn load_claimed(
    pool: &PgPool,
    agent: &AgentName,
    history_limit: u32,
    leased: Vec<Leased>,
    traces: &HashMap<RunId, Option<String>>,
) -> Result<Vec<Begun>, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    let messages = load(&mut transaction, &leased, history_limit).await?;
    transaction.commit().await?;
    Ok(assemble(leased, messages, agent, traces))
}

async fn lease_queued(
    connection: &mut PgConnection,
    agent: &AgentName,
    worker: &str,
    candidates: &[Candidate],
) -> Result<Vec<Leased>, sqlx::Error> {
    let conversations: Vec<&str> = candidates.iter().map(|c| c.conversation_id.as_str()).collect();
    let runs: Vec<RunId> = candidates.iter().map(|c| c.run_id).collect();
    sqlx::query_as!(
        Leased,
        r#"
        with due as (
            select l.conversation_id, l.run_id
            from unnest($1::text[], $2::uuid[]) as t (conversation_id, run_id)
            join agent_lanes l on l.conversation_id = t.conversation_id and l.run_id = t.run_id
            where l.state = 'queued' and l.agent = $3
            order by l.conversation_id
            for update of l
        )
        update agent_lanes l
        set state = 'running',
            worker = $4,
            started_at = clock_timestamp(),
            wake_at = clock_timestamp() + a.lease
        from due, agents a
        where l.conversation_id = due.conversation_id
          and l.run_id = due.run_id
          and l.state = 'queued'
          and l.agent = $3
          and a.name = l.agent
        returning l.conversation_id as "conversation_id: ConversationId", l.turn_id as "turn_id!: TurnId",
                  l.run_id as "run_id!: RunId", l.attempt,
                  l.attempt > 1 and exists (
                      select from agent_runs r
                      where r.turn_id = l.turn_id and r.attempt = l.attempt - 1 and r.outcome = 'expired'
                  ) as "suspect!"
        "#,
        &conversations as &[&str],
        &runs as &[RunId],
        agent.as_str(),
        worker,
    )
    .fetch_all(connection)
    .await
}

struct LoadedMessage {
    run_id: RunId,
    id: MessageId,
    seq: i64,
    role: Role,
    content: String,
    in_turn: bool,
    reply_to_seq: Option<i64>,
}

/// Reads each run's own messages and at most `history_limit` messages and as many outcomes before them.
async fn load(
    connection: &mut PgConnection,
    leased: &[Leased],
    history_limit: u32,
) -> Result<Vec<LoadedMessage>, sqlx::Error> {
    if leased.is_empty() {
        return Ok(Vec::new());
    }
    let conversations: Vec<&str> = leased.iter().map(|run| run.conversation_id.as_str()).collect();
    let turns: Vec<TurnId> = leased.iter().map(|run| run.turn_id).collect();
    let runs: Vec<RunId> = leased.iter().map(|run| run.run_id).collect();
    sqlx::query_as!(
        LoadedMessage,
        r#"
        with turn as (
            select t.run_id, t.conversation_id, m.id, m.seq, m.content
            from unnest($1::text[], $2::uuid[], $3::uuid[]) as t (conversation_id, turn_id, run_id)
            join agent_outbox o on o.conversation_id = t.conversation_id and o.turn_id = t.turn_id
            join messages m on m.id = o.message_id
            where m.deleted_at is null
        ), bound as (
            select run_id, conversation_id, max(seq) as last_seq, array_agg(id) as ids
            from turn group by run_id, conversation_id
        )
        select run_id as "run_id!: RunId", id as "id!: MessageId", seq as "seq!", 'user' as "role!: Role",
               content as "content!", true as "in_turn!", null::bigint as reply_to_seq
        from turn
        union all
        select bound.run_id, said.id, said.seq, 'user', said.content, false, null
        from bound cross join lateral (
            select m.id, m.seq, m.content from messages m
            where m.conversation_id = bound.conversation_id and m.seq <= bound.last_seq
              and m.role = 'user' and m.deleted_at is null and m.id <> all (bound.ids)
            order by m.seq desc limit $4
        ) said
        union all
        -- an outcome's own seq is later than messages that were waiting: it is found by the turn that it answers
        select bound.run_id, answer.id, answer.seq, answer.role, answer.content, false, answer.reply_to_seq
        from bound cross join lateral (
            select m.id, m.seq, m.role, m.content, m.reply_to_seq from messages m
            where m.conversation_id = bound.conversation_id and m.reply_to_seq < bound.last_seq
              and m.role <> 'user' and m.deleted_at is null
            order by m.reply_to_seq desc limit $4
        ) answer
        "#,
        &conversations as &[&str],
        &turns as &[TurnId],
        &runs as &[RunId],
        i64::from(history_limit),
    )
    .fetch_all(connection)
    .await
}

fn assemble(
    leased: Vec<Leased>,
    messages: Vec<LoadedMessage>,
    agent: &AgentName,
    traces: &HashMap<RunId, Option<String>>,
) -> Vec<Begun> {
    let mut by_run: HashMap<RunId, Vec<history::Entry>> = HashMap::new();
    for m in messages {
        let message =
            TurnMessage { id: m.id, seq: m.seq, role: m.role, content: m.content, in_turn: m.in_turn };
        by_run.entry(m.run_id).or_default().push(history::Entry { message, reply_to_seq: m.reply_to_seq });
    }
    let begun = leased.into_iter().map(|run| Begun {
        messages: history::by_turn(by_run.remove(&run.run_id).unwrap_or_default()).into(),
        trace_context: traces.get(&run.run_id).cloned().flatten(),
        conversation_id: run.conversation_id,
        agent: agent.clone(),
        turn_id: run.turn_id,
        run_id: run.run_id,
        attempt: run.attempt,
        suspect: run.suspect,
    });
    begun.collect()
}
