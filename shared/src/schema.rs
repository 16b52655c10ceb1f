//! The schema that this code was built for, and the check that the database has exactly it.

use sqlx::{PgPool, migrate::Migrator};

static MIGRATOR: Migrator = sqlx::migrate!("../migrations");

/// Why the schema is not as this code needs it.
#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    /// Nothing, or not everything, was applied.
    #[error("the database's schema is at version {found}, this binary needs {needed}: run `relay migrate`")]
    Unmigrated {
        /// The newest applied version; 0: none.
        found: i64,
        /// The newest version that this binary knows.
        needed: i64,
    },
    /// A newer binary migrated it.
    #[error("the database's schema is at version {found}, this binary knows {known}: use a newer binary")]
    Newer {
        /// The newest applied version.
        found: i64,
        /// The newest version that this binary knows.
        known: i64,
    },
    /// A migration was edited after it was applied, which is done to unreleased ones only.
    #[error(
        "migration {0} was applied to the database in another form than this binary has: use the binary that applied it, or a new database"
    )]
    Edited(i64),
    /// A migration failed; nothing of it was kept.
    #[error("a migration failed: {0}")]
    Migrate(#[source] sqlx::migrate::MigrateError),
    /// The versions could not be read.
    #[error("cannot read the schema's version: {}", crate::sqlstate::safe_text(.0))]
    Read(#[source] sqlx::Error),
}

fn newest_known() -> i64 {
    MIGRATOR.iter().map(|migration| migration.version).max().unwrap_or(0)
}

/// Applies what is missing, each migration in a transaction of its own. Safe to run from several processes at once.
pub async fn migrate(pool: &PgPool) -> Result<(), SchemaError> {
    MIGRATOR.run(pool).await.map_err(|error| match error {
        sqlx::migrate::MigrateError::VersionMissing(found) => {
            SchemaError::Newer { found, known: newest_known() }
        }
        sqlx::migrate::MigrateError::VersionMismatch(version) => SchemaError::Edited(version),
        other => SchemaError::Migrate(other),
    })
}

/// Refuses a database that lacks a migration, or that has one which this code does not know.
pub async fn require_current(pool: &PgPool) -> Result<(), SchemaError> {
    let needed = newest_known();
    let found = newest_applied(pool).await.map_err(SchemaError::Read)?;
    match found.unwrap_or(0) {
        found if found < needed => Err(SchemaError::Unmigrated { found, needed }),
        found if found > needed => Err(SchemaError::Newer { found, known: needed }),
        _ => Ok(()),
    }
}

/// In a transaction, as every statement: a pooler may give each one another session.
async fn newest_applied(pool: &PgPool) -> Result<Option<i64>, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    // The table is the migrator's, so it may be missing: the one statement that cannot be checked at compile time.
    let found = sqlx::query_scalar("select max(version) from _sqlx_migrations where success")
        .fetch_one(&mut *transaction)
        .await;
    transaction.rollback().await?;
    match found {
        Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("42P01") => Ok(None),
        found => found,
    }
}
