//! Giving back claims that no consumer has begun: the broker did not take their triggers. Costs no attempt.

use std::time::Duration;

use sqlx::PgPool;

use crate::{claim::Claimed, ids::RunId};

/// Gives back every one of these runs that is still queued, due again after `pause`. Returns those given back.
///
/// Always safe: a trigger that lands late finds no run. The turn keeps its id and its rows.
pub async fn release_unbegun(
    pool: &PgPool,
    claims: &[Claimed],
    pause: Duration,
) -> Result<Vec<RunId>, sqlx::Error> {
    let conversations: Vec<&str> = claims.iter().map(|claimed| claimed.conversation_id.as_str()).collect();
    let runs: Vec<RunId> = claims.iter().map(|claimed| claimed.run_id).collect();
    let mut transaction = pool.begin().await?;
    let released = sqlx::query_scalar!(
        r#"
        with lane as (
            select l.*
            from (
                select * from unnest($1::text[], $2::uuid[]) as t (conversation_id, run_id)
                order by conversation_id
            ) t
            cross join lateral (
                select l.conversation_id, l.run_id, l.turn_id from agent_lanes l
                where l.conversation_id = t.conversation_id and l.run_id = t.run_id and l.state = 'queued'
                for update
            ) l
        ), freed as (
            update agent_outbox o
            set status = 'pending', run_id = null, attempts = o.attempts - 1
            from lane
            where o.conversation_id = lane.conversation_id
              and o.turn_id = lane.turn_id
              and o.run_id = lane.run_id
              and o.status = 'processing'
        )
        update agent_lanes l
        set state = 'waiting', wake_at = clock_timestamp() + make_interval(secs => $3),
            attempt = l.attempt - 1, dispatches = 0, run_id = null, claimed_at = null
        from lane
        where l.conversation_id = lane.conversation_id
          and l.run_id = lane.run_id
          and l.state = 'queued'
        returning lane.run_id as "run_id!: RunId"
        "#,
        &conversations as &[&str],
        &runs as &[RunId],
        pause.as_secs_f64(),
    )
    .fetch_all(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(released)
}
