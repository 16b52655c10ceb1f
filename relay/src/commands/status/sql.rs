//! What `relay status` reads: the present, from the lanes' partial indexes; never a scan that grows with history.

use serde::Serialize;
use shared::ids::{ConversationId, RunId, TurnId};
use sqlx::PgConnection;
use time::OffsetDateTime;

/// Lanes of one state that are counted, at most; those due first.
pub(super) const COUNTED: i64 = 100_000;

/// The lanes of one agent that are in one state.
pub(super) struct Lanes {
    pub(super) agent: String,
    pub(super) state: String,
    pub(super) count: i64,
    /// Waiting: for a retry. Running: with a lease that is over.
    pub(super) troubled: i64,
    /// Seconds since the first of them was to be looked at; negative: that is still to come.
    pub(super) overdue_seconds: f64,
    /// Seconds since the first of them was claimed.
    pub(super) claimed_seconds: Option<f64>,
    /// Consumers that hold a lease.
    pub(super) workers: i64,
}

/// The lanes that are not idle, [`COUNTED`] at most of each state, by agent and state.
pub(super) async fn lanes(connection: &mut PgConnection) -> Result<Vec<Lanes>, sqlx::Error> {
    sqlx::query_as!(
        Lanes,
        r#"
        select agent as "agent!", state as "state!", count(*) as "count!",
               count(*) filter (where case state when 'waiting' then attempt > 0
                   when 'running' then wake_at <= clock_timestamp() else false end) as "troubled!",
               extract(epoch from clock_timestamp() - min(wake_at))::float8 as "overdue_seconds!",
               extract(epoch from clock_timestamp() - min(claimed_at))::float8 as claimed_seconds,
               count(distinct worker) filter (where wake_at > clock_timestamp()) as "workers!"
        from (
            (select * from agent_lanes where state = 'waiting' and wake_at is not null order by wake_at limit $1)
            union all
            (select * from agent_lanes where state = 'queued' and wake_at is not null order by wake_at limit $1)
            union all
            (select * from agent_lanes where state = 'running' and wake_at is not null order by wake_at limit $1)
        ) busy
        group by 1, 2
        "#,
        COUNTED,
    )
    .fetch_all(connection)
    .await
}

/// A lane that is due: waiting for a claim, for its trigger or for its recovery.
#[derive(Debug, Serialize)]
pub(super) struct Due {
    pub(super) conversation_id: String,
    pub(super) state: String,
    pub(super) for_seconds: f64,
}

/// Of each state the lane that has been due for longest, where one is due: one look at each index.
pub(super) async fn longest_due(connection: &mut PgConnection) -> Result<Vec<Due>, sqlx::Error> {
    sqlx::query_as!(
        Due,
        r#"
        select conversation_id as "conversation_id!", state as "state!",
               extract(epoch from clock_timestamp() - wake_at)::float8 as "for_seconds!"
        from (
            (select * from agent_lanes where state = 'waiting' and wake_at is not null order by wake_at limit 1)
            union all
            (select * from agent_lanes where state = 'queued' and wake_at is not null order by wake_at limit 1)
            union all
            (select * from agent_lanes where state = 'running' and wake_at is not null order by wake_at limit 1)
        ) first
        where wake_at <= clock_timestamp()
        "#,
    )
    .fetch_all(connection)
    .await
}

/// The relays and direct consumers that wait for a notification.
pub(super) async fn asleep(connection: &mut PgConnection) -> Result<Vec<String>, sqlx::Error> {
    sqlx::query_scalar!("select name from agent_sleepers where until > clock_timestamp() order by name")
        .fetch_all(connection)
        .await
}

/// A conversation as the view `conversation_status` tells it.
#[derive(Debug, Serialize)]
pub(super) struct Conversation {
    #[serde(rename = "conversation_id")]
    pub(super) id: String,
    pub(super) agent: String,
    pub(super) status: String,
    #[serde(with = "time::serde::rfc3339")]
    pub(super) since: OffsetDateTime,
    pub(super) for_seconds: f64,
    pub(super) attempt: i32,
    pub(super) turn_id: Option<TurnId>,
    pub(super) run_id: Option<RunId>,
    pub(super) worker: Option<String>,
    /// Seconds until somebody looks at the lane; negative: it is due.
    pub(super) wake_in_seconds: Option<f64>,
    pub(super) cancel_requested: bool,
    pub(super) last_seq: i64,
    pub(super) unread_count: i32,
    /// Nothing of its agent is claimed.
    pub(super) paused: bool,
}

/// One conversation; `None`: there is none of this id.
pub(super) async fn conversation(
    connection: &mut PgConnection,
    id: &ConversationId,
) -> Result<Option<Conversation>, sqlx::Error> {
    sqlx::query_as!(
        Conversation,
        r#"
        select conversation_id as "id!", s.agent as "agent!", status as "status!", since as "since!",
               extract(epoch from clock_timestamp() - since)::float8 as "for_seconds!", attempt as "attempt!",
               turn_id as "turn_id: TurnId", run_id as "run_id: RunId", worker,
               extract(epoch from wake_at - clock_timestamp())::float8 as wake_in_seconds,
               cancel_requested as "cancel_requested!", last_seq as "last_seq!", unread_count as "unread_count!",
               a.paused as "paused!"
        from conversation_status s join agents a on a.name = s.agent
        where conversation_id = $1
        "#,
        id.as_str(),
    )
    .fetch_optional(connection)
    .await
}

/// A message, and the beginning of what it says.
#[derive(Debug, Serialize)]
pub(super) struct MessageRow {
    pub(super) seq: i64,
    pub(super) role: String,
    pub(super) id: String,
    pub(super) turn_id: Option<TurnId>,
    pub(super) reply_to_seq: Option<i64>,
    pub(super) error: Option<serde_json::Value>,
    pub(super) content: String,
    pub(super) deleted: bool,
    #[serde(with = "time::serde::rfc3339")]
    pub(super) created_at: OffsetDateTime,
    pub(super) age_seconds: f64,
}

/// The newest messages, newest first; of each at most `characters` of its content.
pub(super) async fn messages(
    connection: &mut PgConnection,
    id: &ConversationId,
    limit: i64,
    characters: i32,
) -> Result<Vec<MessageRow>, sqlx::Error> {
    sqlx::query_as!(
        MessageRow,
        r#"
        select seq, role, id, turn_id as "turn_id: TurnId", reply_to_seq, error, left(content, $3) as "content!",
               deleted_at is not null as "deleted!", created_at,
               extract(epoch from clock_timestamp() - created_at)::float8 as "age_seconds!"
        from messages
        where conversation_id = $1
        order by seq desc limit $2
        "#,
        id.as_str(),
        limit,
        characters,
    )
    .fetch_all(connection)
    .await
}

/// An ended run.
#[derive(Debug, Serialize)]
pub(super) struct RunRow {
    pub(super) run_id: RunId,
    pub(super) turn_id: TurnId,
    pub(super) attempt: i32,
    pub(super) outcome: String,
    pub(super) worker: Option<String>,
    pub(super) error: Option<serde_json::Value>,
    #[serde(with = "time::serde::rfc3339")]
    pub(super) ended_at: OffsetDateTime,
    pub(super) age_seconds: f64,
    /// From its begin to its end; `None`: it never began.
    pub(super) took_seconds: Option<f64>,
}

/// The runs that ended last, newest first.
pub(super) async fn runs(
    connection: &mut PgConnection,
    id: &ConversationId,
    limit: i64,
) -> Result<Vec<RunRow>, sqlx::Error> {
    sqlx::query_as!(
        RunRow,
        r#"
        select run_id as "run_id: RunId", turn_id as "turn_id: TurnId", attempt, outcome, worker, error, ended_at,
               extract(epoch from clock_timestamp() - ended_at)::float8 as "age_seconds!",
               extract(epoch from ended_at - started_at)::float8 as took_seconds
        from agent_runs
        where conversation_id = $1
        order by ended_at desc limit $2
        "#,
        id.as_str(),
        limit,
    )
    .fetch_all(connection)
    .await
}
