//! Messages committed in groups, since a commit costs more than a message; and one that is refused refuses no other.

use shared::{
    ids::AgentName,
    sqlstate,
    submit::{self, Message, SubmitError, Submitted},
};
use sqlx::{Acquire as _, PgConnection, error::DatabaseError};

use super::sql;

/// A message and the line that it came from.
pub(super) struct Numbered {
    pub(super) number: u64,
    pub(super) message: Message,
}

/// A message and what became of it.
pub(super) type Verdict = (Numbered, Result<Submitted, SubmitError>);

/// Submits a group: in one transaction, or where one is refused in halves, down to the message that is.
///
/// Conversations that are missing are made for `create`. Within a transaction they are locked in the order of their
/// ids, so that two commands never wait for each other; the messages of one conversation keep their order.
///
/// # Errors
///
/// When the database cannot go on. What was committed before stays, and is a duplicate when it is submitted again.
pub(super) async fn submit(
    connection: &mut PgConnection,
    create: Option<&AgentName>,
    mut group: Vec<Numbered>,
) -> Result<Vec<Verdict>, SubmitError> {
    group.sort_by(|one, other| one.message.conversation_id.cmp(&other.message.conversation_id));
    let mut verdicts = Vec::with_capacity(group.len());
    let mut parts = vec![group];
    while let Some(mut part) = parts.pop() {
        match submit_part(connection, create, &part).await {
            Ok(submitted) => verdicts.extend(part.into_iter().zip(submitted.into_iter().map(Ok))),
            Err(error) if ends_the_command(&error) => return Err(error),
            Err(error) if part.len() == 1 => verdicts.extend(part.pop().map(|line| (line, Err(error)))),
            Err(_) => {
                let second_half = part.split_off(part.len() / 2);
                parts.extend([second_half, part]);
            }
        }
    }
    Ok(verdicts)
}

/// Submits one message, in a transaction of its own.
pub(super) async fn submit_one(
    connection: &mut PgConnection,
    create: Option<&AgentName>,
    message: &Message,
) -> Result<Submitted, SubmitError> {
    let mut transaction = connection.begin().await?;
    if let Some(agent) = create {
        submit::create_conversation(&mut transaction, &message.conversation_id, agent).await?;
    }
    let submitted = submit::submit(&mut transaction, message).await?;
    transaction.commit().await?;
    Ok(submitted)
}

async fn submit_part(
    connection: &mut PgConnection,
    create: Option<&AgentName>,
    part: &[Numbered],
) -> Result<Vec<Submitted>, SubmitError> {
    if let [line] = part {
        return Ok(vec![submit_one(connection, create, &line.message).await?]);
    }
    let messages: Vec<&Message> = part.iter().map(|line| &line.message).collect();
    let mut transaction = connection.begin().await?;
    if let Some(agent) = create {
        let mut conversations: Vec<_> =
            messages.iter().map(|message| message.conversation_id.to_string()).collect();
        conversations.dedup();
        sql::create_conversations(&mut transaction, &conversations, agent).await?;
    }
    let created = sql::submit(&mut transaction, &messages).await?;
    transaction.commit().await?;
    Ok(created
        .into_iter()
        .map(|created| if created { Submitted::Created } else { Submitted::Duplicate })
        .collect())
}

/// Whether the next message would fare no better: all but a refused message, and a lock that was held for too long.
fn ends_the_command(error: &SubmitError) -> bool {
    let SubmitError::Database(error) = error else { return matches!(error, SubmitError::AgentNotFound) };
    let lock = |code: &str| matches!(code, "40001" | "40P01" | "55P03");
    let code = error.as_database_error().and_then(DatabaseError::code);
    !sqlstate::is_rejected_content(error) && !code.as_deref().is_some_and(lock)
}
