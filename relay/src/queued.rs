//! The relay's queries about queued runs: their triggers are with the broker, or should be.

use std::collections::HashMap;

use shared::{
    claim::Claimed,
    ids::{AgentName, ConversationId, RunId, TurnId},
};
use sqlx::{PgPool, types::time::OffsetDateTime};

/// Queued lanes that nobody has begun in time, the longest ago first.
pub(crate) async fn overdue(pool: &PgPool, limit: i64) -> Result<Vec<Claimed>, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    let overdue = sqlx::query_as!(
        Claimed,
        r#"
        select l.conversation_id as "conversation_id: ConversationId", l.agent as "agent: AgentName",
               l.turn_id as "turn_id!: TurnId", l.run_id as "run_id!: RunId", l.attempt, l.dispatches,
               (select o.trace_context from agent_outbox o
                where o.conversation_id = l.conversation_id and o.turn_id = l.turn_id
                  and o.trace_context is not null
                order by o.conversation_id, o.turn_id, o.id limit 1) as trace_context
        from agent_lanes l
        where l.state = 'queued' and l.wake_at <= (select clock_timestamp())
        order by l.wake_at
        limit $1
        "#,
        limit,
    )
    .fetch_all(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(overdue)
}

/// Where a walk over the queued lanes stands: they are walked in the order in which they fall due.
pub(crate) struct Walk {
    after: Option<(OffsetDateTime, ConversationId)>,
    until: OffsetDateTime,
}

impl Walk {
    /// A walk over the lanes that are queued now; what is queued or extended later lies behind its end.
    pub(crate) async fn over_queued(pool: &PgPool) -> Result<Option<Self>, sqlx::Error> {
        let mut transaction = pool.begin().await?;
        let until = sqlx::query_scalar!(
            r#"
            select wake_at as "wake_at!" from agent_lanes
            where state = 'queued' and wake_at is not null order by wake_at desc limit 1
            "#
        )
        .fetch_optional(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(until.map(|until| Self { after: None, until }))
    }

    /// Of the next lanes, `limit` at most, those that were claimed longer ago than a publish may take; `None` at the end.
    pub(crate) async fn next(
        &mut self,
        pool: &PgPool,
        limit: i64,
    ) -> Result<Option<Vec<Claimed>>, sqlx::Error> {
        let (after, conversation) = self.after.clone().unzip();
        let mut transaction = pool.begin().await?;
        let page = sqlx::query!(
            r#"
            select l.wake_at as "wake_at!",
                   l.conversation_id as "conversation_id: ConversationId", l.agent as "agent: AgentName",
                   l.turn_id as "turn_id!: TurnId", l.run_id as "run_id!: RunId", l.attempt, l.dispatches,
                   (select o.trace_context from agent_outbox o
                    where o.conversation_id = l.conversation_id and o.turn_id = l.turn_id
                      and o.trace_context is not null
                    order by o.conversation_id, o.turn_id, o.id limit 1) as trace_context,
                   -- no condition: a page of younger lanes must end a look as well
                   l.claimed_at < (select clock_timestamp()) - make_interval(secs => $4) as "was_published!"
            from agent_lanes l
            where l.state = 'queued'
              and (l.wake_at, l.conversation_id) > (coalesce($1, '-infinity'::timestamptz), coalesce($2, ''))
              and l.wake_at <= $3
            order by l.wake_at, l.conversation_id
            limit $5
            "#,
            after,
            conversation.as_ref().map(ConversationId::as_str),
            self.until,
            shared::broker::ANSWER_TIMEOUT.as_secs_f64(),
            limit,
        )
        .fetch_all(&mut *transaction)
        .await?;
        transaction.commit().await?;
        let Some(last) = page.last() else { return Ok(None) };
        self.after = Some((last.wake_at, last.conversation_id.clone()));
        let published = page.into_iter().filter(|lane| lane.was_published).map(|lane| Claimed {
            conversation_id: lane.conversation_id,
            agent: lane.agent,
            turn_id: lane.turn_id,
            run_id: lane.run_id,
            attempt: lane.attempt,
            dispatches: lane.dispatches,
            trace_context: lane.trace_context,
        });
        Ok(Some(published.collect()))
    }
}

/// What the broker said of a queued run's trigger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trigger {
    /// It waits for a consumer: ask again later.
    Held,
    /// The broker lost it: the same run goes out again, as another dispatch.
    Lost,
}

/// Moves the time of queued lanes on, before anything is published, and counts the dispatch of those whose trigger is
/// lost. Returns the lanes moved, with their dispatches: one that was begun, released or moved by another relay meanwhile is
/// left alone, and one that somebody holds is asked for again.
pub(crate) async fn extend(
    pool: &PgPool,
    asked: Vec<(Claimed, Trigger)>,
) -> Result<Vec<(Claimed, Trigger)>, sqlx::Error> {
    let conversations: Vec<&str> = asked.iter().map(|(run, _)| run.conversation_id.as_str()).collect();
    let runs: Vec<RunId> = asked.iter().map(|(run, _)| run.run_id).collect();
    let dispatches: Vec<i32> = asked.iter().map(|(run, _)| run.dispatches).collect();
    let more: Vec<i32> = asked.iter().map(|(_, trigger)| i32::from(*trigger == Trigger::Lost)).collect();
    let mut transaction = pool.begin().await?;
    let moved = sqlx::query!(
        r#"
        with lane as (
            select l.conversation_id, l.run_id, t.more
            from (
                select * from unnest($1::text[], $2::uuid[], $3::int[], $4::int[])
                    as t (conversation_id, run_id, dispatches, more)
                order by conversation_id
            ) t
            cross join lateral (
                select l.conversation_id, l.run_id from agent_lanes l
                where l.conversation_id = t.conversation_id and l.run_id = t.run_id and l.state = 'queued'
                  -- of several relays that ask, one re-dispatches
                  and l.dispatches = t.dispatches
                for update skip locked
            ) l
        )
        update agent_lanes l
        set wake_at = clock_timestamp() + a.dispatch_timeout, dispatches = l.dispatches + lane.more
        from lane, agents a
        where l.conversation_id = lane.conversation_id
          and l.run_id = lane.run_id
          and l.state = 'queued'
          and a.name = l.agent
        returning l.run_id as "run_id!: RunId", l.dispatches
        "#,
        &conversations as &[&str],
        &runs as &[RunId],
        &dispatches,
        &more,
    )
    .fetch_all(&mut *transaction)
    .await?;
    transaction.commit().await?;
    let moved: HashMap<RunId, i32> = moved.into_iter().map(|lane| (lane.run_id, lane.dispatches)).collect();
    let moved = asked.into_iter().filter_map(|(run, trigger)| {
        let dispatches = *moved.get(&run.run_id)?;
        Some((Claimed { dispatches, ..run }, trigger))
    });
    Ok(moved.collect())
}
