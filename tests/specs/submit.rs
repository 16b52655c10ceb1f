//! Submitting: what a producer is answered, and what is written for it, in its own transaction or not at all.

mod ids;
mod isolation;
mod notify;
mod races;
mod verdicts;

use anyhow::{Context, Result};
use sqlx::{Connection, PgConnection, PgPool, postgres::PgDatabaseError};
use tests::World;

/// The answer of `submit_message`: its verdict, or the error's code, text and field.
pub(crate) async fn submit(
    connection: &mut PgConnection,
    message: &str,
    conversation: &str,
    content: &str,
) -> String {
    let verdict = sqlx::query_scalar("select submit_message($1, $2, $3)")
        .bind(message)
        .bind(conversation)
        .bind(content)
        .fetch_one(connection)
        .await;
    verdict.unwrap_or_else(|error| refusal(&error))
}

/// An error as a producer sees it.
fn refusal(error: &sqlx::Error) -> String {
    let Some(error) = error.as_database_error().and_then(|e| e.try_downcast_ref::<PgDatabaseError>()) else {
        return error.to_string();
    };
    let field = error.column().map(|column| format!(" ({column})")).unwrap_or_default();
    match error.code() {
        code if code.starts_with("OB") => format!("{}{field}", error.message()),
        code => format!("{code}{field}"),
    }
}

/// Every version of every row that a submit could write: equal before and after when nothing was written.
pub(crate) async fn written(pool: &PgPool) -> Result<Vec<String>> {
    let versions = sqlx::query_scalar(
        "select format('conversation %s %s %s', id, ctid, xmin) from conversations
         union all select format('message %s %s %s', id, ctid, xmin) from messages
         union all select format('row %s %s %s', id, ctid, xmin) from agent_outbox
         union all select format('lane %s %s %s', conversation_id, ctid, xmin) from agent_lanes",
    );
    let mut versions: Vec<String> = versions.fetch_all(pool).await?;
    versions.sort_unstable();
    Ok(versions)
}

/// A session of an application.
pub(crate) async fn session(world: &World) -> Result<PgConnection> {
    PgConnection::connect(&world.database_url()).await.context("no session")
}

/// Waits until `count` statements that contain `text` wait for a lock.
pub(crate) async fn blocked(world: &World, text: &str, count: i64) -> Result<()> {
    world
        .eventually(&format!("{count} of {text} wait for a lock"), async || {
            let waiting = sqlx::query_scalar::<_, i64>(
                "select count(*) from pg_stat_activity
                 where datname = current_database() and wait_event_type = 'Lock' and strpos(query, $1) > 0",
            );
            Ok(waiting.bind(text).fetch_one(&world.pool).await? == count)
        })
        .await
}
