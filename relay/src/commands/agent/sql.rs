//! The policy of agents, as a table row and as the operator writes it.

use std::{fmt, time::Duration};

use serde::{Serialize, Serializer};
use shared::ids::AgentName;
use sqlx::{PgConnection, postgres::types::PgInterval};

/// A duration of a policy, written as it is given: `500ms`, `10s`, `5m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::commands) struct Span(pub(super) Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_duration(self.0).fmt(f)
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl From<PgInterval> for Span {
    /// A month counts as 30 days, as Postgres itself compares it.
    fn from(interval: PgInterval) -> Self {
        let days = i64::from(interval.days) + 30 * i64::from(interval.months);
        let micros = interval.microseconds.saturating_add(days.saturating_mul(86_400_000_000));
        Self(Duration::from_micros(u64::try_from(micros).unwrap_or(0)))
    }
}

/// A row of `agents`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(in crate::commands) struct Agent {
    pub(in crate::commands) name: String,
    pub(super) debounce: Span,
    pub(super) max_wait: Span,
    pub(super) max_turn_messages: i32,
    pub(super) max_attempts: i32,
    pub(super) retry_backoff: Span,
    pub(super) retry_backoff_max: Span,
    pub(super) lease: Span,
    pub(super) turn_timeout: Span,
    pub(super) dispatch_timeout: Span,
    pub(super) max_content_bytes: i32,
    pub(in crate::commands) paused: bool,
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

impl Change {
    /// The agent as it would be, in all that can contradict itself.
    pub(super) fn applied_to(&self, agent: &Agent) -> Agent {
        let span = |new: Option<PgInterval>, old: Span| new.map_or(old, Span::from);
        Agent {
            debounce: span(self.debounce, agent.debounce),
            max_wait: span(self.max_wait, agent.max_wait),
            retry_backoff: span(self.retry_backoff, agent.retry_backoff),
            retry_backoff_max: span(self.retry_backoff_max, agent.retry_backoff_max),
            ..agent.clone()
        }
    }
}

/// Every agent, by name.
pub(in crate::commands) async fn agents(connection: &mut PgConnection) -> Result<Vec<Agent>, sqlx::Error> {
    sqlx::query_as!(Agent, "select * from agents order by name").fetch_all(connection).await
}

/// Makes the agent with the defaults of a policy; false: it is there already.
pub(super) async fn make(connection: &mut PgConnection, name: &AgentName) -> Result<bool, sqlx::Error> {
    let made = sqlx::query!("insert into agents (name) values ($1) on conflict do nothing", name.as_str())
        .execute(connection)
        .await?;
    Ok(made.rows_affected() == 1)
}

/// The agent, which nobody else changes until this transaction ends.
pub(super) async fn lock(connection: &mut PgConnection, name: &AgentName) -> Result<Agent, sqlx::Error> {
    sqlx::query_as!(Agent, "select * from agents where name = $1 for no key update", name.as_str())
        .fetch_one(connection)
        .await
}

/// Changes what is to be changed.
pub(super) async fn change(
    connection: &mut PgConnection,
    name: &AgentName,
    change: &Change,
) -> Result<(), sqlx::Error> {
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
    .execute(connection)
    .await?;
    Ok(())
}
