//! Recovery: every run whose lease has expired is settled, by whoever looks. Needs Postgres alone, so a relay does it while
//! its broker is down, and a consumer without a broker does it for itself.

use futures_util::{StreamExt, stream};
use sqlx::PgPool;

use crate::{
    failpoint,
    ids::{ConversationId, RunId},
    settle::{self, Settled},
    sqlstate,
};

/// Lanes looked at in one go, so that other work is never far away.
const PAGE: i64 = 256;
/// Settles under way at once.
const AT_ONCE: usize = 4;

struct Expired {
    conversation_id: ConversationId,
    run_id: RunId,
}

/// Settles the runs whose lease has expired, the longest ago first, a page at most. Returns how many it settled: one that
/// somebody holds, or that Postgres refuses now, is work for a later look, and no reason to look again at once.
pub async fn recover_expired(pool: &PgPool) -> Result<usize, sqlx::Error> {
    let expired = expired(pool).await?;
    let settled = stream::iter(expired)
        .map(|lane| recover_one(pool, lane))
        .buffer_unordered(AT_ONCE)
        .filter(|settled| std::future::ready(*settled));
    Ok(settled.count().await)
}

async fn recover_one(pool: &PgPool, lane: Expired) -> bool {
    if failpoint::reach("mid_reconcile").await.is_err() {
        return false;
    }
    match settle::recover(pool, &lane.conversation_id, lane.run_id).await {
        Ok(Settled::Busy) => {
            tracing::debug!(run_id = %lane.run_id, "a lease has expired; somebody holds its conversation");
            false
        }
        Ok(settled) => {
            tracing::info!(run_id = %lane.run_id, ?settled, "a lease had expired");
            true
        }
        Err(error) => {
            tracing::warn!(run_id = %lane.run_id, error = sqlstate::safe_text(&error), "recovery failed");
            false
        }
    }
}

async fn expired(pool: &PgPool) -> Result<Vec<Expired>, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    let expired = sqlx::query_as!(
        Expired,
        r#"
        select conversation_id as "conversation_id: ConversationId", run_id as "run_id!: RunId"
        from agent_lanes
        where state = 'running' and wake_at <= (select clock_timestamp())
        order by wake_at
        limit $1
        "#,
        PAGE,
    )
    .fetch_all(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(expired)
}
