//! The claim: rows become a turn, a turn gets a run, and the attempt is counted before anything else happens.
//!
//! Three statements in one transaction: lock the lanes that are due, read their rows under the locks with a new snapshot,
//! write both. The relay claims into `queued` and publishes; a direct consumer claims into `running` and begins at once.

use std::collections::{BTreeMap, HashSet};

use sqlx::{PgConnection, PgPool};

use crate::ids::{AgentName, ConversationId, MessageId, RunId, TurnId};

/// Whose lanes to claim, and for what.
#[derive(Debug, Clone, Copy)]
pub struct Claim<'a> {
    /// At most this many lanes.
    pub batch: u32,
    /// Only these agents' lanes, in this order of preference; `None`: every agent's, by one index.
    pub agents: Option<&'a [AgentName]>,
    /// The consumer that begins the runs at once, of suspects one at most; `None`: the runs are queued, to be published.
    pub worker: Option<&'a str>,
}

/// One turn that this process has claimed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claimed {
    /// Whose lane it is.
    pub conversation_id: ConversationId,
    /// Who answers.
    pub agent: AgentName,
    /// The rows' identity, equal across attempts.
    pub turn_id: TurnId,
    /// This attempt: the fence.
    pub run_id: RunId,
    /// Which attempt it is, from 1.
    pub attempt: i32,
    /// How often the run was handed to the broker, this time included.
    pub dispatches: i32,
    /// The W3C traceparent of the turn's first message that had one.
    pub trace_context: Option<String>,
}

/// What a claim found.
#[derive(Debug, Default)]
pub struct Claims {
    /// Turns claimed.
    pub turns: Vec<Claimed>,
    /// Due lanes without rows: their messages were deleted. [`close_empty_lane`] decides about each.
    pub empty: Vec<ConversationId>,
    /// Outbox rows in the claimed turns.
    pub rows: usize,
    /// Runs whose turn's attempt before this one lost its lease: it may have killed its process.
    pub suspects: HashSet<RunId>,
}

struct DueLane {
    conversation_id: ConversationId,
    agent: AgentName,
    turn_id: Option<TurnId>,
    max_turn_messages: i32,
    suspect: bool,
}

struct FreeRow {
    conversation_id: ConversationId,
    id: i64,
    message_id: MessageId,
    seq: i64,
    generation: i32,
    trace_context: Option<String>,
}

/// Claims up to `claim.batch` due lanes, the longest due first.
pub async fn claim(pool: &PgPool, claim: Claim<'_>) -> Result<Claims, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    let lanes = match claim.agents {
        None => lock_due_lanes(&mut transaction, claim.batch).await?,
        Some(agents) => lock_due_lanes_of(&mut transaction, agents, claim.batch).await?,
    };
    let lanes = if claim.worker.is_some() { with_one_suspect(lanes) } else { lanes };
    if lanes.is_empty() {
        transaction.rollback().await?;
        return Ok(Claims::default());
    }
    let rows = read_free_rows(&mut transaction, &lanes).await?;
    let draft = Draft::new(lanes, rows);
    let marked = mark(&mut transaction, &draft, claim.worker).await?;
    transaction.commit().await?;
    Ok(draft.claims(marked))
}

/// Who begins at once begins one suspect at a time: each runs alone, and one that holds its lane while it waits for another
/// would lose an attempt to that one's crash. The rest stay due.
fn with_one_suspect(mut lanes: Vec<DueLane>) -> Vec<DueLane> {
    let mut taken = false;
    lanes.retain(|lane| !lane.suspect || !std::mem::replace(&mut taken, true));
    lanes
}

async fn lock_due_lanes(connection: &mut PgConnection, batch: u32) -> Result<Vec<DueLane>, sqlx::Error> {
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

async fn lock_due_lanes_of(
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

async fn read_free_rows(
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

/// What is about to be written: a turn for each lane that has rows.
struct Draft {
    turns: BTreeMap<ConversationId, DraftTurn>,
    empty: Vec<ConversationId>,
}

struct DraftTurn {
    agent: AgentName,
    turn_id: TurnId,
    run_id: RunId,
    rows: Vec<i64>,
    trace_context: Option<String>,
}

impl Draft {
    fn new(lanes: Vec<DueLane>, rows: Vec<FreeRow>) -> Self {
        let mut by_lane: BTreeMap<ConversationId, Vec<FreeRow>> = BTreeMap::new();
        for row in rows {
            by_lane.entry(row.conversation_id.clone()).or_default().push(row);
        }
        let mut draft = Self { turns: BTreeMap::new(), empty: Vec::new() };
        for lane in lanes {
            match by_lane.remove(&lane.conversation_id) {
                Some(mut rows) => {
                    rows.sort_unstable_by_key(|row| row.id);
                    let turn = DraftTurn::new(&lane, rows);
                    draft.turns.insert(lane.conversation_id, turn);
                }
                None => draft.empty.push(lane.conversation_id),
            }
        }
        draft
    }

    fn claims(self, marked: Vec<Marked>) -> Claims {
        let mut claims = Claims { empty: self.empty, ..Claims::default() };
        let mut drafts = self.turns;
        for lane in marked {
            let Some(turn) = drafts.remove(&lane.conversation_id) else { continue };
            claims.rows += turn.rows.len();
            if lane.suspect {
                claims.suspects.insert(turn.run_id);
            }
            claims.turns.push(Claimed {
                conversation_id: lane.conversation_id,
                agent: turn.agent,
                turn_id: turn.turn_id,
                run_id: turn.run_id,
                attempt: lane.attempt,
                dispatches: 1,
                trace_context: turn.trace_context,
            });
        }
        claims
    }
}

impl DraftTurn {
    fn new(lane: &DueLane, rows: Vec<FreeRow>) -> Self {
        let turn_id = lane.turn_id.unwrap_or_else(|| {
            let generation = rows.first().map_or(1, |row| row.generation);
            let messages = rows.iter().map(|row| (&row.message_id, row.seq));
            TurnId::derive(&lane.conversation_id, generation, messages)
        });
        Self {
            agent: lane.agent.clone(),
            turn_id,
            run_id: RunId::fresh(),
            rows: rows.iter().map(|row| row.id).collect(),
            trace_context: rows.into_iter().find_map(|row| row.trace_context),
        }
    }
}

/// A lane that now holds a run.
struct Marked {
    conversation_id: ConversationId,
    attempt: i32,
    suspect: bool,
}

async fn mark(
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

/// Decides about a due lane for which a claim found no rows: waiting for newer rows, or idle.
///
/// A claim holds only the lane, so a submit may be about to commit rows that it could not see; this takes the
/// conversation first, as submit does, and reads again. Never waits: `false` means that somebody holds the conversation,
/// and the next claim will find the lane again.
pub async fn close_empty_lane(pool: &PgPool, conversation: &ConversationId) -> Result<bool, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    let held = sqlx::query_scalar!(
        "select 1 from conversations where id = $1 for no key update skip locked",
        conversation.as_str(),
    )
    .fetch_optional(&mut *transaction)
    .await?;
    let free = held.is_some();
    if free {
        sqlx::query!("select from agent_lanes where conversation_id = $1 for update", conversation.as_str())
            .execute(&mut *transaction)
            .await?;
        sqlx::query!(
            r#"
            update agent_lanes l
            set state = case when next.created_at is null then 'idle' else 'waiting' end,
                wake_at = case when next.created_at is not null then clock_timestamp() end,
                waiting_since = next.created_at,
                turn_id = null,
                attempt = 0
            from (select 1) as one
            left join lateral (
                select o.created_at from agent_outbox o
                where o.conversation_id = $1 and o.turn_id is null
                order by o.turn_id, o.id limit 1
            ) next on true
            where l.conversation_id = $1
              and l.state = 'waiting'
              and not exists (
                  select from agent_outbox o
                  where o.conversation_id = $1 and o.turn_id = l.turn_id and o.status = 'pending')
            "#,
            conversation.as_str(),
        )
        .execute(&mut *transaction)
        .await?;
    }
    transaction.commit().await?;
    Ok(free)
}
