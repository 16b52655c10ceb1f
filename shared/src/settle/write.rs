//! The writes of a settle. Each is one statement, run while the conversation and the lane are locked.

use std::time::Duration;

use serde_json::{Value, json};
use sqlx::PgConnection;

use super::{
    LockedLane,
    verdict::{Cause, Kind},
};
use crate::{
    ids::{MessageId, RunId},
    state::RunOutcome,
};

/// The longest text of an error that is kept with a run, in bytes.
const MAX_ERROR_TEXT_BYTES: usize = 4096;

/// The run that ended, and how it is recorded.
pub(super) struct Ended<'a> {
    pub(super) lane: &'a LockedLane,
    pub(super) outcome: RunOutcome,
    pub(super) cause: &'a Cause,
}

impl Ended<'_> {
    /// What operators see of the run; cannot be refused by Postgres in turn.
    fn error(&self) -> Value {
        match self.cause {
            Cause::Handler { message, .. } => json!({ "kind": "handler", "message": storable(message) }),
            Cause::Timeout => json!({ "kind": "timeout" }),
            Cause::Expired => json!({ "kind": "crash" }),
            Cause::RejectedContent { rule } | Cause::Undeliverable { rule } => {
                json!({ "kind": "rejected_content", "message": storable(rule) })
            }
            Cause::Released => json!({ "kind": "interrupted" }),
        }
    }
}

/// Text that Postgres takes: without NUL, and bounded.
fn storable(text: &str) -> String {
    let mut end = text.len().min(MAX_ERROR_TEXT_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].replace('\0', "\u{fffd}")
}

/// The visible error of a failed turn.
pub(super) struct Failure {
    pub(super) kind: Kind,
    pub(super) exhausted: bool,
    pub(super) retryable: bool,
    pub(super) text: String,
    pub(super) reply_to_seq: i64,
}

/// The rows are pending again, and the lane waits for their next attempt. Returns how long.
pub(super) async fn retry(
    connection: &mut PgConnection,
    ended: &Ended<'_>,
    now: bool,
    at_least: Duration,
) -> Result<Duration, sqlx::Error> {
    let lane = sqlx::query!(
        r#"
        with lane as (
            select l.*, a.retry_backoff, a.retry_backoff_max
            from agent_lanes l join agents a on a.name = l.agent
            where l.conversation_id = $1 and l.run_id = $2
        ), freed as (
            update agent_outbox o set status = 'pending', run_id = null
            from lane
            where o.conversation_id = lane.conversation_id and o.turn_id = lane.turn_id
              and o.run_id = lane.run_id and o.status = 'processing'
        ), recorded as (
            insert into agent_runs
                (run_id, turn_id, conversation_id, attempt, worker, claimed_at, started_at, outcome, error)
            select run_id, turn_id, conversation_id, attempt, worker, claimed_at, started_at, $3, $4
            from lane
        ), pause as (
            -- in seconds and with a bounded power, since an interval can overflow; a fifth of jitter either way
            select case when $5 then 0 else greatest(
                least(extract(epoch from retry_backoff)::float8 * power(2, least(attempt - 1, 30)),
                      extract(epoch from retry_backoff_max)::float8) * (0.8 + 0.4 * random()),
                $6) end as seconds
            from lane
        )
        update agent_lanes l
        set state = 'waiting', wake_at = clock_timestamp() + make_interval(secs => pause.seconds),
            run_id = null, dispatches = 0, worker = null, claimed_at = null, started_at = null,
            cancel_requested = false
        from pause
        where l.conversation_id = $1 and l.run_id = $2
        returning pause.seconds as "seconds!"
        "#,
        ended.lane.conversation_id.as_str(),
        ended.lane.run_id as RunId,
        ended.outcome.as_str(),
        ended.error(),
        now,
        at_least.as_secs_f64(),
    )
    .fetch_one(connection)
    .await?;
    Ok(Duration::try_from_secs_f64(lane.seconds).unwrap_or_default())
}

/// The user sees an error, the rows are closed, and the lane goes on.
pub(super) async fn fail(
    connection: &mut PgConnection,
    ended: &Ended<'_>,
    failure: &Failure,
) -> Result<(), sqlx::Error> {
    let message_id = MessageId::fresh();
    sqlx::query!(
        r#"
        with lane as (
            select * from agent_lanes where conversation_id = $1 and run_id = $2
        ), raised as (
            update conversations c
            set last_seq = c.last_seq + 1, unread_count = c.unread_count + 1, last_message_at = clock_timestamp()
            from lane where c.id = lane.conversation_id
            returning c.last_seq
        ), said as (
            insert into messages (id, conversation_id, seq, role, content, turn_id, run_id, reply_to_seq, error)
            select $3, lane.conversation_id, raised.last_seq, 'error', $4, lane.turn_id, lane.run_id, $5,
                   jsonb_build_object(
                       'kind', $6::text, 'attempts', lane.attempt, 'exhausted', $7::bool, 'retryable', $8::bool,
                       'operations', coalesce((
                           select jsonb_agg(jsonb_build_object(
                               'id', o.id, 'name', o.name, 'effect', o.effect, 'status', o.status,
                               'started_at', o.started_at) order by o.started_at, o.ordinal)
                           from operations o
                           where o.conversation_id = lane.conversation_id and o.turn_id = lane.turn_id
                       ), '[]'))
            from lane, raised
            returning id, run_id
        ), shown as (
            update operations o set message_id = said.id
            from said where o.run_id = said.run_id and o.message_id is null
        ), closed as (
            update agent_outbox o set status = 'error', processed_at = clock_timestamp()
            from lane
            where o.conversation_id = lane.conversation_id and o.turn_id = lane.turn_id
              and o.run_id = lane.run_id and o.status = 'processing'
        )
        insert into agent_runs
            (run_id, turn_id, conversation_id, attempt, worker, claimed_at, started_at, outcome, error)
        select run_id, turn_id, conversation_id, attempt, worker, claimed_at, started_at, $9, $10
        from lane
        "#,
        ended.lane.conversation_id.as_str(),
        ended.lane.run_id as RunId,
        message_id.as_str(),
        failure.text,
        failure.reply_to_seq,
        failure.kind.as_str(),
        failure.exhausted,
        failure.retryable,
        ended.outcome.as_str(),
        ended.error(),
    )
    .execute(&mut *connection)
    .await?;
    free_lane(connection, ended.lane).await
}

/// Nothing was left to answer: the run is recorded, and the lane goes on.
pub(super) async fn void(connection: &mut PgConnection, ended: &Ended<'_>) -> Result<(), sqlx::Error> {
    sqlx::query!(
        r#"
        insert into agent_runs
            (run_id, turn_id, conversation_id, attempt, worker, claimed_at, started_at, outcome, error)
        select run_id, turn_id, conversation_id, attempt, worker, claimed_at, started_at, $3, $4
        from agent_lanes
        where conversation_id = $1 and run_id = $2
        "#,
        ended.lane.conversation_id.as_str(),
        ended.lane.run_id as RunId,
        ended.outcome.as_str(),
        ended.error(),
    )
    .execute(&mut *connection)
    .await?;
    free_lane(connection, ended.lane).await
}

/// What a lane does when its turn is over: it waits where rows are free, else it is idle.
async fn free_lane(connection: &mut PgConnection, lane: &LockedLane) -> Result<(), sqlx::Error> {
    sqlx::query!(
        r#"
        update agent_lanes l
        set state = case when next.created_at is null then 'idle' else 'waiting' end,
            wake_at = case when next.created_at is not null then clock_timestamp() end,
            waiting_since = next.created_at,
            turn_id = null, run_id = null, attempt = 0, dispatches = 0,
            worker = null, claimed_at = null, started_at = null, cancel_requested = false
        from (select 1) as one
        left join lateral (
            select o.created_at from agent_outbox o
            where o.conversation_id = $1 and o.turn_id is null
            order by o.turn_id, o.id limit 1
        ) next on true
        where l.conversation_id = $1 and l.run_id = $2
        "#,
        lane.conversation_id.as_str(),
        lane.run_id as RunId,
    )
    .execute(connection)
    .await?;
    Ok(())
}
