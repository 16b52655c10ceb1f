//! Begin and load: a delivered trigger becomes a running attempt with its messages, or is found to be over. One statement
//! does both, for a whole batch.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use shared::{
    ids::{AgentName, ConversationId, MessageId, RunId, TurnId},
    state::Role,
};
use sqlx::PgPool;

use crate::{handler::TurnMessage, history};

/// Which run a begin is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) conversation_id: ConversationId,
    pub(crate) run_id: RunId,
    pub(crate) turn_id: TurnId,
    pub(crate) attempt: i32,
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

/// A run that holds its lane, before its messages are loaded: a direct consumer's own claim.
#[derive(Debug)]
pub(crate) struct Leased {
    pub(crate) conversation_id: ConversationId,
    pub(crate) turn_id: TurnId,
    pub(crate) run_id: RunId,
    pub(crate) attempt: i32,
    pub(crate) suspect: bool,
}

/// What the statements of this file return: for each run a row that names it, and rows of its messages.
struct Loaded {
    run_id: RunId,
    conversation_id: Option<ConversationId>,
    turn_id: Option<TurnId>,
    attempt: Option<i32>,
    suspect: Option<bool>,
    id: Option<MessageId>,
    seq: Option<i64>,
    role: Option<Role>,
    content: Option<String>,
    in_turn: bool,
    reply_to_seq: Option<i64>,
}

/// Loads the runs of the CTE `leased`, which `$head` ends with: each one's own messages, and at most as many messages and
/// outcomes before them as the CTE `history` says.
macro_rules! load {
    ($head:literal, $($argument:expr),+ $(,)?) => {
        sqlx::query_as!(
            Loaded,
            $head + r#"
        , turn as (
            select leased.run_id, leased.conversation_id, m.id, m.seq, m.content
            from leased
            join agent_outbox o on o.conversation_id = leased.conversation_id and o.turn_id = leased.turn_id
            join messages m on m.id = o.message_id
            where m.deleted_at is null
        ), bound as (
            select run_id, conversation_id, max(seq) as last_seq, array_agg(id) as ids
            from turn group by run_id, conversation_id
        )
        select run_id as "run_id!: RunId", conversation_id as "conversation_id?: ConversationId",
               turn_id as "turn_id?: TurnId", attempt as "attempt?", suspect as "suspect?",
               null::text as "id?: MessageId", null::bigint as seq, null::text as "role?: Role",
               null::text as content, false as "in_turn!", null::bigint as reply_to_seq
        from leased
        union all
        select run_id, null, null, null, null, id, seq, 'user', content, true, null
        from turn
        union all
        select bound.run_id, null, null, null, null, said.id, said.seq, 'user', said.content, false, null
        from bound cross join lateral (
            select m.id, m.seq, m.content from messages m
            where m.conversation_id = bound.conversation_id and m.seq <= bound.last_seq
              and m.role = 'user' and m.deleted_at is null and m.id <> all (bound.ids)
            order by m.seq desc limit (select most from history)
        ) said
        union all
        -- an outcome's own seq is later than messages that were waiting: it is found by the turn that it answers
        select bound.run_id, null, null, null, null, answer.id, answer.seq, answer.role, answer.content, false,
               answer.reply_to_seq
        from bound cross join lateral (
            select m.id, m.seq, m.role, m.content, m.reply_to_seq from messages m
            where m.conversation_id = bound.conversation_id and m.reply_to_seq < bound.last_seq
              and m.role <> 'user' and m.deleted_at is null
            order by m.reply_to_seq desc limit (select most from history)
        ) answer
        "#,
            $($argument),+
        )
    };
}

/// Which of these runs may kill their process. Each of them runs alone; one that was begun and waits for another would lose
/// an attempt to that one's crash, so they are begun one at a time.
pub(crate) async fn suspects(pool: &PgPool, candidates: &[Candidate]) -> Result<HashSet<RunId>, sqlx::Error> {
    let again: Vec<&Candidate> = candidates.iter().filter(|candidate| candidate.attempt > 1).collect();
    if again.is_empty() {
        return Ok(HashSet::new());
    }
    let runs: Vec<RunId> = again.iter().map(|candidate| candidate.run_id).collect();
    let turns: Vec<TurnId> = again.iter().map(|candidate| candidate.turn_id).collect();
    let before: Vec<i32> = again.iter().map(|candidate| candidate.attempt - 1).collect();
    let mut transaction = pool.begin().await?;
    let suspects = sqlx::query_scalar!(
        r#"
        select t.run_id as "run_id!: RunId"
        from unnest($1::uuid[], $2::uuid[], $3::int[]) as t (run_id, turn_id, before)
        cross join lateral (
            select 1 from agent_runs r
            where r.turn_id = t.turn_id and r.attempt = t.before and r.outcome = 'expired'
        ) lost
        "#,
        &runs as &[RunId],
        &turns as &[TurnId],
        &before,
    )
    .fetch_all(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(suspects.into_iter().collect())
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
    let conversations: Vec<&str> = candidates.iter().map(|c| c.conversation_id.as_str()).collect();
    let runs: Vec<RunId> = candidates.iter().map(|c| c.run_id).collect();
    let mut transaction = pool.begin().await?;
    let loaded = load!(
        r#"
        with history as (
            select $5::bigint as most
        ), due as (
            select l.*
            from (
                select * from unnest($1::text[], $2::uuid[]) as t (conversation_id, run_id)
                order by conversation_id
            ) t
            cross join lateral (
                select l.conversation_id, l.run_id from agent_lanes l
                where l.conversation_id = t.conversation_id and l.run_id = t.run_id
                  and l.state = 'queued' and l.agent = $3
                for update
            ) l
        ), leased as (
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
            returning l.conversation_id, l.turn_id, l.run_id, l.attempt,
                      l.attempt > 1 and exists (
                          select from agent_runs r
                          where r.turn_id = l.turn_id and r.attempt = l.attempt - 1 and r.outcome = 'expired'
                      ) as suspect
        )
        "#,
        &conversations as &[&str],
        &runs as &[RunId],
        agent.as_str(),
        worker,
        i64::from(history_limit),
    )
    .fetch_all(&mut *transaction)
    .await?;
    transaction.commit().await?;
    let traces =
        candidates.iter().map(|candidate| (candidate.run_id, candidate.trace_context.clone())).collect();
    Ok(assemble(loaded, agent, &traces))
}

/// Loads runs that this process has claimed for itself.
pub(crate) async fn load_claimed(
    pool: &PgPool,
    agent: &AgentName,
    history_limit: u32,
    leased: Vec<Leased>,
    traces: &HashMap<RunId, Option<String>>,
) -> Result<Vec<Begun>, sqlx::Error> {
    let conversations: Vec<&str> = leased.iter().map(|run| run.conversation_id.as_str()).collect();
    let turns: Vec<TurnId> = leased.iter().map(|run| run.turn_id).collect();
    let runs: Vec<RunId> = leased.iter().map(|run| run.run_id).collect();
    let attempts: Vec<i32> = leased.iter().map(|run| run.attempt).collect();
    let suspects: Vec<bool> = leased.iter().map(|run| run.suspect).collect();
    let mut transaction = pool.begin().await?;
    let loaded = load!(
        r#"
        with history as (
            select $6::bigint as most
        ), leased as (
            select * from unnest($1::text[], $2::uuid[], $3::uuid[], $4::int[], $5::bool[])
                as t (conversation_id, turn_id, run_id, attempt, suspect)
        )
        "#,
        &conversations as &[&str],
        &turns as &[TurnId],
        &runs as &[RunId],
        &attempts,
        &suspects,
        i64::from(history_limit),
    )
    .fetch_all(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(assemble(loaded, agent, traces))
}

/// Puts the rows of each run together. A run whose messages are all gone has none; its settle will say so.
fn assemble(loaded: Vec<Loaded>, agent: &AgentName, traces: &HashMap<RunId, Option<String>>) -> Vec<Begun> {
    let mut begun: Vec<Begun> = Vec::new();
    let mut by_run: HashMap<RunId, Vec<history::Entry>> = HashMap::new();
    for row in loaded {
        match row {
            Loaded {
                conversation_id: Some(conversation_id),
                turn_id: Some(turn_id),
                attempt: Some(attempt),
                run_id,
                suspect,
                ..
            } => begun.push(Begun {
                conversation_id,
                agent: agent.clone(),
                turn_id,
                run_id,
                attempt,
                suspect: suspect.unwrap_or(false),
                trace_context: traces.get(&run_id).cloned().flatten(),
                messages: Arc::default(),
            }),
            Loaded {
                id: Some(id),
                seq: Some(seq),
                role: Some(role),
                content,
                in_turn,
                reply_to_seq,
                run_id,
                ..
            } => {
                let content = content.unwrap_or_default();
                let message = TurnMessage { id, seq, role, content, in_turn };
                by_run.entry(run_id).or_default().push(history::Entry { message, reply_to_seq });
            }
            _ => {}
        }
    }
    for run in &mut begun {
        run.messages = history::by_turn(by_run.remove(&run.run_id).unwrap_or_default()).into();
    }
    begun
}
