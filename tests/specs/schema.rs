//! The schema: what each guard refuses, what each table says of itself, and what readers see of a conversation.
//!
//! Guards are the last word of the protocol: whatever a process does wrong, these tables stay right.

mod catalog;
mod deletion;
mod guards;
mod lanes;
mod status;

use anyhow::{Context, Result};
use sqlx::{AssertSqlSafe, PgPool};

/// Runs one statement.
async fn execute(pool: &PgPool, sql: &str) -> Result<()> {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await.with_context(|| sql.to_owned())?;
    Ok(())
}

/// The constraint that refuses a statement, or what became of it instead.
async fn refused_by(pool: &PgPool, sql: &str) -> String {
    match sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await {
        Ok(_) => "nothing".into(),
        Err(sqlx::Error::Database(error)) => {
            error.constraint().map_or_else(|| error.to_string(), str::to_owned)
        }
        Err(error) => error.to_string(),
    }
}

/// What a question about the catalog found; empty where everything is as it must be.
async fn offenders(pool: &PgPool, question: &'static str) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar(question).fetch_all(pool).await?)
}
