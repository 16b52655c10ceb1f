//! The policy of agents, as a table row and as the operator writes it.

use std::time::Duration;

use serde::Serialize;
use shared::ids::AgentName;
use sqlx::{PgConnection, PgPool, postgres::types::PgInterval};

/// A row of `agents`. Durations are written as they are given: `500ms`, `10s`, `5m`.
#[derive(Debug, Serialize)]
pub(super) struct Agent {
    pub(super) name: String,
    pub(super) debounce: String,
    pub(super) max_wait: String,
    pub(super) max_turn_messages: i32,
    pub(super) max_attempts: i32,
    pub(super) retry_backoff: String,
    pub(super) retry_backoff_max: String,
    pub(super) lease: String,
    pub(super) turn_timeout: String,
    pub(super) dispatch_timeout: String,
    pub(super) max_content_bytes: i32,
    pub(super) paused: bool,
}

/// What to change of an agent; `None` stays as it is.
#[derive(Debug, Default)]
pub(super) struct Change {
    pub(super) debounce: Option<PgInterval>,
    pub(super) max_wait: Option<PgInterval>,
    pub(super) max_turn_messages: Option<i32>,
    pub(super) max_attempts: Option<i32>,
    pub(super) retry_backoff: Option<PgInterval>,
    pub(super) retry_backoff_max: Option<PgInterval>,
    pub(super) lease: Option<PgInterval>,
    pub(super) turn_timeout: Option<PgInterval>,
    pub(super) dispatch_timeout: Option<PgInterval>,
    pub(super) max_content_bytes: Option<i32>,
    pub(super) paused: Option<bool>,
}

/// Every agent, by name.
pub(super) async fn agents(connection: &mut PgConnection) -> Result<Vec<Agent>, sqlx::Error> {
    let rows = sqlx::query!("select * from agents order by name").fetch_all(connection).await?;
    let agents = rows.into_iter().map(|row| Agent {
        name: row.name,
        debounce: in_words(&row.debounce),
        max_wait: in_words(&row.max_wait),
        max_turn_messages: row.max_turn_messages,
        max_attempts: row.max_attempts,
        retry_backoff: in_words(&row.retry_backoff),
        retry_backoff_max: in_words(&row.retry_backoff_max),
        lease: in_words(&row.lease),
        turn_timeout: in_words(&row.turn_timeout),
        dispatch_timeout: in_words(&row.dispatch_timeout),
        max_content_bytes: row.max_content_bytes,
        paused: row.paused,
    });
    Ok(agents.collect())
}

/// Makes the agent where it is missing, and changes it: all of it, or nothing where a CHECK refuses the result.
pub(super) async fn make_or_change(
    pool: &PgPool,
    name: &AgentName,
    change: &Change,
) -> Result<(), sqlx::Error> {
    let mut transaction = pool.begin().await?;
    sqlx::query!("insert into agents (name) values ($1) on conflict do nothing", name.as_str())
        .execute(&mut *transaction)
        .await?;
    sqlx::query!(
        r#"
        update agents
        set debounce = coalesce($2, debounce),
            max_wait = coalesce($3, max_wait),
            max_turn_messages = coalesce($4, max_turn_messages),
            max_attempts = coalesce($5, max_attempts),
            retry_backoff = coalesce($6, retry_backoff),
            retry_backoff_max = coalesce($7, retry_backoff_max),
            lease = coalesce($8, lease),
            turn_timeout = coalesce($9, turn_timeout),
            dispatch_timeout = coalesce($10, dispatch_timeout),
            max_content_bytes = coalesce($11, max_content_bytes),
            paused = coalesce($12, paused)
        where name = $1
        "#,
        name.as_str(),
        change.debounce,
        change.max_wait,
        change.max_turn_messages,
        change.max_attempts,
        change.retry_backoff,
        change.retry_backoff_max,
        change.lease,
        change.turn_timeout,
        change.dispatch_timeout,
        change.max_content_bytes,
        change.paused,
    )
    .execute(&mut *transaction)
    .await?;
    transaction.commit().await
}

/// The rule that a constraint of `agents` states, as Postgres tells it.
pub(super) async fn rule(pool: &PgPool, constraint: &str) -> Result<Option<String>, sqlx::Error> {
    let definition = sqlx::query_scalar!(
        r#"
        select pg_get_expr(conbin, conrelid) as "rule!"
        from pg_constraint
        where conname = $1 and conrelid = 'agents'::regclass and contype = 'c'
        "#,
        constraint,
    )
    .fetch_optional(pool)
    .await?;
    Ok(definition.map(|rule| rule.replace("::interval", "")))
}

fn in_words(interval: &PgInterval) -> String {
    let days = i64::from(interval.days) + 30 * i64::from(interval.months);
    let micros = interval.microseconds.saturating_add(days.saturating_mul(86_400_000_000));
    humantime::format_duration(Duration::from_micros(u64::try_from(micros).unwrap_or(0))).to_string()
}
