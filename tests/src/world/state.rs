//! The state of the pipeline, for assertions and for the report of one that failed: ids and states, never content.

use anyhow::Result;
use sqlx::{FromRow, PgPool};
use uuid::Uuid;

use super::World;

/// What a lane is doing.
#[derive(Debug, Clone, PartialEq, Eq, FromRow)]
pub struct Lane {
    /// `idle`, `waiting`, `queued` or `running`.
    pub state: String,
    /// The turn in flight, or the one that waits for its next attempt.
    pub turn_id: Option<Uuid>,
    /// The run in flight.
    pub run_id: Option<Uuid>,
    /// Which attempt at the turn it is.
    pub attempt: i32,
    /// How often the run was handed to the broker.
    pub dispatches: i32,
    /// The consumer that runs it.
    pub worker: Option<String>,
    /// Whether the user wants it stopped.
    pub cancel_requested: bool,
}

/// What the user sees of a finished turn.
#[derive(Debug, Clone, PartialEq, FromRow)]
pub struct Outcome {
    /// Its id.
    pub id: String,
    /// Its place in the conversation.
    pub seq: i64,
    /// `assistant` or `error`.
    pub role: String,
    /// Its text.
    pub content: String,
    /// The turn that it ends.
    pub turn_id: Uuid,
    /// The run that wrote it.
    pub run_id: Option<Uuid>,
    /// The last message that it answers.
    pub reply_to_seq: i64,
    /// Why the turn failed.
    pub error: Option<serde_json::Value>,
}

impl World {
    /// What the lane of a conversation is doing.
    pub async fn lane(&self, conversation: &str) -> Result<Lane> {
        let lane = sqlx::query_as(
            "select state, turn_id, run_id, attempt, dispatches, worker, cancel_requested
             from agent_lanes where conversation_id = $1",
        );
        Ok(lane.bind(conversation).fetch_one(&self.pool).await?)
    }

    /// The outcomes of a conversation, in order.
    pub async fn outcomes(&self, conversation: &str) -> Result<Vec<Outcome>> {
        let outcomes = sqlx::query_as(
            "select id, seq, role, content, turn_id, run_id, reply_to_seq, error
             from messages where conversation_id = $1 and role <> 'user' order by seq",
        );
        Ok(outcomes.bind(conversation).fetch_all(&self.pool).await?)
    }

    /// The number that a statement returns, such as a `count(*)`.
    pub async fn count(&self, sql: &'static str) -> Result<i64> {
        Ok(sqlx::query_scalar(sql).fetch_one(&self.pool).await?)
    }
}

/// Whether nothing is left to do.
pub(super) async fn is_quiet(pool: &PgPool) -> Result<bool> {
    let quiet = sqlx::query_scalar(
        "select not exists (select from agent_lanes where state <> 'idle')
            and not exists (select from agent_outbox where status in ('pending', 'processing'))",
    );
    Ok(quiet.fetch_one(pool).await?)
}

/// The lanes that are not idle, the open rows and the latest runs, a few of each.
pub(super) async fn describe(pool: &PgPool) -> String {
    let parts = [
        (
            "lanes",
            "select format('%s %s turn=%s run=%s attempt=%s dispatches=%s worker=%s due in %s', conversation_id,
                state, turn_id, run_id, attempt, dispatches, worker, wake_at - clock_timestamp())
             from agent_lanes where state <> 'idle' order by wake_at limit 10",
        ),
        (
            "rows",
            "select format('%s: %s', status, count(*)) from agent_outbox group by status order by status",
        ),
        (
            "open rows",
            "select format('%s of %s %s turn=%s run=%s attempts=%s generation=%s', message_id, conversation_id,
                status, turn_id, run_id, attempts, generation)
             from agent_outbox where status in ('pending', 'processing') order by id limit 10",
        ),
        (
            "latest runs",
            "select format('%s of %s turn=%s attempt=%s %s by %s', run_id, conversation_id, turn_id, attempt,
                outcome, worker)
             from agent_runs order by ended_at desc limit 10",
        ),
    ];
    let mut text = String::new();
    for (title, sql) in parts {
        let lines = match sqlx::query_scalar::<_, String>(sql).fetch_all(pool).await {
            Ok(lines) => lines,
            Err(error) => vec![format!("cannot be read: {error}")],
        };
        text += &[&[format!("{title}:")], lines.as_slice()].concat().join("\n  ");
        text.push('\n');
    }
    text
}
