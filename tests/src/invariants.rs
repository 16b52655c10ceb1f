//! What the protocol promises, as questions to the database: each asks for the ids that break a promise.
//!
//! Every question is one statement, and so looks at one moment. Those of `ALWAYS` have no answer at any moment, also
//! in the middle of a run, a crash or a recovery; those of `SETTLED` have none once nothing is left to do.

use std::fmt::Write;

use anyhow::{Result, bail};
use sqlx::PgPool;

type Question = (&'static str, &'static str);

/// Hold at every moment.
const ALWAYS: &[Question] = &[
    (
        "a conversation has its lane, of its own agent",
        "select c.id from conversations c left join agent_lanes l on l.conversation_id = c.id
         where l.agent is distinct from c.agent",
    ),
    (
        "an idle lane has no open rows",
        "select l.conversation_id from agent_lanes l where state = 'idle' and exists (
            select from agent_outbox o
            where o.conversation_id = l.conversation_id and o.status in ('pending', 'processing'))",
    ),
    (
        "a row in progress belongs to the run that holds its lane",
        "select o.message_id from agent_outbox o join agent_lanes l using (conversation_id)
         where o.status = 'processing' and (
            l.state not in ('queued', 'running') or l.run_id is distinct from o.run_id
            or l.turn_id is distinct from o.turn_id or l.attempt <> o.attempts)",
    ),
    (
        "a row that waits for another attempt belongs to the turn that its lane waits for",
        "select o.message_id from agent_outbox o join agent_lanes l using (conversation_id)
         where o.status = 'pending' and o.turn_id is not null
           and (l.state <> 'waiting' or l.turn_id is distinct from o.turn_id)",
    ),
    (
        "a run that holds a lane has not ended",
        "select l.conversation_id from agent_lanes l join agent_runs r using (run_id)",
    ),
    (
        "the rows of a turn are of one conversation and one generation",
        "select turn_id::text from agent_outbox where turn_id is not null group by turn_id
         having count(distinct conversation_id) > 1 or count(distinct generation) > 1",
    ),
    (
        "a settled row has its outcome, a reply for done and an error for error",
        "select o.message_id from agent_outbox o
         left join messages m on m.turn_id = o.turn_id and m.role <> 'user'
         where o.status in ('done', 'error')
           and m.role is distinct from case o.status when 'done' then 'assistant' else 'error' end",
    ),
    (
        "an outcome settles every row of its turn",
        "select o.message_id from agent_outbox o join messages m on m.turn_id = o.turn_id and m.role <> 'user'
         where o.status in ('pending', 'processing')",
    ),
    (
        "a turn has at most one outcome",
        "select turn_id::text from messages where role <> 'user' group by turn_id having count(*) > 1",
    ),
    (
        "an outcome stands after the messages that it answers",
        "select m.id from messages m where m.role <> 'user' and (m.reply_to_seq >= m.seq or exists (
            select from agent_outbox o join messages asked on asked.id = o.message_id
            where o.turn_id = m.turn_id and asked.seq > m.reply_to_seq))",
    ),
    (
        "a message of a user is to be answered, was answered, or is deleted",
        "select m.id from messages m where m.role = 'user' and m.deleted_at is null
           and not exists (select from agent_outbox o where o.message_id = m.id)
           and not exists (
            select from messages outcome where outcome.conversation_id = m.conversation_id
               and outcome.role <> 'user' and outcome.reply_to_seq >= m.seq)",
    ),
    (
        "a seq is given out once, and none above last_seq",
        "select m.id from messages m join conversations c on c.id = m.conversation_id where m.seq > c.last_seq
         union all
         select min(id) from messages group by conversation_id, seq having count(*) > 1",
    ),
    (
        "unread_count is the number of outcomes above last_read_seq",
        "select c.id from conversations c where c.unread_count <> (
            select count(*) from messages m
            where m.conversation_id = c.id and m.role <> 'user' and m.seq > c.last_read_seq
              and m.deleted_at is null)",
    ),
    (
        "outcomes stand in the order of their claims",
        "select id from (
            select m.id, r.claimed_at,
                   lag(r.claimed_at) over (partition by m.conversation_id order by m.seq) as before
            from messages m join agent_runs r using (run_id) where m.role <> 'user') o
         where before > claimed_at",
    ),
    (
        "a reply is of a run that is done, and a done run has its reply",
        "select r.run_id::text from agent_runs r full join messages m on m.run_id = r.run_id and m.role = 'assistant'
         where r.run_id is not null and (r.outcome = 'done') <> (m.id is not null)",
    ),
    (
        "a turn ends once",
        "select turn_id::text from agent_runs where outcome in ('done', 'error', 'cancelled')
         group by turn_id having count(*) > 1",
    ),
    (
        "no run of a turn starts after its end",
        "select later.run_id::text from agent_runs later join agent_runs ended using (turn_id)
         where ended.outcome in ('done', 'error', 'cancelled') and later.attempt > ended.attempt",
    ),
    (
        "the attempts of a row are the runs of its turn",
        "select o.message_id from agent_outbox o where o.turn_id is not null
           and o.attempts <> (o.status = 'processing')::int
               + (select count(*) from agent_runs r where r.turn_id = o.turn_id)",
    ),
    (
        "an operation is attached to the outcome of its own turn, a reply's to that of its own run",
        "select o.id::text from operations o join messages m on m.id = o.message_id
         where m.turn_id is distinct from o.turn_id or m.conversation_id <> o.conversation_id
            or (m.role = 'assistant' and m.run_id <> o.run_id)",
    ),
    (
        "the operations of a done run are attached",
        "select o.id::text from operations o join agent_runs r using (run_id)
         where r.outcome = 'done' and o.message_id is null",
    ),
    (
        "no operation outlives its conversation",
        "select o.id::text from operations o
         where not exists (select from conversations c where c.id = o.conversation_id)",
    ),
];

/// Hold once every row is settled.
const SETTLED: &[Question] = &[
    ("no row is open", "select message_id from agent_outbox where status in ('pending', 'processing')"),
    ("every lane is idle", "select conversation_id from agent_lanes where state <> 'idle'"),
    (
        "no turn had more attempts than its agent allows",
        "select o.message_id from agent_outbox o
         join conversations c on c.id = o.conversation_id join agents a on a.name = c.agent
         where o.attempts > a.max_attempts",
    ),
];

/// Fails unless every promise is kept that holds at every moment.
pub async fn assert_consistent(pool: &PgPool) -> Result<()> {
    ask(pool, ALWAYS).await
}

/// Fails unless everything is settled and every promise is kept.
pub async fn assert_invariants(pool: &PgPool) -> Result<()> {
    ask(pool, SETTLED).await?;
    ask(pool, ALWAYS).await
}

async fn ask(pool: &PgPool, questions: &[Question]) -> Result<()> {
    let mut broken = String::new();
    for (promise, question) in questions {
        let ids: Vec<String> = sqlx::query_scalar(*question).fetch_all(pool).await?;
        if !ids.is_empty() {
            let shown = &ids[..ids.len().min(10)];
            write!(broken, "\n  {promise}: broken by {} ({})", ids.len(), shown.join(", "))?;
        }
    }
    if !broken.is_empty() {
        bail!("broken promises:{broken}");
    }
    Ok(())
}
