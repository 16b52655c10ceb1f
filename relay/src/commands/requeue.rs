//! `relay requeue`: every failed turn again, after what made them fail was mended.

use std::io::Write;

use indicatif::ProgressBar;
use serde::Serialize;
use shared::{
    actions::{self, ActionError, Retried},
    ids::TurnId,
    settings::DatabaseArgs,
    settle::Kind,
    sqlstate,
};
use sqlx::{Connection as _, PgConnection};

use super::{
    CommandError, connect,
    failed::{
        WantedArgs,
        walk::{self, FailedTurn, Order},
    },
    output,
};

#[derive(Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(super) struct RequeueArgs {
    /// Retry every turn that is failed now; with --agent or --kind, every one of those. What its user cancelled is retried
    /// with --kind cancelled only.
    #[arg(long, required = true)]
    all: bool,
    #[command(flatten)]
    wanted: WantedArgs,
    /// Retry also the turns of which a side effect may have happened, and may then happen twice.
    #[arg(long)]
    confirm_side_effects: bool,
    /// Change nothing, and say what would be done.
    #[arg(long)]
    dry_run: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    database: DatabaseArgs,
}

/// The failed turns, by what became of each.
#[derive(Debug, Default, Serialize)]
struct Tally {
    dry_run: bool,
    retried: u64,
    needs_confirmation: u64,
    /// Left as they are: their users stopped them, and nobody asked for that kind.
    cancelled: u64,
    /// Somebody else retried or deleted them meanwhile.
    nothing_to_retry: u64,
    /// Somebody held them for too long: another call gets them.
    busy: u64,
}

/// Every turn is a transaction of its own, and leaves the list of failed ones by it: a call that was broken off is simply
/// made again. What fails again while this goes on is not retried again.
pub(super) async fn run(args: RequeueArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let pool = connect(&args.database, "relay requeue").await?;
    let mut connection = pool.acquire().await?;
    let mut tally = Tally { dry_run: args.dry_run, ..Tally::default() };
    let bar = ProgressBar::new_spinner();
    let walked = retry_all(&args, &mut connection, &mut tally, &bar).await;
    bar.finish_and_clear();
    print(out, &args, &tally)?;
    walked.map_err(|error| {
        CommandError::Unfinished(format!("{error}. What was retried stays retried; call it again to go on"))
    })?;
    if tally.busy > 0 {
        return Err(CommandError::Unfinished("some turns were busy; call it again to retry them".into()));
    }
    Ok(())
}

async fn retry_all(
    args: &RequeueArgs,
    connection: &mut PgConnection,
    tally: &mut Tally,
    bar: &ProgressBar,
) -> Result<(), ActionError> {
    let wanted = args.wanted.wanted();
    let mut transaction = connection.begin().await?;
    let started = walk::now(&mut transaction).await?;
    transaction.commit().await?;
    let order = Order::OldestFirst { until: started };
    let (mut place, mut last) = (None, false);
    while !last {
        let mut transaction = connection.begin().await?;
        let (page, is_last) = walk::next(&mut transaction, &wanted, order, &mut place).await?;
        transaction.commit().await?;
        for turn in page {
            let slot = if turn.is(Kind::Cancelled) && wanted.kind.is_none() {
                &mut tally.cancelled
            } else if args.dry_run {
                foreseen(args, tally, &turn)
            } else {
                retry(connection, tally, turn.turn_id, args.confirm_side_effects).await?
            };
            *slot += 1;
            bar.set_message(format!(
                "{} retried, {} need confirmation",
                tally.retried, tally.needs_confirmation
            ));
            bar.tick();
        }
        last = is_last;
    }
    Ok(())
}

const fn foreseen<'a>(args: &RequeueArgs, tally: &'a mut Tally, turn: &FailedTurn) -> &'a mut u64 {
    if turn.needs_confirmation && !args.confirm_side_effects {
        &mut tally.needs_confirmation
    } else {
        &mut tally.retried
    }
}

async fn retry<'a>(
    connection: &mut PgConnection,
    tally: &'a mut Tally,
    turn: TurnId,
    confirm: bool,
) -> Result<&'a mut u64, ActionError> {
    let mut transaction = connection.begin().await?;
    match actions::retry_turn(&mut transaction, turn, confirm).await {
        Ok(retried) => {
            transaction.commit().await?;
            Ok(match retried {
                Retried::Retried => &mut tally.retried,
                Retried::NothingToRetry => &mut tally.nothing_to_retry,
            })
        }
        Err(error) => {
            let slot = match &error {
                ActionError::NeedsConfirmation => &mut tally.needs_confirmation,
                ActionError::TurnNotFound => &mut tally.nothing_to_retry,
                ActionError::Database(error) if sqlstate::is_contention(error) => &mut tally.busy,
                _ => return Err(error),
            };
            transaction.rollback().await?;
            Ok(slot)
        }
    }
}

fn print(out: &mut dyn Write, args: &RequeueArgs, tally: &Tally) -> Result<(), CommandError> {
    if args.json {
        return Ok(output::json(out, tally)?);
    }
    let done = if tally.dry_run { "would be retried" } else { "retried" };
    let Tally { retried, needs_confirmation, cancelled, .. } = tally;
    writeln!(out, "{done} {retried}, need confirmation {needs_confirmation}, left cancelled {cancelled}")?;
    if tally.nothing_to_retry + tally.busy > 0 {
        writeln!(out, "changed meanwhile {}, busy {}", tally.nothing_to_retry, tally.busy)?;
    }
    if tally.needs_confirmation > 0 {
        writeln!(
            out,
            "a side effect of those may have happened: `relay failed show` each, or --confirm-side-effects"
        )?;
    }
    Ok(())
}
