//! Messages committed in groups, since a commit costs more than a message; and one that is refused refuses no other.

use shared::{
    ids::{AgentName, ConversationId},
    sqlstate,
    submit::{self, Message, SubmitError, Submitted},
};
use sqlx::{Acquire as _, PgConnection, error::DatabaseError};

use super::{super::output, sql};

/// How conversations that are missing are made.
pub(super) struct Create {
    pub(super) agent: AgentName,
    /// Somebody named the agent: a conversation that is there already must have it too.
    pub(super) is_asked_for: bool,
}

/// Why a message was refused: nothing of it was written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    #[error(transparent)]
    Submit(#[from] SubmitError),
    #[error(
        "other_agent: the conversation {} belongs to the agent {agent}: leave out --agent, or name that one",
        output::shown(conversation.as_str(), 200)
    )]
    OtherAgent { conversation: ConversationId, agent: String },
}

impl From<sqlx::Error> for Refused {
    fn from(error: sqlx::Error) -> Self {
        Self::Submit(error.into())
    }
}

/// A message and the line that it came from.
pub(super) struct Numbered {
    pub(super) number: u64,
    pub(super) message: Message,
}

/// A message and what became of it.
pub(super) type Verdict = (Numbered, Result<Submitted, Refused>);

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
    create: Option<&Create>,
    mut group: Vec<Numbered>,
) -> Result<Vec<Verdict>, Refused> {
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
    create: Option<&Create>,
    message: &Message,
) -> Result<Submitted, Refused> {
    let mut transaction = connection.begin().await?;
    if let Some(create) = create {
        let conversation = &message.conversation_id;
        submit::create_conversation(&mut transaction, conversation, &create.agent).await?;
        require_agent(&mut transaction, create, std::slice::from_ref(conversation)).await?;
    }
    let submitted = submit::submit(&mut transaction, message).await?;
    transaction.commit().await?;
    Ok(submitted)
}

async fn submit_part(
    connection: &mut PgConnection,
    create: Option<&Create>,
    part: &[Numbered],
) -> Result<Vec<Submitted>, Refused> {
    if let [line] = part {
        return Ok(vec![submit_one(connection, create, &line.message).await?]);
    }
    let messages: Vec<&Message> = part.iter().map(|line| &line.message).collect();
    let mut transaction = connection.begin().await?;
    if let Some(create) = create {
        let mut conversations: Vec<_> =
            messages.iter().map(|message| message.conversation_id.clone()).collect();
        conversations.dedup();
        sql::create_conversations(&mut transaction, &conversations, &create.agent).await?;
        require_agent(&mut transaction, create, &conversations).await?;
    }
    let created = sql::submit(&mut transaction, &messages).await?;
    transaction.commit().await?;
    Ok(created
        .into_iter()
        .map(|created| if created { Submitted::Created } else { Submitted::Duplicate })
        .collect())
}

/// Refuses conversations of another agent than the one that was asked for: their turns would go where nobody looks for them.
async fn require_agent(
    connection: &mut PgConnection,
    create: &Create,
    conversations: &[ConversationId],
) -> Result<(), Refused> {
    if !create.is_asked_for {
        return Ok(());
    }
    match sql::of_another_agent(connection, conversations, &create.agent).await? {
        Some((conversation, agent)) => Err(Refused::OtherAgent { conversation, agent }),
        None => Ok(()),
    }
}

/// Whether the next message would fare no better: all but a refused message, and a lock that was held for too long.
fn ends_the_command(error: &Refused) -> bool {
    let Refused::Submit(SubmitError::Database(error)) = error else {
        return matches!(error, Refused::Submit(SubmitError::AgentNotFound));
    };
    let lock = |code: &str| matches!(code, "40001" | "40P01" | "55P03");
    let code = error.as_database_error().and_then(DatabaseError::code);
    !sqlstate::is_rejected_content(error) && !code.as_deref().is_some_and(lock)
}
