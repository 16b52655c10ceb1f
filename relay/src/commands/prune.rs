//! `relay prune`: the records of what was settled long ago. Messages stay, and their ids stay taken.

use std::{io::Write, time::Duration};

use indicatif::ProgressBar;
use serde::Serialize;
use shared::{
    actions::Prune,
    settings::{self, DatabaseArgs},
    sqlstate,
};
use sqlx::PgConnection;

use super::{CommandError, connect, output};

/// The largest age: 1000 years, of 365.25 days each.
const AGE: Duration = Duration::from_hours(8_766_000);

#[derive(Debug, clap::Args)]
pub(super) struct PruneArgs {
    /// Delete the outbox rows and runs that were settled before this long: such as 30d, from 0s to 1000years. A failed turn
    /// that is pruned can not be retried any more.
    #[arg(long, value_name = "DURATION", value_parser = settings::duration(Duration::ZERO..=AGE))]
    older_than: Duration,
    /// Rows or runs that one transaction looks at, 1 to 100000.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = settings::number(1..=100_000_u32))]
    batch: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    database: DatabaseArgs,
}

#[derive(Debug, Default, Serialize)]
struct Tally {
    rows: u64,
    runs: u64,
}

pub(super) async fn run(args: PruneArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let pool = connect(&args.database, "relay prune").await?;
    let mut connection = pool.acquire().await?;
    let mut tally = Tally::default();
    let bar = ProgressBar::new_spinner();
    let walked = walk(&args, &mut connection, &mut tally, &bar).await;
    bar.finish_and_clear();
    if args.json {
        output::json(out, &tally)?;
    } else {
        writeln!(out, "pruned {} outbox rows and {} runs", tally.rows, tally.runs)?;
    }
    walked.map_err(|error| {
        let error = sqlstate::safe_text(&error);
        CommandError::Unfinished(format!("a statement failed: {error}. Call it again to go on"))
    })
}

async fn walk(
    args: &PruneArgs,
    connection: &mut PgConnection,
    tally: &mut Tally,
    bar: &ProgressBar,
) -> Result<(), sqlx::Error> {
    let mut prune = Prune::new(args.older_than, args.batch);
    while let Some(pruned) = prune.page(connection).await? {
        tally.rows += pruned.rows;
        tally.runs += pruned.runs;
        bar.set_message(format!("{} outbox rows and {} runs pruned", tally.rows, tally.runs));
        bar.tick();
    }
    Ok(())
}
