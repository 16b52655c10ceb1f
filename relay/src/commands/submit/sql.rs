//! Many messages in one statement, and their outcomes in another.

use std::collections::HashMap;

use serde::Serialize;
use shared::{
    ids::{AgentName, ConversationId, TurnId},
    submit::Message,
};
use sqlx::PgConnection;

/// What became of a submitted message.
#[derive(Debug, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub(super) enum Outcome {
    /// Its turn was answered.
    Reply { turn_id: TurnId, content: String },
    /// Its turn failed, and this is what the user sees.
    Error { turn_id: TurnId, content: String, error: Option<serde_json::Value> },
    /// The message, its conversation or its record is gone: nothing more will come.
    Gone,
}

/// Makes the conversations that are missing. Their ids must be sorted: that is the order in which they are locked.
pub(super) async fn create_conversations(
    connection: &mut PgConnection,
    ids: &[ConversationId],
    agent: &AgentName,
) -> Result<(), sqlx::Error> {
    sqlx::query!(
        r#"select create_conversation(id, $2) as "verdict!" from unnest($1::text[]) as ids (id)"#,
        &texts(ids),
        agent.as_str(),
    )
    .fetch_all(connection)
    .await?;
    Ok(())
}

/// One of these conversations that belongs to another agent than this, and that agent.
pub(super) async fn of_another_agent(
    connection: &mut PgConnection,
    ids: &[ConversationId],
    agent: &AgentName,
) -> Result<Option<(ConversationId, String)>, sqlx::Error> {
    let found = sqlx::query!(
        r#"select id as "id: ConversationId", agent from conversations where id = any($1) and agent <> $2 limit 1"#,
        &texts(ids),
        agent.as_str(),
    )
    .fetch_optional(connection)
    .await?;
    Ok(found.map(|row| (row.id, row.agent)))
}

fn texts(ids: &[ConversationId]) -> Vec<String> {
    ids.iter().map(ToString::to_string).collect()
}

/// Submits messages one after the other; true for each that was created. Sorted by conversation, as above.
pub(super) async fn submit(
    connection: &mut PgConnection,
    messages: &[&Message],
) -> Result<Vec<bool>, sqlx::Error> {
    let column =
        |of: fn(&Message) -> &str| messages.iter().map(|message| of(message).to_owned()).collect::<Vec<_>>();
    sqlx::query_scalar!(
        r#"
        select submit_message(message_id, conversation_id, content) = 'created' as "created!"
        from unnest($1::text[], $2::text[], $3::text[]) as messages (message_id, conversation_id, content)
        "#,
        &column(|message| message.message_id.as_str()),
        &column(|message| message.conversation_id.as_str()),
        &column(|message| message.content.as_str()),
    )
    .fetch_all(connection)
    .await
}

/// The outcomes of those of `message_ids` that have one.
pub(super) async fn outcomes(
    connection: &mut PgConnection,
    message_ids: &[String],
) -> Result<HashMap<String, Outcome>, sqlx::Error> {
    let rows = sqlx::query!(
        r#"
        select asked.id as "id!", o.status as "status?", m.role as "role?",
               m.turn_id as "turn_id: TurnId", m.content as "content?", m.error
        from unnest($1::text[]) as asked (id)
        left join agent_outbox o on o.message_id = asked.id
        left join messages own on own.id = asked.id and own.deleted_at is null and o.id is null
        left join lateral (
            (select a.* from messages a where a.turn_id = o.turn_id and a.role <> 'user')
            union all
            -- its record was pruned: the first turn that reaches up to it is its own, the last outcome of that its answer
            (select a.* from messages a
             where a.conversation_id = own.conversation_id and a.reply_to_seq >= own.seq and a.role <> 'user'
             order by a.reply_to_seq, a.seq desc limit 1)
        ) m on true
        "#,
        message_ids,
    )
    .fetch_all(connection)
    .await?;
    let outcomes = rows.into_iter().filter_map(|row| {
        if matches!(row.status.as_deref(), Some("pending" | "processing")) {
            return None;
        }
        let outcome = match (row.role.as_deref(), row.turn_id, row.content) {
            (Some("assistant"), Some(turn_id), Some(content)) => Outcome::Reply { turn_id, content },
            (Some(_), Some(turn_id), Some(content)) => Outcome::Error { turn_id, content, error: row.error },
            _ => Outcome::Gone,
        };
        Some((row.id, outcome))
    });
    Ok(outcomes.collect())
}
