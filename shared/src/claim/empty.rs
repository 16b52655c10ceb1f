//! A due lane without rows.

use sqlx::PgPool;

use crate::ids::ConversationId;

/// Decides about a due lane for which a claim found no rows: waiting for newer rows, or idle.
///
/// A claim holds only the lane, so a submit may be about to commit rows that it could not see; this takes the
/// conversation first, as submit does, and reads again. Never waits: `false` means that somebody holds the conversation,
/// and the next claim will find the lane again.
pub async fn close_empty_lane(pool: &PgPool, conversation: &ConversationId) -> Result<bool, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    let held = sqlx::query_scalar!(
        "select 1 from conversations where id = $1 for no key update skip locked",
        conversation.as_str(),
    )
    .fetch_optional(&mut *transaction)
    .await?;
    let free = held.is_some();
    if free {
        sqlx::query!("select from agent_lanes where conversation_id = $1 for update", conversation.as_str())
            .execute(&mut *transaction)
            .await?;
        sqlx::query!(
            r#"
            update agent_lanes l
            set state = case when next.created_at is null then 'idle' else 'waiting' end,
                wake_at = case when next.created_at is not null then clock_timestamp() end,
                waiting_since = next.created_at,
                turn_id = null,
                attempt = 0
            from (select 1) as one
            left join lateral (
                select o.created_at from agent_outbox o
                where o.conversation_id = $1 and o.turn_id is null
                order by o.turn_id, o.id limit 1
            ) next on true
            where l.conversation_id = $1
              and l.state = 'waiting'
              and not exists (
                  select from agent_outbox o
                  where o.conversation_id = $1 and o.turn_id = l.turn_id and o.status = 'pending')
            "#,
            conversation.as_str(),
        )
        .execute(&mut *transaction)
        .await?;
    }
    transaction.commit().await?;
    Ok(free)
}
