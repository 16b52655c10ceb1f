//! What a user or an operator does to turns and messages: retry, cancel, read, delete, and prune what is over.
//!
//! The rules live in SQL functions, which any language may call; this is their Rust face. Each works within the caller's
//! transaction, or as one of its own on a plain connection, and says what it did: that nothing was left to do is an answer,
//! not an error. A double click is harmless.

mod prune;

use std::borrow::Cow;

use sqlx::PgConnection;

pub use self::prune::{Prune, Pruned};
use crate::ids::{ConversationId, MessageId, TurnId};

/// What a retry did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retried {
    /// The turn's messages are pending again. They will be answered as a turn of their own, with a new id, attempts and
    /// idempotency keys.
    Retried,
    /// The turn is not failed, or not any more: answered, in flight, retried already, pruned, or its messages are deleted.
    NothingToRetry,
}

/// What a cancel did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cancelled {
    /// The turn was not running: its cancellation is written.
    Cancelled,
    /// The turn runs: its handler is being stopped, and the end of its run writes the cancellation, and nothing else.
    Requested,
    /// The turn is over.
    NothingToCancel,
}

/// What a deletion did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deleted {
    /// The message is a tombstone: its content is gone, its id is taken for ever.
    Deleted,
    /// It was one already: nothing was written.
    Duplicate,
}

/// Why an action was refused: nothing was written. After any of these the caller's transaction is aborted, as after any
/// failed statement; use a savepoint to go on.
#[derive(Debug, thiserror::Error)]
pub enum ActionError {
    /// No such turn was ever claimed, or its conversation is deleted.
    #[error("turn_not_found: there is no such turn_id")]
    TurnNotFound,
    /// Only a retry that confirms it may double a side effect.
    #[error("needs_confirmation: a side effect of this turn may have happened, and a retry may double it")]
    NeedsConfirmation,
    /// There is no such message, or its conversation is deleted.
    #[error("message_not_found: there is no such message_id")]
    MessageNotFound,
    /// There is no such conversation.
    #[error("conversation_not_found: there is no such conversation_id")]
    ConversationNotFound,
    /// The statement failed for a reason of its own.
    #[error("the action failed: {}", crate::sqlstate::safe_text(.0))]
    Database(#[source] sqlx::Error),
}

impl From<sqlx::Error> for ActionError {
    fn from(error: sqlx::Error) -> Self {
        let code = error.as_database_error().and_then(|error| error.code().map(Cow::into_owned));
        match code.as_deref() {
            Some("OB002") => Self::ConversationNotFound,
            Some("OB010") => Self::TurnNotFound,
            Some("OB011") => Self::NeedsConfirmation,
            Some("OB012") => Self::MessageNotFound,
            _ => Self::Database(error),
        }
    }
}

/// Answers a failed turn again. The error that the user has seen stays.
///
/// A turn with a side effect that may have happened is retried only with `confirm_side_effects`.
pub async fn retry_turn(
    connection: &mut PgConnection,
    turn: TurnId,
    confirm_side_effects: bool,
) -> Result<Retried, ActionError> {
    let verdict = sqlx::query_scalar!(
        r#"select retry_turn($1, $2) as "verdict!""#,
        turn as TurnId,
        confirm_side_effects
    )
    .fetch_one(connection)
    .await?;
    Ok(if verdict == "retried" { Retried::Retried } else { Retried::NothingToRetry })
}

/// Stops a turn. Against a finish exactly one wins: after anything but [`Cancelled::NothingToCancel`] no reply follows.
pub async fn cancel_turn(connection: &mut PgConnection, turn: TurnId) -> Result<Cancelled, ActionError> {
    let verdict = sqlx::query_scalar!(r#"select cancel_turn($1) as "verdict!""#, turn as TurnId)
        .fetch_one(connection)
        .await?;
    Ok(match verdict.as_str() {
        "cancelled" => Cancelled::Cancelled,
        "cancel_requested" => Cancelled::Requested,
        _ => Cancelled::NothingToCancel,
    })
}

/// Notes that the user has read up to `up_to_seq`, never less than before, and returns how many outcomes are unread.
pub async fn mark_read(
    connection: &mut PgConnection,
    conversation: &ConversationId,
    up_to_seq: i64,
) -> Result<i32, ActionError> {
    let unread =
        sqlx::query_scalar!(r#"select mark_read($1, $2) as "unread!""#, conversation.as_str(), up_to_seq)
            .fetch_one(connection)
            .await?;
    Ok(unread)
}

/// Deletes a user's message or an outcome, and leaves a tombstone.
///
/// A message that waits leaves its turn. One in flight ends its turn, and the others of that turn are answered without it;
/// but where a side effect may have happened the whole turn is cancelled.
pub async fn delete_message(
    connection: &mut PgConnection,
    message: &MessageId,
) -> Result<Deleted, ActionError> {
    let verdict = sqlx::query_scalar!(r#"select delete_message($1) as "verdict!""#, message.as_str())
        .fetch_one(connection)
        .await?;
    Ok(if verdict == "deleted" { Deleted::Deleted } else { Deleted::Duplicate })
}
