//! What Postgres says, without what it quotes: a `DETAIL` or a message can hold values of a row, a SQLSTATE and a
//! constraint's name cannot.

use std::fmt;

/// A failed statement as it may be logged.
#[must_use]
pub fn safe_text(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Database(database) => {
            Safe { code: database.code().as_deref(), constraint: database.constraint() }.to_string()
        }
        sqlx::Error::Io(io) => format!("connection: {}", io.kind()),
        sqlx::Error::Tls(_) => "TLS handshake failed".into(),
        sqlx::Error::PoolTimedOut => "no free connection within the pool's timeout".into(),
        sqlx::Error::PoolClosed => "the pool is closed".into(),
        sqlx::Error::RowNotFound => "no row".into(),
        sqlx::Error::Protocol(_) => "connection: protocol violation".into(),
        sqlx::Error::ColumnDecode { index, .. } => format!("column {index} cannot be read"),
        _ => "driver failure".into(),
    }
}

struct Safe<'a> {
    code: Option<&'a str>,
    constraint: Option<&'a str>,
}

impl fmt::Display for Safe<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SQLSTATE {}", self.code.unwrap_or("unknown"))?;
        if let Some(meaning) = self.code.and_then(meaning) {
            write!(f, " ({meaning})")?;
        }
        self.constraint.map_or(Ok(()), |constraint| write!(f, ", constraint {constraint}"))
    }
}

/// The codes that somebody at a terminal will meet, in words.
fn meaning(code: &str) -> Option<&'static str> {
    Some(match code {
        "28P01" => "password refused",
        "28000" => "login refused",
        "3D000" => "no such database",
        "42501" => "permission denied",
        "42P01" => "no such table: is the database migrated?",
        "40P01" => "deadlock",
        "40001" => "serialization failure",
        "53300" => "too many connections",
        "55P03" => "a lock was not free in time",
        "57014" => "statement timeout",
        "57P01" | "57P02" | "57P03" => "the server is shutting down or starting",
        "25P03" => "idle in transaction for too long",
        _ => return None,
    })
}

/// True where Postgres refused the values themselves (NUL, a broken surrogate, too large, a CHECK): the same statement
/// will fail again, whoever sends it.
#[must_use]
pub fn is_rejected_content(error: &sqlx::Error) -> bool {
    let sqlx::Error::Database(database) = error else { return false };
    // 22: data exception; 23514: CHECK; 54: program limit exceeded.
    database.code().is_some_and(|code| code.starts_with("22") || code == "23514" || code.starts_with("54"))
}

/// True where somebody else was in the way: the same transaction may get through when it is tried again.
#[must_use]
pub fn is_contention(error: &sqlx::Error) -> bool {
    let sqlx::Error::Database(database) = error else { return false };
    // 40: transaction rollback; 55P03: a lock that was not free in time.
    database.code().is_some_and(|code| code.starts_with("40") || code == "55P03")
}

/// True where the connection broke, so that a commit may or may not have happened.
#[must_use]
pub fn is_ambiguous(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed => true,
        // 57P01 and its kin, and 08: the server ended the session.
        sqlx::Error::Database(database) => {
            database.code().is_some_and(|code| code.starts_with("57P") || code.starts_with("08"))
        }
        _ => false,
    }
}
