//! Prune: the records of what was settled long ago go, a page at a time, each page a short transaction of its own.

use std::time::Duration;

use sqlx::{Connection as _, PgConnection, postgres::types::PgInterval};
use uuid::Uuid;

/// Nothing here is older, and Postgres can take it from any date.
const LONGEST_AGE: Duration = Duration::from_hours(100 * 366 * 24);

/// A walk through all outbox rows and then all runs, in the order of their ids.
///
/// ```no_run
/// # async fn prune(connection: &mut sqlx::PgConnection) -> Result<(), sqlx::Error> {
/// let mut prune = shared::actions::Prune::new(std::time::Duration::from_secs(30 * 24 * 3600), 1000);
/// while let Some(pruned) = prune.page(connection).await? {
///     println!("{} rows, {} runs", pruned.rows, pruned.runs);
/// }
/// # Ok(())
/// # }
/// ```
///
/// Only what is settled and older than the age goes: whole turns, then the runs of turns that have no rows any more.
/// Messages never go, so a pruned message's id is still known. What somebody holds is left for the next walk, and a walk
/// that was broken off is simply begun again.
#[derive(Debug)]
pub struct Prune {
    older_than: PgInterval,
    batch: i32,
    next: Next,
}

#[derive(Debug)]
enum Next {
    Rows { after: i64 },
    Runs { after: Uuid },
    End,
}

/// What a page deleted.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Pruned {
    /// Outbox rows.
    pub rows: u64,
    /// Runs.
    pub runs: u64,
}

impl Prune {
    /// A walk from the beginning, which looks at `batch` rows or runs a page. Age is measured by the database's clock.
    #[must_use]
    pub fn new(older_than: Duration, batch: u32) -> Self {
        let microseconds = i64::try_from(older_than.min(LONGEST_AGE).as_micros()).unwrap_or(i64::MAX);
        Self {
            older_than: PgInterval { months: 0, days: 0, microseconds },
            batch: i32::try_from(batch.max(1)).unwrap_or(i32::MAX),
            next: Next::Rows { after: 0 },
        }
    }

    /// Prunes the next page; `None`: the walk is at its end.
    pub async fn page(&mut self, connection: &mut PgConnection) -> Result<Option<Pruned>, sqlx::Error> {
        let mut transaction = connection.begin().await?;
        let (pruned, next) = match self.next {
            Next::Rows { after } => self.rows(&mut transaction, after).await?,
            Next::Runs { after } => self.runs(&mut transaction, after).await?,
            Next::End => return Ok(None),
        };
        transaction.commit().await?;
        self.next = next;
        Ok(Some(pruned))
    }

    async fn rows(&self, connection: &mut PgConnection, after: i64) -> Result<(Pruned, Next), sqlx::Error> {
        let page = sqlx::query!(
            r#"select last_id, deleted as "deleted!" from prune_outbox($1, $2, $3)"#,
            self.older_than,
            after,
            self.batch,
        )
        .fetch_one(connection)
        .await?;
        let next = page.last_id.map_or(Next::Runs { after: Uuid::nil() }, |after| Next::Rows { after });
        Ok((Pruned { rows: count(page.deleted), runs: 0 }, next))
    }

    async fn runs(&self, connection: &mut PgConnection, after: Uuid) -> Result<(Pruned, Next), sqlx::Error> {
        let page = sqlx::query!(
            r#"select last_run, deleted as "deleted!" from prune_runs($1, $2, $3)"#,
            self.older_than,
            after,
            self.batch,
        )
        .fetch_one(connection)
        .await?;
        let next = page.last_run.map_or(Next::End, |after| Next::Runs { after });
        Ok((Pruned { rows: 0, runs: count(page.deleted) }, next))
    }
}

fn count(deleted: i64) -> u64 {
    u64::try_from(deleted).unwrap_or(0)
}
