//! What `relay failed show` reads of one turn: its end, its attempts and its operations, but nothing that anybody said.

use serde::Serialize;
use shared::ids::{OperationId, RunId, TurnId};
use sqlx::PgConnection;
use time::OffsetDateTime;

/// A turn and its end.
#[derive(Debug, Serialize)]
pub(super) struct TurnRow {
    pub(super) turn_id: TurnId,
    pub(super) conversation_id: String,
    pub(super) agent: String,
    /// `failed`, `answered`, `in_flight`, or `over`: retried, pruned, or its messages are deleted.
    pub(super) state: String,
    /// Messages that it is to answer or has answered, while their rows are there.
    pub(super) messages: i64,
    pub(super) needs_confirmation: bool,
    pub(super) error: Option<serde_json::Value>,
    #[serde(with = "time::serde::rfc3339::option")]
    pub(super) ended_at: Option<OffsetDateTime>,
    pub(super) age_seconds: Option<f64>,
}

/// One turn; `None`: there is none of this id.
pub(super) async fn turn(
    connection: &mut PgConnection,
    turn: TurnId,
) -> Result<Option<TurnRow>, sqlx::Error> {
    sqlx::query_as!(
        TurnRow,
        r#"
        select $1::uuid as "turn_id!: TurnId", c.id as conversation_id, c.agent,
               case when agent_turn_is_failed(c.id, $1) then 'failed'
                    when l.turn_id = $1 then 'in_flight'
                    when said.role = 'assistant' then 'answered'
                    else 'over' end as "state!",
               (select count(*) from agent_outbox o where o.conversation_id = c.id and o.turn_id = $1) as "messages!",
               agent_turn_has_side_effect(c.id, $1) as "needs_confirmation!",
               said.error as "error?", said.created_at as "ended_at?",
               extract(epoch from clock_timestamp() - said.created_at)::float8 as age_seconds
        from conversations c
        join agent_lanes l on l.conversation_id = c.id
        left join messages said on said.turn_id = $1 and said.role <> 'user'
        where c.id = agent_turn_conversation($1)
        "#,
        turn as TurnId,
    )
    .fetch_optional(connection)
    .await
}

/// An attempt that has ended.
#[derive(Debug, Serialize)]
pub(super) struct AttemptRow {
    pub(super) run_id: RunId,
    pub(super) attempt: i32,
    pub(super) outcome: String,
    pub(super) worker: Option<String>,
    /// For operators: why it did not end well.
    pub(super) error: Option<serde_json::Value>,
    #[serde(with = "time::serde::rfc3339")]
    pub(super) claimed_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339::option")]
    pub(super) started_at: Option<OffsetDateTime>,
    #[serde(with = "time::serde::rfc3339")]
    pub(super) ended_at: OffsetDateTime,
    /// From its claim to its begin, or to its end where it never began.
    pub(super) waited_seconds: f64,
    /// From its begin to its end; `None`: it never began.
    pub(super) took_seconds: Option<f64>,
    pub(super) age_seconds: f64,
}

/// The attempts of a turn, in order.
pub(super) async fn attempts(
    connection: &mut PgConnection,
    turn: TurnId,
) -> Result<Vec<AttemptRow>, sqlx::Error> {
    sqlx::query_as!(
        AttemptRow,
        r#"
        select run_id as "run_id: RunId", attempt, outcome, worker, error, claimed_at, started_at, ended_at,
               extract(epoch from coalesce(started_at, ended_at) - claimed_at)::float8 as "waited_seconds!",
               extract(epoch from ended_at - started_at)::float8 as took_seconds,
               extract(epoch from clock_timestamp() - ended_at)::float8 as "age_seconds!"
        from agent_runs where turn_id = $1 order by attempt
        "#,
        turn as TurnId,
    )
    .fetch_all(connection)
    .await
}

/// A tool call, without what it was asked or answered.
#[derive(Debug, Serialize)]
pub(super) struct OperationRow {
    pub(super) operation_id: OperationId,
    pub(super) run_id: RunId,
    pub(super) name: String,
    pub(super) effect: String,
    pub(super) status: String,
    #[serde(with = "time::serde::rfc3339")]
    pub(super) started_at: OffsetDateTime,
    pub(super) took_seconds: Option<f64>,
    pub(super) age_seconds: f64,
}

/// The operations of a turn, in order.
pub(super) async fn operations(
    connection: &mut PgConnection,
    conversation: &str,
    turn: TurnId,
) -> Result<Vec<OperationRow>, sqlx::Error> {
    sqlx::query_as!(
        OperationRow,
        r#"
        select id as "operation_id: OperationId", run_id as "run_id: RunId", name, effect, status, started_at,
               extract(epoch from ended_at - started_at)::float8 as took_seconds,
               extract(epoch from clock_timestamp() - started_at)::float8 as "age_seconds!"
        from operations where conversation_id = $1 and turn_id = $2 order by started_at, ordinal
        "#,
        conversation,
        turn as TurnId,
    )
    .fetch_all(connection)
    .await
}
