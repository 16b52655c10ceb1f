//! `relay retry` and `relay cancel`: one turn, decided by somebody who looked at it.

use std::io::Write;

use serde::Serialize;
use shared::{
    actions::{self, ActionError, Cancelled, Retried},
    ids::TurnId,
    settings::DatabaseArgs,
};
use sqlx::Connection as _;

use super::{CommandError, connect, output, turn_id};

#[derive(Debug, clap::Args)]
pub(super) struct RetryArgs {
    /// The failed turn, as `relay failed list` names it.
    #[arg(value_parser = turn_id)]
    turn: TurnId,
    /// Retry also where a side effect of the turn may have happened, and may then happen twice.
    #[arg(long)]
    confirm_side_effects: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    database: DatabaseArgs,
}

#[derive(Debug, clap::Args)]
pub(super) struct CancelArgs {
    /// The turn, as `relay status CONVERSATION` names it.
    #[arg(value_parser = turn_id)]
    turn: TurnId,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    database: DatabaseArgs,
}

#[derive(Debug, Serialize)]
struct Done {
    turn_id: TurnId,
    outcome: &'static str,
}

pub(super) async fn retry(args: RetryArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let pool = connect(&args.database, "relay retry").await?;
    let mut connection = pool.acquire().await?;
    let mut transaction = connection.begin().await?;
    let retried = actions::retry_turn(&mut transaction, args.turn, args.confirm_side_effects)
        .await
        .map_err(|error| explain(args.turn, error))?;
    transaction.commit().await?;
    let (outcome, meaning) = match retried {
        Retried::Retried => ("retried", "it will be answered as a turn of its own"),
        Retried::NothingToRetry => ("nothing_to_retry", "it is not failed, or not any more"),
    };
    print(out, args.json, &Done { turn_id: args.turn, outcome }, meaning)
}

pub(super) async fn cancel(args: CancelArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let pool = connect(&args.database, "relay cancel").await?;
    let mut connection = pool.acquire().await?;
    let mut transaction = connection.begin().await?;
    let cancelled =
        actions::cancel_turn(&mut transaction, args.turn).await.map_err(|error| explain(args.turn, error))?;
    transaction.commit().await?;
    let (outcome, meaning) = match cancelled {
        Cancelled::Cancelled => ("cancelled", "it was not running"),
        Cancelled::Requested => ("cancel_requested", "its handler is being stopped"),
        Cancelled::NothingToCancel => ("nothing_to_cancel", "it is over"),
    };
    print(out, args.json, &Done { turn_id: args.turn, outcome }, meaning)
}

fn print(out: &mut dyn Write, json: bool, done: &Done, meaning: &str) -> Result<(), CommandError> {
    if json {
        return Ok(output::json(out, done)?);
    }
    Ok(writeln!(out, "{} {}: {meaning}", done.outcome, done.turn_id)?)
}

/// A refusal, and how to go on.
fn explain(turn: TurnId, error: ActionError) -> CommandError {
    match error {
        ActionError::TurnNotFound => CommandError::no_turn(turn),
        ActionError::NeedsConfirmation => CommandError::Unfinished(format!(
            "{error}. See `relay failed show {turn}`, then retry with --confirm-side-effects"
        )),
        error => error.into(),
    }
}
