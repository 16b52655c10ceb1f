//! The producer's side: a user's message, its outbox row and its lane, in the caller's own transaction.
//!
//! The rules live in the SQL function `submit_message`, which any language may call; this is its Rust face.

use sqlx::PgConnection;

use crate::ids::{AgentName, ConversationId, MessageId};

/// A user's message to be answered.
#[derive(Clone)]
pub struct Message {
    /// Where it belongs. The conversation must exist.
    pub conversation_id: ConversationId,
    /// Named by the client: the key by which a repeated submit is known.
    pub message_id: MessageId,
    /// The text: at most the agent's `max_content_bytes`.
    pub content: String,
    /// The producer's W3C `traceparent`.
    pub trace_context: Option<String>,
}

/// What became of a submit that was not refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submitted {
    /// Message, outbox row and lane are written.
    Created,
    /// The same message was there already: nothing was written.
    Duplicate,
}

/// Why a submit was refused: nothing was written. After any of these the caller's transaction is aborted, as after any
/// failed statement; use a savepoint to go on.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// The id is taken by another content or conversation.
    #[error("message_id_conflict: message_id is taken by another content or conversation")]
    MessageIdConflict,
    /// The id is a deleted message's, and is never revived.
    #[error("message_deleted: message_id belongs to a deleted message")]
    MessageDeleted,
    /// A submit never makes or revives a conversation.
    #[error("conversation_not_found: there is no such conversation_id")]
    ConversationNotFound,
    /// Over the agent's `max_content_bytes`.
    #[error("content_too_large: content is over the agent's max_content_bytes")]
    ContentTooLarge,
    /// There is no such agent.
    #[error("agent_not_found: there is no such agent")]
    AgentNotFound,
    /// Postgres keeps no NUL in a text.
    #[error("content_invalid: content must not contain NUL")]
    ContentNul,
    /// A `traceparent` has 55 bytes; more than 512, or a NUL, is none.
    #[error("trace_context_invalid: trace_context must have at most 512 bytes and no NUL")]
    TraceContextInvalid,
    /// The statement failed for a reason of its own.
    #[error("submit failed: {}", crate::sqlstate::safe_text(.0))]
    Database(#[source] sqlx::Error),
}

impl From<sqlx::Error> for SubmitError {
    fn from(error: sqlx::Error) -> Self {
        let code = error.as_database_error().and_then(|error| error.code().map(std::borrow::Cow::into_owned));
        match code.as_deref() {
            Some("OB001") => Self::MessageIdConflict,
            Some("OB002") => Self::ConversationNotFound,
            Some("OB003") => Self::ContentTooLarge,
            Some("OB004") => Self::MessageDeleted,
            Some("OB005") => Self::AgentNotFound,
            Some("OB009") => Self::TraceContextInvalid,
            _ => Self::Database(error),
        }
    }
}

/// Submits one message within the caller's transaction (or as one of its own, on a plain connection).
pub async fn submit(connection: &mut PgConnection, message: &Message) -> Result<Submitted, SubmitError> {
    if message.content.contains('\0') {
        return Err(SubmitError::ContentNul);
    }
    if message.trace_context.as_ref().is_some_and(|context| context.contains('\0')) {
        return Err(SubmitError::TraceContextInvalid);
    }
    let verdict = sqlx::query_scalar!(
        r#"select submit_message($1, $2, $3, $4) as "verdict!""#,
        message.message_id.as_str(),
        message.conversation_id.as_str(),
        message.content,
        message.trace_context.as_deref(),
    )
    .fetch_one(connection)
    .await?;
    Ok(if verdict == "created" { Submitted::Created } else { Submitted::Duplicate })
}

/// Makes a conversation unless it is there already, in which case its agent stays as it is.
pub async fn create_conversation(
    connection: &mut PgConnection,
    conversation: &ConversationId,
    agent: &AgentName,
) -> Result<Submitted, SubmitError> {
    let verdict = sqlx::query_scalar!(
        r#"select create_conversation($1, $2) as "verdict!""#,
        conversation.as_str(),
        agent.as_str(),
    )
    .fetch_one(connection)
    .await?;
    Ok(if verdict == "created" { Submitted::Created } else { Submitted::Duplicate })
}
